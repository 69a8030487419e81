// The gated delta rule of single tokens over states on CUDA.
#include "kernels/gated_delta/cuda/gated_delta.cuh"

namespace cohort::kernels::cuda {
namespace {

// A block processes a token and a key head, and the value heads of this in turn.
constexpr int kDecodeThreads = 128;

template <class T, int kDim>
struct alignas(16) DecodeMemory {
  static constexpr int kRow = kDim + kPadding<T>, kSquare = kChunk + kPadding<T>;
  // Operands A of 16 rows, of which only the first ones count: the key and the query of the token,
  // and the factors of u_i in o. The other rows are whatever follows in memory.
  T rows[2 * kRow], query_weights[kSquare];
  T k[kChunk * kRow], s[kDim * kRow], u[kChunk * kRow];
  float keys[kChunk], queries[kChunk];       // products of the token's key and query with keys
  float key_weights[kChunk], decay[kChunk];  // -L_ti (k_t k_i), and G
  float read[kDim], queried[kDim];           // S^T k and S^T q
};

template <class T, int kDim>
class DecodeBlock {
 public:
  using Memory = DecodeMemory<T, kDim>;

  __device__ DecodeBlock(const DeltaProblem<T>& problem, Memory& memory, int token, int state,
                         int position, int key_head)
      : p_(problem),
        m_(memory),
        token_(token),
        state_(state),
        key_head_(key_head),
        row_(position % kChunk),
        folds_(row_ == 0 && position > 0),
        had_matrix_(position > kChunk) {}

  __device__ void advance() {
    const int group = p_.heads / p_.key_heads, open = folds_ ? kChunk : row_;
    load_rows(m_.rows, 2, [&](int i) { return (i == 0 ? p_.k : p_.q) + key_offset(); });
    copy_async_commit();
    clear(m_.query_weights, kSquare);
    if (!folds_) begin_rows();
    for (int h = 0; h < group; ++h) {
      const int head = key_head_ * group + h;
      const int64_t at = p_.row(token_, head);
      if (h == 0 || folds_)
        load_rows(m_.k, open, [&](int i) { return p_.state_k + state_key_row(i) * kDim; });
      load_rows(m_.u, open,
                [&](int i) { return p_.state_u + p_.state_row(state_, i, head) * kDim; });
      const StoredMatrix<T, kDim> matrix(p_.s, p_.row(state_, head));
      if (had_matrix_ && !folds_)
        load_rows(m_.s, kDim, [&](int i) { return matrix.high + i * kDim; });
      for (int i = thread(); i < open; i += kDecodeThreads)
        m_.decay[i] = p_.state_decay[p_.state_row(state_, i, head)];
      if (!folds_) clear_rows(m_.u, open);
      copy_async_commit();
      copy_async_wait<0>();
      __syncthreads();
      if (folds_) fold(matrix);
      if (folds_ && h == 0) begin_rows();
      if (folds_) clear_rows(m_.u, 0);
      __syncthreads();
      const float decay = __fadd_rn(row_ == 0 ? 0.0f : m_.decay[row_ - 1], base2_gate(p_.g[at]));
      const float gamma = fast_exp2(decay);
      if (h == 0) multiply_rows();
      if (folds_ || had_matrix_) read_matrix();
      __syncthreads();
      for (int i = thread(); i <= row_; i += kDecodeThreads) {
        const float before = i < row_ ? m_.decay[i] : decay;
        m_.query_weights[i] = from_float<T>(decayed(m_.queries[i], decay, before));
        m_.key_weights[i] = -decayed(m_.keys[i], decay, before);
      }
      __syncthreads();
      if (thread() < kDim) solve(head, gamma);
      if (thread() == 0) p_.state_decay[p_.state_row(state_, row_, head)] = decay;
      __syncthreads();
      write_output(head, gamma);
      __syncthreads();
    }
    for (int i = thread(); i < kDim; i += kDecodeThreads)
      p_.state_k[state_key_row(row_) * kDim + i] = p_.k[key_offset() + i];
  }

 private:
  static constexpr int kRow = Memory::kRow, kSquare = Memory::kSquare;
  static constexpr int kTiles = kDim / 16, kWarps = kDecodeThreads / 32;

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ int64_t key_offset() const {
    return (int64_t{token_} * p_.key_heads + key_head_) * kDim;
  }
  __device__ int64_t state_key_row(int i) const { return p_.state_key_row(state_, i, key_head_); }

  template <class F>
  __device__ static void load_rows(T* to, int count, F&& row_of) {
    constexpr int kPack = kPackSize<T>, kPacks = kDim / kPack;
    for (int i = thread(); i < count * kPacks; i += kDecodeThreads) {
      const int row = i / kPacks, at = i % kPacks * kPack;
      copy_async(shared_address(to + row * kRow + at), row_of(row) + at, 16);
    }
  }
  __device__ static void clear(T* to, int count) {
    for (int i = thread(); i < count; i += kDecodeThreads) to[i] = from_float<T>(0.0f);
  }
  // Clears the rows from `first` on that a product may read.
  __device__ void clear_rows(T* to, int first) const {
    clear(to + first * kRow, (row_ / 16 * 16 + 16 - first) * kRow);
  }
  // Makes the token's key a row of its chunk.
  __device__ void begin_rows() {
    clear_rows(m_.k, row_ + 1);
    for (int i = thread(); i < kDim; i += kDecodeThreads)
      m_.k[row_ * kRow + i] = p_.k[key_offset() + i];
  }
  // The product of the key and the query, rows 0 and 1, with 16 columns, whose operands in steps of
  // 16 dims are b(dim). It goes to fn(row, column, x).
  template <class B, class F>
  __device__ void multiply_tile(B&& b, F&& fn) const {
    Accumulator sums;
    for (int d = 0; d < kDim; d += 16) multiply(sums, load_a(m_.rows + d, kRow), b(d));
    sums.for_pairs([&](const float* x, int row, int column) {
      if (row < 2) fn(row, column, x);
    });
  }
  __device__ void multiply_rows() {
    if (16 * warp() > row_) return;
    const T* const keys = m_.k + 16 * warp() * kRow;
    multiply_tile([&](int d) { return load_b(keys + d, kRow); },
                  [&](int row, int column, const float* x) {
                    store_pair((row == 0 ? m_.keys : m_.queries) + 16 * warp() + column, x[0],
                               x[1]);
                  });
  }
  __device__ void read_matrix() {
    for (int n = 16 * warp(); n < kDim; n += 16 * kWarps)
      multiply_tile([&](int d) { return load_b_transposed(m_.s + d * kRow + n, kRow); },
                    [&](int row, int column, const float* x) {
                      store_pair((row == 0 ? m_.read : m_.queried) + n + column, x[0], x[1]);
                    });
  }
  __device__ void solve(int head, float gamma) {
    const int column = thread();
    const int64_t at = p_.row(token_, head);
    const bool has_matrix = folds_ || had_matrix_;
    float r = begin_residual(gamma, has_matrix ? m_.read[column] : 0.0f,
                             to_float(p_.v[at * kDim + column]));
#pragma unroll 8
    for (int i = 0; i < row_; ++i)
      r = __fmaf_rn(m_.key_weights[i], to_float(m_.u[i * kRow + column]), r);
    const T u = finish_u<T>(p_.beta[at], r);
    m_.u[row_ * kRow + column] = u;
    p_.state_u[p_.state_row(state_, row_, head) * kDim + column] = u;
  }
  __device__ void write_output(int head, float gamma) {
    const bool has_matrix = folds_ || had_matrix_;
    T* const o = p_.o + p_.row(token_, head) * kDim;
    for (int n = 16 * warp(); n < kDim; n += 16 * kWarps) {
      Accumulator out;
      out.for_pairs([&](float* x, int row, int column) {
        if (row > 0) return;
        x[0] = __fmul_rn(gamma, has_matrix ? m_.queried[n + column] : 0.0f);
        x[1] = __fmul_rn(gamma, has_matrix ? m_.queried[n + column + 1] : 0.0f);
      });
      for (int i = 0; i <= row_; i += 16)
        multiply(out, load_a(m_.query_weights + i, kSquare),
                 load_b_transposed(m_.u + i * kRow + n, kRow));
      out.for_pairs([&](const float* x, int row, int column) {
        if (row > 0) return;
        store_pair(o + n + column, finish_output(x[0], p_.scale), finish_output(x[1], p_.scale));
      });
    }
  }
  // The matrix of the chunk before becomes that of this one, in the state and in shared memory.
  __device__ void fold(const StoredMatrix<T, kDim>& matrix) {
    const float end = m_.decay[kChunk - 1], gamma = fast_exp2(end);
    for (int i = thread(); i < kChunk * kDim; i += kDecodeThreads) {
      const int row = i / kDim;
      T& u = m_.u[row * kRow + i % kDim];
      u = scaled_u(fast_exp2(end - m_.decay[row]), u);
    }
    __syncthreads();
    for (int tile = warp(); tile < kTiles * kTiles; tile += kWarps) {
      const int row0 = tile / kTiles * 16, column0 = tile % kTiles * 16;
      Accumulator sums;
#pragma unroll
      for (int i = 0; i < kChunk; i += 16)
        multiply(sums, load_a_transposed(m_.k + i * kRow + row0, kRow),
                 load_b_transposed(m_.u + i * kRow + column0, kRow));
      sums.for_pairs([&](float* x, int row, int column) {
        row += row0;
        column += column0;
        float s[2] = {0, 0};
        if (had_matrix_) matrix.load(row, column, s);
        x[0] = folded(gamma, s[0], x[0]);
        x[1] = folded(gamma, s[1], x[1]);
        matrix.store(row, column, x);
        store_pack(m_.s + row * kRow + column,
                   Pack<T, 2>{{as_operand<T>(x[0]), as_operand<T>(x[1])}});
      });
    }
    __syncthreads();
  }

  const DeltaProblem<T>& p_;
  Memory& m_;
  const int token_, state_, key_head_, row_;
  const bool folds_, had_matrix_;  // whether there is a matrix before the fold
};

template <class T, int kDim>
__global__ void __launch_bounds__(kDecodeThreads, 3)
    gated_delta_decode_kernel(const __grid_constant__ DeltaProblem<T> problem,
                              const int32_t* states, const int32_t* positions, int num_states) {
  extern __shared__ __align__(16) char shared[];
  const int token = static_cast<int>(blockIdx.x), key_head = static_cast<int>(blockIdx.y),
            state = states[token], position = positions[token];
  if (state < 0 || state >= num_states || position < 0) {
    const int width = problem.heads / problem.key_heads * kDim;
    T* const o = problem.o + (int64_t{token} * problem.key_heads + key_head) * width;
    for (int i = static_cast<int>(threadIdx.x); i < width; i += kDecodeThreads)
      o[i] = from_float<T>(0.0f);
    return;
  }
  DecodeBlock<T, kDim>(problem, *reinterpret_cast<DecodeMemory<T, kDim>*>(shared), token, state,
                       position, key_head)
      .advance();
}

}  // namespace

template <class T, int kDim>
void delta_decode(const DeltaProblem<T>& problem, const GatedDeltaCached& args) {
  launch("gated_delta_decode", gated_delta_decode_kernel<T, kDim>,
         {.grid = {blocks_for(args.o.dim(0), 1), static_cast<unsigned>(problem.key_heads)},
          .block = kDecodeThreads,
          .shared_bytes = sizeof(DecodeMemory<T, kDim>)},
         args.o.device(), problem, pointer<int32_t>(args.states), pointer<int32_t>(args.positions),
         static_cast<int>(args.state.s.dim(0)));
}
template void delta_decode<float, 64>(const DeltaProblem<float>&, const GatedDeltaCached&);
template void delta_decode<float, 128>(const DeltaProblem<float>&, const GatedDeltaCached&);
template void delta_decode<bf16, 64>(const DeltaProblem<bf16>&, const GatedDeltaCached&);
template void delta_decode<bf16, 128>(const DeltaProblem<bf16>&, const GatedDeltaCached&);

}  // namespace cohort::kernels::cuda
