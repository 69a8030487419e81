// stick_breaking_backward on CUDA. A pass owns query rows: it sums L over descending tiles of keys,
// and then streams the tiles in ascending order and computes dQ. Before each tile it stores, per
// row, the sum of L over the later tiles and the sum of A dA over the earlier ones, from which the
// other pass, which owns a tile of keys and streams the queries that see it, computes A and dz of
// its tile alone: dK and dV. There, rows are queries in the first matmuls and keys in the second
// ones, so that A and dz pass through shared memory. Every element of a gradient is accumulated by
// one block in one order: over ascending keys (dQ), or ascending queries, head after head of the
// group and sequence after sequence that shares the keys as a prefix (dK, dV).
#include "kernels/attention/cuda/backward.cuh"
#include "kernels/attention/cuda/stick_breaking.cuh"

namespace cohort::kernels::cuda {
namespace {

// The rows that ForwardProblem finds have dq as their output.
template <class T>
struct StickProblem : ForwardProblem<T> {
  StickRule<float> rule;
  Heads<const T> dout;
  Heads<T> dk, dv;
  float *later, *earlier;  // [heads, stick_sums(tokens)]: sums before a tile; see at()
  int64_t sums;
  bool accumulate_q, accumulate_k, accumulate_v;

  // Offset of the sum of a row and tile. Its token is not before the first key of the tile, so that
  // tile i has tokens - 64 i rows.
  __device__ int64_t at(int head, int tile, int64_t token) const {
    return head * sums + tile * (this->tokens - kStickKeys / 2 * (tile + int64_t{1})) + token;
  }
};
// Number of sums of a head.
int64_t stick_sums(int64_t tokens) {
  const int64_t tiles = (tokens + kStickKeys - 1) / kStickKeys;
  return tiles * tokens - kStickKeys / 2 * tiles * (tiles - 1);
}

// Pass that owns queries. Shared memory: Q, dO, keys, values, and in f32 dz.
template <class T, int kDim>
struct QueryLayout {
  static constexpr int kSplit = kDim > 128 ? 2 : 1;  // warps that share rows, each with its columns
  static constexpr int kThreads = 128, kRows = 64 / kSplit, kWidth = kDim / kSplit;
  using Warp = StickWarp<T, kDim, kWidth, kThreads>;
  static constexpr int kDout = kRows * Warp::kRowBytes;
  static constexpr int kKeys = 2 * kDout, kValues = kKeys + kStickKeys * Warp::kRowBytes;
  static constexpr int kWeights = kValues + kStickKeys * Warp::kRowBytes;
  static constexpr size_t kBytes =
      kWeights + (Warp::kFloat ? kThreads / 2 * Warp::kWeightBytes : 0);
};

template <class T, int kDim>
class QueryBlock {
 public:
  using L = QueryLayout<T, kDim>;
  __device__ QueryBlock(const StickProblem<T>& problem, const PackedRows<T>& rows,
                        unsigned char* shared)
      : problem_(problem), rows_(rows), warp_{shared, problem.format} {
    const auto dout = problem.dout.rows(rows.sequence.begin, rows.head(0));
    warp_.load(0, L::kRows, [&](int r) { return rows.query(r); });
    warp_.load(L::kDout, L::kRows,
               [&](int r) { return r < rows.count ? dout.row(rows.first + r) : nullptr; });
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int own = row_ + warp_.group + 8 * r;
      ends_[r] = own < rows.count ? rows.end_key(problem.rule, own) : 0;
    }
    max_end_ = __reduce_max_sync(0xffffffffu, max(ends_[0], ends_[1]));
  }
  // First sweep: stores the sums of L.
  __device__ void sum() {
    float later[2] = {};
#pragma unroll 1
    for (int tile = tiles_ - 1; tile >= 0; --tile) {
      if (!load(tile, false)) continue;
      warp_.scores(s_, 0, row_, L::kKeys);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        store_sum(problem_.later, tile, r, later[r]);
        stick_weights(a_, s_, r, problem_.rule, ends_[r] - tile * kStickKeys, later[r]);
      }
    }
  }
  // Second sweep: stores the sums of A dA, and dQ.
  __device__ void gradients() {
    typename L::Warp::Columns dq = {};
    typename L::Warp::Weights dz;
    StickScores da;
    float earlier[2] = {};
#pragma unroll 1
    for (int tile = 0; tile < tiles_; ++tile) {
      if (!load(tile, true)) continue;  // its barriers make the sums visible
      warp_.scores(s_, 0, row_, L::kKeys);
      warp_.scores(da, L::kDout, row_, L::kValues);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int end = ends_[r] - tile * kStickKeys;
        float later = end > 0 ? problem_.later[sum_at(tile, r)] : 0.0f;
        store_sum(problem_.earlier, tile, r, earlier[r]);
        stick_weights(a_, s_, r, problem_.rule, end, later);
        stick_gradients(da, a_, s_, r, problem_.rule, end, earlier[r]);
        for_row([&](int n, int e, int) { a_[n][e] = da[0][n][2 * r + e]; });
        warp_.put(dz, L::kWeights, 16 * index_, r, a_);
      }
      warp_.accumulate(dq, dz, L::kWeights, 16 * index_, L::kKeys, column_);
    }
    const auto row_of = [&](int i) {
      return row_ + i < rows_.count ? rows_.output(row_ + i) : nullptr;
    };
    warp_.store(dq, row_of, column_, problem_.rule.scale, problem_.accumulate_q);
  }

 private:
  // Loads a tile of keys, and of values. Returns false if no row of the warp sees a key of it.
  __device__ bool load(int tile, bool values) const {
    __syncthreads();  // every warp has finished with the last tile
    warp_.load_keys(L::kKeys, rows_, rows_.k, tile);
    if (values) warp_.load_keys(L::kValues, rows_, rows_.v, tile);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    return max_end_ > tile * kStickKeys;
  }
  __device__ int64_t sum_at(int tile, int r) const {
    return problem_.at(rows_.head(0), tile, rows_.token(row_ + warp_.group + 8 * r));
  }
  __device__ void store_sum(float* sums, int tile, int r, float value) const {
    if (warp_.quad == 0 && column_ == 0 && ends_[r] > tile * kStickKeys)
      sums[sum_at(tile, r)] = value;
  }

  const StickProblem<T>& problem_;
  const PackedRows<T>& rows_;
  const typename L::Warp warp_;
  const int index_ = static_cast<int>(threadIdx.x / 32);
  const int row_ = index_ % (4 / L::kSplit) * 16;            // first row of the warp
  const int column_ = index_ / (4 / L::kSplit) * L::kWidth;  // its first column of dQ
  const int tiles_ = rows_.keys.tiles(kStickKeys).end;
  int ends_[2], max_end_;  // end of the keys that the rows of the thread see, and those of the warp
  StickScores s_;
  StickRow a_;
};

template <class T, int kDim>
__global__ void __launch_bounds__(QueryLayout<T, kDim>::kThreads)
    stick_breaking_queries_kernel(const __grid_constant__ StickProblem<T> problem) {
  extern __shared__ __align__(128) unsigned char shared[];
  PackedRows<T> rows;
  if (!problem.find(problem.rule, static_cast<int>(blockIdx.x), QueryLayout<T, kDim>::kRows, rows))
    return;
  QueryBlock<T, kDim> block(problem, rows, shared);
  block.sum();
  block.gradients();
}

// Pass that owns keys. Shared memory: keys, values, and of kStep queries Q, dO, A and dz.
template <class T, int kDim>
struct KeyLayout {
  static constexpr int kSplit = kDim > 64 || sizeof(T) == 4 ? 2 : 1;
  static constexpr int kThreads = 128 * kSplit, kWidth = kDim / kSplit;
  static constexpr int kStep = kDim > 128 ? 16 : 64;
  using Warp = StickWarp<T, kDim, kWidth, kThreads>;
  static constexpr int kValues = kStickKeys * Warp::kRowBytes, kQueries = 2 * kValues;
  static constexpr int kDout = kQueries + kStep * Warp::kRowBytes;
  static constexpr int kA = kDout + kStep * Warp::kRowBytes;
  static constexpr int kDz = kA + kStep * Warp::kWeightBytes;
  static constexpr size_t kBytes = kDz + kStep * Warp::kWeightBytes;
};

// Computes A and dz of 16 rows from `row` on of a step, whose first one is query row0 of `stream`.
template <class T, int kDim>
__device__ __forceinline__ void stick_step(const StickProblem<T>& problem,
                                           const typename KeyLayout<T, kDim>::Warp& warp,
                                           const PackedSequence& stream, int head, int tile,
                                           int row0, int row) {
  using L = KeyLayout<T, kDim>;
  StickScores s, da;
  warp.scores(s, L::kQueries, row, 0);
  warp.scores(da, L::kDout, row, L::kValues);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = row0 + row + warp.group + 8 * r;
    const int end = query < stream.length ? stream.position(query) - tile * kStickKeys : 0;
    const int64_t at = problem.at(head, tile, stream.begin + query);
    float later = end > 0 ? problem.later[at] : 0.0f;
    float earlier = end > 0 ? problem.earlier[at] : 0.0f;
    StickRow a;
    stick_weights(a, s, r, problem.rule, end, later);
    warp.put(L::kA, row, r, a);
    stick_gradients(da, a, s, r, problem.rule, end, earlier);
    for_row([&](int n, int e, int) { a[n][e] = da[0][n][2 * r + e]; });
    warp.put(L::kDz, row, r, a);
  }
}

// Stores dK, or dV, of the sequence's own keys in a tile that begins at key0.
template <class T, int kDim>
__device__ __forceinline__ void store_keys(const StickProblem<T>& problem,
                                           const typename KeyLayout<T, kDim>::Warp& warp,
                                           const typename KeyLayout<T, kDim>::Warp::Columns& sums,
                                           bool values, const PackedSequence& own, int key0,
                                           int kv_head) {
  using L = KeyLayout<T, kDim>;
  const HeadRows<T> out = (values ? problem.dv : problem.dk).rows(own.begin, kv_head);
  const int index = static_cast<int>(threadIdx.x / 32), row0 = key0 + index % 4 * 16 - own.prefix;
  const auto row_of = [&](int i) {
    return row0 + i >= 0 && row0 + i < own.length ? out.row(row0 + i) : nullptr;
  };
  warp.store(sums, row_of, index / 4 * L::kWidth, values ? 1.0f : problem.rule.scale,
             values ? problem.accumulate_v : problem.accumulate_k);
}

template <class T, int kDim>
__global__ void __launch_bounds__(KeyLayout<T, kDim>::kThreads)
    stick_breaking_keys_kernel(const __grid_constant__ StickProblem<T> problem) {
  extern __shared__ __align__(128) unsigned char shared[];
  using L = KeyLayout<T, kDim>;
  const int kv_head = static_cast<int>(blockIdx.x) % problem.kv_heads,
            dim = problem.format.head_dim;
  const SequenceTile slot =
      find_tile(problem.sequences, static_cast<int>(blockIdx.x) / problem.kv_heads, kStickKeys, 2);
  const PackedSequence own = slot.sequence;
  const int tile = slot.tile + own.prefix / kStickKeys, key0 = tile * kStickKeys;
  if (own.length == 0 || key0 >= own.keys()) return;
  const typename L::Warp warp{shared, problem.format};
  const int index = static_cast<int>(threadIdx.x / 32), keys = index % 4 * 16;
  const int column = index / 4 * L::kWidth, group = problem.heads / problem.kv_heads;
  typename L::Warp::Columns dk = {}, dv = {};
  PackedSequence stream = own;
  int sequence = slot.index;
  do {
    const int first = max(0, key0 + 1 - stream.prefix);  // row that sees the tile
    if (first >= stream.length) continue;
    __syncthreads();  // every warp has finished with the last tile
    for (const bool values : {false, true})
      warp.load(values ? L::kValues : 0, kStickKeys, [&](int j) {
        const int64_t at = stream.token<int64_t>(key0 + j) * problem.kv_stride + kv_head * dim;
        return key0 + j < stream.keys() ? (values ? problem.v : problem.k) + at : nullptr;
      });
#pragma unroll 1
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head)
#pragma unroll 1
      for (int row0 = first / L::kStep * L::kStep; row0 < stream.length; row0 += L::kStep) {
        __syncthreads();  // every warp has finished with the last step
        for (const bool douts : {false, true}) {
          const Heads<const T> from =
              douts ? problem.dout
                    : Heads<const T>{problem.q, problem.q_stride, problem.head_strides.q};
          const HeadRows<const T> of_head = from.rows(stream.begin, head);
          warp.load(douts ? L::kDout : L::kQueries, L::kStep, [&](int r) {
            return row0 + r < stream.length ? of_head.row(row0 + r) : nullptr;
          });
        }
        copy_async_commit();
        copy_async_wait<0>();
        __syncthreads();
        if (16 * index < L::kStep)
          stick_step<T, kDim>(problem, warp, stream, head, tile, row0, 16 * index);
        __syncthreads();
        warp.template accumulate_transposed<L::kStep>(dv, L::kA, keys, L::kDout, column);
        warp.template accumulate_transposed<L::kStep>(dk, L::kDz, keys, L::kQueries, column);
      }
  } while (own.prefix == 0 && ++sequence < problem.sequences.count &&
           problem.sequences.has_prefix(sequence) && (stream = problem.sequences[sequence], true));
  store_keys<T, kDim>(problem, warp, dk, false, own, key0, kv_head);
  store_keys<T, kDim>(problem, warp, dv, true, own, key0, kv_head);
}

// Both passes for the key heads [first, first + count).
template <class T, int kDim>
void run_stick_backward(const StickBreakingBackward& args, int64_t first, int64_t count,
                        Tensor& scratch) {
  const int64_t group = args.q.dim(1) / args.k.dim(1), tokens = args.q.dim(0), dim = args.q.dim(2);
  const auto queries = [&](const Tensor& t) { return t.narrow(1, first * group, count * group); };
  const auto keys = [&](const Tensor& t) { return t.narrow(1, first, count); };
  Tensor dq = queries(args.dq.tensor), dk = keys(args.dk.tensor), dv = keys(args.dv.tensor);
  const Tensor q = queries(args.q), k = keys(args.k), v = keys(args.v), dout = queries(args.dout);
  const StickBreakingForward forward{dq, q, k, v, args.cu_seqlens, args.desc};
  StickProblem<T> problem{forward_problem<T>(forward), StickRule<float>(args.desc, dim)};
  problem.dout = heads_of<T>(dout);
  problem.dk = heads_of<T>(dk);
  problem.dv = heads_of<T>(dv);
  problem.sums = stick_sums(tokens);
  problem.later = pointer<float>(scratch);
  problem.earlier = problem.later + count * group * problem.sums;
  problem.accumulate_q = args.dq.mode == Grad::kAccumulate;
  problem.accumulate_k = args.dk.mode == Grad::kAccumulate;
  problem.accumulate_v = args.dv.mode == Grad::kAccumulate;
  problem.format.vectorized = problem.format.vectorized && vectorized_heads<T>(dout);
  const int64_t sequences = problem.sequences.count;
  using Q = QueryLayout<T, kDim>;
  const int64_t query_slots = tile_slots(tokens, sequences, Q::kRows);
  problem.slots = static_cast<int>(query_slots);
  launch("stick_breaking_queries", stick_breaking_queries_kernel<T, kDim>,
         {blocks_for(query_slots * problem.heads, 1), Q::kThreads, Q::kBytes}, q.device(), problem);
  using K = KeyLayout<T, kDim>;
  launch(
      "stick_breaking_keys", stick_breaking_keys_kernel<T, kDim>,
      {blocks_for(tile_slots(tokens, sequences, kStickKeys, 2) * count, 1), K::kThreads, K::kBytes},
      q.device(), problem);
}

}  // namespace

void stick_breaking_backward(const StickBreakingBackward& args) {
  constexpr int64_t kScratchBytes = 64 << 20;
  const int64_t kv_heads = args.k.dim(1), group = args.q.dim(1) / kv_heads;
  const int64_t head_sums = 2 * group * stick_sums(args.q.dim(0));
  const int64_t at_once =
      std::clamp<int64_t>(kScratchBytes / 4 / std::max<int64_t>(head_sums, 1), 1, kv_heads);
  Tensor scratch = Tensor::empty({at_once * head_sums}, DType::kF32, args.q.device());
  dispatch_device(args.q.dtype(), "stick_breaking_backward", [&]<class T>() {
    dispatch_head_dim(args.q.dim(2), [&]<int kDim>() {
      for (int64_t first = 0; first < kv_heads; first += at_once)
        run_stick_backward<T, kDim>(args, first, std::min(at_once, kv_heads - first), scratch);
    });
  });
}

}  // namespace cohort::kernels::cuda
