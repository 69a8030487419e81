#include "kernels/head.h"

#include <algorithm>

#include "core/sizes.h"
#include "core/with_cuda.h"
#include "kernels/arguments.h"
#include "kernels/embedding.h"
#include "kernels/matmul.h"

namespace cohort::kernels {
namespace {

// The weight gradient is accumulated in steps of this many tokens; chunks are multiples of it, so
// that no result depends on their size.
constexpr int64_t kChunkUnit = 128;

// Checks what both passes over logits have.
ArgumentCheck check_head(const char* op, const Tensor& logits, const Tensor& targets,
                         int64_t begin) {
  ArgumentCheck check(op);
  check("strided [n, V] logits; i32 [T] targets", logits, targets);
  check.require(begin >= 0 && begin + check["n"] <= check["T"], "expected logits of tokens from ",
                begin, " of ", check["T"], ", got ", logits);
  return check;
}

}  // namespace

void head_statistics(const HeadStatistics& args) {
  check_head("head", args.logits, args.targets, args.begin)(
      "[T] logprob, entropy, lse; strided bf16 [n, V] unit_gradients?", args.logprob, args.entropy,
      args.lse, args.unit_gradients);
  on_device<cpu::head_statistics, cuda::head_statistics>(args.logits.device(), args);
}

bool has_unit_gradients(const Tensor& w) {
  if constexpr (kWithCuda)
    if (w.device().is_cuda() && !is_dry_run()) return cuda::has_unit_gradients(w);
  return false;
}

void head_divergence(const HeadDivergence& args) {
  ArgumentCheck check("head_divergence");
  check("strided [n, V] logits, teacher_logits; [T] lse, teacher_lse, divergence; [T, 5] rows",
        args.logits, args.teacher_logits, args.lse, args.teacher_lse, args.divergence, args.rows);
  check.require(args.begin >= 0 && args.begin + check["n"] <= check["T"],
                "expected logits of tokens from ", args.begin, " of ", check["T"], ", got ",
                args.logits);
  on_device<cpu::head_divergence, cuda::head_divergence>(args.logits.device(), args);
}

void head_logit_gradients(const HeadLogitGradients& args) {
  ArgumentCheck check = check_head("head_backward", args.logits, args.targets, args.begin);
  check("[T] dlogprob, lse, entropy, dentropy?, ddivergence?; strided any [n, V] dz", args.dlogprob,
        args.lse, args.entropy, args.dentropy, args.ddivergence, args.dz);
  check.require((args.divergence != nullptr) == args.ddivergence.defined() &&
                    (args.divergence == nullptr || args.divergence->begin == args.begin),
                "expected a divergence of the same tokens with its gradient");
  on_device<cpu::head_logit_gradients, cuda::head_logit_gradients>(args.logits.device(), args);
}

void scale_rows(const ScaleRows& args) {
  ArgumentCheck check("scale_rows");
  check("bf16 [...] y; any [...] x; f32 [rows] factor", args.y, args.x, args.factor);
  on_device<[](const ScaleRows&) { throw Error("[scale_rows] expected CUDA tensors"); },
            cuda::scale_rows>(args.y.device(), args);
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

int64_t head_rows(int64_t vocab, Device device) {
  return device.is_cuda() ? round_up(vocab, int64_t{64}) : vocab;
}

void for_logit_chunks(const Logits& args, int64_t rows,
                      const std::function<void(int64_t begin, Tensor& logits)>& fn) {
  const auto& [x, w, bias] = args;
  ArgumentCheck("head")("[T, C] x; [V, C] w; [V] bias?", x, w, bias);
  const int64_t total = x.dim(0);
  const Tensor padded = w.with_padding();
  rows = std::min(rows, total);
  Tensor logits = Tensor::empty({rows, padded.dim(0)}, accumulate_dtype(x.dtype()), x.device());
  Tensor start, first_row;  // the bias as a table of one row, and the row of each token
  if (bias.defined()) {
    start = bias.with_padding().to(logits.dtype()).reshape({1, padded.dim(0)});
    first_row = Tensor::zeros({rows}, DType::kI32, x.device());
  }
  for (int64_t begin = 0; begin < total; begin += rows) {
    const int64_t count = std::min(rows, total - begin);
    Tensor chunk = logits.narrow(0, 0, count);
    if (bias.defined())
      embedding_forward({.y = chunk, .table = start, .ids = first_row.narrow(0, 0, count)});
    matmul({.c = chunk,
            .a = x.narrow(0, begin, count),
            .b = padded,
            .desc = {.b = Transpose::kYes,
                     .out = bias.defined() ? Grad::kAccumulate : Grad::kOverwrite}});
    chunk = chunk.hide_padding(1, w.dim(0));
    fn(begin, chunk);
  }
}

int64_t head_gradient_tokens(int64_t tokens, int64_t columns, int64_t rows) {
  constexpr int64_t kBytes = int64_t{1} << 30;
  const int64_t most = std::min(kHeadGradientTokens, kBytes / (2 * columns));
  return std::min(tokens, std::max(rows, most / rows * rows));
}

}  // namespace cohort::kernels
