#include "text/chat.h"

#include <algorithm>
#include <cctype>

#include "text/utf8.h"

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

// Throws InputError with the roles of messages that lack one: `missing`, and why it is needed.
[[noreturn]] void fail_roles(const Json& messages, const char* missing) {
  std::vector<std::string> roles;
  for (const Json& message : messages.as_array())
    if (const std::string* role = message.find_text("role");
        role != nullptr && std::ranges::find(roles, *role) == roles.end())
      roles.push_back(*role);
  throw InputError(str("no message has the role ", missing, "; the roles are ", join(roles, ", "),
                       "; hint: user and assistant"));
}

// Placeholders of contents. They are alphanumeric, so that filters of templates leave them as they
// are.
constexpr const char *kQuestionPlaceholder = "q7question7q", *kTurnPlaceholder = "q7turn7q",
                     *kThinkingPlaceholder = "q7thinking7q";
std::string content_placeholder(size_t i) {
  return str("q7content", i, "q");
}

// A text of an observed message, which a program or a model may have written, and its placeholder.
struct Slot {
  size_t message;
  std::string key, placeholder, text;
  std::string shown = {};  // the text as the template writes it
};

// Returns true if a name or an id cannot be taken for a part of the template, a special token or a
// placeholder.
bool is_ordinary(const Tokenizer& tokenizer, const std::string& name) {
  const auto is_plain = [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '_' || c == '-' || c == '.';
  };
  if (!std::ranges::all_of(name, is_plain) || name.find("q7") != name.npos) return false;
  try {
    return tokenizer.encode(name) == tokenizer.encode_with_plain(name, {{0, name.size()}});
  } catch (const InputError&) {  // a character without a token, which need not be shown
    return false;
  }
}

// Replaces the contents of observed messages by placeholders, and the names and ids that are not
// ordinary. Each message of a tool gets the id of a call. Mistral's templates take ids of 9
// characters.
std::vector<Slot> take_slots(const Tokenizer& tokenizer, Json::Array& observed) {
  std::vector<Slot> slots;
  for (size_t i = 0; i < observed.size(); ++i) {
    Json& message = observed[i];
    const std::string* id = message.find_text("tool_call_id");
    if (has_role(message, "tool") && (id == nullptr || id->empty()))
      message.set("tool_call_id", str("call", 10'000 + i));
    for (const auto& [key, placeholder] :
         {std::pair("content", content_placeholder(i)), std::pair("name", str("q7name", i, "q")),
          std::pair("tool_call_id", str("q7id", 10'000 + i))}) {
      const std::string* text = message.find_text(key);
      if (text == nullptr ||
          (placeholder != content_placeholder(i) && is_ordinary(tokenizer, *text)))
        continue;
      slots.push_back({i, key, placeholder, *text});
      message.set(key, placeholder);
    }
  }
  return slots;
}

// Appends text of the template, in which placeholders become content.
void append_text(std::vector<ChatFormat::Piece>& pieces, std::string_view text,
                 std::span<const Slot> slots) {
  for (const Slot& slot : slots)
    if (const size_t at = text.find(slot.placeholder); at != text.npos) {
      append_text(pieces, text.substr(0, at), slots);
      if (!slot.shown.empty()) pieces.push_back({slot.shown, true});
      return append_text(pieces, text.substr(at + slot.placeholder.size()), slots);
    }
  if (!text.empty()) pieces.push_back({std::string(text)});
}

// A turn of the assistant before the observed messages, in the forms that templates accept: with a
// call for each message of a tool, whose arguments are an object or JSON text, then without calls.
// The last call has kTurnPlaceholder.
std::vector<Json> turn_placeholders(const Json::Array& observed) {
  std::vector<Json> turns;
  for (const bool is_text : {false, true}) {
    Json turn = make_message("assistant", "");
    Json::Array calls;
    for (size_t i = observed.size(); i-- > 0;) {
      const Json& message = observed[i];
      if (!has_role(message, "tool")) continue;
      const std::string *id = message.find_text("tool_call_id"), *name = message.find_text("name");
      const Json object = Json().set("argument", calls.empty() ? kTurnPlaceholder : "");
      calls.insert(calls.begin(), make_tool_call(*id, name == nullptr ? "tool" : *name,
                                                 is_text ? Json(object.dump()) : object));
    }
    if (!calls.empty()) turns.push_back(turn.set("tool_calls", std::move(calls)));
  }
  turns.push_back(make_message("assistant", kTurnPlaceholder));
  return turns;
}

Json placeholder_conversation(const Json& turn, const Json::Array& observed) {
  Json::Array all{make_message("user", kQuestionPlaceholder), turn};
  all.insert(all.end(), observed.begin(), observed.end());
  return all;
}

// The result of attempt() for the first of the turns for which it throws no InputError.
template <class Attempt>
auto first_accepted(const std::vector<Json>& turns, const Attempt& attempt) {
  for (size_t i = 0;; ++i) {
    try {
      return attempt(turns[i]);
    } catch (const InputError&) {
      if (i + 1 == turns.size()) throw;
    }
  }
}

// True for special tokens and for added ones, which no plain text becomes.
bool is_own_token(const Tokenizer& tokenizer, int32_t id) {
  // Special tokens decode to no text.
  if (tokenizer.decode({&id, 1}).empty()) return true;
  const std::string text = tokenizer.decode({&id, 1}, SpecialText::kShow);
  const ByteRanges all{std::pair<size_t, size_t>(0, text.size())};
  return is_utf8(text) && tokenizer.encode(text) == std::vector{id} &&
         tokenizer.encode_with_plain(text, all) != std::vector{id};
}

// A rendered placeholder conversation, and the bytes where its parts begin.
struct Layout {
  Json message;  // the assistant's
  std::string text;
  size_t turn = 0;                // kTurnPlaceholder
  size_t end = 0, after_end = 0;  // the end of the assistant's turn
};

// `ends`: texts that may end a turn. Throws InputError if the text does not show the turn, and then
// each content once, or if a turn with calls has no end.
Layout find_layout(const Json& turn, std::string rendered, size_t num_observed,
                   std::span<const std::string> ends) {
  Layout out{.message = turn, .text = std::move(rendered)};
  const std::string_view text = out.text;
  out.turn = text.find(kTurnPlaceholder);
  if (out.turn == text.npos)
    throw InputError("the chat template does not show the assistant's turn before an observation");
  for (size_t i = 0, from = out.turn; i < num_observed; ++i) {
    const size_t at = text.find(content_placeholder(i));
    if (at == text.npos || at < from || text.rfind(content_placeholder(i)) != at)
      throw InputError(str("observation, message ", i + 1,
                           ": the chat template does not show its content once after a turn of "
                           "the assistant; hint: another role, such as user"));
    from = at;
  }
  const size_t limit = std::min(text.find(content_placeholder(0)), text.size());
  out.end = out.after_end =
      text.rfind(kTurnPlaceholder, limit) + std::string_view(kTurnPlaceholder).size();
  const std::string_view gap = text.substr(out.end, limit - out.end);
  size_t first = gap.npos;
  for (const std::string& end : ends)
    if (const size_t at = gap.find(end); !end.empty() && at < first) {
      first = at;
      out.after_end = out.end + at + end.size();
    }
  if (first != gap.npos)
    out.end += first;
  else if (turn.find("tool_calls") != nullptr)
    throw InputError("the chat template writes no end of a turn with tool calls");
  return out;
}

// The content of a message of this role as templates take it.
Json normalized_content(const Json& content, const std::string& role) {
  const bool may_be_result = role != "system" && role != "user" && role != "assistant";
  const bool has_parts = content.is_array() && !content.as_array().empty() &&
                         content.as_array()[0].find("type") != nullptr;
  if (may_be_result && !has_parts) return content;
  if (content.is_string() || content.is_number()) return content.to_text();
  std::string text;
  for (const Json& part : content.as_array()) {
    if (part.at("type").as_string() != "text")
      throw JsonError("expected a part of the type text; others cannot be read", &part);
    text += part.at("text").as_string();
  }
  return text;
}

// A message without keys that are null.
Json normalized_message(const Json& message) {
  Json kept;
  const std::string& role = message.at("role").as_string();
  for (const auto& [key, value] : message.as_object())
    if (!value.is_null()) kept.set(key, key == "content" ? normalized_content(value, role) : value);
  const Json& calls = kept.get_or_null("tool_calls");
  const size_t empty = calls.is_array() && calls.as_array().empty() ? 2 : 1;  // keys
  const Json* content = message.find("content");
  const bool is_bare = std::ranges::all_of(kept.as_object(), [](const auto& entry) {
    return entry.first == "role" || entry.first == "name";
  });
  if (kept.find("content") == nullptr &&
      (kept.as_object().size() == empty || (role == "user" && (is_bare || content != nullptr))))
    throw JsonError(str("expected a text, got ", content == nullptr ? "no content" : "null",
                        "; hint: write it, or remove the message"),
                    content);
  return kept;
}

}  // namespace

Json parse_template_kwargs(const std::string& text, const std::string& where) {
  if (text.empty()) return {};
  Json kwargs = parse_json(text, where);
  if (!kwargs.is_object()) throw InputError(where + ": expected an object like '{\"a\": true}'");
  return kwargs;
}

Json template_variables(const Json& fields) {
  const auto value_of = [&](const char* name) {
    const std::string* text = fields.find_text(name);
    if (text == nullptr) return fields.get_or_null(name);
    return text->empty() ? Json() : parse_json(*text, name);
  };
  Json variables = value_of("chat_template_kwargs"), tools = value_of("tools");
  if (!variables.is_null() && !variables.is_object())
    throw InputError("chat_template_kwargs: expected an object, or its text");
  for (const char* name : {"messages", "add_generation_prompt", "tools"})
    if (variables.find(name) != nullptr)
      throw InputError(
          str("chat_template_kwargs: '", name, "' has its own place; hint: remove it"));
  if (tools.is_null()) return variables;
  if (!tools.is_array() || !std::ranges::all_of(tools.as_array(), &Json::is_object))
    throw InputError("tools: expected a list of JSON schemas, or its text");
  return variables.set("tools", std::move(tools));
}

Json normalized_messages(const Json& messages, const std::string& where) {
  Json out = Json::Array{};
  for (const Json& message : messages.as_array()) {
    const std::string* role = message.find_text("role");
    const std::string place = str(where, ": message ", out.as_array().size() + 1,
                                  role == nullptr ? "" : str(" (", *role, ")"));
    out.push_back(with_location(message, place, [&] { return normalized_message(message); }));
  }
  return out;
}

bool has_role(const Json& message, std::string_view role) {
  const std::string* found = message.find_text("role");
  return found != nullptr && *found == role;
}

Json make_message(const std::string& role, const std::string& content) {
  return Json().set("role", role).set("content", content);
}

Json make_tool_call(const std::string& id, const std::string& name, Json arguments) {
  return Json()
      .set("id", id)
      .set("type", "function")
      .set("function", Json().set("name", name).set("arguments", std::move(arguments)));
}

ChatFormat::ChatFormat(const Tokenizer& tokenizer, Json kwargs)
    : template_(template_of(tokenizer)), variables_(special_token_variables(tokenizer.files())) {
  *this = with(kwargs);
}

ChatFormat ChatFormat::with(const Json& variables) const {
  ChatFormat out = *this;
  if (variables.is_null()) return out;
  const Json &ours = variables_.get_or_null("tools"), &theirs = variables.get_or_null("tools");
  if (!ours.is_null() && !theirs.is_null() && ours.dump() != theirs.dump())
    throw InputError(
        "tools: they differ from those of the run (its environment or data.chat_template_kwargs); "
        "hint: give them in one place");
  for (const auto& [name, value] : variables.as_object()) out.variables_.set(name, value);
  return out;
}

ChatTemplate::Rendered ChatFormat::render(const Json& messages, Prompt prompt) const {
  Json context = variables_;
  context.set("messages", messages).set("add_generation_prompt", prompt == Prompt::kYes);
  return template_.render(context);
}

std::string ChatFormat::prompt(const Json& messages) const {
  const Json::Array& all = messages.as_array();
  const auto is_unknown = [](const Json& message) {
    constexpr const char* kRoles[] = {"system", "developer", "user", "assistant", "tool"};
    return std::ranges::none_of(kRoles, [&](auto* role) { return has_role(message, role); });
  };
  // Many templates write any role, which the model may not know.
  if (std::ranges::any_of(all, is_unknown) &&
      std::ranges::none_of(all, [](const Json& m) { return has_role(m, "user"); }))
    fail_roles(messages, "user");
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
  if (out.assistant.empty()) fail_roles(messages, "assistant: there is nothing to train on");
  return out;
}

std::vector<ChatFormat::Piece> ChatFormat::continuation(const Tokenizer& tokenizer,
                                                        const Json& messages, bool with_end) const {
  with_location(messages, "observation", [&] {
    for (const Json& message : messages.as_array()) message.at("content").as_string();
  });
  Json::Array observed = messages.as_array();
  std::vector<Slot> slots = take_slots(tokenizer, observed);
  const EndOfTurn end_of_turn = this->end_of_turn(tokenizer);
  std::vector<std::string> ends{end_of_turn.token ? "" : end_of_turn.text};
  std::vector<int32_t> ids = tokenizer.stop_ids();
  if (end_of_turn.token) ids.push_back(*end_of_turn.token);
  for (const int32_t id : ids) ends.push_back(tokenizer.decode({&id, 1}, SpecialText::kShow));
  const Layout layout = first_accepted(turn_placeholders(observed), [&](const Json& turn) {
    return find_layout(turn, prompt(placeholder_conversation(turn, observed)), observed.size(),
                       ends);
  });
  const std::string placeholders = placeholder_conversation(layout.message, observed).dump();
  const std::string placeholder_text = layout.text.substr(layout.turn);
  for (Slot& slot : slots) {
    const auto quoted = [](const std::string& text) { return Json(text).dump(); };
    const std::string text = prompt(parse_json(
        replaced(placeholders, quoted(slot.placeholder), quoted(slot.text)), "placeholders"));
    const std::string rest = text.substr(std::min(text.find(kTurnPlaceholder), text.size()));
    const size_t own =
        replaced(placeholder_text, slot.placeholder, "").size();  // bytes of the template itself
    const size_t count = (placeholder_text.size() - own) / slot.placeholder.size();
    if (count > 0 && rest.size() > own)
      slot.shown =
          rest.substr(placeholder_text.find(slot.placeholder), (rest.size() - own) / count);
    if (rest != replaced(placeholder_text, slot.placeholder, slot.shown))
      throw InputError(str("observation, message ", slot.message + 1,
                           ": the chat template changes its own text for the ", slot.key, " ",
                           excerpt(slot.text)));
  }
  std::vector<Piece> pieces;
  append_text(pieces,
              std::string_view(layout.text).substr(with_end ? layout.end : layout.after_end),
              slots);
  return pieces;
}

bool ChatFormat::keeps_turns(std::string_view role) const {
  const Json::Array observed{make_message(std::string(role), content_placeholder(0))
                                 .set("name", "tool")
                                 .set("tool_call_id", "call10000")};
  const std::string thinking =
      str("<think>\n", kThinkingPlaceholder, "\n</think>\n\n", kTurnPlaceholder);
  std::vector<Json> turns = turn_placeholders(observed), attempts;
  std::reverse(turns.begin(), turns.end());
  for (const std::string& content : {thinking, std::string(kTurnPlaceholder)})
    for (Json& turn : turns) attempts.push_back(turn.set("content", content));
  try {
    return first_accepted(attempts, [&](const Json& turn) {
      const std::string last = render(placeholder_conversation(turn, {}), Prompt::kNo).text;
      const bool thinks = turn.at("content").as_string() == thinking;
      const size_t begin = last.find(thinks ? kThinkingPlaceholder : kTurnPlaceholder);
      const size_t end = last.find(kTurnPlaceholder, begin);
      const std::string after = prompt(placeholder_conversation(turn, observed));
      return end != last.npos &&
             after.find(last.substr(begin, end - begin) + kTurnPlaceholder) != after.npos;
    });
  } catch (const InputError&) {
    return false;
  }
}

std::vector<int32_t> encode_pieces(const Tokenizer& tokenizer,
                                   std::span<const ChatFormat::Piece> pieces) {
  std::string text;
  ByteRanges plain;
  for (const ChatFormat::Piece& piece : pieces) {
    if (piece.is_content && !piece.text.empty())
      plain.emplace_back(text.size(), text.size() + piece.text.size());
    text += piece.text;
  }
  return tokenizer.encode_with_plain(text, plain);
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
    if (is_own_token(tokenizer, id)) return {.token = id};
  return end;
}

}  // namespace cohort
