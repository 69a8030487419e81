#include "runs/replay.h"

#include <bit>
#include <cmath>
#include <filesystem>

#include "core/parallel.h"
#include "core/text.h"
#include "runs/journal.h"
#include "runs/run.h"
#include "sys/files.h"
#include "trainers/across_ranks.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;
using OnStep = std::function<void(const std::string& line)>;

// The stage that is replayed.
struct Target {
  TrainConfig config;
  std::string dir;  // its own
};

// Compares the steps of a rank with a journal, and stops the stage after the last one.
class Replay final : public StepJournal {
 public:
  Replay(const ReplayOptions& options, const Target& target, const OnStep& on_step,
         Communicator& comm, std::atomic<bool>& stop)
      : options_(options), target_(target), on_step_(on_step), comm_(comm), stop_(stop) {}
  void attach(DialogueOptions& dialogue) override {
    if (dialogue.environment != nullptr)
      dialogue.environment = &environment_.emplace(*dialogue.environment, record_);
  }
  bool has_scores() const override { return true; }
  void begin(const GrpoStep& step) override;
  void add(std::span<const Trajectory> completions, RewardSet::Scores& scores) override;
  void end(const GrpoStep& step, const ScoredRollouts& rollouts) override;
  // The completion that was asked for, on the rank that has it.
  std::optional<ReplayedCompletion>& completion() { return completion_; }

 private:
  // Notes a difference of completion `index`, or of the step as a whole (-1), unless there is one.
  void note(int64_t index, const std::string& text) {
    if (!found_.empty()) return;
    found_ = text;
    found_at_ = index;
  }
  // Notes if two values differ; `what` they are, in pieces.
  template <class T, class... What>
  void compare(int64_t index, const T& now, const T& then, const What&... what);
  void compare(const Trajectory& now, const RecordedCompletion& then);
  void check();
  std::string where(int64_t index) const;

  const ReplayOptions& options_;
  const Target& target_;
  const BatchConfig& batch_ = target_.config.batch;
  const OnStep& on_step_;
  Communicator& comm_;
  std::atomic<bool>& stop_;
  StepRecord record_;
  std::optional<ReplayedEnvironment> environment_;
  size_t count_ = 0;   // completions of the step so far
  double tokens_ = 0;  // sampled ones among them
  std::string found_;  // the first difference
  int64_t found_at_ = -1;
  std::optional<ReplayedCompletion> completion_;
};

template <class T, class... What>
void Replay::compare(int64_t index, const T& now, const T& then, const What&... what) {
  if constexpr (std::is_same_v<T, double>) {
    if (std::bit_cast<uint64_t>(now) != std::bit_cast<uint64_t>(then))
      note(index, str(what..., " ", with_bits(now), ", recorded ", with_bits(then)));
  } else if (now != then) {
    note(index, str(what..., " ", now, ", recorded ", then));
  }
}

void Replay::compare(const Trajectory& now, const RecordedCompletion& then) {
  for (size_t i = 0; i < std::min(now.tokens.size(), then.tokens.size()); ++i) {
    compare(now.index, now.tokens[i], then.tokens[i], "token ", i, ": id");
    compare(now.index, int{now.loss_mask[i]}, int{then.loss_mask[i]}, "token ", i, ": loss mask");
    compare(now.index, now.logprobs[i], then.logprobs[i], "token ", i, ": log-prob");
  }
  compare(now.index, now.tokens.size(), then.tokens.size(), "number of tokens");
  compare(now.index, now.prompt_length, then.prompt_length, "length of the prompt");
  compare(now.index, std::string(stop_reason_name(now.stop_reason)), then.stop_reason,
          "it ends by");
  compare(now.index, target_.config.rewards.size(), then.rewards.size(), "number of rewards");
}

std::string Replay::where(int64_t index) const {
  if (index < 0) return "";
  const int64_t prompts = batch_.prompts_per_step, size = batch_.num_generations,
                prompt = index / size, round = prompt / prompts;
  return str("prompt ", prompt % prompts, round > 0 ? str(" of refill round ", round) : "",
             ", completion ", index % size, ", ");
}

// Throws the first difference of all ranks on each of them.
void Replay::check() {
  double first = found_.empty() ? -HUGE_VAL : static_cast<double>(-found_at_);
  const double own = first;
  reduce_in_place(comm_, {&first}, Reduce::kMax);
  if (std::isinf(first)) return;
  throw ReplayDifference(first_text(
      comm_, own == first ? str("step ", record_.step, ": ", where(found_at_), found_) : ""));
}

void Replay::begin(const GrpoStep& step) {
  record_ = read_record(
      journal_path(target_.dir + "/journal", step.step + 1, comm_.rank(), comm_.size()));
  count_ = 0;
  tokens_ = 0;
  compare(-1, hex(weights_hash(step.learner.model())), hex(record_.weights_before),
          "the hash of the weights before it:");
  compare(-1, step.learning_rate, record_.learning_rate, "learning rate");
  compare(-1, step.config.grpo.beta, record_.beta, "beta");
  check();
}

void Replay::add(std::span<const Trajectory> completions, RewardSet::Scores& scores) {
  const size_t rewards = target_.config.rewards.size();
  scores.each.resize(rewards);
  scores.failed.resize(rewards);
  scores.first_error.resize(rewards);
  for (const Trajectory& t : completions) {
    const RecordedCompletion* recorded = record_.find(t.index);
    if (recorded == nullptr)
      note(t.index, "which the journal does not have");
    else
      compare(t, *recorded);
    if (!found_.empty()) break;
    for (size_t k = 0; k < rewards; ++k) scores.each[k].push_back(recorded->rewards[k]);
    scores.total.push_back(recorded->total);
    tokens_ += static_cast<double>(t.completion_length());
  }
  count_ += completions.size();
  check();
}

void Replay::end(const GrpoStep& step, const ScoredRollouts& rollouts) {
  const bool is_last = record_.step == options_.step;
  const std::vector<std::string>& names = step.rewards.names();
  compare(-1, rollouts.advantages.size(), record_.advantages.size(), "number of advantages");
  for (size_t i = 0; found_.empty() && i < rollouts.trajectories.size(); ++i) {
    const Trajectory& t = rollouts.trajectories[i];
    compare(t.index, rollouts.advantages[i], record_.advantages[i], "advantage");
    if (!is_last || t.index / batch_.num_generations != options_.prompt ||
        t.index % batch_.num_generations != options_.completion)
      continue;
    completion_ = {t, {}, rollouts.advantages[i], nullptr};
    for (size_t k = 0; k < names.size(); ++k)
      completion_->rewards.emplace_back(names[k], rollouts.scores.each[k][i]);
    completion_->rewards.emplace_back("total", rollouts.scores.total[i]);
  }
  check();  // first: completions explain what follows
  compare(-1, count_, record_.completions.size(), "number of completions");
  compare(-1, hex(weights_hash(step.learner.model())), hex(record_.weights_after),
          "the hash of the weights after it:");
  check();
  const std::vector<double> sums = reduce_over_ranks(comm_, {static_cast<double>(count_), tokens_});
  if (comm_.rank() == 0)
    on_step_(str("step ", record_.step, ": equal: ", sums[0], " rollouts, ", sums[1],
                 " tokens, log-probs, advantages, update"));
  if (is_last) stop_ = true;
}

Target find_target(const std::string& run) {
  fs::path dir = fs::absolute(run).lexically_normal();
  if (!dir.has_filename()) dir = dir.parent_path();
  const bool is_run = path_exists(dir / "config.yaml");
  const std::string top = is_run ? dir : dir.parent_path();
  if (!path_exists(top + "/config.yaml"))
    throw InputError(str("replay: ", run,
                         " is no run: it has no config.yaml; hint: give the directory that "
                         "`cohort train` printed"));
  const RunPlan plan = load_plan(top + "/config.yaml", {});
  for (size_t i = plan.stages.size(); i-- > 0;) {
    Target out{plan.stages[i], stage_directory(plan, top, i)};
    if (out.config.batch.trainer != TrainerType::kGrpo || (!is_run && out.dir != dir)) continue;
    if (i > 0) out.config.init_from = stage_directory(plan, top, i - 1);
    return out;
  }
  throw InputError(str("replay: ", run, " has no stage with trainer: grpo"));
}

// The steps that the journal of a stage has without a gap from a checkpoint on, with their numbers
// of ranks.
std::map<int64_t, int64_t> replayable_steps(const std::string& dir) {
  std::map<int64_t, int64_t> out;
  for (const auto& [step, ranks] : list_journal(dir + "/journal")) {
    const auto before = out.find(step - 1);
    if (step == 1 || path_exists(checkpoint_path(dir + "/checkpoints", step - 1)) ||
        (before != out.end() && before->second == ranks))
      out[step] = ranks;
  }
  return out;
}

// "3 to 7, 9".
std::string text_of(const std::map<int64_t, int64_t>& steps) {
  std::vector<std::string> ranges;
  int64_t first = 0;
  for (const auto& [step, ranks] : steps) {
    if (!steps.contains(step - 1)) first = step;
    if (!steps.contains(step + 1))
      ranges.push_back(first == step ? str(step) : str(first, " to ", step));
  }
  return join(ranges, ", ");
}

// The number of ranks of a step. Throws InputError unless it can be replayed.
int64_t check_step(const std::string& dir, int64_t step) {
  const std::map<int64_t, int64_t> steps = replayable_steps(dir);
  if (const auto found = steps.find(step); found != steps.end()) return found->second;
  throw InputError(str("--step ", step, ": ", dir,
                       "/journal does not have this step and all before it from a checkpoint on; ",
                       steps.empty() ? "no step can be replayed; hint: journal_mb above 0"
                                     : "these can be replayed: " + text_of(steps)));
}

void check_range(const char* name, std::optional<int64_t> value, int64_t count) {
  if (value && (*value < 0 || *value >= count))
    throw InputError(str(name, " ", *value, ": a step has 0 to ", count - 1));
}

}  // namespace

std::string with_bits(double x) {
  return str(format_double(x), " (", hex(std::bit_cast<uint64_t>(x)), ")");
}

std::optional<ReplayedCompletion> replay_run(const ReplayOptions& options, const OnStep& on_step) {
  Target target = find_target(options.run);
  TrainConfig& config = target.config;
  const std::string& dir = target.dir;
  const int64_t ranks = check_step(dir, options.step);
  // A run that is extended later has another schedule then.
  config.batch.steps =
      read_record(journal_path(dir + "/journal", options.step, 0, ranks)).planned_steps;
  config.eval.sets.clear();
  for (RewardConfig& reward : config.rewards)  // functions of the run's host, which are not called
    if (std::ranges::none_of(reward_table(), [&](const auto& r) { return reward.name == r.name; }))
      reward.function = std::make_shared<const HostReward>();
  if (config.environment.is_set())
    config.environment.function = std::make_shared<const HostEnvironment>();
  check_range("--prompt", options.prompt, config.batch.prompts_per_step);
  check_range("--completion", options.completion, config.batch.num_generations);
  const Device device = parse_device(config.device, "device");
  if (device.is_cuda() && ranks > 1)
    throw InputError(str("--step ", options.step, ": the journal is of ", ranks,
                         " ranks with a GPU each, and a replay has one; hint: steps of runs on "
                         "one GPU can be replayed"));
  if (config.num_threads > 0) set_num_threads(static_cast<int>(config.num_threads));
  Reporter silent;
  std::atomic<bool> stop{false};
  std::optional<ReplayedCompletion> completion;
  run_local_ranks(static_cast<int>(ranks), [&](Communicator& comm) {
    Replay replay(options, target, on_step, comm, stop);
    Stage stage({.config = config,
                 .dir = dir,
                 .comm = comm,
                 .reporter = silent,
                 .stop = stop,
                 .device = device,
                 .before = checkpoint_path(dir + "/checkpoints", options.step),
                 .replay = &replay});
    train_grpo(stage);
    COHORT_CHECK(stage.step() == options.step, "[replay] it has ended after step ", stage.step());
    if (!replay.completion()) return;  // another rank has it, or none is asked for
    completion = std::move(replay.completion());
    completion->tokenizer = std::move(stage.data().tokenizer);
  });
  return completion;
}

}  // namespace cohort
