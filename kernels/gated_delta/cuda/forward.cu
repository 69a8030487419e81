// The gated delta rule on CUDA, of packed sequences and of pieces over states. A block advances a
// slice of the columns of one head's matrix along one sequence, chunk by chunk; columns are
// independent. The matrix stays in registers, and in shared memory as an operand. In a chunk all
// warps compute S^T k and S^T q; then kSolverWarps of them solve for u, while the others load the
// next chunk and compute the products of its rows; then all add to o and fold.
#include <algorithm>

#include "kernels/gated_delta/cuda/chunk.cuh"

namespace cohort::kernels::cuda {
namespace {

template <class T, int kDim, int kCols, int kStages>
struct ForwardMemory : ChunkMemory<T, kDim, kCols, kStages> {
  T u[kChunk * ForwardMemory::kSlice],
      scaled[kChunk * ForwardMemory::kSlice];  // as the fold takes it
};

template <class T, int kDim, int kCols, int kStages>
class ForwardBlock
    : ChunkBlock<T, kDim, kCols, kStages, false, ForwardMemory<T, kDim, kCols, kStages>> {
  using Base = ChunkBlock<T, kDim, kCols, kStages, false, ForwardMemory<T, kDim, kCols, kStages>>;
  using Base::begin_load, Base::column_, Base::copy_matrix, Base::for_matrix, Base::head_,
      Base::is_cached, Base::is_helper;
  using Base::kBlock, Base::kMatrixTiles, Base::kReadTiles, Base::kResiduals, Base::kRow;
  using Base::kSlice, Base::kSquare, Base::kWarps, Base::kWeights, Base::lane, Base::m_;
  using Base::matrix_, Base::matrix_column, Base::matrix_row, Base::p_, Base::prepare;
  using Base::read_column, Base::read_row, Base::run_, Base::publish_matrix, Base::subtract;
  using Base::token, Base::warp;

 public:
  using Memory = ForwardMemory<T, kDim, kCols, kStages>;

  __device__ ForwardBlock(const DeltaProblem<T>& problem, Memory& memory, const DeltaRun& run,
                          int head, int slice)
      : Base(problem, memory, run, head, slice) {}

  __device__ void advance() {
    advance([](int) { return static_cast<T*>(nullptr); });
  }
  // copy_of(chunk): where the matrix at the start of a later chunk is copied to, or null.
  template <class F>
  __device__ void advance(F&& copy_of) {
    const int first = is_cached() ? max(run_.position - 1, 0) / kChunk : 0,
              last = (run_.end - 1) / kChunk;
    load_matrix(first > 0);
    if (is_helper()) prepare(first, 0, begin_load(first, 0));
    for (int chunk = first; chunk <= last; ++chunk) {
      const int stage = (chunk - first) % kStages, next_stage = (stage + 1) % kStages;
      const bool prefetches = kStages > 1 && chunk < last && is_helper();
      const ChunkRows rows(run_, chunk);
      if (kStages == 1 && chunk > first && is_helper()) prepare(chunk, 0, begin_load(chunk, 0));
      __syncthreads();
      float gate = 0;
      if (prefetches) gate = begin_load(chunk + 1, next_stage);
      load_given(rows, stage);
      Accumulator queried[kReadTiles];
      if (rows.given < rows.count) read_matrix(rows, stage, queried);
      __syncthreads();
      if (rows.given < rows.count && !is_helper()) solve(rows, stage, chunk == last);
      if (prefetches) prepare(chunk + 1, next_stage, gate);
      __syncthreads();
      if (rows.given < rows.count) write_outputs(rows, stage, queried);
      if (chunk < last) {
        fold(stage);
        if (T* const copy = copy_of(chunk + 1); copy != nullptr) copy_matrix(copy);
      }
      if (kStages == 1) __syncthreads();
    }
    if (is_cached() && last > first) store_matrix();
    __syncthreads();
  }

 private:
  __device__ T* u_row(const ChunkRows& rows, int i, bool in_state) const {
    if (in_state) return p_.state_u + p_.state_row(run_.state, i, head_) * kDim;
    return p_.u + p_.row(token(rows.base + i), head_) * kDim;
  }

  __device__ void load_matrix(bool is_stored) {
    if (is_stored)
      for_matrix([&, from = StoredMatrix<T, kDim>(p_.s, p_.row(run_.state, head_))](
                     float* x, int row, int column) {
        float pair[2];
        from.load(row, column_ + column, pair);
        x[0] = pair[0];
        x[1] = pair[1];
      });
    publish_matrix();
  }
  __device__ void store_matrix() {
    for_matrix([&, to = StoredMatrix<T, kDim>(p_.s, p_.row(run_.state, head_))](
                   float* x, int row, int column) { to.store(row, column_ + column, x); });
  }

  __device__ void load_given(const ChunkRows& rows, int stage) {
    constexpr int kPack = kPackSize<T>, kPacks = kCols / kPack;
    for (int i = static_cast<int>(threadIdx.x); i < rows.given * kPacks; i += kChunkThreads) {
      const int row = i / kPacks, at = i % kPacks * kPack;
      const auto u = load_pack<kPack>(u_row(rows, row, is_cached()) + column_ + at);
      Pack<T, kPack> scaled;
#pragma unroll
      for (int n = 0; n < kPack; ++n) scaled.v[n] = scaled_u(m_.gates[stage].to_end[row], u.v[n]);
      store_pack(m_.u + row * kSlice + at, u);
      store_pack(m_.scaled + row * kSlice + at, scaled);
    }
  }

  // S^T k becomes part of the residuals; S^T q is returned.
  __device__ void read_matrix(const ChunkRows& rows, int stage,
                              Accumulator (&queried)[kReadTiles]) {
    const int row0 = read_row(), column0 = read_column();
    if (row0 >= rows.count) return;
    Accumulator read[kReadTiles];
    if (rows.base > 0) {  // the matrix is zero in the first chunk
#pragma unroll 4
      for (int d = 0; d < kDim; d += 16) {
        const Operand<T> k = load_a(m_.k[stage] + row0 * kRow + d, kRow),
                         q = load_a(m_.q[stage] + row0 * kRow + d, kRow);
#pragma unroll
        for (int n = 0; n < kReadTiles; ++n) {
          const Operand<T> s = load_b_transposed(m_.s + d * kSlice + column0 + 16 * n, kSlice);
          multiply(read[n], k, s);
          multiply(queried[n], q, s);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kReadTiles; ++n)
      read[n].for_pairs([&](const float* x, int row, int column) {
        row += row0;
        column += column0 + 16 * n;
        const float gamma = m_.gates[stage].gamma[row];
        float v[2];
        load_pair(m_.v + row * kSlice + column, v);
        store_pair(m_.residual + row * kResiduals + column, begin_residual(gamma, x[0], v[0]),
                   begin_residual(gamma, x[1], v[1]));
      });
  }

  // A lane has a column. The warps of 32 columns have blocks of 16 rows in turn: each applies the
  // rows of earlier blocks as they come, and then solves its own.
  __device__ void solve(const ChunkRows& rows, int stage, bool is_last) {
    const int group = warp() / kWarps, column = 32 * group + lane();
    const float* const w = m_.key_weights[stage];
    float r[kBlock], beta[kBlock];
    int mine = warp() % kWarps * kBlock, applied = 0;  // rows
    const auto load = [&] {
#pragma unroll
      for (int j = 0; j < kBlock; ++j) {
        r[j] = m_.residual[(mine + j) * kResiduals + column];
        beta[j] = m_.gates[stage].beta[mine + j];
      }
    };
    load();
    for (int solved = 0; solved < rows.count; solved += kBlock) {
      if (mine < rows.count) {
#pragma unroll 4
        for (; applied < solved; ++applied) {
          const float u = to_float(m_.u[applied * kSlice + column]);
          subtract(r, w + applied * kWeights + mine, u, 0, kBlock);
        }
      }
      T u[kBlock];
      const bool is_mine = mine == solved;
      if (is_mine) {
        T* const to = m_.u + mine * kSlice + column;
        // Each row waits for the one before. Without stores, weights are loaded ahead.
#pragma unroll
        for (int j = 0; j < kBlock; ++j) {
          u[j] = mine + j < rows.given ? to[j * kSlice] : finish_u<T>(beta[j], r[j]);
          subtract(r, w + (mine + j) * kWeights + mine, to_float(u[j]), j + 1, kBlock);
        }
#pragma unroll
        for (int j = 0; j < kBlock; ++j) to[j * kSlice] = u[j];
      }
      warps_barrier(kSolverBarrier + group, 32 * kWarps);
      if (is_mine) {
        store_block(rows, stage, is_last, mine, column, u);
        mine += kWarps * kBlock;
        applied = 0;
        if (mine < rows.count) load();
      }
    }
  }
  // The other copies of a solved block, for which no warp waits.
  __device__ __forceinline__ void store_block(const ChunkRows& rows, int stage, bool is_last,
                                              int row0, int column, const T (&u)[kBlock]) {
    const bool is_stored = !is_cached() || is_last;
#pragma unroll
    for (int j = 0; j < kBlock; ++j) {
      const int t = row0 + j;
      if (t < rows.given) continue;
      m_.scaled[t * kSlice + column] = scaled_u(m_.gates[stage].to_end[t], u[j]);
      if (t < rows.count && is_stored) u_row(rows, t, is_cached())[column_ + column] = u[j];
    }
  }

  __device__ void write_outputs(const ChunkRows& rows, int stage, Accumulator (&out)[kReadTiles]) {
    const int row0 = read_row(), column0 = read_column();
    if (row0 >= rows.count || row0 + 16 <= rows.given) return;
#pragma unroll
    for (int n = 0; n < kReadTiles; ++n)
      out[n].for_pairs([&](float* x, int row, int) {
        const float gamma = m_.gates[stage].gamma[row0 + row];
        x[0] = __fmul_rn(gamma, x[0]);
        x[1] = __fmul_rn(gamma, x[1]);
      });
    for (int i = 0; i <= row0; i += 16) {
      const Operand<T> weights = load_a(m_.query_weights[stage] + row0 * kSquare + i, kSquare);
#pragma unroll
      for (int n = 0; n < kReadTiles; ++n)
        multiply(out[n], weights, load_b_transposed(m_.u + i * kSlice + column0 + 16 * n, kSlice));
    }
#pragma unroll
    for (int n = 0; n < kReadTiles; ++n)
      out[n].for_pairs([&](const float* x, int row, int column) {
        row += row0;
        if (row < rows.given || row >= rows.count) return;
        T* const to = p_.o + p_.row(token(rows.base + row), head_) * kDim;
        store_pair(to + column_ + column0 + 16 * n + column, finish_output(x[0], p_.scale),
                   finish_output(x[1], p_.scale));
      });
  }

  __device__ void fold(int stage) {
    Accumulator sums[kMatrixTiles];
#pragma unroll
    for (int i = 0; i < kChunk; i += 16) {
      const Operand<T> k = load_a_transposed(m_.k[stage] + i * kRow + matrix_row(), kRow);
#pragma unroll
      for (int n = 0; n < kMatrixTiles; ++n)
        multiply(sums[n], k,
                 load_b_transposed(m_.scaled + i * kSlice + matrix_column() + 16 * n, kSlice));
    }
    const float gamma = m_.gates[stage].gamma[kChunk - 1];
#pragma unroll
    for (int n = 0; n < kMatrixTiles; ++n)
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& x = matrix_[n].c[e / 4][e % 4];
        x = folded(gamma, x, sums[n].c[e / 4][e % 4]);
      }
    publish_matrix();
  }
};

// Sequences without a prefix come in one call, and then those with one, which read its u.
template <class T, int kDim, int kCols, int kStages>
__global__ void __launch_bounds__(kChunkThreads, 1)
    gated_delta_kernel(const __grid_constant__ DeltaProblem<T> problem,
                       const PackedSequences sequences, bool continues) {
  extern __shared__ __align__(16) char shared[];
  using Memory = ForwardMemory<T, kDim, kCols, kStages>;
  constexpr int kSlices = kDim / kCols;
  const int slice = static_cast<int>(blockIdx.x) % kSlices,
            head = static_cast<int>(blockIdx.x) / kSlices % problem.heads,
            s = static_cast<int>(blockIdx.x) / kSlices / problem.heads;
  const PackedSequence sequence = sequences[s];
  if (sequence.length <= 0 || continues != (sequence.prefix > 0)) return;
  ForwardBlock<T, kDim, kCols, kStages>(problem, *reinterpret_cast<Memory*>(shared),
                                        DeltaRun::of(sequence), head, slice)
      .advance();
}

template <class T, int kDim, int kCols, int kStages>
__global__ void __launch_bounds__(kChunkThreads, 1)
    delta_states_kernel(const __grid_constant__ DeltaProblem<T> problem,
                        const PackedSequences sequences, const ChunkMatrices<T, kDim> states) {
  extern __shared__ __align__(16) char shared[];
  using Memory = ForwardMemory<T, kDim, kCols, kStages>;
  constexpr int kSlices = kDim / kCols;
  const int item = static_cast<int>(blockIdx.x), s = item / kSlices / states.heads,
            head = states.first_head + item / kSlices % states.heads;
  const PackedSequence sequence = sequences[s];
  if (sequence.length <= 0 || sequence.keys() <= kChunk) return;
  DeltaRun run = DeltaRun::of(sequence);
  run.position = run.end;
  ForwardBlock<T, kDim, kCols, kStages>(problem, *reinterpret_cast<Memory*>(shared), run, head,
                                        item % kSlices)
      .advance([&](int chunk) {
        const bool is_own = chunk >= sequence.prefix / kChunk;
        return is_own ? states.at(sequence, s, chunk, head) : nullptr;
      });
}

// The pieces of a call.
struct Pieces {
  const int32_t *states, *positions;
  int tokens, num_states;
  int *count, *first;  // number of pieces, and the first token of each, in any order
  int* last;           // the last token of a state's piece
};
// A block has a token. Idle ones get zeros.
template <class T>
__global__ void __launch_bounds__(128)
    find_pieces_kernel(const __grid_constant__ Pieces pieces, T* o, int width) {
  const int32_t *const states = pieces.states, *const positions = pieces.positions;
  const int t = static_cast<int>(blockIdx.x);
  const auto live = [&](int i) {
    return states[i] >= 0 && states[i] < pieces.num_states && positions[i] >= 0;
  };
  if (!live(t)) {
    for (int i = static_cast<int>(threadIdx.x); i < width; i += 128)
      o[int64_t{t} * width + i] = from_float<T>(0.0f);
    return;
  }
  const int state = states[t];
  if (threadIdx.x > 0) return;
  const auto continues = [&](int i) { return live(i) && states[i] == state; };
  if (t == 0 || !continues(t - 1)) pieces.first[atomicAdd(pieces.count, 1)] = t;
  if (t + 1 == pieces.tokens || !continues(t + 1)) pieces.last[state] = t;
}

template <class T>
struct PieceProblem {
  DeltaProblem<T> problem;
  Pieces pieces;

  __device__ int count() const { return *pieces.count; }
  __device__ DeltaRun run(int index) const {
    const int first = pieces.first[index], state = pieces.states[first],
              position = pieces.positions[first];
    return {.begin = first,
            .prefix_begin = 0,
            .prefix = position,
            .position = position,
            .end = position + pieces.last[state] - first + 1,
            .state = state};
  }
};

template <class T, int kDim, int kCols, int kStages>
__global__ void __launch_bounds__(kChunkThreads, 1)
    gated_delta_pieces_kernel(const __grid_constant__ PieceProblem<T> call) {
  extern __shared__ __align__(16) char shared[];
  using Memory = ForwardMemory<T, kDim, kCols, kStages>;
  constexpr int kSlices = kDim / kCols;
  const int heads = call.problem.heads, items = call.count() * heads * kSlices;
  for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x))
    ForwardBlock<T, kDim, kCols, kStages>(call.problem, *reinterpret_cast<Memory*>(shared),
                                          call.run(item / kSlices / heads), item / kSlices % heads,
                                          item % kSlices)
        .advance();
}

// The keys and G of a piece's last chunk, once no block reads those of the chunk before. A block
// has a piece and a key head.
template <class T, int kDim>
__global__ void __launch_bounds__(128)
    append_rows_kernel(const __grid_constant__ PieceProblem<T> call) {
  if (static_cast<int>(blockIdx.x) >= call.count()) return;
  const DeltaProblem<T>& p = call.problem;
  const DeltaRun run = call.run(static_cast<int>(blockIdx.x));
  const int key_head = static_cast<int>(blockIdx.y), group = p.heads / p.key_heads,
            base = (run.end - 1) / kChunk * kChunk, first = max(run.position, base);
  const auto token = [&](int position) { return int64_t{run.token(position)}; };
  for (int i = static_cast<int>(threadIdx.x); i < (run.end - first) * kDim; i += 128) {
    const int position = first + i / kDim, d = i % kDim;
    p.state_k[p.state_key_row(run.state, position - base, key_head) * kDim + d] =
        p.k[(token(position) * p.key_heads + key_head) * kDim + d];
  }
  for (int h = static_cast<int>(threadIdx.x); h < group; h += 128) {
    const int head = key_head * group + h;
    float decay = first > base ? p.state_decay[p.state_row(run.state, first - base - 1, head)] : 0;
    for (int position = first; position < run.end; ++position) {
      decay = __fadd_rn(decay, base2_gate(p.g[p.row(token(position), head)]));
      p.state_decay[p.state_row(run.state, position - base, head)] = decay;
    }
  }
}

// Calls fn.operator()<kCols, kStages>() with a slice for `chains` heads of sequences; 0 if unknown.
template <class T, int kDim, bool kKnown, class F>
void with_slices(int64_t chains, Device device, F&& fn) {
  const GpuProperties& gpu = ::cohort::cuda::gpu_properties(device);
  if constexpr (std::is_same_v<T, bf16>) {
    if constexpr (kKnown)
      if (chains * (kDim / 64) >= 3 * int64_t{gpu.multiprocessors} &&
          fits({.shared_memory = sizeof(ForwardMemory<T, kDim, 64, 2>)}, gpu))
        return fn.template operator()<64, 2>();
    if (fits({.shared_memory = sizeof(ForwardMemory<T, kDim, 32, 2>)}, gpu))
      return fn.template operator()<32, 2>();
  }
  fn.template operator()<32, 1>();
}

template <class T, int kDim>
void run_pieces(const GatedDeltaCached& args, const DeltaProblem<T>& problem) {
  const Device device = args.o.device();
  const int64_t tokens = args.o.dim(0), num_states = args.state.s.dim(0),
                most = std::min(tokens, num_states);
  Tensor found = Tensor::zeros({1 + most + num_states}, DType::kI32, device);
  int* const count = pointer<int32_t>(found);
  const PieceProblem<T> call{problem,
                             {.states = pointer<int32_t>(args.states),
                              .positions = pointer<int32_t>(args.positions),
                              .tokens = static_cast<int>(tokens),
                              .num_states = static_cast<int>(num_states),
                              .count = count,
                              .first = count + 1,
                              .last = count + 1 + most}};
  launch("find_pieces", find_pieces_kernel<T>, {.grid = blocks_for(tokens, 1), .block = 128},
         device, call.pieces, problem.o, problem.heads * kDim);
  with_slices<T, kDim, false>(0, device, [&]<int kCols, int kStages>() {
    const int64_t blocks =
        std::min<int64_t>(most * problem.heads * (kDim / kCols),
                          8 * int64_t{::cohort::cuda::gpu_properties(device).multiprocessors});
    launch("gated_delta_pieces", gated_delta_pieces_kernel<T, kDim, kCols, kStages>,
           {.grid = blocks_for(blocks, 1),
            .block = kChunkThreads,
            .shared_bytes = sizeof(ForwardMemory<T, kDim, kCols, kStages>)},
           device, call);
  });
  launch("append_rows", append_rows_kernel<T, kDim>,
         {.grid = {blocks_for(most, 1), static_cast<unsigned>(problem.key_heads)}, .block = 128},
         device, call);
}

}  // namespace

template <class T, int kDim>
void delta_states(const DeltaProblem<T>& problem, const PackedSequences& sequences,
                  const ChunkMatrices<T, kDim>& states, Device device) {
  const int64_t chains = int64_t{sequences.count} * states.heads;
  with_slices<T, kDim, true>(chains, device, [&]<int kCols, int kStages>() {
    launch("delta_states", delta_states_kernel<T, kDim, kCols, kStages>,
           {.grid = blocks_for(chains * (kDim / kCols), 1),
            .block = kChunkThreads,
            .shared_bytes = sizeof(ForwardMemory<T, kDim, kCols, kStages>)},
           device, problem, sequences, states);
  });
}
#define COHORT_STATES(T, kDim)                                               \
  template void delta_states(const DeltaProblem<T>&, const PackedSequences&, \
                             const ChunkMatrices<T, kDim>&, Device);
COHORT_STATES(float, 64)
COHORT_STATES(float, 128)
COHORT_STATES(bf16, 64)
COHORT_STATES(bf16, 128)
#undef COHORT_STATES

void gated_delta(const GatedDelta& args) {
  const Device device = args.in.v.device();
  const PackedSequences sequences = delta_sequences(args);
  dispatch_delta(args.in.v, "gated_delta", [&]<class T, int kDim>() {
    DeltaProblem<T> problem = delta_problem<T>(args.in, args.desc.scale);
    problem.o = pointer<T>(args.o);
    problem.u = pointer<T>(args.u);
    check_delta_aligned(problem.o, problem.u);
    const int64_t chains = int64_t{sequences.count} * problem.heads;
    with_slices<T, kDim, true>(chains, device, [&]<int kCols, int kStages>() {
      for (const bool continues : {false, true})
        if (!continues || sequences.prefixes != nullptr)
          launch("gated_delta", gated_delta_kernel<T, kDim, kCols, kStages>,
                 {.grid = blocks_for(chains * (kDim / kCols), 1),
                  .block = kChunkThreads,
                  .shared_bytes = sizeof(ForwardMemory<T, kDim, kCols, kStages>)},
                 device, problem, sequences, continues);
    });
  });
}

void gated_delta_cached(const GatedDeltaCached& args) {
  dispatch_delta(args.in.v, "gated_delta_cached", [&]<class T, int kDim>() {
    DeltaProblem<T> problem = delta_problem<T>(args.in, args.scale);
    problem.o = pointer<T>(args.o);
    problem.s = pointer<void>(args.state.s);
    problem.state_k = pointer<T>(args.state.k);
    problem.state_u = pointer<T>(args.state.u);
    problem.state_decay = pointer<float>(args.state.decay);
    check_delta_aligned(problem.o, static_cast<T*>(problem.s), problem.state_k, problem.state_u);
    if (!args.is_decode) return run_pieces<T, kDim>(args, problem);
    delta_decode<T, kDim>(problem, args);
  });
}

}  // namespace cohort::kernels::cuda
