#include "rl/rewards/judge.h"

#include <charconv>

#include "data/tasks/tasks.h"
#include "text/chat.h"
#include "text/utf8.h"

namespace cohort {
namespace {

constexpr int kMaxTries = 64;  // at a JSON object in a text

// "assistant: ...", one paragraph per message.
std::string transcript_text(const Json& messages) {
  std::string out;
  for (const Json& message : messages.as_array())
    out += str(out.empty() ? "" : "\n\n", message.at("role").to_text(), ": ",
               message.get_or_null("content").to_text());
  return out;
}

}  // namespace

Judge::Judge(const RewardConfig& config)
    : config_(config.judge), prompt_("prompt", config.judge.prompt), finder_(config.pattern) {
  if (config_.model.empty()) throw InputError("model: needs the name of the judge's model");
  if (config_.prompt.empty())
    throw InputError(
        "prompt: needs a template; hint: prompt: \"Rate this answer to {prompt} from 0 "
        "to 10, as a number alone: {completion}\"");
  if (!config.pattern.empty() && !config_.field.empty())
    throw InputError("field: pattern is given too; hint: one of them finds the score");
  if (config_.scale.size() != 2 || config_.scale[0] == config_.scale[1])
    throw InputError("scale: expected two different numbers, the worst and the best score");
}

Json Judge::request(const RewardInput& in, int64_t vote) const {
  Json fields = in.example.fields;
  const std::string completion(in.completion);
  if (fields.find("prompt") == nullptr) fields.set("prompt", in.example.prompt);
  if (fields.find("answer") == nullptr && !in.example.answer.empty())
    fields.set("answer", in.example.answer);
  fields.set("completion", completion)
      .set("transcript",
           in.transcript == nullptr ? "assistant: " + completion : transcript_text(*in.transcript));
  Json messages = Json::Array{};
  if (!config_.system.empty()) messages.push_back(make_message("system", config_.system));
  messages.push_back(make_message("user", prompt_.render(fields, "reward judge")));
  return Json()
      .set("model", config_.model)
      .set("messages", std::move(messages))
      .set("temperature", config_.temperature)
      .set("max_tokens", config_.max_tokens)
      .set("seed", vote);
}

std::string Judge::judgement(const std::string& text) const {
  if (config_.field.empty()) {
    if (const auto found = finder_.find(text)) return *found;
    throw InputError(str("the pattern does not match its answer ", excerpt(text, 160, 80)));
  }
  // The first text between braces that is an object: one may quote others before it.
  const size_t end = text.rfind('}');
  size_t begin = text.find('{');
  for (int tries = 0; tries < kMaxTries && begin < end && end != text.npos; ++tries) {
    try {
      const Json object = parse_json(text.substr(begin, end + 1 - begin), "its answer");
      return object.at(config_.field).to_text();
    } catch (const JsonError&) {
      throw InputError(
          str("its answer has no field '", config_.field, "': ", excerpt(text, 160, 80)));
    } catch (const InputError&) {
      begin = text.find('{', begin + 1);
    }
  }
  throw InputError(str("its answer has no JSON object: ", excerpt(text, 160, 80)));
}

double Judge::score(const Json& answer, std::string& text) const {
  const Json::Array& choices = answer.at("choices").as_array();
  if (choices.empty()) throw InputError("its answer has no choices");
  text = choices[0].at("message").at("content").as_string();
  const std::string found = judgement(text);
  const std::string_view number = trimmed(found);
  double value = 0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), value);
  if (number.empty() || error != std::errc() || end != number.data() + number.size())
    throw InputError(
        str("its score is no number: ", excerpt(found), " in ", excerpt(text, 160, 80)));
  const double from = config_.scale[0], to = config_.scale[1];
  if (!(value >= std::min(from, to) && value <= std::max(from, to)))
    throw InputError(
        str("its score ", excerpt(found), " is outside of the scale from ", from, " to ", to));
  return (value - from) / (to - from);
}

void JudgeConfig::visit(ConfigVisitor& v) {
  v.field("model", model, "judge: name of the model, as its server has it");
  v.field("prompt", prompt,
          "judge: template of the request over the line's fields, {completion}, {prompt}, {answer} "
          "and {transcript}; {{ and }} are braces");
  v.field("system", system, "judge: system message; empty: none");
  v.field("field", field,
          "judge: field of the answer's JSON object with the score, in place of pattern");
  v.field("scale", scale, "judge: the scores that count 0 and 1", {.min = -1e9, .max = 1e9});
  v.field("temperature", temperature, "judge: sampling temperature", {.min = 0, .max = 10});
  v.field("max_tokens", max_tokens, "judge: tokens of an answer", {.min = 1, .max = 1 << 20});
  v.field("votes", votes, "judge: answers per completion, of the seeds 0, 1, ...; the mean counts",
          {.min = 1, .max = 1000});
}

}  // namespace cohort
