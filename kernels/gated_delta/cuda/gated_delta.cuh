// Shared by the CUDA kernels of the gated delta rule: tiles of 16 x 16 elements in the fragments of
// mma.m16n8k16 (kernels/cuda/mma.cuh), by tensor cores in bf16 and by fma chains in f32, from one
// kernel text; and the rows and matrices of sequences.
//
// Rows of operands in shared memory are padded by kPadding elements, so that the eight rows of a
// matrix of ldmatrix are in different banks.
#pragma once

#include "kernels/adamw.h"
#include "kernels/attention/score_rule.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/gated_delta/gated_delta.h"

namespace cohort::kernels::cuda {

inline constexpr int kChunk = static_cast<int>(kDeltaChunk);
template <class T>
inline constexpr int kPadding = 16 / sizeof(T);

// A 16 x 16 operand of two mma.m16n8k16. As A it has its registers; as B those of columns 0 to 7,
// then of columns 8 to 15. In f32 a register is a pair of numbers.
template <class T>
struct Operand;
template <>
struct Operand<bf16> {
  uint32_t r[4];
};
template <>
struct Operand<float> {
  float r[8];
};

// Row and column of this lane in the two layouts of four 8 x 8 matrices: with the second matrix
// below the first one, or beside it.
template <bool kBelow>
__device__ __forceinline__ int matrices_offset(int stride) {
  const int lane = static_cast<int>(threadIdx.x % 32), low = lane / 8 % 2 * 8, high = lane / 16 * 8;
  return (lane % 8 + (kBelow ? low : high)) * stride + (kBelow ? high : low);
}
// kIsA: as A, else as B. kTransposed: `tile`, the operand's first element, is in rows of k; else
// each row has all k of a row of A or of a column of B. Rows are `stride` elements apart.
template <bool kIsA, bool kTransposed>
__device__ __forceinline__ Operand<bf16> load_operand(const bf16* tile, int stride) {
  Operand<bf16> out;
  const uint32_t address = shared_address(tile + matrices_offset<kIsA != kTransposed>(stride));
  if constexpr (kTransposed)
    load_matrices_transposed(out.r, address);
  else
    load_matrices(out.r, address);
  return out;
}
template <bool kIsA, bool kTransposed>
__device__ __forceinline__ Operand<float> load_operand(const float* tile, int stride) {
  const int group = static_cast<int>(threadIdx.x % 32 / 4),
            quad = static_cast<int>(threadIdx.x % 4);
  Operand<float> out;
#pragma unroll
  for (int x = 0; x < 8; ++x) {
    const int low = x / 2 % 2 * 8, high = x / 4 * 8;
    const int index = group + (kIsA ? low : high), k = 2 * quad + x % 2 + (kIsA ? high : low);
    out.r[x] = kTransposed ? tile[k * stride + index] : tile[index * stride + k];
  }
  return out;
}
template <class T>
__device__ __forceinline__ Operand<T> load_a(const T* tile, int stride) {
  return load_operand<true, false>(tile, stride);
}
template <class T>
__device__ __forceinline__ Operand<T> load_a_transposed(const T* tile, int stride) {
  return load_operand<true, true>(tile, stride);
}
template <class T>
__device__ __forceinline__ Operand<T> load_b(const T* tile, int stride) {
  return load_operand<false, false>(tile, stride);
}
template <class T>
__device__ __forceinline__ Operand<T> load_b_transposed(const T* tile, int stride) {
  return load_operand<false, true>(tile, stride);
}

// The accumulators of a 16 x 16 tile: columns 0 to 7, and 8 to 15.
struct Accumulator {
  float c[2][4] = {};

  // fn(x, row, column) for pairs x[0], x[1] of adjacent columns.
  template <class F>
  __device__ __forceinline__ void for_pairs(F&& fn) {
    const int group = static_cast<int>(threadIdx.x % 32 / 4),
              quad = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) fn(c[n] + 2 * half, group + 8 * half, 8 * n + 2 * quad);
  }
};
__device__ __forceinline__ void multiply(Accumulator& to, const Operand<bf16>& a,
                                         const Operand<bf16>& b) {
  mma_bf16(to.c[0], a.r, b.r[0], b.r[1]);
  mma_bf16(to.c[1], a.r, b.r[2], b.r[3]);
}
__device__ __forceinline__ void multiply(Accumulator& to, const Operand<float>& a,
                                         const Operand<float>& b) {
  const int lane = static_cast<int>(threadIdx.x % 32), row = lane / 4 * 4, column = lane % 4 * 8;
  const auto from = [](float x, int other) { return __shfl_sync(0xffffffffu, x, other); };
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    const int at = k % 8 / 2, e = k % 2, high = k / 8;  // lane of the group, and register
    const float upper = from(a.r[4 * high + e], row + at),
                lower = from(a.r[4 * high + 2 + e], row + at);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float x = from(b.r[4 * n + 2 * high + e], column + 4 * j + at);
        to.c[n][j] = __fmaf_rn(upper, x, to.c[n][j]);
        to.c[n][2 + j] = __fmaf_rn(lower, x, to.c[n][2 + j]);
      }
  }
}

template <class T>
__device__ __forceinline__ void store_pair(T* to, float x, float y) {
  store_pack(to, Pack<T, 2>{{from_float<T>(x), from_float<T>(y)}});
}
template <class T>
__device__ __forceinline__ void load_pair(const T* from, float (&x)[2]) {
  const auto pair = load_pack<2>(from);
  x[0] = to_float(pair.v[0]);
  x[1] = to_float(pair.v[1]);
}

// Barrier of some warps of a block; barrier 0 is that of __syncthreads().
__device__ __forceinline__ void warps_barrier(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}

// The arithmetic of the rule, which packed sequences and states share. Nothing of it may be
// contracted.

// The term of G of a token.
__device__ __forceinline__ float base2_gate(float g) {
  return __fmul_rn(g, kLog2e);
}
// The weight of u_i in u_t, without its sign, or in o_t, from the product of rows.
__device__ __forceinline__ float decayed(float product, float decay, float decay_before) {
  return __fmul_rn(fast_exp2(decay - decay_before), product);
}
__device__ __forceinline__ float begin_residual(float gamma, float read, float v) {
  return __fmaf_rn(-gamma, read, v);
}
template <class T>
__device__ __forceinline__ T finish_u(float beta, float residual) {
  return from_float<T>(__fmul_rn(beta, residual));
}
// o_t from its sum. A sum of -0 becomes 0, as terms of 0 would make it: their number depends on the
// rows after t.
__device__ __forceinline__ float finish_output(float sum, float scale) {
  return __fmul_rn(__fadd_rn(sum, 0.0f), scale);
}
// u_i as the fold takes it.
template <class T>
__device__ __forceinline__ T scaled_u(float to_end, T u) {
  return from_float<T>(__fmul_rn(to_end, to_float(u)));
}
// One NaN for all: master_parts() makes a number of some of them.
__device__ __forceinline__ float folded(float gamma, float s, float sum) {
  const float next = __fmaf_rn(gamma, s, sum);
  return next == next ? next : __uint_as_float(0x7fc00000u);
}

// An element of the matrix as operand: the high half in bf16.
template <class T>
__device__ __forceinline__ T as_operand(float s) {
  if constexpr (sizeof(T) == 2)
    return __ushort_as_bfloat16(master_parts(s).weight);
  else
    return s;
}
// A head's matrix in DeltaState: in f32 [D, D]; in bf16 two planes [D, D] of 16 bits, the high and
// the low halves of master_parts().
template <class T, int kDim>
struct StoredMatrix {
  T* high;

  __device__ StoredMatrix(void* s, int64_t index)
      : high(reinterpret_cast<T*>(static_cast<float*>(s) + index * kDim * kDim)) {}
  __device__ __forceinline__ void load(int row, int column, float (&x)[2]) const {
    const int at = row * kDim + column;
    if constexpr (sizeof(T) == 2) {
      const auto* const bits = reinterpret_cast<const uint16_t*>(high);
      const auto upper = load_pack<2>(bits + at), lower = load_pack<2>(bits + kDim * kDim + at);
#pragma unroll
      for (int e = 0; e < 2; ++e) x[e] = combined({upper.v[e], lower.v[e]});
    } else {
      load_pair(high + at, x);
    }
  }
  __device__ __forceinline__ void store(int row, int column, const float* x) const {
    const int at = row * kDim + column;
    if constexpr (sizeof(T) == 2) {
      auto* const bits = reinterpret_cast<uint16_t*>(high);
      const MasterParts a = master_parts(x[0]), b = master_parts(x[1]);
      store_pack(bits + at, Pack<uint16_t, 2>{{a.weight, b.weight}});
      store_pack(bits + kDim * kDim + at, Pack<uint16_t, 2>{{a.low, b.low}});
    } else {
      store_pair(high + at, x[0], x[1]);
    }
  }
};

// Tensors of a call, and the states of a cached one.
template <class T>
struct DeltaProblem {
  T *o, *u;
  const T *q, *k, *v;
  const float *g, *beta;
  int heads, key_heads;
  float scale;
  // Null for packed sequences.
  void* s;
  T *state_k, *state_u;
  float* state_decay;

  __device__ int key_head(int head) const { return head / (heads / key_heads); }
  __device__ int64_t row(int64_t token, int head) const { return token * heads + head; }
  __device__ int64_t key_row(int64_t token, int head) const {
    return token * key_heads + key_head(head);
  }
  // Row of a chunk in a state.
  __device__ int64_t state_row(int state, int i, int head) const {
    return (int64_t{state} * kChunk + i) * heads + head;
  }
  __device__ int64_t state_key_row(int state, int i, int key_head) const {
    return (int64_t{state} * kChunk + i) * key_heads + key_head;
  }
};

// Positions [position, end) of a sequence are computed; those before have been, and are in packed
// tensors or in a state.
struct DeltaRun {
  int begin, prefix_begin, prefix;  // tokens of the positions from `prefix` on, and of those before
  int position, end;
  int state;  // -1: packed

  __device__ static DeltaRun of(const PackedSequence& s) {
    return {s.begin, s.prefix_begin, s.prefix, s.prefix, s.keys(), -1};
  }
  __device__ int token(int at) const {
    return at < prefix ? prefix_begin + at : begin + at - prefix;
  }
};
// Rows of a chunk, of which the first `given` have been computed before.
struct ChunkRows {
  int base, count, given;

  __device__ ChunkRows(const DeltaRun& run, int chunk)
      : base(chunk * kChunk),
        count(min(kChunk, run.end - base)),
        given(min(max(run.position - base, 0), kChunk)) {}
};

// G, 2^G, 2^(G_63 - G) and beta of the rows of a chunk.
struct ChunkGates {
  float decay[kChunk], gamma[kChunk], to_end[kChunk], beta[kChunk];
};
// `decay` has the terms of G, but for `known` rows, which have G. A warp calls it.
__device__ inline void sum_gates(ChunkGates& gates, int known) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (lane == 0) {
    float sum = 0;
    for (int first = 0; first < kChunk; first += 16) {
      float x[16];
#pragma unroll
      for (int t = 0; t < 16; ++t) x[t] = gates.decay[first + t];
#pragma unroll
      for (int t = 0; t < 16; ++t)
        gates.decay[first + t] = sum = first + t < known ? x[t] : __fadd_rn(sum, x[t]);
    }
  }
  __syncwarp();
  for (int t = lane; t < kChunk; t += 32) {
    gates.gamma[t] = fast_exp2(gates.decay[t]);
    gates.to_end[t] = fast_exp2(gates.decay[kChunk - 1] - gates.decay[t]);
  }
}

// Calls with one token of each state at most.
template <class T, int kDim>
void delta_decode(const DeltaProblem<T>& problem, const GatedDeltaCached& args);

// Tile number `tile` of the ten of 16 x 16 elements with t >= i: its first row and column.
struct ChunkTile {
  int t, i;

  __device__ explicit ChunkTile(int tile) {
    const int row = tile < 1 ? 0 : tile < 3 ? 1 : tile < 6 ? 2 : 3;
    t = 16 * row;
    i = 16 * (tile - row * (row + 1) / 2);
  }
};

// Matrices of chunks of packed sequences, for some heads: [slots, heads, D, D]. The chunks of
// sequence s with tokens of its own have slots from begin / 64 + 2 s on.
template <class T, int kDim>
struct ChunkMatrices {
  T* data;
  int first_head, heads;

  static int64_t slots(int64_t tokens, int64_t sequences) {
    return tokens / kChunk + 2 * sequences;
  }
  __device__ T* at(const PackedSequence& sequence, int index, int chunk, int head) const {
    const int slot = sequence.begin / kChunk + 2 * index + chunk - sequence.prefix / kChunk;
    return data + (int64_t{slot} * heads + head - first_head) * kDim * kDim;
  }
};
// Fills `states` with the matrices at the starts of chunks but the first one of a sequence, as
// operands, from k, u and g.
template <class T, int kDim>
void delta_states(const DeltaProblem<T>& problem, const PackedSequences& sequences,
                  const ChunkMatrices<T, kDim>& states, Device device);

template <class... P>
void check_delta_aligned(const P*... rows) {
  COHORT_CHECK(aligned(rows...), "[gated_delta] expected rows aligned to 16 bytes on a GPU");
}
// The tensors of a call that a problem has.
template <class T>
DeltaProblem<T> delta_problem(const DeltaTensors& in, double scale) {
  DeltaProblem<T> p{};
  p.q = pointer<T>(in.q);
  p.k = pointer<T>(in.k);
  p.v = pointer<T>(in.v);
  check_delta_aligned(p.q, p.k, p.v);
  p.g = pointer<float>(in.g);
  p.beta = pointer<float>(in.beta);
  p.heads = static_cast<int>(in.v.dim(1));
  p.key_heads = static_cast<int>(in.k.dim(1));
  p.scale = static_cast<float>(delta_scale({.scale = scale}, in.v.dim(2)));
  return p;
}
template <class Args>
PackedSequences delta_sequences(const Args& args) {
  AttentionDesc desc;
  desc.prefixes = args.desc.prefixes;
  return {args.cu_seqlens, desc};
}

// Calls fn.operator()<T, kDim>().
template <class F>
void dispatch_delta(const Tensor& v, const char* op, F&& fn) {
  dispatch_device(v.dtype(), op, [&]<class T>() {
    if (v.dim(2) == 64)
      fn.template operator()<T, 64>();
    else
      fn.template operator()<T, 128>();
  });
}

}  // namespace cohort::kernels::cuda
