#include "rl/grpo_loss.h"

#include <atomic>
#include <cmath>

namespace cohort {
namespace {

// The inputs of tokens [begin, begin + count), which are a sequence.
PolicyLossInputs part_of(const PolicyLossInputs& all, int64_t begin, int64_t count) {
  PolicyLossInputs out = all;
  for (Tensor* t : {&out.old_logprob, &out.ref_logprob, &out.advantage, &out.weight,
                    &out.sampling_logprob})
    if (t->defined()) *t = t->narrow(0, begin, count);
  out.segments = Tensor::zeros({count}, DType::kI32, all.segments.device());
  return out;
}

// The sequences of a micro batch: the index of the first token of each, then the number of tokens.
std::vector<int64_t> sequence_begins(const Tensor& segments) {
  const auto of = segments.to_vector<double>();
  std::vector<int64_t> out;
  for (size_t t = 0; t < of.size(); ++t)
    if (t == 0 || of[t] != of[t - 1]) out.push_back(static_cast<int64_t>(t));
  out.push_back(segments.numel());
  return out;
}

// The largest absolute value, NaN if there is one.
double largest(const std::vector<double>& values) {
  double out = 0;
  for (const double value : values)
    out = std::isnan(value) || std::abs(value) > out ? std::abs(value) : out;
  return out;
}

// The distance of the loss and its gradients from the sums over sequences, relative to their size.
double distance_from_sum(const HostLoss& loss, const HostLossArgs& args, double value,
                         const std::vector<int64_t>& begins) {
  double sum = 0, size = std::abs(value), distance = 0;
  for (size_t s = 0; s + 1 < begins.size(); ++s) {
    const int64_t begin = begins[s], count = begins[s + 1] - begin;
    const PolicyLossInputs inputs = part_of(args.inputs, begin, count);
    const Tensor logprob = args.logprob.narrow(0, begin, count),
                 entropy = args.entropy.narrow(0, begin, count);
    Tensor dlogprob = Tensor::empty_like(logprob), dentropy;
    const double part = loss({logprob, entropy, inputs, dlogprob, dentropy});
    sum += part;
    size += std::abs(part);
    auto own = dlogprob.to_vector<double>();
    const auto whole = args.dlogprob.narrow(0, begin, count).to_vector<double>();
    const double scale = largest(whole) + largest(own);
    for (size_t t = 0; t < own.size(); ++t) own[t] -= whole[t];
    if (scale > 0) distance = std::max(distance, largest(own) / scale);
  }
  return size > 0 ? std::max(distance, std::abs(value - sum) / size) : distance;
}

}  // namespace

HostLoss checked_loss(std::string name, HostLoss loss) {
  const auto checked = std::make_shared<std::atomic<bool>>(false);
  return [name = std::move(name), loss = std::move(loss), checked](const HostLossArgs& args) {
    const double value = loss(args);
    if (!std::isfinite(value))
      throw InputError(str("loss ", name, ": it returned ", value, " for a micro batch"));
    for (const auto& [of, gradient] :
         {std::pair{"logprob", &args.dlogprob}, {"entropy", &args.dentropy}})
      if (gradient->defined() && !std::isfinite(largest(gradient->to_vector<double>())))
        throw InputError(
            str("loss ", name, ": its gradient with respect to ", of, " is not finite"));
    const std::vector<int64_t> begins = sequence_begins(args.inputs.segments);
    if (*checked || begins.size() < 3) return value;
    const double distance = distance_from_sum(loss, args, value, begins),
                 limit = args.logprob.dtype() == DType::kF64 ? 1e-6 : 1e-5;
    if (!(distance <= limit))
      throw InputError(
          str("loss ", name, ": it is no sum over sequences: each by itself gives another loss or "
              "gradient (by ", distance, " of its size), and a step is divided into micro batches; "
              "hint: multiply by `weight`, one over the tokens of the step, in place of a mean"));
    *checked = true;
    return value;
  };
}


TokenLogProbs policy_log_probs(const Transformer& model, const PackedBatch& batch,
                               double temperature, Adapters adapters) {
  return token_log_probs(
      model.hidden_at_targets(batch, {.mode = Mode::kEval, .adapters = adapters}), model.head(),
      batch.targets, {.temperature = temperature});
}

HeadLoss grpo_loss(const Variable& hidden, const HeadWeights& head, const PolicyBatch& batch,
                   const GrpoConfig& config, double temperature, bool on_policy,
                   std::optional<HeadTeacher> teacher) {
  return policy_loss(hidden, head, batch.targets,
                     {.old_logprob = batch.old_logprob,
                      .ref_logprob = batch.ref_logprob,
                      .advantage = batch.advantage,
                      .weight = batch.weight,
                      .sampling_logprob = batch.sampling_logprob,
                      .segments = batch.segments,
                      .on_policy = on_policy,
                      .teacher = std::move(teacher),
                      .host_loss = config.loss_function.get()},
                     config.loss_desc(), {.temperature = temperature});
}

}  // namespace cohort
