// The copy engine of sm_90 and the barriers in shared memory that count what it has copied, one
// wrapper each. Only code for sm_90 and newer may call them.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "core/cuda.h"

namespace cohort::kernels::cuda {

// A barrier's phase ends when `arrivals` threads have arrived and all announced bytes are there.
// The threads that use it wait for each other (__syncthreads()) after the calls.
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
// Arrives, and announces bytes that tma_load() will copy.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("{.reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [%0], %1;}\n" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}
// Announces bytes that tma_load() will copy; the thread arrives later.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\n" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}
// Whether the phase of this parity (0 for the first one) has ended.
__device__ __forceinline__ bool barrier_is_done(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  asm volatile(
      "{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
      "@!p bra again;\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Arrives, and waits until the phase has ended.
__device__ __forceinline__ void barrier_arrive_and_wait(uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 s;\n"
      "mbarrier.arrive.shared.b64 s, [%0];\n"
      "again: mbarrier.try_wait.shared.b64 p, [%0], s;\n"
      "@!p bra again;\n}\n" ::"r"(barrier)
      : "memory");
}

// A warp's first thread arrives when all of its threads are here.
__device__ __forceinline__ void release(uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}
// Number i of the things that use kCount stages one after the other is in `stage`; parity: of the
// times that others were there before.
template <int kCount>
struct Turn {
  int stage;
  uint32_t parity;
  __device__ explicit Turn(int i)
      : stage(static_cast<int>(static_cast<uint32_t>(i) % kCount)),
        parity(static_cast<uint32_t>(i) / kCount % 2) {}
};

// A place in a tensor of four dimensions, the innermost first.
struct TmaPlace {
  int at[4];
};
// Starts the copy of the box at `from` of a tensor to shared memory (aligned to 1 KiB for the
// swizzle of 128 bytes); what lies outside the tensor becomes zeros. Each thread that calls it
// starts a copy of its own.
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap* map, const TmaPlace& from,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%2, %3, %4, %5}], [%6];\n" ::"r"(to),
      "l"(map), "r"(from.at[0]), "r"(from.at[1]), "r"(from.at[2]), "r"(from.at[3]), "r"(barrier)
      : "memory");
}
// The same for `bytes` that lie one after the other: a multiple of 16, as both addresses are.
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, int bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// Starts the copy of the box at `to` of a tensor from shared memory; what lies outside the tensor
// is left out.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, const TmaPlace& to,
                                          uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], "
      "[%5];\n" ::"l"(map),
      "r"(to.at[0]), "r"(to.at[1]), "r"(to.at[2]), "r"(to.at[3]), "r"(from)
      : "memory");
}
// Ends a group of the thread's copies to memory.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}
// Waits until the thread's groups have been read from shared memory; or until they are there, too.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory");
}
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory");
}

// Orders what this thread has read from and written to shared memory before copies to it that are
// started after a barrier at which the thread arrives next. Without it a load that is under way
// when the thread arrives may see what is copied.
__device__ __forceinline__ void fence_before_tma() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}
// Fetches the description of a tensor, which the first copy would wait for.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

// A bf16 tensor as the copy engine sees it, the innermost dimension first: elements, bytes from one
// to the next of all dimensions but the innermost, and elements of a box, whose rows of up to 128
// bytes are swizzled by that period, or by 64 if that is what they have.
struct TmaTensor {
  const Tensor& t;
  cuuint64_t sizes[4], strides[3];
  cuuint32_t box[4];
};
inline CUtensorMap tma_describe(const TmaTensor& in) {
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
  const CUtensorMapSwizzle swizzle = in.box[0] * sizeof(__nv_bfloat16) == 64
                                         ? CU_TENSOR_MAP_SWIZZLE_64B
                                         : CU_TENSOR_MAP_SWIZZLE_128B;
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(in.t.raw()), in.sizes,
             in.strides, in.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  COHORT_CHECK(result == CUDA_SUCCESS, "[tma] the copy engine does not take ", in.t.str(),
               ", error ", static_cast<int>(result));
  return map;
}

}  // namespace cohort::kernels::cuda
