// The second step of the delta rule's gradients: dU, dR and dS of the chunks of a sequence, from
// the last one on. A block has a slice of columns.
#pragma once

#include "kernels/attention/cuda/attention.cuh"
#include "kernels/gated_delta/cuda/chunk.cuh"

namespace cohort::kernels::cuda {

// True if a sequence with tokens continues sequence `index`, which has no prefix.
__device__ inline bool is_forked(const PackedSequences& sequences, int index) {
  for (int s = index + 1; s < sequences.count && sequences.has_prefix(s); ++s)
    if (sequences[s].length > 0) return true;
  return false;
}
// The rows after a chunk of a sequence.
struct ChunkEnd {
  bool has_next;  // a chunk, of which the gradient of the matrix is known
  bool is_open;   // other sequences continue it
};
__device__ inline ChunkEnd chunk_end(const DeltaRun& run, int chunk, bool is_forked) {
  const bool is_last = chunk == (run.end - 1) / kChunk, is_full = run.end % kChunk == 0;
  return {!is_last || (is_forked && is_full), is_last && is_forked && !is_full};
}

template <class T, int kDim>
struct BackwardProblem {
  DeltaProblem<T> in;
  PackedSequences sequences;
  ChunkMatrices<T, kDim> states, gradients;  // gradients: of the matrix after a chunk
  const T* dout;
  T *dq, *dk, *dv, *dr;  // dr may be dv
  float *dg, *dbeta;
  bool dq_adds, dk_adds, dv_adds, dg_adds, dbeta_adds;
  // Open rows of a prefix, by the sequences that continue it, for the heads of `states`: the sum of
  // dU before these rows are solved, by prefix, [S, Hv, 64, D]; b, [S, Hk, 64, D]; its part
  // of dG, [S, Hv, 64]; and the sum of dG of the sequence's own rows in this chunk, [S, Hv]. Null
  // without prefixes.
  float *fork_du, *fork_dk, *fork_dg, *fork_decay;

  __device__ int64_t fork(int sequence, int head) const {
    return int64_t{sequence} * states.heads + head - states.first_head;
  }
  __device__ int64_t fork_key(int sequence, int key_head) const {
    const int group = in.heads / in.key_heads;
    return int64_t{sequence} * (states.heads / group) + key_head - states.first_head / group;
  }
};
template <class T>
__device__ __forceinline__ void put(T* to, float x, bool adds) {
  *to = from_float<T>(adds ? to_float(*to) + x : x);
}

template <int kN>
__device__ __forceinline__ void add_tiles(Accumulator (&to)[kN], const Accumulator (&from)[kN]) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int e = 0; e < 8; ++e) to[n].c[e / 4][e % 4] += from[n].c[e / 4][e % 4];
}

template <class T, int kDim, int kCols, int kStages>
struct ChainMemory : ChunkMemory<T, kDim, kCols, kStages> {
  T dout[kChunk * ChainMemory::kSlice];  // s gamma_t dO_t
  T dr[kChunk * ChainMemory::kSlice];    // -gamma_t dR_t
};

// dU, dR and dS of a sequence. `residual` holds dU, and then dR.
template <class T, int kDim, int kCols, int kStages>
class ChainBlock : ChunkBlock<T, kDim, kCols, kStages, true, ChainMemory<T, kDim, kCols, kStages>> {
  using Base = ChunkBlock<T, kDim, kCols, kStages, true, ChainMemory<T, kDim, kCols, kStages>>;
  using Base::begin_load, Base::column_, Base::copy_matrix, Base::for_matrix, Base::head_,
      Base::is_helper;
  using Base::kBlock, Base::kMatrixTiles, Base::kReadTiles, Base::kResiduals, Base::kRow;
  using Base::kSlice, Base::kSquare, Base::kWarps, Base::kWeights, Base::lane, Base::m_;
  using Base::matrix_, Base::matrix_column, Base::matrix_row, Base::prepare;
  using Base::read_column, Base::read_row, Base::run_, Base::publish_matrix, Base::subtract;
  using Base::token, Base::warp;

 public:
  using Memory = ChainMemory<T, kDim, kCols, kStages>;
  using Matrix = Accumulator[kMatrixTiles];

  __device__ ChainBlock(const BackwardProblem<T, kDim>& problem, Memory& memory, int index,
                        int head, int slice)
      : Base(problem.in, memory, DeltaRun::of(problem.sequences[index]), head, slice),
        b_(problem),
        index_(index) {}

  // fork: the sum of the gradients of the matrix at the start of a prefix's last chunk, or at its
  // end, by the sequences that continue it. Those add to it; the prefix, `root`, reads it.
  __device__ void advance(Matrix& fork, int root, bool forked, bool is_first) {
    const int first = run_.position / kChunk, last = (run_.end - 1) / kChunk;
    const bool is_child = index_ != root;
    du_ = b_.fork_du == nullptr ? nullptr
                                : b_.fork_du + b_.fork(root, head_) * kChunk * kDim + column_;
    if (chunk_end(run_, last, forked).has_next) add_tiles(matrix_, fork);
    publish_matrix();
    if (is_helper()) prepare(last, 0, begin_load(last, 0));
    for (int chunk = last; chunk >= first; --chunk) {
      const int stage = (last - chunk) % kStages, next_stage = (stage + 1) % kStages;
      const bool prefetches = kStages > 1 && chunk > first && is_helper();
      const ChunkRows rows(run_, chunk);
      const ChunkEnd end = chunk_end(run_, chunk, forked);
      if (kStages == 1 && chunk < last && is_helper()) prepare(chunk, 0, begin_load(chunk, 0));
      __syncthreads();
      float gate = 0;
      if (prefetches) gate = begin_load(chunk - 1, next_stage);
      if (end.has_next) copy_matrix(b_.gradients.at(b_.sequences[index_], index_, chunk, head_));
      begin_du(rows, stage, end);
      __syncthreads();
      if (!is_helper()) solve(rows, stage, is_first);
      if (prefetches) prepare(chunk - 1, next_stage, gate);
      __syncthreads();
      step_back(rows, stage);
      if (end.is_open) add_tiles(matrix_, fork);
      publish_matrix();
      if (kStages == 1) __syncthreads();
    }
    if (is_child) add_tiles(fork, matrix_);
    __syncthreads();
  }

 private:
  // dU of all rows, but for the terms of later rows' dR.
  __device__ void begin_du(const ChunkRows& rows, int stage, const ChunkEnd& end) {
    const ChunkGates& gates = m_.gates[stage];
    for (int i = static_cast<int>(threadIdx.x); i < kChunk * kCols; i += kChunkThreads) {
      const int at = i / kCols * kSlice + i % kCols;
      m_.dout[at] = from_float<T>(b_.in.scale * gates.gamma[i / kCols] * to_float(m_.v[at]));
    }
    const int row0 = read_row(), column0 = read_column();
    if (row0 >= rows.count) return;
    Accumulator own[kReadTiles], next[kReadTiles];
    for (int t = max(row0, rows.given / 16 * 16); t < rows.count; t += 16) {
      const Operand<T> weights =
          load_a_transposed(m_.query_weights[stage] + t * kSquare + row0, kSquare);
#pragma unroll
      for (int n = 0; n < kReadTiles; ++n)
        multiply(own[n], weights, load_b_transposed(m_.v + t * kSlice + column0 + 16 * n, kSlice));
    }
    if (end.has_next) {
#pragma unroll 4
      for (int d = 0; d < kDim; d += 16) {
        const Operand<T> k = load_a(m_.k[stage] + row0 * kRow + d, kRow);
#pragma unroll
        for (int n = 0; n < kReadTiles; ++n)
          multiply(next[n], k, load_b_transposed(m_.s + d * kSlice + column0 + 16 * n, kSlice));
      }
    }
#pragma unroll
    for (int n = 0; n < kReadTiles; ++n)
      next[n].for_pairs([&](float* x, int row, int column) {
        const float* const y = own[n].c[column / 8] + row / 8 * 2;
        row += row0;
        column += column0 + 16 * n;
        for (int e = 0; e < 2; ++e) {
          x[e] = __fmaf_rn(gates.to_end[row], x[e], b_.in.scale * y[e]);
          if (end.is_open && row < rows.count) x[e] += du_[int64_t{row} * kDim + column + e];
        }
        store_pair(m_.residual + row * kResiduals + column, x[0], x[1]);
      });
  }
  // As in the forward, from the last row up.
  __device__ void solve(const ChunkRows& rows, int stage, bool is_first) {
    const int group = warp() / kWarps, column = 32 * group + lane();
    const int blocks = (rows.count + kBlock - 1) / kBlock, end = blocks * kBlock;
    const float* const w = m_.key_weights[stage];
    float r[kBlock], dr[kBlock], beta[kBlock];
    int mine = warp() % kWarps, applied = 0;  // block from the last one, and rows
    const auto first_row = [&] { return end - (mine + 1) * kBlock; };
    const auto load = [&] {
#pragma unroll
      for (int j = 0; j < kBlock; ++j) {
        r[j] = m_.residual[(first_row() + j) * kResiduals + column];
        beta[j] = m_.gates[stage].beta[first_row() + j];
      }
    };
    if (mine < blocks) load();
    for (int solved = 0; solved < blocks; ++solved) {
      if (mine < blocks) {
#pragma unroll 4
        for (; applied < solved * kBlock; ++applied) {
          const int t = end - 1 - applied;
          if (t >= rows.given)
            subtract(r, w + t * kWeights + first_row(), m_.residual[t * kResiduals + column], 0,
                     kBlock);
        }
      }
      const bool is_mine = mine == solved;
      if (is_mine) {
        const int row0 = first_row();
        // Each row waits for the one after. Without stores, weights are loaded ahead.
#pragma unroll
        for (int j = kBlock - 1; j >= 0; --j) {
          const bool is_own = row0 + j >= rows.given;
          dr[j] = is_own ? beta[j] * r[j] : 0.0f;
          if (is_own) subtract(r, w + (row0 + j) * kWeights + row0, dr[j], 0, j);
        }
#pragma unroll
        for (int j = 0; j < kBlock; ++j) m_.residual[(row0 + j) * kResiduals + column] = dr[j];
      }
      warps_barrier(kSolverBarrier + group, 32 * kWarps);
      if (is_mine) {
        store_block(rows, stage, is_first, first_row(), column, r, dr);
        mine += kWarps;
        applied = 0;
        if (mine < blocks) load();
      }
    }
  }
  // The other copies of a solved block, for which no warp waits.
  __device__ __forceinline__ void store_block(const ChunkRows& rows, int stage, bool is_first,
                                              int row0, int column, const float (&r)[kBlock],
                                              const float (&dr)[kBlock]) {
    const ChunkGates& gates = m_.gates[stage];
#pragma unroll
    for (int j = kBlock - 1; j >= 0; --j) {
      const int t = row0 + j;
      m_.dr[t * kSlice + column] = from_float<T>(-gates.gamma[t] * dr[j]);
      if (t < rows.given) {
        float& du = du_[int64_t{t} * kDim + column];
        du = is_first ? r[j] : du + r[j];
      } else if (t < rows.count) {
        const int64_t at = b_.in.row(token(rows.base + t), head_) * kDim + column_ + column;
        if (b_.dr != b_.dv) b_.dr[at] = from_float<T>(dr[j]);
        put(b_.dv + at, dr[j], b_.dv_adds);
      }
    }
  }
  // dS of the chunk before.
  __device__ void step_back(const ChunkRows& rows, int stage) {
    Accumulator sums[kMatrixTiles];
    for (int t = rows.given / 16 * 16; t < rows.count; t += 16) {
      const Operand<T> q = load_a_transposed(m_.q[stage] + t * kRow + matrix_row(), kRow),
                       k = load_a_transposed(m_.k[stage] + t * kRow + matrix_row(), kRow);
#pragma unroll
      for (int n = 0; n < kMatrixTiles; ++n) {
        const int at = t * kSlice + matrix_column() + 16 * n;
        multiply(sums[n], q, load_b_transposed(m_.dout + at, kSlice));
        multiply(sums[n], k, load_b_transposed(m_.dr + at, kSlice));
      }
    }
    const float gamma = m_.gates[stage].gamma[kChunk - 1];
    for_matrix([&](float* x, int, int) {
      for (int e = 0; e < 2; ++e) x[e] *= gamma;
    });
    add_tiles(matrix_, sums);
  }

  const BackwardProblem<T, kDim>& b_;
  const int index_;
  float* du_;  // dU of the open rows of the prefix
};

}  // namespace cohort::kernels::cuda
