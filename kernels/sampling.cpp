#include "kernels/sampling.h"

#include <cstring>

#include "core/with_cuda.h"
#include "kernels/arguments.h"

namespace cohort::kernels {
namespace {

// Checks all but the hidden states or logits [n, ...], which `check` has checked.
template <class Args>
void check_sampling(ArgumentCheck& check, const Args& args) {
  const auto& [tokens, logprob, entropy, truncated_mass, sampling_logprob] = args.out;
  const auto& [params, counts, bias_ids, bias_values] = args.state;
  static_assert(sizeof(SamplingParams) == 64);
  check("i32 [n] tokens, slots; i64 [n] rng_index; u8 [S, 64] params; i32 [S, V] counts?", tokens,
        args.slots, args.rng_index, params, counts);
  check("accumulate [n] logprob, entropy, truncated_mass, sampling_logprob", logprob, entropy,
        truncated_mass, sampling_logprob);
  if (bias_ids.defined() || bias_values.defined())
    check("i32 [S, B] bias_ids; accumulate [S, B] bias_values", bias_ids, bias_values);
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
  ArgumentCheck check("head_sample");
  check("[n, C] x; [V, C] w", args.x, args.w);
  check.require(args.chunk_tokens >= 0, "expected chunk_tokens of 0 or more, got ",
                args.chunk_tokens);
  check_sampling(check, args);
  on_device<cpu::head_sample, cuda::head_sample>(args.x.device(), args);
}

void sample_logits(const SampleLogits& args) {
  ArgumentCheck check("sample_logits");
  check("strided [n, V] logits", args.logits);
  check_sampling(check, args);
  on_device<cpu::sample_logits, cuda::sample_logits>(args.logits.device(), args);
}

void count_prompt(const CountPrompt& args) {
  const auto& [counts, tokens, slot] = args;
  ArgumentCheck check("count_prompt");
  check("i32 [S, V] counts; i32 [T] tokens", counts, tokens);
  check.require(slot >= 0 && slot < check["S"], "expected a slot below ", check["S"], ", got ",
                slot);
  on_device<cpu::count_prompt, cuda::count_prompt>(counts.device(), args);
}

}  // namespace cohort::kernels
