// The tensor core and copy instructions of sm_80, one wrapper each.
//
// mma.m16n8k16 in a warp, with lane = 4 group + quad (group 0..7, quad 0..3):
//   A 16x16 bf16, four registers of two values: a[0] row group, columns 2 quad, 2 quad + 1;
//     a[1] row group + 8; a[2], a[3] the same rows, columns + 8
//   B 16x8 bf16 (k x n), two registers: b[0] column n = group, k = 2 quad, 2 quad + 1; b[1] k + 8
//   C 16x8 f32: c[0], c[1] row group, columns 2 quad, 2 quad + 1; c[2], c[3] row group + 8
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace cohort::kernels::cuda {

// c += a b. Products of a call are added in the hardware's order, the same on every call.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Four 8x8 matrices of bf16 from shared memory: lane l gives the address of row l % 8 of matrix
// l / 8 (16 bytes, aligned); register i of a lane holds elements 2 quad, 2 quad + 1 of row `group`
// of matrix i. The transposed form holds elements (row 2 quad and 2 quad + 1, column group).
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// 16 bytes from global to shared memory, beside the threads' own work; zeros if `bytes` is 0. Both
// addresses are aligned to 16.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
// The same for 4 or 8 bytes, with addresses aligned to as many.
template <int kBytes>
__device__ __forceinline__ void copy_async_small(uint32_t to, const void* from, int bytes) {
  static_assert(kBytes == 4 || kBytes == 8);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(to), "l"(from), "n"(kBytes),
               "r"(bytes)
               : "memory");
}
// Ends a group of the copies issued so far by this thread.
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}
// Waits until at most kPending groups of this thread are under way; a barrier makes the data
// visible to the others.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Two values rounded to bf16, the first in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

inline constexpr float kLog2e = 1.4426950408889634074f;

// 2^x by the special function unit, within two units in the last place: 2^-inf = 0, 2^0 = 1, and 0
// below 2^-126 (.ftz: one instruction instead of four).
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace cohort::kernels::cuda
