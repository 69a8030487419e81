// Multi-tensor AdamW and gradient norm on CUDA. One launch processes all tensors up to the capacity
// of a table of pointers, which is a kernel parameter; each tensor is divided into fixed slices,
// and a block finds its slice by the table.
#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>

#include "kernels/adamw.h"
#include "kernels/cuda/device.cuh"

namespace cohort::kernels::cuda {
namespace {

constexpr size_t kMaxParameterBytes = 32764;  // kernel parameters on sm_70 and later

struct AdamWEntry {
  void* weights;  // f32, or bf16 if `low` is not null
  void *m, *v;    // f32, or bf16 with stream != 0
  const float* grad;
  uint16_t* low;    // the low bits of the masters
  uint64_t stream;  // RNG stream for rounding moments
  int64_t flat_index;
  int64_t size;
  unsigned first_block;
  float decay;
};
struct NormEntry {
  const float* values;
  int64_t size;
  unsigned first_block;
};

template <class Entry, int kCapacity>
struct Table {
  int count = 0;
  unsigned blocks = 0;
  Entry entries[kCapacity];

  void add(const Entry& entry, int64_t per_block) {
    entries[count] = entry;
    entries[count++].first_block = blocks;
    blocks += blocks_for(entry.size, per_block);
  }
  bool full() const { return count == kCapacity; }
  void clear() {
    count = 0;
    blocks = 0;
  }
  // Entry that owns a block: the last one that starts at or before it.
  __device__ const Entry& owner(unsigned block) const {
    // Binary search in constant memory, uniform over the block.
    int low = 0, high = count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (entries[middle].first_block <= block ? low : high) = middle;
    }
    return entries[low];
  }
};

// ---- AdamW

constexpr int kThreads = 256;
constexpr int kAdamWPerBlock = 4096;

struct AdamWLaunch {
  AdamWFactors<float> factors;
  uint64_t seed;
  const double* norm;  // may be null
  double max_norm;
  double* non_finite;  // may be null
  Table<AdamWEntry, 450> table;
};
static_assert(sizeof(AdamWLaunch) <= kMaxParameterBytes);

__device__ __forceinline__ float stored_moment(float moment) {
  return moment;
}
__device__ __forceinline__ float stored_moment(uint16_t bits) {
  return bf16_value(bits);
}

// Updates elements [i, i + N) of a tensor; returns true if all results are finite. Weight and
// Moment: float, or uint16_t for bf16; a bf16 weight and its low bits are the master. If N is 4,
// the flat index of element i is a multiple of 4.
template <int N, class Weight, class Moment>
__device__ __forceinline__ bool update(const AdamWEntry& e, const AdamWLaunch& a, float grad_scale,
                                       int64_t i) {
  constexpr bool kSplit = sizeof(Weight) == 2, kBf16Moments = sizeof(Moment) == 2;
  auto* const weights = static_cast<Weight*>(e.weights) + i;
  auto* const m_data = static_cast<Moment*>(e.m) + i;
  auto* const v_data = static_cast<Moment*>(e.v) + i;
  // All loads precede the arithmetic.
  Pack<Weight, N> weight = load_pack<N>(weights);
  Pack<uint16_t, N> low;
  if constexpr (kSplit) low = load_pack<N>(e.low + i);
  Pack<Moment, N> m_pack = load_pack<N>(m_data), v_pack = load_pack<N>(v_data);
  const auto g = load_pack<N>(e.grad + i);
  const int64_t flat = e.flat_index + i;
  std::array<uint32_t, 4> random = {};
  if constexpr (kBf16Moments) random = philox(a.seed, e.stream, static_cast<uint64_t>(flat) / 4);
  bool finite = true;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    float p, m = stored_moment(m_pack.v[k]), v = stored_moment(v_pack.v[k]);
    if constexpr (kSplit)
      p = combined({weight.v[k], low.v[k]});
    else
      p = weight.v[k];
    adamw_element(p, m, v, g.v[k] * grad_scale, e.decay, a.factors);
    finite = finite && isfinite(p) && isfinite(m) && isfinite(v);
    if constexpr (kSplit) {
      const MasterParts parts = master_parts(p);
      weight.v[k] = parts.weight;
      low.v[k] = parts.low;
      finite = finite && (parts.weight & 0x7f80) != 0x7f80;  // the largest floats round to infinity
    } else {
      weight.v[k] = p;
    }
    if constexpr (kBf16Moments) {
      uint32_t word = random[0];
#pragma unroll
      for (int index = 1; index < 4; ++index)  // constant indices keep the array in registers
        if (index == (N == 4 ? k : flat % 4)) word = random[index];
      store_moments(m_pack.v[k], v_pack.v[k], m, v, word);
    } else {
      m_pack.v[k] = m;
      v_pack.v[k] = v;
    }
  }
  store_pack(weights, weight);
  if constexpr (kSplit) store_pack(e.low + i, low);
  store_pack(m_data, m_pack);
  store_pack(v_data, v_pack);
  return finite;
}

template <class Weight, class Moment>
__device__ __forceinline__ bool update_slice(const AdamWEntry& e, const AdamWLaunch& a,
                                             float grad_scale, int64_t begin) {
  const int64_t end = min(e.size, begin + kAdamWPerBlock);
  // Packs of four 16-bit values need an alignment of 8 bytes only.
  const auto bits =
      4 / sizeof(Weight) * reinterpret_cast<uintptr_t>(e.weights) |
      4 / sizeof(Moment) * (reinterpret_cast<uintptr_t>(e.m) | reinterpret_cast<uintptr_t>(e.v)) |
      reinterpret_cast<uintptr_t>(e.grad) | 2 * reinterpret_cast<uintptr_t>(e.low);
  // Whole packs by vectorized accesses, the remaining elements one by one.
  const bool aligned = bits % 16 == 0 && e.flat_index % 4 == 0;
  const int64_t packed = aligned ? begin + (end - begin) / 4 * 4 : begin;
  bool finite = true;
  for (int64_t i = begin + 4 * threadIdx.x; i < packed; i += 4 * kThreads)
    finite &= update<4, Weight, Moment>(e, a, grad_scale, i);
  for (int64_t i = packed + threadIdx.x; i < end; i += kThreads)
    finite &= update<1, Weight, Moment>(e, a, grad_scale, i);
  return finite;
}

// A block updates a slice of kAdamWPerBlock elements of a tensor; weights, low bits, moments and
// gradient are read and written once. The norm is read from
// device memory; if it is not finite, the step is skipped without host synchronisation.
__global__ void __launch_bounds__(kThreads) adamw_kernel(const __grid_constant__ AdamWLaunch a) {
  const double norm = a.norm != nullptr ? *a.norm : 0;
  if (!isfinite(norm)) return;
  const auto grad_scale = static_cast<float>(clip_scale(norm, a.max_norm));
  const AdamWEntry& e = a.table.owner(blockIdx.x);
  const int64_t begin = static_cast<int64_t>(blockIdx.x - e.first_block) * kAdamWPerBlock;
  const bool bf16_moments = e.stream != 0;
  const bool finite = e.low != nullptr
                          ? bf16_moments ? update_slice<uint16_t, uint16_t>(e, a, grad_scale, begin)
                                         : update_slice<uint16_t, float>(e, a, grad_scale, begin)
                      : bf16_moments ? update_slice<float, uint16_t>(e, a, grad_scale, begin)
                                     : update_slice<float, float>(e, a, grad_scale, begin);
  // Concurrent writes store the same value.
  if (!finite && a.non_finite != nullptr) *a.non_finite = 1;
}

// ---- Norm

constexpr int kNormPerBlock = 32768;
constexpr int kTotalThreads = 1024;
using NormTable = Table<NormEntry, 1024>;
static_assert(sizeof(NormTable) <= kMaxParameterBytes);

// Loads four consecutive elements, zeros past the end.
__device__ __forceinline__ Pack<float, 4> load_four(const float* p, int64_t i, int64_t end) {
  if (i + 4 <= end && reinterpret_cast<uintptr_t>(p) % 16 == 0) return load_pack<4>(p + i);
  Pack<float, 4> out = {};
#pragma unroll
  for (int k = 0; k < 4; ++k)
    if (i + k < end) out.v[k] = p[i + k];
  return out;
}

// Sum of squares of the thread's elements in [begin, end). The assignment and the order depend on
// the range only.
__device__ double square_sum(const float* p, int64_t begin, int64_t end) {
  constexpr int kUnroll = 4;
  double sum = 0;
  for (int64_t i = begin + 4 * threadIdx.x; i < end; i += 4 * kThreads * kUnroll) {
    Pack<float, 4> values[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) values[u] = load_four(p, i + 4 * kThreads * u, end);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
#pragma unroll
      for (const float x : values[u].v) sum += static_cast<double>(x) * static_cast<double>(x);
  }
  return sum;
}

// partial[b] = sum of squares of a slice of kNormPerBlock elements in f64, in which squares of f32
// are exact.
__global__ void __launch_bounds__(kThreads)
    square_sum_kernel(const __grid_constant__ NormTable table, double* partial) {
  __shared__ double scratch[kThreads / 32];
  const NormEntry& e = table.owner(blockIdx.x);
  const int64_t begin = static_cast<int64_t>(blockIdx.x - e.first_block) * kNormPerBlock;
  const int64_t end = min(e.size, begin + kNormPerBlock);
  const double sum = block_reduce<kThreads>(square_sum(e.values, begin, end), scratch, Plus{});
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// One block adds the partial sums: thread i adds i, i + kTotalThreads, ..., then the threads'
// totals are reduced in a fixed order.
__global__ void __launch_bounds__(kTotalThreads)
    norm_kernel(double* norm, const double* partial, int64_t count) {
  __shared__ double scratch[kTotalThreads / 32];
  double thread_sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kTotalThreads) thread_sum += partial[i];
  const double sum = block_reduce<kTotalThreads>(thread_sum, scratch, Plus{});
  if (threadIdx.x == 0) *norm = sqrt(sum);
}

}  // namespace

void adamw_step(std::span<AdamWTensor> tensors, const AdamWDesc& desc) {
  const Device device = tensors[0].param.device();
  for (const AdamWTensor& t : tensors) dispatch_device(t.param.dtype(), "adamw", [&]<class T>() {});
  Tensor non_finite = desc.non_finite;
  AdamWLaunch batch{.factors = adamw_factors<float>(desc),
                    .seed = desc.seed,
                    .norm = pointer<double>(desc.norm),
                    .max_norm = desc.max_norm,
                    .non_finite = pointer<double>(non_finite)};
  const auto flush = [&] {
    launch("adamw", adamw_kernel, {batch.table.blocks, kThreads}, device, batch);
    batch.table.clear();
  };
  for (AdamWTensor& t : tensors) {
    if (t.param.numel() == 0) continue;
    const bool bf16_moments = t.m.dtype() == DType::kBF16;
    batch.table.add({.weights = t.param.raw(),
                     .m = t.m.raw(),
                     .v = t.v.raw(),
                     .grad = pointer<float>(t.grad),
                     .low = pointer<uint16_t>(t.low_bits),
                     .stream = bf16_moments ? moments_stream(desc, t.unit) : 0,
                     .flat_index = t.flat_index,
                     .size = t.param.numel(),
                     .decay = adamw_decay<float>(desc, t.weight_decay)},
                    kAdamWPerBlock);
    if (batch.table.full()) flush();
  }
  flush();
}

void grad_norm(Tensor& norm, std::span<const Tensor> tensors) {
  const Device device = norm.device();
  int64_t slices = 0;
  for (const Tensor& t : tensors) slices += blocks_for(t.numel(), kNormPerBlock);
  Tensor partial = Tensor::empty({slices}, DType::kF64, device);
  double* const sums = pointer<double>(partial);
  NormTable table;
  int64_t done = 0;
  const auto flush = [&] {
    launch("grad_norm", square_sum_kernel, {table.blocks, kThreads}, device, table, sums + done);
    done += table.blocks;
    table.clear();
  };
  for (const Tensor& t : tensors) {
    if (t.numel() == 0) continue;
    table.add({.values = pointer<float>(t), .size = t.numel()}, kNormPerBlock);
    if (table.full()) flush();
  }
  flush();
  launch("grad_norm_total", norm_kernel, {1, kTotalThreads}, device, pointer<double>(norm),
         static_cast<const double*>(sums), slices);
}

}  // namespace cohort::kernels::cuda
