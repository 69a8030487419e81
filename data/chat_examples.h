// Problems as conversations: their text under the model's chat template, and its loss spans.
#pragma once

#include <atomic>
#include <string>

#include "data/data_config.h"
#include "data/example.h"
#include "text/chat.h"

namespace cohort {

// The chat format of a model, with data.chat_template_kwargs and data.tools.
ChatFormat chat_format(const DataConfig& data, const Tokenizer& tokenizer);

// A conversation with a system message in front, unless it has one or `system` is empty.
Json with_system(Json messages, const std::string& system);

class ChatRenderer {
 public:
  // kTeach: whole conversations. kAsk: without the completion or a final message of the assistant.
  enum class Purpose { kTeach, kAsk };
  // Refers to the tokenizer. Throws InputError if the model has no chat template.
  ChatRenderer(const DataConfig& data, const Tokenizer& tokenizer, Purpose purpose);

  // Renders an example that has messages, or a prompt and a solution, which become a user's and the
  // assistant's message. data.system is prepended unless the example has a system message. Throws
  // InputError naming the example if the template rejects it.
  void render(Example& example) const;
  // The prompt of other messages, under the template variables of an example.
  std::string prompt_of(const Json& messages, const Example& example) const;
  // Truncates the messages of a rendered example and renders them again, so that its prompt has at
  // most `max_prompt` tokens, or those of the template alone if they are more: the contents of the
  // earliest messages lose their start, that of a system message last. The last answer stays whole;
  // answers that were truncated have no loss.
  void truncate(Example& example, int64_t max_prompt) const;
  // True if a rendered example had a system message in place of data.system.
  bool has_own_system() const { return has_own_system_; }

 private:
  void render_conversation(Example& example) const;

  const Tokenizer& tokenizer_;
  ChatFormat format_;
  std::string system_;
  Purpose purpose_;
  mutable std::atomic<bool> has_own_system_ = false;
};

}  // namespace cohort
