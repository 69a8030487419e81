#include "runs/replay.h"

#include <algorithm>
#include <bit>
#include <filesystem>
#include <mutex>

#include "core/parallel.h"
#include "core/text.h"
#include "runs/journal.h"
#include "runs/run.h"
#include "sys/files.h"
#include "trainers/across_ranks.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;

// A step differs from its record. All ranks throw it.
class Difference : public Error {
 public:
  using Error::Error;
};

bool same_bits(double a, double b) {
  return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b);
}

std::string both(double now, double then) {
  const auto shown = [](double x) {
    return str(format_double(x), " (", hex(std::bit_cast<uint64_t>(x)), ")");
  };
  return str(shown(now), ", recorded ", shown(then));
}
std::string both_hashes(uint64_t now, uint64_t then) {
  return str(hex(now), ", recorded ", hex(then));
}

// The first difference of a completion from its record; empty: none.
std::string difference(const Trajectory& now, const RecordedCompletion& then) {
  const size_t sizes[] = {now.tokens.size(), then.tokens.size()};
  for (size_t i = 0; i < std::min(sizes[0], sizes[1]); ++i) {
    const std::string at = str("token ", i, ": ");
    if (now.tokens[i] != then.tokens[i])
      return str(at, "id ", now.tokens[i], ", recorded ", then.tokens[i]);
    if (now.loss_mask[i] != then.loss_mask[i])
      return str(
          at, now.loss_mask[i] ? "sampled, recorded as observed" : "observed, recorded as sampled");
    if (!same_bits(now.logprobs[i], then.logprobs[i]))
      return str(at, "log-prob ", both(now.logprobs[i], then.logprobs[i]));
  }
  if (sizes[0] != sizes[1]) return str(sizes[0], " tokens, recorded ", sizes[1]);
  if (now.prompt_length != then.prompt_length)
    return str("a prompt of ", now.prompt_length, " tokens, recorded ", then.prompt_length);
  const auto recorded = static_cast<StopReason>(then.stop_reason);
  if (now.stop_reason == recorded) return "";
  return str("it ends by ", stop_reason_name(now.stop_reason), ", recorded ",
             stop_reason_name(recorded));
}

// Compares the steps of a rank with a journal.
class Replay final : public StepJournal {
 public:
  Replay(const ReplayOptions& options, std::string dir, Communicator& comm)
      : options_(options), dir_(std::move(dir)), comm_(comm) {}
  Environment* wrap(Environment* inner) override {
    return inner == nullptr ? nullptr : &environment_.emplace(*inner, record_);
  }
  bool has_scores() const override { return true; }
  void begin(const GrpoStep& step) override;
  void add(std::span<const Trajectory> completions, RewardSet::Scores& scores) override;
  void replace(int64_t place, int64_t index) override { sampled_[place] = index; }
  void end(const GrpoStep& step, const ScoredRollouts& rollouts) override;
  // The completion that was asked for, on the rank that has it.
  std::optional<ReplayedCompletion>& completion() { return completion_; }

 private:
  // Notes a difference of completion `index`, or of the step as a whole (-1), unless there is one.
  void note(int64_t index, const std::string& text) {
    if (text.empty() || !found_.empty()) return;
    found_ = text;
    found_at_ = index;
  }
  void check();
  std::string where(int64_t index) const;

  const ReplayOptions& options_;
  const std::string dir_;
  Communicator& comm_;
  StepRecord record_;
  std::optional<ReplayedEnvironment> environment_;
  std::map<int64_t, int64_t>
      sampled_;        // index of the completion at a place of the step, if changed
  size_t count_ = 0;   // completions of the step so far
  double tokens_ = 0;  // sampled ones among them
  int64_t prompts_ = 1, generations_ = 1;  // prompts_per_step, num_generations
  std::vector<std::string> names_;         // names of the rewards
  std::string found_;                      // the first difference
  int64_t found_at_ = -1;
  std::optional<ReplayedCompletion> completion_;
};

std::string Replay::where(int64_t index) const {
  if (index < 0) return "";
  const int64_t prompt = index / generations_, round = prompt / prompts_;
  return str("prompt ", prompt % prompts_, round > 0 ? str(" of refill round ", round) : "",
             ", completion ", index % generations_, ", ");
}

// Throws the first difference of all ranks on each of them.
void Replay::check() {
  double first = found_.empty() ? -HUGE_VAL : static_cast<double>(-found_at_);
  const double own = first;
  reduce_in_place(comm_, {&first}, Reduce::kMax);
  if (std::isinf(first)) return;
  throw Difference(first_text(
      comm_, own == first ? str("step ", record_.step, ": ", where(found_at_), found_) : ""));
}

void Replay::begin(const GrpoStep& step) {
  record_ = read_record(journal_path(dir_, step.step + 1, comm_.rank(), comm_.size()));
  if (record_.step != step.step + 1 || record_.rank != comm_.rank() ||
      record_.ranks != comm_.size())
    throw InputError(str(dir_, ": the journal of step ", step.step + 1, " has that of step ",
                         record_.step, ", rank ", record_.rank, " of ", record_.ranks));
  sampled_.clear();
  count_ = 0;
  tokens_ = 0;
  prompts_ = step.config.batch.prompts_per_step;
  generations_ = step.config.batch.num_generations;
  names_ = step.rewards.names();
  const uint64_t weights = weights_hash(step.learner.model());
  if (weights != record_.weights_before)
    note(-1,
         str("the hash of the weights before it: ", both_hashes(weights, record_.weights_before)));
  if (!same_bits(step.learning_rate, record_.learning_rate))
    note(-1, str("learning rate ", both(step.learning_rate, record_.learning_rate),
                 "; hint: the configuration may have changed since (RUN/starts)"));
  if (!same_bits(step.config.grpo.beta, record_.beta))
    note(-1, "beta " + both(step.config.grpo.beta, record_.beta));
  check();
}

void Replay::add(std::span<const Trajectory> completions, RewardSet::Scores& scores) {
  scores.each.assign(names_.size(), {});
  scores.failed.resize(names_.size());
  scores.first_error.resize(names_.size());
  for (const Trajectory& t : completions) {
    const RecordedCompletion* recorded = record_.find(t.index);
    if (recorded == nullptr) {
      note(t.index, "which the journal does not have");
      break;
    }
    note(t.index, difference(t, *recorded));
    if (recorded->rewards.size() != names_.size())
      note(t.index, str(names_.size(), " rewards, recorded ", recorded->rewards.size()));
    if (!found_.empty()) break;
    for (size_t k = 0; k < names_.size(); ++k) scores.each[k].push_back(recorded->rewards[k]);
    scores.total.push_back(recorded->total);
    tokens_ += static_cast<double>(t.completion_length());
  }
  count_ += completions.size();
  check();
}

void Replay::end(const GrpoStep& step, const ScoredRollouts& rollouts) {
  for (size_t i = 0; i < rollouts.trajectories.size(); ++i) {
    const Trajectory& t = rollouts.trajectories[i];
    const auto sampled = sampled_.find(t.index);
    const int64_t index = sampled == sampled_.end() ? t.index : sampled->second;
    const double now = rollouts.advantages[i], then = record_.find(index)->advantage;
    if (!same_bits(now, then)) note(index, "advantage " + both(now, then));
    if (record_.step != options_.step || t.index / generations_ != options_.prompt ||
        t.index % generations_ != options_.completion)
      continue;
    completion_ = {
        .trajectory = t, .rewards = {}, .advantage = now, .texts = {}, .spans = {}, .ends = {}};
    for (size_t k = 0; k < names_.size(); ++k)
      completion_->rewards.emplace_back(names_[k], rollouts.scores.each[k][i]);
    completion_->rewards.emplace_back("total", rollouts.scores.total[i]);
  }
  check();  // first: completions explain what follows
  if (count_ != record_.completions.size())
    note(-1, str(count_, " completions, recorded ", record_.completions.size()));
  const uint64_t weights = weights_hash(step.learner.model());
  if (weights != record_.weights_after)
    note(-1,
         str("the hash of the weights after it: ", both_hashes(weights, record_.weights_after)));
  check();
  std::vector<double> sums{static_cast<double>(count_), tokens_};
  sums = reduce_over_ranks(comm_, sums);
  if (comm_.rank() == 0)
    options_.on_step(str("step ", record_.step, ": equal: ", sums[0], " rollouts, ", sums[1],
                         " tokens, log-probs, advantages, update"));
}

// The stage that is replayed.
struct Target {
  RunPlan plan;
  size_t stage = 0;
  std::string dir;  // its own
};

Target find_target(const std::string& run) {
  const fs::path given = fs::absolute(run).lexically_normal(),
                 dir = given.has_filename() ? given : given.parent_path();
  const bool is_stage = !path_exists(dir / "config.yaml");
  const std::string top = is_stage ? dir.parent_path() : dir;
  if (is_stage && !path_exists(top + "/config.yaml"))
    throw InputError(str("replay: ", run,
                         " is no run: it has no config.yaml; hint: give the directory that "
                         "`cohort train` printed"));
  Target out{.plan = load_plan(top + "/config.yaml", {}), .stage = 0, .dir = ""};
  for (size_t i = 0; i < out.plan.stages.size(); ++i) {
    const std::string own = stage_directory(out.plan, top, i);
    if (out.plan.stages[i].batch.trainer != TrainerType::kGrpo || (is_stage && own != dir))
      continue;
    out.stage = i;
    out.dir = own;
  }
  if (out.dir.empty()) throw InputError(str("replay: ", run, " has no stage with trainer: grpo"));
  if (out.stage > 0)
    out.plan.stages[out.stage].init_from = stage_directory(out.plan, top, out.stage - 1);
  return out;
}

// Steps that can be replayed, "3 to 7, 9"; the journal has every step after the last checkpoint
// before them.
std::string replayable_steps(const std::map<int64_t, int64_t>& journal,
                             const std::vector<int64_t>& checkpoints) {
  std::vector<std::pair<int64_t, int64_t>> ranges;
  int64_t from = -1;  // the steps behind it are in the journal without a gap
  for (const auto& [step, ranks] : journal) {
    if (!journal.contains(step - 1)) from = step - 1;
    const auto next = std::upper_bound(checkpoints.begin(), checkpoints.end(), step - 1);
    if (next == checkpoints.begin() || *std::prev(next) < from) continue;
    if (ranges.empty() || ranges.back().second != step - 1) ranges.emplace_back(step, step);
    ranges.back().second = step;
  }
  std::vector<std::string> out;
  for (const auto& [begin, end] : ranges)
    out.push_back(begin == end ? str(begin) : str(begin, " to ", end));
  return out.empty() ? "no step can be replayed" : "these can be replayed: " + join(out, ", ");
}

// Throws InputError unless the journal has the steps from the checkpoint on. Returns the number of
// their ranks.
int64_t check_steps(const Target& target, int64_t last) {
  const std::string dir = target.dir + "/journal", checkpoints = target.dir + "/checkpoints";
  const std::map<int64_t, int64_t> journal = list_journal(dir);
  std::vector<int64_t> starts{0};
  for (const std::string& name : list_directory(checkpoints))
    if (const int64_t step = std::atoll(name.substr(std::min<size_t>(5, name.size())).c_str());
        step > 0 && checkpoints + "/" + name == checkpoint_path(checkpoints, step))
      starts.push_back(step);
  std::sort(starts.begin(), starts.end());
  const auto refuse = [&](const std::string& why) {
    throw InputError(str("--step ", last, ": ", why, "; ", replayable_steps(journal, starts)));
  };
  if (last < 1) refuse("steps count from 1");
  if (journal.empty()) refuse(dir + " has no journal; hint: journal_mb above 0");
  if (!journal.contains(last)) refuse(str("the journal ", dir, " does not have this step"));
  const int64_t start = *std::prev(std::upper_bound(starts.begin(), starts.end(), last - 1));
  const int64_t ranks = journal.at(last);
  for (int64_t step = start + 1; step < last; ++step) {
    const auto found = journal.find(step);
    if (found == journal.end())
      refuse(str("the journal has no step ", step,
                 ", which follows the last checkpoint before it, ",
                 start == 0 ? "the start" : str("step ", start)));
    if (found->second != ranks)
      refuse(str("it was made by ", ranks, " ranks, step ", step, " by ", found->second));
  }
  return ranks;
}

// Texts of the tokens and of their spans.
void set_texts(ReplayedCompletion& out, const Tokenizer& tokenizer) {
  const Trajectory& t = out.trajectory;
  size_t begin = 0;
  for (size_t i = 0; i < t.tokens.size(); ++i) {
    out.texts.push_back(tokenizer.decode({&t.tokens[i], 1}, SpecialText::kShow));
    const bool ends = i + 1 == t.tokens.size() || t.loss_mask[i + 1] != t.loss_mask[i] ||
                      static_cast<int64_t>(i) + 1 == t.prompt_length;
    if (!ends) continue;
    out.spans.push_back(
        tokenizer.decode(std::span(t.tokens).subspan(begin, i + 1 - begin), SpecialText::kShow));
    out.ends.push_back(begin = i + 1);
  }
}

// The configuration of the steps alone, without evaluations and checkpoints.
TrainConfig steps_alone(TrainConfig config) {
  config.eval.at_start = false;
  config.eval.every = 0;
  config.eval.stop_at = 0;
  config.eval.sets.clear();
  config.checkpoint.every = 0;
  config.checkpoint.every_minutes = 0;
  return config;
}

}  // namespace

ReplayResult replay_run(const ReplayOptions& options) {
  const Target target = find_target(options.run);
  const int64_t ranks = check_steps(target, options.step);
  TrainConfig config = steps_alone(target.plan.stages[target.stage]);
  // A run that is extended later has another schedule then.
  config.batch.steps =
      read_record(journal_path(target.dir + "/journal", options.step, 0, ranks)).planned_steps;
  const auto check_range = [](const char* name, std::optional<int64_t> value, int64_t count) {
    if (value && (*value < 0 || *value >= count))
      throw InputError(str(name, " ", *value, ": a step has 0 to ", count - 1));
  };
  check_range("--prompt", options.prompt, config.batch.prompts_per_step);
  check_range("--completion", options.completion, config.batch.num_generations);
  const Device device = parse_device(config.device, "device");
  if (device.is_cuda() && ranks > 1)
    throw InputError(str("--step ", options.step, ": the journal is of ", ranks,
                         " ranks with a GPU each, and a replay has one; hint: steps of runs on "
                         "one GPU can be replayed"));
  if (config.num_threads > 0) set_num_threads(static_cast<int>(config.num_threads));
  const std::string before = checkpoint_path(target.dir + "/checkpoints", options.step);
  Reporter silent;
  const std::atomic<bool> stop{false};
  ReplayResult result;
  const auto replay = [&](Communicator& comm) {
    Replay journal(options, target.dir + "/journal", comm);
    Stage stage({.config = config,
                 .dir = target.dir,
                 .comm = comm,
                 .reporter = silent,
                 .stop = stop,
                 .device = device,
                 .before = before,
                 .replay = &journal,
                 .last_step = options.step});
    train_grpo(stage);
    if (stage.step() != options.step)
      throw Error(str("the replay has ended at step ", stage.step(), " of ", options.step));
    if (!journal.completion()) return;  // another rank has it, or none is asked for
    result.completion = std::move(journal.completion());
    set_texts(*result.completion, *stage.data().tokenizer);
  };
  try {
    run_local_ranks(static_cast<int>(ranks), replay);
  } catch (const Difference& e) {
    result.difference = e.what();
  }
  return result;
}

}  // namespace cohort
