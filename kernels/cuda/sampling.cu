// Drawing tokens on CUDA, one block per row. A token's weight is e^d (row_softmax.cuh) as an
// integer, scaled so that the sum over any row fits 64 bits: then sums have no order and every step
// is exact. The largest weight is 2^42 or more; what rounds to 0 (a probability below 2^-42) is
// never drawn.
//
// Top-k and top-p each find one token, the least probable one allowed, as a rank: 32 bits of logit,
// most probable first, then the id. Digit by digit, weights (1 for top-k, weights for top-p) are
// summed by the digit's value over the tokens that agree with the digits found, and the next digit
// is the value at which the sums reach the goal.
#include "kernels/sampling.h"

#include <algorithm>
#include <bit>

#include "core/rng.h"
#include "kernels/cuda/row_softmax.cuh"
#include "kernels/head.h"

namespace cohort::kernels::cuda {
namespace {

using Weight = unsigned long long;  // the type that atomicAdd() knows

constexpr Weight kNoLimit = ~Weight{0};  // above every rank
constexpr int kThreads = kRowThreads;
constexpr int kWarps = kThreads / 32;
constexpr int kDigitBits = 11, kDigits = 1 << kDigitBits;
constexpr int kSegment = 4 * 32;                 // ids that a warp reads at a time
constexpr int64_t kMaxVocab = int64_t{1} << 20;  // one sum per segment fits in shared memory

struct SampleCall {
  int32_t* tokens;
  float *logprob, *entropy, *cut;
  const int64_t *stream, *index;
  const float* logits;
  int64_t vocab, top_k;
  double top_p;
  uint64_t seed;
  float inverse_temperature;
  int id_bits;  // ids are below 2^id_bits
  bool greedy;
};

struct Crossing {
  int64_t at;
  Weight before;
};

// What a block shares, beside the sums in dynamic shared memory.
struct Shared {
  Weight of_warp[kWarps];
  Crossing crossing;
  int token;
};

// One row with its distribution.
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
  // Ascending from the most probable token.
  __device__ Weight rank(float logit, int64_t id) const {
    // Floats of one sign are ordered as their bits are, negative ones the other way round; all are
    // mapped so that a larger logit has a smaller number.
    const unsigned bits = __float_as_uint(logit + 0.0f);  // -0 and 0 are equal
    const unsigned descending = bits >> 31 ? bits : ~bits & 0x7fffffffu;
    return static_cast<Weight>(descending) << id_bits | static_cast<Weight>(id);
  }
  // Calls fn(id, logit) for the thread's ids of the tile that starts at `tile`.
  template <class F>
  __device__ void for_tile(int64_t tile, F&& fn) const {
    const int64_t first = tile + 4 * threadIdx.x;
    const auto pack = load_logits(logits, first, vocab);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (first + k < vocab) fn(first + k, pack.v[k]);
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
  for (int w = 0; w < kWarps; ++w) {
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

__device__ Weight total_of(const Weight* sums, int64_t count, Shared& shared) {
  return block_prefix_sum(Piece(sums, count).sum, shared).total;
}

// Where the running total of `sums` first exceeds `target`, which is below their total.
__device__ Crossing find_crossing(const Weight* sums, int64_t count, Weight target,
                                  Shared& shared) {
  // The threads' pieces are consecutive, so exactly one of them contains the crossing; that thread
  // walks over its piece and tells the others.
  const Piece piece(sums, count);
  Weight before = block_prefix_sum(piece.sum, shared).before;
  if (before <= target && target < before + piece.sum) {
    int64_t at = piece.begin;
    while (before + sums[at] <= target) before += sums[at++];
    shared.crossing = {at, before};
  }
  __syncthreads();
  return shared.crossing;
}

// The rank of the token at which the running total of the weights, over tokens by rank up to
// `limit`, first exceeds `target`, which is below their total.
template <class WeightOf>
__device__ Weight find_rank(const Row& row, Weight limit, Weight target, Weight* sums,
                            Shared& shared, WeightOf&& weight) {
  // The digits found so far. Each round reads the row once more, and the counts of one digit's
  // 2^kDigitBits values fit into shared memory; 32 bits of logit and up to 20 of id are five rounds
  // at most.
  Weight found = 0;
  for (int bits = 32 + row.id_bits; bits > 0;) {
    const int width = min(kDigitBits, bits), known = bits;
    bits -= width;
    __syncthreads();  // the last sums' readers are done
    for (int i = threadIdx.x; i < kDigits; i += kThreads) sums[i] = 0;
    __syncthreads();
    for (int64_t tile = 0; tile < row.vocab; tile += kRowTile)
      row.for_tile(tile, [&](int64_t id, float logit) {
        const Weight rank = row.rank(logit, id);
        // Tokens whose higher digits differ are before or behind the one looked for, and already
        // counted. Integer atomics give the same sums in any order.
        if (rank > limit || rank >> known != found) return;
        if (const Weight w = weight(logit); w > 0)
          atomicAdd(&sums[rank >> bits & ((1u << width) - 1)], w);
      });
    __syncthreads();
    const Crossing digit = find_crossing(sums, kDigits, target, shared);
    // The next digit's sums begin behind the tokens with smaller digits.
    target -= digit.before;
    // More significant digits first: what is found is a prefix of the rank.
    found = found << width | static_cast<Weight>(digit.at);
  }
  return found;
}

// The weights of the tokens up to `limit`, summed over segments of ids; returns the number of
// segments.
__device__ int64_t sum_segments(const Row& row, Weight limit, Weight* sums) {
  const int64_t segments = (row.vocab + kSegment - 1) / kSegment;
  __syncthreads();  // the last sums' readers are done
  for (int64_t tile = 0; tile < row.vocab; tile += kRowTile) {
    Weight own = 0;
    row.for_tile(tile, [&](int64_t id, float logit) {
      if (row.rank(logit, id) <= limit) own += row.weight(logit);
    });
    // A warp's 128 ids of the tile are one segment, and its last lane has their sum.
    const Weight sum = warp_inclusive_sum(own);
    const int64_t segment = tile / kSegment + threadIdx.x / 32;
    if (threadIdx.x % 32 == 31 && segment < segments) sums[segment] = sum;
  }
  __syncthreads();
  return segments;
}

// The least probable token that top-k and top-p leave.
__device__ Weight last_allowed(const Row& row, const SampleCall& call, Weight* sums,
                               Shared& shared) {
  Weight limit = kNoLimit;
  // Top-k: with weights of 1 the k-th token by rank is where the count first exceeds k - 1.
  if (call.top_k > 0 && call.top_k < row.vocab)
    limit = find_rank(row, limit, static_cast<Weight>(call.top_k - 1), sums, shared,
                      [](float) { return Weight{1}; });
  // Top-p among what top-k has left: the goal is a share of the kept weights, and at least one
  // token.
  if (call.top_p < 1) {
    const int64_t segments = sum_segments(row, limit, sums);
    const Weight total = total_of(sums, segments, shared);
    const auto goal = static_cast<Weight>(ceil(call.top_p * static_cast<double>(total)));
    limit = find_rank(row, limit, min(max(goal, Weight{1}), total) - 1, sums, shared,
                      [&](float logit) { return row.weight(logit); });
  }
  return limit;
}

struct Draw {
  int token;
  Weight kept;  // by the limit
};

// Inverts the CDF of the tokens up to `limit` in ascending id order.
__device__ Draw draw(const Row& row, Weight limit, Weight fraction, Weight* sums, Shared& shared) {
  const int64_t segments = sum_segments(row, limit, sums);
  const Weight total = total_of(sums, segments, shared);
  // fraction / 2^64 of the total, rounded down: below the total, and exact.
  const Weight target = __umul64hi(fraction, total);
  const Crossing segment = find_crossing(sums, segments, target, shared);
  // The segment is known; its ids are those of one warp, four to a lane. A prefix sum over lanes
  // gives each token the interval [before, before + weight), and one of them contains the target.
  if (threadIdx.x < 32) {
    const int64_t first = segment.at * kSegment + 4 * threadIdx.x;
    const auto pack = load_logits(row.logits, first, row.vocab);
    // A token beyond the limit weighs nothing here, as in the sums of segments.
    Weight weights[4], own = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const bool allowed = first + k < row.vocab && row.rank(pack.v[k], first + k) <= limit;
      weights[k] = allowed ? row.weight(pack.v[k]) : 0;
      own += weights[k];
    }
    Weight before = segment.before + warp_inclusive_sum(own) - own;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (before <= target && target < before + weights[k])
        shared.token = static_cast<int>(first + k);
      before += weights[k];
    }
  }
  __syncthreads();
  return {shared.token, total};
}

// The probability of the tokens beyond `limit`. The sum over all tokens is the softmax's, in f32
// per thread, so that what is 0 may come out as 1e-6.
__device__ float cut_share(const Row& row, Weight limit, Weight kept) {
  if (limit == kNoLimit) return 0;
  const double all = row.softmax.sum * static_cast<double>(row.one());
  return static_cast<float>(fmax(0.0, 1 - static_cast<double>(kept) / all));
}

// The smallest id among the largest logits.
__device__ int greedy(const Row& row, Shared& shared) {
  if (threadIdx.x == 0) shared.token = 0x7fffffff;
  __syncthreads();
  for (int64_t tile = 0; tile < row.vocab; tile += kRowTile)
    row.for_tile(tile, [&](int64_t id, float logit) {
      if (logit == row.softmax.largest) atomicMin(&shared.token, static_cast<int>(id));
    });
  __syncthreads();
  return shared.token;
}

// Block i draws the token of row i. The row of logits, [vocab] f32, stays in global memory and is
// read several times: for its softmax, for each digit of top-k and top-p, and for the draw. Dynamic
// shared memory holds sums of weights, by digit or by segment of ids. Log-prob and entropy are
// those of the whole distribution at the temperature, whatever is cut.
__global__ void __launch_bounds__(kThreads) sample_kernel(SampleCall call) {
  extern __shared__ Weight sums[];
  __shared__ Shared shared;
  const int64_t i = blockIdx.x;
  Row row{call.logits + i * call.vocab, call.vocab, call.id_bits, {}};
  row.softmax = row_softmax(row.logits, row.vocab, call.inverse_temperature);
  const float nan = __int_as_float(0x7fc00000);
  if (threadIdx.x == 0) call.entropy[i] = row.softmax.valid() ? row.softmax.entropy() : nan;
  int token = -1;
  float cut = nan;
  // All threads have the same row_softmax() result, so they take the same branches and meet at
  // every barrier below.
  if (row.softmax.valid()) {
    if (call.greedy) {
      token = greedy(row, shared);
      cut = 0;
    } else {
      // One Philox call per drawn token, at the address that the caller gives.
      // uniform_f64() as a fraction of 2^64.
      const auto words = philox(call.seed, static_cast<uint64_t>(call.stream[i]),
                                static_cast<uint64_t>(call.index[i]));
      const Weight random = (static_cast<Weight>(words[0]) << 32 | words[1]) >> 12;
      const Weight limit = last_allowed(row, call, sums, shared);
      const Draw drawn = draw(row, limit, (2 * random + 1) << 11, sums, shared);
      token = drawn.token;
      cut = cut_share(row, limit, drawn.kept);
    }
  }
  if (threadIdx.x > 0) return;
  // -1 and NaN say that the row had no distribution.
  call.tokens[i] = token;
  call.logprob[i] = token < 0 ? nan : row.softmax.logprob(row.logits[token]);
  call.cut[i] = cut;
}

// The outputs and addresses of rows [first, first + count), whose logits are given.
void sample_rows(Draws& out, const Tensor& stream, const Tensor& index, int64_t first,
                 const Tensor& logits, const SamplingDesc& desc) {
  const int64_t vocab = logits.dim(1);
  COHORT_CHECK(vocab <= kMaxVocab, "[sampling] expected at most ", kMaxVocab,
               " tokens on a CUDA device, got ", vocab);
  const double temperature = desc.temperature == 0 ? 1 : desc.temperature;
  const SampleCall call{.tokens = pointer<int32_t>(out.tokens) + first,
                        .logprob = pointer<float>(out.logprob) + first,
                        .entropy = pointer<float>(out.entropy) + first,
                        .cut = pointer<float>(out.cut) + first,
                        .stream = pointer<int64_t>(stream) + first,
                        .index = pointer<int64_t>(index) + first,
                        .logits = pointer<float>(logits),
                        .vocab = vocab,
                        .top_k = desc.top_k,
                        .top_p = desc.top_p,
                        .seed = desc.seed,
                        .inverse_temperature = static_cast<float>(1 / temperature),
                        .id_bits = static_cast<int>(
                            std::bit_width(static_cast<uint64_t>(std::max<int64_t>(vocab - 1, 0)))),
                        .greedy = desc.temperature == 0};
  const int64_t sums = std::max<int64_t>(kDigits, (vocab + kSegment - 1) / kSegment);
  launch("sample", sample_kernel,
         {blocks_for(logits.dim(0), 1), kThreads, static_cast<size_t>(sums) * sizeof(Weight)},
         logits.device(), call);
}

}  // namespace

void head_sample(const HeadSample& args) {
  const int64_t rows = args.desc.chunk_tokens > 0
                           ? args.desc.chunk_tokens
                           : head_chunk_tokens(args.w.dim(0), 0, args.x.device());
  for_logit_chunks(args.x, args.w, rows, [&](int64_t begin, const Tensor& logits) {
    sample_rows(args.out, args.rng_stream, args.rng_index, begin, logits, args.desc);
  });
}

void sample_logits(const SampleLogits& args) {
  COHORT_CHECK(args.logits.dtype() == DType::kF32,
               "[sample_logits] expected f32 logits on a CUDA device, got ", args.logits.str());
  sample_rows(args.out, args.rng_stream, args.rng_index, 0, args.logits, args.desc);
}

}  // namespace cohort::kernels::cuda
