#include "job/unread_keys.h"

#include <cstring>
#include <functional>
#include <map>

namespace cohort {
namespace {

// The keys of a section whose values are not the defaults.
template <class Section>
ConfigFields changed_fields(const Section& section) {
  const ConfigFields given = config_fields(section), defaults = config_fields(Section{});
  ConfigFields out;
  for (size_t i = 0; i < given.size(); ++i)
    if (given[i].second != defaults[i].second) out.push_back(given[i]);
  return out;
}

// note(key, is_read, reader): what alone reads a key, and whether this stage is that.
using Note = std::function<void(const std::string& key, bool is_read, const char* reader)>;

// Notes the keys of dpo, and those of sft and grpo that a stage of dpo may be given by mistake.
void note_keys_of_trainers(const TrainConfig& config, const Note& note) {
  const bool dpo = config.batch.trainer == TrainerType::kDpo,
             grpo = config.batch.trainer == TrainerType::kGrpo;
  for (const auto& [key, value] : changed_fields(config.preference))
    note(str("preference.", key, ": ", value), dpo, "trainer: dpo");
  const bool completes = has_completions(config.batch.trainer);
  if ((dpo || completes) && !config.rewards.empty())
    note("rewards", completes, "trainers sft and grpo");
  if ((dpo || completes) && config.environment.is_set())
    note("environment", completes, "trainers sft and grpo");
  if (dpo || completes)
    for (const auto& [key, value] : changed_fields(config.sampling))
      if (key != "max_completion_length")  // dpo reads it where data.too_long is truncate
        note(str(key, ": ", value), completes, "trainers sft and grpo");
  if (dpo || grpo)  // beta may have been meant for dpo
    for (const auto& [key, value] : changed_fields(config.grpo))
      note(str(key, ": ", value), grpo, "trainer: grpo, and dpo has the section preference");
}

}  // namespace

RunPlan with_unread_keys(RunPlan plan) {
  constexpr const char* kImages = "data.images.path";
  // By "KEY: VALUE", what alone would read the key; nullptr: a stage reads it.
  std::map<std::string, const char*> readers;
  for (const TrainConfig& config : plan.stages) {
    const DataConfig& data = config.data;
    const bool has_jsonl = !data.jsonl.path.empty(), has_text = !data.text.empty(),
               has_images = !data.images.path.empty(),
               has_lines = has_jsonl || !config.eval.sets.empty();
    const struct {
      const char* keys;  // separated by blanks
      bool is_read;
      const char* reader;
    } rows[] = {
        {" task_sizes.min_size task_sizes.max_size task_sizes.worked_share ", !data.task.empty(),
         "data.task"},
        {" jsonl.prompt jsonl.solution ", has_lines && data.jsonl.messages.empty(),
         "lines of data.jsonl without messages"},
        {" jsonl.answer ", has_lines, "lines of data.jsonl"},
        {" jsonl.pair ", config.batch.trainer == TrainerType::kClassify && !has_images,
         "texts of trainer: classify"},
        {" jsonl.rejected ", config.batch.trainer == TrainerType::kDpo, "trainer: dpo"},
        {" images.eval_path images.field images.label images.augment ", has_images, kImages},
        {" jsonl.limit ", has_jsonl, "data.jsonl.path"},
        {" eval_text cache_dir ", has_text, "data.text"},
        {" held_out_fraction ", has_jsonl || has_images || (has_text && data.eval_text.empty()),
         "data.jsonl.path and data.text without eval_text"},
        {" curriculum_patience ", data.curriculum == Curriculum::kOnline,
         "data.curriculum: online"},
        {" fingerprint ", data.task.empty(), "files"},
        {" tokenizer_path ", config.stage == 0 && config.init_from.empty(), "a new model"},
        {" tokenizer ", data.tokenizer_path.empty() && !has_images,
         "a new model of texts without data.tokenizer_path"},
        {" chat ", !has_images, "texts"},
        {" system chat_template_kwargs ", data.is_chat(), "data.chat and data.jsonl.messages"}};
    const auto note = [&](const std::string& key, bool is_read, const char* reader) {
      const auto at = readers.emplace(key, reader).first;
      if (is_read) at->second = nullptr;
    };
    for (const auto& [key, value] : changed_fields(data))
      for (const auto& [keys, is_read, reader] : rows)
        if (std::strstr(keys, str(" ", key, " ").c_str()))
          note(str("data.", key, ": ", value), is_read, reader);
    note_keys_of_trainers(config, note);
    if (const int64_t channels = config.model.channels; channels != ModelConfig().channels)
      note(str("model.channels: ", channels), has_images, kImages);
  }
  for (const auto& [key, reader] : readers)
    if (reader != nullptr)
      plan.stages[0].unread.push_back(
          str(key, " does nothing here: it is for ", reader, "; hint: leave it out"));
  return plan;
}

}  // namespace cohort
