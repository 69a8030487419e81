#include "data/chat_examples.h"

#include <algorithm>
#include <utility>

#include "text/tokenizers/json_fields.h"
#include "text/utf8.h"

namespace cohort {
namespace {

// Messages whose contents may be truncated, in the order of truncation.
std::vector<size_t> truncation_order(const Json::Array& messages) {
  std::vector<size_t> order;
  if (messages.empty()) return order;
  const size_t end = messages.size() - (has_role(messages.back(), "assistant") ? 1 : 0);
  for (const bool system : {false, true})
    for (size_t i = 0; i < end; ++i)
      if (has_role(messages[i], "system") == system && messages[i].find_text("content") != nullptr)
        order.push_back(i);
  return order;
}

}  // namespace

ChatFormat chat_format(const DataConfig& data, const Tokenizer& tokenizer) {
  Json variables = parse_template_kwargs(data.chat_template_kwargs, "data.chat_template_kwargs");
  if (!data.tools.is_null()) variables.set("tools", data.tools);
  return ChatFormat(tokenizer, std::move(variables));
}

Json with_system(Json messages, const std::string& system) {
  const Json::Array& all = messages.as_array();
  const auto is_system = [](const Json& message) { return has_role(message, "system"); };
  if (system.empty() || std::ranges::any_of(all, is_system)) return messages;
  Json::Array out{make_message("system", system)};
  out.insert(out.end(), all.begin(), all.end());
  return out;
}

ChatRenderer::ChatRenderer(const DataConfig& data, const Tokenizer& tokenizer, Purpose purpose)
    : tokenizer_(tokenizer),
      format_(chat_format(data, tokenizer)),
      system_(data.system),
      purpose_(purpose) {}

void ChatRenderer::render(Example& example) const {
  const Json given = example.messages.is_null()
                         ? Json::Array{make_message("user", example.prompt),
                                       make_message("assistant", example.solution)}
                         : example.messages;
  Json::Array messages = with_system(given, system_).as_array();
  const bool has_more = messages.size() > given.as_array().size();
  if (!has_more && !system_.empty()) has_own_system_ = true;
  if (has_more && example.completion_begin > 0) ++example.completion_begin;
  // The model is to generate the completion, or the final message of the assistant.
  if (purpose_ == Purpose::kAsk && example.completion_begin > 0)
    messages.resize(example.completion_begin);
  else if (purpose_ == Purpose::kAsk && has_role(messages.back(), "assistant"))
    messages.pop_back();
  for (const Json& message : messages)
    if (const std::string* content = message.find_text("content");
        content && has_role(message, "user"))
      example.question = *content;
  example.conversation = std::move(messages);
  example.special = SpecialTokens::kNone;
  with_path(example.where, [&] {
    example.template_variables = template_variables(example.fields);
    render_conversation(example);
  });
  for (Example& rejected : example.rejected) render(rejected);
}

void ChatRenderer::render_conversation(Example& example) const {
  const ChatFormat format = format_.with(example.template_variables);
  if (purpose_ == Purpose::kAsk) {
    example.prompt = format.prompt(example.conversation);
    return;
  }
  ChatFormat::Conversation all =
      format.conversation(example.conversation, example.completion_begin);
  const size_t last = all.assistant.back().first;
  example.prompt = all.text.substr(0, last);
  example.solution = all.text.substr(last);
  example.loss_spans = std::move(all.assistant);
}

std::string ChatRenderer::prompt_of(const Json& messages, const Example& example) const {
  return format_.with(example.template_variables).prompt(messages);
}

void ChatRenderer::truncate(Example& example, int64_t max_prompt) const {
  const Json::Array whole = example.conversation.as_array();
  const std::vector<size_t> order = truncation_order(whole);
  size_t total = 0, content_tokens = 0;
  for (const size_t i : order) {
    total += whole[i].find_text("content")->size();
    content_tokens += tokenizer_.encode(*whole[i].find_text("content")).size();
  }
  std::vector<bool> truncated(whole.size(), false);
  for (size_t dropped = 0, attempt = 1;; ++attempt) {
    const size_t tokens = encode_prompt(example, tokenizer_).size();
    const auto limit = static_cast<size_t>(max_prompt);
    if (tokens <= limit || dropped == total) break;
    // Average bytes of a token for each excess token, and more after each attempt.
    const size_t bytes = (tokens - limit) * total / std::max<size_t>(1, content_tokens);
    dropped = std::min(total, dropped + std::max(bytes, attempt));
    Json::Array messages = whole;
    size_t left = dropped;
    for (const size_t i : order) {
      const std::string& content = *whole[i].find_text("content");
      const size_t begin = next_utf8_boundary(content, std::min(left, content.size()));
      if (begin == 0) break;
      messages[i].set("content", content.substr(begin));
      truncated[i] = true;
      left -= std::min(left, content.size());
    }
    example.conversation = std::move(messages);
    render_conversation(example);
  }
  // One span per message of the assistant, unless the template marks others.
  std::vector<std::pair<size_t, size_t>> kept;
  size_t answer = 0;
  for (size_t i = example.completion_begin; i < whole.size(); ++i)
    if (has_role(whole[i], "assistant")) {
      if (answer < example.loss_spans.size() && !truncated[i])
        kept.push_back(example.loss_spans[answer]);
      ++answer;
    }
  if (answer == example.loss_spans.size()) example.loss_spans = std::move(kept);
}

}  // namespace cohort
