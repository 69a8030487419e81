#include "rl/grpo_loss.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>

namespace cohort {
namespace {

// A micro batch, the loss of which a function of the program gives.
struct HostBatch {
  Tensor logprob, entropy;
  PolicyLossInputs inputs;
  double beta;

  explicit HostBatch(const HostLossArgs& args)
      : logprob(args.logprob), entropy(args.entropy), inputs(args.inputs), beta(args.beta) {}
  // Calls change(column) for each list of numbers, and sets the segments.
  HostBatch with(const std::function<Tensor(const Tensor&)>& change, Tensor segments) const {
    HostBatch out = *this;
    for (Tensor* t : {&out.logprob, &out.entropy, &out.inputs.old_logprob, &out.inputs.ref_logprob,
                      &out.inputs.advantage, &out.inputs.weight, &out.inputs.sampling_logprob})
      if (t->defined()) *t = change(*t);
    out.inputs.segments = segments.to(logprob.device());
    return out;
  }
};

// The loss and its gradients, on the host.
struct HostValues {
  double loss = 0;
  std::vector<double> dlogprob, dentropy;  // dentropy: zeros if the function has none

  HostValues() = default;
  HostValues(double loss, const Tensor& dlogprob, const Tensor& dentropy)
      : loss(loss),
        dlogprob(dlogprob.to_vector<double>()),
        dentropy(dentropy.defined() ? dentropy.to_vector<double>()
                                    : std::vector<double>(this->dlogprob.size())) {}
  static HostValues of(const HostLoss& function, const HostBatch& batch) {
    Tensor dlogprob = Tensor::empty_like(batch.logprob), dentropy;
    const double loss =
        function({batch.logprob, batch.entropy, batch.inputs, batch.beta, dlogprob, dentropy});
    return {loss, dlogprob, dentropy};
  }
  void append(const HostValues& part) {
    loss += part.loss;
    dlogprob.insert(dlogprob.end(), part.dlogprob.begin(), part.dlogprob.end());
    dentropy.insert(dentropy.end(), part.dentropy.begin(), part.dentropy.end());
  }
  // The largest distance from other values, relative to the size of the gradients; NaN if a number
  // is not finite.
  double distance(const HostValues& other) const {
    double sum = std::abs(loss), largest = 0, most = 0;
    for (const auto list : {&HostValues::dlogprob, &HostValues::dentropy})
      for (size_t t = 0; t < dlogprob.size(); ++t) {
        const double size = std::abs((this->*list)[t]) + std::abs((other.*list)[t]),
                     difference = std::abs((this->*list)[t] - (other.*list)[t]);
        if (!std::isfinite(size)) return std::nan("");
        sum += size;
        largest = std::max(largest, size);
        most = std::max(most, difference);
      }
    const double of_loss = sum > 0 ? std::abs(loss - other.loss) / sum : 0;
    return std::isnan(of_loss) ? of_loss : std::max(of_loss, largest > 0 ? most / largest : 0);
  }
};

Tensor repeated(const Tensor& t) {
  const int64_t count = t.dim(0);
  const Tensor out = Tensor::empty({2 * count}, t.dtype(), t.device());
  for (const int64_t begin : {int64_t{0}, count}) out.narrow(0, begin, count).copy_(t);
  return out;
}

// The distance of the loss from a sum over sequences: of the values of the micro batch from those
// of each sequence alone; where it has one, of those of two such sequences from twice its own.
double distance_from_sum(const HostLoss& function, const HostBatch& batch,
                         const HostValues& values) {
  const auto segments = batch.inputs.segments.to_vector<double>();
  const auto count = static_cast<int64_t>(segments.size());
  if (segments.front() == segments.back()) {
    Tensor both = Tensor::zeros({2 * count}, DType::kI32);
    both.narrow(0, count, count).fill_(1);
    HostValues twice = values;
    twice.append(values);
    return HostValues::of(function, batch.with(repeated, both)).distance(twice);
  }
  HostValues sum;
  for (int64_t begin = 0, end = 0; begin < count; begin = end) {
    for (end = begin;
         end < count && segments[static_cast<size_t>(end)] == segments[static_cast<size_t>(begin)];)
      ++end;
    const auto part = [&](const Tensor& t) { return t.narrow(0, begin, end - begin).clone(); };
    sum.append(
        HostValues::of(function, batch.with(part, Tensor::zeros({end - begin}, DType::kI32))));
  }
  return values.distance(sum);
}

}  // namespace

HostLoss checked_loss(std::string name, HostLoss loss) {
  const auto checked = std::make_shared<std::atomic<bool>>(false);
  return [name = std::move(name), loss = std::move(loss), checked](const HostLossArgs& args) {
    const double value = loss(args);
    if (!std::isfinite(value))
      throw InputError(str("loss ", name, ": it returned ", value, " for a micro batch"));
    const HostValues values(value, args.dlogprob, args.dentropy);
    for (const auto& [of, gradient] :
         {std::pair{"logprob", &values.dlogprob}, {"entropy", &values.dentropy}})
      if (!std::ranges::all_of(*gradient, [](double x) { return std::isfinite(x); }))
        throw InputError(
            str("loss ", name, ": its gradient with respect to ", of, " is not finite"));
    if (*checked || values.dlogprob.empty()) return value;
    const double distance = distance_from_sum(loss, HostBatch(args), values),
                 limit = args.logprob.dtype() == DType::kF64 ? 1e-6 : 1e-4;
    if (!(distance <= limit))
      throw InputError(
          str("loss ", name,
              ": it is not a sum over sequences: each by itself gives another loss "
              "or gradient (by ",
              distance,
              " of its size), and a step is divided into micro "
              "batches; hint: multiply by `weight`, one over the tokens of the step, in place of a "
              "mean or a deviation, and use no random numbers"));
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
  return policy_loss(
      hidden, head, batch.targets,
      {batch, batch.segments, on_policy, std::move(teacher), config.loss_function.get()},
      config.loss_desc(), {.temperature = temperature});
}

}  // namespace cohort
