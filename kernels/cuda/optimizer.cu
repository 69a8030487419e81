// AdamW and the gradient norm on CUDA. All tensors go into one launch (a few, where there are very
// many): a table of pointers travels as a kernel parameter, each tensor is cut into fixed pieces,
// and a block looks up in the table whose piece it has.
#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>

#include "kernels/adamw.h"
#include "kernels/cuda/device.cuh"

namespace cohort::kernels::cuda {
namespace {

constexpr size_t kMaxParameterBytes = 32764;  // of one launch, on sm_70 and later

struct AdamWEntry {
  float* weights;  // null where they are split
  void *m, *v;     // f32, or bf16 with stream != 0
  const float* grad;
  uint16_t* rounded;  // bf16; null for an f32 parameter
  uint16_t* low;      // bits that complete `rounded` to the weights; null where these are whole
  uint64_t stream;    // of the draws that round moments
  int64_t size;
  unsigned first_block;
  float decay;
};
struct NormEntry {
  const void* values;
  int64_t size;
  unsigned first_block;
  DType dtype;
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
  // The entry that owns a block: the last one that starts at or before it.
  __device__ const Entry& owner(unsigned block) const {
    // Bisection over the table, which is in constant memory: all threads of the block read the same
    // entries.
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

// What is kept of a tensor besides its gradient: masters whole or as low bits, moments in f32 or
// bf16.
template <bool kSplitMasters, bool kSmallMoments>
struct Kept {
  static constexpr bool kSplit = kSplitMasters, kSmall = kSmallMoments;
  using Moment = std::conditional_t<kSmall, uint16_t, float>;
};

// Updates elements [i, i + N) of one tensor; returns whether all of them are finite. Four elements
// start at a multiple of 4.
template <int N, class K>
__device__ __forceinline__ bool update(const AdamWEntry& e, const AdamWLaunch& a, float grad_scale,
                                       int64_t i) {
  using Moment = typename K::Moment;
  constexpr bool kSplit = K::kSplit;
  auto* const m_kept = static_cast<Moment*>(e.m) + i;
  auto* const v_kept = static_cast<Moment*>(e.v) + i;
  // All tensors are loaded before the arithmetic. The f32 weights are the master of a bf16
  // parameter, whole or in two parts, or the parameter itself.
  Pack<float, N> p;
  Pack<uint16_t, N> rounded, low;
  if constexpr (kSplit) {
    rounded = load_pack<N>(e.rounded + i);
    low = load_pack<N>(e.low + i);
  } else {
    p = load_pack<N>(e.weights + i);
  }
  Pack<Moment, N> m_pack = load_pack<N>(m_kept), v_pack = load_pack<N>(v_kept);
  const auto g = load_pack<N>(e.grad + i);
  if constexpr (kSplit) {
#pragma unroll
    for (int k = 0; k < N; ++k) p.v[k] = joined({rounded.v[k], low.v[k]});
  }
  std::array<uint32_t, 4> random = {};
  if constexpr (K::kSmall) random = philox(a.seed, e.stream, static_cast<uint64_t>(i) / 4);
  bool finite = true;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    float m, v;
    if constexpr (K::kSmall) {
      m = bf16_value(m_pack.v[k]);
      v = bf16_value(v_pack.v[k]);
    } else {
      m = m_pack.v[k];
      v = v_pack.v[k];
    }
    adamw_element(p.v[k], m, v, g.v[k] * grad_scale, e.decay, a.factors);
    finite = finite && isfinite(p.v[k]) && isfinite(m) && isfinite(v);
    if constexpr (K::kSmall) {
      uint32_t word = random[0];
#pragma unroll
      for (int place = 1; place < 4; ++place)  // an index known to the compiler stays in registers
        if (place == (N == 4 ? k : i % 4)) word = random[place];
      store_moments(m_pack.v[k], v_pack.v[k], m, v, word);
    } else {
      m_pack.v[k] = m;
      v_pack.v[k] = v;
    }
  }
  if constexpr (!kSplit) store_pack(e.weights + i, p);
  store_pack(m_kept, m_pack);
  store_pack(v_kept, v_pack);
  if (e.rounded == nullptr) return finite;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const MasterParts parts = master_parts(p.v[k]);
    rounded.v[k] = parts.weight;
    low.v[k] = parts.low;
    finite = finite && (parts.weight & 0x7f80) != 0x7f80;  // the largest floats round to infinity
  }
  store_pack(e.rounded + i, rounded);
  if constexpr (kSplit) store_pack(e.low + i, low);
  return finite;
}

template <class K>
__device__ __forceinline__ bool update_piece(const AdamWEntry& e, const AdamWLaunch& a,
                                             float grad_scale, int64_t begin) {
  const int64_t end = min(e.size, begin + kAdamWPerBlock);
  // 16-bit packs of 4 are half as long, but pieces start at multiples of 16 bytes all the same.
  const auto bits =
      reinterpret_cast<uintptr_t>(e.weights) | reinterpret_cast<uintptr_t>(e.grad) |
      (K::kSmall ? 2 : 1) * (reinterpret_cast<uintptr_t>(e.m) | reinterpret_cast<uintptr_t>(e.v)) |
      2 * reinterpret_cast<uintptr_t>(e.rounded) | 2 * reinterpret_cast<uintptr_t>(e.low);
  // Elements of whole packs by vectorized accesses, the last few one by one.
  const int64_t packed = bits % 16 == 0 ? begin + (end - begin) / 4 * 4 : begin;
  bool finite = true;
  for (int64_t i = begin + 4 * threadIdx.x; i < packed; i += 4 * kThreads)
    finite &= update<4, K>(e, a, grad_scale, i);
  for (int64_t i = packed + threadIdx.x; i < end; i += kThreads)
    finite &= update<1, K>(e, a, grad_scale, i);
  return finite;
}

// A block updates one piece of kAdamWPerBlock elements of one tensor: weights, moments and gradient
// are read once, each element is updated in registers and stored, with the bf16 copy or the parts
// of the weights where there are such. An element has one thread and no sum, so no order matters.
// The norm comes from the device's memory; if it is not finite, the step is left out without asking
// the host.
__global__ void __launch_bounds__(kThreads) adamw_kernel(const __grid_constant__ AdamWLaunch a) {
  const double norm = a.norm != nullptr ? *a.norm : 0;
  if (!isfinite(norm)) return;
  const auto grad_scale = static_cast<float>(clip_scale(norm, a.max_norm));
  // The tensor and the piece of it that are this block's.
  const AdamWEntry& e = a.table.owner(blockIdx.x);
  const int64_t begin = static_cast<int64_t>(blockIdx.x - e.first_block) * kAdamWPerBlock;
  const bool split = e.low != nullptr, small = e.stream != 0;
  const bool finite = split   ? small ? update_piece<Kept<true, true>>(e, a, grad_scale, begin)
                                      : update_piece<Kept<true, false>>(e, a, grad_scale, begin)
                        : small ? update_piece<Kept<false, true>>(e, a, grad_scale, begin)
                              : update_piece<Kept<false, false>>(e, a, grad_scale, begin);
  // Every thread that finds one writes the same number.
  if (!finite && a.non_finite != nullptr) *a.non_finite = 1;
}

// ---- Norm

constexpr int kNormPerBlock = 32768;
constexpr int kTotalThreads = 1024;
using NormTable = Table<NormEntry, 1024>;
static_assert(sizeof(NormTable) <= kMaxParameterBytes);

// Four consecutive elements; those past the end are 0.
template <class T>
__device__ __forceinline__ Pack<float, 4> load_four(const T* p, int64_t i, int64_t end) {
  Pack<float, 4> out = {};
  if (i + 4 <= end && reinterpret_cast<uintptr_t>(p) % (4 * sizeof(T)) == 0) {
    const auto values = load_pack<4>(p + i);
#pragma unroll
    for (int k = 0; k < 4; ++k) out.v[k] = to_float(values.v[k]);
  } else {
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (i + k < end) out.v[k] = to_float(p[i + k]);
  }
  return out;
}

// The thread's share of the squares of elements [begin, end): which elements, and in which order,
// depends on the range only.
template <class T>
__device__ double square_sum(const T* p, int64_t begin, int64_t end) {
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

// A block adds the squares of one piece of kNormPerBlock elements, in f64: squares of f32 are exact
// there. Threads read four neighbouring elements at a time, four times before they add. partial[b]
// is the sum of block b.
__global__ void __launch_bounds__(kThreads)
    square_sum_kernel(const __grid_constant__ NormTable table, double* partial) {
  __shared__ double scratch[kThreads / 32];
  const NormEntry& e = table.owner(blockIdx.x);
  const int64_t begin = static_cast<int64_t>(blockIdx.x - e.first_block) * kNormPerBlock;
  const int64_t end = min(e.size, begin + kNormPerBlock);
  // Gradients of both types may be in one table; a block has one tensor, so its threads agree.
  const double own = e.dtype == DType::kF32
                         ? square_sum(static_cast<const float*>(e.values), begin, end)
                         : square_sum(static_cast<const __nv_bfloat16*>(e.values), begin, end);
  const double sum = block_reduce<kThreads>(own, scratch, Plus{});
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// One block adds the pieces' sums: thread i those of i, i + kTotalThreads and so on, then the
// threads' sums are reduced in a fixed order.
__global__ void __launch_bounds__(kTotalThreads)
    norm_kernel(double* norm, const double* partial, int64_t count) {
  __shared__ double scratch[kTotalThreads / 32];
  double own = 0;
  for (int64_t i = threadIdx.x; i < count; i += kTotalThreads) own += partial[i];
  const double sum = block_reduce<kTotalThreads>(own, scratch, Plus{});
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
                    .non_finite = pointer<double>(non_finite),
                    .table = {}};
  const auto flush = [&] {
    launch("adamw", adamw_kernel, {batch.table.blocks, kThreads}, device, batch);
    batch.table.count = 0;
    batch.table.blocks = 0;
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    AdamWTensor& t = tensors[i];
    if (t.param.numel() == 0) continue;
    const bool small = t.m.dtype() == DType::kBF16;
    const bool rounds = t.param.dtype() == DType::kBF16;
    batch.table.add({.weights = pointer<float>(rounds ? t.master : t.param),
                     .m = t.m.raw(),
                     .v = t.v.raw(),
                     .grad = pointer<float>(t.grad),
                     .rounded = rounds ? pointer<uint16_t>(t.param) : nullptr,
                     .low = pointer<uint16_t>(t.low_bits),
                     .stream = small ? moments_stream(desc, i) : 0,
                     .size = t.param.numel(),
                     .first_block = 0,
                     .decay = adamw_decay<float>(desc, t.weight_decay)},
                    kAdamWPerBlock);
    if (batch.table.full()) flush();
  }
  flush();
}

void grad_norm(Tensor& norm, std::span<const Tensor> tensors) {
  const Device device = norm.device();
  int64_t pieces = 0;
  for (const Tensor& t : tensors) {
    dispatch_device(t.dtype(), "grad_norm", [&]<class T>() {});
    pieces += blocks_for(t.numel(), kNormPerBlock);
  }
  Tensor partial = Tensor::empty({pieces}, DType::kF64, device);
  double* const sums = pointer<double>(partial);
  NormTable table;
  int64_t done = 0;
  const auto flush = [&] {
    launch("grad_norm", square_sum_kernel, {table.blocks, kThreads}, device, table, sums + done);
    done += table.blocks;
    table.count = 0;
    table.blocks = 0;
  };
  for (const Tensor& t : tensors) {
    if (t.numel() == 0) continue;
    table.add({.values = t.raw(), .size = t.numel(), .first_block = 0, .dtype = t.dtype()},
              kNormPerBlock);
    if (table.full()) flush();
  }
  flush();
  launch("grad_norm_total", norm_kernel, {1, kTotalThreads}, device, pointer<double>(norm),
         static_cast<const double*>(sums), pieces);
}

}  // namespace cohort::kernels::cuda
