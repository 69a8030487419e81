// Wrappers of the sm_90 TMA and mbarrier instructions. Only code for sm_90 and newer may call them.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/device.cuh"

namespace cohort::kernels::cuda {

// A barrier's phase completes after `arrivals` arrivals and all expected transaction bytes. Threads
// that use the barrier must synchronise (__syncthreads()) after its initialisation.
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile(
      "mbarrier.init.shared.b64 [%0], %1;\n"
      "fence.mbarrier_init.release.cluster;\n" ::"r"(barrier),
      "r"(arrivals)
      : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("{.reg .b64 s; mbarrier.arrive.shared.b64 s, [%0];}\n" ::"r"(barrier) : "memory");
}
// Arrives and expects the bytes that tma_load() will copy.
__device__ __forceinline__ void barrier_arrive_expect_tx(uint32_t barrier, int bytes) {
  asm volatile("{.reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [%0], %1;}\n" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}
// Expects bytes that tma_load() will copy, without arriving.
__device__ __forceinline__ void barrier_expect_tx(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\n" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}
// Non-blocking test: true if the phase of this parity (0 for the first) has completed.
__device__ __forceinline__ bool barrier_is_done(uint32_t barrier, uint32_t phase) {
  uint32_t done = 0;
  asm volatile(
      "{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}\n"
      : "=r"(done)
      : "r"(barrier), "r"(phase)
      : "memory");
  return done != 0;
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t phase) {
#ifdef COHORT_SPIN_LIMIT
  for (SpinLimit limit; !barrier_is_done(barrier, phase);) limit.check();
#else
  asm volatile(
      "{\n.reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
      "@!p bra again;\n}\n" ::"r"(barrier),
      "r"(phase)
      : "memory");
#endif
}
// Arrives and waits for the phase to complete.
__device__ __forceinline__ void barrier_arrive_and_wait(uint32_t barrier) {
  uint64_t state;
  asm volatile("mbarrier.arrive.shared.b64 %0, [%1];\n" : "=l"(state) : "r"(barrier) : "memory");
  SpinLimit limit;
  for (uint32_t done = 0; done == 0; limit.check())
    asm volatile("{.reg .pred p; mbarrier.try_wait.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}\n"
                 : "=r"(done)
                 : "r"(barrier), "l"(state)
                 : "memory");
}

// Arrives with one thread after all threads of the warp have reached this point.
__device__ __forceinline__ void arrive_once_per_warp(uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// Element coordinates in a 4-D tensor, innermost dimension first.
struct TmaCoordinates {
  int index[4];
};
// Starts a TMA load of the box at `from` into shared memory (aligned to 1 KiB for the 128-byte
// swizzle); elements outside the tensor are filled with zeros. Every calling thread issues a copy,
// so one thread has to be elected.
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap* map,
                                         const TmaCoordinates& from, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%2, %3, %4, %5}], [%6];\n" ::"r"(to),
      "l"(map), "r"(from.index[0]), "r"(from.index[1]), "r"(from.index[2]), "r"(from.index[3]),
      "r"(barrier)
      : "memory");
}
// Bulk load of `bytes` contiguous bytes; size and both addresses are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, int bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// Starts a TMA store from shared memory to the box at `to`; elements outside the tensor are
// skipped.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, const TmaCoordinates& to,
                                          uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], "
      "[%5];\n" ::"l"(map),
      "r"(to.index[0]), "r"(to.index[1]), "r"(to.index[2]), "r"(to.index[3]), "r"(from)
      : "memory");
}
// Asynchronous bulk store from shared to global memory, and its reduction (+=) variant.
__device__ __forceinline__ void bulk_store(float* to, uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_reduce_add(float* to, uint32_t from, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}

// Commits this thread's TMA stores as a bulk group.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}
// Waits until this thread's bulk groups have read shared memory; bulk_wait() also waits until their
// writes are complete.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory");
}
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory");
}

// Orders this thread's stores to shared memory, and loads still in flight, before accesses of the
// async proxy (TMA, wgmma) by those that wait for its next barrier arrival. PTX asks for it after
// loads of any kind. But a load whose value has been used cannot return what TMA writes later, so
// memory that was only read is released without a fence (skinny_gemm.cuh, lora.cu, head.cu,
// backward_wide.cuh).
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}
// Prefetches the tensor map, for which the first copy would have to wait.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

// Arguments of the tensor map of a tensor in bf16 or e4m3, innermost dimension first. In bf16, box
// rows of 64 bytes use the 64-byte swizzle, all others the 128-byte swizzle; e4m3 has none.
struct TmaTensor {
  const Tensor& t;
  cuuint64_t sizes[4], strides[3];  // elements; bytes, without the innermost dimension
  cuuint32_t box[4];                // elements
};
inline CUtensorMap make_tensor_map(const TmaTensor& in) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    COHORT_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                       cudaEnableDefault, &found));
    COHORT_CHECK(found == cudaDriverEntryPointSuccess,
                 "[tma] the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(function);
  }();
  const cuuint32_t steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  const bool is_e4m3 = in.t.dtype() == DType::kE4M3;
  const CUtensorMapSwizzle swizzle = is_e4m3 ? CU_TENSOR_MAP_SWIZZLE_NONE
                                     : in.box[0] * sizeof(__nv_bfloat16) == 64
                                         ? CU_TENSOR_MAP_SWIZZLE_64B
                                         : CU_TENSOR_MAP_SWIZZLE_128B;
  const CUresult result =
      encode(&map, is_e4m3 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
             const_cast<void*>(in.t.raw()), in.sizes, in.strides, in.box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  COHORT_CHECK(result == CUDA_SUCCESS, "[tma] cannot create a tensor map of ", in.t.str(),
               ", error ", static_cast<int>(result));
  return map;
}

}  // namespace cohort::kernels::cuda
