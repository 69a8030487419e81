#include "job/config.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <utility>

#include "data/corpus.h"
#include "job/foreign_keys.h"
#include "job/unread_keys.h"
#include "nn/model_folder.h"
#include "sys/files.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;

const std::vector<std::string> kStagesKey = {"stages"};

// Keys of paths, with the inputs that they name.
using Paths = std::vector<std::string>;
constexpr std::pair<std::string_view, Paths (*)(const TrainConfig&)> kPathKeys[] = {
    {"data.text", [](const TrainConfig& c) { return c.data.text; }},
    {"data.eval_text", [](const TrainConfig& c) { return c.data.eval_text; }},
    {"data.jsonl.path", [](const TrainConfig& c) { return c.data.jsonl.path; }},
    {"data.jsonl.eval_path", [](const TrainConfig& c) { return c.data.jsonl.eval_path; }},
    {"data.images.path", [](const TrainConfig& c) { return Paths{c.data.images.path}; }},
    {"data.images.eval_path", [](const TrainConfig& c) { return Paths{c.data.images.eval_path}; }},
    {"data.tokenizer_path", [](const TrainConfig& c) { return Paths{c.data.tokenizer_path}; }},
    {"data.cache_dir", [](const TrainConfig&) { return Paths(); }},
    {"model.path", [](const TrainConfig& c) { return Paths{c.model.path}; }},
    {"init_from", [](const TrainConfig& c) { return Paths{c.init_from}; }},
    {"reference",
     [](const TrainConfig& c) {
       return c.grpo.reference_type() == ReferenceType::kFolder ? Paths{c.grpo.reference} : Paths();
     }},
    {"output_dir", [](const TrainConfig&) { return Paths(); }},
    {"environment.corpus", [](const TrainConfig& c) { return Paths{c.environment.corpus}; }},
    {"environment.tool_schemas",
     [](const TrainConfig& c) { return Paths{c.environment.tool_schemas}; }}};

// True if the value of `reference` is a folder.
bool names_folder(const ConfigNode& node) {
  return reference_type(node.text().value_or("base")) == ReferenceType::kFolder;
}

// True for keys that take several files, folders and patterns.
bool is_list(std::string_view key) {
  return key.ends_with("text") || key.starts_with("data.jsonl.");
}

// The path without links, "." and ".."; it need not exist. One that cannot be resolved is returned
// unchanged: opening it reports the reason.
std::string canonical_path(const fs::path& path) {
  std::error_code error;
  const std::string out = fs::weakly_canonical(path, error).string();
  return error ? path.lexically_normal().string() : out;
}

// A directory's path without "/" or "." at its end, which a suffix would follow.
std::string without_end(fs::path path) {
  while (path.has_relative_path() && (path.filename().empty() || path.filename() == "."))
    path = path.parent_path();
  return path.filename() == ".." ? canonical_path(path) : path.string();
}

// The value of a dotted key; nullptr where the map has none.
ConfigNode* node_at(ConfigNode& map, std::string_view key) {
  const size_t dot = key.find('.');
  ConfigNode* node = map.find(std::string(key.substr(0, dot)));
  return node == nullptr || dot == key.npos ? node : node_at(*node, key.substr(dot + 1));
}

// True if an override such as rewards.0.weight=2 names an item of a list that the map has not.
bool lacks_list(ConfigNode& map, std::string_view assignment) {
  const std::string_view key = assignment.substr(0, assignment.find('='));
  for (size_t i = 2; i < key.size(); ++i)
    if (key[i - 1] == '.' && key[i] >= '0' && key[i] <= '9') {
      const ConfigNode* list = node_at(map, key.substr(0, i - 1));
      return list == nullptr || list->kind != ConfigNode::Kind::kList;
    }
  return false;
}

// Applies the overrides beside the stages, but one that names an item of a list of a stage alone.
void apply_to_root(ConfigNode& root, std::span<const std::string> overrides) {
  for (const std::string& o : overrides) {
    ConfigNode* stages = root.find("stages");
    if (!lacks_list(root, o) || stages == nullptr ||
        std::ranges::all_of(stages->items, [&](ConfigNode& stage) { return lacks_list(stage, o); }))
      apply_override(root, o);
  }
}

// Throws InputError for a value given by a key's name of today and by its earlier one.
[[noreturn]] void refuse_both_names(const ConfigNode& now, const char* name, const ConfigNode& old,
                                    const char* old_name) {
  throw InputError(str(now.where(), ": ", name, ": ", now.describe(), " contradicts ", old_name,
                       ": ", old.describe(), ", its earlier name; hint: give one of them"));
}

// Moves data.jsonl.held_out_fraction, an earlier name, to data.held_out_fraction, in stages too. Of
// two values the one of the command line counts; the config.yaml of an earlier version has both, of
// which one had no effect on its data. Throws InputError for other values that differ.
void rename_held_out(ConfigNode& map) {
  if (ConfigNode* stages = map.find("stages"))
    for (ConfigNode& stage : stages->items) rename_held_out(stage);
  const auto at = [&](const char* key) { return node_at(map, key); };
  const ConfigNode *old = at("data.jsonl.held_out_fraction"), *now = at("data.held_out_fraction");
  if (old == nullptr) return;
  const ConfigNode moved = *old, *text = at("data.text");
  const auto number = [](const ConfigNode& n) { return std::strtod(n.scalar.c_str(), nullptr); };
  bool counts = now == nullptr || now->is_null();
  if (now != nullptr && (old->line == 0) != (now->line == 0))
    counts = old->line == 0;
  else if (now != nullptr && at("data.fingerprint") != nullptr && at("data.jsonl.limit") != nullptr)
    counts = text == nullptr || (text->items.empty() && text->scalar.empty());
  else if (!counts && !old->is_null() && number(*old) != number(*now))
    refuse_both_names(*now, "data.held_out_fraction", *old, "data.jsonl.held_out_fraction");
  if (counts) at("data")->set("held_out_fraction", moved);
  std::erase_if(at("data.jsonl")->entries,
                [](const auto& entry) { return entry.key == "held_out_fraction"; });
}

constexpr std::string_view kRefillRounds = "refill_rounds";
constexpr const char* kSamplingRounds = "dynamic_sampling_rounds";

// Renames refill_rounds, an earlier name of dynamic_sampling_rounds, in a file and its stages.
// Throws InputError for two values that differ.
void rename_refill_rounds(ConfigNode& map) {
  if (ConfigNode* stages = map.find("stages"))
    for (ConfigNode& stage : stages->items) rename_refill_rounds(stage);
  const ConfigNode *old = map.find(std::string(kRefillRounds)), *now = map.find(kSamplingRounds);
  if (old == nullptr) return;
  if (now != nullptr && now->describe() != old->describe())
    refuse_both_names(*now, kSamplingRounds, *old, kRefillRounds.data());
  map.set(kSamplingRounds, ConfigNode(*old));
  std::erase_if(map.entries, [](const auto& entry) { return entry.key == kRefillRounds; });
}
// Does so in an override.
std::string renamed_override(const std::string& assignment) {
  const size_t end = std::min(assignment.find('='), assignment.size());
  const size_t begin =
      assignment.rfind('.', end) == assignment.npos ? 0 : assignment.rfind('.', end) + 1;
  const bool is_key = begin == 0 || assignment.starts_with("stages.");
  if (!is_key || std::string_view(assignment).substr(begin, end - begin) != kRefillRounds)
    return assignment;
  return assignment.substr(0, begin) + kSamplingRounds + assignment.substr(end);
}

// True if a map of keys has one that says how the lines of data.jsonl are read.
bool gives_format(ConfigNode& map) {
  constexpr std::string_view kKeys[] = {"prompt",     "answer", "solution", "messages",
                                        "completion", "pair",   "rejected"};
  return std::ranges::any_of(kKeys, [&](std::string_view key) {
    return node_at(map, str("data.jsonl.", key)) != nullptr;
  });
}

// Resolves relative paths: against the folder of the file, or against the current folder if they
// were given on the command line.
class RelativePaths {
 public:
  explicit RelativePaths(const std::string& file) : file_(file) {}

  // Makes the paths of a map of keys absolute, and the working directories of reward programs.
  // Before, a key of earlier versions gets its new name.
  void resolve(ConfigNode& map) {
    rename_held_out(map);
    if (ConfigNode* rewards = map.find("rewards"))
      for (ConfigNode& reward : rewards->items) resolve_calls(reward);
    if (ConfigNode* environment = map.find("environment")) resolve_calls(*environment);
    if (ConfigNode* sets = node_at(map, "eval.sets"))
      for (ConfigNode& set : sets->items)
        if (ConfigNode* path = set.find("path")) resolve_path(*path);
    for (const auto& [key, inputs] : kPathKeys) {
      ConfigNode* node = node_at(map, key);
      if (node == nullptr || (key == "reference" && !names_folder(*node))) continue;
      if (node->kind == ConfigNode::Kind::kList && is_list(key))
        for (ConfigNode& item : node->items) resolve_path(item);
      else
        resolve_path(*node);
    }
  }
  // Reports each input that was given as a relative path and does not exist.
  void find_missing(const TrainConfig& config, std::vector<std::string>& missing) const {
    for (const auto& [key, inputs] : kPathKeys)
      for (const std::string& path : inputs(config)) {
        const auto origin = origins_.find(path);
        std::error_code error;
        const bool pattern = is_list(key) && path.find_first_of("*?[") != path.npos;
        if (origin == origins_.end() || fs::exists(path, error) || error || pattern) continue;
        const auto& [given, base] = origin->second;
        const bool names_model = key == "model.path" || key == "data.tokenizer_path";
        const std::string hint = names_model ? hub_hint(given, path)
                                 : key == "reference"
                                     ? "; hint: base, start, policy, or the folder of a model"
                                     : "";
        missing.push_back(str(key, ": ", path, ": No such file or directory; the relative path '",
                              given, "' was counted from ", base,
                              hint.empty() ? "; hint: check the path" : hint));
      }
  }

 private:
  void resolve_path(ConfigNode& node) {
    const auto given = node.text();
    if (!given || given->empty() || fs::path(*given).is_absolute()) return;
    if (*given == "~" || given->starts_with("~/"))
      throw InputError(str(node.where(), ": ~ is not expanded in ", *given, "; hint: a full path"));
    const std::string base = base_of(node);
    const std::string path = canonical_path(fs::path(base) / *given);
    origins_[path] = {
        *given, base + (node.line == 0 ? ", the current folder" : ", the folder of " + file_)};
    node.kind = ConfigNode::Kind::kScalar;
    node.scalar = path;
    node.typed.reset();
  }

  // The folder that a relative path counts from.
  std::string base_of(const ConfigNode& node) const {
    const fs::path folder = node.line == 0 ? fs::path() : fs::path(file_).parent_path();
    return canonical_path(fs::current_path() / folder);
  }

  // Makes absolute the ca_file of a server, and the working directory of a program: a section with
  // the key `run`.
  void resolve_calls(ConfigNode& program) {
    if (ConfigNode* ca_file = program.find("ca_file")) resolve_path(*ca_file);
    const ConfigNode* run = program.find("run");
    if (run == nullptr || run->text() == "") return;
    const ConfigNode* name = program.find("name");
    if (name != nullptr && name->text() == "code") return;  // it runs in a folder of the sandbox
    const ConfigNode* given = program.find("directory");
    const std::string folder = given == nullptr ? "" : given->text().value_or("");
    ConfigNode absolute = *run;
    absolute.scalar = canonical_path(fs::path(base_of(program)) / folder);
    absolute.typed.reset();
    if (given == nullptr || given->text()) program.set("directory", std::move(absolute));
  }

  std::string file_;
  // The path as given and the folder it counts from, by absolute path.
  std::map<std::string, std::pair<std::string, std::string>> origins_;
};

// Checks that throw InputError naming the keys.

void require(bool ok, const std::string& message) {
  if (!ok) throw InputError(message);
}

// Refuses all keys at once that no section has, then a value of another trainer. Overrides for all
// stages count at top level.
void refuse_unknown_keys(const ConfigNode& root) {
  UnknownKeys unknown;
  find_unknown_keys<TrainConfig>(root, kStagesKey, "", unknown);
  if (const ConfigNode* stages = root.find("stages"))
    for (size_t i = 0; i < stages->items.size(); ++i)
      find_unknown_keys<TrainConfig>(stages->items[i], {}, str("stages.", i), unknown);
  expect_known(unknown, config_keys<TrainConfig>(), foreign_key_text,
               "hint: `cohort train --help` lists all keys, docs/from_trl.md those of TRL");
  for (const auto& [path, where, names, value] : unknown.choices)
    if (const std::string text = foreign_value_text(path, value); !text.empty())
      throw InputError(str(where, ": ", path, ": expected one of ", join(names, ", "), ", got '",
                           value, "'", text));
}

// Checks what the run directory is named after.
void validate_directory(const std::string& name, const std::string& output_dir) {
  const auto require_no_controls = [](const char* key, const std::string& value) {
    require(std::ranges::none_of(value, [](unsigned char c) { return std::iscntrl(c); }),
            str(key, ": expected no line breaks or other control characters, got '", value, "'"));
  };
  require_no_controls("name", name);
  require_no_controls("output_dir", output_dir);
  const fs::path path = name;
  const bool leads_out =
      std::ranges::any_of(path, [](const fs::path& part) { return part == ".." || part == "."; });
  require(path.is_relative() && !leads_out,
          str("name: expected a name for a folder in runs, got '", name,
              "'; hint: output_dir=DIR for a folder at another place"));
  require(output_dir.empty() || fs::path(output_dir).has_filename(),
          str("output_dir: '", output_dir, "' cannot be a run directory"));
}

void validate_source(const DataConfig& data, TrainerType trainer) {
  const auto has_files = [](const std::string& path) {
    try {
      return path_exists(cohort::text_files(path).at(0));
    } catch (const InputError&) {
      return false;  // reported when it is read
    }
  };
  if (trainer == TrainerType::kDpo)
    require(!data.jsonl.path.empty() &&
                (!data.jsonl.rejected.empty() || !has_files(data.jsonl.path[0])),
            "data.jsonl.rejected: trainer dpo needs pairs of answers; hint: data.jsonl: {path: "
            "FILE} of lines with the fields prompt, chosen and rejected, or {path: FILE, prompt: "
            "'{question}', answer: '{good}', rejected: '{bad}'}");
  else if (trainer == TrainerType::kPretrain)
    require(!data.text.empty(),
            "data.text: trainer pretrain needs a text file, and pretrain is the default; hint: "
            "trainer: sft or trainer: grpo for problems");
  else if (trainer == TrainerType::kMlm)
    require(!data.text.empty(), "data.text: trainer mlm needs a text file");
  else if (trainer == TrainerType::kClassify)
    require(!data.images.path.empty() ||
                (!data.jsonl.path.empty() && !data.jsonl.prompt.empty() && !data.is_chat()),
            "data.jsonl: trainer classify needs texts and their labels, no conversations; hint: "
            "data.jsonl: {path: FILE, prompt: '{text}', answer: '{label}'}");
  else
    require(data.text.empty(), str("data.text: trainer ", trainer_name(trainer),
                                   " needs problems: data.task or data.jsonl; hint: trainer: "
                                   "pretrain for plain text"));
  require(data.images.path.empty() || trainer == TrainerType::kClassify,
          "data.images: is for trainer classify");
  require(data.text.empty() || !data.is_chat(),
          "data.chat: data.text is plain text; hint: conversations are for sft and grpo");
  require(data.jsonl.messages.empty() || !data.jsonl.path.empty(),
          "data.jsonl.messages: is a field of data.jsonl.path, which is not given");
  require(trainer != TrainerType::kDpo || data.too_long != TooLong::kTruncate || !data.is_chat(),
          "data.too_long: truncate would give the two conversations of a pair other prompts; hint: "
          "data.too_long=skip");
  require(data.jsonl.completion.empty() || !data.jsonl.messages.empty(),
          "data.jsonl.completion: follows the conversation of data.jsonl.messages, which is not "
          "given; hint: data.jsonl.solution is for texts");
  require(data.jsonl.detected.empty() || !data.jsonl.prompt.empty() ||
              (trainer == TrainerType::kSft && !data.chat),
          str(data.jsonl.detected, ": ", data.chat ? "data.chat" : "trainer grpo",
              " needs a prompt, and the lines have only a text; hint: data.jsonl.prompt: "
              "'{text}' data.jsonl.answer: '' to complete the texts"));
}

void validate_held_out(const DataConfig& data, const EvalConfig& eval) {
  const JsonlConfig& jsonl = data.jsonl;
  require(jsonl.eval_path.empty() || !jsonl.path.empty(),
          "data.jsonl.eval_path: holds problems out beside those of data.jsonl.path, which is not "
          "given; hint: to evaluate on one file alone, data.jsonl.path=FILE "
          "data.held_out_fraction=1");
  require(
      data.images.eval_path.empty() || jsonl.held_out_fraction.value_or(0) == 0,
      "data.held_out_fraction: cannot be held out beside data.images.eval_path; hint: leave one "
      "of them out");
  require(jsonl.eval_path.empty() || jsonl.held_out() == 0,
          str("data.held_out_fraction: ", jsonl.held_out(),
              " of data.jsonl.path cannot be held out beside data.jsonl.eval_path; hint: "
              "data.held_out_fraction=0, or leave one of them out"));
  const char* needs_held_out = eval.every > 0     ? "eval.every"
                               : eval.stop_at > 0 ? "eval.stop_at"
                                                  : nullptr;
  require(needs_held_out == nullptr || !data.holds_nothing_out() ||
              (needs_held_out == std::string_view("eval.every") && !eval.sets.empty()),
          str(needs_held_out, ": nothing is held out at data.held_out_fraction 0; hint: ",
              needs_held_out, "=0, another fraction, or data.jsonl.eval_path"));
}

void validate_k(const EvalConfig& eval, const std::string& section) {
  for (const int64_t k : eval.k)
    require(k <= eval.num_samples,
            str(section, ".k: pass@", k, " needs ", section, ".num_samples of at least ", k));
}

// Checks the names of the sets, which are prefixes of metrics, and their options.
void validate_sets(const EvalConfig& eval) {
  constexpr std::string_view kPrefixes[] = {"clip_ratio", "completions", "data", "eval",
                                            "rewards",    "rollout",     "time", "update"};
  std::vector<std::string> names;
  for (const EvalSetConfig& set : eval.sets) {
    const std::string section = str("eval.sets[", names.size(), "]"), name = section + ".name: ";
    const auto wrong = [](unsigned char c) { return c == '/' || c <= ' ' || c == 127; };
    require(!set.name.empty() && std::ranges::none_of(set.name, wrong),
            str(name, "expected a name without / and spaces, got '", set.name, "'"));
    require(std::ranges::find(kPrefixes, set.name) == std::end(kPrefixes),
            str(name, "metrics of training begin with '", set.name, "/'; hint: another name"));
    require(std::ranges::find(names, set.name) == names.end(),
            str(name, "another set is called '", set.name, "'; hint: another name"));
    names.push_back(set.name);
    require(!set.path.empty(), str(section, ".path: expected a file of problems"));
    require(!set.correct.reward.empty() || set.correct.threshold == CorrectConfig().threshold,
            str(section, ".correct.threshold: is that of a reward, which is not given; hint: ",
                section, ".correct.reward"));
    validate_k(eval.options_of(set), section);
  }
  require(eval.best.empty() || std::ranges::find(names, eval.best) != names.end(),
          str("eval.best: no set is called '", eval.best, "'; ",
              names.empty() ? "there are none" : str("the sets are ", join(names, ", ")),
              did_you_mean(eval.best, names)));
}

// Checks the keys about the choice and the order of training problems.
void validate_selection(const DataConfig& data, const BatchConfig& batch) {
  const JsonlConfig& jsonl = data.jsonl;
  const size_t entries = data.text.empty() ? jsonl.path.size() : data.text.size();
  require(data.weights.empty() || data.weights.size() == entries,
          str("data.weights: expected one for each of the ", entries, " entries of ",
              data.text.empty() ? "data.jsonl.path" : "data.text", ", got ", data.weights.size()));
  require(jsonl.split_by.empty() || !jsonl.path.empty(),
          "data.split_by: names fields of data.jsonl.path, which is not given");
  constexpr int64_t kMostPicks = int64_t{1} << 27;
  require(!data.is_sorted() || batch.steps <= kMostPicks / batch.examples_per_step(),
          str("data.curriculum: sorts all problems of the run, ", batch.steps, " steps of ",
              batch.examples_per_step(), "; hint: fewer steps, at most ", kMostPicks, " problems"));
  require(data.curriculum == Curriculum::kNone || !jsonl.path.empty(),
          "data.curriculum: only problems of data.jsonl have an order; hint: leave it out");
  require(
      data.curriculum != Curriculum::kOnline || batch.trainer == TrainerType::kGrpo,
      "data.curriculum: online needs the outcomes of trainer grpo; hint: data.curriculum=length, "
      "or leave it out");
  require(
      data.too_long == TooLong::kError || !jsonl.path.empty(),
      "data.too_long: only problems of data.jsonl can be truncated or skipped; hint: leave it out");
}

void validate_grpo(const TrainConfig& config) {
  if (config.batch.trainer != TrainerType::kGrpo) return;
  const bool rewarded = config.has_rewards();
  require(rewarded || config.grpo.has_teacher(),
          "rewards: trainer grpo needs at least one reward, with a weight other than 0; hint: "
          "rewards: [{name: NAME}]; `cohort train --keys` lists them; or a teacher: preset=opd "
          "reference=FOLDER");
  require(rewarded || (config.grpo.dynamic_sampling_rounds == 0 &&
                       config.data.curriculum != Curriculum::kOnline),
          "dynamic_sampling_rounds, data.curriculum: online: select prompts by their rewards, and "
          "there are none; hint: leave them out");
  require(
      !rewarded || config.batch.num_generations > 1 || config.grpo.baseline != Baseline::kGroup ||
          !config.grpo.advantage.empty(),
      "num_generations: 1 leaves nothing to compare: the advantage of a completion is its "
      "reward relative to the others of its prompt; hint: num_generations=8, baseline=batch, or "
      "advantage=NAME, a function that is given to cohort.train()");
  require(config.grpo.credit == Credit::kCompletion ||
              (config.environment.is_set() &&
               std::ranges::count_if(
                   config.rewards,
                   [](const auto& r) { return r.name == "environment" && r.weight != 0; }) == 1),
          "credit: turn needs the rewards that an environment gives to turns; hint: an "
          "environment with rewards: [{name: environment}], or credit=completion");
  require(!rewarded || config.grpo.baseline == Baseline::kNone ||
              config.batch.completions_per_step() > 1,
          "prompts_per_step: 1 with num_generations: 1 leaves nothing to compare; hint: "
          "prompts_per_step=8");
  require(
      config.data.curriculum != Curriculum::kOnline ||
          (config.grpo.baseline == Baseline::kGroup && config.grpo.credit == Credit::kCompletion),
      "data.curriculum: online leaves out problems whose completions all get the same reward, "
      "which teach something with another baseline than group and with credit: turn; hint: "
      "data.curriculum=length, or leave it out");
  require(config.sampling.temperature > 0,
          "temperature: grpo needs samples that differ; greedy (0) gives equal ones");
  require(config.grpo.num_minibatches <= config.batch.prompts_per_step,
          str("num_minibatches: ", config.grpo.num_minibatches, " updates need as many prompts, ",
              "prompts_per_step is ", config.batch.prompts_per_step));
  config.grpo.validate();
  require(!config.grpo.kl_target || config.grpo.kl_horizon >= config.batch.completions_per_step(),
          str("kl_horizon: expected at least the ", config.batch.completions_per_step(),
              " completions of a step, got ", config.grpo.kl_horizon));
  require(config.grpo.ref_sync_every == 0 || config.model.lora.rank == 0 ||
              config.grpo.reference_type() == ReferenceType::kStart,
          "ref_sync_every: with lora the reference is the model without adapters, which never "
          "changes; hint: reference=start, or leave ref_sync_every out");
  require(
      config.grpo.reference_prompt.empty() || !config.environment.is_set(),
      "reference_prompt: an environment may begin its dialogues with other prompts; hint: leave "
      "one of them out");
  const int64_t limit = config.sampling.max_completion_length;
  for (const RewardConfig& reward : config.rewards)
    require(reward.max_length > 0 || reward.buffer <= limit,
            str("rewards.buffer: ", reward.buffer, " of '", reward.name,
                "' is more than max_completion_length, ", limit));
}

void validate_sharding(const TrainConfig& config) {
  const OptimizerConfig& optimizer = config.optimizer;
  require(optimizer.sharding != Sharding::kFull || config.batch.trainer != TrainerType::kGrpo ||
              !config.grpo.distills_itself(config.model.lora.rank > 0),
          str("sharding: full gathers blocks for one forward of a micro batch, and kl_estimator: ",
              entry_of(kKlEstimators, config.grpo.kl_estimator).name,
              " with this reference needs two; hint: sharding=gradients, or another kl_estimator"));
  const int64_t lanes = optimizer.reduction_lanes;
  require((lanes & (lanes - 1)) == 0,
          str("reduction_lanes: expected a power of two or 0, got ", lanes));
  require(lanes == 0 || !sums_each_micro_batch(optimizer.sharding),
          str("reduction_lanes: sharding: ", entry_of(kShardingNames, optimizer.sharding).name,
              " adds micro batches over ranks, in an order that depends on their number; hint: "
              "sharding: optimizer"));
  require(lanes == 0 || config.data.images.path.empty(),
          "reduction_lanes: images stay on the ranks that read them; hint: reduction_lanes: 0");
}

}  // namespace

void TrainConfig::validate() const {
  const int sources = !data.task.empty() + !data.jsonl.path.empty() + !data.text.empty() +
                      !data.images.path.empty();
  validate_directory(name, output_dir);
  require(
      sources == 1,
      str("data: expected exactly one of task, jsonl.path, images.path and text, got ", sources));
  require(ranks == 1 || device == "cpu",
          str("ranks: ", ranks, " threads of this process compute on the CPU, got device: ", device,
              "; hint: ranks: 1, and cohort train --gpus ", ranks));
  validate_sharding(*this);
  require(optimizer.storage.moments == MomentKind::kF32 || dtype != DType::kF64,
          "optimizer.moments: bf16 is not supported with dtype f64; hint: leave one of them out");
  validate_source(data, batch.trainer);
  validate_held_out(data, eval);
  validate_selection(data, batch);
  require(eval.size > 0 || data.task.empty(),
          "eval.size: 0 means all, and generated problems have no end; hint: eval.size=512");
  validate_grpo(*this);
  require(!model.precision.is_quantized() || model.lora.rank > 0,
          str("precision.base: ", entry_of(kBaseNames, model.precision.base).name,
              " is a frozen base, which an update would have to round again each time; hint: "
              "lora.rank=16, or precision.base=bf16"));
  masking.validate();
  if (batch.trainer == TrainerType::kDpo) {
    preference.validate(model.lora.rank > 0);
    require(eval.sets.empty() && eval.num_samples == 0 && eval.correct.reward.empty(),
            "eval: sets, num_samples and correct are for completions, which trainer dpo samples "
            "none of; hint: cohort eval CHECKPOINT --rewards CONFIG.yaml");
  }
  if (trains_encoder(batch.trainer)) {
    require(!init_from.empty() || stage > 0 || data.images.path.empty() != model.has_images(),
            "model.image_size: goes with data.images; hint: model.image_size and patch_size for a "
            "new model of images, or model.path=DIR");
    require(model.is_encoder() || !init_from.empty() || stage > 0,
            str("model.mask: trainer ", trainer_name(batch.trainer),
                " needs an encoder; hint: model.mask=full, or model.path=DIR"));
    require(eval.sets.empty() && eval.num_samples == 0 && eval.correct.reward.empty(),
            "eval: sets, num_samples and correct are for completions, which encoders have none of");
  } else {
    require(!model.is_encoder(), str("model.mask: trainer ", trainer_name(batch.trainer),
                                     " needs a causal mask; hint: trainers mlm and classify train "
                                     "encoders"));
  }
  const bool on_cpu = device == "cpu";
  require(dtype != DType::kBF16 || !on_cpu,
          "dtype: bf16 is for CUDA devices; hint: device: cuda, or dtype: f32");
  require(dtype != DType::kF64 || on_cpu, "dtype: f64 is for device: cpu; hint: f32 or bf16");
  require(optimizer.min_learning_rate <= optimizer.learning_rate,
          "min_learning_rate: expected at most learning_rate");
  validate_k(eval, "eval");
  validate_sets(eval);
  environment.validate();
}

TrainConfig default_config(TrainerType trainer, int64_t steps, bool adapters) {
  // Adapters start from zero and are scaled (Schulman et al. 2025, "LoRA Without Regret").
  constexpr double kAdapterRate = 10;
  TrainConfig config;
  config.batch.trainer = trainer;
  config.batch.steps = steps;
  OptimizerConfig& optimizer = config.optimizer;
  const double factor = adapters ? kAdapterRate : 1;
  if (reads_text(trainer)) {
    optimizer.learning_rate *= factor;
    return config;
  }
  optimizer.weight_decay = 0;
  optimizer.adam_beta2 = 0.999;
  if (trainer != TrainerType::kGrpo && trainer != TrainerType::kDpo) {
    optimizer.learning_rate = factor * 2e-5;
    optimizer.warmup_steps = (3 * steps + 99) / 100;
  } else {
    optimizer.learning_rate = factor * 1e-6;
    optimizer.lr_schedule = Schedule::kLinear;
  }
  return config;
}

namespace {

// Earlier versions wrote the values of programs into every section.
void remove_earlier_values(TrainConfig& config) {
  const auto remove = [](ProgramConfig& program) {
    if (program.workers == 1) program.workers.reset();
    if (program.timeout == 10) program.timeout.reset();
  };
  for (RewardConfig& reward : config.rewards)
    if (!is_external(reward)) remove(reward.program);
  EnvironmentConfig& environment = config.environment;
  if (!environment.has_program() && environment.server.url.empty()) remove(environment.program);
}

void init_from_model_path(TrainConfig& config) {
  if (config.model.path.empty()) return;
  if (!config.init_from.empty() && config.init_from != config.model.path)
    throw InputError(str("init_from: ", config.init_from, " contradicts model.path: ",
                         config.model.path, "; hint: give one of them"));
  config.init_from = config.model.path;
}

// The configuration in which only what selects the defaults is given.
TrainConfig defaults_of(const TrainConfig& first) {
  TrainConfig out =
      default_config(first.batch.trainer, first.batch.steps, first.model.lora.rank > 0);
  if (first.grpo.preset == "opd" && !first.has_rewards()) out.batch.num_generations = 1;
  return out;
}

RunPlan plan_of(ConfigNode root, const std::string& path, std::span<const std::string> overrides) {
  RelativePaths paths(path);
  apply_to_root(root, overrides);

  std::vector<ConfigNode> stages;
  if (const ConfigNode* list = root.find("stages")) {
    if (list->kind != ConfigNode::Kind::kList || list->items.empty())
      throw InputError(str(list->where(), ": stages: expected a list with at least one stage"));
    stages = list->items;
    for (ConfigNode& stage : stages) {
      if (stage.kind != ConfigNode::Kind::kMap)
        throw InputError(str(stage.where(), ": stages: expected a map of keys for each stage"));
      for (const std::string& o : overrides)
        if (o.rfind("stages.", 0) != 0 && !lacks_list(stage, o)) apply_override(stage, o);
      paths.resolve(stage);
    }
  }
  paths.resolve(root);
  refuse_reward_texts(root);
  refuse_unknown_keys(root);
  RunPlan plan;
  for (size_t i = 0; i < std::max<size_t>(1, stages.size()); ++i) {
    const auto read = [&](TrainConfig config) {
      read_config(config, root, kStagesKey);
      if (!stages.empty()) read_config(config, stages[i], {}, str("stages.", i));
      return config;
    };
    const TrainConfig first = read({});  // for the trainer, which selects the defaults
    TrainConfig& config = plan.stages.emplace_back(read(defaults_of(first)));
    remove_earlier_values(config);
    config.stage = static_cast<int64_t>(i);
    config.model.lora.seed = static_cast<uint64_t>(config.seed);
    if (config.name.empty()) config.name = fs::path(path).stem().string();
    if (config.output_dir.empty())
      config.output_dir = (fs::current_path() / "runs" / config.name).string();
    config.output_dir = without_end(config.output_dir);
    paths.find_missing(config, plan.missing);
    init_from_model_path(config);
    if (!config.data.jsonl.path.empty() && !gives_format(root) &&
        (stages.empty() || !gives_format(stages[i])))
      detect_format(config.data.jsonl,
                    config.batch.trainer == TrainerType::kClassify ? LineKind::kLabels
                    : config.batch.trainer == TrainerType::kDpo    ? LineKind::kPairs
                                                                   : LineKind::kProblems);
    config.validate();
    // A file that is missing is an error where the environment is made.
    if (config.environment.tool_schemas.empty() || path_exists(config.environment.tool_schemas))
      config.data.tools = tool_schemas(config.environment);
    for (const TrainConfig& other : plan.stages)
      if (!other.data.jsonl.path.empty() && !config.data.jsonl.path.empty() &&
          other.data.jsonl.split_by != config.data.jsonl.split_by)
        throw InputError(
            str("stages.", i,
                ".data.split_by: differs from that of an earlier stage, so that they "
                "would hold out different problems; hint: give it once, beside stages"));
  }
  plan.name = plan.stages[0].name;
  plan.output_dir = plan.stages[0].output_dir;
  return plan;
}

RunPlan read_plan(ConfigNode root, const std::string& path,
                  std::span<const std::string> assignments) {
  rename_refill_rounds(root);
  std::vector<std::string> overrides(assignments.size());
  std::ranges::transform(assignments, overrides.begin(), renamed_override);
  return with_unread_keys(plan_of(std::move(root), path, overrides));
}

}  // namespace

RunPlan load_plan(const std::string& path, std::span<const std::string> overrides) {
  return read_plan(parse_yaml_file(path), path, overrides);
}

RunPlan parse_plan(const std::string& yaml, const std::string& name,
                   std::span<const std::string> overrides) {
  return read_plan(parse_yaml(yaml, name), name, overrides);
}

std::string dump_plan(const RunPlan& plan) {
  return dump_config(plan);
}

}  // namespace cohort
