#include "text/chat.h"

#include <algorithm>

namespace cohort {
namespace {

ChatTemplate template_of(const Tokenizer& tokenizer) {
  const auto found = find_chat_template(tokenizer.files());
  if (!found)
    throw InputError(
        "the model's folder has no chat template; hint: it is looked for in chat_template.jinja "
        "and in tokenizer_config.json");
  return ChatTemplate(*found, "chat template");
}

// The first `end` messages.
Json first_messages(const Json& messages, size_t end) {
  const Json::Array& all = messages.as_array();
  return Json::Array(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(end));
}

}  // namespace

Json parse_template_kwargs(const std::string& text, const std::string& where) {
  if (text.empty()) return {};
  Json kwargs = parse_json(text, where);
  if (!kwargs.is_object()) throw InputError(where + ": expected an object like '{\"a\": true}'");
  return kwargs;
}

bool has_role(const Json& message, std::string_view role) {
  const std::string* found = message.find_text("role");
  return found != nullptr && *found == role;
}

Json make_message(const std::string& role, const std::string& content) {
  return Json().set("role", role).set("content", content);
}

ChatFormat::ChatFormat(const Tokenizer& tokenizer, Json kwargs)
    : template_(template_of(tokenizer)), variables_(special_token_variables(tokenizer.files())) {
  if (kwargs.is_null()) return;
  for (const auto& [name, value] : kwargs.as_object()) variables_.set(name, value);
}

ChatTemplate::Rendered ChatFormat::render(const Json& messages, Prompt prompt) const {
  Json context = variables_;
  context.set("messages", messages).set("add_generation_prompt", prompt == Prompt::kYes);
  return template_.render(context);
}

std::string ChatFormat::prompt(const Json& messages) const {
  return render(messages, Prompt::kYes).text;
}

ChatFormat::Conversation ChatFormat::conversation(const Json& messages, size_t first) const {
  ChatTemplate::Rendered whole = render(messages, Prompt::kNo);
  Conversation out{std::move(whole.text), std::move(whole.generation_spans)};
  if (template_.has_generation_blocks() && first > 0) {
    const size_t before =
        render(first_messages(messages, first), Prompt::kNo).generation_spans.size();
    out.assistant.erase(out.assistant.begin(),
                        out.assistant.begin() +
                            static_cast<std::ptrdiff_t>(std::min(before, out.assistant.size())));
  }
  if (template_.has_generation_blocks() && !out.assistant.empty()) return out;
  const Json::Array& all = messages.as_array();
  for (size_t i = first; i < all.size(); ++i) {
    if (!has_role(all[i], "assistant")) continue;
    const std::string before = prompt(first_messages(messages, i));
    const std::string after = render(first_messages(messages, i + 1), Prompt::kNo).text;
    if (!after.starts_with(before) || !out.text.starts_with(after))
      throw InputError(str("message ", i + 1,
                           ": the chat template changes the text before it, so the assistant's "
                           "text cannot be located; hint: a template with {% generation %} "
                           "blocks, or conversations of one turn"));
    out.assistant.emplace_back(before.size(), after.size());
  }
  if (out.assistant.empty())
    throw InputError("no message has the role assistant: there is nothing to train on");
  return out;
}

std::vector<ChatFormat::Piece> ChatFormat::continuation(const Json&, bool) const {
  throw Error("not there yet");
}

bool ChatFormat::keeps_turns(std::string_view) const {
  throw Error("not there yet");
}

std::vector<int32_t> encode_pieces(const Tokenizer&, std::span<const ChatFormat::Piece>) {
  throw Error("not there yet");
}

ChatFormat::EndOfTurn ChatFormat::end_of_turn(const Tokenizer& tokenizer) const {
  const std::string content = "so it is said";  // not part of any template
  const std::string text =
      render(Json::Array{make_message("user", content), make_message("assistant", content)},
             Prompt::kNo)
          .text;
  const size_t at = text.rfind(content);
  if (at == text.npos) return {};
  EndOfTurn end{.text = text.substr(at + content.size())};
  for (const int32_t id : tokenizer.encode(end.text))
    // Special tokens decode to no text.
    if (tokenizer.decode({&id, 1}).empty()) return {.token = id};
  return end;
}

}  // namespace cohort
