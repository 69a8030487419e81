// Gradients of the terms of attention's scores: sums of dS = P (dP - delta), which is recomputed.
// For a sink they are over its own P (0 - delta), for the relative bias over diagonals of dS. A row
// of dS and its sink add up to zero, from which follows the sum of the keys that are further than R
// before a query, where most keys are.
// Blocks write partial sums, each in a fixed order, and a final kernel adds these in order.
#include "kernels/attention/cuda/backward_bf16.cuh"

namespace cohort::kernels::cuda {
namespace {

constexpr int kParts = 64;  // at most so many partial sums per head

// out[i] (+)= the sum of parts[p][i] over p, for i < count.
__global__ void add_parts_kernel(float* out, const float* parts, int num_parts, int count,
                                 bool accumulate) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  float sum = 0;
  for (int p = 0; p < num_parts; ++p) sum += parts[int64_t{p} * count + i];
  out[i] = accumulate ? out[i] + sum : sum;
}

void add_parts(const GradOut& out, const Tensor& parts) {
  const auto count = static_cast<int>(out.tensor.numel());
  launch("attention_term_sums", add_parts_kernel, {.grid = blocks_for(count, 128), .block = 128},
         out.tensor.device(), pointer<float>(out.tensor), pointer<float>(parts),
         static_cast<int>(parts.dim(0)), count, out.mode == Grad::kAccumulate);
}

// dO . O of a token and head, in all lanes of the warp.
template <class T>
__device__ __forceinline__ float warp_delta(const BackwardArgs<T>& args, int token, int head) {
  const T* const dout = args.dout.rows(token, head).data;
  const T* const o = args.o.rows(token, head).data;
  float sum = 0;
  for (int d = static_cast<int>(threadIdx.x) % 32; d < args.head_dim; d += 32)
    sum = __fmaf_rn(to_float(dout[d]), to_float(o[d]), sum);
  return lane_reduce<32>(sum, Plus{});
}

constexpr int kSinkWarps = 8;

// Block (part, head) adds up every num_parts-th group of tokens, one per warp. parts: [num_parts,
// heads].
template <class Args>
__global__ void __launch_bounds__(32 * kSinkWarps)
    sink_gradient_kernel(const __grid_constant__ Args args, float* parts) {
  __shared__ float sums[kSinkWarps];
  const int head = static_cast<int>(blockIdx.y), warp = static_cast<int>(threadIdx.x) / 32;
  const int step = static_cast<int>(gridDim.x) * kSinkWarps;
  const float sink = args.rule.sink_log2(head);
  float sum = 0;
  for (int64_t t = int64_t{blockIdx.x} * kSinkWarps + warp; t < args.tokens; t += step) {
    const float lse_log2 = args.lse[head * args.tokens + t] * kLog2e;
    sum -= fast_exp2(sink - lse_log2) * warp_delta(args, static_cast<int>(t), head);
  }
  if (threadIdx.x % 32 == 0) sums[warp] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int w = 1; w < kSinkWarps; ++w) sum += sums[w];
  parts[blockIdx.x * gridDim.y + head] = sum;
}

// A tile of dS: 16 queries for each warp, and kKeys keys.
template <int kDim>
struct BiasShape {
  static constexpr int kWarps = kDim > 128 ? 2 : 4, kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kWarps, kKeys = 32, kDiagonals = kRows + kKeys - 1;
  static constexpr int kRowBytes = 2 * kDim, kRowsBytes = kRows * kRowBytes;
};
template <class T, int kDim>
struct BiasTile {
  using S = BiasShape<kDim>;
  // Tiles of queries, dO, keys and values, for bf16.
  static constexpr int kTileBytes = std::is_same_v<T, float> ? 0 : 2 * (S::kRows + S::kKeys);
  alignas(128) unsigned char tiles[std::max(16, kTileBytes* S::kRowBytes)];
  float ds[S::kRows][S::kKeys + 1], lse_log2[S::kRows], delta[S::kRows], diagonals[S::kDiagonals];
};

// Blocks of a head take tiles of queries in turn.
template <class T, int kDim, class Args>
class BiasGradient {
 public:
  __device__ BiasGradient(const Args& args, BiasTile<T, kDim>& shared, float* sums)
      : args_(args),
        shared_(shared),
        sums_(sums),
        head_(static_cast<int>(blockIdx.y)),
        radius_(args.rule.radius) {}

  __device__ void run(int slots) {
    for (int i = static_cast<int>(threadIdx.x); i < 2 * radius_ + 1; i += S::kThreads) sums_[i] = 0;
    for (int slot = static_cast<int>(blockIdx.x); slot < slots; slot += gridDim.x) {
      const SequenceTile at = find_tile(args_.sequences, slot, S::kRows);
      if (at.tile * S::kRows < at.sequence.length) add_rows(at);
    }
    __syncthreads();
    float* const added = &shared_.ds[0][0];
    added[threadIdx.x] = added_;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 0; i < S::kThreads; ++i) row_sums_ -= added[i];
    sums_[0] += row_sums_;
  }

 private:
  using S = BiasShape<kDim>;

  __device__ void add_rows(const SequenceTile& at) {
    const PackedSequence& sequence = at.sequence;
    const int row0 = at.tile * S::kRows, end = min(sequence.length, row0 + S::kRows);
    const auto rule = args_.rule.bind(at.index, head_, sequence.keys());
    __syncthreads();  // the previous rows are no longer used
    if constexpr (!kFloat) {
      load<S::kRows>(0, args_.q.rows(sequence.begin, head_), row0, sequence.length);
      load<S::kRows>(S::kRowsBytes, args_.dout.rows(sequence.begin, head_), row0, sequence.length);
    }
    for (int r = static_cast<int>(threadIdx.x) / 32; row0 + r < end; r += S::kWarps) {
      const int token = sequence.begin + row0 + r;
      shared_.delta[r] = warp_delta(args_, token, head_);
      shared_.lse_log2[r] = args_.lse[head_ * args_.tokens + token] * kLog2e;
    }
    const IndexRange<int> positions{sequence.position(row0), sequence.position(end)};
    IndexRange<int> keys = rule.keys_of(positions, sequence.keys());
    // The sum over distant keys is a difference if they are more than two thirds of all.
    const int near = positions.first - radius_ + 1;
    const bool skips = near - keys.first > 2 * radius_;
    if (const float sink = rule.sink_log2(head_); skips && sink > -INFINITY) {
      __syncthreads();
      if (threadIdx.x == 0)
        for (int r = 0; row0 + r < end; ++r)
          row_sums_ = __fmaf_rn(fast_exp2(sink - shared_.lse_log2[r]), shared_.delta[r], row_sums_);
    }
    keys.first = (skips ? near : keys.first) / S::kKeys * S::kKeys;
    for (int key0 = rule.next_key(positions, keys.first, keys.end); key0 < keys.end;
         key0 = rule.next_key(positions, key0 + S::kKeys, keys.end)) {
      make_scores(at, rule, row0, key0);
      __syncthreads();
      add_diagonals(key0 - positions.first, skips);
    }
  }

  // dS of all rows and the keys from key0 on.
  __device__ void make_scores(const SequenceTile& at, const DropoutRule<float>& rule, int row0,
                              int key0) {
    const int kv_head = head_ / args_.group();
    const auto k = args_.k.keys(at.sequence, kv_head);
    const auto v = args_.v.keys(at.sequence, kv_head);
    if constexpr (kFloat) {
      __syncthreads();  // dS of the previous keys is no longer used, and statistics are complete
      for (int e = static_cast<int>(threadIdx.x); e < S::kRows * S::kKeys; e += S::kThreads) {
        const int row = e / S::kKeys, key = e % S::kKeys;
        float s = 0, dp = 0;
        if (row0 + row < at.sequence.length && key0 + key < at.sequence.keys()) {
          const int token = at.sequence.begin + row0 + row;
          const float* const q = args_.q.rows(token, head_).data;
          const float* const dout = args_.dout.rows(token, head_).data;
          for (int d = 0; d < args_.head_dim; ++d) {
            s = __fmaf_rn(q[d], k.row(key0 + key)[d], s);
            dp = __fmaf_rn(dout[d], v.row(key0 + key)[d], dp);
          }
        }
        set(at, rule, row0, row, key0, key, s, dp);
      }
    } else {
      __syncthreads();
      load<S::kKeys>(2 * S::kRowsBytes, k, key0, at.sequence.keys());
      load<S::kKeys>(2 * S::kRowsBytes + S::kKeys * S::kRowBytes, v, key0, at.sequence.keys());
      copy_async_commit();
      copy_async_wait<0>();
      __syncthreads();
      const uint32_t own = shared_address(shared_.tiles) +
                           static_cast<uint32_t>(threadIdx.x) / 32 * 16 * S::kRowBytes;
      const uint32_t streamed = shared_address(shared_.tiles) + 2 * S::kRowsBytes;
      Accumulators<1, S::kKeys> s, dp;
      const TileReader<kDim> reader;
      scores<kDim, 1, S::kKeys>(s, reader, own, streamed);
      scores<kDim, 1, S::kKeys>(dp, reader, own + S::kRowsBytes,
                                streamed + S::kKeys * S::kRowBytes);
      const int lane = static_cast<int>(threadIdx.x) % 32;
      const int first = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
#pragma unroll
      for (int n = 0; n < S::kKeys / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          set(at, rule, row0, first + 8 * (i / 2), key0, 8 * n + 2 * (lane % 4) + i % 2, s[0][n][i],
              dp[0][n][i]);
    }
  }
  // Sets an element of dS from its S and dP.
  __device__ __forceinline__ void set(const SequenceTile& at, const DropoutRule<float>& rule,
                                      int row0, int row, int key0, int column, float s, float dp) {
    const int key = key0 + column, position = at.sequence.position(row0 + row);
    float ds = 0;
    if (row0 + row < at.sequence.length && key < at.sequence.keys() &&
        !rule.masked(position, key)) {
      const KeyDistance<float> distance(key - position);
      rule.modify([&](auto&& stage) { s = stage(s, distance); });
      if (rule.drops()) {
        const uint64_t stream = rule.drop.row(at.sequence.begin + row0 + row);
        const uint32_t four = rule.drop.keep_four(stream, head_, key & ~3);
        dp *= (four >> (key & 3) & 1) != 0 ? rule.drop.factor : 0.0f;
      }
      ds = fast_exp2(__fmaf_rn(s, rule.exponent, -shared_.lse_log2[row])) *
           (dp - shared_.delta[row]);
    }
    shared_.ds[row][column] = ds;
  }

  // Adds the diagonals of dS to the sums, with `skips` less those of -R and beyond; `distance`:
  // from the first query to the first key.
  __device__ void add_diagonals(int distance, bool skips) {
    const int thread = static_cast<int>(threadIdx.x), lowest = distance - (S::kRows - 1);
    for (int d = thread; d < S::kDiagonals; d += S::kThreads) {
      float sum = 0;
      for (int r = max(0, S::kRows - 1 - d); r < min(S::kRows, S::kRows - 1 - d + S::kKeys); ++r)
        sum += shared_.ds[r][r + d - (S::kRows - 1)];
      shared_.diagonals[d] = sum;
      if (abs(lowest + d) < radius_) sums_[lowest + d + radius_] += sum;
      if (skips && lowest + d > -radius_) added_ += sum;
    }
    if ((skips || lowest > -radius_) && lowest + S::kDiagonals <= max(radius_, 1)) return;
    // One thread adds the others to the first and last sum.
    __syncthreads();
    if (thread > 0) return;
    for (int d = 0; d < S::kDiagonals; ++d)
      if (lowest + d <= -radius_ ? !skips : lowest + d >= radius_)
        sums_[lowest + d <= -radius_ ? 0 : 2 * radius_] += shared_.diagonals[d];
  }

  template <int kCount>
  __device__ void load(int offset, const HeadRows<const T>& from, int row0, int length) {
    load_rows<kDim, kCount, S::kThreads>(shared_address(shared_.tiles) + offset, from, row0, length,
                                         args_.head_dim, args_.vectorized);
  }

  static constexpr bool kFloat = std::is_same_v<T, float>;
  const Args& args_;
  BiasTile<T, kDim>& shared_;
  float* const sums_;  // [2 R + 1]
  // Sums of rows of dS whose distant keys are skipped, in the first thread; added_: what this
  // thread has added of them.
  float row_sums_ = 0, added_ = 0;
  const int head_, radius_;
};

// parts: [num_parts, heads, 2 R + 1].
template <class T, int kDim, class Args>
__global__ void __launch_bounds__(BiasShape<kDim>::kThreads)
    bias_gradient_kernel(const __grid_constant__ Args args, float* parts, int slots) {
  extern __shared__ __align__(128) unsigned char memory[];
  const int64_t part = int64_t{blockIdx.x} * gridDim.y + blockIdx.y;
  BiasGradient<T, kDim, Args>(args, *reinterpret_cast<BiasTile<T, kDim>*>(memory),
                              parts + part * (2 * args.rule.radius + 1))
      .run(slots);
}

}  // namespace

template <class T>
void run_term_gradients(const BackwardArgs<T>& args, const AttentionBackward& in) {
  const Device device = in.q.device();
  const auto heads = static_cast<unsigned>(args.heads);
  const auto run = [&]<class Call>(const Call& call) {
    if (in.dsinks) {
      const int64_t parts = std::clamp<int64_t>(args.tokens / (16 * kSinkWarps), 1, kParts);
      Tensor sums = Tensor::empty(Shape{parts, args.heads}, DType::kF32, device);
      launch("attention_sink_gradient", sink_gradient_kernel<Call>,
             {.grid = dim3(static_cast<unsigned>(parts), heads), .block = 32 * kSinkWarps}, device,
             call, pointer<float>(sums));
      add_parts(*in.dsinks, sums);
    }
    if (!in.dbias) return;
    dispatch_head_dim(args.head_dim, [&]<int kDim>() {
      const int64_t slots = tile_slots(args.tokens, args.sequences.count, BiasShape<kDim>::kRows);
      const int64_t parts = std::clamp<int64_t>(slots, 1, kParts);
      Tensor sums =
          Tensor::empty(Shape{parts, args.heads, in.desc.bias.dim(1)}, DType::kF32, device);
      launch("attention_bias_gradient", bias_gradient_kernel<T, kDim, Call>,
             {.grid = dim3(static_cast<unsigned>(parts), heads),
              .block = BiasShape<kDim>::kThreads,
              .shared_bytes = sizeof(BiasTile<T, kDim>)},
             device, call, pointer<float>(sums), static_cast<int>(slots));
      add_parts(*in.dbias, sums);
    });
  };
  with_rule<DropoutRule<float>>(args, in.desc, args.head_dim, args.tokens, run);
}
template void run_term_gradients(const BackwardArgs<bf16>&, const AttentionBackward&);
template void run_term_gradients(const BackwardArgs<float>&, const AttentionBackward&);

}  // namespace cohort::kernels::cuda
