#include "job/replay.h"

#include <bit>
#include <cmath>
#include <filesystem>

#include "core/parallel.h"
#include "core/text.h"
#include "job/journal.h"
#include "job/run.h"
#include "sys/files.h"
#include "trainers/across_ranks.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;
using OnStep = std::function<void(const std::string& line)>;

// The stage that is replayed.
struct Target {
  size_t stage;                // its position in the run
  std::string dir, init_from;  // its own; that of the stage before it, empty for the first
};

// Steps in a row that one configuration made.
struct Part {
  TrainConfig config;
  std::string plan;  // its text
  int64_t ranks, last;
};

// Compares the steps of a rank with a journal, and stops the stage after the last one.
class Replay final : public StepJournal {
 public:
  Replay(const ReplayOptions& options, const std::string& dir, const Part& part,
         const OnStep& on_step, Communicator& comm, std::atomic<bool>& stop)
      : options_(options), dir_(dir), part_(part), on_step_(on_step), comm_(comm), stop_(stop) {}
  void attach(DialogueOptions& dialogue) override {
    if (dialogue.environment != nullptr)
      dialogue.environment = &environment_.emplace(*dialogue.environment, record_);
  }
  bool has_scores() const override { return true; }
  bool updates_weights() const override { return !part_.config.grpo.has_functions(); }
  void begin(const GrpoStep& step) override;
  void add(std::span<Group> groups) override;
  void end(const GrpoStep& step, std::span<const Group> groups) override;
  // The completion that was asked for, on the rank that has it.
  std::optional<ReplayedCompletion> completion;

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
  const std::string& dir_;
  const Part& part_;
  const BatchConfig& batch_ = part_.config.batch;
  const OnStep& on_step_;
  Communicator& comm_;
  std::atomic<bool>& stop_;
  StepRecord record_;
  std::optional<ReplayedEnvironment> environment_;
  size_t count_ = 0;   // completions of the step so far
  double tokens_ = 0;  // sampled ones among them
  std::string found_;  // the first difference
  int64_t found_at_ = -1;
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
}

// Throws InputError saying what in a record cannot be of this step.
void check_record(const StepRecord& record, const GrpoStep& step) {
  const std::vector<std::string>& names = step.rewards.names();
  if (record.reward_names != names)
    throw InputError(str("its rewards are ", join(record.reward_names, ", "), ", the step's ",
                         join(names, ", ")));
  const int64_t vocabulary = step.learner.model().config().vocab_size;
  for (const RecordedCompletion& c : record.completions) {
    std::vector<int32_t> ids = c.tokens;
    for (const EnvironmentReply& r : c.replies)
      ids.insert(ids.end(), r.tokens.begin(), r.tokens.end());
    for (const int32_t id : ids)
      if (id < 0 || id >= vocabulary)
        throw InputError(
            str("completion ", c.index, " has the token ", id, " in a vocabulary of ", vocabulary));
    const bool has_all = c.rewards.size() == names.size();
    const double total = has_all ? weighted_sum(step.rewards.weights(), c.rewards) : HUGE_VAL;
    if (std::isnan(total) ? !std::isnan(c.total) : std::isinf(total) || total != c.total)
      throw InputError(str("completion ", c.index, " has the total ", with_bits(c.total), " and ",
                           has_all ? "weighted rewards of " + with_bits(total) : "other rewards"));
  }
}

std::string Replay::where(int64_t index) const {
  if (index < 0) return "";
  const int64_t prompts = batch_.prompts_per_step, size = batch_.num_generations,
                prompt = index / size, round = prompt / prompts;
  return str("prompt ", prompt % prompts, round > 0 ? str(" of round ", round) : "",
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
  record_ = read_record(journal_path(dir_ + "/journal", step.step + 1, comm_.rank(), comm_.size()),
                        [&](const StepRecord& record) { check_record(record, step); });
  count_ = 0;
  tokens_ = 0;
  compare(-1, hex(weights_hash(step.learner.model())), hex(record_.weights_before),
          "the hash of the weights before it:");
  compare(-1, step.learning_rate, record_.learning_rate, "learning rate");
  compare(-1, step.config.grpo.beta, record_.beta, "beta");
  check();
}

void Replay::add(std::span<Group> groups) {
  for (Group& group : groups)
    for (ScoredCompletion& c : group.completions) {
      ++count_;
      if (!found_.empty()) continue;
      const RecordedCompletion* recorded = record_.find(c.index);
      if (recorded == nullptr) {
        note(c.index, "which the journal does not have");
        continue;
      }
      compare(c, *recorded);
      c.rewards = recorded->rewards;
      c.reward = recorded->total;
      tokens_ += static_cast<double>(c.completion_length());
    }
  check();
}

void Replay::end(const GrpoStep& step, std::span<const Group> groups) {
  const bool is_target = record_.step == options_.step, with_update = updates_weights();
  const std::vector<std::string>& names = step.rewards.names();
  compare(-1, std::ssize(groups) * batch_.num_generations, std::ssize(record_.advantages),
          "number of advantages");
  auto recorded = record_.advantages.begin();
  for (const Group& group : groups)
    for (const ScoredCompletion& c : group.completions) {
      if (!found_.empty()) break;
      const double advantage = *recorded++;
      if (with_update) compare(c.index, c.advantage, advantage, "advantage");
      if (!is_target || group.index != options_.prompt ||
          c.index % batch_.num_generations != options_.completion)
        continue;
      completion = {c, {}, advantage, c.turn_advantages, nullptr};
      for (size_t k = 0; k < names.size(); ++k)
        completion->rewards.emplace_back(names[k], c.rewards[k]);
      completion->rewards.emplace_back("total", c.reward);
    }
  check();  // first: completions explain what follows
  compare(-1, count_, record_.completions.size(), "number of completions");
  if (with_update)
    compare(-1, hex(weights_hash(step.learner.model())), hex(record_.weights_after),
            "the hash of the weights after it:");
  check();
  const std::vector<double> sums = reduce_over_ranks(comm_, {static_cast<double>(count_), tokens_});
  if (comm_.rank() == 0)
    on_step_(str("step ", record_.step, ": equal: ", sums[0], " rollouts, ", sums[1],
                 with_update ? " tokens, log-probs, advantages, update"
                             : " tokens, log-probs; the update is not repeated, as its loss or its "
                               "advantages are functions of a Python program"));
  if (record_.step == part_.last) stop_ = true;
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
  for (size_t i = plan.stages.size(); i-- > 0;)
    if (const std::string own = stage_directory(plan, top, i);
        plan.stages[i].batch.trainer == TrainerType::kGrpo && (is_run || own == dir))
      return {i, own, i > 0 ? stage_directory(plan, top, i - 1) : ""};
  throw InputError(str("replay: ", run, " has no stage with trainer: grpo"));
}

// The steps that the journal of a stage has without a gap from a checkpoint on, with their numbers
// of ranks.
std::map<int64_t, int64_t> replayable_steps(const std::string& dir) {
  std::map<int64_t, int64_t> out;
  for (const auto& [step, ranks] : list_journal(dir + "/journal"))
    if (step == 1 || path_exists(checkpoint_path(dir + "/checkpoints", step - 1)) ||
        out.contains(step - 1))
      out[step] = ranks;
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

// The configuration that made a step of the target, and its ranks.
Part part_of(const Target& target, int64_t step, int64_t ranks) {
  const std::string path = journal_path(target.dir + "/journal", step, 0, ranks);
  const std::string text = read_record(path).plan;
  const RunPlan plan = parse_plan(text, path, {});
  if (target.stage >= plan.stages.size() ||
      plan.stages[target.stage].batch.trainer != TrainerType::kGrpo ||
      plan.stages[target.stage].batch.steps < step)
    throw InputError(path + ": its configuration has no such step");
  Part out{plan.stages[target.stage], text, ranks, step};
  TrainConfig& config = out.config;
  if (!target.init_from.empty()) config.init_from = target.init_from;
  config.eval.sets.clear();
  for (RewardConfig& reward : config.rewards)  // callbacks, which are not called
    if (std::ranges::none_of(reward_table(), [&](const auto& r) { return reward.name == r.name; }))
      reward.program.callback = std::make_shared<const Callback>();
  if (config.environment.is_set())
    config.environment.program.callback = std::make_shared<const Callback>();
  return out;
}

// The parts of the steps from the newest checkpoint before `step` up to it. Throws InputError
// unless the journal has them.
std::vector<Part> find_parts(const Target& target, int64_t step) {
  const std::map<int64_t, int64_t> steps = replayable_steps(target.dir);
  const std::string checkpoints = target.dir + "/checkpoints";
  const auto from = newest_checkpoint(checkpoints, checkpoint_path(checkpoints, step));
  std::vector<Part> parts;
  for (int64_t s = from ? load_state(*from).step + 1 : 1; s <= std::max<int64_t>(step, 1); ++s) {
    if (step < 1 || !steps.contains(step) || !steps.contains(s))
      throw InputError(
          str("--step ", step, ": ", target.dir,
              "/journal does not have this step and all before it from a checkpoint on; ",
              steps.empty() ? "no step can be replayed; hint: journal_mb above 0"
                            : "these can be replayed: " + text_of(steps)));
    Part part = part_of(target, s, steps.at(s));
    if (parts.empty() || parts.back().plan != part.plan || parts.back().ranks != part.ranks)
      parts.push_back(std::move(part));
    parts.back().last = s;
    if (s < step && parts.back().config.grpo.has_functions())
      throw InputError(str("--step ", step, ": step ", s,
                           " before it has a loss or advantages by functions of a Python program, "
                           "which a replay does not call; hint: --step ",
                           s, ", the first one after a checkpoint"));
  }
  return parts;
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
  const Target target = find_target(options.run);
  const std::vector<Part> parts = find_parts(target, options.step);
  const TrainConfig& last = parts.back().config;
  check_range("--prompt", options.prompt, last.batch.prompts_per_step);
  check_range("--completion", options.completion, last.batch.num_generations);
  // Has the state between two parts, whose checkpoint may have been removed. A replay of the same
  // run removes what a killed one has left.
  std::optional<NewFolder> scratch;
  const std::string name = "cohort-replay-" + hex(checksum(target.dir));
  std::string dir = target.dir, next_dir;
  std::optional<ReplayedCompletion> completion;
  for (const Part& part : parts) {
    const TrainConfig& config = part.config;
    const Device device = parse_device(config.device, "device");
    if (device.is_cuda() && part.ranks > 1)
      throw InputError(str("--step ", options.step, ": the journal is of ", part.ranks,
                           " ranks with a GPU each, and a replay has one; hint: steps of runs on "
                           "one GPU can be replayed"));
    if (config.num_threads > 0) set_num_threads(static_cast<int>(config.num_threads));
    Reporter silent;
    std::atomic<bool> stop{false};
    run_local_ranks(static_cast<int>(part.ranks), [&](Communicator& comm) {
      Replay replay(options, target.dir, part, on_step, comm, stop);
      Stage stage({.config = config,
                   .dir = dir,
                   .comm = comm,
                   .reporter = silent,
                   .stop = stop,
                   .device = device,
                   .before = checkpoint_path(dir + "/checkpoints", options.step),
                   .replay = &replay});
      train_grpo(stage);
      COHORT_CHECK(stage.step() == part.last, "[replay] it has ended after step ", stage.step());
      if (part.last < options.step && comm.rank() == 0) {
        if (!scratch) next_dir = scratch.emplace(fs::temp_directory_path() / name).create();
        stage.write_files(next_dir);
      }
      if (!replay.completion) return;  // another rank has it, or none is asked for
      completion = std::move(replay.completion);
      completion->tokenizer = std::move(stage.data().tokenizer);
    });
    dir = next_dir;
  }
  return completion;
}

}  // namespace cohort
