// Conversations rendered to text by the chat template of a model's folder.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace cohort {

class ChatFormat {
 public:
  // The template among the tokenizer's files. `kwargs`: variables for it besides the messages, an
  // object or null. Throws InputError if there is no template.
  ChatFormat(const Tokenizer& tokenizer, Json kwargs);
  // The format with further variables, an object or null, of which those here take precedence.
  // Throws InputError if both have `tools`, and they differ.
  ChatFormat with(const Json& variables) const;

  // Prompt text for the assistant's next turn. `messages`: a list of {role, content, ...}. This and
  // conversation() throw InputError if the template rejects the messages.
  std::string prompt(const Json& messages) const;

  struct Conversation {
    std::string text;
    // Byte spans [begin, end) of the assistant's turns with their end tokens: the output of the
    // template's {% generation %} blocks, else the text that a turn appends to the prompt before
    // it.
    std::vector<std::pair<size_t, size_t>> assistant;
  };
  // Only the assistant's turns from the message `first` on have spans. Also throws InputError if
  // there is none or a turn changes the text before it.
  Conversation conversation(const Json& messages, size_t first = 0) const;

  // A part of a rendered text: the template's own, in which special tokens are tokens, or text that
  // comes from a message (its content, name or id of a call), in which they are plain text.
  struct Piece {
    std::string text;
    bool is_content = false;
  };
  // Text that the template renders for `messages` (roles tool and user) after an assistant's turn,
  // up to the end of the prompt for the next one. The turn ends by the first of the tokenizer's
  // stop tokens and end_of_turn() or, if the template writes none of them, with its content.
  // `with_end`: begins with that end, which the turn itself lacks. Depends on nothing else of the
  // conversation, of which a stub is rendered. Throws InputError if the template rejects the
  // messages or does not show one, or if a content changes the template's own text.
  std::vector<Piece> continuation(const Tokenizer& tokenizer, const Json& messages,
                                  bool with_end) const;
  // Returns false if the template renders a turn of the assistant otherwise once a message of this
  // role (tool or user) follows: without its thinking.
  bool keeps_turns(std::string_view role) const;

  // End of the assistant's turns: the first special or added token after the content or, if there
  // is none, the text after it, which may be empty.
  struct EndOfTurn {
    std::optional<int32_t> token;
    std::string text;
  };
  EndOfTurn end_of_turn(const Tokenizer& tokenizer) const;

 private:
  enum class Prompt { kNo, kYes };
  ChatTemplate::Rendered render(const Json& messages, Prompt prompt) const;

  ChatTemplate template_;
  Json variables_;
};

// The tokens of the pieces as one text, without those that the tokenizer adds around a text. Throws
// as Tokenizer::encode() does.
std::vector<int32_t> encode_pieces(const Tokenizer& tokenizer,
                                   std::span<const ChatFormat::Piece> pieces);

// Template variables from the text of a JSON object; null for an empty text. Throws InputError
// naming `where`.
Json parse_template_kwargs(const std::string& text, const std::string& where);
// The template variables in the fields of a problem: `tools`, a list of JSON schemas, and those in
// the object `chat_template_kwargs`. Each may be JSON text. Null: there are none. Throws InputError
// naming the field.
Json template_variables(const Json& fields);

// Messages as templates take them: without keys that are null, and with contents that are lists of
// parts {"type": "text", "text": ...} joined to a text. Throws InputError naming `where` and the
// place for other contents (but results of tools are of any type) and for messages of a role alone.
Json normalized_messages(const Json& messages, const std::string& where);
bool has_role(const Json& message, std::string_view role);
// {role, content}
Json make_message(const std::string& role, const std::string& content);
// An entry of an assistant's `tool_calls`. `arguments`: an object, or its JSON text.
Json make_tool_call(const std::string& id, const std::string& name, Json arguments);

}  // namespace cohort
