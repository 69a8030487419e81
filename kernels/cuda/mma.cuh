// Wrappers of the sm_80 tensor core and asynchronous copy instructions.
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

// c += a b. The hardware's accumulation order within a call is fixed.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The bits of c, as s32, += a b of mma.m16n8k32 in i8, exactly: a register of a or b has four
// adjacent numbers, and 4 quad, 16 and 32 replace 2 quad, 8 and 16 above.
__device__ __forceinline__ void mma_i8(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                       uint32_t b1) {
  auto& bits = reinterpret_cast<int32_t(&)[4]>(c);
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};\n"
      : "+r"(bits[0]), "+r"(bits[1]), "+r"(bits[2]), "+r"(bits[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Loads four 8x8 bf16 matrices from shared memory: lane l passes the address of row l % 8 of matrix
// l / 8 (16 bytes, aligned); register i of a lane receives elements 2 quad, 2 quad + 1 of row
// `group` of matrix i. The transposed form: elements (2 quad, group) and (2 quad + 1, group).
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

// Asynchronous copy of 16 bytes from global to shared memory; writes zeros if `bytes` is 0. Both
// addresses are aligned to 16.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
// Asynchronous copy of 4 or 8 bytes, with both addresses aligned to that size.
template <int kBytes>
__device__ __forceinline__ void copy_async_small(uint32_t to, const void* from, int bytes) {
  static_assert(kBytes == 4 || kBytes == 8);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(to), "l"(from), "n"(kBytes),
               "r"(bytes)
               : "memory");
}
// Commits the copies issued so far by this thread as a group.
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}
// Waits until at most kPending groups of this thread are pending. A barrier is required before
// other threads read the data.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Rounds two values to bf16, with the first in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

inline constexpr float kLog2e = 1.4426950408889634074f;

// 2^x by the special function unit, within two ulp: 2^-inf = 0, 2^0 = 1, and 0 below 2^-126 (.ftz:
// one instruction instead of four).
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace cohort::kernels::cuda
