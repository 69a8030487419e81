#include "kernels/sampling.h"

#include <cstring>

#include "core/with_cuda.h"

namespace cohort::kernels {
namespace {

void check_state(const SamplingState& state, int64_t vocab, const Tensor& rows, const char* op) {
  const Device device = rows.device();
  const auto& [params, counts, bias_ids, bias_values] = state;
  COHORT_CHECK(params.rank() == 2, "[", op, "] expected params [S, ", sizeof(SamplingParams),
               "], got ", params.str());
  const int64_t slots = params.dim(0);
  check_tensor(params, {slots, sizeof(SamplingParams)}, DType::kU8, op, "params", device);
  if (counts.defined()) check_tensor(counts, {slots, vocab}, DType::kI32, op, "counts", device);
  if (!bias_ids.defined() && !bias_values.defined()) return;
  COHORT_CHECK(bias_ids.rank() == 2, "[", op, "] expected bias_ids [S, B], got ", bias_ids.str());
  const Shape biases{slots, bias_ids.dim(1)};
  check_tensor(bias_ids, biases, DType::kI32, op, "bias_ids", device);
  check_tensor(bias_values, biases, accumulate_dtype(rows.dtype()), op, "bias_values", device);
}

// `rows`: hidden states or logits [n, ...].
template <class Args>
void check_rows(const Args& args, const Tensor& rows, int64_t vocab, const char* op) {
  const Shape shape{rows.dim(0)};
  const Device device = rows.device();
  const DType statistic = accumulate_dtype(rows.dtype());
  check_tensor(args.out.tokens, shape, DType::kI32, op, "tokens", device);
  check_tensor(args.out.logprob, shape, statistic, op, "logprob", device);
  check_tensor(args.out.entropy, shape, statistic, op, "entropy", device);
  check_tensor(args.out.truncated_mass, shape, statistic, op, "truncated_mass", device);
  check_tensor(args.out.sampling_logprob, shape, statistic, op, "sampling_logprob", device);
  check_tensor(args.slots, shape, DType::kI32, op, "slots", device);
  check_tensor(args.rng_index, shape, DType::kI64, op, "rng_index", device);
  check_state(args.state, vocab, rows, op);
}

}  // namespace

Tensor pack_params(std::span<const SamplingParams> params) {
  for (const SamplingParams& p : params)
    if (const char* expected = invalid_reason(p))
      throw Error(str("[sampling] row ", &p - params.data(), ": expected ", expected));
  Tensor bytes =
      Tensor::empty({static_cast<int64_t>(params.size()), sizeof(SamplingParams)}, DType::kU8);
  if (!params.empty()) std::memcpy(bytes.raw(), params.data(), params.size_bytes());
  return bytes;
}

void head_sample(const HeadSample& args) {
  const Tensor &x = args.x, &w = args.w;
  constexpr const char* kOp = "head_sample";
  COHORT_CHECK(x.rank() == 2 && w.rank() == 2 && x.dim(1) == w.dim(1),
               "[head_sample] expected x [n, C] and w [V, C], got ", x.str(), " and ", w.str());
  COHORT_CHECK(args.chunk_tokens >= 0, "[head_sample] expected chunk_tokens of 0 or more, got ",
               args.chunk_tokens);
  check_tensor(x, x.shape(), x.dtype(), kOp, "x", x.device());
  check_tensor(w, w.shape(), x.dtype(), kOp, "w", x.device());
  check_rows(args, x, w.dim(0), kOp);
  on_device<cpu::head_sample, cuda::head_sample>(x.device(), args);
}

void sample_logits(const SampleLogits& args) {
  const Tensor& logits = args.logits;
  constexpr const char* kOp = "sample_logits";
  COHORT_CHECK(logits.rank() == 2, "[sample_logits] expected logits [n, V], got ", logits.str());
  check_rows(logits, logits.shape(), logits.dtype(), kOp, "logits", logits.device());
  check_rows(args, logits, logits.dim(1), kOp);
  on_device<cpu::sample_logits, cuda::sample_logits>(logits.device(), args);
}

void count_prompt(const CountPrompt& args) {
  const auto& [counts, tokens, slot] = args;
  constexpr const char* kOp = "count_prompt";
  COHORT_CHECK(counts.rank() == 2, "[count_prompt] expected counts [S, V], got ", counts.str());
  check_tensor(counts, counts.shape(), DType::kI32, kOp, "counts", counts.device());
  check_tensor(tokens, {tokens.numel()}, DType::kI32, kOp, "tokens", counts.device());
  COHORT_CHECK(slot >= 0 && slot < counts.dim(0), "[count_prompt] expected a slot below ",
               counts.dim(0), ", got ", slot);
  on_device<cpu::count_prompt, cuda::count_prompt>(counts.device(), args);
}

}  // namespace cohort::kernels
