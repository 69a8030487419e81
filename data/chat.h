// Conversations as the text that a model was taught, by the chat template of its folder.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "data/chat_template.h"
#include "data/tokenizer.h"

namespace cohort {

class ChatFormat {
 public:
  // The template among the tokenizer's files. `kwargs`: variables for it besides the messages, an
  // object or null. Throws InputError if there is no template.
  ChatFormat(const Tokenizer& tokenizer, Json kwargs);

  // The text after which the model is to speak. `messages`: a list of {role, content, ...}. This
  // and conversation() throw InputError for what the template refuses.
  std::string prompt(const Json& messages) const;

  struct Conversation {
    std::string text;
    // The bytes [begin, end) of what the assistant says, with the tokens that end its turns: what
    // the template's {% generation %} blocks print, else what a turn adds to the prompt before it.
    std::vector<std::pair<size_t, size_t>> assistant;
  };
  // Throws InputError too if nothing is the assistant's, or if a turn changes the text before it.
  Conversation conversation(const Json& messages) const;

  // The end of the assistant's turns: the first special token after what is said, or, where
  // there is none, the text after it, which may be empty.
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

// Variables of a template from the text of a JSON object; null for an empty text. Throws InputError
// naming `where`.
Json parse_template_kwargs(const std::string& text, const std::string& where);

bool has_role(const Json& message, std::string_view role);
// {role, content}
Json make_message(const std::string& role, const std::string& content);

}  // namespace cohort
