// Copies, conversions and fills of device tensors.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/cuda_backend.h"
#include "core/launch.cuh"

namespace cohort::cuda {
namespace {

constexpr int kThreads = 256;

template <class To, class From>
__device__ To convert(From value) {
  if constexpr (std::is_same_v<From, To>)
    return value;
  else if constexpr (std::is_same_v<From, e4m3>)
    return convert<To>(static_cast<float>(value));
  else if constexpr (std::is_same_v<From, __nv_bfloat16>)
    return convert<To>(__bfloat162float(value));
  else if constexpr (std::is_same_v<From, __half>)
    return convert<To>(__half2float(value));
  else if constexpr (std::is_same_v<To, __nv_bfloat16>)
    return __float2bfloat16_rn(static_cast<float>(value));
  else if constexpr (std::is_same_v<To, e4m3>)
    return e4m3(static_cast<float>(value));
  else if constexpr (std::is_same_v<To, __half> && std::is_same_v<From, double>)
    return __double2half(value);
  else if constexpr (std::is_same_v<To, __half>)
    return __float2half_rn(value);
  else
    return static_cast<To>(value);
}

// Sizes and strides of a copy, in elements.
struct Layout {
  int rank;
  int64_t size[kMaxRank], to[kMaxRank], from[kMaxRank];
};

// Grid-stride loop over the elements in row-major order; the index in each dimension gives the
// offsets in both tensors.
template <class To, class From>
__global__ void copy_strided(To* to, const From* from, int64_t n, Layout layout) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < n;
       i += int64_t{kThreads} * gridDim.x) {
    int64_t remaining = i, to_offset = 0, from_offset = 0;
    for (int d = layout.rank - 1; d >= 0; --d) {
      const int64_t index = remaining % layout.size[d];
      remaining /= layout.size[d];
      to_offset += index * layout.to[d];
      from_offset += index * layout.from[d];
    }
    to[to_offset] = convert<To>(from[from_offset]);
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
    int64_t remaining = i, offset = 0;
    for (int d = layout.rank - 1; d >= 0; --d) {
      offset += remaining % layout.size[d] * layout.to[d];
      remaining /= layout.size[d];
    }
    to[offset] = value;
  }
}

LaunchShape grid_for(int64_t n) {
  return {{std::min(blocks_for(n, 4 * kThreads), 1u << 20)}, {kThreads}};
}

// Calls fn with the unsigned type of the element size, for copies without conversion.
template <class F>
void dispatch_bits(DType dtype, F&& fn) {
  const size_t size = dtype_size(dtype);
  if (size == 1) return fn.template operator()<uint8_t>();
  if (size == 2) return fn.template operator()<uint16_t>();
  if (size == 4) return fn.template operator()<uint32_t>();
  return fn.template operator()<uint64_t>();
}

template <class F>
void dispatch_floats(DType dtype, F&& fn) {
  COHORT_CHECK(!is_integer(dtype), "[copy_] ", dtype_name(dtype),
               " is converted on the CPU only; hint: to(Device{}) first");
  if (dtype == DType::kF64) return fn.template operator()<double>();
  if (dtype == DType::kF32) return fn.template operator()<float>();
  if (dtype == DType::kF16) return fn.template operator()<__half>();
  if (dtype == DType::kE4M3) return fn.template operator()<e4m3>();
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

// Both tensors are contiguous and of one dtype. A copy to the host is synchronous.
void copy_bytes(Tensor& to, const Tensor& from) {
  const auto bytes = static_cast<size_t>(to.nbytes());
  if (from.device().is_cpu()) return upload(to.raw(), from.raw(), bytes, to.device());
  const cudaStream_t queue = stream(from.device());
  COHORT_CUDA_CHECK(cudaMemcpyAsync(to.raw(), from.raw(), bytes, cudaMemcpyDefault, queue));
  record_trigger(queue, Trigger::kLate);
  if (to.device().is_cpu()) COHORT_CUDA_CHECK(cudaStreamSynchronize(queue));
}

// Unit of vectorized copies.
struct alignas(16) Word {
  uint32_t part[4];
};

// Layout of a copy in units of Word; rank 0 if the runs of elements that are contiguous in both
// tensors do not consist of whole aligned words.
Layout word_layout(const Tensor& to, const Tensor& from) {
  int64_t run = 1;
  int outer = to.rank();  // number of dimensions outside the runs
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

// Both tensors are on one device.
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
  // The streams of two GPUs are not ordered, and a process trains on one GPU.
  COHORT_CHECK(to.device() == from.device() || to.device().is_cpu() || from.device().is_cpu(),
               "[copy_] from ", from.str(), " to ", to.str(),
               "; hint: copy to another GPU through the host: to(Device{})");
  if (to.dtype() == from.dtype() && to.is_contiguous() && from.is_contiguous())
    copy_bytes(to, from);
  else if (to.device() == from.device())
    copy_elements(to, from);
  else if (to.is_contiguous())  // convert on the source device, then copy
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
  const cudaStream_t queue = stream(t.device());
  COHORT_CUDA_CHECK(cudaMemsetAsync(t.raw(), 0, static_cast<size_t>(t.nbytes()), queue));
  record_trigger(queue, Trigger::kLate);
}

}  // namespace cohort::cuda
