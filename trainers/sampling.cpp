#include "trainers/sampling.h"

#include <algorithm>

#include "core/log.h"
#include "data/chat_examples.h"
#include "nn/families/family.h"
#include "sys/input_file.h"

namespace cohort {
namespace {

// Fields of a generation_config.json, and the keys that they recommend a value of.
constexpr std::pair<const char*, const char*> kRecommended[] = {
    {"do_sample", "temperature"},
    {"temperature", "temperature"},
    {"top_k", "top_k"},
    {"top_p", "top_p"},
    {"min_p", "min_p"},
    {"repetition_penalty", "repetition_penalty"},
    {"presence_penalty", "presence_penalty"},
    {"frequency_penalty", "frequency_penalty"},
    {"max_new_tokens", "max_completion_length"},
    {"max_length", "max_completion_length"},
    {"stop_strings", "stop_strings"},
    {"suppress_tokens", "suppress_tokens"}};

// True for a field that changes no token that is sampled: ids that the tokenizer reads, how
// programs compute, and values that turn a method off.
bool is_neutral(const std::string& field, const Json& value) {
  const auto contains = [&](const char* part) { return field.find(part) != field.npos; };
  constexpr const char *kPrograms[] = {"cache",       "output_",    "assistant", "compile",
                                       "return_dict", "version",    "lookup",    "lookbehind",
                                       "memory",      "renormalize"},
                       *kOffByOne[] = {"num_beam",   "length_penalty", "typical_p", "encoder_rep",
                                       "num_return", "guidance_scale", "top_h"};
  if (is_blank(value) || field.starts_with("_") || std::ranges::any_of(kPrograms, contains))
    return true;
  if (field.ends_with("_token_id") && !field.starts_with("forced_")) return true;
  if (!value.is_number()) return false;
  return value.as_double() == 0 ||
         (value.as_double() == 1 && std::ranges::any_of(kOffByOne, contains));
}

// What a generation_config.json says of texts and tokens. A stop string that is a special token,
// which gives no text, is a stop token.
SamplingConfig stops_of(const std::vector<std::string>& stop_strings,
                        const std::vector<int64_t>& suppressed, const Tokenizer& tokenizer) {
  SamplingConfig out;
  for (const std::string& text : stop_strings) {
    const std::vector<int32_t> ids = tokenizer.encode(text);
    if (ids.size() == 1 && tokenizer.decode(ids).empty())
      out.stop_tokens.push_back(ids[0]);
    else
      out.stop_strings.push_back(text);
  }
  for (const int64_t id : suppressed) out.logit_bias.push_back(str(id, ":-inf"));
  return out;
}

}  // namespace

SamplingConfig recommended_sampling(SamplingConfig sampling, const std::set<std::string>& given,
                                    const std::string& path, const Tokenizer& tokenizer,
                                    int64_t vocab_size) {
  const Json json = parse_json(read_input_file(path), path);
  Json followed = Json::Object{};
  std::string ignored;
  with_places(json, path, [&] {
    for (const auto& [field, value] : json.as_object()) {
      const auto* known = std::ranges::find_if(
          kRecommended, [&, name = field](const auto& entry) { return name == entry.first; });
      if (known == std::end(kRecommended))
        ignored += is_neutral(field, value) ? "" : str(ignored.empty() ? "" : ", ", field);
      else if (!value.is_null() && !given.contains(known->second))
        followed.set(field, value);
    }
  });
  if (!ignored.empty()) logging::warn(path, ": not followed: ", ignored);
  ConfigNode node = parse_yaml(followed.dump(), path);
  for (auto& [key, value] : node.entries) value.line = 0;  // errors name no line
  constexpr double kMaxTokens = 1e15;
  bool do_sample = true;
  std::vector<int64_t> suppressed;
  std::vector<std::string> stop_strings;
  read_config_with(
      [&](ConfigVisitor& v) {
        v.field("stop_strings", stop_strings, "");
        v.field("suppress_tokens", suppressed, "", {.min = 0});
        v.field("do_sample", do_sample, "");
        v.field("max_new_tokens", sampling.max_completion_length, "",
                {.min = 1, .max = kMaxTokens});
        v.field("max_length", sampling.max_total_length, "", {.min = 1, .max = kMaxTokens});
        sampling.visit(v);
      },
      node, "");
  if (!do_sample && !given.contains("top_k") && !given.contains("top_p") &&
      !given.contains("min_p"))
    sampling.temperature = 0;
  if (followed.find("max_new_tokens") != nullptr)
    sampling.max_total_length = 0;
  else if (sampling.max_total_length > 0)
    sampling.max_completion_length = sampling.max_total_length;
  try {
    const SamplingConfig stops = stops_of(stop_strings, suppressed, tokenizer);
    check_sampling_tokens(stops, tokenizer, vocab_size);
    const auto append = [](auto& to, const auto& from) {
      to.insert(to.end(), from.begin(), from.end());
    };
    append(sampling.stop_tokens, stops.stop_tokens);
    append(sampling.stop_strings, stops.stop_strings);
    append(sampling.logit_bias, stops.logit_bias);
  } catch (const InputError& e) {
    throw InputError(str(path, ": ", e.what()));
  }
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
                    int64_t shortest_prompt, int64_t context) {
  if (trainer == TrainerType::kPretrain) return;
  check_sampling_tokens(sampling, tokenizer, tokenizer.vocab_size());
  const int64_t length = sampling.max_completion_length, limit = context - shortest_prompt;
  if (trainer == TrainerType::kGrpo && length > limit)
    throw InputError(
        str("max_completion_length: ", length, " tokens fit after no prompt: the shortest has ",
            shortest_prompt, ", the model's context is ", context,
            "; hint: max_completion_length=", limit, " at most, or a larger model.context"));
}

}  // namespace cohort
