// Drawing tokens on CUDA, one block per row. A token's weight is e^d (row_softmax.cuh) as an
// integer, scaled so that sums fit 64 bits: then sums have no order and every search is exact.
//
// A row without restrictions is read once and a sixteenth: row_softmax() leaves the sums of e^d
// over the warps' runs of ids, by which the CDF is inverted to one run; the integers are those of
// this run alone, so that its largest weight is never rounded to 0.
//
// In a restricted row the largest weight is 2^42 or more, and what rounds to 0 (a probability below
// 2^-42) is never drawn. Top-k and top-p each find one token, the least probable one allowed, as a
// rank: 32 bits of logit, most probable first, then the id. Digit by digit, weights (1 for top-k)
// are summed by the digit's value over the tokens that agree with the digits found, and the next
// digit is the value at which the sums reach the goal.
#include "kernels/sampling.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "core/rng.h"
#include "kernels/cuda/row_softmax.cuh"
#include "kernels/head.h"

namespace cohort::kernels::cuda {
namespace {

using Weight = unsigned long long;  // the type that atomicAdd() knows

constexpr Weight kNoLimit = ~Weight{0};  // above every rank
constexpr int kThreads = kRowThreads;
constexpr int kDigitBits = 11, kDigits = 1 << kDigitBits;
constexpr int kSegment = kWarpTile;
constexpr int64_t kMaxVocab = int64_t{1} << 20;  // one sum per segment fits in shared memory
constexpr int64_t kPart = 16 * kThreads;         // modified logits that a block writes

// The elements of a SamplingState.
struct State {
  const DrawParams* params;
  int32_t* counts;
  const int32_t* bias_ids;
  const float* bias_values;
  int64_t slots, vocab, max_bias;

  // The parameters of a slot; null where either cannot be.
  __device__ const DrawParams* of(int32_t slot) const {
    if (slot < 0 || slot >= slots) return nullptr;
    const DrawParams* p = params + slot;
    const bool allowed = expectation_missed(*p) == nullptr &&
                         (counts != nullptr || !has_penalty(*p)) && p->num_bias <= max_bias;
    return allowed ? p : nullptr;
  }
};

// The rows of one launch.
struct SampleCall {
  int32_t* tokens;
  float *logprob, *entropy, *cut;
  const int32_t* slots;
  const int64_t* index;
  const float* logits;
  const float* modified;  // of the rows that draw from other logits; null: there are none
  State state;
  int id_bits;  // ids are below 2^id_bits
};

struct Crossing {
  int64_t at;
  Weight before, target, total;
};

// What a block shares, beside the sums in dynamic shared memory.
struct Shared {
  RowSoftmax policy;  // of the model's logits; thread 0's
  double sum_of_run[kRowWarps];
  Weight of_warp[kRowWarps];
  Crossing crossing;
  int token;
};

// Ids [begin, end) of a row; begin is a multiple of kSegment.
struct Range {
  int64_t begin, end;
};

// What may be drawn: tokens up to a rank whose logit, scaled, is not too far below the largest.
struct Kept {
  Weight last = kNoLimit;
  float least = -INFINITY;
};

// One row, of the model's logits or modified ones, with its distribution.
struct Row {
  const float* logits;
  int64_t vocab;
  int id_bits;
  RowSoftmax softmax;

  // The largest weight, 2^(62 - id_bits).
  __device__ float one() const { return __int_as_float((127 + 62 - id_bits) << 23); }
  __device__ Weight weight(float logit) const {
    return __float2ull_rn(expf(softmax.scaled(logit)) * one());
  }
  __device__ bool keeps(const Kept& kept, int64_t id, float logit) const {
    return rank(logit, id) <= kept.last && softmax.scaled(logit) >= kept.least;
  }
  // Ascending from the most probable token.
  __device__ Weight rank(float logit, int64_t id) const {
    // Floats of one sign are ordered as their bits are, negative ones the other way round; all are
    // mapped so that a larger logit has a smaller number.
    const unsigned bits = __float_as_uint(logit + 0.0f);  // -0 and 0 are equal
    const unsigned descending = bits >> 31 ? bits : ~bits & 0x7fffffffu;
    return static_cast<Weight>(descending) << id_bits | static_cast<Weight>(id);
  }
  // Calls fn(id, logit) for the thread's ids, before `end`, of the tile that starts at `tile`.
  template <class F>
  __device__ void for_tile(int64_t tile, int64_t end, F&& fn) const {
    const int64_t first = tile + 4 * threadIdx.x;
    const auto pack = load_logits(logits, first, end);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (first + k < end) fn(first + k, pack.v[k]);
  }
};

__device__ Weight warp_inclusive_sum(Weight x) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    // After the step of offset o a lane has the sum of itself and of up to 2 o - 1 lanes before it.
    const Weight other = __shfl_up_sync(0xffffffffu, x, offset);
    if (static_cast<int>(threadIdx.x % 32) >= offset) x += other;
  }
  return x;
}

// The sum of x over the threads before this one, and over all of the block.
struct BlockSum {
  Weight before, total;
};
__device__ BlockSum block_prefix_sum(Weight x, Shared& shared) {
  const Weight inclusive = warp_inclusive_sum(x);
  __syncthreads();  // the last sum's readers are done
  if (threadIdx.x % 32 == 31) shared.of_warp[threadIdx.x / 32] = inclusive;
  __syncthreads();
  BlockSum sum{inclusive - x, 0};
  for (int w = 0; w < kRowWarps; ++w) {
    if (w < static_cast<int>(threadIdx.x / 32)) sum.before += shared.of_warp[w];
    sum.total += shared.of_warp[w];
  }
  return sum;
}

// A run of sums in shared memory, of which each thread looks at a piece.
struct Piece {
  int64_t begin, end;
  Weight sum = 0;
  __device__ Piece(const Weight* sums, int64_t count) {
    // A thread's piece is consecutive, which makes the pieces' prefix sums those of the whole run.
    const int64_t each = (count + kThreads - 1) / kThreads;
    begin = min(count, threadIdx.x * each);
    end = min(count, begin + each);
    for (int64_t i = begin; i < end; ++i) sum += sums[i];
  }
};

// Where the running total of `sums` first exceeds the target, target_of(total), which is below
// their total.
template <class TargetOf>
__device__ Crossing find_crossing(const Weight* sums, int64_t count, Shared& shared,
                                  TargetOf&& target_of) {
  // The threads' pieces are consecutive, so exactly one of them contains the crossing; that thread
  // walks over its piece and tells the others.
  const Piece piece(sums, count);
  const BlockSum sum = block_prefix_sum(piece.sum, shared);
  const Weight target = target_of(sum.total);
  Weight before = sum.before;
  if (before <= target && target < before + piece.sum) {
    int64_t at = piece.begin;
    while (before + sums[at] <= target) before += sums[at++];
    shared.crossing = {at, before, target, sum.total};
  }
  __syncthreads();
  return shared.crossing;
}

// The rank of the token at which the running total of the weights, over tokens by rank up to
// `limit`, first exceeds target_of(total), which is below their total.
template <class WeightOf, class TargetOf>
__device__ Weight find_rank(const Row& row, Weight limit, Weight* sums, Shared& shared,
                            WeightOf&& weight, TargetOf&& target_of) {
  // The digits found so far. Each round reads the row once more, and the counts of one digit's
  // 2^kDigitBits values fit into shared memory; 32 bits of logit and up to 20 of id are five rounds
  // at most.
  Weight found = 0, target = 0;
  const int all = 32 + row.id_bits;
  for (int bits = all; bits > 0;) {
    const int width = min(kDigitBits, bits), known = bits;
    bits -= width;
    __syncthreads();  // the last sums' readers are done
    for (int i = threadIdx.x; i < kDigits; i += kThreads) sums[i] = 0;
    __syncthreads();
    for (int64_t tile = 0; tile < row.vocab; tile += kRowTile)
      row.for_tile(tile, row.vocab, [&](int64_t id, float logit) {
        const Weight rank = row.rank(logit, id);
        // Tokens whose higher digits differ are before or behind the one looked for, and already
        // counted. Integer atomics give the same sums in any order.
        if (rank > limit || rank >> known != found) return;
        if (const Weight w = weight(logit); w > 0)
          atomicAdd(&sums[rank >> bits & ((1u << width) - 1)], w);
      });
    __syncthreads();
    // The first round counts every token, so its total is that of all.
    const Crossing digit = find_crossing(sums, kDigits, shared, [&](Weight total) {
      return known == all ? target_of(total) : target;
    });
    // The next digit's sums begin behind the tokens with smaller digits.
    target = digit.target - digit.before;
    // More significant digits first: what is found is a prefix of the rank.
    found = found << width | static_cast<Weight>(digit.at);
  }
  return found;
}

// The least probable token that top-k and top-p leave.
__device__ Weight last_allowed(const Row& row, const DrawParams& p, Weight* sums, Shared& shared) {
  Weight limit = kNoLimit;
  // Top-k: with weights of 1 the k-th token by rank is where the count first exceeds k - 1.
  if (p.top_k > 0 && p.top_k < row.vocab)
    limit = find_rank(
        row, limit, sums, shared, [](float) { return Weight{1}; },
        [&](Weight) { return static_cast<Weight>(p.top_k - 1); });
  // Top-p among what top-k has left: the goal is a share of the kept weights, and at least one
  // token.
  if (p.top_p < 1)
    limit = find_rank(
        row, limit, sums, shared, [&](float logit) { return row.weight(logit); },
        [&](Weight total) {
          const auto goal = static_cast<Weight>(ceil(p.top_p * static_cast<double>(total)));
          return min(max(goal, Weight{1}), total) - 1;
        });
  return limit;
}

struct Draw {
  int token;
  Weight total;
};

// Inverts the CDF of a range of ids in ascending order: the token at which the running total of
// weight(id, logit) first exceeds target_of(total), which is below the total.
template <class WeightOf, class TargetOf>
__device__ Draw invert(const Row& row, Range range, Weight* sums, Shared& shared, WeightOf&& weight,
                       TargetOf&& target_of) {
  const int64_t segments = (range.end - range.begin + kSegment - 1) / kSegment;
  __syncthreads();  // the last sums' readers are done
  for (int64_t tile = range.begin; tile < range.end; tile += kRowTile) {
    Weight own = 0;
    row.for_tile(tile, range.end, [&](int64_t id, float logit) { own += weight(id, logit); });
    // A warp's 128 ids of the tile are one segment, and its last lane has their sum.
    const Weight sum = warp_inclusive_sum(own);
    const int64_t segment = (tile - range.begin) / kSegment + threadIdx.x / 32;
    if (threadIdx.x % 32 == 31 && segment < segments) sums[segment] = sum;
  }
  __syncthreads();
  const Crossing segment = find_crossing(sums, segments, shared, target_of);
  // The segment is known; its ids are those of one warp, four to a lane. A prefix sum over lanes
  // gives each token the interval [before, before + weight), and one of them contains the target.
  if (threadIdx.x < 32) {
    const int64_t first = range.begin + segment.at * kSegment + 4 * threadIdx.x;
    const auto pack = load_logits(row.logits, first, range.end);
    Weight weights[4], own = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      weights[k] = first + k < range.end ? weight(first + k, pack.v[k]) : 0;
      own += weights[k];
    }
    Weight before = segment.before + warp_inclusive_sum(own) - own;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (before <= segment.target && segment.target < before + weights[k])
        shared.token = static_cast<int>(first + k);
      before += weights[k];
    }
  }
  __syncthreads();
  return {shared.token, segment.total};
}

// Inverts the CDF of the whole row: by the sums of the warps' runs to one run, of which only the
// ids are read again.
__device__ int draw_from_all(const Row& row, double u, Weight* sums, Shared& shared) {
  const double goal = u * row.softmax.sum;
  // A run without weight is never chosen; where rounding leaves the goal unreached it is the last
  // one with weight. All threads compute the same.
  int run = 0;
  double before = 0, through = 0;
  for (int w = 0; w < kRowWarps && through <= goal; ++w) {
    if (shared.sum_of_run[w] <= 0) continue;
    run = w;
    before = through;
    through += shared.sum_of_run[w];
  }
  const double of_run = shared.sum_of_run[run], share = (goal - before) / of_run;
  // e^d is at most its run's sum but for rounding, so weights are below 2^62, and so is their sum.
  const int scale = 61 - ilogb(of_run);
  const int64_t begin = run * run_length(row.vocab);
  const Range range{begin, min(row.vocab, begin + run_length(row.vocab))};
  return invert(
             row, range, sums, shared,
             [&](int64_t, float logit) {
               return __float2ull_rn(scalbnf(expf(row.softmax.scaled(logit)), scale));
             },
             [&](Weight total) {
               return min(static_cast<Weight>(share * static_cast<double>(total)), total - 1);
             })
      .token;
}

// The smallest id among the largest logits.
__device__ int greedy(const Row& row, Shared& shared) {
  if (threadIdx.x == 0) shared.token = 0x7fffffff;
  __syncthreads();
  for (int64_t tile = 0; tile < row.vocab; tile += kRowTile)
    row.for_tile(tile, row.vocab, [&](int64_t id, float logit) {
      if (logit == row.softmax.largest) atomicMin(&shared.token, static_cast<int>(id));
    });
  __syncthreads();
  return shared.token;
}

// A token and what was cut.
struct Choice {
  int token;
  float cut;
};

__device__ Choice choose(const Row& row, const DrawParams& p, int64_t index, Weight* sums,
                         Shared& shared) {
  if (p.temperature == 0) return {greedy(row, shared), 0};
  // One Philox call per drawn token, at the address that the caller gives.
  const auto words = philox(p.seed, p.stream, static_cast<uint64_t>(index));
  if ((p.top_k == 0 || p.top_k >= row.vocab) && p.top_p >= 1 && p.min_p <= 0)
    return {draw_from_all(row, uniform_f64(words[0], words[1]), sums, shared), 0};
  const Kept kept{.last = last_allowed(row, p, sums, shared),
                  .least = static_cast<float>(log(p.min_p))};
  // uniform_f64() as a fraction of 2^64.
  const Weight random = (static_cast<Weight>(words[0]) << 32 | words[1]) >> 12;
  const Weight fraction = (2 * random + 1) << 11;
  const Draw drawn = invert(
      row, {0, row.vocab}, sums, shared,
      [&](int64_t id, float logit) {
        return row.keeps(kept, id, logit) ? row.weight(logit) : Weight{0};
      },
      // That fraction of the total, rounded down: below the total, and exact.
      [&](Weight total) { return __umul64hi(fraction, total); });
  // The sum over all tokens is the softmax's, in f32 per thread, so that what is 0 may come out as
  // 1e-6.
  const double all = row.softmax.sum * static_cast<double>(row.one());
  return {drawn.token, static_cast<float>(fmax(0.0, 1 - static_cast<double>(drawn.total) / all))};
}

// -1 and NaN say that the row had no distribution.
struct Outcome {
  int token = -1;
  float logprob = NAN, entropy = NAN, cut = NAN;
};

// All threads have the same results of row_softmax(), so they take the same branches and meet at
// every barrier. Only thread 0's outcome counts.
__device__ Outcome sample_row(const SampleCall& call, int64_t i, int32_t slot, Weight* sums,
                              Shared& shared) {
  const DrawParams* p = call.state.of(slot);
  if (p == nullptr) return {};
  const int64_t vocab = call.state.vocab;
  const float* logits = call.logits + i * vocab;
  const float inverse = p->temperature == 0 ? 1 : static_cast<float>(1 / p->temperature);
  Row row{logits, vocab, call.id_bits, row_softmax(logits, vocab, inverse, shared.sum_of_run)};
  if (!row.softmax.valid()) return {};
  if (threadIdx.x == 0) shared.policy = row.softmax;
  if (changes_logits(*p)) {
    row.logits = call.modified + i * vocab;
    row.softmax = row_softmax(row.logits, vocab, inverse, shared.sum_of_run);
    if (!row.softmax.valid()) return {};
  }
  const auto [token, cut] = choose(row, *p, call.index[i], sums, shared);
  if (threadIdx.x > 0) return {};
  return {token, shared.policy.logprob(logits[token]), shared.policy.entropy(), cut};
}

// Block i draws the token of row i. The row of logits, [vocab] f32, stays in global memory and is
// read for its softmax, for each digit of top-k and top-p, and for the draw; where the row draws
// from modified logits, those are read like that after the model's own softmax. Dynamic shared
// memory holds sums of weights, by digit or by segment of ids. Log-prob and entropy are those of
// the model's logits, whatever is cut or modified.
__global__ void __launch_bounds__(kThreads) sample_kernel(SampleCall call) {
  start_beside_previous();
  extern __shared__ Weight sums[];
  __shared__ Shared shared;
  const int64_t i = blockIdx.x;
  const int32_t slot = call.slots[i];
  if (slot == -1) return;
  const Outcome out = sample_row(call, i, slot, sums, shared);
  if (threadIdx.x > 0) return;
  call.tokens[i] = out.token;
  call.logprob[i] = out.logprob;
  call.entropy[i] = out.entropy;
  call.cut[i] = out.cut;
  if (call.state.counts != nullptr && out.token >= 0)
    call.state.counts[slot * call.state.vocab + out.token] += 1;
}

// Block (i, j) writes part j of the modified logits of row i, one coalesced element per thread at a
// time; nothing where row i draws from the model's logits. Ids with a bias are written again, since
// their bias comes before the penalties.
__global__ void __launch_bounds__(kThreads)
    modify_kernel(float* modified, const float* logits, const int32_t* slots, State state) {
  const int64_t i = blockIdx.x, begin = blockIdx.y * kPart, end = min(state.vocab, begin + kPart);
  const int32_t slot = slots[i];
  const DrawParams* params = state.of(slot);
  if (params == nullptr || !changes_logits(*params)) return;
  const DrawParams p = *params;
  const int32_t* counts = has_penalty(p) ? state.counts + slot * state.vocab : nullptr;
  const auto write = [&](int64_t v, float z) {
    modified[i * state.vocab + v] = penalised(z, counts == nullptr ? 0 : counts[v], p);
  };
  logits += i * state.vocab;
  for (int64_t v = begin + threadIdx.x; v < end; v += kThreads) write(v, logits[v]);
  __syncthreads();
  const int32_t* ids = state.bias_ids + slot * state.max_bias;
  const float* values = state.bias_values + slot * state.max_bias;
  for (int32_t b = threadIdx.x; b < p.num_bias; b += kThreads) {
    const int32_t v = ids[b];
    if (v < begin || v >= end) continue;
    // Every thread of an id adds up all of its entries, in one order: they write the same bits.
    float z = logits[v];
    for (int32_t other = 0; other < p.num_bias; ++other)
      if (ids[other] == v) z += values[other];
    write(v, z);
  }
}

// One thread per token of a prompt. Threads of one id write the same.
__global__ void __launch_bounds__(kThreads)
    count_prompt_kernel(int32_t* counts, const int32_t* tokens, int64_t n, int64_t vocab) {
  const int64_t t = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (t < n && tokens[t] >= 0 && tokens[t] < vocab) counts[tokens[t]] = kInPrompt;
}

State state_of(SamplingState& state, int64_t vocab) {
  const auto* params = pointer<uint8_t>(std::as_const(state.params));
  COHORT_CHECK(reinterpret_cast<uintptr_t>(params) % alignof(DrawParams) == 0,
               "[sampling] expected params at a multiple of ", alignof(DrawParams), " bytes");
  return {.params = reinterpret_cast<const DrawParams*>(params),
          .counts = pointer<int32_t>(state.counts),
          .bias_ids = pointer<int32_t>(std::as_const(state.bias_ids)),
          .bias_values = pointer<float>(std::as_const(state.bias_values)),
          .slots = state.params.dim(0),
          .vocab = vocab,
          .max_bias = state.bias_ids.defined() ? state.bias_ids.dim(1) : 0};
}

// The outputs and addresses of rows [first, first + count), whose logits are given. `modified` is
// memory for as many logits, allocated by the first call that needs it.
template <class Args>
void sample_rows(const Args& args, int64_t first, const Tensor& logits, Tensor& modified) {
  const int64_t count = logits.dim(0), vocab = logits.dim(1);
  COHORT_CHECK(vocab <= kMaxVocab, "[sampling] expected at most ", kMaxVocab,
               " tokens on a CUDA device, got ", vocab);
  const State state = state_of(args.state, vocab);
  const auto* slots = pointer<int32_t>(args.slots) + first;
  if (state.counts != nullptr || state.max_bias > 0) {
    if (!modified.defined()) modified = Tensor::empty_like(logits);
    launch("modify_logits", modify_kernel,
           {dim3(blocks_for(count, 1), blocks_for(vocab, kPart)), kThreads}, logits.device(),
           pointer<float>(modified), pointer<float>(logits), slots, state);
  }
  const SampleCall call{
      .tokens = pointer<int32_t>(args.out.tokens) + first,
      .logprob = pointer<float>(args.out.logprob) + first,
      .entropy = pointer<float>(args.out.entropy) + first,
      .cut = pointer<float>(args.out.cut) + first,
      .slots = slots,
      .index = pointer<int64_t>(args.rng_index) + first,
      .logits = pointer<float>(logits),
      .modified = pointer<float>(std::as_const(modified)),
      .state = state,
      .id_bits =
          static_cast<int>(std::bit_width(static_cast<uint64_t>(std::max<int64_t>(vocab - 1, 0))))};
  const int64_t sums = std::max<int64_t>(kDigits, (vocab + kSegment - 1) / kSegment);
  launch("sample", sample_kernel,
         {.grid = blocks_for(count, 1),
          .block = kThreads,
          .shared_bytes = static_cast<size_t>(sums) * sizeof(Weight),
          .start = Start::kBesidePrevious},
         logits.device(), call);
}

}  // namespace

void head_sample(const HeadSample& args) {
  const int64_t rows = args.chunk_tokens > 0 ? args.chunk_tokens
                                             : head_chunk_tokens(args.w.dim(0), 0, args.x.device());
  Tensor modified;
  for_logit_chunks(args.x, args.w, rows, [&](int64_t begin, const Tensor& logits) {
    sample_rows(args, begin, logits, modified);
  });
}

void sample_logits(const SampleLogits& args) {
  COHORT_CHECK(args.logits.dtype() == DType::kF32,
               "[sample_logits] expected f32 logits on a CUDA device, got ", args.logits.str());
  Tensor modified;
  sample_rows(args, 0, args.logits, modified);
}

void count_prompt(const CountPrompt& args) {
  const int64_t n = args.tokens.numel();
  Tensor counts = args.counts.select(0, args.slot);
  counts.zero_();
  launch("count_prompt", count_prompt_kernel, {blocks_for(n, kThreads), kThreads}, counts.device(),
         pointer<int32_t>(counts), pointer<int32_t>(args.tokens), n, args.counts.dim(1));
}

}  // namespace cohort::kernels::cuda
