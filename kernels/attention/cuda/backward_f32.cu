// Both passes of the attention backward in f32, as one kernel of fma chains. Four tiles of 32 rows
// (16 for head dims over 128) are in shared memory: own and streamed rows, of two tensors each. A
// thread computes 2x2 scores (1x1), and after a barrier accumulates P and dS of all streamed rows
// into 4 rows (2) by 2 to 8 columns of gradient.
#include "kernels/attention/cuda/backward.cuh"

namespace cohort::kernels::cuda {
namespace {

constexpr int kThreads = 256;
// Own rows per block, and streamed rows per step.
template <int kDim>
constexpr int kTile = float_backward_rows(kDim);

// Rows are padded by 16 bytes, so that adjacent ones start in different banks.
template <int kDim>
struct SharedTiles {
  static constexpr int kRows = kTile<kDim>;
  float own[2][kRows][kDim + 4];
  float streamed[2][kRows][kDim + 4];
  float p[kRows][kRows + 4], ds[kRows][kRows + 4];  // [streamed row][own row]
};

// Starts loading rows [row0, row0 + kTile<kDim>), zero from `length` and from the head dim on.
template <int kDim>
__device__ void load_rows(float (&tile)[kTile<kDim>][kDim + 4], const HeadRows<const float>& from,
                          int row0, int length, int head_dim, bool vectorized) {
  constexpr int kChunks = kDim / 4;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < kTile<kDim> * kChunks; i += kThreads) {
    const int r = i / kChunks;
    load_float_chunk(tile[r], i % kChunks, row0 + r < length ? from.row(row0 + r) : nullptr,
                     head_dim, vectorized);
  }
}

template <int kDim, Pass kPass, class Args>
class BackwardBlock {
 public:
  __device__ BackwardBlock(const Args& args, const BackwardSlice& slice, SharedTiles<kDim>& shared)
      : args_(args), slice_(slice), shared_(shared) {}
  // Loops over steps, for kKeys over the heads of the group, and over the sequences whose queries
  // see the own keys.
  __device__ void run() {
    const int heads = kKeys ? args_.group() : 1;
    const int first_head = kKeys ? slice_.head * heads : slice_.head / args_.group();
    load_own();
    BackwardStream stream = slice_.stream;
    int sequence = slice_.index;
    const IndexRange<int> own{slice_.own, slice_.own + kRows};
    do {
      for (int head = first_head; head < first_head + heads; ++head)
        for (int step = stream.steps.first; step < stream.steps.end;
             step = next_step<kPass>(args_.rule, own, step + 1, stream.steps.end, kRows)) {
          __syncthreads();  // every thread has finished the last step
          load_streamed(stream, head, step * kRows);
          copy_async_commit();
          copy_async_wait<0>();  // the first time also for the own rows
          __syncthreads();
          scores(stream, sequence, kKeys ? head : slice_.head, step * kRows);
          __syncthreads();
          accumulate_gradients();
        }
    } while (kKeys && next_stream(args_, slice_, sequence, stream, kRows, kRows));
  }

  __device__ void store() const {
    if constexpr (kKeys) {
      store(dk_dq_, args_.dk, args_.rule.scale, args_.accumulate_k);
      store(dv_, args_.dv, 1.0f, args_.accumulate_v);
    } else {
      store(dk_dq_, args_.dq, args_.rule.scale, args_.accumulate_q);
    }
  }

 private:
  static constexpr bool kKeys = kPass == Pass::kKeys;
  static constexpr int kVector = kDim == 64 ? 2 : 4;  // adjacent columns of a thread
  static constexpr int kVectors = kDim / (32 * kVector);
  static constexpr int kRows = kTile<kDim>;
  static constexpr int kScores = kRows / 16;                   // per side and thread
  static constexpr int kThreadRows = kRows / (kThreads / 32);  // the same for all of a warp
  using Gradient = float[kThreadRows][kVectors][kVector];

  __device__ void load_own() {
    for (int i = 0; i < 2; ++i) {
      const auto& tensor = kKeys ? (i == 0 ? args_.k : args_.v) : (i == 0 ? args_.q : args_.dout);
      load_rows<kDim>(shared_.own[i], tensor.rows(slice_.sequence.begin, slice_.head), slice_.own,
                      slice_.sequence.length, args_.head_dim, args_.vectorized);
    }
  }

  __device__ void load_streamed(const BackwardStream& stream, int head, int row0) {
    for (int i = 0; i < 2; ++i) {
      const auto& tensor = kKeys ? (i == 0 ? args_.q : args_.dout) : (i == 0 ? args_.k : args_.v);
      const auto rows =
          kKeys ? tensor.rows(stream.begin, head) : tensor.keys(slice_.sequence, head);
      load_rows<kDim>(shared_.streamed[i], rows, row0, stream.length, args_.head_dim,
                      args_.vectorized);
    }
  }

  // S and dP for own rows y, y + 16, ... and streamed rows x, x + 16, ... `sequence` and `head`:
  // those of the queries.
  __device__ void scores(const BackwardStream& stream, int sequence, int head, int row0) {
    const int y = static_cast<int>(threadIdx.x) / 16, x = static_cast<int>(threadIdx.x) % 16;
    float acc[2][kScores][kScores] = {};  // [S or dP][own][streamed]
#pragma unroll 4
    for (int d = 0; d < kDim; d += 4)
#pragma unroll
      for (int matmul = 0; matmul < 2; ++matmul) {
        Pack<float, 4> a[kScores], b[kScores];
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
          a[i] = load_pack<4>(&shared_.own[matmul][y + 16 * i][d]);
          b[i] = load_pack<4>(&shared_.streamed[matmul][x + 16 * i][d]);
        }
#pragma unroll
        for (int i = 0; i < kScores; ++i)
#pragma unroll
          for (int j = 0; j < kScores; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e)
              acc[matmul][i][j] = __fmaf_rn(a[i].v[e], b[j].v[e], acc[matmul][i][j]);
      }
    const auto rule = args_.rule.bind(sequence, head, slice_.sequence.keys());
#pragma unroll
    for (int i = 0; i < kScores; ++i)
#pragma unroll
      for (int j = 0; j < kScores; ++j)
        score(acc[0][i][j], acc[1][i][j], stream, rule, head, y + 16 * i, x + 16 * j, row0);
  }

  // Turns S and dP of an own and a streamed row, both relative to their tiles, into P, dropped,
  // and dS, zero where masked and for rows beyond the sequence.
  template <class Rule>
  __device__ void score(float s, float dp, const BackwardStream& stream, const Rule& rule, int head,
                        int own, int streamed, int row0) {
    const int own_row = slice_.own + own, streamed_row = row0 + streamed;
    const int key = kKeys ? own_row : streamed_row, query_row = kKeys ? streamed_row : own_row;
    const int position = kKeys ? stream.position + query_row : slice_.sequence.position(query_row);
    float p = 0, ds = 0;
    if (own_row < slice_.sequence.length && streamed_row < stream.length &&
        !rule.masked(position, key)) {
      const int64_t token = (kKeys ? stream.begin : slice_.sequence.begin) + query_row,
                    at = head * args_.tokens + token;
      const KeyDistance<float> distance(key - position);
      rule.modify([&](auto&& stage) { s = stage(s, distance); });
      p = fast_exp2(__fmaf_rn(s, rule.exponent, -args_.lse_log2[at]));
      const float undropped = p;
      if (args_.rule.drops()) {
        const uint32_t four = args_.rule.drop.keep_four(args_.streams[token], head, key & ~3);
        const float factor = (four >> (key & 3) & 1) != 0 ? args_.rule.drop.factor : 0.0f;
        p *= factor;
        dp *= factor;
      }
      ds = undropped * (dp - args_.delta[at]);
      rule.differentiate(
          [&](auto&& derivative) { ds *= derivative(undropped, args_.lse_log2[at], distance); });
    }
    shared_.p[streamed][own] = p;
    shared_.ds[streamed][own] = ds;
  }

  // Accumulates the gradients over ascending streamed rows; rows beyond the sequence add zeros.
  __device__ void accumulate_gradients() {
    const int own = static_cast<int>(threadIdx.x) / 32 * kThreadRows;
    const int column = static_cast<int>(threadIdx.x) % 32 * kVector;
    const auto add = [&](Gradient& grad, const float* weights, const float* row) {
      const Pack<float, kThreadRows> w = load_pack<kThreadRows>(weights + own);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const Pack<float, kVector> x = load_pack<kVector>(row + column + v * 32 * kVector);
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r)
#pragma unroll
          for (int e = 0; e < kVector; ++e)
            grad[r][v][e] = __fmaf_rn(w.v[r], x.v[e], grad[r][v][e]);
      }
    };
#pragma unroll 4
    for (int j = 0; j < kRows; ++j) {
      add(dk_dq_, shared_.ds[j], shared_.streamed[0][j]);
      if constexpr (kKeys) add(dv_, shared_.p[j], shared_.streamed[1][j]);
    }
  }

  __device__ void store(const Gradient& grad, const Heads<float>& tensor, float scale,
                        bool accumulate) const {
    const auto rows = tensor.rows(slice_.sequence.begin, slice_.head);
    const int first = slice_.own + static_cast<int>(threadIdx.x) / 32 * kThreadRows;
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      if (first + r >= slice_.sequence.length) return;
      float* const out = rows.row(first + r);
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          const int column = (v * 32 + static_cast<int>(threadIdx.x) % 32) * kVector + e;
          if (column >= args_.head_dim) continue;
          const float value = grad[r][v][e] * scale;
          out[column] = accumulate ? out[column] + value : value;
        }
    }
  }

  const Args& args_;
  const BackwardSlice& slice_;
  SharedTiles<kDim>& shared_;
  Gradient dk_dq_ = {};  // dK or dQ, without the scale
  Gradient dv_ = {};     // dV; unused for kQueries
};

// A block owns a tile of rows of one head of one sequence (keys or queries, depending on the pass)
// and streams the rows of the other side in tiles, in ascending order: the scores of all pairs go
// to shared memory, and after a barrier are accumulated into the gradients, which stay in registers
// until the end. No other block adds to these gradients, so there are no atomics and the order is
// fixed.
template <int kDim, Pass kPass, class Args>
__global__ void __launch_bounds__(kThreads, kDim == 64 ? 4 : 0)
    backward_kernel(const __grid_constant__ Args args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const BackwardSlice slice = find_slice<kPass>(args, static_cast<int>(blockIdx.x), kTile<kDim>,
                                                kTile<kDim>, tile_blocks<kPass>(args));
  if (slice.own >= slice.sequence.length) return;
  BackwardBlock<kDim, kPass, Args> block(args, slice,
                                         *reinterpret_cast<SharedTiles<kDim>*>(shared));
  block.run();
  block.store();
}

template <int kDim, Pass kPass, class Args>
void launch_pass(const char* name, const Args& args, Device device) {
  static_assert(sizeof(SharedTiles<kDim>) == float_backward_shared_bytes(kDim));
  launch(name, backward_kernel<kDim, kPass, Args>,
         {backward_blocks<kPass>(args, kTile<kDim>), kThreads, sizeof(SharedTiles<kDim>)}, device,
         args);
}

}  // namespace

void run_backward_f32(const BackwardArgs<float>& args, const AttentionDesc& desc, Device device) {
  with_rule<DropoutRule<float>>(args, desc, args.head_dim, args.tokens, [&](const auto& call) {
    dispatch_head_dim(args.head_dim, [&]<int kDim>() {
      launch_pass<kDim, Pass::kKeys>("attention_backward_keys", call, device);
      launch_pass<kDim, Pass::kQueries>("attention_backward_queries", call, device);
    });
  });
}

}  // namespace cohort::kernels::cuda
