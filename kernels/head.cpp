#include "kernels/head.h"

#include <algorithm>

#include "core/sizes.h"
#include "core/with_cuda.h"
#include "kernels/matmul.h"

namespace cohort::kernels {
namespace {

// The weight gradient is accumulated in steps of this many tokens; chunks are multiples of it, so
// that no result depends on their size.
constexpr int64_t kChunkUnit = 128;

// Checks logits and statistics of all tokens; `statistics` are [T].
void check_head(const Tensor& logits, const Tensor& targets, int64_t begin,
                std::initializer_list<std::pair<const Tensor*, const char*>> statistics,
                const char* op) {
  COHORT_CHECK(logits.rank() == 2 && begin >= 0 && begin + logits.dim(0) <= targets.numel(), "[",
               op, "] expected logits [n, V] of tokens from ", begin, " of ", targets.numel(),
               ", got ", logits.str());
  check_rows(logits, logits.shape(), logits.dtype(), op, "logits", logits.device());
  check_tensor(targets, {targets.numel()}, DType::kI32, op, "targets", logits.device());
  for (const auto& [t, name] : statistics)
    check_tensor(*t, targets.shape(), logits.dtype(), op, name, logits.device());
}

}  // namespace

void head_statistics(const HeadStatistics& args) {
  constexpr const char* kOp = "head";
  check_head(args.logits, args.targets, args.begin,
             {{&args.logprob, "logprob"}, {&args.entropy, "entropy"}, {&args.lse, "lse"}}, kOp);
  const Device device = args.logits.device();
  if (args.unit_gradients.defined())
    check_rows(args.unit_gradients, args.logits.shape(), DType::kBF16, kOp, "unit_gradients",
               device);
  on_device<cpu::head_statistics, cuda::head_statistics>(device, args);
}

bool has_unit_gradients(const Tensor& w) {
  if constexpr (kWithCuda)
    if (w.device().is_cuda() && !is_dry_run()) return cuda::has_unit_gradients(w);
  return false;
}

void head_logit_gradients(const HeadLogitGradients& args) {
  constexpr const char* kOp = "head_backward";
  check_head(args.logits, args.targets, args.begin,
             {{&args.dlogprob, "dlogprob"}, {&args.lse, "lse"}, {&args.entropy, "entropy"}}, kOp);
  const Device device = args.logits.device();
  if (args.dentropy.defined())
    check_tensor(args.dentropy, args.targets.shape(), args.logits.dtype(), kOp, "dentropy", device);
  check_rows(args.dz, args.logits.shape(), args.dz.dtype(), kOp, "dz", device);
  on_device<cpu::head_logit_gradients, cuda::head_logit_gradients>(device, args);
}

void scale_rows(const ScaleRows& args) {
  constexpr const char* kOp = "scale_rows";
  const Device device = args.y.device();
  check_tensor(args.y, args.y.shape(), DType::kBF16, kOp, "y", device);
  check_tensor(args.x, args.y.shape(), args.x.dtype(), kOp, "x", device);
  check_tensor(args.factor, {args.y.rows()}, DType::kF32, kOp, "factor", device);
  on_device<[](const ScaleRows&) { throw Error("[scale_rows] expected CUDA tensors"); },
            cuda::scale_rows>(device, args);
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

void for_logit_chunks(const Tensor& x, const Tensor& w, int64_t rows,
                      const std::function<void(int64_t begin, Tensor& logits)>& fn) {
  const int64_t total = x.dim(0);
  const Tensor padded = w.with_padding();
  rows = std::min(rows, total);
  Tensor logits = Tensor::empty({rows, padded.dim(0)}, accumulate_dtype(x.dtype()), x.device());
  for (int64_t begin = 0; begin < total; begin += rows) {
    const int64_t count = std::min(rows, total - begin);
    Tensor chunk = logits.narrow(0, 0, count);
    matmul(
        {.c = chunk, .a = x.narrow(0, begin, count), .b = padded, .desc = {.b = Transpose::kYes}});
    chunk = chunk.hide_padding(1, w.dim(0));
    fn(begin, chunk);
  }
}

int64_t head_gradient_tokens(int64_t tokens, int64_t rows) {
  return std::min(tokens, std::max(rows, kHeadGradientTokens / rows * rows));
}

}  // namespace cohort::kernels
