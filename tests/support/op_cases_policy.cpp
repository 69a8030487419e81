// The policy loss as OpCases.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "autograd/ops.h"
#include "core/rng.h"
#include "tests/support/loss_node.h"
#include "tests/support/op_case_inputs.h"
#include "tests/support/op_cases.h"

namespace cohort {
namespace {

using kernels::KlEstimator, kernels::Surrogate;
using test::constant;
using test::ids;
using test::Inputs;
using test::inputs;
using test::policy_loss_node;
using test::policy_loss_of_log_probs;
using Table = std::vector<OpCase>;

// Log-ratios in every region of the clipped surrogate, at least 0.05 from the kinks log 0.8,
// log 1.2 and log 1.28, for each sign of the advantage.
struct PolicyTokens {
  std::vector<double> logprob, old_logprob, ref_logprob, advantage, weight;
  void add(double ratio_log, double ref_log, double a, double w) {
    const double lp = -0.2 - 0.13 * static_cast<double>(logprob.size());
    logprob.push_back(lp);
    old_logprob.push_back(lp - ratio_log);
    ref_logprob.push_back(lp + ref_log);
    advantage.push_back(a);
    weight.push_back(w);
  }
};

PolicyTokens policy_tokens() {
  PolicyTokens tokens;
  const double ref_logs[] = {0.0, 0.4, -0.7};
  for (const double ratio_log : {-0.9, -0.3, -0.15, 0.0, 0.1, 0.3, 1.1})
    for (const double a : {1.3, -0.7, 0.0}) {
      const size_t i = tokens.weight.size();
      tokens.add(ratio_log, ref_logs[i % 3], a, 0.2 + 0.1 * static_cast<double>(i));
    }
  // Beyond the clamps, where the gradient is 0; a small weight compensates for the loss of e^20.
  tokens.add(25, 25, -1, 1e-9);
  // Beyond the lower clamp of the log-ratio; k3 has no lower clamp, and its largest gradient here.
  tokens.add(-25, -30, 1, 1);
  // A token outside the loss may hold anything.
  tokens.add(std::numeric_limits<double>::quiet_NaN(), 0.5, 3, 0);
  return tokens;
}

// Log-probs within 0.005 of `center`, so that no token crosses a kink.
auto near(std::vector<double> center) {
  return [center = std::move(center)](uint64_t seed) {
    std::vector<double> values = center;
    Rng rng(seed, rng_stream(kGradcheckPurpose, 4));
    for (double& v : values) v += 0.005 * (2 * rng.uniform() - 1);
    return std::vector<Tensor>{Tensor::from(values)};
  };
}

// Moves the old log-probs with the log-probs: the ratios of CISPO are constants.
void hold_ratios(PolicyTokens& t, const Variable& logprob) {
  const std::vector<double> lp = logprob.value().to(DType::kF64).to(Device{}).to_vector<double>();
  for (size_t i = 0; i < lp.size(); ++i) t.old_logprob[i] += lp[i] - t.logprob[i];
}

// The unbiased KL alone, with the value that has its gradient: the KL weighted by the ratio.
Variable unbiased_kl(const Variable& logprob, const kernels::PolicyLossDesc& desc) {
  PolicyTokens t = policy_tokens();
  t.weight[t.weight.size() - 3] *= 1e-9;  // beyond the clamps, where the ratio is e^20 as well
  const auto loss = [&](const Variable& lp) {
    return policy_loss_of_log_probs(
        lp,
        {{constant(t.old_logprob, lp), constant(t.ref_logprob, lp),
          constant(std::vector<double>(t.weight.size(), 0), lp), constant(t.weight, lp)}},
        desc);
  };
  const Variable kl = loss(logprob);
  const std::vector<double> lp = logprob.value().to(DType::kF64).to(Device{}).to_vector<double>();
  for (size_t i = 0; i < lp.size(); ++i)
    if (t.weight[i] > 0) t.weight[i] *= std::exp(std::clamp(lp[i] - t.old_logprob[i], -20.0, 20.0));
  return make_node("policy_loss", loss(Variable(logprob.value())).value(), {kl},
                   [](const Tensor& dy, Gradients& g) { g.pass(0, dy); });
}

// Choices that couple the tokens of a sequence or weigh them, over tokens in every region of the
// clip, in sequences with one advantage and weight each.
void add_sequence_losses(Table& table) {
  using kernels::RatioLevel, kernels::Importance;
  struct Row {
    const char* variant;
    kernels::PolicyLossDesc desc;
    double distance = 0;  // old_distance_coef
  };
  for (const Row& row :
       {Row{"GSPO", {.level = RatioLevel::kSequence}},
        Row{"GSPO, clipped",
            {.epsilon_low = 0.05, .epsilon_high = 0.05, .level = RatioLevel::kSequence}},
        Row{"GMPO", {.epsilon_low = 0.4, .epsilon_high = 0.4, .level = RatioLevel::kClipped}},
        Row{"KL-Cov", {}, 0.7},
        Row{"SAPO of sequences", {.surrogate = Surrogate::kSapo, .level = RatioLevel::kSequence}},
        Row{"GSPO and KL", {.beta = 0.3, .level = RatioLevel::kSequence}},
        Row{"truncated importance weights",
            {.importance = Importance::kTruncate, .importance_max = 1.3}},
        Row{"importance mask",
            {.importance = Importance::kMask, .importance_min = 0.9, .importance_max = 1.35}},
        Row{"importance mask of sequences",
            {.importance = Importance::kReject,
            .importance_level = kernels::ImportanceLevel::kGeometric,
            .importance_min = 0.95,
            .importance_max = 1.4}},
        Row{"product of importance weights",
            {.importance = Importance::kTruncate,
            .importance_level = kernels::ImportanceLevel::kSequence,
            .importance_max = 1.3}},
        Row{"trust region",
            {.trust_region = kernels::TrustRegion::kTv, .trust_low = 0.1, .trust_high = 0.1}},
        Row{"squared log ratio to the sampler", {.old_kl_coef = 0.4}},
        Row{"off-policy mask", {.off_policy_mask = 0.1}}}) {
    const std::vector<int32_t> segments = {0, 0, 0, 1, 1, 3, 3, 3, 4};
    PolicyTokens t;
    std::vector<double> sampling, distance;
    for (const double ratio_log : {0.3, -0.1, 0.5, -0.6, 0.1, -0.1, 0.02, 0.4, 0.9}) {
      const size_t i = sampling.size();
      t.add(ratio_log, 0.2 - 0.1 * static_cast<double>(i), segments[i] % 2 == 0 ? 0.8 : -1.2,
            0.2 + 0.1 * segments[i]);
      sampling.push_back(t.old_logprob[i] + 0.15 - 0.07 * static_cast<double>(i));
      distance.push_back(i % 3 == 0 ? 0 : row.distance);
    }
    table.push_back({"policy_loss", row.variant, near(t.logprob), [=](Inputs in) {
                       return policy_loss_of_log_probs(
                           in[0],
                           {{.old_logprob = constant(t.old_logprob, in[0]),
                             .ref_logprob = constant(t.ref_logprob, in[0]),
                             .advantage = constant(t.advantage, in[0]),
                             .weight = constant(t.weight, in[0]),
                             .sampling_logprob = constant(sampling, in[0]),
                             .old_distance_coef = constant(distance, in[0])},
                            ids(segments, in[0])},
                           row.desc);
                     }});
  }
}

}  // namespace

void add_policy_loss(std::vector<OpCase>& table) {
  struct Row {
    const char* variant;
    kernels::PolicyLossDesc desc;
    bool reference;
  };
  for (const Row& row :
       {Row{"symmetric clip", {}, false},
        Row{"asymmetric clip", {.epsilon_low = 0.2, .epsilon_high = 0.28}, false},
        Row{"clip and KL", {.epsilon_low = 0.2, .epsilon_high = 0.28, .beta = 0.04}, true},
        Row{"mostly KL", {.beta = 2}, true}, Row{"dual clip", {.dual_clip = 1.6}, false},
        Row{"two-sided clip", {.delta = 1.6}, false},
        Row{"CISPO", {.surrogate = Surrogate::kCispo}, false},
        Row{"REINFORCE", {.surrogate = Surrogate::kReinforce}, false},
        Row{"SAPO", {.surrogate = Surrogate::kSapo, .tau_neg = 2}, false},
        Row{"k1", {.beta = 0.5, .kl = KlEstimator::kK1}, true},
        Row{"k2", {.beta = 0.5, .kl = KlEstimator::kK2}, true},
        Row{"k1, unbiased", {.beta = 0.5, .kl = KlEstimator::kK1, .kl_unbiased = true}, true},
        Row{"k2, unbiased", {.beta = 0.5, .kl = KlEstimator::kK2, .kl_unbiased = true}, true},
        Row{"k3, unbiased", {.beta = 0.5, .kl_unbiased = true}, true}}) {
    table.push_back({"policy_loss", row.variant, near(policy_tokens().logprob), [row](Inputs in) {
                       PolicyTokens t = policy_tokens();
                       if (row.desc.surrogate == Surrogate::kCispo) hold_ratios(t, in[0]);
                       PolicyLossInputs constants{{constant(t.old_logprob, in[0]),
                                                   {},
                                                   constant(t.advantage, in[0]),
                                                   constant(t.weight, in[0])}};
                       if (row.reference) constants.ref_logprob = constant(t.ref_logprob, in[0]);
                       if (row.desc.kl_unbiased) return unbiased_kl(in[0], row.desc);
                       return policy_loss_of_log_probs(in[0], constants, row.desc);
                     }});
  }
  add_sequence_losses(table);
  // The losses with the head: a KL, an entropy bonus, a ratio of sequences that spans chunks,
  // divergences from a teacher of another width, whose head has more rows.
  struct HeadRow {
    const char* variant;
    kernels::PolicyLossDesc desc;
    kernels::DivergenceDesc divergence = {KlEstimator::kK3};
  };
  std::vector<HeadRow> rows{
      {"with the head", {.epsilon_low = 0.99, .epsilon_high = 1000, .beta = 0.3}},
      {"entropy bonus", {.epsilon_low = 0.99, .epsilon_high = 1000, .entropy_coef = 0.7}},
      {"GSPO with the head",
       {.epsilon_low = 0.99,
        .epsilon_high = 1000,
        .level = kernels::RatioLevel::kSequence,
        .entropy_coef = 0.1}}};
  for (const auto& [variant, divergence] :
       {std::pair<const char*, kernels::DivergenceDesc>{"reverse KL", {KlEstimator::kReverse}},
        {"forward KL", {KlEstimator::kForward}},
        {"JSD", {KlEstimator::kJsd, 0.3}},
        {"reverse KL of four tokens", {KlEstimator::kReverse, 0.5, 4}}}) {
    rows.push_back({variant, rows[0].desc, divergence});
    rows.back().desc.kl = divergence.kind;
  }
  for (const HeadRow& row : rows)
    table.push_back(
        {"policy_loss", row.variant, inputs({{{7, 6}}, {{9, 6}}}), [row](Inputs in) {
           const auto matrix = [&](int64_t count, int64_t cols, double step) {
             std::vector<double> values(static_cast<size_t>(count * cols));
             for (size_t i = 0; i < values.size(); ++i)
               values[i] = 2 * std::sin(step * static_cast<double>(i));
             return constant(values, in[0]).reshape({count, cols}).to(in[0].value().dtype());
           };
           const auto constants = [&](double value) {
             return constant(std::vector<double>(7, value), in[0]);
           };
           PolicyLossInputs constants_of{{.old_logprob = constants(-2),
                                          .ref_logprob = constants(-3),
                                          .advantage = constants(0.5),
                                          .weight = constants(1)},
                                         ids({0, 0, 0, 1, 1, 1, 1}, in[0])};
           if (kernels::is_divergence(row.divergence.kind)) {
             constants_of.ref_logprob = {};
             constants_of.teacher = {matrix(7, 4, 1.3), matrix(11, 4, 0.7), {}, row.divergence};
           }
           return policy_loss_node(in[0], in[1], ids({2, 1, 0, 8, 8, 3, 5}, in[0]), constants_of,
                                   row.desc, {.temperature = 0.7, .chunk_tokens = 2});
         }});
}

}  // namespace cohort
