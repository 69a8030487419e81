// Copies, conversions and fills of device tensors: data movement, no maths.
#include <cuda_bf16.h>

#include "core/cuda_backend.h"
#include "core/launch.cuh"

namespace cohort::cuda {
namespace {

constexpr int kThreads = 256;

template <class To, class From>
__device__ To convert(From value) {
  if constexpr (std::is_same_v<From, To>)
    return value;
  else if constexpr (std::is_same_v<From, __nv_bfloat16>)
    return static_cast<To>(__bfloat162float(value));
  else if constexpr (std::is_same_v<To, __nv_bfloat16>)
    return __float2bfloat16_rn(static_cast<float>(value));
  else
    return static_cast<To>(value);
}

// Sizes and strides of a copy.
struct Layout {
  int rank;
  int64_t size[kMaxRank], to[kMaxRank], from[kMaxRank];
};

// Element i in row-major order: its index in each dimension, from the last to the first, gives the
// places in both tensors. Threads go over the elements in steps of the whole grid.
template <class To, class From>
__global__ void copy_strided(To* to, const From* from, int64_t n, Layout layout) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < n;
       i += int64_t{kThreads} * gridDim.x) {
    int64_t rest = i, at_to = 0, at_from = 0;
    for (int d = layout.rank - 1; d >= 0; --d) {
      const int64_t index = rest % layout.size[d];
      rest /= layout.size[d];
      at_to += index * layout.to[d];
      at_from += index * layout.from[d];
    }
    to[at_to] = convert<To>(from[at_from]);
  }
}

template <class To, class From>
__global__ void copy_flat(To* to, const From* from, int64_t n) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < n;
       i += int64_t{kThreads} * gridDim.x)
    to[i] = convert<To>(from[i]);
}

template <class T>
__global__ void fill_strided(T* to, int64_t n, T value, Layout layout) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < n;
       i += int64_t{kThreads} * gridDim.x) {
    int64_t rest = i, at = 0;
    for (int d = layout.rank - 1; d >= 0; --d) {
      at += rest % layout.size[d] * layout.to[d];
      rest /= layout.size[d];
    }
    to[at] = value;
  }
}

LaunchShape grid_for(int64_t n) {
  return {{std::min(blocks_for(n, 4 * kThreads), 1u << 20)}, {kThreads}};
}

// Calls fn with an unsigned type of the element size: where bits are moved, types do not matter.
template <class F>
void dispatch_bits(DType dtype, F&& fn) {
  switch (dtype_size(dtype)) {
    case 1:
      return fn.template operator()<uint8_t>();
    case 2:
      return fn.template operator()<uint16_t>();
    case 4:
      return fn.template operator()<uint32_t>();
    default:
      return fn.template operator()<uint64_t>();
  }
}

template <class F>
void dispatch_floats(DType dtype, F&& fn) {
  COHORT_CHECK(is_float(dtype), "[copy_] ", dtype_name(dtype),
               " is converted on the CPU only; hint: to(Device{}) first");
  if (dtype == DType::kF64) return fn.template operator()<double>();
  if (dtype == DType::kF32) return fn.template operator()<float>();
  return fn.template operator()<__nv_bfloat16>();
}

Layout layout_of(const Tensor& to, const Tensor& from) {
  Layout layout{to.rank(), {}, {}, {}};
  for (int d = 0; d < to.rank(); ++d) {
    layout.size[d] = to.dim(d);
    layout.to[d] = to.strides()[d];
    layout.from[d] = from.strides()[d];
  }
  return layout;
}

template <class To, class From>
void launch_copy(Tensor& to, const Tensor& from) {
  auto* target = static_cast<To*>(to.raw());
  const auto* source = static_cast<const From*>(from.raw());
  const int64_t n = to.numel();
  if (to.is_contiguous() && from.is_contiguous())
    launch("copy", copy_flat<To, From>, grid_for(n), to.device(), target, source, n);
  else
    launch("copy", copy_strided<To, From>, grid_for(n), to.device(), target, source, n,
           layout_of(to, from));
}

// Both contiguous, of one dtype. To the host: returns when done.
void copy_bytes(Tensor& to, const Tensor& from) {
  const auto bytes = static_cast<size_t>(to.nbytes());
  if (from.device().is_cpu()) return upload(to.raw(), from.raw(), bytes, to.device());
  const cudaStream_t queue = stream(from.device());
  COHORT_CUDA_CHECK(cudaMemcpyAsync(to.raw(), from.raw(), bytes, cudaMemcpyDefault, queue));
  if (to.device().is_cpu()) COHORT_CUDA_CHECK(cudaStreamSynchronize(queue));
}

// What a thread moves at a time where it can.
struct alignas(16) Word {
  uint32_t part[4];
};

// The layout of a copy in words: the runs of elements that are contiguous in both tensors consist
// of whole ones. Rank 0 if some do not.
Layout word_layout(const Tensor& to, const Tensor& from) {
  int64_t run = 1;
  int outer = to.rank();  // dimensions around the runs
  for (; outer > 0 && to.strides()[outer - 1] == run && from.strides()[outer - 1] == run; --outer)
    run *= to.dim(outer - 1);
  const auto size = static_cast<int64_t>(dtype_size(to.dtype()));
  constexpr int64_t kWord = sizeof(Word);
  Layout layout = layout_of(to, from);
  layout.rank = outer + 1;
  layout.size[outer] = run * size / kWord;
  layout.to[outer] = layout.from[outer] = 1;
  bool whole = run * size % kWord == 0 && reinterpret_cast<uintptr_t>(to.raw()) % kWord == 0 &&
               reinterpret_cast<uintptr_t>(from.raw()) % kWord == 0;
  for (int d = 0; d < outer; ++d)
    for (int64_t* stride : {&layout.to[d], &layout.from[d]}) {
      whole = whole && *stride * size % kWord == 0;
      *stride = *stride * size / kWord;
    }
  return whole ? layout : Layout{};
}

// Both on one device.
void copy_elements(Tensor& to, const Tensor& from) {
  if (to.dtype() == from.dtype() && to.rank() < kMaxRank)
    if (const Layout layout = word_layout(to, from); layout.rank > 0) {
      const int64_t words = to.nbytes() / static_cast<int64_t>(sizeof(Word));
      return launch("copy", copy_strided<Word, Word>, grid_for(words), to.device(),
                    static_cast<Word*>(to.raw()), static_cast<const Word*>(from.raw()), words,
                    layout);
    }
  if (to.dtype() == from.dtype())
    return dispatch_bits(to.dtype(), [&]<class T>() { launch_copy<T, T>(to, from); });
  dispatch_floats(to.dtype(), [&]<class To>() {
    dispatch_floats(from.dtype(), [&]<class From>() {
      if constexpr (!std::is_same_v<To, From>) launch_copy<To, From>(to, from);
    });
  });
}

}  // namespace

void copy(Tensor& to, const Tensor& from) {
  // Two GPUs' streams have no common order, and a process trains on one GPU.
  COHORT_CHECK(to.device() == from.device() || to.device().is_cpu() || from.device().is_cpu(),
               "[copy_] from ", from.str(), " to ", to.str(),
               "; hint: to another GPU by way of the host: to(Device{})");
  if (to.dtype() == from.dtype() && to.is_contiguous() && from.is_contiguous())
    copy_bytes(to, from);
  else if (to.device() == from.device())
    copy_elements(to, from);
  else if (to.is_contiguous())  // convert where the elements are, then move them
    copy(to, from.to(to.dtype()).contiguous());
  else
    to.copy_(from.to(to.device()));
}

void fill(Tensor& t, double value) {
  const Tensor element = Tensor::full({1}, value, t.dtype());
  dispatch_bits(t.dtype(), [&]<class T>() {
    launch("fill", fill_strided<T>, grid_for(t.numel()), t.device(), static_cast<T*>(t.raw()),
           t.numel(), *static_cast<const T*>(element.raw()), layout_of(t, t));
  });
}

void zero(Tensor& t) {
  COHORT_CUDA_CHECK(
      cudaMemsetAsync(t.raw(), 0, static_cast<size_t>(t.nbytes()), stream(t.device())));
}

}  // namespace cohort::cuda
