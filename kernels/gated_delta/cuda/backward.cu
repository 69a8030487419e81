// Gradients of the gated delta rule on CUDA, by formulas of cpu/backward.cpp in three steps: the
// matrices of all chunks, from u as stored; dU, dR and dS of the chunks of a sequence from the last
// on, where a block has a slice of columns; the rows' gradients, where a block has a chunk and a
// key head. In the second step a block walks the sequences that continue a prefix and then the
// prefix itself; in the third the prefixes come last. Sums over chunks and sequences are in a fixed
// order.
#include <algorithm>

#include "kernels/gated_delta/cuda/chain.cuh"

namespace cohort::kernels::cuda {
namespace {

// A block has a prefix, or another sequence without one, a head and a slice of columns.
template <class T, int kDim, int kCols, int kStages>
__global__ void __launch_bounds__(kChunkThreads, 1)
    delta_chain_kernel(const __grid_constant__ BackwardProblem<T, kDim> problem) {
  extern __shared__ __align__(16) char shared[];
  using Block = ChainBlock<T, kDim, kCols, kStages>;
  constexpr int kSlices = kDim / kCols;
  const ChunkMatrices<T, kDim>& states = problem.states;
  const int item = static_cast<int>(blockIdx.x), root = item / kSlices / states.heads,
            head = states.first_head + item / kSlices % states.heads;
  const PackedSequences& sequences = problem.sequences;
  if (sequences.has_prefix(root) || sequences[root].length <= 0) return;
  auto& memory = *reinterpret_cast<typename Block::Memory*>(shared);
  typename Block::Matrix fork;
  bool is_first = true;
  for (int s = root + 1; s < sequences.count && sequences.has_prefix(s); ++s) {
    if (sequences[s].length <= 0) continue;
    Block(problem, memory, s, head, item % kSlices).advance(fork, root, false, is_first);
    is_first = false;
  }
  Block(problem, memory, root, head, item % kSlices).advance(fork, root, !is_first, false);
}

// The rows' gradients. Rows of dout, dr and u, and later those of k and q in place of the first
// two; slabs of rows of the matrix or of its gradient.
constexpr int kSlab = 32;
template <class T, int kDim>
struct alignas(16) RowMemory {
  static constexpr int kRow = kDim + kPadding<T>, kSquare = kChunk + kPadding<T>;
  T first[kChunk * kRow], second[kChunk * kRow], u[kChunk * kRow];
  static constexpr int kSlabs = sizeof(T) == 2 ? 2 : 1;
  T slabs[kSlabs][kSlab * kRow];
  T x[kChunk * kSquare], y[kChunk * kSquare];
  ChunkGates gates;
  float diagonal[kChunk];                   // dR_t u_t
  float dots[2][kChunk], folds[2][kChunk];  // parts of dG, and k_t b_t of the fold, by columns
  float decay[kChunk];                      // dG, and then dg
  float along[kChunkThreads / 32];          // parts of <S, dS'>
};
static_assert(sizeof(RowMemory<float, 128>) <= kDeltaF32SharedMemory);
static_assert(sizeof(RowMemory<bf16, 128>) <= 99 << 10);

template <class T, int kDim>
class RowBlock {
 public:
  using Memory = RowMemory<T, kDim>;

  __device__ RowBlock(const BackwardProblem<T, kDim>& problem, Memory& memory,
                      const SequenceTile& at, int key_head)
      : p_(problem),
        m_(memory),
        sequence_(at.sequence),
        index_(at.index),
        run_(DeltaRun::of(at.sequence)),
        chunk_(at.sequence.prefix / kChunk + at.tile),
        key_head_(key_head),
        rows_(run_, chunk_),
        end_(chunk_end(run_, chunk_, sequence_.prefix == 0 && is_forked(p_.sequences, index_))) {}

  __device__ void run() {
    const int group = p_.in.heads / p_.in.key_heads;
    for (int h = 0; h < group; ++h) {
      head_ = key_head_ * group + h;
      add_head();
      __syncthreads();
    }
    write_rows();
  }

 private:
  static constexpr int kRow = Memory::kRow, kSquare = Memory::kSquare;
  static constexpr int kTiles = kDim / kSlab;  // tiles of 16 columns of a warp; slabs of a matrix
  using Tiles = Accumulator[kTiles];

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  // The rows and columns of a warp.
  __device__ static int row0() { return warp() / 2 * 16; }
  __device__ static int column0(int n) { return kSlab * n + warp() % 2 * 16; }
  __device__ int64_t row(int i) const { return p_.in.row(run_.token(rows_.base + i), head_); }
  __device__ int64_t key_row(int i) const {
    return int64_t{run_.token(rows_.base + i)} * p_.in.key_heads + key_head_;
  }

  // Copies rows [begin, end) of 64, the others are zero.
  template <class F>
  __device__ static void load_rows(T* to, int count, int begin, int end, F&& row_of) {
    constexpr int kPack = kPackSize<T>, kPacks = kDim / kPack;
    for (int i = thread(); i < count * kPacks; i += kChunkThreads) {
      const int at_row = i / kPacks, at = i % kPacks * kPack;
      const bool live = at_row >= begin && at_row < end;
      copy_async(shared_address(to + at_row * kRow + at), live ? row_of(at_row) + at : nullptr,
                 live ? 16 : 0);
    }
  }
  // Slabs of the matrix, and then of its gradient.
  __device__ void load_slab(int slab) {
    const ChunkMatrices<T, kDim>& matrices = slab < kTiles ? p_.states : p_.gradients;
    const T* const from =
        matrices.at(sequence_, index_, chunk_, head_) + slab % kTiles * kSlab * kDim;
    load_rows(m_.slabs[slab % Memory::kSlabs], kSlab, 0, kSlab,
              [&](int i) { return from + i * kDim; });
    copy_async_commit();
  }
  __device__ void load_gates() {
    const int t = thread() % kChunk;
    if (thread() < kChunk)
      m_.gates.decay[t] = t < rows_.count ? base2_gate(p_.in.g[row(t)]) : 0.0f;
    else if (thread() < 2 * kChunk)
      m_.gates.beta[t] = t < rows_.count ? p_.in.beta[row(t)] : 0.0f;
    __syncthreads();
    if (warp() == 0) sum_gates(m_.gates, 0);
  }

  __device__ void add_head() {
    const int begin = chunk_ > 0 ? 0 : kTiles, end = end_.has_next ? 2 * kTiles : kTiles;
    const auto values = [&](const T* x) { return [this, x](int i) { return x + row(i) * kDim; }; };
    load_rows(m_.first, kChunk, rows_.given, rows_.count, values(p_.dout));
    load_rows(m_.second, kChunk, rows_.given, rows_.count, values(p_.dr));
    load_rows(m_.u, kChunk, 0, rows_.count, values(p_.in.u));
    copy_async_commit();
    if (begin < end) load_slab(begin);
    load_gates();
    copy_async_wait<0>();
    __syncthreads();
    multiply_rows();
    if (begin == 0 && end > kTiles) multiply_matrices();
    Tiles dq, as_row, earlier;  // a and b in the formulas
#pragma unroll
    for (int slab = 0; slab < 2 * kTiles; ++slab) {
      if (slab < begin || slab >= end) continue;
      if (slab > begin) {
        copy_async_wait<0>();
        __syncthreads();
      }
      if (Memory::kSlabs > 1 && slab + 1 < end) load_slab(slab + 1);
      const T* const matrix = m_.slabs[slab % Memory::kSlabs] + column0(0) * kRow;
      const int n = slab % kTiles;
#pragma unroll(sizeof(T) == 2 ? 4 : 1)
      for (int d = 0; d < kDim; d += 16) {
        const Operand<T> b = load_b(matrix + d, kRow);
        if (slab < kTiles) {
          multiply(dq[n], load_a(m_.first + row0() * kRow + d, kRow), b);
          multiply(as_row[n], load_a(m_.second + row0() * kRow + d, kRow), b);
        } else {
          multiply(earlier[n], load_a(m_.u + row0() * kRow + d, kRow), b);
        }
      }
      if (Memory::kSlabs == 1 && slab + 1 < end) {
        __syncthreads();
        load_slab(slab + 1);
      }
    }
    __syncthreads();
    const auto keys = [&](const T* x) {
      return [this, x](int i) { return x + key_row(i) * kDim; };
    };
    load_rows(m_.first, kChunk, 0, rows_.count, keys(p_.in.k));
    load_rows(m_.second, kChunk, rows_.given, rows_.count, keys(p_.in.q));
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    finish_rows(dq, as_row, earlier);
    __syncthreads();
    if (warp() == 0) write_gates();
  }
  // X and Y.
  __device__ void multiply_rows() {
    const auto& decay = m_.gates.decay;
    for (int tile = warp(); tile < 10; tile += kChunkThreads / 32) {
      const ChunkTile at(tile);
      if (at.t >= rows_.count) continue;
      Accumulator x, y;
#pragma unroll 4
      for (int d = 0; d < kDim; d += 16) {
        const Operand<T> u = load_b(m_.u + at.i * kRow + d, kRow);
        multiply(x, load_a(m_.second + at.t * kRow + d, kRow), u);
        multiply(y, load_a(m_.first + at.t * kRow + d, kRow), u);
      }
      x.for_pairs([&](float* pair, int row, int column) {
        const int t = at.t + row, i = at.i + column;
        for (int e = 0; e < 2; ++e) {
          if (i + e == t) m_.diagonal[t] = pair[e];
          pair[e] = i + e < t ? -decayed(pair[e], decay[t], decay[i + e]) : 0.0f;
        }
        store_pair(m_.x + t * kSquare + i, pair[0], pair[1]);
      });
      y.for_pairs([&](float* pair, int row, int column) {
        const int t = at.t + row, i = at.i + column;
        for (int e = 0; e < 2; ++e)
          pair[e] = i + e <= t ? p_.in.scale * decayed(pair[e], decay[t], decay[i + e]) : 0.0f;
        store_pair(m_.y + t * kSquare + i, pair[0], pair[1]);
      });
    }
  }
  // <S, dS'>
  __device__ void multiply_matrices() {
    constexpr int kPack = kPackSize<T>;
    const T* const s = p_.states.at(sequence_, index_, chunk_, head_);
    const T* const ds = p_.gradients.at(sequence_, index_, chunk_, head_);
    float sum = 0;
    for (int i = thread() * kPack; i < kDim * kDim; i += kChunkThreads * kPack) {
      const auto a = load_pack<kPack>(s + i), b = load_pack<kPack>(ds + i);
#pragma unroll
      for (int e = 0; e < kPack; ++e) sum = __fmaf_rn(to_float(a.v[e]), to_float(b.v[e]), sum);
    }
    sum = lane_reduce<32>(sum, Plus{});
    if (lane() == 0) m_.along[warp()] = sum;
  }
  // With k and q: the terms of X and Y, the dots of dG, and the sums over heads.
  __device__ void finish_rows(Tiles& dq, Tiles& as_row, Tiles& earlier) {
    if (row0() >= rows_.count) return;
    const T *const k = m_.first, *const q = m_.second;
    float dots[2] = {}, folds[2] = {};  // by row of the thread
    for_tiles(earlier, [&](float* x, int row, int column) {
      float key[2];
      load_pair(k + row * kRow + column, key);
      for (int e = 0; e < 2; ++e) {
        x[e] *= m_.gates.to_end[row];
        folds[row % 16 / 8] += key[e] * x[e];
      }
    });
    const auto scale_rows = [&](Tiles& tiles, float factor) {
      for_tiles(tiles, [&](float* x, int row, int) {
        for (int e = 0; e < 2; ++e) x[e] *= factor * m_.gates.gamma[row];
      });
    };
    scale_rows(dq, p_.in.scale);
    scale_rows(as_row, -1);
    for (int i = 0; i <= row0(); i += 16) {
      const Operand<T> x = load_a(m_.x + row0() * kSquare + i, kSquare),
                       y = load_a(m_.y + row0() * kSquare + i, kSquare);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const Operand<T> key = load_b_transposed(k + i * kRow + column0(n), kRow);
        multiply(dq[n], y, key);
        multiply(as_row[n], x, key);
      }
    }
    for (int t = row0(); t < rows_.count; t += 16) {
      const Operand<T> x = load_a_transposed(m_.x + t * kSquare + row0(), kSquare),
                       y = load_a_transposed(m_.y + t * kSquare + row0(), kSquare);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        multiply(earlier[n], y, load_b_transposed(q + t * kRow + column0(n), kRow));
        multiply(earlier[n], x, load_b_transposed(k + t * kRow + column0(n), kRow));
      }
    }
    add_dots(dots, dq, q, 1);
    add_dots(dots, as_row, k, 1);
    add_dots(dots, earlier, k, -1);
    add_tiles(dq_, dq);
    add_tiles(dk_, as_row);
    add_tiles(dk_, earlier);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float dot = lane_reduce<4>(dots[half], Plus{}),
                  fold = lane_reduce<4>(folds[half], Plus{});
      const int t = row0() + lane() / 4 + 8 * half;
      if (lane() % 4 > 0) continue;
      m_.dots[warp() % 2][t] = dot;
      m_.folds[warp() % 2][t] = fold;
    }
  }
  template <class F>
  __device__ static void for_tiles(Tiles& tiles, F&& fn) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      tiles[n].for_pairs(
          [&](float* x, int row, int column) { fn(x, row0() + row, column0(n) + column); });
  }
  __device__ static void add_dots(float (&dots)[2], Tiles& tiles, const T* rows, float sign) {
    for_tiles(tiles, [&](const float* x, int row, int column) {
      float y[2];
      load_pair(rows + row * kRow + column, y);
      dots[row % 16 / 8] += sign * (x[0] * y[0] + x[1] * y[1]);
    });
  }
  // fn(sequence) for those that continue this one.
  template <class F>
  __device__ void for_children(F&& fn) const {
    if (!end_.is_open) return;
    for (int s = index_ + 1; s < p_.sequences.count && p_.sequences.has_prefix(s); ++s)
      if (p_.sequences[s].length > 0) fn(s);
  }
  // dg and dbeta, by a warp.
  __device__ void write_gates() {
    const int last = rows_.count - 1;
    for (int t = lane(); t < rows_.count; t += 32) {
      float dg = m_.dots[0][t] + m_.dots[1][t];
      if (t < rows_.given) p_.fork_dg[p_.fork(index_, head_) * kChunk + t] = dg;
      for_children([&](int s) {
        dg += p_.fork_dg[p_.fork(s, head_) * kChunk + t];
        if (t == last) dg += p_.fork_decay[p_.fork(s, head_)];
      });
      m_.decay[t] = dg;
    }
    __syncwarp();
    if (lane() == 0) {
      float sum = 0;
      if (end_.has_next) {
        for (int t = 0; t < kChunk; ++t) sum += m_.folds[0][t] + m_.folds[1][t];
        float along = 0;
        for (int w = 0; chunk_ > 0 && w < kChunkThreads / 32; ++w) along += m_.along[w];
        sum = __fmaf_rn(m_.gates.gamma[last], along, sum);
      }
      for (int t = last; t >= rows_.given; --t) m_.decay[t] = sum += m_.decay[t];
      if (rows_.given > 0) p_.fork_decay[p_.fork(index_, head_)] = sum;
    }
    __syncwarp();
    for (int t = rows_.given + lane(); t < rows_.count; t += 32) {
      const float beta = m_.gates.beta[t];
      put(p_.dg + row(t), m_.decay[t], p_.dg_adds);
      put(p_.dbeta + row(t), beta == 0 ? 0.0f : m_.diagonal[t] / beta / beta, p_.dbeta_adds);
    }
  }
  // dq and dk, or the part of a prefix's dk.
  __device__ void write_rows() {
    for_tiles(dq_, [&](const float* x, int row, int column) {
      if (row < rows_.given || row >= rows_.count) return;
      for (int e = 0; e < 2; ++e) put(p_.dq + key_row(row) * kDim + column + e, x[e], p_.dq_adds);
    });
    for_tiles(dk_, [&](float* x, int row, int column) {
      if (row >= rows_.count) return;
      const auto part = [&](int s) {
        return p_.fork_dk + (p_.fork_key(s, key_head_) * kChunk + row) * kDim + column;
      };
      for (int e = 0; e < 2; ++e) {
        if (row < rows_.given) {
          part(index_)[e] = x[e];
          continue;
        }
        for_children([&](int s) { x[e] += part(s)[e]; });
        put(p_.dk + key_row(row) * kDim + column + e, x[e], p_.dk_adds);
      }
    });
  }

  const BackwardProblem<T, kDim>& p_;
  Memory& m_;
  const PackedSequence sequence_;
  const int index_;
  const DeltaRun run_;
  const int chunk_, key_head_;
  const ChunkRows rows_;
  const ChunkEnd end_;
  int head_ = 0;
  Tiles dq_, dk_;  // sums over heads
};

// A block processes a slot of chunks and a key head. Sequences with a prefix come in a call of
// their own, before those that may be one.
template <class T, int kDim>
__global__ void __launch_bounds__(kChunkThreads, 1)
    delta_rows_kernel(const __grid_constant__ BackwardProblem<T, kDim> problem, int first_key_head,
                      bool continues) {
  extern __shared__ __align__(16) char shared[];
  const SequenceTile at = find_tile(problem.sequences, static_cast<int>(blockIdx.x), kChunk, 2);
  const PackedSequence& sequence = at.sequence;
  if (sequence.length <= 0 || continues != (sequence.prefix > 0)) return;
  if (sequence.prefix / kChunk + at.tile > (sequence.keys() - 1) / kChunk) return;
  RowBlock<T, kDim>(problem, *reinterpret_cast<RowMemory<T, kDim>*>(shared), at,
                    first_key_head + static_cast<int>(blockIdx.y))
      .run();
}

// Key heads whose matrices and rows of shared prefixes take at most 256 MiB together, but at least
// one key head at a time.
template <class T, int kDim>
int64_t key_heads_at_once(int64_t slots, int64_t forks, int64_t group, int64_t key_heads) {
  constexpr int64_t kBytes = 256 << 20;
  const int64_t head = 2 * slots * group * kDim * kDim * static_cast<int64_t>(sizeof(T)) +
                       forks * (group + 1) * kChunk * kDim * static_cast<int64_t>(sizeof(float));
  return std::clamp<int64_t>(kBytes / std::max<int64_t>(head, 1), 1, key_heads);
}

template <class T, int kDim>
void run_chain(const BackwardProblem<T, kDim>& problem, Device device) {
  const auto start = [&]<int kStages>() {
    launch("delta_chain", delta_chain_kernel<T, kDim, 32, kStages>,
           {.grid = blocks_for(int64_t{problem.sequences.count} * problem.states.heads * kDim, 32),
            .block = kChunkThreads,
            .shared_bytes = sizeof(ChainMemory<T, kDim, 32, kStages>)},
           device, problem);
  };
  if constexpr (std::is_same_v<T, bf16>)
    if (fits({.shared_memory = sizeof(ChainMemory<T, kDim, 32, 2>)},
             ::cohort::cuda::gpu_properties(device)))
      return start.template operator()<2>();
  start.template operator()<1>();
}

}  // namespace

void gated_delta_backward(const GatedDeltaBackward& args) {
  const Device device = args.in.v.device();
  const int64_t tokens = args.in.v.dim(0), key_heads = args.in.k.dim(1),
                group = args.in.v.dim(1) / key_heads;
  if (tokens == 0) return;
  const PackedSequences sequences = delta_sequences(args);
  const int64_t count = sequences.count, forks = sequences.prefixes == nullptr ? 0 : count;
  dispatch_delta(args.in.v, "gated_delta_backward", [&]<class T, int kDim>() {
    const int64_t slots = ChunkMatrices<T, kDim>::slots(tokens, count),
                  at_once = key_heads_at_once<T, kDim>(slots, forks, group, key_heads),
                  head_count = at_once * group;
    const auto scratch = [&](int64_t size) { return Tensor::empty({size}, DType::kF32, device); };
    Tensor matrices = Tensor::empty({2, slots, head_count, kDim, kDim}, args.in.v.dtype(), device);
    Tensor du = scratch(forks * head_count * kChunk * kDim),
           dk = scratch(forks * at_once * kChunk * kDim), dg = scratch(forks * head_count * kChunk),
           decay = scratch(forks * head_count), dr = args.dv.tensor;
    if (args.dv.mode == Grad::kAccumulate) dr = Tensor::empty_like(dr);
    const auto adds = [](const GradOut& grad) { return grad.mode == Grad::kAccumulate; };
    BackwardProblem<T, kDim> problem{.in = delta_problem<T>(args.in, args.desc.scale),
                                     .sequences = sequences,
                                     .dout = pointer<T>(args.dout),
                                     .dq = pointer<T>(args.dq.tensor),
                                     .dk = pointer<T>(args.dk.tensor),
                                     .dv = pointer<T>(args.dv.tensor),
                                     .dr = pointer<T>(dr),
                                     .dg = pointer<float>(args.dg.tensor),
                                     .dbeta = pointer<float>(args.dbeta.tensor),
                                     .dq_adds = adds(args.dq),
                                     .dk_adds = adds(args.dk),
                                     .dv_adds = adds(args.dv),
                                     .dg_adds = adds(args.dg),
                                     .dbeta_adds = adds(args.dbeta),
                                     .fork_du = forks > 0 ? pointer<float>(du) : nullptr,
                                     .fork_dk = forks > 0 ? pointer<float>(dk) : nullptr,
                                     .fork_dg = forks > 0 ? pointer<float>(dg) : nullptr,
                                     .fork_decay = forks > 0 ? pointer<float>(decay) : nullptr};
    problem.in.u = const_cast<T*>(pointer<T>(args.u));
    problem.in.v = problem.dout;
    check_delta_aligned(problem.in.u, problem.dout, problem.dr);
    for (int64_t first = 0; first < key_heads; first += at_once) {
      const int64_t key_count = std::min(at_once, key_heads - first);
      const ChunkMatrices<T, kDim> states{pointer<T>(matrices), static_cast<int>(first * group),
                                          static_cast<int>(key_count * group)};
      problem.states = problem.gradients = states;
      problem.gradients.data += slots * states.heads * kDim * kDim;
      delta_states(problem.in, sequences, states, device);
      run_chain(problem, device);
      for (const bool continues : {true, false})
        if (!continues || forks > 0)
          launch("delta_rows", delta_rows_kernel<T, kDim>,
                 {.grid = {blocks_for(slots, 1), static_cast<unsigned>(key_count)},
                  .block = kChunkThreads,
                  .shared_bytes = sizeof(RowMemory<T, kDim>)},
                 device, problem, static_cast<int>(first), continues);
    }
  });
}

}  // namespace cohort::kernels::cuda
