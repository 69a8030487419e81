// The row ops of the language model head on CUDA: one block per token over its row of logits. If
// gradients are computed with the log-probs (bf16, sm_90), a cluster of blocks reads the row once
// into registers and computes statistics, then unit gradients, while the next row is being loaded.
#include "kernels/head.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "kernels/cuda/row_softmax.cuh"
#include "kernels/cuda/sm90/cluster.cuh"
#include "kernels/cuda/sm90/tma.cuh"
#include "kernels/divergence.h"

namespace cohort::kernels::cuda {
namespace {

// Outputs for the tokens of a chunk.
struct Statistics {
  float *logprob, *entropy, *lse;
};

// One block per token: all threads reduce the token's row of logits, [vocab] f32, then thread 0
// writes the statistics.
__global__ void __launch_bounds__(kRowThreads)
    logprob_kernel(Statistics out, const float* logits, int64_t stride, const int32_t* targets,
                   int64_t vocab, float inverse_temperature) {
  const int64_t t = blockIdx.x;
  const int32_t target = targets[t];
  const float* z = logits + t * stride;
  __shared__ double run_sums[kRowWarps];
  const RowSoftmax row = row_softmax(z, vocab, inverse_temperature, run_sums);
  if (threadIdx.x > 0) return;
  const bool is_valid = target >= 0 && target < vocab;
  const float nan = __int_as_float(0x7fc00000);
  out.logprob[t] = is_valid ? row.logprob(z[target]) : nan;
  out.entropy[t] = is_valid ? row.entropy() : nan;
  out.lse[t] = is_valid ? row.lse() : nan;
}

// Inputs for the tokens of a chunk; dentropy may be null.
struct TokenGrads {
  const float *dlogprob, *dentropy, *lse, *entropy;
  const int32_t* targets;
};

// Gradient of a logit, with the values shared by all logits of a token.
struct LogitGrad {
  float inverse_temperature, lse, entropy, dlogprob, dentropy;
  int64_t target;

  __device__ float operator()(float logit, int64_t v) const {
    // d log-prob / dz = one_hot - p and d entropy / dz = -p (log p + H), both over the temperature.
    // The entropy term is omitted if not requested, and if p is 0, where log p may be infinite.
    const float log_p = logit * inverse_temperature - lse, p = expf(log_p);
    const float entropy_term = dentropy != 0 && p > 0 ? dentropy * (log_p + entropy) : 0;
    const float dz = -p * (dlogprob + entropy_term) * inverse_temperature;
    return v == target ? dz + dlogprob * inverse_temperature : dz;
  }
};

// The tokens of a chunk and those of their teacher.
struct Divergence {
  float* divergence;
  DivergenceRow<float>* rows;
  const float *logits, *teacher_logits, *lse, *teacher_lse, *ddivergence;
  int64_t stride, teacher_stride;
  float inverse_temperature;
  DivergenceDesc desc;

  explicit Divergence(const HeadDivergence& args, const Tensor& gradient = {})
      : divergence(pointer<float>(args.divergence) + args.begin),
        rows(static_cast<DivergenceRow<float>*>(args.rows.raw()) + args.begin),
        logits(pointer<float>(args.logits)),
        teacher_logits(pointer<float>(args.teacher_logits)),
        lse(pointer<float>(args.lse) + args.begin),
        teacher_lse(pointer<float>(args.teacher_lse) + args.begin),
        ddivergence(gradient.defined() ? pointer<float>(gradient) + args.begin : nullptr),
        stride(args.logits.strides()[0]),
        teacher_stride(args.teacher_logits.strides()[0]),
        inverse_temperature(static_cast<float>(1 / args.temperature)),
        desc(args.desc) {}
};

// One row of them, with the gradient of its divergence over the temperature.
struct DivergenceOfRow {
  const float* teacher;
  float inverse_temperature, lse, teacher_lse, scale;
  DivergenceRow<float> row;
  DivergenceDesc desc;

  __device__ DivergenceOfRow(const Divergence& all, int64_t t)
      : teacher(all.teacher_logits + t * all.teacher_stride),
        inverse_temperature(all.inverse_temperature),
        lse(all.lse[t]),
        teacher_lse(all.teacher_lse[t]),
        scale(all.ddivergence != nullptr ? all.ddivergence[t] * inverse_temperature : 0),
        desc(all.desc) {
    if (all.ddivergence != nullptr) row = all.rows[t];
  }
  __device__ DivergenceEntry<float> entry(float logit, float teacher_logit) const {
    return {logit * inverse_temperature - lse, teacher_logit * inverse_temperature - teacher_lse};
  }
  __device__ float gradient(float logit, float teacher_logit, int64_t v) const {
    return scale * divergence_gradient(row, entry(logit, teacher_logit),
                                       is_likely(row, teacher_logit, v), desc);
  }
};

// Sets the top_k likeliest tokens of a row by a radix select over their ranks, logit first and then
// id, eight bits at a time. Called by all threads of a block.
__device__ void find_likely(const float* logits, int64_t vocab, int64_t top_k,
                            DivergenceRow<float>& row) {
  __shared__ unsigned counts[256];
  __shared__ int64_t shared_left;
  __shared__ unsigned long long shared_found;
  // Descends with the rank.
  const auto key_of = [](float logit, int64_t id) {
    const unsigned bits = __float_as_uint(logit + 0.0f);  // maps -0 to 0
    const unsigned ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
    return static_cast<unsigned long long>(ascending) << 32 | ~static_cast<unsigned>(id);
  };
  unsigned long long found = 0;
  int64_t left = top_k;
  for (int shift = 56; shift >= 0; shift -= 8) {
    if (threadIdx.x < 256) counts[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t v = threadIdx.x; v < vocab; v += kRowThreads) {
      const unsigned long long key = key_of(logits[v], v);
      if (shift == 56 || key >> (shift + 8) == found) atomicAdd(&counts[key >> shift & 255], 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int digit = 255;
      for (; digit > 0 && counts[digit] < left; --digit) left -= counts[digit];
      shared_left = left;
      shared_found = found << 8 | static_cast<unsigned>(digit);
    }
    __syncthreads();
    found = shared_found;
    left = shared_left;
  }
  const auto ascending = static_cast<unsigned>(found >> 32);
  row.least = __uint_as_float(ascending >> 31 ? ascending & 0x7fffffffu : ~ascending);
  row.last_id = static_cast<float>(~static_cast<unsigned>(found));  // exact below 2^24
}

// One block per token.
__global__ void __launch_bounds__(kRowThreads) divergence_kernel(Divergence all, int64_t vocab) {
  __shared__ double scratch[4][kRowWarps];
  const int64_t t = blockIdx.x;
  DivergenceOfRow of(all, t);
  if (all.desc.top_k > 0 && all.desc.top_k < vocab)
    find_likely(of.teacher, vocab, all.desc.top_k, of.row);
  const float* logits = all.logits + t * all.stride;
  DivergenceTerms sum;
  double others_p = 0, others_q = 0;
  for (int64_t first = 4 * threadIdx.x; first < vocab; first += kRowTile) {
    const Pack<float, 4> z = load_logits(logits, first, vocab),
                         q = load_logits(of.teacher, first, vocab);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i >= vocab) continue;
      const DivergenceEntry<float> entry = of.entry(z.v[i], q.v[i]);
      if (is_likely(of.row, q.v[i], first + i)) {
        const DivergenceTerms more = entry.terms(all.desc);
        sum.divergence += more.divergence;
        sum.to_mixture += more.to_mixture;
      } else {
        others_p += static_cast<double>(entry.p);
        others_q += static_cast<double>(entry.q);
      }
    }
  }
  const auto reduce = [&](double x, int i) {
    return block_reduce<kRowThreads>(x, scratch[i], Plus{});
  };
  sum = {reduce(sum.divergence, 0), reduce(sum.to_mixture, 1)};
  others_p = reduce(others_p, 2);
  others_q = reduce(others_q, 3);
  if (threadIdx.x > 0) return;
  all.divergence[t] = finish_divergence(of.row, sum, others_p, others_q, all.desc);
  all.rows[t] = of.row;
}

// Adds nothing to the gradients of a row.
struct NoDivergence {
  __device__ NoDivergence(const NoDivergence&, int64_t) {}
  NoDivergence() = default;
};

// Writes the gradients of logits [begin, end), kN elements per access. dz may alias the logits.
// Row: DivergenceOfRow or NoDivergence.
template <int kN, class T, class Row>
__device__ void write_range(T* dz, const float* logits, int64_t begin, int64_t end,
                            const LogitGrad& grad, const Row& row) {
  constexpr int kLoad = kN == 1 ? 1 : 4;
  constexpr bool kTaught = std::is_same_v<Row, DivergenceOfRow>;
  for (int64_t v = begin + kN * threadIdx.x; v < end; v += kN * kRowThreads) {
    // A 16-byte pack of T corresponds to one access of f32 logits, or two if T is bf16.
    Pack<float, kLoad> z[kN / kLoad], teacher[kN / kLoad];
    Pack<T, kN> out;
#pragma unroll
    for (int i = 0; i < kN / kLoad; ++i) {
      z[i] = load_pack<kLoad>(logits + v + i * kLoad);
      if constexpr (kTaught) teacher[i] = load_pack<kLoad>(row.teacher + v + i * kLoad);
    }
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const float logit = z[i / kLoad].v[i % kLoad];
      float dz = grad(logit, v + i);
      if constexpr (kTaught) dz += row.gradient(logit, teacher[i / kLoad].v[i % kLoad], v + i);
      out.v[i] = from_float<T>(dz);
    }
    store_pack(dz + v, out);
  }
}

// One block per token computes the gradients of its row of logits, from the logits and the
// statistics of the forward; no reduction is needed. f32 gradients overwrite the logits in place.
// Rows: Divergence or NoDivergence, whose row is Row.
template <class Row, class T, class Rows>
__global__ void __launch_bounds__(kRowThreads)
    logits_backward_kernel(T* dz, int64_t dz_stride, const float* logits, int64_t stride,
                           TokenGrads tokens, int64_t vocab, float inverse_temperature, Rows rows) {
  const int64_t t = blockIdx.x;
  dz += t * dz_stride;
  logits += t * stride;
  const LogitGrad grad{.inverse_temperature = inverse_temperature,
                       .lse = tokens.lse[t],
                       .entropy = tokens.entropy[t],
                       .dlogprob = tokens.dlogprob[t],
                       .dentropy = tokens.dentropy != nullptr ? tokens.dentropy[t] : 0,
                       .target = tokens.targets[t]};
  // Rows without padding may be unaligned.
  auto bits = reinterpret_cast<uintptr_t>(dz) | reinterpret_cast<uintptr_t>(logits);
  const Row row(rows, t);
  if constexpr (std::is_same_v<Row, DivergenceOfRow>)
    bits |= reinterpret_cast<uintptr_t>(row.teacher);
  const int64_t in_packs = bits % 16 == 0 ? vocab / kPackSize<T> * kPackSize<T> : 0;
  write_range<kPackSize<T>>(dz, logits, 0, in_packs, grad, row);
  write_range<1>(dz, logits, in_packs, vocab, grad, row);
}

// Distribution of a row over the blocks of a cluster: each block has some of the runs of
// row_softmax(), and each of its warps one chain of a run.
constexpr int kClusterBlocks = 8, kBlockRuns = kRowWarps / kClusterBlocks,
              kBlockWarps = kBlockRuns * kChains;
constexpr int kBlockThreads = 32 * kBlockWarps;

// Resident blocks per multiprocessor, limited by registers.
template <int kPacks>
constexpr int kBlocksPerSm = kPacks <= 8    ? 4
                             : kPacks <= 20 ? 2
                                            : 1;

// Shared memory of a block. The blocks of a cluster exchange the row values `largest` and `sums`;
// each receives all of them. One buffer is reused for all rows without further barriers: a warp
// sends its sums only after reading the row's largest logits, and its next largest logit only after
// reading the sums, and no warp continues before it has received the values of all warps.
struct SharedRow {
  float largest[kClusterBlocks * kBlockWarps];  // per warp
  double2 sums[kRowWarps];                      // per run: sums of e^d and of e^d d
  float lane_sums[kBlockWarps][32], lane_weighted[kBlockWarps][32];
  uint64_t barriers[3];
};

// A thread's part of the rows that its cluster processes. The block has a slice of each row, from
// `begin_` on, and the thread packs of four of its logits, kStep apart.
template <int kPacks>
class ClusterRow {
 public:
  using Logits = Pack<float, 4>[kPacks];

  __device__ __forceinline__ ClusterRow(SharedRow& shared, int vocab, float inverse_temperature)
      : shared_(shared),
        inverse_temperature_(inverse_temperature),
        exponent_(inverse_temperature * kLog2e),
        rank_(blockIdx.x % kClusterBlocks),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32) {
    const int run = static_cast<int>(run_length(vocab));
    begin_ = rank_ * kBlockRuns * run;
    size_ = max(0, min(vocab - begin_, kBlockRuns * run));
    first_ = warp_ / kChains * run + warp_ % kChains * kWarpTile + 4 * lane_;
    remaining_ = min(size_, (warp_ / kChains + 1) * run) - first_;
  }

  // Starts loading the slice of `row` to `next`, in whole packs. Called by one thread.
  __device__ __forceinline__ void load(float* next, const float* row) const {
    const int bytes = (size_ + 3) / 4 * 4 * static_cast<int>(sizeof(float));
    barrier_arrive_expect_tx(barrier(kNext), bytes);
    if (bytes > 0) bulk_load(shared_address(next), row + begin_, bytes, barrier(kNext));
  }

  // Reads the thread's logits from `next`, -inf past the vocabulary, and returns their partial
  // sums. The run length is a multiple of 4, so only the vocabulary's last pack may be incomplete.
  __device__ __forceinline__ PartialSoftmax read(Logits& z, const float* next,
                                                 uint32_t phase) const {
    barrier_wait(barrier(kNext), phase);
#pragma unroll
    for (int i = 0; i < kPacks; ++i)
      if (i * kStep < remaining_) z[i] = load_pack<4>(next + first_ + i * kStep);
    if (remaining_ % 4 != 0) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i)
#pragma unroll
        for (int n = 1; n < 4; ++n)
          if (i * kStep + n >= remaining_) z[i].v[n] = -INFINITY;
    }
    PartialSoftmax partial;
#pragma unroll
    for (int i = 0; i < kPacks; ++i)
      if (i * kStep < remaining_) partial.add(z[i], exponent_);
    return partial;
  }

  // Sends the warp's largest logit to all blocks, and waits for those of all warps.
  __device__ __forceinline__ void exchange_largest(float largest, uint32_t phase) const {
    largest = lane_reduce<32>(largest, Larger{});
    if (threadIdx.x == 0) barrier_arrive_expect_tx(barrier(kLargest), sizeof(shared_.largest));
    if (lane_ < kClusterBlocks)
      store_in_block(lane_, &shared_.largest[rank_ * kBlockWarps + warp_], largest,
                     barrier(kLargest));
    barrier_wait(barrier(kLargest), phase);
  }
  // The largest logit of the row; each lane reads those of two warps.
  __device__ __forceinline__ float largest() const {
    static_assert(kClusterBlocks * kBlockWarps == 64);
    return lane_reduce<32>(fmaxf(shared_.largest[lane_], shared_.largest[32 + lane_]), Larger{});
  }

  // Adds the partial sums over the chains of a run, then over the lanes, sends them to all blocks,
  // and waits for those of all runs.
  __device__ __forceinline__ void exchange_sums(PartialSoftmax partial, float largest,
                                                uint32_t phase) const {
    partial.rebase(largest, exponent_);
    shared_.lane_sums[warp_][lane_] = partial.sum;
    shared_.lane_weighted[warp_][lane_] = partial.weighted;
    __syncthreads();
    if (threadIdx.x == 0) barrier_arrive_expect_tx(barrier(kSums), sizeof(shared_.sums));
    if (warp_ % kChains == 0) {
      double2 total{0, 0};
#pragma unroll
      for (int c = 0; c < kChains; ++c) {
        total.x += static_cast<double>(shared_.lane_sums[warp_ + c][lane_]);
        total.y += static_cast<double>(shared_.lane_weighted[warp_ + c][lane_]);
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        total.x += __shfl_xor_sync(0xffffffffu, total.x, offset);
        total.y += __shfl_xor_sync(0xffffffffu, total.y, offset);
      }
      if (lane_ < kClusterBlocks)
        store_in_block(lane_, &shared_.sums[rank_ * kBlockRuns + warp_ / kChains], total,
                       barrier(kSums));
    }
    barrier_wait(barrier(kSums), phase);
  }

  // Writes the thread's part of the row of d, in whole packs: zeros past the vocabulary. A target
  // of -1 is that of no logit.
  __device__ __forceinline__ void write_gradient(bf16* d, const Logits& z, int target,
                                                 float largest) const {
    // p_v / temperature = 2^(exponent z_v - offset). This sum may use another order than
    // row_softmax(): its rounding is negligible against that of the gradients to bf16.
    const auto sum =
        lane_reduce<kRowWarps>(static_cast<float>(shared_.sums[lane_ % kRowWarps].x), Plus{});
    const float offset =
        __fmaf_rn(largest, exponent_, __log2f(sum) - __log2f(inverse_temperature_));
    const int local_target = target - (begin_ + first_);
    bf16* const local_d = d + (begin_ + first_);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (i * kStep >= remaining_) continue;
      float grad[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) grad[n] = -fast_exp2(__fmaf_rn(z[i].v[n], exponent_, -offset));
      if (const auto at = static_cast<uint32_t>(local_target - i * kStep); at < 4) {
#pragma unroll
        for (uint32_t n = 0; n < 4; ++n)
          if (n == at) grad[n] += inverse_temperature_;
      }
      store_pack(reinterpret_cast<uint32_t*>(local_d + i * kStep),
                 Pack<uint32_t, 2>{pack_bf16(grad[0], grad[1]), pack_bf16(grad[2], grad[3])});
    }
  }

  __device__ __forceinline__ bool is_first_thread() const {
    return rank_ == 0 && threadIdx.x == 0;
  }
  // The result of row_softmax().
  __device__ __forceinline__ RowSoftmax softmax(float largest) const {
    RowSoftmax row{.largest = largest,
                   .inverse_temperature = inverse_temperature_,
                   .sum = shared_.sums[0].x,
                   .weighted = shared_.sums[0].y};
    for (int r = 1; r < kRowWarps; ++r) {
      row.sum += shared_.sums[r].x;
      row.weighted += shared_.sums[r].y;
    }
    row.weighted *= static_cast<double>(inverse_temperature_);
    return row;
  }

 private:
  static constexpr int kStep = kChains * kWarpTile;
  enum Barrier { kNext, kLargest, kSums };

  __device__ __forceinline__ uint32_t barrier(Barrier of) const {
    return shared_address(&shared_.barriers[of]);
  }

  SharedRow& shared_;
  const float inverse_temperature_, exponent_;
  const int rank_, warp_, lane_;
  int begin_, size_;       // the block's slice: its first logit and number of logits
  int first_, remaining_;  // the thread's first logit in the slice, and the logits left in its run
};

// Computes the statistics of each token as row_softmax(), and d[t, v] = ([v = target] - p_v) /
// temperature in bf16. kPacks: maximum number of packs of four logits per thread.
//
// Clusters stride over the tokens. While the threads compute on a token's logits in registers, a
// bulk copy loads the next token's logits to shared memory, `next`. The strides of rows are
// multiples of 4.
template <int kPacks>
__global__ void __launch_bounds__(kBlockThreads, kBlocksPerSm<kPacks>)
    logprob_gradient_kernel(Statistics out, bf16* d, int64_t d_stride, const float* logits,
                            int64_t stride, const int32_t* targets, int tokens, int vocab,
                            float inverse_temperature) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) float next[];
  __shared__ SharedRow shared;
  launch_dependent_grids();
  if (threadIdx.x == 0)
    for (uint64_t& barrier : shared.barriers) barrier_init(shared_address(&barrier), 1);
  wait_on_dependent_grids();
  cluster_sync();

  const int clusters = static_cast<int>(gridDim.x) / kClusterBlocks,
            first_token = static_cast<int>(blockIdx.x) / kClusterBlocks;
  const ClusterRow<kPacks> row(shared, vocab, inverse_temperature);
  const auto load_next = [&](int t) {
    if (threadIdx.x == 0 && t < tokens) row.load(next, logits + t * stride);
  };
  load_next(first_token);

  uint32_t phase = 0;
#pragma unroll 1
  for (int t = first_token; t < tokens; t += clusters, phase ^= 1) {
    Pack<float, 4> z[kPacks];
    const PartialSoftmax partial = row.read(z, next, phase);
    row.exchange_largest(partial.largest, phase);
    // All warps have sent their largest logit, so they have finished reading `next`.
    load_next(t + clusters);
    const float largest = row.largest();
    const int32_t target = targets[t];
    const bool is_valid = target >= 0 && target < vocab;
    const float nan = __int_as_float(0x7fc00000);
    const float target_logit =
        is_valid && row.is_first_thread() ? logits[t * stride + target] : nan;
    row.exchange_sums(partial, largest, phase);
    row.write_gradient(d + t * d_stride, z, is_valid ? target : -1, largest);
    if (!row.is_first_thread()) continue;
    const RowSoftmax softmax = row.softmax(largest);
    out.logprob[t] = is_valid ? softmax.logprob(target_logit) : nan;
    out.entropy[t] = is_valid ? softmax.entropy() : nan;
    out.lse[t] = is_valid ? softmax.lse() : nan;
  }
#endif
}

// Kernel for a row size, with the number of concurrent clusters.
struct LogprobGradient {
  void (*kernel)(Statistics, bf16*, int64_t, const float*, int64_t, const int32_t*, int, int,
                 float) = nullptr;
  LaunchShape shape;  // for one cluster
  int64_t clusters = 0;
};
// Returns a null kernel if none supports rows of `vocab` logits.
LogprobGradient logprob_gradient(int64_t vocab, Device device) {
  const auto fits = [&](int64_t packs) { return vocab <= packs * kRowWarps * kChains * kWarpTile; };
  LogprobGradient out{.kernel = fits(8)    ? logprob_gradient_kernel<8>
                                : fits(20) ? logprob_gradient_kernel<20>
                                : fits(32) ? logprob_gradient_kernel<32>
                                           : nullptr};
  const auto* const code = reinterpret_cast<const void*>(out.kernel);
  if (out.kernel == nullptr) return {};
  out.shape = {.grid = kClusterBlocks,
               .block = kBlockThreads,
               .shared_bytes = static_cast<size_t>(kBlockRuns * run_length(vocab)) * sizeof(float),
               .start = Start::kProgrammatic,
               .cluster = kClusterBlocks};
  const KernelNeeds needs{.shared_memory = static_cast<int64_t>(out.shape.shared_bytes),
                          .compute_capability = 90};
  if (!::cohort::cuda::fits(code, needs, device)) return {};
  out.clusters = ::cohort::cuda::active_clusters(code, kClusterBlocks, kBlockThreads,
                                                 out.shape.shared_bytes, device);
  if (out.clusters == 0) return {};
  return out;
}

// out[t, c] (+)= factor[t] in[t, c], rounded once.
template <class Out, class In>
__global__ void scale_rows_kernel(Out* out, const In* in, const float* factor, int64_t count,
                                  int64_t cols, bool accumulate) {
  launch_dependents_and_wait();
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float scaled = factor[i / cols] * to_float(in[i]);
  out[i] = from_float<Out>(accumulate ? to_float(out[i]) + scaled : scaled);
}
template <class In>
void launch_scale_rows(const ScaleRows& args) {
  constexpr int kThreads = 256;
  launch("scale_rows", scale_rows_kernel<bf16, In>,
         {.grid = blocks_for(args.x.numel(), kThreads),
          .block = kThreads,
          .start = Start::kProgrammatic},
         args.x.device(), pointer<bf16>(args.y), pointer<In>(args.x), pointer<float>(args.factor),
         args.x.numel(), args.x.cols(), args.mode == Grad::kAccumulate);
}

}  // namespace

bool has_unit_gradients(const Tensor& w) {
  return w.dtype() == DType::kBF16 && w.with_padding().dim(0) % 4 == 0 &&
         logprob_gradient(w.dim(0), w.device()).kernel != nullptr;
}

void head_statistics(const HeadStatistics& args) {
  const Device device = args.logits.device();
  const int64_t count = args.logits.dim(0), vocab = args.logits.dim(1),
                stride = args.logits.strides()[0];
  const auto inverse_temperature = static_cast<float>(1 / args.temperature);
  const Statistics out{.logprob = pointer<float>(args.logprob) + args.begin,
                       .entropy = pointer<float>(args.entropy) + args.begin,
                       .lse = pointer<float>(args.lse) + args.begin};
  const int32_t* const targets = pointer<int32_t>(args.targets) + args.begin;
  const float* const logits = pointer<float>(args.logits);
  if (!args.unit_gradients.defined())
    return launch("head_logprob", logprob_kernel, {blocks_for(count, 1), kRowThreads}, device, out,
                  logits, stride, targets, vocab, inverse_temperature);
  const LogprobGradient fused = logprob_gradient(vocab, device);
  Tensor d = args.unit_gradients;
  const int64_t d_stride = d.strides()[0];
  COHORT_CHECK(fused.kernel != nullptr && stride % 4 == 0 && d_stride % 4 == 0,
               "[head] no kernel gives unit gradients of rows of ", vocab, " with strides ", stride,
               " and ", d_stride);
  LaunchShape shape = fused.shape;
  shape.grid = blocks_for(kClusterBlocks * std::min(count, fused.clusters), 1);
  launch("head_logprob_gradient", fused.kernel, shape, device, out, pointer<bf16>(d), d_stride,
         logits, stride, targets, static_cast<int>(count), static_cast<int>(vocab),
         inverse_temperature);
}

void head_divergence(const HeadDivergence& args) {
  launch("head_divergence", divergence_kernel, {blocks_for(args.logits.dim(0), 1), kRowThreads},
         args.logits.device(), Divergence(args), args.logits.dim(1));
}

void head_logit_gradients(const HeadLogitGradients& args) {
  const auto at = [&](const Tensor& t) {
    return t.defined() ? pointer<float>(t) + args.begin : nullptr;
  };
  dispatch_device(args.dz.dtype(), "head_backward", [&]<class T>() {
    const auto start = [&](auto kernel, auto rows) {
      launch("head_logits_backward", kernel, {blocks_for(args.logits.dim(0), 1), kRowThreads},
             args.logits.device(), pointer<T>(args.dz), args.dz.strides()[0],
             pointer<float>(args.logits), args.logits.strides()[0],
             TokenGrads{.dlogprob = at(args.dlogprob),
                        .dentropy = at(args.dentropy),
                        .lse = at(args.lse),
                        .entropy = at(args.entropy),
                        .targets = pointer<int32_t>(args.targets) + args.begin},
             args.logits.dim(1), static_cast<float>(1 / args.temperature), rows);
    };
    if (args.divergence == nullptr)
      start(logits_backward_kernel<NoDivergence, T, NoDivergence>, NoDivergence());
    else
      start(logits_backward_kernel<DivergenceOfRow, T, Divergence>,
            Divergence(*args.divergence, args.ddivergence));
  });
}

void scale_rows(const ScaleRows& args) {
  dispatch_device(args.x.dtype(), "scale_rows", [&]<class In>() { launch_scale_rows<In>(args); });
}

}  // namespace cohort::kernels::cuda
