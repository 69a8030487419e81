// Inputs of the gated delta rule on the CPU. Packed and cached calls differ only in where the four
// inputs of a row's convolution are.
#include "kernels/delta_inputs.h"

#include <array>
#include <cmath>
#include <vector>

#include "kernels/attention/cpu/tile.h"
#include "kernels/cpu/reduce.h"
#include "kernels/cpu/state_runs.h"
#include "kernels/elementwise.h"

namespace cohort::kernels::cpu {
namespace {

constexpr int64_t kTaps = 4, kRingRows = kDeltaRing;

// The inputs of one row's convolution, the oldest first. Null: the row is idle.
template <class T>
using Inputs = std::array<const T*, kTaps>;
// The tokens that they belong to; -1: before the start of the sequence.
using InputTokens = std::array<int64_t, kTaps>;

std::vector<InputTokens> input_tokens(const Tensor& cu_seqlens, const Tensor& prefixes,
                                      int64_t tokens, const char* op) {
  AttentionDesc desc;
  desc.prefixes = prefixes;
  attention::check_sequences(cu_seqlens, desc, tokens, op);
  const PackedSequences sequences(cu_seqlens, desc);
  std::vector<InputTokens> out;
  out.reserve(static_cast<size_t>(tokens));
  for (int64_t s = 0; s < sequences.count; ++s) {
    const PackedSequence sequence = sequences[s];
    for (int64_t row = 0; row < sequence.length; ++row) {
      InputTokens& inputs = out.emplace_back();
      for (int64_t tap = 0; tap < kTaps; ++tap) {
        const int64_t position = sequence.position(row) + tap - (kTaps - 1);
        inputs[static_cast<size_t>(tap)] = position < 0 ? -1 : sequence.token(position);
      }
    }
  }
  return out;
}

// `zeros` are the inputs before the start of a sequence.
template <class T>
std::vector<Inputs<T>> inputs_at(const std::vector<InputTokens>& tokens, const Tensor& x,
                                 const T* zeros) {
  const RowOffsets rows(x);
  std::vector<Inputs<T>> out(tokens.size());
  for (size_t t = 0; t < tokens.size(); ++t)
    for (size_t tap = 0; tap < kTaps; ++tap)
      out[t][tap] = tokens[t][tap] < 0 ? zeros : x.data<T>() + rows(tokens[t][tap]);
  return out;
}

// The convolution of channels [begin, begin + count), before SiLU.
template <class T>
void convolve(const Inputs<T>& x, const T* w, int64_t begin, int64_t count, T* out) {
  COHORT_VECTORIZE
  for (int64_t i = 0; i < count; ++i) {
    T sum = 0;
    for (size_t tap = 0; tap < kTaps; ++tap)
      sum = std::fma(w[(begin + i) * kTaps + static_cast<int64_t>(tap)], x[tap][begin + i], sum);
    out[i] = sum;
  }
}

template <class T>
T inverse_norm(T squares) {
  return T(1) / std::sqrt(squares + T(1e-6));
}

template <class T>
void normalize(T* x, int64_t dim) {
  T squares = 0;
  for (int64_t i = 0; i < dim; ++i) squares += x[i] * x[i];
  const T scale = inverse_norm(squares);
  for (int64_t i = 0; i < dim; ++i) x[i] *= scale;
}

template <class T>
T softplus(T x) {
  return x > T(20) ? x : std::log1p(vexp(x));
}

// All rows of a packed or cached call.
template <class T, class Args>
void forward(const Args& args, const std::vector<Inputs<T>>& inputs) {
  const int64_t dim = args.out.q.dim(2), value_heads = args.out.v.dim(1),
                key_cols = args.out.q.dim(1) * dim, value_cols = value_heads * dim;
  const T *w = args.in.w.template data<T>(), *b = args.in.b.template data<T>(),
          *a = args.in.a.template data<T>(), *a_log = args.in.a_log.template data<T>(),
          *dt_bias = args.in.dt_bias.template data<T>();
  T *q = args.out.q.template data<T>(), *k = args.out.k.template data<T>(),
    *v = args.out.v.template data<T>(), *g = args.out.g.template data<T>(),
    *beta = args.out.beta.template data<T>();
  const RowOffsets b_rows(args.in.b), a_rows(args.in.a);
  for_rows(args.in.x.dim(0), args.in.x.dim(1), [&](int64_t t) {
    const Inputs<T>& x = inputs[static_cast<size_t>(t)];
    const bool idle = x.back() == nullptr;
    const auto channels = [&](T* out, int64_t begin, int64_t count) {
      if (idle) return write_range(out, 0, count, Grad::kOverwrite, [](int64_t) { return T(0); });
      convolve(x, w, begin, count, out);
      write_range(out, 0, count, Grad::kOverwrite,
                  [=](int64_t i) { return Silu::forward(out[i]); });
    };
    T *const q_row = q + t * key_cols, *const k_row = k + t * key_cols;
    channels(q_row, 0, key_cols);
    channels(k_row, key_cols, key_cols);
    channels(v + t * value_cols, 2 * key_cols, value_cols);
    for (int64_t i = 0; i < key_cols; i += dim) {
      normalize(q_row + i, dim);
      normalize(k_row + i, dim);
    }
    for (int64_t h = 0; h < value_heads; ++h) {
      const T decay = -vexp(a_log[h]) * softplus(a[a_rows(t) + h] + dt_bias[h]);
      g[t * value_heads + h] = idle ? T(0) : decay;
      beta[t * value_heads + h] = idle ? T(0) : vsigmoid(b[b_rows(t) + h]);
    }
  });
}

// Turns the convolution of a head, given in `c`, into its gradient; dy is that of q, k or v.
template <class T>
void head_backward(const T* dy, T* c, int64_t dim, bool normalized) {
  T scale = 1, along = 0;
  if (normalized) {
    T squares = 0, dot = 0;
    for (int64_t i = 0; i < dim; ++i) {
      const T y = Silu::forward(c[i]);
      squares += y * y;
      dot += y * dy[i];
    }
    scale = inverse_norm(squares);
    along = dot * scale * scale;
  }
  write_range(c, 0, dim, Grad::kOverwrite, [=](int64_t i) {
    return scale * (dy[i] - along * Silu::forward(c[i])) * Silu::derivative(c[i], T(0));
  });
}

// A gradient's elements, set to 0 if they are to be overwritten; null if it is not wanted.
template <class T>
T* begin_gradient(const GradOut& grad) {
  if (!grad.wanted()) return nullptr;
  if (grad.mode == Grad::kOverwrite) grad.tensor.zero_();
  return grad.tensor.data<T>();
}

template <class T>
void convolution_backward(const DeltaInputsBackward& args, const std::vector<InputTokens>& tokens) {
  const int64_t key_heads = args.dout.q.dim(1), value_heads = args.dout.v.dim(1),
                dim = args.dout.q.dim(2);
  std::vector<T> zeros(static_cast<size_t>(args.in.x.dim(1))), convolved(zeros.size());
  const std::vector<Inputs<T>> inputs = inputs_at<T>(tokens, args.in.x, zeros.data());
  const T *w = args.in.w.data<T>(), *dq = args.dout.q.data<T>(), *dk = args.dout.k.data<T>(),
          *dv = args.dout.v.data<T>();
  T *const dx = begin_gradient<T>(args.dx), *const dw = begin_gradient<T>(args.dw);
  const RowOffsets dx_rows(args.dx.tensor);
  parallel_for(2 * key_heads + value_heads, 1, [&](int64_t h, int64_t) {
    const bool is_value = h >= 2 * key_heads;
    const int64_t heads = is_value ? value_heads : key_heads, first = h * dim;
    const T* dy = is_value         ? dv + (h - 2 * key_heads) * dim
                  : h >= key_heads ? dk + (h - key_heads) * dim
                                   : dq + h * dim;
    T* const dc = convolved.data() + first;
    for (size_t t = 0; t < tokens.size(); ++t, dy += heads * dim) {
      convolve(inputs[t], w, first, dim, dc);
      head_backward(dy, dc, dim, !is_value);
      for (size_t tap = 0; tap < kTaps; ++tap) {
        if (tokens[t][tap] < 0) continue;
        const T* const x = inputs[t][tap] + first;
        const int64_t offset = first * kTaps + static_cast<int64_t>(tap);
        if (dx != nullptr)
          write_range(dx + dx_rows(tokens[t][tap]) + first, 0, dim, Grad::kAccumulate,
                      [=](int64_t i) { return w[offset + i * kTaps] * dc[i]; });
        if (dw != nullptr)
          for (int64_t i = 0; i < dim; ++i) dw[offset + i * kTaps] += x[i] * dc[i];
      }
    }
  });
}

template <class T>
void gates_backward(const DeltaInputsBackward& args) {
  const int64_t tokens = args.in.x.dim(0), heads = args.dout.v.dim(1);
  const T *b = args.in.b.data<T>(), *a = args.in.a.data<T>(), *a_log = args.in.a_log.data<T>(),
          *dt_bias = args.in.dt_bias.data<T>(), *dg = args.dout.g.data<T>(),
          *dbeta = args.dout.beta.data<T>();
  T *const db = begin_gradient<T>(args.db), *const da = begin_gradient<T>(args.da),
           *const da_log = begin_gradient<T>(args.da_log),
           *const ddt_bias = begin_gradient<T>(args.ddt_bias);
  const RowOffsets b_rows(args.in.b), a_rows(args.in.a), db_rows(args.db.tensor),
      da_rows(args.da.tensor);
  parallel_for(heads, 1, [&](int64_t h, int64_t) {
    const T rate = -vexp(a_log[h]);
    for (int64_t t = 0; t < tokens; ++t) {
      const T z = a[a_rows(t) + h] + dt_bias[h], beta = vsigmoid(b[b_rows(t) + h]);
      const T dz = dg[t * heads + h] * rate * (z > T(20) ? T(1) : vsigmoid(z));
      if (db != nullptr) db[db_rows(t) + h] += dbeta[t * heads + h] * beta * (1 - beta);
      if (da != nullptr) da[da_rows(t) + h] += dz;
      if (ddt_bias != nullptr) ddt_bias[h] += dz;
      if (da_log != nullptr) da_log[h] += dg[t * heads + h] * rate * softplus(z);
    }
  });
}

template <class T>
void forward_cached(const DeltaInputsCached& args, const std::vector<StateRun>& runs) {
  const int64_t cols = args.in.x.dim(1);
  const T* const x = args.in.x.data<T>();
  T* const ring = args.ring.data<T>();
  const RowOffsets x_rows(args.in.x), rows_of_rings(args.ring);
  const auto ring_row = [&](const StateRun& run, int64_t position) {
    return ring + rows_of_rings(run.state * kRingRows + position % kRingRows);
  };
  const std::vector<T> zeros(static_cast<size_t>(cols));
  std::vector<Inputs<T>> inputs(static_cast<size_t>(args.in.x.dim(0)));  // null
  for (const StateRun& run : runs)
    for (int64_t i = 0; i < run.count && !run.is_idle(); ++i)
      for (int64_t tap = 0; tap < kTaps; ++tap) {
        const int64_t row = i + tap - (kTaps - 1), position = run.position + row;
        inputs[static_cast<size_t>(run.first + i)][static_cast<size_t>(tap)] =
            row >= 0        ? x + x_rows(run.first + row)
            : position >= 0 ? ring_row(run, position)
                            : zeros.data();
      }
  forward<T>(args, inputs);
  for (const StateRun& run : runs)
    for (int64_t i = std::max<int64_t>(0, run.count - kRingRows); i < run.count && !run.is_idle();
         ++i)
      std::copy_n(x + x_rows(run.first + i), cols, ring_row(run, run.position + i));
}

}  // namespace

void delta_inputs(const DeltaInputs& args) {
  constexpr const char* kOp = "delta_inputs";
  dispatch_float(args.in.x.dtype(), kOp, [&]<class T>() {
    const std::vector<T> zeros(static_cast<size_t>(args.in.x.dim(1)));
    const auto tokens = input_tokens(args.cu_seqlens, args.prefixes, args.in.x.dim(0), kOp);
    forward<T>(args, inputs_at<T>(tokens, args.in.x, zeros.data()));
  });
}

void delta_inputs_cached(const DeltaInputsCached& args) {
  constexpr const char* kOp = "delta_inputs_cached";
  const auto runs = state_runs(args.states, args.positions, args.ring.dim(0), kOp);
  dispatch_float(args.in.x.dtype(), kOp, [&]<class T>() { forward_cached<T>(args, runs); });
}

void delta_inputs_backward(const DeltaInputsBackward& args) {
  constexpr const char* kOp = "delta_inputs_backward";
  const auto tokens = input_tokens(args.cu_seqlens, args.prefixes, args.in.x.dim(0), kOp);
  dispatch_float(args.in.x.dtype(), kOp, [&]<class T>() {
    convolution_backward<T>(args, tokens);
    gates_backward<T>(args);
  });
}

}  // namespace cohort::kernels::cpu
