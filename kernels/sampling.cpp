#include "kernels/sampling.h"

#include <cmath>

#include "core/with_cuda.h"

namespace cohort::kernels {
namespace {

void check_desc(const SamplingDesc& desc, const char* op) {
  COHORT_CHECK(desc.temperature >= 0 && std::isfinite(desc.temperature), "[", op,
               "] expected a temperature of 0 or more, got ", desc.temperature);
  COHORT_CHECK(desc.top_k >= 0, "[", op, "] expected top_k of 0 or more, got ", desc.top_k);
  COHORT_CHECK(desc.top_p > 0 && desc.top_p <= 1, "[", op, "] expected top_p in (0, 1], got ",
               desc.top_p);
  COHORT_CHECK(desc.chunk_tokens >= 0, "[", op, "] expected chunk_tokens of 0 or more, got ",
               desc.chunk_tokens);
}

void check_rows(const Draws& out, const Tensor& stream, const Tensor& index, const Tensor& rows,
                const char* op) {
  const Shape shape{rows.dim(0)};
  const Device device = rows.device();
  const DType statistic = accumulate_dtype(rows.dtype());
  check_tensor(out.tokens, shape, DType::kI32, op, "tokens", device);
  check_tensor(out.logprob, shape, statistic, op, "logprob", device);
  check_tensor(out.entropy, shape, statistic, op, "entropy", device);
  check_tensor(out.cut, shape, statistic, op, "cut", device);
  check_tensor(stream, shape, DType::kI64, op, "rng_stream", device);
  check_tensor(index, shape, DType::kI64, op, "rng_index", device);
}

}  // namespace

void head_sample(const HeadSample& args) {
  const auto& [out, x, w, rng_stream, rng_index, desc] = args;
  constexpr const char* kOp = "head_sample";
  COHORT_CHECK(x.rank() == 2 && w.rank() == 2 && x.dim(1) == w.dim(1),
               "[head_sample] expected x [n, C] and w [V, C], got ", x.str(), " and ", w.str());
  check_desc(desc, kOp);
  check_tensor(x, x.shape(), x.dtype(), kOp, "x", x.device());
  check_tensor(w, w.shape(), x.dtype(), kOp, "w", x.device());
  check_rows(out, rng_stream, rng_index, x, kOp);
  on_device<cpu::head_sample, cuda::head_sample>(x.device(), args);
}

void sample_logits(const SampleLogits& args) {
  const auto& [out, logits, rng_stream, rng_index, desc] = args;
  constexpr const char* kOp = "sample_logits";
  COHORT_CHECK(logits.rank() == 2, "[sample_logits] expected logits [n, V], got ", logits.str());
  check_desc(desc, kOp);
  check_tensor(logits, logits.shape(), logits.dtype(), kOp, "logits", logits.device());
  check_rows(out, rng_stream, rng_index, logits, kOp);
  on_device<cpu::sample_logits, cuda::sample_logits>(logits.device(), args);
}

}  // namespace cohort::kernels
