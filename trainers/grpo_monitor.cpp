#include "trainers/grpo_monitor.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

namespace cohort {
namespace {

constexpr size_t kWindow = 5;       // steps
constexpr size_t kLongWindow = 25;  // its first and its last kWindow are compared
constexpr size_t kMedianWindow = 50;
constexpr size_t kEvaluations = 4;
constexpr int64_t kZeroSignalSteps = 10;  // steps in which most groups have zero variance
constexpr double kZeroSignalFraction = 0.9;
constexpr double kSpike = 10;                            // times the running median
constexpr size_t kFewValues = 10;                        // a median needs as many
constexpr double kLengthFactor = 2, kLengthChange = 16;  // tokens at least
constexpr double kLowEntropy = 0.05, kFlatFraction = 0.01;
constexpr double kClippedTokenFraction = 0.05, kOldKl = 0.05;  // nats per token
constexpr double kTruncatedFraction = 0.2, kAllTruncated = 0.999;
constexpr double kInitialEntropyFraction = 0.05, kEntropyFloor = 0.005;  // nats per token
constexpr double kEntropyFactor = 2, kEntropyRise = 1;
// Position between the lowest and the highest reward, or pass@1.
constexpr double kSolvedFraction = 0.9;
constexpr double kNoise = 3;                               // minimum drop in standard deviations
constexpr double kFallOfScores = 2, kRiseOfRewards = 1.5;  // standard errors

std::string short_number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", value);
  return text;
}

std::string percent(double fraction) {
  return str(short_number(100 * fraction), " %");
}

// The mean of the last two of four values less that of the first two, in its standard errors.
double rise_in_errors(const std::deque<double>& values, const std::deque<double>& errors) {
  double squares = 0;
  for (const double e : errors) squares += e * e;
  return (values[2] + values[3] - values[0] - values[1]) / std::sqrt(squares);
}

}  // namespace

void GrpoMonitor::History::add(double value) {
  is_measured_ = !std::isnan(value);
  if (!is_measured_) return;
  values_.push_back(value);
  if (values_.size() > kMedianWindow + 1) values_.pop_front();
}

double GrpoMonitor::History::mean(size_t steps, size_t skipped) const {
  if (values_.size() < steps + skipped) return kUnknown;
  const auto end = values_.end() - static_cast<std::ptrdiff_t>(skipped);
  const auto begin = end - static_cast<std::ptrdiff_t>(steps);
  return std::accumulate(begin, end, 0.0) / static_cast<double>(steps);
}

double GrpoMonitor::History::deviation(size_t steps) const {
  const double center = mean(steps);
  if (std::isnan(center)) return kUnknown;
  double squares = 0;
  for (size_t i = values_.size() - steps; i < values_.size(); ++i)
    squares += (values_[i] - center) * (values_[i] - center);
  return std::sqrt(squares / static_cast<double>(steps - 1));
}

const std::vector<GrpoMonitor::Diagnostic>& GrpoMonitor::diagnostics() {
  using M = GrpoMonitor;
  static const std::vector<Diagnostic> kDiagnostics = {
      {"overfit", &M::overfitting},
      {"reward", &M::reward_collapse},
      {"entropy_explosion", &M::entropy_explosion},
      {"entropy", &M::entropy_collapse},
      {"low_entropy", &M::low_entropy},
      {"clipped", &M::large_updates},
      {"truncated",
       [](const M& m) {
         return m.truncation("truncated", "end at the length limit, without a stop token",
                             "a larger max_completion_length, stop_tokens that the model writes");
       }},
      {"context",
       [](const M& m) {
         return m.truncation("context", "end where the model's context is full",
                             "shorter prompts, a model with a larger context");
       }},
      {"longer",
       [](const M& m) {
         return m.length_change(
             kLengthFactor, "doubled",
             "if they ramble, add a reward that limits the length, or check stop_tokens");
       }},
      {"shorter",
       [](const M& m) {
         return m.length_change(
             1 / kLengthFactor, "halved",
             "if they skip the reasoning, check what the rewards pay for, or lower learning_rate");
       }},
      {"kl", [](const M& m) { return m.spike("kl"); }},
      {"grad_norm", [](const M& m) { return m.spike("grad_norm"); }},
      {"zero_signal", &M::zero_signal}};
  return kDiagnostics;
}

GrpoMonitor::GrpoMonitor(const GrpoConfig& config, const Json& saved) : config_(config) {
  for (const char* name :
       {"reward", "entropy", "clipped", "kl_old", "truncated", "context", "length", "kl",
        "grad_norm", "score", "score_error", "score_reward", "score_reward_error"})
    histories_[name];
  for (const char* name : {"best_reward", "best_deviation", "first_entropy", "highest", "lowest",
                           "learning_rate", "score_step", "zero_signal"})
    numbers_[name] = kUnknown;
  numbers_["zero_signal_steps"] = 0;  // latest steps in a row in which most groups have none
  if (!saved.is_object()) return;
  // Earlier versions did not write all of them, wrote histories beside the numbers, the longer one
  // of two under a plural, and called zero_signal "silent".
  for (auto& [name, number] : numbers_)
    if (const Json* found = saved.find(name)) number = number_or_nan(*found);
  const Json* histories = saved.find("histories");
  if (histories == nullptr) histories = &saved;
  for (auto& [name, history] : histories_) {
    const Json* values = histories->find(name + "s");
    if (values == nullptr) values = histories->find(name);
    if (values == nullptr) continue;
    for (const Json& v : values->as_array()) history.add(v.as_double());
  }
  for (const Json& name : saved.at("faults").as_array())
    active_.insert(name.as_string() == "silent" ? "zero_signal" : name.as_string());
}

Json GrpoMonitor::state() const {
  const auto list = [](const auto& values) { return Json::Array(values.begin(), values.end()); };
  Json out, histories;
  for (const auto& [name, number] : numbers_) out.set(name, number);
  for (const auto& [name, history] : histories_) histories.set(name, list(history.values()));
  return out.set("histories", std::move(histories)).set("faults", list(active_));
}

std::vector<std::string> GrpoMonitor::observe(const Metrics& metrics,
                                              const EvaluationScore& score) {
  const auto value = [&](const char* name) { return metrics.find(name).value_or(kUnknown); };
  histories_["reward"].add(metrics.at("reward"));
  histories_["entropy"].add(metrics.at("entropy"));
  histories_["clipped"].add(metrics.at("clip_ratio/low") + metrics.at("clip_ratio/high"));
  histories_["kl_old"].add(value("kl_old"));
  histories_["truncated"].add(metrics.at("completions/clipped_ratio"));
  histories_["context"].add(value("completions/context_ratio"));
  histories_["length"].add(value("completions/mean_length"));
  histories_["grad_norm"].add(value("grad_norm"));
  // During warm-up the policy leaves the reference faster and faster.
  if (!(value("learning_rate") > numbers_["learning_rate"])) histories_["kl"].add(value("kl"));
  update_extremes(metrics);
  add_evaluation(score);
  std::vector<std::string> out;
  for (const Diagnostic& diagnostic : diagnostics()) {
    std::string warning = diagnostic.warning(*this);
    if (warning.empty())
      active_.erase(diagnostic.name);
    else if (active_.insert(diagnostic.name).second)
      out.push_back(std::move(warning));
  }
  return out;
}

void GrpoMonitor::update_extremes(const Metrics& metrics) {
  const auto value = [&](const char* name) { return metrics.find(name).value_or(kUnknown); };
  numbers_["learning_rate"] = value("learning_rate");
  numbers_["highest"] = std::fmax(numbers_["highest"], value("reward_max"));
  numbers_["lowest"] = std::fmin(numbers_["lowest"], value("reward_min"));
  const double reward = history("reward").mean(kWindow);
  if (!std::isnan(reward) && !(reward <= numbers_["best_reward"])) {
    numbers_["best_reward"] = reward;
    numbers_["best_deviation"] = history("reward").deviation(kWindow);
  }
  if (std::isnan(numbers_["first_entropy"]))
    numbers_["first_entropy"] = history("entropy").mean(kWindow);
  const double zero_signal = metrics.at("frac_reward_zero_std");
  if (std::isnan(zero_signal)) return;
  double& steps = numbers_["zero_signal_steps"];
  steps = zero_signal > kZeroSignalFraction ? steps + 1 : 0;
  numbers_["zero_signal"] = std::fmin(steps > 1 ? numbers_["zero_signal"] : 1, zero_signal);
}

// Remembers an evaluation that is new, and the mean reward at its step.
void GrpoMonitor::add_evaluation(const EvaluationScore& score) {
  pass_at_1_ = score.value;
  const History& reward = history("reward");
  const size_t steps = std::min(reward.values().size(), kLongWindow);
  if (std::isnan(score.value + score.error) || score.step == numbers_["score_step"] || steps < 2)
    return;
  numbers_["score_step"] = score.step;
  histories_["score"].add(score.value);
  histories_["score_error"].add(score.error);
  histories_["score_reward"].add(reward.mean(steps));
  histories_["score_reward_error"].add(reward.deviation(steps) /
                                       std::sqrt(static_cast<double>(steps)));
}

double GrpoMonitor::recent_mean(const char* metric) const {
  const size_t steps = std::min(history(metric).values().size(), kWindow);
  return steps == 0 ? 0 : history(metric).mean(steps);
}

// By the last evaluation, or relative to the lowest and highest reward so far if they differ.
bool GrpoMonitor::is_solved() const {
  if (pass_at_1_ >= kSolvedFraction) return true;
  const double lowest = numbers_.at("lowest"), highest = numbers_.at("highest");
  return !history("reward").values().empty() && highest > lowest &&
         recent_mean("reward") - lowest >= kSolvedFraction * (highest - lowest);
}

std::string GrpoMonitor::larger_beta() const {
  return config_.beta > 0 ? "a larger beta" : "beta above 0";
}

std::string GrpoMonitor::reward_collapse() const {
  const History& reward = history("reward");
  const double mean = reward.mean(kWindow), best = numbers_.at("best_reward");
  const double noise = std::max(reward.deviation(kWindow), numbers_.at("best_deviation"));
  if (!(best - mean > std::abs(best) / 2 && best - mean > kNoise * noise)) return "";
  return str("the reward has collapsed: ", short_number(mean), " over the last ", kWindow,
             " steps, after ", short_number(best), " at best; hint: a lower learning_rate, or ",
             larger_beta(), " to stay near the start");
}

std::string GrpoMonitor::entropy_explosion() const {
  const double mean = history("entropy").mean(kWindow), first = numbers_.at("first_entropy");
  if (!(mean >= std::max(kEntropyFactor * first, first + kEntropyRise))) return "";
  return str("the entropy has exploded to ", short_number(mean), " nats per token (at first ",
             short_number(first), "): completions become random; hint: a lower learning_rate",
             config_.entropy_target     ? ", a smaller entropy_target"
             : config_.entropy_coef > 0 ? ", a smaller entropy_coef"
                                        : "",
             " or ", larger_beta());
}

// Low entropy is expected of a policy that solves its problems.
std::string GrpoMonitor::entropy_collapse() const {
  const double mean = history("entropy").mean(kWindow), first = numbers_.at("first_entropy");
  const bool low = mean < std::max(kInitialEntropyFraction * first, kEntropyFloor);
  if (!low || is_solved()) return "";
  // Clipping affects only ratios other than 1.
  const bool clips = config_.updates_per_step() > 1 &&
                     config_.epsilon_high.value_or(config_.epsilon) < 0.28 &&
                     config_.surrogate == kernels::Surrogate::kClip &&
                     config_.importance_sampling_level == kernels::RatioLevel::kToken;
  return str("the entropy has collapsed to ", short_number(mean), " nats per token (at first ",
             short_number(first),
             "): completions of a prompt hardly differ any more; hint: a lower learning_rate",
             clips ? ", a higher temperature, or epsilon_high: 0.28" : " or a higher temperature");
}

std::string GrpoMonitor::low_entropy() const {
  const History& reward = history("reward");
  const double mean = history("entropy").mean(kWindow), now = reward.mean(kWindow);
  const double change = std::abs(now - reward.mean(kWindow, kLongWindow - kWindow));
  const bool flat = change <= kFlatFraction * (numbers_.at("highest") - numbers_.at("lowest"));
  if (!(mean < kLowEntropy && flat) || is_solved() || active_.contains("entropy")) return "";
  return str("the entropy is ", short_number(mean),
             " nats per token, and the reward has not moved for ", kLongWindow - kWindow,
             " steps (", short_number(now),
             "): samples hardly differ, so little is learned; hint: a higher temperature, an "
             "earlier checkpoint with a lower learning_rate, or other problems");
}

std::string GrpoMonitor::large_updates() const {
  // Bounds for ratios of sequences are so narrow that clipping is normal; a trust region bounds
  // probabilities, and other losses have no bounds.
  const bool by_clip = config_.importance_sampling_level == kernels::RatioLevel::kToken &&
                       config_.trust_region == kernels::TrustRegion::kNone &&
                       entry_of(kSurrogates, config_.surrogate).clips;
  const double mean = history(by_clip ? "clipped" : "kl_old").mean(kWindow);
  if (!(mean > (by_clip ? kClippedTokenFraction : kOldKl))) return "";
  return str(by_clip ? str("the ratios of ", percent(mean), " of the tokens are clipped")
                     : str("the KL of the policy to the one that sampled is ", short_number(mean),
                           " nats per token"),
             ": the policy moves far within one step; hint: a lower learning_rate, or fewer "
             "num_iterations and num_minibatches");
}

std::string GrpoMonitor::truncation(const char* metric, const char* end, const char* hint) const {
  const double mean = history(metric).mean(kWindow);
  if (!(mean > kTruncatedFraction)) return "";
  return str(percent(mean), " of the completions ", end, "; hint: ", hint,
             config_.mask_truncated_completions ? "" : ", or mask_truncated_completions: true");
}

std::string GrpoMonitor::length_change(double factor, const char* change, const char* hint) const {
  const History& length = history("length");
  const double before = length.mean(kWindow, kLongWindow - kWindow), now = length.mean(kWindow);
  const bool changed = factor > 1 ? now >= factor * before : now <= factor * before;
  if (!changed || std::abs(now - before) < kLengthChange) return "";
  return str("the completions' mean length has ", change, " within ", kLongWindow - kWindow,
             " steps, from ", short_number(before), " to ", short_number(now),
             " tokens; hint: look at completions.jsonl: ", hint);
}

// Compares the last value with the median of the earlier ones.
std::string GrpoMonitor::spike(const char* metric) const {
  std::deque<double> earlier = history(metric).values();
  if (earlier.size() <= kFewValues || !history(metric).is_measured()) return "";
  const double value = earlier.back();
  earlier.pop_back();
  const auto middle = earlier.begin() + static_cast<std::ptrdiff_t>(earlier.size() / 2);
  std::nth_element(earlier.begin(), middle, earlier.end());
  if (!(*middle > 0 && value > kSpike * *middle)) return "";
  return str(metric, " is ", short_number(value), ", over ", kSpike,
             " times its median of the last ", earlier.size(), " steps (", short_number(*middle),
             "): an update that may undo what was learned; hint: a lower learning_rate, or a "
             "lower max_grad_norm above 0");
}

// A fall of the scores and a rise of the rewards that are more than noise.
std::string GrpoMonitor::overfitting() const {
  const auto latest = [&](const char* name) {
    const std::deque<double>& values = history(name).values();
    return std::deque<double>(values.end() - kEvaluations, values.end());
  };
  if (history("score_reward_error").values().size() < kEvaluations) return "";
  const std::deque<double> scores = latest("score");
  if (std::ranges::adjacent_find(scores, std::less_equal<>()) != scores.end() ||
      !(rise_in_errors(scores, latest("score_error")) < -kFallOfScores &&
        rise_in_errors(latest("score_reward"), latest("score_reward_error")) > kRiseOfRewards))
    return "";
  return str("the reward rises while three evaluations in a row were lower than the one before (",
             short_number(scores.front()), " to ", short_number(scores.back()),
             "): the policy learns the training problems or the reward's weaknesses; hint: keep "
             "the best checkpoint, more problems, or ",
             larger_beta());
}

std::string GrpoMonitor::zero_signal() const {
  if (config_.has_teacher() || config_.has_functions()) return "";  // which give one
  const auto steps = static_cast<int64_t>(numbers_.at("zero_signal_steps"));
  if (steps < kZeroSignalSteps || config_.baseline != Baseline::kGroup) return "";
  if (config_.mask_truncated_completions &&
      recent_mean("truncated") + recent_mean("context") > kAllTruncated)
    return str("no update has been made for ", steps,
               " steps: all completions are truncated, and mask_truncated_completions leaves them "
               "out; hint: a larger max_completion_length, stop_tokens or stop_strings that the "
               "model writes, or supervised training first");
  return str(
      numbers_.at("zero_signal") == 1 ? "no group has" : "fewer than 10 % of the groups have",
      " a signal for ", steps, " steps: the completions of each prompt all get the same reward (",
      short_number(recent_mean("reward")), " on average), ",
      is_solved() ? "the best; hint: the problems are solved, train on harder ones"
                  : "so nothing is learned; hint: easier problems, more num_generations, "
                    "supervised training first, or a reward for partial progress");
}

}  // namespace cohort
