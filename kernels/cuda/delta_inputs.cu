// Inputs of the gated delta rule on CUDA. A warp processes a head of a token, of which a lane has
// adjacent channels: packed and cached calls, and the backward, differ in where the four inputs of
// a convolution are, and share its arithmetic.
#include "kernels/delta_inputs.h"

#include "kernels/attention/cuda/attention.cuh"
#include "kernels/cuda/column_sum.cuh"
#include "kernels/cuda/rows.cuh"
#include "kernels/elementwise.h"

namespace cohort::kernels::cuda {
namespace {

constexpr int kTaps = 4, kRingRows = kDeltaRing, kInputThreads = 256,
              kInputWarps = kInputThreads / 32;
constexpr int kHeadsPerWarp = 4, kTileTokens = 64;

// The inputs of the convolutions, and the gates', of all calls.
template <class T>
struct InputTensors {
  const T *x, *w, *b, *a;
  const float *a_log, *dt_bias;
  RowOffsets x_rows, b_rows, a_rows;
  int tokens, key_heads, heads, channels;
  bool vectorized;

  // With the numbers of heads of `rows`, tensors of the shapes of the outputs.
  InputTensors(const DeltaSources& in, const DeltaTensors& rows)
      : x(pointer<T>(in.x)),
        w(pointer<T>(in.w)),
        b(pointer<T>(in.b)),
        a(pointer<T>(in.a)),
        a_log(pointer<float>(in.a_log)),
        dt_bias(pointer<float>(in.dt_bias)),
        x_rows(in.x),
        b_rows(in.b),
        a_rows(in.a),
        tokens(static_cast<int>(in.x.dim(0))),
        key_heads(static_cast<int>(rows.q.dim(1))),
        heads(static_cast<int>(rows.v.dim(1))),
        channels(static_cast<int>(in.x.dim(1))),
        vectorized(aligned(x, w) && vectorized_starts<T>(x_rows)) {}
  __host__ __device__ int all_heads() const { return 2 * key_heads + heads; }
};

// A lane's channels of a head.
template <class T, int kDim>
struct Channels {
  static constexpr int N = kDim / 32;
  using Values = float[N];

  __device__ static int lane_offset() { return static_cast<int>(threadIdx.x % 32) * N; }
  // Null: zeros.
  __device__ __forceinline__ static Raw<T, N> load(const T* from, bool vectorized) {
    if (from == nullptr) return {};
    return vectorized ? load_raw<N>(from) : load_some<N>(from, N);
  }
  __device__ __forceinline__ static void store(T* to, const Raw<T, N>& values, bool vectorized) {
    if (vectorized)
      store_raw(to, values);
    else
      store_some(to, values, N);
  }
};

// Weights of a lane's channels.
template <class T, int kDim>
struct Convolution {
  using C = Channels<T, kDim>;
  static constexpr int N = C::N;
  float w[N][kTaps];

  __device__ Convolution(const InputTensors<T>& in, int head) {
    const T* const from = in.w + (int64_t{head} * kDim + C::lane_offset()) * kTaps;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const auto taps = in.vectorized ? load_raw<kTaps>(from + n * kTaps)
                                      : load_some<kTaps>(from + n * kTaps, kTaps);
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) w[n][tap] = element(taps, tap);
    }
  }
  // Before SiLU.
  __device__ __forceinline__ void operator()(const Raw<T, N> (&x)[kTaps], float (&out)[N]) const {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      out[n] = 0;
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap)
        out[n] = __fmaf_rn(w[n][tap], element(x[tap], n), out[n]);
    }
  }
};

__device__ __forceinline__ float inverse_norm(float squares) {
  return 1.0f / sqrtf(squares + 1e-6f);
}
__device__ __forceinline__ float softplus(float x) {
  return x > 20.0f ? x : log1pf(vexp(x));
}

// Sources of the inputs of a token: row(tap) is null where they are zero. An idle token has
// is_idle().
template <class T>
struct PackedInputs {
  const InputTensors<T>& in;
  PackedSequence sequence;
  int position;  // in the sequence

  __device__ PackedInputs(const InputTensors<T>& tensors, const PackedSequence& s, int token)
      : in(tensors), sequence(s), position(s.position(token - s.begin)) {}
  __device__ bool is_idle() const { return false; }
  __device__ const T* row(int tap) const {
    const int at = position + tap - (kTaps - 1);
    return at < 0 ? nullptr : in.x + in.x_rows(sequence.token(at));
  }
};
template <class T>
struct Rings {
  T* data;
  RowOffsets rows;
  const int32_t *states, *positions;
  int count, tokens;

  __device__ bool is_idle(int token) const {
    return states[token] < 0 || states[token] >= count || positions[token] < 0;
  }
  // True if token + step is the one `step` positions further in the same sequence.
  __device__ bool continues(int token, int step) const {
    const int other = token + step;
    return other >= 0 && other < tokens && states[other] == states[token] &&
           positions[other] == positions[token] + step;
  }
  __device__ T* row(int state, int position) const {
    return data + rows(int64_t{state} * kRingRows + position % kRingRows);
  }
  // Null if a later token of the call overwrites its slot.
  __device__ T* own_row(int token) const {
    return continues(token, kRingRows) ? nullptr : row(states[token], positions[token]);
  }
};
template <class T>
struct RingInputs {
  const InputTensors<T>& in;
  const Rings<T>& rings;
  int token;

  __device__ bool is_idle() const { return rings.is_idle(token); }
  __device__ const T* row(int tap) const {
    const int back = kTaps - 1 - tap, position = rings.positions[token] - back;
    if (position < 0) return nullptr;
    return rings.continues(token, -back) ? in.x + in.x_rows(token - back)
                                         : rings.row(rings.states[token], position);
  }
};

// Rows of q, k and v, or of their gradients, and of g and beta.
template <class T, class Gate>
struct HeadRows {
  T *q, *k, *v;
  Gate *g, *beta;

  // The row of a head of x: of q, k or v.
  __device__ T* row(const InputTensors<std::remove_const_t<T>>& in, int64_t token, int head,
                    int dim) const {
    if (head >= 2 * in.key_heads) return v + (token * in.heads + head - 2 * in.key_heads) * dim;
    T* const rows = head < in.key_heads ? q : k;
    return rows + (token * in.key_heads + head % in.key_heads) * dim;
  }
};
template <class T>
using InputOutputs = HeadRows<T, float>;

// The rows of a token of q, k, v, g and beta.
template <class T, int kDim, class Inputs>
__device__ void write_token(const InputTensors<T>& in, const Inputs& inputs, int token,
                            const InputOutputs<T>& out, T* ring_row) {
  using C = Channels<T, kDim>;
  const bool idle = inputs.is_idle();
  const int lane = C::lane_offset(),
            first = static_cast<int>(blockIdx.y) * kInputWarps * kHeadsPerWarp;
  const T* rows[kTaps];
#pragma unroll
  for (int tap = 0; tap < kTaps; ++tap) rows[tap] = idle ? nullptr : inputs.row(tap);
  for (int i = 0; i < kHeadsPerWarp; ++i) {
    const int head = first + i * kInputWarps + static_cast<int>(threadIdx.x / 32);
    if (head >= in.all_heads()) break;
    const int channel = head * kDim + lane;
    Raw<T, C::N> x[kTaps];
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap)
      x[tap] = C::load(rows[tap] == nullptr ? nullptr : rows[tap] + channel, in.vectorized);
    float y[C::N];
    Convolution<T, kDim>(in, head)(x, y);
    float squares = 0;
#pragma unroll
    for (int n = 0; n < C::N; ++n) {
      y[n] = idle ? 0.0f : to_float(from_float<T>(Silu::forward(y[n])));
      squares = __fmaf_rn(y[n], y[n], squares);
    }
    if (head < 2 * in.key_heads) {
      const float scale = inverse_norm(lane_reduce<32>(squares, Plus{}));
#pragma unroll
      for (int n = 0; n < C::N; ++n) y[n] = __fmul_rn(y[n], scale);
    }
    C::store(out.row(in, token, head, kDim) + lane, to_raw<T>(y), in.vectorized);
    if (ring_row != nullptr) C::store(ring_row + channel, x[kTaps - 1], in.vectorized);
  }
  if (blockIdx.y > 0) return;
  for (int h = static_cast<int>(threadIdx.x); h < in.heads; h += kInputThreads) {
    const int64_t at = int64_t{token} * in.heads + h;
    const float z = to_float(in.a[in.a_rows(token) + h]) + in.dt_bias[h];
    out.g[at] = idle ? 0.0f : -vexp(in.a_log[h]) * softplus(z);
    out.beta[at] = idle ? 0.0f : vsigmoid(to_float(in.b[in.b_rows(token) + h]));
  }
}

// The sequence of a token; all lanes of a warp call it.
__device__ __forceinline__ SequenceTile sequence_of(const PackedSequences& sequences, int token) {
  return find_tile(sequences, token, 1, 0);
}

// Blocks have a token and some of its heads.
template <class T, int kDim>
__global__ void __launch_bounds__(kInputThreads)
    delta_inputs_kernel(const __grid_constant__ InputTensors<T> in, const PackedSequences sequences,
                        const InputOutputs<T> out) {
  const int token = static_cast<int>(blockIdx.x);
  const PackedInputs<T> inputs(in, sequence_of(sequences, token).sequence, token);
  write_token<T, kDim>(in, inputs, token, out, nullptr);
}
// writes_rings: no state has so many tokens that one takes the place of an input of another.
template <class T, int kDim>
__global__ void __launch_bounds__(kInputThreads)
    delta_inputs_cached_kernel(const __grid_constant__ InputTensors<T> in,
                               const __grid_constant__ Rings<T> rings, const InputOutputs<T> out,
                               bool writes_rings) {
  const int token = static_cast<int>(blockIdx.x);
  const RingInputs<T> inputs{in, rings, token};
  write_token<T, kDim>(in, inputs, token, out,
                       writes_rings && !inputs.is_idle() ? rings.own_row(token) : nullptr);
}
template <class T>
__global__ void __launch_bounds__(kInputThreads)
    write_rings_kernel(const __grid_constant__ InputTensors<T> in,
                       const __grid_constant__ Rings<T> rings) {
  const int token = static_cast<int>(blockIdx.x);
  if (rings.is_idle(token)) return;
  T* const to = rings.own_row(token);
  if (to == nullptr) return;
  const T* const x = in.x + in.x_rows(token);
  for (int c = static_cast<int>(threadIdx.x); c < in.channels; c += kInputThreads) to[c] = x[c];
}

// The backward. dc is the gradient of a convolution.
template <class T, int kDim>
class InputsBackward {
 public:
  using C = Channels<T, kDim>;
  static constexpr int N = C::N;

  __device__ InputsBackward(const InputTensors<T>& in, const PackedSequences& sequences,
                            const HeadRows<const T, const float>& d, int head)
      : in_(in), sequences_(sequences), d_(d), conv_(in, head), head_(head) {}

  // The gradients of the inputs of tokens [begin, end), to add(token, dx), and of the weights.
  template <class Add>
  __device__ void run(int begin, int end, float (&dw)[N][kTaps], Add&& add) {
    const int last = min(end + kTaps - 1, in_.tokens) - 1;
    SequenceTile at = sequence_of(sequences_, last);
    // Gradients of the convolution's outputs: of this token and the next ones.
    float dc[kTaps][N];
    for (int t = last; t >= begin; --t) {
      while (t < at.sequence.begin) at.sequence = sequences_[--at.index];
#pragma unroll
      for (int back = kTaps - 1; back > 0; --back)
#pragma unroll
        for (int n = 0; n < N; ++n) dc[back][n] = dc[back - 1][n];
      Raw<T, N> x[kTaps];
      gradient(at.sequence, t, x, dc[0]);
      if (t >= end) continue;
      float dx[N] = {};
#pragma unroll
      for (int back = 0; back < kTaps; ++back)
        if (t + back < at.sequence.begin + at.sequence.length) add_term(dx, back, dc[back]);
      if (sequences_.prefixes != nullptr && at.sequence.prefix == 0) add_children(at, t, dx);
      add(t, dx);
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int tap = 0; tap < kTaps; ++tap)
          dw[n][tap] = __fmaf_rn(element(x[tap], n), dc[0][n], dw[n][tap]);
    }
  }

 private:
  // The term of the convolution `back` tokens later.
  __device__ __forceinline__ void add_term(float (&dx)[N], int back, const float (&dc)[N]) const {
#pragma unroll
    for (int n = 0; n < N; ++n) dx[n] = __fmaf_rn(conv_.w[n][kTaps - 1 - back], dc[n], dx[n]);
  }
  // The terms of the sequences that continue the one of token t.
  __device__ void add_children(const SequenceTile& at, int t, float (&dx)[N]) const {
    const int to_child = at.sequence.begin + at.sequence.length - t;  // to a child's first token
    if (to_child >= kTaps) return;
    for (int s = at.index + 1; s < sequences_.count && sequences_.has_prefix(s); ++s) {
      const PackedSequence child = sequences_[s];
#pragma unroll
      for (int back = 1; back < kTaps; ++back) {
        if (back < to_child || back - to_child >= child.length) continue;
        Raw<T, N> x[kTaps];
        float dc[N];
        gradient(child, child.begin + back - to_child, x, dc);
        add_term(dx, back, dc);
      }
    }
  }
  __device__ __forceinline__ void gradient(const PackedSequence& sequence, int t,
                                           Raw<T, N> (&x)[kTaps], float (&dc)[N]) const {
    const PackedInputs<T> inputs(in_, sequence, t);
    const int channel = head_ * kDim + C::lane_offset();
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
      const T* const row = inputs.row(tap);
      x[tap] = C::load(row == nullptr ? nullptr : row + channel, in_.vectorized);
    }
    const Raw<T, N> dy = C::load(d_.row(in_, t, head_, kDim) + C::lane_offset(), in_.vectorized);
    float c[N], y[N], sums[2] = {0, 0};
    conv_(x, c);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      y[n] = to_float(from_float<T>(Silu::forward(c[n])));
      sums[0] = __fmaf_rn(y[n], y[n], sums[0]);
      sums[1] = __fmaf_rn(y[n], element(dy, n), sums[1]);
    }
    float scale = 1, along = 0;
    if (head_ < 2 * in_.key_heads) {
      scale = inverse_norm(lane_reduce<32>(sums[0], Plus{}));
      along = lane_reduce<32>(sums[1], Plus{}) * scale * scale;
    }
#pragma unroll
    for (int n = 0; n < N; ++n)
      dc[n] = scale * (element(dy, n) - along * y[n]) * Silu::derivative(c[n], 0.0f);
  }

  const InputTensors<T>& in_;
  const PackedSequences& sequences_;
  const HeadRows<const T, const float>& d_;
  const Convolution<T, kDim> conv_;
  const int head_;
};

// A warp processes a head and a tile of tokens. dw: partial sums [T / 64, C, 4], C / 4 bytes a
// token. Null: not wanted.
template <class T, int kDim>
__global__ void __launch_bounds__(kInputThreads)
    delta_inputs_backward_kernel(const __grid_constant__ InputTensors<T> in,
                                 const PackedSequences sequences,
                                 const HeadRows<const T, const float> d, T* dx, RowOffsets dx_rows,
                                 bool accumulate, float* dw) {
  using C = Channels<T, kDim>;
  const int head = static_cast<int>(blockIdx.y) * kInputWarps + static_cast<int>(threadIdx.x / 32);
  if (head >= in.all_heads()) return;
  const int begin = static_cast<int>(blockIdx.x) * kTileTokens,
            end = min(begin + kTileTokens, in.tokens), channel = head * kDim + C::lane_offset();
  float weights[C::N][kTaps] = {};
  InputsBackward<T, kDim>(in, sequences, d, head)
      .run(begin, end, weights, [&](int token, float(&terms)[C::N]) {
        if (dx == nullptr) return;
        T* const to = dx + dx_rows(token) + channel;
#pragma unroll
        for (int n = 0; n < C::N; ++n)
          if (accumulate) terms[n] += to_float(to[n]);
        C::store(to, to_raw<T>(terms), in.vectorized);
      });
  if (dw == nullptr) return;
  dw += (int64_t{blockIdx.x} * in.channels + channel) * kTaps;
#pragma unroll
  for (int n = 0; n < C::N; ++n) store_floats(dw + n * kTaps, weights[n]);
}

// Gradients of b and a; terms of those of dt_bias and a_log, [T, Hv].
template <class T>
struct GateGradients {
  const float *dg, *dbeta;
  T *db, *da;
  RowOffsets db_rows, da_rows;
  bool db_accumulate, da_accumulate;
  float *dt_bias, *a_log;
};
template <class T>
__global__ void __launch_bounds__(kInputThreads)
    gates_backward_kernel(const __grid_constant__ InputTensors<T> in,
                          const __grid_constant__ GateGradients<T> d) {
  const int64_t i = int64_t{blockIdx.x} * kInputThreads + threadIdx.x;
  if (i >= int64_t{in.tokens} * in.heads) return;
  const int64_t t = i / in.heads;
  const int h = static_cast<int>(i % in.heads);
  const float rate = -vexp(in.a_log[h]), z = to_float(in.a[in.a_rows(t) + h]) + in.dt_bias[h],
              beta = vsigmoid(to_float(in.b[in.b_rows(t) + h]));
  const float dz = d.dg[i] * rate * (z > 20.0f ? 1.0f : vsigmoid(z));
  const auto put = [](T* to, bool accumulate, float x) {
    *to = from_float<T>(accumulate ? to_float(*to) + x : x);
  };
  if (d.db != nullptr)
    put(d.db + d.db_rows(t) + h, d.db_accumulate, d.dbeta[i] * beta * (1 - beta));
  if (d.da != nullptr) put(d.da + d.da_rows(t) + h, d.da_accumulate, dz);
  d.dt_bias[i] = dz;
  d.a_log[i] = d.dg[i] * rate * softplus(z);
}

// Calls fn.operator()<T, kDim>().
template <class F>
void dispatch_inputs(const Tensor& q, const char* op, F&& fn) {
  dispatch_device(q.dtype(), op, [&]<class T>() {
    if (q.dim(2) == 64)
      fn.template operator()<T, 64>();
    else
      fn.template operator()<T, 128>();
  });
}
template <class T>
InputOutputs<T> input_outputs(DeltaTensors& out) {
  return {pointer<T>(out.q), pointer<T>(out.k), pointer<T>(out.v), pointer<float>(out.g),
          pointer<float>(out.beta)};
}
PackedSequences packed_sequences(const Tensor& cu_seqlens, const Tensor& prefixes) {
  AttentionDesc desc;
  desc.prefixes = prefixes;
  return {cu_seqlens, desc};
}
template <class T>
LaunchShape token_shape(const InputTensors<T>& in) {
  return {.grid = {blocks_for(in.tokens, 1),
                   blocks_for(in.all_heads(), int64_t{kInputWarps} * kHeadsPerWarp)},
          .block = kInputThreads};
}

template <class T, int kDim>
void backward_convolutions(const DeltaInputsBackward& args, InputTensors<T> in) {
  const Device device = args.in.x.device();
  const unsigned tiles = blocks_for(in.tokens, kTileTokens);
  const RowOffsets dx_rows(args.dx.tensor);
  T* const dx = pointer<T>(args.dx.tensor);
  const HeadRows<const T, const float> d{pointer<T>(args.dout.q), pointer<T>(args.dout.k),
                                         pointer<T>(args.dout.v), nullptr, nullptr};
  in.vectorized = in.vectorized && aligned(dx, d.q, d.k, d.v) && vectorized_starts<T>(dx_rows);
  Tensor dw;
  if (args.dw.wanted())
    dw = Tensor::empty({int64_t{tiles}, int64_t{in.channels} * kTaps}, DType::kF32, device);
  launch("delta_inputs_backward", delta_inputs_backward_kernel<T, kDim>,
         {.grid = {tiles, blocks_for(in.all_heads(), kInputWarps)}, .block = kInputThreads}, device,
         in, packed_sequences(args.cu_seqlens, args.prefixes), d, dx, dx_rows,
         args.dx.mode == Grad::kAccumulate, pointer<float>(dw));
  reduce_partials<1>({dw}, {args.dw});
}

template <class T>
void backward_gates(const DeltaInputsBackward& args, const InputTensors<T>& in) {
  const Device device = args.in.x.device();
  Tensor dt_bias = Tensor::empty(args.dout.g.shape(), DType::kF32, device),
         a_log = Tensor::empty_like(dt_bias);
  const GateGradients<T> d{.dg = pointer<float>(args.dout.g),
                           .dbeta = pointer<float>(args.dout.beta),
                           .db = pointer<T>(args.db.tensor),
                           .da = pointer<T>(args.da.tensor),
                           .db_rows = RowOffsets(args.db.tensor),
                           .da_rows = RowOffsets(args.da.tensor),
                           .db_accumulate = args.db.mode == Grad::kAccumulate,
                           .da_accumulate = args.da.mode == Grad::kAccumulate,
                           .dt_bias = pointer<float>(dt_bias),
                           .a_log = pointer<float>(a_log)};
  launch("delta_gates_backward", gates_backward_kernel<T>,
         {.grid = blocks_for(dt_bias.numel(), kInputThreads), .block = kInputThreads}, device, in,
         d);
  const bool vectorized = in.heads % kPackSize<float> == 0;
  for (const auto& [terms, out] :
       {std::pair<Tensor*, const GradOut*>(&dt_bias, &args.ddt_bias), {&a_log, &args.da_log}})
    if (out->wanted())
      column_sum<float>("delta_gates_sum", RowsTerm<float>{pointer<float>(*terms)}, in.tokens,
                        in.heads, vectorized, *out);
}

}  // namespace

void delta_inputs(const DeltaInputs& args) {
  dispatch_inputs(args.out.q, "delta_inputs", [&]<class T, int kDim>() {
    InputTensors<T> in(args.in, args.out);
    const auto out = input_outputs<T>(args.out);
    in.vectorized = in.vectorized && aligned(out.q, out.k, out.v);
    launch("delta_inputs", delta_inputs_kernel<T, kDim>, token_shape(in), args.in.x.device(), in,
           packed_sequences(args.cu_seqlens, args.prefixes), out);
  });
}

void delta_inputs_cached(const DeltaInputsCached& args) {
  dispatch_inputs(args.out.q, "delta_inputs_cached", [&]<class T, int kDim>() {
    InputTensors<T> in(args.in, args.out);
    const auto out = input_outputs<T>(args.out);
    const Rings<T> rings{.data = pointer<T>(args.ring),
                         .rows = RowOffsets(args.ring),
                         .states = pointer<int32_t>(args.states),
                         .positions = pointer<int32_t>(args.positions),
                         .count = static_cast<int>(args.ring.dim(0)),
                         .tokens = in.tokens};
    in.vectorized = in.vectorized && aligned(out.q, out.k, out.v, rings.data) &&
                    vectorized_starts<T>(rings.rows);
    launch("delta_inputs", delta_inputs_cached_kernel<T, kDim>, token_shape(in), args.in.x.device(),
           in, rings, out, args.is_decode);
    if (!args.is_decode)
      launch("write_rings", write_rings_kernel<T>,
             {.grid = blocks_for(in.tokens, 1), .block = kInputThreads}, args.in.x.device(), in,
             rings);
  });
}

void delta_inputs_backward(const DeltaInputsBackward& args) {
  if (args.in.x.dim(0) == 0) {
    for (const GradOut* d : {&args.dw, &args.da_log, &args.ddt_bias})
      if (d->wanted() && d->mode == Grad::kOverwrite) d->tensor.zero_();
    return;
  }
  dispatch_inputs(args.dout.q, "delta_inputs_backward", [&]<class T, int kDim>() {
    const InputTensors<T> in(args.in, args.dout);
    if (args.dx.wanted() || args.dw.wanted()) backward_convolutions<T, kDim>(args, in);
    if (args.db.wanted() || args.da.wanted() || args.da_log.wanted() || args.ddt_bias.wanted())
      backward_gates(args, in);
  });
}

}  // namespace cohort::kernels::cuda
