// Functions of the calling program take the place of what configurations name.
#include <algorithm>

#include "job/config.h"
#include "rl/grpo_loss.h"

namespace cohort {
namespace {

void expect(bool ok, const std::string& message) {
  if (!ok) throw InputError(message);
}

// The callbacks of one kind, and the names that a configuration may have with them.
class NamedCallbacks {
 public:
  NamedCallbacks(const char* key, const std::map<std::string, Callback>& callbacks,
                 std::vector<std::string> built_in)
      : key_(key), known_(std::move(built_in)) {
    for (const auto& [name, callback] : callbacks) {
      expect(!knows(name), str(key, ": the function '", name, "' has the name of a built-in one"));
      known_.push_back(name);
      callbacks_[name] = std::make_shared<const Callback>(callback);
    }
  }
  // Sets the callback that a reward or an environment is named after, if any.
  void bind(const std::string& error, const std::string& name, ProgramConfig& program) const {
    expect(knows(name), str(error, "; known: ", join(known_, ", "), did_you_mean(name, known_)));
    if (callbacks_.contains(name)) program.callback = callbacks_.at(name);
  }
  void check_used() const {
    for (const auto& [name, callback] : callbacks_)
      expect(callback.use_count() > 1,
             str(key_, ": no stage names the function '", name, "'; hint: {name: ", name, "}"));
  }

 private:
  bool knows(const std::string& name) const {
    return std::ranges::find(known_, name) != known_.end();
  }
  const char* key_;
  std::vector<std::string> known_;
  std::map<std::string, std::shared_ptr<const Callback>> callbacks_;
};

// Gives the stages with grpo a loss and advantages of functions.
void bind_functions(RunPlan& plan, const Callbacks& callbacks) {
  for (TrainConfig& stage : plan.stages) {
    if (stage.batch.trainer != TrainerType::kGrpo) continue;
    const auto bind = [](const char* key, std::string& name, const auto& functions, auto& to) {
      for (const auto& [known, function] : functions) {
        expect(name.empty() || name == known,
               str(key, ": ", name, " was given as ", known, "; hint: ", key, "=", known));
        name = known;
        to = std::make_shared<std::decay_t<decltype(function)>>(function);
      }
    };
    std::map<std::string, HostLoss> losses;
    for (const auto& [name, loss] : callbacks.losses) losses[name] = checked_loss(name, loss);
    bind("loss", stage.grpo.loss, losses, stage.grpo.loss_function);
    bind("advantage", stage.grpo.advantage, callbacks.advantages, stage.grpo.advantage_function);
    stage.grpo.validate();
  }
  for (const auto& [key, is_given] :
       {std::pair{"loss", !callbacks.losses.empty()}, {"advantage", !callbacks.advantages.empty()}})
    expect(!is_given || std::ranges::any_of(plan.stages,
                                            [](const TrainConfig& stage) {
                                              return stage.batch.trainer == TrainerType::kGrpo;
                                            }),
           str(key, ": a function was given, and no stage has trainer: grpo"));
}

}  // namespace

std::string TrainConfig::missing_function() const {
  if (batch.trainer != TrainerType::kGrpo) return "";
  for (const auto& [key, name, is_bound] :
       {std::tuple{"loss", &grpo.loss, grpo.loss_function != nullptr},
        {"advantage", &grpo.advantage, grpo.advantage_function != nullptr}})
    if (!name->empty() && !is_bound)
      return str(key, ": ", *name, " is a function of a Python program; hint: cohort.train(..., ",
                 key, "=", *name, "), also to resume a run");
  return "";
}

void bind_callbacks(RunPlan& plan, const Callbacks& callbacks) {
  bind_functions(plan, callbacks);
  if (callbacks.rewards.empty() && callbacks.environments.empty()) return;
  std::vector<std::string> names;
  for (const RewardEntry& entry : reward_table()) names.emplace_back(entry.name);
  const NamedCallbacks rewards("rewards", callbacks.rewards, names);
  const NamedCallbacks environments("environment.name", callbacks.environments,
                                    environment_names());
  for (TrainConfig& stage : plan.stages) {
    for (size_t i = 0; i < stage.rewards.size(); ++i)
      rewards.bind(str("rewards[", i, "] '", stage.rewards[i].name, "': unknown reward"),
                   stage.rewards[i].name, stage.rewards[i].program);
    if (stage.environment.is_set())
      environments.bind(str("environment.name: unknown environment '", stage.environment.name, "'"),
                        stage.environment.name, stage.environment.program);
  }
  rewards.check_used();
  environments.check_used();
}

}  // namespace cohort
