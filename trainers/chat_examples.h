// Problems as conversations: the text that the model's chat template makes of them, and what of it
// is learned.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "data/chat.h"
#include "data/example.h"
#include "trainers/config.h"

namespace cohort {

// The chat format of a model, with data.chat_template_kwargs.
ChatFormat chat_format(const DataConfig& data, const Tokenizer& tokenizer);

class ChatRenderer {
 public:
  // kTeach: whole conversations. kAsk: without what the data may have the assistant say last.
  enum class Purpose { kTeach, kAsk };
  // Refers to the tokenizer. Throws InputError if the model has no chat template.
  ChatRenderer(const DataConfig& data, const Tokenizer& tokenizer, Purpose purpose);

  // Renders an example that has messages, or a prompt and a solution, which become a user's and the
  // assistant's message. data.system comes first, but not before a system message of the example's
  // own. Throws InputError naming the example where the template refuses it.
  void render(Example& example) const;
  // Shortens the messages of a rendered example and renders them again, so that its prompt has at
  // most `room` tokens, or as few as the template alone leaves: the contents of the earliest
  // messages lose their start, that of a system message last. The last answer stays whole, and no
  // answer that was shortened is learned.
  void truncate(Example& example, int64_t room) const;
  // True if a system message has replaced data.system in an example that was rendered.
  bool has_own_system() const { return has_own_system_; }

 private:
  void render_conversation(Example& example) const;

  const Tokenizer& tokenizer_;
  ChatFormat format_;
  std::string system_;
  Purpose purpose_;
  mutable std::atomic<bool> has_own_system_ = false;
};

// The examples of a set, rendered.
std::unique_ptr<ExampleSet> make_chat_set(std::unique_ptr<ExampleSet> examples,
                                          std::shared_ptr<const ChatRenderer> renderer);

}  // namespace cohort
