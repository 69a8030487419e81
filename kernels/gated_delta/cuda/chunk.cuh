// A block of threads at the chunks of one sequence and head, for a slice of the columns of its
// matrix; columns are independent. Helper warps load the rows of a chunk and compute the products
// of its keys and queries, while the other warps solve the chunk before.
#pragma once

#include "kernels/gated_delta/cuda/gated_delta.cuh"

namespace cohort::kernels::cuda {

inline constexpr int kSolverWarps = 4, kHelperWarps = 4, kHelpers = 32 * kHelperWarps;
inline constexpr int kChunkThreads = 32 * (kSolverWarps + kHelperWarps);
inline constexpr int kHelperBarrier = 1, kSolverBarrier = 2;  // and the next, by group of columns

// kCols: columns of a block. kStages: chunks of which rows and products are in shared memory.
template <class T, int kDim, int kCols, int kStages>
struct alignas(16) ChunkMemory {
  static constexpr int kRow = kDim + kPadding<T>, kSlice = kCols + kPadding<T>,
                       kSquare = kChunk + kPadding<T>, kWeights = kChunk + 4,
                       kResiduals = kCols + 8;
  T k[kStages][kChunk * kRow], q[kStages][kChunk * kRow];
  T query_weights[kStages][kChunk * kSquare];     // L_ti (q_t k_i), [t][i]
  T s[kDim * kSlice];                             // the matrix, or its gradient
  T v[kChunk * kSlice];                           // rows of v, or of dout
  float key_weights[kStages][kChunk * kWeights];  // -L_ti (k_t k_i), [i][t], in the backward [t][i]
  float residual[kChunk * kResiduals];
  ChunkGates gates[kStages];
};

template <class T, int kDim, int kCols, int kStages, bool kBackward, class BlockMemory>
class ChunkBlock {
 protected:
  using Memory = BlockMemory;
  static constexpr int kRow = Memory::kRow, kSlice = Memory::kSlice, kSquare = Memory::kSquare,
                       kWeights = Memory::kWeights, kResiduals = Memory::kResiduals;
  static constexpr int kReadTiles = kCols / 32;  // tiles of 16 columns of a warp
  // The matrix: a warp has 16 rows of it, and with fewer rows than warps a part of the columns.
  static constexpr int kParts = 8 * 16 / kDim, kMatrixTiles = kCols / 16 / kParts;
  static constexpr int kBlock = 16,
                       kWarps = kSolverWarps / (kCols / 32);  // warps that solve 32 columns

  __device__ ChunkBlock(const DeltaProblem<T>& problem, Memory& memory, const DeltaRun& run,
                        int head, int slice)
      : p_(problem),
        m_(memory),
        run_(run),
        head_(head),
        key_head_(problem.key_head(head)),
        column_(slice * kCols) {}

  __device__ bool is_cached() const { return run_.state >= 0; }
  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ static bool is_helper() { return warp() >= kSolverWarps; }
  // Undefined for rows that are in a state.
  __device__ int token(int position) const { return run_.token(position); }
  __device__ const T* key_row(const ChunkRows& rows, int i) const {
    if (is_cached() && i < rows.given)
      return p_.state_k + p_.state_key_row(run_.state, i, key_head_) * kDim;
    return p_.k + token_key_row(rows, i);
  }
  // Index of the elements of a row that is not in a state, in keys and queries.
  __device__ int64_t token_key_row(const ChunkRows& rows, int i) const {
    return (int64_t{token(rows.base + i)} * p_.key_heads + key_head_) * kDim;
  }
  // Row and column of this warp's part of the matrix.
  __device__ static int matrix_row() { return warp() % (kDim / 16) * 16; }
  __device__ static int matrix_column() { return warp() / (kDim / 16) * (kCols / kParts); }
  template <class F>
  __device__ void for_matrix(F&& fn) {
#pragma unroll
    for (int n = 0; n < kMatrixTiles; ++n)
      matrix_[n].for_pairs([&](float* x, int row, int column) {
        fn(x, matrix_row() + row, matrix_column() + 16 * n + column);
      });
  }
  // Stores the matrix in shared memory, as an operand.
  __device__ void publish_matrix() {
    for_matrix([&](float* x, int row, int column) {
      store_pack(m_.s + row * kSlice + column,
                 Pack<T, 2>{{as_operand<T>(x[0]), as_operand<T>(x[1])}});
    });
  }
  // Stores it at `to`, [D, D].
  __device__ void copy_matrix(T* to) {
    for_matrix([&](const float* x, int row, int column) {
      store_pack(to + row * kDim + column_ + column,
                 Pack<T, 2>{{as_operand<T>(x[0]), as_operand<T>(x[1])}});
    });
  }

  // The rows and columns of a chunk that a warp reads and writes.
  __device__ static int read_row() {
    return warp() / 2 * 16;
  }
  __device__ static int read_column() {
    return warp() % 2 * (kCols / 2);
  }

  // The helpers' part of a chunk. begin_load() starts the copies of keys and queries, and returns
  // the thread's gate: g of a row, or beta.
  __device__ float begin_load(int chunk, int stage) {
    constexpr int kPack = kPackSize<T>, kPacks = kDim / kPack;
    const ChunkRows rows(run_, chunk);
    const int thread = static_cast<int>(threadIdx.x) - 32 * kSolverWarps;
    for (int i = thread; i < kChunk * kPacks; i += kHelpers) {
      const int row = i / kPacks, at = i % kPacks * kPack;
      const bool has_key = row < rows.count, has_query = has_key && row >= rows.given;
      copy_async(shared_address(m_.k[stage] + row * kRow + at),
                 has_key ? key_row(rows, row) + at : nullptr, has_key ? 16 : 0);
      copy_async(shared_address(m_.q[stage] + row * kRow + at),
                 has_query ? p_.q + token_key_row(rows, row) + at : nullptr, has_query ? 16 : 0);
    }
    copy_async_commit();
    const int row = thread % kChunk;
    const bool is_beta = thread >= kChunk;
    if (row >= rows.count) return 0;
    if (is_cached() && row < rows.given)
      return is_beta ? 0 : p_.state_decay[p_.state_row(run_.state, row, head_)];
    const int64_t at = p_.row(token(rows.base + row), head_);
    return is_beta ? p_.beta[at] : base2_gate(p_.g[at]);
  }
  // Once no thread reads the values of the chunk before.
  __device__ void prepare(int chunk, int stage, float gate) {
    constexpr int kPack = kPackSize<T>, kPacks = kCols / kPack;
    const ChunkRows rows(run_, chunk);
    const int thread = static_cast<int>(threadIdx.x) - 32 * kSolverWarps;
    for (int i = thread; i < kChunk * kPacks; i += kHelpers) {
      const int row = i / kPacks, at = i % kPacks * kPack;
      const bool live = row >= rows.given && row < rows.count;
      copy_async(
          shared_address(m_.v + row * kSlice + at),
          live ? p_.v + p_.row(token(rows.base + row), head_) * kDim + column_ + at : nullptr,
          live ? 16 : 0);
    }
    copy_async_commit();
    auto& gates = m_.gates[stage];
    (thread < kChunk ? gates.decay : gates.beta)[thread % kChunk] = gate;
    copy_async_wait<1>();
    warps_barrier(kHelperBarrier, kHelpers);
    // The warp with the fewest products.
    if (warp() + 1 == kSolverWarps + kHelperWarps) sum_gates(gates, is_cached() ? rows.given : 0);
    multiply_rows(rows, stage);
    copy_async_wait<0>();
  }
  // Products of keys, and of queries and keys, in tiles up to the diagonal. A warp waits once for
  // G.
  __device__ void multiply_rows(const ChunkRows& rows, int stage) {
    const auto& decay = m_.gates[stage].decay;
    bool has_gates = false;
    for (int tile = warp() - kSolverWarps; tile < 10; tile += kHelperWarps) {
      const auto [t0, i0] = ChunkTile(tile);
      if (t0 >= rows.count || min(t0 + 16, rows.count) <= rows.given) continue;
      Accumulator keys, queries;
#pragma unroll 4
      for (int d = 0; d < kDim; d += 16) {
        const Operand<T> b = load_b(m_.k[stage] + i0 * kRow + d, kRow);
        multiply(keys, load_a(m_.k[stage] + t0 * kRow + d, kRow), b);
        multiply(queries, load_a(m_.q[stage] + t0 * kRow + d, kRow), b);
      }
      if (!has_gates) warps_barrier(kHelperBarrier, kHelpers);
      has_gates = true;
      keys.for_pairs([&](const float* x, int row, int column) {
        const int t = t0 + row, i = i0 + column;
#pragma unroll
        for (int e = 0; e < 2; ++e)
          m_.key_weights[stage][kBackward ? t * kWeights + i + e : (i + e) * kWeights + t] =
              i + e < t ? -decayed(x[e], decay[t], decay[i + e]) : 0.0f;
      });
      queries.for_pairs([&](const float* x, int row, int column) {
        const int t = t0 + row, i = i0 + column;
        float y[2];
#pragma unroll
        for (int e = 0; e < 2; ++e)
          y[e] = i + e <= t ? decayed(x[e], decay[t], decay[i + e]) : 0.0f;
        store_pair(m_.query_weights[stage] + t * kSquare + i, y[0], y[1]);
      });
    }
    if (!has_gates) warps_barrier(kHelperBarrier, kHelpers);
  }
  // Subtracts the terms of a row x, whose weights for the rows of r are at w: of rows [begin, end).
  __device__ static __forceinline__ void subtract(float (&r)[kBlock], const float* w, float x,
                                                  int begin, int end) {
#pragma unroll
    for (int j = 0; j < kBlock; j += 4) {
      if (j + 4 <= begin || j >= end) continue;
      const auto pack = load_pack<4>(w + j);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (j + e >= begin && j + e < end) r[j + e] = __fmaf_rn(pack.v[e], x, r[j + e]);
    }
  }

  const DeltaProblem<T>& p_;
  Memory& m_;
  const DeltaRun run_;
  const int head_, key_head_, column_;
  Accumulator matrix_[kMatrixTiles];
};

}  // namespace cohort::kernels::cuda
