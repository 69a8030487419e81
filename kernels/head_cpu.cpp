// The fused language model head: checks, and the CPU's code. Active tokens are gathered into
// chunks, so that skipped ones cost nothing; a chunk's logits come from the row-independent product
// and live only inside the chunk.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/parallel.h"
#include "kernels/cuda_dispatch.h"
#include "kernels/head.h"
#include "kernels/matmul.h"
#include "kernels/row_softmax.h"

namespace cohort::kernels {
namespace {

// The weight gradient adds tokens in steps of this many, so chunks are multiples of it and no
// result depends on their size.
constexpr int64_t kChunkUnit = 128;

struct HeadShape {
  int64_t tokens, channels, vocab;
};

HeadShape check_inputs(const Tensor& x, const Tensor& w, const Tensor& targets,
                       const HeadDesc& desc, const char* op) {
  COHORT_CHECK(x.rank() == 2 && w.rank() == 2 && x.dim(1) == w.dim(1), "[", op,
               "] expected x [T, C] and w [V, C], got ", x.str(), " and ", w.str());
  COHORT_CHECK(desc.temperature > 0 && std::isfinite(desc.temperature), "[", op,
               "] expected a temperature above 0, got ", desc.temperature);
  COHORT_CHECK(desc.chunk_tokens >= 0, "[", op, "] expected chunk_tokens of 0 or more, got ",
               desc.chunk_tokens);
  const HeadShape shape{x.dim(0), x.dim(1), w.dim(0)};
  check_tensor(x, x.shape(), x.dtype(), op, "x", x.device());
  check_tensor(w, w.shape(), x.dtype(), op, "w", x.device());
  check_tensor(targets, {shape.tokens}, DType::kI32, op, "targets", x.device());
  return shape;
}

void check_targets(const Tensor& targets, int64_t vocab, const char* op) {
  const int32_t* target = targets.data<int32_t>();
  for (int64_t t = 0; t < targets.numel(); ++t)
    COHORT_CHECK(target[t] >= -1 && target[t] < vocab, "[", op, "] target ", target[t],
                 " at position ", t, " is outside the vocabulary of ", vocab,
                 " (-1 skips a token)");
}

std::vector<int64_t> active_tokens(const Tensor& targets) {
  std::vector<int64_t> active;
  const int32_t* target = targets.data<int32_t>();
  for (int64_t t = 0; t < targets.numel(); ++t)
    if (target[t] >= 0) active.push_back(t);
  return active;
}

// One chunk of active tokens: their hidden states, gathered, and their logits.
template <class T>
struct Chunk {
  Tensor x, logits;
  const int64_t* tokens;
  int64_t count;
};

// Calls fn for each chunk in ascending order, with the raw logits x w^T.
template <class T, class F>
void for_chunks(const Tensor& x, const Tensor& w, const std::vector<int64_t>& active,
                const HeadDesc& desc, F&& fn) {
  const auto total = static_cast<int64_t>(active.size());
  const int64_t channels = x.dim(1);
  const int64_t rows = std::min(head_chunk_tokens(w.dim(0), desc.chunk_tokens, {}), total);
  Tensor gathered = Tensor::empty({rows, channels}, x.dtype());
  Tensor logits = Tensor::empty({rows, w.dim(0)}, x.dtype());
  const T* source = x.data<T>();
  for (int64_t begin = 0; begin < total; begin += rows) {
    const int64_t count = std::min(rows, total - begin);
    Chunk<T> chunk{gathered.narrow(0, 0, count), logits.narrow(0, 0, count), active.data() + begin,
                   count};
    T* to = chunk.x.template data<T>();
    for (int64_t i = 0; i < count; ++i)
      std::copy_n(source + chunk.tokens[i] * channels, channels, to + i * channels);
    matmul(chunk.logits, chunk.x, w, {.b = Transpose::kYes});
    fn(chunk);
  }
}

// The scalars of one token's backward.
template <class T>
struct TokenGrad {
  T inverse_temperature, lse, entropy, dlogprob, dentropy;
};

// Logits to their gradient, in place.
template <class T>
void logits_backward(T* z, int64_t vocab, int64_t target, const TokenGrad<T>& g) {
  const bool with_entropy = g.dentropy != T(0);
  COHORT_VECTORIZE
  for (int64_t v = 0; v < vocab; ++v) {
    const T log_p = z[v] * g.inverse_temperature - g.lse;
    const T p = vexp(log_p);
    const T curve = with_entropy && p > 0 ? g.dentropy * (log_p + g.entropy) : T(0);
    z[v] = -p * (g.dlogprob + curve) * g.inverse_temperature;
  }
  z[target] += g.dlogprob * g.inverse_temperature;
}

template <class T>
void scatter_rows(T* out, const T* rows, const int64_t* tokens, int64_t count, int64_t cols,
                  Grad mode) {
  parallel_for(count, row_grain(cols), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      T* to = out + tokens[i] * cols;
      const T* from = rows + i * cols;
      for (int64_t c = 0; c < cols; ++c)
        to[c] = mode == Grad::kOverwrite ? from[c] : to[c] + from[c];
    }
  });
}

}  // namespace

COHORT_DECLARE_CUDA(head_logprob_forward);
void head_logprob_forward(Tensor& logprob, Tensor& entropy, Tensor& lse, const Tensor& x,
                          const Tensor& w, const Tensor& targets, const HeadDesc& desc) {
  constexpr const char* kOp = "head";
  const HeadShape shape = check_inputs(x, w, targets, desc, kOp);
  const DType statistic = accumulate_dtype(x.dtype());
  for (const auto& [t, name] :
       {std::pair{&logprob, "logprob"}, {&entropy, "entropy"}, {&lse, "lse"}})
    check_tensor(*t, {shape.tokens}, statistic, kOp, name, x.device());
  COHORT_FORWARD_TO_CUDA(x, head_logprob_forward(logprob, entropy, lse, x, w, targets, desc));
  check_targets(targets, shape.vocab, kOp);
  dispatch_float(x.dtype(), kOp, [&]<class T>() {
    logprob.zero_();
    entropy.zero_();
    lse.zero_();
    T *plogprob = logprob.data<T>(), *pentropy = entropy.data<T>(), *plse = lse.data<T>();
    const int32_t* target = targets.data<int32_t>();
    for_chunks<T>(x, w, active_tokens(targets), desc, [&](Chunk<T>& chunk) {
      const T* logits = chunk.logits.template data<T>();
      parallel_for(chunk.count, row_grain(shape.vocab), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t t = chunk.tokens[i];
          const T* z = logits + i * shape.vocab;
          const RowSoftmax row = row_softmax<T>(z, shape.vocab, desc.temperature, nullptr);
          plogprob[t] = row_logprob(row, z[target[t]]);
          pentropy[t] = static_cast<T>(row.entropy());
          plse[t] = static_cast<T>(row.lse());
        }
      });
    });
  });
}

COHORT_DECLARE_CUDA(head_logprob_backward);
void head_logprob_backward(Tensor& dx, Grad mode_x, Tensor& dw, Grad mode_w, const Tensor& dlogprob,
                           const Tensor& dentropy, const Tensor& x, const Tensor& w,
                           const Tensor& targets, const Tensor& lse, const Tensor& entropy,
                           const HeadDesc& desc) {
  constexpr const char* kOp = "head_backward";
  const HeadShape shape = check_inputs(x, w, targets, desc, kOp);
  const DType statistic = accumulate_dtype(x.dtype());
  const Device device = x.device();
  for (const auto& [t, name] :
       {std::pair{&dlogprob, "dlogprob"}, {&lse, "lse"}, {&entropy, "entropy"}})
    check_tensor(*t, {shape.tokens}, statistic, kOp, name, device);
  if (dentropy.defined())
    check_tensor(dentropy, {shape.tokens}, statistic, kOp, "dentropy", device);
  if (dx.defined()) check_tensor(dx, x.shape(), x.dtype(), kOp, "dx", device);
  if (dw.defined()) check_tensor(dw, w.shape(), statistic, kOp, "dw", device);
  COHORT_FORWARD_TO_CUDA(x, head_logprob_backward(dx, mode_x, dw, mode_w, dlogprob, dentropy, x, w,
                                                  targets, lse, entropy, desc));
  check_targets(targets, shape.vocab, kOp);
  dispatch_float(x.dtype(), kOp, [&]<class T>() {
    if (dx.defined() && mode_x == Grad::kOverwrite) dx.zero_();
    if (dw.defined() && mode_w == Grad::kOverwrite) dw.zero_();

    const int32_t* target = targets.data<int32_t>();
    const T *plse = lse.data<T>(), *pentropy = entropy.data<T>(), *dlp = dlogprob.data<T>();
    const T* dent = dentropy.defined() ? dentropy.data<T>() : nullptr;
    for_chunks<T>(x, w, active_tokens(targets), desc, [&](Chunk<T>& chunk) {
      T* logits = chunk.logits.template data<T>();
      parallel_for(chunk.count, row_grain(shape.vocab), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t t = chunk.tokens[i];
          logits_backward(logits + i * shape.vocab, shape.vocab, target[t],
                          {.inverse_temperature = static_cast<T>(1 / desc.temperature),
                           .lse = plse[t],
                           .entropy = pentropy[t],
                           .dlogprob = dlp[t],
                           .dentropy = dent != nullptr ? dent[t] : T(0)});
        }
      });
      if (dw.defined())
        matmul(dw, chunk.logits, chunk.x, {.a = Transpose::kYes, .out = Grad::kAccumulate});
      if (dx.defined()) {  // the gathered rows are free now: they take the gradient
        matmul(chunk.x, chunk.logits, w);
        scatter_rows(dx.data<T>(), chunk.x.template data<T>(), chunk.tokens, chunk.count,
                     shape.channels, mode_x);
      }
    });
  });
}

int64_t head_chunk_tokens(int64_t vocab, int64_t wanted, Device device) {
  if (wanted == 0 && device.is_cuda()) {
    // Long products, and room for other things: up to 512 MiB of f32 logits.
    constexpr int64_t kBytes = int64_t{512} << 20, kMost = 4096;
    const int64_t rows = kBytes / (4 * std::max<int64_t>(vocab, 1)) / kChunkUnit * kChunkUnit;
    return std::clamp(rows, kChunkUnit, kMost);
  }
  return std::max<int64_t>(1, (wanted + kChunkUnit - 1) / kChunkUnit) * kChunkUnit;
}

int64_t head_workspace_bytes(int64_t vocab, DType dtype, const HeadDesc& desc, Device device) {
  const auto logit = static_cast<int64_t>(dtype_size(accumulate_dtype(dtype)));
  // A bf16 gradient does not fit into its f32 logit's place.
  const auto gradient = dtype == DType::kBF16 ? static_cast<int64_t>(dtype_size(dtype)) : 0;
  return head_chunk_tokens(vocab, desc.chunk_tokens, device) * vocab * (logit + gradient);
}

}  // namespace cohort::kernels
