// Sampling of tokens on CUDA, one block per row. A token's weight is e^d (row_softmax.cuh) as an
// integer, scaled so that sums fit into 64 bits: sums are then independent of their order, and
// every search is exact.
//
// An unrestricted row is read 1 + 1/16 times: row_softmax() provides the sums of e^d over the
// warps' runs of ids, by which the CDF is inverted to one run; integer weights are computed for
// this run only, so that its largest weight is never rounded to 0.
//
// In a restricted row the largest weight is 2^42 or more, and a token whose weight rounds to 0 (a
// probability below 2^-42) is never sampled. Top-k and top-p each find the least probable allowed
// token as a rank: 32 bits of logit, most probable first, then the id. This is a radix select: for
// each digit, weights (1 for top-k) are summed by digit value over the tokens that match the digits
// found so far, and the next digit is the value at which the running sum reaches the target.
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

using Weight = unsigned long long;  // as required by atomicAdd()

constexpr Weight kNoLimit = ~Weight{0};  // above every rank
constexpr int kThreads = kRowThreads;
constexpr int kDigitBits = 11, kDigits = 1 << kDigitBits;
constexpr int kSegment = kWarpTile;
constexpr int64_t kMaxVocab = int64_t{1} << 20;       // one sum per segment fits into shared memory
constexpr int64_t kModifiedPerBlock = 16 * kThreads;  // modified logits written by a block

// Device pointers of a SamplingState.
struct State {
  const SamplingParams* params;
  int32_t* counts;
  const int32_t* bias_ids;
  const float* bias_values;
  int64_t slots, vocab, max_bias;

  // Parameters of a slot, null if the slot or its parameters are invalid.
  __device__ const SamplingParams* params_of(int32_t slot) const {
    if (slot < 0 || slot >= slots) return nullptr;
    const SamplingParams* p = params + slot;
    const bool allowed = invalid_reason(*p) == nullptr && (counts != nullptr || !has_penalty(*p)) &&
                         p->num_bias <= max_bias;
    return allowed ? p : nullptr;
  }
};

// Arguments for the rows of a launch.
struct SampleCall {
  int32_t* tokens;
  float *logprob, *entropy, *truncated_mass, *sampling_logprob;
  const int32_t* slots;
  const int64_t* index;
  const float* logits;
  const float* modified;  // logits of the rows that sample from modified logits; may be null
  int64_t stride;         // from one row of both to the next
  State state;
  int id_bits;  // ids are below 2^id_bits
};

struct Crossing {
  int64_t at;
  Weight before, target, total;
};

// Static shared memory of a block; dynamic shared memory holds sums of weights.
struct Shared {
  RowSoftmax policy;  // softmax of the model's logits, used by thread 0
  double run_sums[kRowWarps];
  Weight warp_sums[kRowWarps];
  Crossing crossing;
  int token;
};

// Ids [begin, end) of a row, where begin is a multiple of kSegment.
struct Range {
  int64_t begin, end;
};

// Tokens that may be sampled: ranks up to `last` with scaled logits of at least `min_scaled`.
struct Kept {
  Weight last = kNoLimit;
  float min_scaled = -INFINITY;
};

// A row of original or modified logits with its distribution.
struct Row {
  const float* logits;
  int64_t vocab;
  int id_bits;
  RowSoftmax softmax;

  // The largest weight, 2^(62 - id_bits).
  __device__ float max_weight() const { return __int_as_float((127 + 62 - id_bits) << 23); }
  __device__ Weight weight(float logit) const {
    return __float2ull_rn(expf(softmax.scaled(logit)) * max_weight());
  }
  __device__ bool keeps(const Kept& kept, int64_t id, float logit) const {
    return rank(logit, id) <= kept.last && softmax.scaled(logit) >= kept.min_scaled;
  }
  // Rank of a token, ascending from the most probable one.
  __device__ Weight rank(float logit, int64_t id) const {
    // Maps the float bits to integers that descend with the logit.
    const unsigned bits = __float_as_uint(logit + 0.0f);  // maps -0 to 0
    const unsigned descending = bits >> 31 ? bits : ~bits & 0x7fffffffu;
    return static_cast<Weight>(descending) << id_bits | static_cast<Weight>(id);
  }
  // Calls fn(id, logit) for the thread's ids below `end` in the tile that starts at `tile`.
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
    const Weight other = __shfl_up_sync(0xffffffffu, x, offset);
    if (static_cast<int>(threadIdx.x % 32) >= offset) x += other;
  }
  return x;
}

// Sum of x over the previous threads of the block, and over all of them.
struct BlockSum {
  Weight before, total;
};
__device__ BlockSum block_prefix_sum(Weight x, Shared& shared) {
  const Weight inclusive = warp_inclusive_sum(x);
  __syncthreads();  // shared.warp_sums may still be read
  if (threadIdx.x % 32 == 31) shared.warp_sums[threadIdx.x / 32] = inclusive;
  __syncthreads();
  BlockSum sum{inclusive - x, 0};
  for (int w = 0; w < kRowWarps; ++w) {
    if (w < static_cast<int>(threadIdx.x / 32)) sum.before += shared.warp_sums[w];
    sum.total += shared.warp_sums[w];
  }
  return sum;
}

// This thread's chunk of an array of sums in shared memory. Chunks are contiguous, so their prefix
// sums are those of the array.
struct Chunk {
  int64_t begin, end;
  Weight sum = 0;
  __device__ Chunk(const Weight* sums, int64_t count) {
    const int64_t size = (count + kThreads - 1) / kThreads;
    begin = min(count, threadIdx.x * size);
    end = min(count, begin + size);
    for (int64_t i = begin; i < end; ++i) sum += sums[i];
  }
};

// Finds the index at which the running total of `sums` first exceeds target_of(total), which is
// below the total.
template <class TargetOf>
__device__ Crossing find_crossing(const Weight* sums, int64_t count, Shared& shared,
                                  TargetOf&& target_of) {
  // Exactly one chunk contains the crossing; its thread searches it and publishes the result.
  const Chunk chunk(sums, count);
  const BlockSum sum = block_prefix_sum(chunk.sum, shared);
  const Weight target = target_of(sum.total);
  Weight before = sum.before;
  if (before <= target && target < before + chunk.sum) {
    int64_t at = chunk.begin;
    while (before + sums[at] <= target) before += sums[at++];
    shared.crossing = {at, before, target, sum.total};
  }
  __syncthreads();
  return shared.crossing;
}

// Rank of the token at which the running total of the weights, over tokens in order of rank up to
// `limit`, first exceeds target_of(total), which is below the total.
template <class WeightOf, class TargetOf>
__device__ Weight find_rank(const Row& row, Weight limit, Weight* sums, Shared& shared,
                            WeightOf&& weight, TargetOf&& target_of) {
  // Each round reads the row once; 32 bits of logit and up to 20 bits of id take at most five
  // rounds.
  Weight found = 0, target = 0;
  const int all = 32 + row.id_bits;
  for (int bits = all; bits > 0;) {
    const int width = min(kDigitBits, bits), prefix_shift = bits;
    bits -= width;
    __syncthreads();  // `sums` may still be read
    for (int i = threadIdx.x; i < kDigits; i += kThreads) sums[i] = 0;
    __syncthreads();
    for (int64_t tile = 0; tile < row.vocab; tile += kRowTile)
      row.for_tile(tile, row.vocab, [&](int64_t id, float logit) {
        const Weight rank = row.rank(logit, id);
        // Skips tokens whose higher digits differ. Integer atomics are independent of order.
        if (rank > limit || rank >> prefix_shift != found) return;
        if (const Weight w = weight(logit); w > 0)
          atomicAdd(&sums[rank >> bits & ((1u << width) - 1)], w);
      });
    __syncthreads();
    // The first round counts every token up to the limit, so its total is the overall total.
    const Crossing digit = find_crossing(sums, kDigits, shared, [&](Weight total) {
      return prefix_shift == all ? target_of(total) : target;
    });
    // The next round excludes the tokens with smaller digits.
    target = digit.target - digit.before;
    found = found << width | static_cast<Weight>(digit.at);
  }
  return found;
}

// Rank of the least probable token that top-k and top-p keep.
__device__ Weight last_allowed(const Row& row, const SamplingParams& p, Weight* sums,
                               Shared& shared) {
  Weight limit = kNoLimit;
  // Top-k: with weights of 1, the k-th token by rank is where the count first exceeds k - 1.
  if (p.top_k > 0 && p.top_k < row.vocab)
    limit = find_rank(
        row, limit, sums, shared, [](float) { return Weight{1}; },
        [&](Weight) { return static_cast<Weight>(p.top_k - 1); });
  // Top-p among the tokens of top-k: the target is a fraction of their total weight, at least one
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

struct Inversion {
  int token;
  Weight total;
};

// Inverts the CDF of a range of ids in ascending order: finds the token at which the running total
// of weight(id, logit) first exceeds target_of(total), which is below the total.
template <class WeightOf, class TargetOf>
__device__ Inversion invert(const Row& row, Range range, Weight* sums, Shared& shared,
                            WeightOf&& weight, TargetOf&& target_of) {
  const int64_t segments = (range.end - range.begin + kSegment - 1) / kSegment;
  __syncthreads();  // `sums` may still be read
  for (int64_t tile = range.begin; tile < range.end; tile += kRowTile) {
    Weight thread_sum = 0;
    row.for_tile(tile, range.end,
                 [&](int64_t id, float logit) { thread_sum += weight(id, logit); });
    // A warp's 128 ids of the tile are one segment; its last lane has their sum.
    const Weight sum = warp_inclusive_sum(thread_sum);
    const int64_t segment = (tile - range.begin) / kSegment + threadIdx.x / 32;
    if (threadIdx.x % 32 == 31 && segment < segments) sums[segment] = sum;
  }
  __syncthreads();
  const Crossing segment = find_crossing(sums, segments, shared, target_of);
  // One warp searches the segment, four ids per lane: the interval [before, before + weight) of
  // exactly one token contains the target.
  if (threadIdx.x < 32) {
    const int64_t first = range.begin + segment.at * kSegment + 4 * threadIdx.x;
    const auto pack = load_logits(row.logits, first, range.end);
    Weight weights[4], thread_sum = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      weights[k] = first + k < range.end ? weight(first + k, pack.v[k]) : 0;
      thread_sum += weights[k];
    }
    Weight before = segment.before + warp_inclusive_sum(thread_sum) - thread_sum;
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

// Inverts the CDF of the whole row: to one run by the sums of the warps' runs, then within that
// run, the only one that is read again.
__device__ int sample_unrestricted(const Row& row, double u, Weight* sums, Shared& shared) {
  const double goal = u * row.softmax.sum;
  // A run without weight is never chosen; if rounding leaves the goal unreached, the last one with
  // weight is used. Uniform over the block.
  int run = 0;
  double before = 0, through = 0;
  for (int w = 0; w < kRowWarps && through <= goal; ++w) {
    if (shared.run_sums[w] <= 0) continue;
    run = w;
    before = through;
    through += shared.run_sums[w];
  }
  const double run_sum = shared.run_sums[run], fraction_of_run = (goal - before) / run_sum;
  // Up to rounding e^d is at most the sum of its run, so weights and their sum are below 2^62.
  const int scale = 61 - ilogb(run_sum);
  const int64_t begin = run * run_length(row.vocab);
  const Range range{begin, min(row.vocab, begin + run_length(row.vocab))};
  return invert(
             row, range, sums, shared,
             [&](int64_t, float logit) {
               return __float2ull_rn(scalbnf(expf(row.softmax.scaled(logit)), scale));
             },
             [&](Weight total) {
               return min(static_cast<Weight>(fraction_of_run * static_cast<double>(total)),
                          total - 1);
             })
      .token;
}

// Smallest id among the largest logits.
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

// A sampled token and the removed probability.
struct Choice {
  int token;
  float truncated_mass;
};

__device__ Choice choose(const Row& row, const SamplingParams& p, int64_t index, Weight* sums,
                         Shared& shared) {
  if (p.temperature == 0) return {greedy(row, shared), 0};
  // One Philox call per sampled token, at the address given by the caller.
  const auto words = philox(p.seed, p.stream, static_cast<uint64_t>(index));
  if ((p.top_k == 0 || p.top_k >= row.vocab) && p.top_p >= 1 && p.min_p <= 0)
    return {sample_unrestricted(row, uniform_f64(words[0], words[1]), sums, shared), 0};
  const Kept kept{.last = last_allowed(row, p, sums, shared),
                  .min_scaled = static_cast<float>(log(p.min_p))};
  // uniform_f64() as a fraction of 2^64.
  const Weight random = (static_cast<Weight>(words[0]) << 32 | words[1]) >> 12;
  const Weight fraction = (2 * random + 1) << 11;
  const Inversion inversion = invert(
      row, {0, row.vocab}, sums, shared,
      [&](int64_t id, float logit) {
        return row.keeps(kept, id, logit) ? row.weight(logit) : Weight{0};
      },
      // The fraction of the total, rounded down: exact and below the total.
      [&](Weight total) { return __umul64hi(fraction, total); });
  // The total is the softmax's sum, which is f32 per thread, so a truncated mass of 0 may become
  // 1e-6.
  const double all = row.softmax.sum * static_cast<double>(row.max_weight());
  return {inversion.token,
          static_cast<float>(fmax(0.0, 1 - static_cast<double>(inversion.total) / all))};
}

// Outputs of a row; -1 and NaN if it has no distribution.
struct Outcome {
  int token = -1;
  float logprob = NAN, entropy = NAN, truncated_mass = NAN, sampling_logprob = NAN;
};

// All threads have the same results of row_softmax(), so branches are uniform and every barrier is
// reached by all. Only the outcome of thread 0 is valid.
__device__ Outcome sample_row(const SampleCall& call, int64_t i, int32_t slot, Weight* sums,
                              Shared& shared) {
  const SamplingParams* p = call.state.params_of(slot);
  if (p == nullptr) return {};
  const int64_t vocab = call.state.vocab;
  const float* logits = call.logits + i * call.stride;
  const float inverse = p->temperature == 0 ? 1 : static_cast<float>(1 / p->temperature);
  Row row{logits, vocab, call.id_bits, row_softmax(logits, vocab, inverse, shared.run_sums)};
  if (!row.softmax.valid()) return {};
  if (threadIdx.x == 0) shared.policy = row.softmax;
  if (changes_logits(*p)) {
    row.logits = call.modified + i * call.stride;
    row.softmax = row_softmax(row.logits, vocab, inverse, shared.run_sums);
    if (!row.softmax.valid()) return {};
  }
  const auto [token, truncated_mass] = choose(row, *p, call.index[i], sums, shared);
  if (threadIdx.x > 0) return {};
  const float sampling_logprob =
      p->temperature == 0 ? 0.f : row.softmax.logprob(row.logits[token]) - log1pf(-truncated_mass);
  return {token, shared.policy.logprob(logits[token]), shared.policy.entropy(), truncated_mass,
          sampling_logprob};
}

// Block i samples the token of row i. The row of logits, [vocab] f32, is read for its softmax, for
// each digit of top-k and top-p, and for the inversion of the CDF; modified logits, if any, after
// the softmax of the model's logits. Dynamic shared memory holds sums of weights, by digit or by
// segment of ids. Log-prob and entropy are those of the model's logits.
__global__ void __launch_bounds__(kThreads) sample_kernel(SampleCall call) {
  launch_dependents_and_wait();
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
  call.truncated_mass[i] = out.truncated_mass;
  call.sampling_logprob[i] = out.sampling_logprob;
  if (call.state.counts != nullptr && out.token >= 0)
    call.state.counts[slot * call.state.vocab + out.token] += 1;
}

// Block (i, j) writes slice j of the modified logits of row i, if the row uses them. Ids with a
// bias are written again, because biases are added before the penalties.
__global__ void __launch_bounds__(kThreads)
    modify_kernel(float* modified, const float* logits, int64_t stride, const int32_t* slots,
                  State state) {
  const int64_t i = blockIdx.x, begin = blockIdx.y * kModifiedPerBlock,
                end = min(state.vocab, begin + kModifiedPerBlock);
  const int32_t slot = slots[i];
  const SamplingParams* params = state.params_of(slot);
  if (params == nullptr || !changes_logits(*params)) return;
  const SamplingParams p = *params;
  const int32_t* counts = has_penalty(p) ? state.counts + slot * state.vocab : nullptr;
  const auto write = [&](int64_t v, float z) {
    modified[i * stride + v] = penalised(z, counts == nullptr ? 0 : counts[v], p);
  };
  logits += i * stride;
  for (int64_t v = begin + threadIdx.x; v < end; v += kThreads) write(v, logits[v]);
  __syncthreads();
  const int32_t* ids = state.bias_ids + slot * state.max_bias;
  const float* values = state.bias_values + slot * state.max_bias;
  for (int32_t b = threadIdx.x; b < p.num_bias; b += kThreads) {
    const int32_t v = ids[b];
    if (v < begin || v >= end) continue;
    // Every thread of an id adds all of its entries in the same order, so all write the same bits.
    float z = logits[v];
    for (int32_t other = 0; other < p.num_bias; ++other)
      if (ids[other] == v) z += values[other];
    write(v, z);
  }
}

// One thread per token of a prompt. Threads with equal ids write the same value.
__global__ void __launch_bounds__(kThreads)
    count_prompt_kernel(int32_t* counts, const int32_t* tokens, int64_t n, int64_t vocab) {
  const int64_t t = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (t < n && tokens[t] >= 0 && tokens[t] < vocab) counts[tokens[t]] = kInPrompt;
}

State state_of(SamplingState& state, int64_t vocab) {
  const auto* params = pointer<uint8_t>(std::as_const(state.params));
  COHORT_CHECK(reinterpret_cast<uintptr_t>(params) % alignof(SamplingParams) == 0,
               "[sampling] expected params at a multiple of ", alignof(SamplingParams), " bytes");
  return {.params = reinterpret_cast<const SamplingParams*>(params),
          .counts = pointer<int32_t>(state.counts),
          .bias_ids = pointer<int32_t>(std::as_const(state.bias_ids)),
          .bias_values = pointer<float>(std::as_const(state.bias_values)),
          .slots = state.params.dim(0),
          .vocab = vocab,
          .max_bias = state.bias_ids.defined() ? state.bias_ids.dim(1) : 0};
}

// Samples rows [first, first + count) from their logits. `modified` is a buffer with rows as far
// apart as theirs, allocated by the first call that needs it.
template <class Args>
void sample_rows(const Args& args, int64_t first, const Tensor& logits, Tensor& modified) {
  const int64_t count = logits.dim(0), vocab = logits.dim(1), stride = logits.strides()[0];
  COHORT_CHECK(vocab <= kMaxVocab, "[sampling] expected at most ", kMaxVocab,
               " tokens on a CUDA device, got ", vocab);
  const State state = state_of(args.state, vocab);
  const auto* slots = pointer<int32_t>(args.slots) + first;
  if (state.counts != nullptr || state.max_bias > 0) {
    if (!modified.defined())
      modified = Tensor::empty({count, stride}, logits.dtype(), logits.device());
    launch("modify_logits", modify_kernel,
           {dim3(blocks_for(count, 1), blocks_for(vocab, kModifiedPerBlock)), kThreads},
           logits.device(), pointer<float>(modified), pointer<float>(logits), stride, slots, state);
  }
  const SampleCall call{
      .tokens = pointer<int32_t>(args.out.tokens) + first,
      .logprob = pointer<float>(args.out.logprob) + first,
      .entropy = pointer<float>(args.out.entropy) + first,
      .truncated_mass = pointer<float>(args.out.truncated_mass) + first,
      .sampling_logprob = pointer<float>(args.out.sampling_logprob) + first,
      .slots = slots,
      .index = pointer<int64_t>(args.rng_index) + first,
      .logits = pointer<float>(logits),
      .modified = pointer<float>(std::as_const(modified)),
      .stride = stride,
      .state = state,
      .id_bits =
          static_cast<int>(std::bit_width(static_cast<uint64_t>(std::max<int64_t>(vocab - 1, 0))))};
  const int64_t sums = std::max<int64_t>(kDigits, (vocab + kSegment - 1) / kSegment);
  launch("sample", sample_kernel,
         {.grid = blocks_for(count, 1),
          .block = kThreads,
          .shared_bytes = static_cast<size_t>(sums) * sizeof(Weight),
          .start = Start::kProgrammatic},
         logits.device(), call);
}

}  // namespace

void head_sample(const HeadSample& args) {
  const int64_t rows = args.chunk_tokens > 0 ? args.chunk_tokens
                                             : head_chunk_tokens(args.w.dim(0), 0, args.x.device());
  Tensor modified;
  for_logit_chunks({args.x, args.w, args.bias}, rows, [&](int64_t begin, const Tensor& logits) {
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
