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

// Stubs of contents. They are alphanumeric, so that filters of templates leave them as they are.
constexpr const char *kQuestionStub = "q7question7q", *kTurnStub = "q7turn7q",
                     *kThinkingStub = "q7thinking7q";
std::string content_stub(size_t i) {
  return str("q7content", i, "q");
}

// Observed messages with stubs as contents. Each message of a tool has the id of a call.
Json::Array observed_stubs(const Json& messages) {
  return with_places(messages, "observation", [&] {
    Json::Array stubs = messages.as_array();
    for (size_t i = 0; i < stubs.size(); ++i) {
      messages.as_array()[i].at("content").as_string();
      stubs[i].set("content", content_stub(i));
      const std::string* id = stubs[i].find_text("tool_call_id");
      // Mistral's templates take ids of 9 characters.
      if (has_role(stubs[i], "tool") && (id == nullptr || id->empty()))
        stubs[i].set("tool_call_id", str("call", 10'000 + i));
    }
    return stubs;
  });
}

// A name or an id of observed messages, which a model may have written, with its stub.
struct NamedStub {
  std::string stub, value;
  std::string shown = {};  // as the template writes it
};

// True if a name or an id cannot be taken for a part of the template, a special token or a stub.
bool is_ordinary(const Tokenizer& tokenizer, const std::string& name) {
  const auto is_plain = [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '_' || c == '-' || c == '.';
  };
  if (!std::ranges::all_of(name, is_plain)) return false;
  if (name.find("q7") != name.npos || name.starts_with("call2")) return false;  // as stubs
  try {
    return tokenizer.encode(name) == tokenizer.encode_with_plain(name, {{0, name.size()}});
  } catch (const InputError&) {  // a character without a token, which need not be shown
    return false;
  }
}

// Replaces the other names and ids of messages by stubs. Those of ids have 9 characters.
std::vector<NamedStub> take_names(const Tokenizer& tokenizer, Json::Array& observed) {
  std::vector<NamedStub> out;
  for (size_t i = 0; i < observed.size(); ++i)
    for (const auto& [key, stub] : {std::pair("name", str("q7name", i, "q")),
                                    std::pair("tool_call_id", str("call", 20'000 + i))})
      if (const std::string* value = observed[i].find_text(key);
          value != nullptr && !is_ordinary(tokenizer, *value)) {
        out.push_back({stub, *value});
        observed[i].set(key, stub);
      }
  return out;
}

// Appends text of the template, in which stubs of names become content.
void append_text(std::vector<ChatFormat::Piece>& pieces, std::string_view text,
                 std::span<const NamedStub> names) {
  for (const NamedStub& name : names)
    if (const size_t at = text.find(name.stub); at != text.npos) {
      append_text(pieces, text.substr(0, at), names);
      pieces.push_back({name.shown, true});
      return append_text(pieces, text.substr(at + name.stub.size()), names);
    }
  if (!text.empty()) pieces.push_back({std::string(text)});
}

// A turn of the assistant before the observed messages, in the forms that templates accept: with a
// call for each message of a tool, whose arguments are an object or JSON text, then without calls.
std::vector<Json> turn_stubs(const Json::Array& observed) {
  std::vector<Json> turns;
  const Json object = Json().set("argument", kTurnStub);
  for (const Json& arguments : {object, Json(object.dump())}) {
    Json turn = make_message("assistant", "");
    for (const Json& message : observed) {
      if (!has_role(message, "tool")) continue;
      const std::string *id = message.find_text("tool_call_id"), *name = message.find_text("name");
      turn["tool_calls"].push_back(
          make_tool_call(*id, name == nullptr ? "tool" : *name, arguments));
    }
    if (turn.find("tool_calls") != nullptr) turns.push_back(std::move(turn));
  }
  turns.push_back(make_message("assistant", kTurnStub));
  return turns;
}

Json stub_conversation(const Json& turn, const Json::Array& observed) {
  Json::Array all{make_message("user", kQuestionStub), turn};
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

// A rendered stub conversation, and the bytes where its parts begin.
struct Layout {
  Json message;  // the assistant's
  std::string text;
  size_t turn = 0;                // kTurnStub
  size_t end = 0, after_end = 0;  // the end of the assistant's turn
  std::vector<size_t> contents;   // the observed contents
};

// `ends`: texts that may end a turn. Throws InputError if the text does not show the turn, and then
// each content once, or if a turn with calls has no end.
Layout find_layout(const Json& turn, std::string rendered, size_t num_observed,
                   std::span<const std::string> ends) {
  Layout out{.message = turn, .text = std::move(rendered)};
  const std::string_view text = out.text;
  out.turn = text.find(kTurnStub);
  if (out.turn == text.npos)
    throw InputError("the chat template does not show the assistant's turn before an observation");
  for (size_t i = 0, from = out.turn; i < num_observed; ++i) {
    const size_t at = text.find(content_stub(i));
    if (at == text.npos || at < from || text.rfind(content_stub(i)) != at)
      throw InputError(str("observation, message ", i + 1,
                           ": the chat template does not show its content once after a turn of "
                           "the assistant; hint: another role, such as user"));
    out.contents.push_back(from = at);
  }
  const size_t limit = num_observed > 0 ? out.contents[0] : text.size();
  out.end = out.after_end = text.rfind(kTurnStub, limit) + std::string_view(kTurnStub).size();
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
  if (content.is_string() || (may_be_result && !has_parts)) return content;
  if (content.is_number()) return content.to_text();
  std::string text;
  for (const Json& part : content.as_array()) {
    if (part.at("type").as_string() != "text")
      throw JsonError("expected a part of the type text; others cannot be read", &part);
    text += part.at("text").as_string();
  }
  return text;
}

}  // namespace

Json parse_template_kwargs(const std::string& text, const std::string& where) {
  if (text.empty()) return {};
  Json kwargs = parse_json(text, where);
  if (!kwargs.is_object()) throw InputError(where + ": expected an object like '{\"a\": true}'");
  return kwargs;
}

Json template_variables(const Json& fields) {
  const auto text_of = [&](const char* name) {
    const Json& value = fields.get_or_null(name);
    const std::string text = value.is_string() ? value.as_string() : value.dump();
    return text == "null" ? "" : text;
  };
  Json variables = parse_template_kwargs(text_of("chat_template_kwargs"), "chat_template_kwargs");
  for (const char* name : {"messages", "add_generation_prompt", "tools"})
    if (variables.find(name) != nullptr)
      throw InputError(
          str("chat_template_kwargs: '", name, "' has its own place; hint: remove it"));
  const std::string tools = text_of("tools");
  if (tools.empty()) return variables;
  variables.set("tools", parse_json(tools, "tools"));
  if (const Json& list = variables.at("tools");
      !list.is_array() || !std::ranges::all_of(list.as_array(), &Json::is_object))
    throw InputError("tools: expected a list of JSON schemas, or its text");
  return variables;
}

Json normalized_messages(const Json& messages, const std::string& where) {
  return with_places(messages, where, [&] {
    Json out = Json::Array{};
    for (const Json& message : messages.as_array()) {
      Json kept;
      for (const auto& [key, value] : message.as_object())
        if (!value.is_null())
          kept.set(key, key == "content" ? normalized_content(value, message.at("role").as_string())
                                         : value);
      if (message.find("content") != nullptr && kept.find("content") == nullptr &&
          (kept.as_object().size() == 1 || has_role(kept, "user")))
        throw JsonError("expected a text, got null", message.find("content"));
      out.push_back(std::move(kept));
    }
    return out;
  });
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

std::vector<ChatFormat::Piece> ChatFormat::continuation(const Tokenizer& tokenizer,
                                                        const Json& messages, bool with_end) const {
  Json::Array observed = observed_stubs(messages);
  std::vector<NamedStub> names = take_names(tokenizer, observed);
  const EndOfTurn end_of_turn = this->end_of_turn(tokenizer);
  std::vector<std::string> ends{end_of_turn.token ? "" : end_of_turn.text};
  std::vector<int32_t> ids = tokenizer.stop_ids();
  if (end_of_turn.token) ids.push_back(*end_of_turn.token);
  for (const int32_t id : ids) ends.push_back(tokenizer.decode({&id, 1}, SpecialText::kShow));
  const Layout layout = first_accepted(turn_stubs(observed), [&](const Json& turn) {
    return find_layout(turn, prompt(stub_conversation(turn, observed)), observed.size(), ends);
  });
  const std::string_view stub_text = layout.text;
  const Json stubs = stub_conversation(layout.message, observed);
  for (NamedStub& name : names) {
    const auto quoted = [](const std::string& text) { return Json(text).dump(); };
    const std::string with_name = prompt(parse_json(
                          replaced(stubs.dump(), quoted(name.stub), quoted(name.value)), "stubs")),
                      escaped = quoted(name.value), after_turn = layout.text.substr(layout.end);
    name.shown = name.value;
    if (!with_name.ends_with(replaced(after_turn, name.stub, name.shown)))
      name.shown = escaped.substr(1, escaped.size() - 2);
    if (!with_name.ends_with(replaced(after_turn, name.stub, name.shown)))
      throw InputError(
          str("observation: the chat template changes its own text for the name or id ",
              excerpt(name.value)));
  }
  std::vector<Piece> pieces;
  size_t from = with_end ? layout.end : layout.after_end;
  for (size_t i = 0; i < observed.size(); ++i) {
    const size_t at = layout.contents[i];
    append_text(pieces, stub_text.substr(from, at - from), names);
    from = at + content_stub(i).size();
    const std::string_view before = stub_text.substr(layout.turn, at - layout.turn);
    const std::string_view after = stub_text.substr(from);
    const std::string& content = messages.as_array()[i].at("content").as_string();
    observed[i].set("content", content);
    const std::string text = prompt(stub_conversation(layout.message, observed));
    observed[i].set("content", content_stub(i));
    const std::string_view rest =
        std::string_view(text).substr(std::min(text.find(kTurnStub), text.size()));
    if (rest.size() < before.size() + after.size() || !rest.starts_with(before) ||
        !rest.ends_with(after))
      throw InputError(str("observation, message ", i + 1,
                           ": the chat template changes its own text for the content ",
                           excerpt(content)));
    const size_t size = rest.size() - before.size() - after.size();
    if (size > 0) pieces.push_back({std::string(rest.substr(before.size(), size)), true});
  }
  append_text(pieces, stub_text.substr(from), names);
  return pieces;
}

bool ChatFormat::keeps_turns(std::string_view role) const {
  const Json::Array observed =
      observed_stubs(Json::Array{make_message(std::string(role), "").set("name", "tool")});
  const std::string thinking = str("<think>\n", kThinkingStub, "\n</think>\n\n", kTurnStub);
  std::vector<Json> turns = turn_stubs(observed), attempts;
  std::reverse(turns.begin(), turns.end());
  for (const std::string& content : {thinking, std::string(kTurnStub)})
    for (Json& turn : turns) attempts.push_back(turn.set("content", content));
  try {
    return first_accepted(attempts, [&](const Json& turn) {
      const std::string last = render(stub_conversation(turn, {}), Prompt::kNo).text;
      const bool thinks = turn.at("content").as_string() == thinking;
      const size_t begin = last.find(thinks ? kThinkingStub : kTurnStub);
      const size_t end = last.find(kTurnStub, begin);
      const std::string after = prompt(stub_conversation(turn, observed));
      return end != last.npos &&
             after.find(last.substr(begin, end - begin) + kTurnStub) != after.npos;
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
