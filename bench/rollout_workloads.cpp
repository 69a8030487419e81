#include "bench/rollout_workloads.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "bench/timing.h"
#include "core/rng.h"

namespace cohort::bench {
namespace {

std::vector<RequestSize> equal(int64_t count, const RequestSize& size) {
  return std::vector<RequestSize>(static_cast<size_t>(count), size);
}

// Prompts of 100 to 1,024 tokens; all have the same length together with their completion.
std::vector<RequestSize> mixed(Rng& rng, int64_t count) {
  std::vector<RequestSize> out;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t prompt = rng.between(100, 1024);
    out.push_back({.prompt = prompt, .completion = 1124 - prompt});
  }
  return out;
}

// The benchmark of nano-vllm: prompts and completions, both uniform in 100 to 1,024 tokens, as
// Python's random draws them from seed 0; 142,827 tokens in, 133,966 out.
constexpr std::array<int16_t, 256> kPrompts = {
    964, 724,  484,  508, 316, 798,  439, 916,  233, 185, 147, 459,  836, 616, 571,  547,
    173, 519,  614,  420, 843, 366,  199, 240,  111, 740, 602, 983,  247, 668, 237,  727,
    521, 972,  833,  117, 489, 949,  991, 231,  460, 969, 175, 194,  671, 283, 820,  350,
    739, 375,  124,  607, 854, 442,  481, 1005, 525, 545, 175, 505,  235, 860, 645,  854,
    440, 783,  885,  534, 124, 1010, 711, 565,  336, 701, 438, 129,  729, 399, 546,  849,
    173, 258,  599,  299, 493, 627,  793, 385,  949, 687, 772, 747,  850, 799, 1022, 166,
    685, 448,  190,  841, 586, 107,  803, 673,  762, 371, 273, 569,  448, 271, 682,  805,
    808, 1024, 741,  431, 120, 362,  994, 351,  225, 404, 276, 691,  870, 906, 616,  737,
    351, 1018, 843,  376, 143, 251,  505, 633,  831, 783, 983, 935,  344, 386, 117,  369,
    463, 396,  506,  335, 177, 659,  863, 816,  377, 395, 332, 929,  559, 320, 640,  950,
    546, 204,  874,  417, 919, 704,  528, 835,  393, 156, 537, 123,  647, 510, 520,  223,
    533, 1004, 393,  328, 274, 336,  562, 585,  309, 781, 629, 209,  428, 945, 219,  380,
    238, 639,  919,  292, 775, 761,  277, 959,  198, 563, 897, 710,  232, 449, 774,  375,
    178, 187,  1002, 509, 594, 558,  383, 469,  886, 961, 550, 330,  453, 937, 1024, 370,
    214, 621,  130,  903, 268, 1005, 287, 215,  507, 636, 491, 1004, 976, 729, 974,  388,
    227, 158,  1023, 331, 630, 1012, 734, 885,  142, 895, 717, 880,  847, 714, 652,  251};
constexpr std::array<int16_t, 256> kCompletions = {
    845,  312, 607,  843, 500, 882, 178, 577, 148, 106,  729,  508, 795, 907, 713, 513, 201, 143,
    454,  195, 332,  347, 718, 925, 158, 548, 194, 896,  955,  918, 394, 544, 384, 948, 851, 353,
    584,  320, 407,  563, 325, 235, 540, 553, 762, 268,  619,  713, 532, 619, 456, 673, 392, 839,
    265,  508, 518,  629, 209, 119, 507, 103, 506, 937,  699,  908, 331, 178, 309, 358, 106, 432,
    1012, 955, 829,  243, 909, 131, 598, 336, 963, 159,  646,  272, 672, 257, 293, 553, 252, 366,
    914,  371, 981,  717, 279, 229, 970, 451, 257, 163,  160,  466, 959, 603, 227, 438, 611, 972,
    983,  191, 763,  462, 981, 609, 953, 437, 860, 334,  1017, 189, 128, 976, 247, 629, 363, 387,
    103,  879, 326,  841, 933, 421, 661, 340, 610, 706,  499,  823, 150, 853, 775, 350, 104, 155,
    153,  189, 899,  326, 546, 498, 329, 517, 600, 1000, 115,  237, 889, 304, 969, 215, 641, 141,
    116,  166, 689,  417, 227, 751, 468, 473, 123, 824,  989,  220, 492, 912, 751, 130, 671, 256,
    586,  883, 1016, 157, 746, 292, 928, 495, 995, 595,  478,  980, 563, 869, 322, 503, 403, 984,
    673,  985, 338,  203, 174, 231, 935, 739, 263, 634,  473,  698, 241, 743, 132, 697, 240, 158,
    410,  463, 114,  289, 925, 619, 336, 710, 992, 366,  808,  750, 918, 163, 132, 658, 805, 489,
    735,  366, 816,  691, 406, 352, 529, 310, 278, 141,  513,  214, 403, 322, 338, 815, 227, 488,
    1024, 895, 354,  312};

std::vector<RequestSize> uniform() {
  std::vector<RequestSize> out;
  for (size_t i = 0; i < kPrompts.size(); ++i)
    out.push_back({.prompt = kPrompts[i], .completion = kCompletions[i]});
  return out;
}

// Length of a prompt with its completion, the same for all.
constexpr int64_t kLongTailedLength = 2176;

// Few long completions among many short ones.
std::vector<RequestSize> long_tailed(Rng& rng, int64_t count) {
  std::vector<RequestSize> out;
  for (int64_t i = 0; i < count; ++i) {
    const double uniform = (static_cast<double>(rng.below(1 << 24)) + 0.5) / (1 << 24);
    const auto length = static_cast<int64_t>(-200 * std::log(uniform));
    const int64_t completion = std::clamp<int64_t>(length, 16, 2048);
    out.push_back({.prompt = kLongTailedLength - completion, .completion = completion});
  }
  return out;
}

// As many prompt and completion tokens as `requests`, in sequences of equal lengths (up to one
// token).
std::vector<RequestSize> equalised(const std::vector<RequestSize>& requests) {
  const auto count = static_cast<int64_t>(requests.size());
  int64_t sampled = 0;
  for (const RequestSize& r : requests) sampled += r.completion;
  std::vector<RequestSize> out;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t completion = sampled / count + (i < sampled % count ? 1 : 0);
    out.push_back({.prompt = kLongTailedLength - completion, .completion = completion});
  }
  return out;
}

}  // namespace

int64_t Workload::sequences() const {
  int64_t sum = 0;
  for (const RequestSize& r : requests) sum += r.completions;
  return sum;
}

int64_t Workload::prompt_tokens() const {
  int64_t sum = 0;
  for (const RequestSize& r : requests) sum += r.prompt;
  return sum;
}

int64_t Workload::sampled_tokens() const {
  int64_t sum = 0;
  for (const RequestSize& r : requests) sum += r.completion * r.completions;
  return sum;
}

std::vector<Workload> rollout_workloads() {
  Rng rng(0, rng_stream(kBenchPurpose, 7));
  std::vector<Workload> out;
  for (const int64_t rows : {1, 8, 64, 256, 512})
    out.push_back(
        {"decode/" + std::to_string(rows), equal(rows, {.prompt = 128, .completion = 512}), rows});
  const RequestSize group{.prompt = 128, .completion = 256, .completions = 8};
  out.push_back({"groups", equal(64, group)});
  out.push_back({"groups/256_rows", equal(64, group), 256});
  out.push_back({"groups/128_rows", equal(64, group), 128});
  out.push_back({"mixed", mixed(rng, 256), 256});
  out.push_back({"uniform", uniform(), 256});
  const std::vector<RequestSize> tail = long_tailed(rng, 1024);
  out.push_back({"long_tailed", tail, 128, 3});
  out.push_back({"long_tailed/equal", equalised(tail), 128, 3});
  return out;
}

}  // namespace cohort::bench
