// Wrappers of the warpgroup MMA instructions of sm_90a (wgmma): 128 threads, four warps whose first
// index is a multiple of four, multiply a [64, 16] tile of A by a [16, N] tile of B with f32
// accumulators. Execution is asynchronous: operands and accumulators must not be accessed before
// wgmma_wait().
//
// Accumulators: warp w holds rows 16 w to 16 w + 15 in the layout of mma.m16n8k16 (mma.cuh), N / 8
// times: c[n][0], c[n][1] row group, columns 8 n + 2 quad and 8 n + 2 quad + 1; c[n][2], c[n][3]
// row group + 8. A in registers has the layout of mma.m16n8k16's A. Results are bitwise equal to
// mma.m16n8k16 in ascending steps of 16.
//
// Matrices in shared memory consist of panels: rows of 64 bf16 values (128 bytes) in the 128-byte
// swizzle (panel_offset()). Panels are aligned to 1 KiB; a matrix of more than 64 columns is a
// sequence of panels, each with all rows. An operand is K-major (k runs along its rows) or MN-major
// (k runs over its rows).
//
// In e4m3 a step is 32 of K, and operands in shared memory are K-major, without a swizzle: core
// matrices of 8 rows of 16 bytes, 128 contiguous bytes each. A in registers: bytes 4 quad to 4 quad
// + 3 of each half of the 32. The bits do not depend on N or on where A is.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace cohort::kernels::cuda {

inline constexpr int kWarpgroup = 128;

// Byte offset of a chunk of 8 values in a row of a matrix whose panels have kPanelRows rows.
template <int kPanelRows>
__device__ __forceinline__ uint32_t panel_offset(int row, int chunk) {
  return static_cast<uint32_t>(chunk / 8 * (kPanelRows * 128) + row * 128 +
                               (((chunk ^ row) & 7) << 4));
}

// Lower half of an operand's shared memory descriptor, in units of 16 bytes. The upper half is
// constant: a stride of 1 KiB between groups of eight rows, and the 128-byte swizzle.
struct MatrixDescriptor {
  static constexpr uint32_t kUpper = 1024 >> 4 | 1u << 30;
  uint32_t lower;

  // Descriptor of the operand `bytes` further.
  __device__ __forceinline__ MatrixDescriptor plus(int bytes) const {
    return {lower + static_cast<uint32_t>(bytes / 16)};
  }
};

// Descriptor of the operand at `address`. The panel stride `panel_bytes` is used only by MN-major
// operands of more than 64 columns, and in e4m3 it is the stride between core matrices along K.
__device__ __forceinline__ MatrixDescriptor matrix_descriptor(uint32_t address,
                                                              uint32_t panel_bytes = 16) {
  return {(address & 0x3ffff) >> 4 | panel_bytes >> 4 << 16};
}

// Descriptor of the k-th step of 16 along K: 16 columns (K-major) or 16 rows (MN-major) further.
template <int kPanelRows>
__device__ __forceinline__ MatrixDescriptor k_major_step(MatrixDescriptor operand, int k) {
  return operand.plus(k / 4 * (kPanelRows * 128) + k % 4 * 32);
}
__device__ __forceinline__ MatrixDescriptor mn_major_step(MatrixDescriptor operand, int k) {
  return operand.plus(k * (16 * 128));
}

// Required before the first wgmma that reads registers written by the threads.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
// Commits the wgmmas issued so far as a group.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
// Waits until at most kPending groups are pending.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}
// Compiler fence for accesses to the accumulators.
template <int kN>
__device__ __forceinline__ void wgmma_fence_operand(float (&c)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(c[n][i])::"memory");
}

enum class Major { kK, kMN };  // contiguous dimension of an operand in shared memory

#define COHORT_ACCUMULATORS_8(c, n)                                              \
  "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3]), "+f"(c[n + 1][0]), \
      "+f"(c[n + 1][1]), "+f"(c[n + 1][2]), "+f"(c[n + 1][3])
#define COHORT_ACCUMULATORS_32(c, n)                                                             \
  COHORT_ACCUMULATORS_8(c, n), COHORT_ACCUMULATORS_8(c, n + 2), COHORT_ACCUMULATORS_8(c, n + 4), \
      COHORT_ACCUMULATORS_8(c, n + 6)
#define COHORT_REGISTERS_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define COHORT_REGISTERS_32                                                            \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22," \
  "%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define COHORT_REGISTERS_48 \
  COHORT_REGISTERS_32       \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define COHORT_REGISTERS_64 \
  COHORT_REGISTERS_48       \
  ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define COHORT_REGISTERS_96                                                               \
  COHORT_REGISTERS_64                                                                     \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84," \
  "%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define COHORT_REGISTERS_128                                                      \
  COHORT_REGISTERS_96                                                             \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
  "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// The instruction for n columns of B, with A by a descriptor (SHARED) or in registers. Arguments in
// capitals are the numbers of the operands after the accumulators, in the order of the constraints.
#define COHORT_WGMMA_SHARED(n, registers, A, B, ADD, MAJOR_A, MAJOR_B, UPPER, ...)              \
  asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %" #ADD                       \
               ", 0;\n"                                                                         \
               "mov.b64 a, {%" #A ", %" #UPPER "};\nmov.b64 b, {%" #B ", %" #UPPER              \
               "};\n"                                                                           \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" registers           \
               "}, a, b, p, 1, 1, %" #MAJOR_A ", %" #MAJOR_B ";\n}\n"                           \
               : __VA_ARGS__                                                                    \
               : "r"(a.lower), "r"(b.lower), "r"(static_cast<int>(add)), "n"(kA == Major::kMN), \
                 "n"(kB == Major::kMN), "n"(MatrixDescriptor::kUpper)                           \
               : "memory")
#define COHORT_WGMMA(n, registers, A0, A1, A2, A3, B, MAJOR_B, UPPER, ...)                        \
  asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.eq.b32 p, 0, 0;\nmov.b64 b, {%" #B           \
               ", %" #UPPER                                                                       \
               "};\n"                                                                             \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" registers "}, {%" #A0 \
               ",%" #A1 ",%" #A2 ",%" #A3 "}, b, p, 1, 1, %" #MAJOR_B ";\n}\n"                    \
               : __VA_ARGS__                                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.lower), "n"(kB == Major::kMN), \
                 "n"(MatrixDescriptor::kUpper)                                                    \
               : "memory")

#define COHORT_WGMMA_E4M3_SHARED(n, registers, A, B, ADD, UPPER_A, UPPER_B, ...)             \
  asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %" #ADD                    \
               ", 0;\n"                                                                      \
               "mov.b64 a, {%" #A ", %" #UPPER_A "};\nmov.b64 b, {%" #B ", %" #UPPER_B       \
               "};\n"                                                                        \
               "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" registers        \
               "}, a, b, p, 1, 1;\n}\n"                                                      \
               : __VA_ARGS__                                                                 \
               : "r"(a.lower), "r"(b.lower), "r"(static_cast<int>(add)), "n"(kStrideA >> 4), \
                 "n"(kStrideB >> 4)                                                          \
               : "memory")

#define COHORT_WGMMA_E4M3(n, registers, A0, A1, A2, A3, B, ADD, UPPER, ...)                       \
  asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %" #ADD ", 0;\nmov.b64 b, {%" #B   \
               ", %" #UPPER                                                                       \
               "};\n"                                                                             \
               "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" registers "}, {%" #A0 \
               ",%" #A1 ",%" #A2 ",%" #A3 "}, b, p, 1, 1;\n}\n"                                   \
               : __VA_ARGS__                                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.lower),                        \
                 "r"(static_cast<int>(add)), "n"(kStrideB >> 4)                                   \
               : "memory")

// c = a b, or c += a b if `add`. A: [64, 16], B: [16, 8 kN], both by matrix_descriptor().
template <Major kA, Major kB, int kN>
__device__ __forceinline__ void wgmma(float (&c)[kN][4], MatrixDescriptor a, MatrixDescriptor b,
                                      bool add) {
  static_assert(kN == 8 || kN == 16 || kN == 24 || kN == 32);
  if constexpr (kN == 8)
    COHORT_WGMMA_SHARED(64, COHORT_REGISTERS_32, 32, 33, 34, 35, 36, 37,
                        COHORT_ACCUMULATORS_32(c, 0));
  else if constexpr (kN == 16)
    COHORT_WGMMA_SHARED(128, COHORT_REGISTERS_64, 64, 65, 66, 67, 68, 69,
                        COHORT_ACCUMULATORS_32(c, 0), COHORT_ACCUMULATORS_32(c, 8));
  else if constexpr (kN == 24)
    COHORT_WGMMA_SHARED(192, COHORT_REGISTERS_96, 96, 97, 98, 99, 100, 101,
                        COHORT_ACCUMULATORS_32(c, 0), COHORT_ACCUMULATORS_32(c, 8),
                        COHORT_ACCUMULATORS_32(c, 16));
  else
    COHORT_WGMMA_SHARED(256, COHORT_REGISTERS_128, 128, 129, 130, 131, 132, 133,
                        COHORT_ACCUMULATORS_32(c, 0), COHORT_ACCUMULATORS_32(c, 8),
                        COHORT_ACCUMULATORS_32(c, 16), COHORT_ACCUMULATORS_32(c, 24));
}

// c += a b with A in registers.
template <Major kB, int kN>
__device__ __forceinline__ void wgmma(float (&c)[kN][4], const uint32_t (&a)[4],
                                      MatrixDescriptor b) {
  static_assert(kN == 8 || kN == 12 || kN == 16 || kN == 24 || kN == 32);
  if constexpr (kN == 8)
    COHORT_WGMMA(64, COHORT_REGISTERS_32, 32, 33, 34, 35, 36, 37, 38, COHORT_ACCUMULATORS_32(c, 0));
  else if constexpr (kN == 12)
    COHORT_WGMMA(96, COHORT_REGISTERS_48, 48, 49, 50, 51, 52, 53, 54, COHORT_ACCUMULATORS_32(c, 0),
                 COHORT_ACCUMULATORS_8(c, 8), COHORT_ACCUMULATORS_8(c, 10));
  else if constexpr (kN == 16)
    COHORT_WGMMA(128, COHORT_REGISTERS_64, 64, 65, 66, 67, 68, 69, 70, COHORT_ACCUMULATORS_32(c, 0),
                 COHORT_ACCUMULATORS_32(c, 8));
  else if constexpr (kN == 24)
    COHORT_WGMMA(192, COHORT_REGISTERS_96, 96, 97, 98, 99, 100, 101, 102,
                 COHORT_ACCUMULATORS_32(c, 0), COHORT_ACCUMULATORS_32(c, 8),
                 COHORT_ACCUMULATORS_32(c, 16));
  else
    COHORT_WGMMA(256, COHORT_REGISTERS_128, 128, 129, 130, 131, 132, 133, 134,
                 COHORT_ACCUMULATORS_32(c, 0), COHORT_ACCUMULATORS_32(c, 8),
                 COHORT_ACCUMULATORS_32(c, 16), COHORT_ACCUMULATORS_32(c, 24));
}

// e4m3: c = a b, or c += a b if `add`, with strides between core matrices along M and N, in bytes.
template <int kStrideA, int kStrideB, int kN>
__device__ __forceinline__ void wgmma_e4m3(float (&c)[kN][4], MatrixDescriptor a,
                                           MatrixDescriptor b, bool add) {
  static_assert(kN == 4 || kN == 8 || kN == 16);
  if constexpr (kN == 4)
    COHORT_WGMMA_E4M3_SHARED(32, COHORT_REGISTERS_16, 16, 17, 18, 19, 20,
                             COHORT_ACCUMULATORS_8(c, 0), COHORT_ACCUMULATORS_8(c, 2));
  else if constexpr (kN == 8)
    COHORT_WGMMA_E4M3_SHARED(64, COHORT_REGISTERS_32, 32, 33, 34, 35, 36,
                             COHORT_ACCUMULATORS_32(c, 0));
  else
    COHORT_WGMMA_E4M3_SHARED(128, COHORT_REGISTERS_64, 64, 65, 66, 67, 68,
                             COHORT_ACCUMULATORS_32(c, 0), COHORT_ACCUMULATORS_32(c, 8));
}
// With A in registers.
template <int kStrideB, int kN>
__device__ __forceinline__ void wgmma_e4m3(float (&c)[kN][4], const uint32_t (&a)[4],
                                           MatrixDescriptor b, bool add) {
  static_assert(kN == 4 || kN == 8);
  if constexpr (kN == 4)
    COHORT_WGMMA_E4M3(32, COHORT_REGISTERS_16, 16, 17, 18, 19, 20, 21, 22,
                      COHORT_ACCUMULATORS_8(c, 0), COHORT_ACCUMULATORS_8(c, 2));
  else
    COHORT_WGMMA_E4M3(64, COHORT_REGISTERS_32, 32, 33, 34, 35, 36, 37, 38,
                      COHORT_ACCUMULATORS_32(c, 0));
}

#undef COHORT_ACCUMULATORS_8
#undef COHORT_ACCUMULATORS_32
#undef COHORT_REGISTERS_16
#undef COHORT_REGISTERS_32
#undef COHORT_REGISTERS_48
#undef COHORT_REGISTERS_64
#undef COHORT_REGISTERS_96
#undef COHORT_REGISTERS_128
#undef COHORT_WGMMA_SHARED
#undef COHORT_WGMMA_E4M3_SHARED
#undef COHORT_WGMMA_E4M3
#undef COHORT_WGMMA

// Stores four 8x8 bf16 matrices to shared memory, the inverse of load_matrices().
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Reduces or raises the warpgroup's register count to kRegisters per thread (setmaxnreg).
template <int kRegisters>
__device__ __forceinline__ void deallocate_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void allocate_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// Named barrier `number` for `threads` threads (whole warps); number 0 is used by __syncthreads().
__device__ __forceinline__ void named_barrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(number), "r"(threads) : "memory");
}
// Arrives at a named barrier without waiting.
__device__ __forceinline__ void named_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(number), "r"(threads) : "memory");
}

}  // namespace cohort::kernels::cuda
