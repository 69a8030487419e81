// The warpgroup products of sm_90a (wgmma), one wrapper each: 128 threads, four warps whose first
// is a multiple of four, multiply 64 rows of A by N columns of B, sums in f32. They are issued and
// then run beside the threads' own work; what they read and write may not be touched before
// wgmma_wait().
//
// Accumulators: warp w has rows 16 w to 16 w + 15, and of those the layout of mma.m16n8k16
// (mma.cuh), N / 8 times: c[n][0], c[n][1] row group, columns 8 n + 2 quad and the next; c[n][2],
// c[n][3] row group + 8. A in registers has the layout of mma.m16n8k16's A. The sums have the bits
// of mma.m16n8k16 in ascending steps of 16.
//
// Matrices in shared memory are made of panels: rows of 64 bf16 values, 128 bytes, whose chunks of
// 16 bytes are swapped around by the row's number (panel_offset()). A panel starts at a multiple of
// 1 KiB, and a matrix of more columns is several panels of all its rows, one after the other. A
// factor is read along its rows (the sum runs over columns), or across them (over rows).
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace cohort::kernels::cuda {

inline constexpr int kWarpgroup = 128;

// The byte offset of a chunk of 8 values of a row, counted over all panels of `rows` rows.
template <int kPanelRows>
__device__ __forceinline__ uint32_t panel_offset(int row, int chunk) {
  return static_cast<uint32_t>(chunk / 8 * (kPanelRows * 128) + row * 128 +
                               (((chunk ^ row) & 7) << 4));
}

// How the hardware finds a factor: the lower half of its descriptor, which counts in 16 bytes. The
// upper half is the same for all: groups of eight rows follow each other by 1 KiB, chunks are
// swapped around in 128 bytes.
struct WgmmaFactor {
  static constexpr uint32_t kUpper = 1024 >> 4 | 1u << 30;
  uint32_t lower;

  // The factor that begins so many bytes later.
  __device__ __forceinline__ WgmmaFactor plus(int bytes) const {
    return {lower + static_cast<uint32_t>(bytes / 16)};
  }
};

// The factor that begins at `address`; `panel_bytes`, between panels, counts where a factor that is
// read across its rows has more than 64 columns.
__device__ __forceinline__ WgmmaFactor wgmma_factor(uint32_t address, uint32_t panel_bytes = 16) {
  return {(address & 0x3ffff) >> 4 | panel_bytes >> 4 << 16};
}

// Step k of 16 of a factor: 16 columns further along the rows, or 16 rows further.
template <int kPanelRows>
__device__ __forceinline__ WgmmaFactor along_rows(WgmmaFactor factor, int k) {
  return factor.plus(k / 4 * (kPanelRows * 128) + k % 4 * 32);
}
__device__ __forceinline__ WgmmaFactor across_rows(WgmmaFactor factor, int k) {
  return factor.plus(k * (16 * 128));
}

// Before the first product that reads registers which the threads have written.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
// Ends a group of the products issued so far.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
// Waits until at most kPending groups are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving accesses to accumulators across this point.
template <int kN>
__device__ __forceinline__ void wgmma_hold(float (&c)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(c[n][i])::"memory");
}

enum class Read { kAlongRows, kAcrossRows };

#define COHORT_SUMS_8(c, n)                                                      \
  "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3]), "+f"(c[n + 1][0]), \
      "+f"(c[n + 1][1]), "+f"(c[n + 1][2]), "+f"(c[n + 1][3])
#define COHORT_SUMS_32(c, n) \
  COHORT_SUMS_8(c, n), COHORT_SUMS_8(c, n + 2), COHORT_SUMS_8(c, n + 4), COHORT_SUMS_8(c, n + 6)
#define COHORT_NAMES_32                                                                \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22," \
  "%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define COHORT_NAMES_48 \
  COHORT_NAMES_32       \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define COHORT_NAMES_64 \
  COHORT_NAMES_48       \
  ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define COHORT_NAMES_96                                                                   \
  COHORT_NAMES_64                                                                         \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84," \
  "%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define COHORT_NAMES_128                                                          \
  COHORT_NAMES_96                                                                 \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
  "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// c = a b, or c += a b. A: 64 rows, by wgmma_factor(); B: 8 kN columns. kA, kB: how the two lie in
// shared memory; kAlongRows: rows of A, columns of B are rows there.
template <Read kA, Read kB, int kN>
__device__ __forceinline__ void wgmma(float (&c)[kN][4], WgmmaFactor a, WgmmaFactor b, bool add) {
  static_assert(kN == 8 || kN == 16 || kN == 24 || kN == 32);
  if constexpr (kN == 8)
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %34, 0;\n"
        "mov.b64 a, {%32, %37};\nmov.b64 b, {%33, %37};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" COHORT_NAMES_32
        "}, a, b, p, 1, 1, %35, %36;\n}\n"
        : COHORT_SUMS_32(c, 0)
        : "r"(a.lower), "r"(b.lower), "r"(static_cast<int>(add)), "n"(kA == Read::kAcrossRows),
          "n"(kB == Read::kAcrossRows), "n"(WgmmaFactor::kUpper)
        : "memory");
  else if constexpr (kN == 16)
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %66, 0;\n"
        "mov.b64 a, {%64, %69};\nmov.b64 b, {%65, %69};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" COHORT_NAMES_64
        "}, a, b, p, 1, 1, %67, %68;\n}\n"
        : COHORT_SUMS_32(c, 0), COHORT_SUMS_32(c, 8)
        : "r"(a.lower), "r"(b.lower), "r"(static_cast<int>(add)), "n"(kA == Read::kAcrossRows),
          "n"(kB == Read::kAcrossRows), "n"(WgmmaFactor::kUpper)
        : "memory");
  else if constexpr (kN == 24)
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %98, 0;\n"
        "mov.b64 a, {%96, %101};\nmov.b64 b, {%97, %101};\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" COHORT_NAMES_96
        "}, a, b, p, 1, 1, %99, %100;\n}\n"
        : COHORT_SUMS_32(c, 0), COHORT_SUMS_32(c, 8), COHORT_SUMS_32(c, 16)
        : "r"(a.lower), "r"(b.lower), "r"(static_cast<int>(add)), "n"(kA == Read::kAcrossRows),
          "n"(kB == Read::kAcrossRows), "n"(WgmmaFactor::kUpper)
        : "memory");
  else
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %130, 0;\n"
        "mov.b64 a, {%128, %133};\nmov.b64 b, {%129, %133};\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" COHORT_NAMES_128
        "}, a, b, p, 1, 1, %131, %132;\n}\n"
        : COHORT_SUMS_32(c, 0), COHORT_SUMS_32(c, 8), COHORT_SUMS_32(c, 16), COHORT_SUMS_32(c, 24)
        : "r"(a.lower), "r"(b.lower), "r"(static_cast<int>(add)), "n"(kA == Read::kAcrossRows),
          "n"(kB == Read::kAcrossRows), "n"(WgmmaFactor::kUpper)
        : "memory");
}

// c += a b with A in registers.
template <Read kB, int kN>
__device__ __forceinline__ void wgmma(float (&c)[kN][4], const uint32_t (&a)[4], WgmmaFactor b) {
  static_assert(kN == 8 || kN == 12 || kN == 16 || kN == 24 || kN == 32);
  if constexpr (kN == 8)
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.eq.b32 p, 0, 0;\nmov.b64 b, {%36, %38};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" COHORT_NAMES_32
        "}, {%32,%33,%34,%35}, b, p, 1, 1, %37;\n}\n"
        : COHORT_SUMS_32(c, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.lower), "n"(kB == Read::kAcrossRows),
          "n"(WgmmaFactor::kUpper)
        : "memory");
  else if constexpr (kN == 12)
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.eq.b32 p, 0, 0;\nmov.b64 b, {%52, %54};\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {" COHORT_NAMES_48
        "}, {%48,%49,%50,%51}, b, p, 1, 1, %53;\n}\n"
        : COHORT_SUMS_32(c, 0), COHORT_SUMS_8(c, 8), COHORT_SUMS_8(c, 10)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.lower), "n"(kB == Read::kAcrossRows),
          "n"(WgmmaFactor::kUpper)
        : "memory");
  else if constexpr (kN == 16)
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.eq.b32 p, 0, 0;\nmov.b64 b, {%68, %70};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" COHORT_NAMES_64
        "}, {%64,%65,%66,%67}, b, p, 1, 1, %69;\n}\n"
        : COHORT_SUMS_32(c, 0), COHORT_SUMS_32(c, 8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.lower), "n"(kB == Read::kAcrossRows),
          "n"(WgmmaFactor::kUpper)
        : "memory");
  else if constexpr (kN == 24)
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.eq.b32 p, 0, 0;\nmov.b64 b, {%100, %102};\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" COHORT_NAMES_96
        "}, {%96,%97,%98,%99}, b, p, 1, 1, %101;\n}\n"
        : COHORT_SUMS_32(c, 0), COHORT_SUMS_32(c, 8), COHORT_SUMS_32(c, 16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.lower), "n"(kB == Read::kAcrossRows),
          "n"(WgmmaFactor::kUpper)
        : "memory");
  else
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.eq.b32 p, 0, 0;\nmov.b64 b, {%132, %134};\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" COHORT_NAMES_128
        "}, {%128,%129,%130,%131}, b, p, 1, 1, %133;\n}\n"
        : COHORT_SUMS_32(c, 0), COHORT_SUMS_32(c, 8), COHORT_SUMS_32(c, 16), COHORT_SUMS_32(c, 24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.lower), "n"(kB == Read::kAcrossRows),
          "n"(WgmmaFactor::kUpper)
        : "memory");
}

#undef COHORT_SUMS_8
#undef COHORT_SUMS_32
#undef COHORT_NAMES_32
#undef COHORT_NAMES_48
#undef COHORT_NAMES_64
#undef COHORT_NAMES_96
#undef COHORT_NAMES_128

// Four 8x8 matrices of bf16 to shared memory, as load_matrices() reads them.
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Gives registers of a warpgroup to the others, or takes them; `kRegisters` a thread from now on.
template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// A barrier of `threads` of a block's threads, whole warps; 0 is that of __syncthreads().
__device__ __forceinline__ void named_barrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(number), "r"(threads) : "memory");
}
// Arrives at such a barrier without waiting there.
__device__ __forceinline__ void named_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(number), "r"(threads) : "memory");
}

}  // namespace cohort::kernels::cuda
