#include "kernels/head.h"

#include <algorithm>
#include <cmath>

#include "core/sizes.h"
#include "core/with_cuda.h"
#include "kernels/matmul.h"

namespace cohort::kernels {
namespace {

// The weight gradient is accumulated in steps of this many tokens; chunks are multiples of it, so
// that no result depends on their size.
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

}  // namespace

void head_logprob_forward(const HeadLogprobForward& args) {
  constexpr const char* kOp = "head";
  const HeadShape shape = check_inputs(args.x, args.w, args.targets, args.desc, kOp);
  const DType statistic = accumulate_dtype(args.x.dtype());
  for (const auto& [t, name] :
       {std::pair{&args.logprob, "logprob"}, {&args.entropy, "entropy"}, {&args.lse, "lse"}})
    check_tensor(*t, {shape.tokens}, statistic, kOp, name, args.x.device());
  if (args.gradients != nullptr) {
    check_tensor(args.gradients->dlogprob, {shape.tokens}, statistic, kOp, "dlogprob",
                 args.x.device());
    check_grad(args.gradients->dx, args.x.shape(), args.x.dtype(), kOp, "dx", args.x.device());
    check_grad(args.gradients->dw, args.w.shape(), statistic, kOp, "dw", args.x.device());
  }
  on_device<cpu::head_logprob_forward, cuda::head_logprob_forward>(args.x.device(), args);
}

void head_logprob_backward(const HeadLogprobBackward& args) {
  constexpr const char* kOp = "head_backward";
  const HeadShape shape = check_inputs(args.x, args.w, args.targets, args.desc, kOp);
  const DType statistic = accumulate_dtype(args.x.dtype());
  const Device device = args.x.device();
  for (const auto& [t, name] :
       {std::pair{&args.dlogprob, "dlogprob"}, {&args.lse, "lse"}, {&args.entropy, "entropy"}})
    check_tensor(*t, {shape.tokens}, statistic, kOp, name, device);
  if (args.dentropy.defined())
    check_tensor(args.dentropy, {shape.tokens}, statistic, kOp, "dentropy", device);
  check_grad(args.dx, args.x.shape(), args.x.dtype(), kOp, "dx", device);
  check_grad(args.dw, args.w.shape(), statistic, kOp, "dw", device);
  on_device<cpu::head_logprob_backward, cuda::head_logprob_backward>(args.x.device(), args);
}

int64_t head_chunk_tokens(int64_t vocab, int64_t wanted, Device device) {
  if (wanted == 0 && device.is_cuda()) {
    // Large GEMMs in limited memory: up to 512 MiB of f32 logits, in chunks that divide
    // kHeadGradientTokens.
    constexpr int64_t kBytes = int64_t{512} << 20;
    int64_t rows = kHeadGradientTokens;
    while (rows > kChunkUnit && rows * 4 * vocab > kBytes) rows /= 2;
    return rows;
  }
  return std::max(kChunkUnit, round_up(wanted, kChunkUnit));
}

void for_logit_chunks(const Tensor& x, const Tensor& w, int64_t rows,
                      const std::function<void(int64_t begin, Tensor& logits)>& fn) {
  const int64_t total = x.dim(0);
  rows = std::min(rows, total);
  Tensor logits = Tensor::empty({rows, w.dim(0)}, accumulate_dtype(x.dtype()), x.device());
  for (int64_t begin = 0; begin < total; begin += rows) {
    const int64_t count = std::min(rows, total - begin);
    Tensor chunk = logits.narrow(0, 0, count);
    matmul({.c = chunk, .a = x.narrow(0, begin, count), .b = w, .desc = {.b = Transpose::kYes}});
    fn(begin, chunk);
  }
}

int64_t head_workspace_bytes(int64_t tokens, int64_t vocab, DType dtype, const HeadDesc& desc,
                             Device device) {
  const int64_t rows = std::min(tokens, head_chunk_tokens(vocab, desc.chunk_tokens, device));
  const auto logit = static_cast<int64_t>(dtype_size(accumulate_dtype(dtype)));
  // bf16 gradients cannot overwrite the f32 logits, so they take memory of their own.
  const int64_t kept = dtype == DType::kBF16 ? head_gradient_tokens(tokens, rows) : 0;
  return vocab * (rows * logit + kept * static_cast<int64_t>(dtype_size(dtype)));
}

int64_t head_gradient_tokens(int64_t tokens, int64_t rows) {
  return std::min(tokens, std::max(rows, kHeadGradientTokens / rows * rows));
}

}  // namespace cohort::kernels
