#include "trainers/grpo_monitor.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <numeric>
#include <utility>

namespace cohort {
namespace {

constexpr int64_t kIdleSteps = 10;  // steps in which most groups have zero variance
constexpr double kIdleFraction = 0.9;
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

// The mean of the last two of four values less that of the first two, in its standard errors.
double rise_in_errors(const std::deque<double>& values, const std::deque<double>& errors) {
  double squares = 0;
  for (const double e : errors) squares += e * e;
  return (values[2] + values[3] - values[0] - values[1]) / std::sqrt(squares);
}

}  // namespace

void GrpoMonitor::Window::add(double value) {
  if (std::isnan(value)) return;
  values.push_back(value);
  if (values.size() > size) values.pop_front();
}

double GrpoMonitor::Window::mean() const {
  double sum = 0;
  for (const double v : values) sum += v;
  return sum / static_cast<double>(values.size());
}

double GrpoMonitor::Window::deviation() const {
  double squares = 0;
  for (const double v : values) squares += (v - mean()) * (v - mean());
  return std::sqrt(squares / static_cast<double>(values.size() - 1));
}

double GrpoMonitor::Window::median() const {
  std::vector<double> sorted(values.begin(), values.end());
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  return *middle;
}

double GrpoMonitor::Window::first_mean() const {
  return std::accumulate(values.begin(), values.begin() + kWindow, 0.0) / kWindow;
}

double GrpoMonitor::Window::last_mean() const {
  return std::accumulate(values.end() - kWindow, values.end(), 0.0) / kWindow;
}

GrpoMonitor::GrpoMonitor(const GrpoConfig& config, const Json& saved) : config_(config) {
  if (!saved.is_object()) return;
  // Earlier versions did not write all of them.
  for (const auto& [key, number] : numbers_of(*this))
    if (const Json* found = saved.find(key)) *number = number_or_nan(*found);
  if (const Json* steps = saved.find("zero_signal_steps")) zero_signal_steps_ = steps->as_int();
  for (const auto& [key, window] : windows_of(*this))
    if (const Json* values = saved.find(key))
      for (const Json& v : values->as_array()) window->add(v.as_double());
  for (const Json& name : saved.at("faults").as_array())
    active_diagnostics_.insert(name.as_string());
}

Json GrpoMonitor::state() const {
  const auto list = [](const auto& values) { return Json::Array(values.begin(), values.end()); };
  Json out;
  for (const auto& [key, number] : numbers_of(*this)) out.set(key, *number);
  out.set("zero_signal_steps", zero_signal_steps_);
  for (const auto& [key, window] : windows_of(*this)) out.set(key, list(window->values));
  return out.set("faults", list(active_diagnostics_));
}

std::vector<std::string> GrpoMonitor::observe(const Metrics& metrics,
                                              const EvaluationScore& score) {
  warnings_.clear();
  const auto value = [&](const char* name) { return metrics.find(name).value_or(kUnknown); };
  reward_.add(metrics.at("reward"));
  entropy_.add(metrics.at("entropy"));
  clipped_.add(metrics.at("clip_ratio/low") + metrics.at("clip_ratio/high"));
  kl_old_.add(value("kl_old"));
  truncated_.add(metrics.at("completions/clipped_ratio"));
  context_.add(value("completions/context_ratio"));
  rewards_.add(metrics.at("reward"));
  lengths_.add(value("completions/mean_length"));
  highest_ = std::fmax(highest_, value("reward_max"));
  lowest_ = std::fmin(lowest_, value("reward_min"));
  check_evaluations(score);
  check_reward();
  check_entropy();
  check_lengths_and_clips();
  check_length_change();
  // During warm-up the policy leaves the reference faster and faster.
  const double rate = value("learning_rate");
  if (!(rate > learning_rate_)) check_spike("kl", kl_, value("kl"));
  learning_rate_ = rate;
  check_spike("grad_norm", grad_norms_, value("grad_norm"));
  check_signal(metrics.at("frac_reward_zero_std"));
  return warnings_;
}

// By the last evaluation, or relative to the lowest and highest reward so far if they differ.
bool GrpoMonitor::is_solved() const {
  if (pass_at_1_ >= kSolvedFraction) return true;
  return !reward_.values.empty() && highest_ > lowest_ &&
         reward_.mean() - lowest_ >= kSolvedFraction * (highest_ - lowest_);
}

void GrpoMonitor::set_diagnostic(const char* name, bool active, const std::string& warning) {
  if (!active)
    active_diagnostics_.erase(name);
  else if (active_diagnostics_.insert(name).second)
    warnings_.push_back(warning);
}

void GrpoMonitor::check_reward() {
  if (!reward_.full()) return;
  const double mean = reward_.mean(), deviation = reward_.deviation();
  if (!(mean <= best_reward_)) {
    best_reward_ = mean;
    best_deviation_ = deviation;
  }
  const double fall = best_reward_ - mean;
  set_diagnostic(
      "reward",
      fall > std::abs(best_reward_) / 2 && fall > kNoise * std::max(deviation, best_deviation_),
      str("the reward has collapsed: ", short_number(mean), " over the last ", kWindow,
          " steps, after ", short_number(best_reward_),
          " at best; hint: a lower learning_rate, or ",
          config_.beta > 0 ? "a larger beta" : "beta above 0", " to stay near the start"));
}

// Low entropy is expected of a policy that solves its problems.
void GrpoMonitor::check_entropy() {
  if (!entropy_.full()) return;
  const double mean = entropy_.mean();
  if (std::isnan(first_entropy_)) first_entropy_ = mean;
  set_diagnostic(
      "entropy_explosion",
      mean >= std::max(kEntropyFactor * first_entropy_, first_entropy_ + kEntropyRise),
      str("the entropy has exploded to ", short_number(mean), " nats per token (at first ",
          short_number(first_entropy_), "): completions become random; hint: a lower learning_rate",
          config_.entropy_coef > 0 ? ", a smaller entropy_coef" : "", " or ",
          config_.beta > 0 ? "a larger beta" : "beta above 0"));
  // Clipping affects only ratios other than 1.
  const bool clips = config_.updates_per_step() > 1 && config_.epsilon_high.value_or(0) < 0.28 &&
                     config_.surrogate == kernels::Surrogate::kClip;
  set_diagnostic(
      "entropy",
      mean < std::max(kInitialEntropyFraction * first_entropy_, kEntropyFloor) && !is_solved(),
      str("the entropy has collapsed to ", short_number(mean), " nats per token (at first ",
          short_number(first_entropy_),
          "): completions of a prompt hardly differ any more; hint: a lower learning_rate",
          clips ? ", a higher temperature, or epsilon_high: 0.28" : " or a higher temperature"));
  set_diagnostic(
      "low_entropy",
      rewards_.full() && mean < kLowEntropy && !is_solved() &&
          !active_diagnostics_.contains("entropy") &&
          std::abs(rewards_.last_mean() - rewards_.first_mean()) <=
              kFlatFraction * (highest_ - lowest_),
      str("the entropy is ", short_number(mean),
          " nats per token, and the reward has not moved for ", kLongWindow - kWindow, " steps (",
          short_number(rewards_.last_mean()),
          "): samples hardly differ, so little is learned; hint: a higher temperature, an earlier "
          "checkpoint with a lower learning_rate, or other problems"));
}

void GrpoMonitor::check_lengths_and_clips() {
  const auto percent = [](double fraction) { return str(short_number(100 * fraction), " %"); };
  // Bounds for ratios of sequences are so narrow that clipping is normal; other losses have none.
  const bool by_clip = config_.importance_sampling_level == kernels::RatioLevel::kToken &&
                       (config_.surrogate == kernels::Surrogate::kClip ||
                        config_.surrogate == kernels::Surrogate::kCispo);
  const Window& moved = by_clip ? clipped_ : kl_old_;
  if (moved.full())
    set_diagnostic(
        "clipped", moved.mean() > (by_clip ? kClippedTokenFraction : kOldKl),
        str(by_clip ? str("the ratios of ", percent(moved.mean()), " of the tokens are clipped")
                    : str("the KL of the policy to the one that sampled is ",
                          short_number(moved.mean()), " nats per token"),
            ": the policy moves far within one step; hint: a lower learning_rate, or fewer "
            "num_iterations and num_minibatches"));
  const char* mask =
      config_.mask_truncated_completions ? "" : ", or mask_truncated_completions: true";
  if (truncated_.full())
    set_diagnostic("truncated", truncated_.mean() > kTruncatedFraction,
                   str(percent(truncated_.mean()),
                       " of the completions end at the length limit, without a stop token; hint: a "
                       "larger max_completion_length, stop_tokens that the model writes",
                       mask));
  if (context_.full())
    set_diagnostic("context", context_.mean() > kTruncatedFraction,
                   str(percent(context_.mean()),
                       " of the completions end where the model's context is full; hint: shorter "
                       "prompts, a model with a larger context",
                       mask));
}

void GrpoMonitor::check_length_change() {
  if (!lengths_.full()) return;
  const double before = lengths_.first_mean(), now = lengths_.last_mean();
  const auto set = [&](const char* name, bool active, const char* what, const char* hint) {
    set_diagnostic(name, active && std::abs(now - before) >= kLengthChange,
                   str("the completions' mean length has ", what, " within ", kLongWindow - kWindow,
                       " steps, from ", short_number(before), " to ", short_number(now),
                       " tokens; hint: look at completions.jsonl: ", hint));
  };
  set("longer", now >= kLengthFactor * before, "doubled",
      "if they ramble, add a reward that limits the length, or check stop_tokens");
  set("shorter", now * kLengthFactor <= before, "halved",
      "if they skip the reasoning, check what the rewards pay for, or lower learning_rate");
}

// Compares a value with the median of the earlier ones, which it then joins.
void GrpoMonitor::check_spike(const char* metric, Window& earlier, double value) {
  if (earlier.values.size() >= kFewValues) {
    const double median = earlier.median();
    set_diagnostic(metric, median > 0 && value > kSpike * median,
                   str(metric, " is ", short_number(value), ", over ", kSpike,
                       " times its median of the last ", earlier.values.size(), " steps (",
                       short_number(median),
                       "): an update that may undo what was learned; hint: a lower learning_rate "
                       "or a lower max_grad_norm"));
  }
  earlier.add(value);
}

// Remembers an evaluation that is new. A fall and a rise are more than noise.
void GrpoMonitor::check_evaluations(const EvaluationScore& score) {
  pass_at_1_ = score.value;
  const size_t steps = rewards_.values.size();
  if (std::isnan(score.value + score.error) || score.step == score_step_ || steps < 2) return;
  score_step_ = score.step;
  scores_.add(score.value);
  score_errors_.add(score.error);
  score_rewards_.add(rewards_.mean());
  score_reward_errors_.add(rewards_.deviation() / std::sqrt(static_cast<double>(steps)));
  const auto& scores = scores_.values;
  set_diagnostic(
      "overfit",
      score_reward_errors_.full() &&
          std::ranges::adjacent_find(scores, std::less_equal<>()) == scores.end() &&
          rise_in_errors(scores, score_errors_.values) < -kFallOfScores &&
          rise_in_errors(score_rewards_.values, score_reward_errors_.values) > kRiseOfRewards,
      str("the reward rises while three evaluations in a row were lower than the one before (",
          short_number(scores.front()), " to ", short_number(scores.back()),
          "): the policy learns the training problems or the reward's weaknesses; hint: keep the "
          "best checkpoint, more problems, or ",
          config_.beta > 0 ? "a larger beta" : "beta above 0"));
}

void GrpoMonitor::check_signal(double zero_signal_fraction) {
  if (std::isnan(zero_signal_fraction)) return;
  zero_signal_steps_ = zero_signal_fraction > kIdleFraction ? zero_signal_steps_ + 1 : 0;
  const auto mean_of = [](const Window& window) {
    return window.values.empty() ? 0 : window.mean();
  };
  const bool all_masked =
      config_.mask_truncated_completions && mean_of(truncated_) + mean_of(context_) > kAllTruncated;
  const std::string why =
      all_masked
          ? str("no update has been made for ", zero_signal_steps_,
                " steps: all completions are truncated, and mask_truncated_completions leaves them "
                "out; hint: a larger max_completion_length, stop_tokens or stop_strings that the "
                "model writes, or supervised training first")
          : str(zero_signal_fraction == 1 ? "no group has" : "fewer than 10 % of the groups have",
                " a signal for ", zero_signal_steps_,
                " steps: the completions of each prompt all get the same reward (",
                short_number(mean_of(reward_)), " on average), ",
                is_solved() ? "the best; hint: the problems are solved, train on harder ones"
                            : "so nothing is learned; hint: easier problems, more num_generations, "
                              "supervised training first, or a reward for partial progress");
  set_diagnostic("silent", zero_signal_steps_ >= kIdleSteps, why);
}

}  // namespace cohort
