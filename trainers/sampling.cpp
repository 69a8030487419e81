#include "trainers/sampling.h"

#include <algorithm>
#include <cmath>

#include "core/log.h"
#include "data/chat_examples.h"
#include "nn/families/family.h"
#include "sys/input_file.h"

namespace cohort {
namespace {

// True for a field that changes no token that is sampled: ids that the tokenizer reads, how
// programs compute, and values that turn a method off.
bool is_neutral(const std::string& field, const Json& value) {
  const auto begins_with = [&](std::initializer_list<const char*> names) {
    return std::ranges::any_of(names, [&](const char* name) { return field.starts_with(name); });
  };
  if (is_blank(value) ||
      begins_with({"_", "bos_token", "eos_token", "pad_token", "decoder_start", "transformers_",
                   "use_cache", "cache_", "output_", "return_dict", "assistant_", "num_assistant",
                   "prompt_lookup"}))
    return true;
  const double number =
      value.is_number() && !field.ends_with("_token_id") ? value.as_double() : NAN;
  return number == 0 ||
         (number == 1 && begins_with({"num_", "length_penalty", "typical_p", "guidance_scale",
                                      "encoder_repetition_penalty"}));
}

}  // namespace

SamplingConfig recommended_sampling(SamplingConfig sampling, const std::set<std::string>& given,
                                    const std::string& path, const Tokenizer& tokenizer,
                                    int64_t vocab_size) {
  bool do_sample = true;
  std::vector<int64_t> suppressed;
  const auto visit = [&](ConfigVisitor& v) {
    v.field("do_sample", do_sample, "");
    v.field("suppress_tokens", suppressed, "",
            {.min = 0, .max = static_cast<double>(vocab_size - 1)});
    v.field("max_new_tokens", sampling.max_completion_length, "", {.min = 1, .max = 1e15});
    v.field("max_length", sampling.max_total_length, "", {.min = 1, .max = 1e15});
    sampling.visit(v);
  };
  const std::vector<std::string> known = config_keys_with(visit);
  const Json json = parse_json(read_input_file(path), path);
  Json followed = Json::Object{};
  std::string ignored;
  with_location(json, path, [&] {
    for (const auto& [field, value] : json.as_object())
      if (std::ranges::find(known, field) == known.end())
        ignored += is_neutral(field, value) ? "" : str(ignored.empty() ? "" : ", ", field);
      else if (!value.is_null() && !given.contains(field))
        followed.set(field, value);
  });
  if (!ignored.empty()) logging::warn(path, ": not followed: ", ignored);
  ConfigNode node = parse_yaml(followed.dump(), path);
  for (auto& [key, value] : node.entries) {  // errors name no line
    value.line = 0;
    for (ConfigNode& item : value.items) item.line = 0;
  }
  read_config_with(visit, node, "");
  if (!do_sample) sampling.temperature = 0;
  if (followed.find("max_new_tokens") != nullptr)
    sampling.max_total_length = 0;
  else if (sampling.max_total_length > 0)
    sampling.max_completion_length = sampling.max_total_length;
  for (const int64_t id : suppressed) sampling.logit_bias.push_back(str(id, ":-inf"));
  if (followed.find("stop_strings") == nullptr) return sampling;
  with_path(path, [&] {
    // A special token gives no text that could be a stop string.
    std::erase_if(sampling.stop_strings, [&](const std::string& text) {
      const std::vector<int32_t> ids = tokenizer.encode(text);
      const bool is_token = ids.size() == 1 && tokenizer.decode(ids).empty();
      if (is_token) sampling.stop_tokens.push_back(ids[0]);
      return is_token;
    });
    check_sampling_tokens({.stop_strings = sampling.stop_strings}, tokenizer, vocab_size);
  });
  return sampling;
}

SamplingConfig sampling_for(SamplingConfig sampling, const DataConfig& data,
                            const Tokenizer& tokenizer) {
  if (data.is_chat())
    add_end_of_turn(sampling, chat_format(data, tokenizer).end_of_turn(tokenizer));
  return sampling;
}

void add_end_of_turn(SamplingConfig& sampling, const ChatFormat::EndOfTurn& end) {
  if (end.token)
    sampling.stop_tokens.push_back(*end.token);
  else if (!end.text.empty())
    sampling.stop_strings.push_back(end.text);
}

void check_sampling(const SamplingConfig& sampling, TrainerType trainer, const Tokenizer& tokenizer,
                    int64_t shortest_prompt, int64_t context, ContextLimit limit) {
  if (!has_completions(trainer)) return;
  check_sampling_tokens(sampling, tokenizer, tokenizer.vocab_size());
  const int64_t length = sampling.max_completion_length, longest = context - shortest_prompt;
  if (trainer == TrainerType::kGrpo && length > longest)
    throw InputError(str("max_completion_length: ", length,
                         " tokens fit after no prompt: the shortest has ", shortest_prompt,
                         ", the model's context is ", context,
                         context_hint(limit, str("max_completion_length=", longest, " at most"))));
}

}  // namespace cohort
