#include "text/chat.h"

#include <algorithm>

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

Json make_tool_call(const std::string& id, const std::string& name, Json arguments) {
  return Json()
      .set("id", id)
      .set("type", "function")
      .set("function", Json().set("name", name).set("arguments", std::move(arguments)));
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

std::vector<ChatFormat::Piece> ChatFormat::continuation(const Tokenizer& tokenizer,
                                                        const Json& messages, bool with_end) const {
  Json::Array observed = observed_stubs(messages);
  const EndOfTurn end_of_turn = this->end_of_turn(tokenizer);
  std::vector<std::string> ends{end_of_turn.token ? "" : end_of_turn.text};
  std::vector<int32_t> ids = tokenizer.stop_ids();
  if (end_of_turn.token) ids.push_back(*end_of_turn.token);
  for (const int32_t id : ids) ends.push_back(tokenizer.decode({&id, 1}, SpecialText::kShow));
  const Layout layout = first_accepted(turn_stubs(observed), [&](const Json& turn) {
    return find_layout(turn, prompt(stub_conversation(turn, observed)), observed.size(), ends);
  });
  std::vector<Piece> pieces;
  const auto add = [&](std::string_view text, bool is_content) {
    if (!text.empty()) pieces.push_back({std::string(text), is_content});
  };
  const std::string_view stub_text = layout.text;
  size_t from = with_end ? layout.end : layout.after_end;
  for (size_t i = 0; i < observed.size(); ++i) {
    const size_t at = layout.contents[i];
    add(stub_text.substr(from, at - from), false);
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
    add(rest.substr(before.size(), rest.size() - before.size() - after.size()), true);
  }
  add(stub_text.substr(from), false);
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
