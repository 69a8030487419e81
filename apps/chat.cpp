// `cohort chat`: a conversation with a model on the terminal.
#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <utility>

#include "apps/commands.h"
#include "apps/signals.h"
#include "core/log.h"
#include "data/chat_examples.h"
#include "job/model_settings.h"
#include "job/run_directory.h"
#include "rl/engine/rollout.h"
#include "text/chat.h"
#include "trainers/sampling.h"

namespace cohort::apps {
namespace {

// The settings of the model's run, but for what the options give.
ModelSettings settings_of(const ChatOptions& options, const LoadedModel& loaded) {
  const auto config = find_run_config(loaded.checkpoint);
  if (config) logging::info("system message, template variables and sampling of ", *config);
  ModelSettings settings =
      model_settings(loaded, config, options.sampling.config, options.sampling.given);
  if (!options.system.empty()) settings.data.system = options.system;
  if (!parse_template_kwargs(options.template_kwargs, "--chat-template-kwargs").is_null())
    settings.data.chat_template_kwargs = options.template_kwargs;
  return settings;
}

SamplingConfig sampling_for(const ModelSettings& settings, const LoadedModel& loaded,
                            const ChatFormat& format) {
  SamplingConfig sampling = settings.sampling;
  add_end_of_turn(sampling, format.end_of_turn(*loaded.tokenizer));
  return sampling;
}

// Notice for a reply that the model did not end itself, else nullptr.
const char* stop_notice(StopReason reason) {
  if (reason == StopReason::kLength) return "[the reply has reached --max-tokens]";
  if (reason == StopReason::kContext)
    return "[the context is full; /new begins another conversation]";
  return reason == StopReason::kCancelled ? "[stopped]" : nullptr;
}

// Throws InputError for a model without a chat template, which `chat` is not for.
ChatFormat format_of(const LoadedModel& loaded, const ChatOptions& options,
                     const DataConfig& data) {
  if (!find_chat_template(loaded.tokenizer->files()))
    throw InputError(str(loaded.checkpoint,
                         " has no chat template (chat_template.jinja, or a field of "
                         "tokenizer_config.json), so that it is no chat model; hint: cohort "
                         "generate ",
                         options.model, " \"TEXT\" continues a text"));
  return chat_format(data, *loaded.tokenizer);
}

class Conversation {
 public:
  explicit Conversation(const ChatOptions& options)
      : seed_(static_cast<uint64_t>(options.seed)),
        raw_(options.raw),
        loaded_(load(options.model, options.compute)),
        settings_(settings_of(options, loaded_)),
        format_(format_of(loaded_, options, settings_.data)),
        engine_(*loaded_.model, {}),
        sampler_(engine_, *loaded_.tokenizer, sampling_for(settings_, loaded_, format_)) {
    begin();
  }

  void begin() { messages_ = with_system(Json::Array{}, settings_.data.system); }

  // Streams the reply while it is sampled. Throws InputError, and leaves the conversation
  // unchanged, for a message that the template rejects or that does not fit into the context.
  void reply_to(const std::string& text) {
    Json messages = messages_;
    messages.push_back(make_message("user", text));
    const Example prompt{.prompt = format_.prompt(messages), .special = SpecialTokens::kNone};
    interrupted_ = false;
    size_t num_printed = 0;  // bytes
    const auto on_token = [&](const Trajectory& t) {
      print_now(t.text.substr(std::exchange(num_printed, t.text.size())), raw_);
      return !interrupted_;
    };
    const Trajectory t = sampler_.sample({&prompt, 1}, 1, {.seed = seed_, .step = replies_++},
                                         {.on_finished = nullptr, .on_token = on_token})[0];
    print_now(t.text.substr(num_printed) + "\n", raw_);
    if (const char* notice = stop_notice(t.stop_reason)) std::cerr << notice << '\n';
    messages.push_back(make_message("assistant", t.text));
    messages_ = std::move(messages);
  }

 private:
  const uint64_t seed_;
  const bool raw_;
  int64_t replies_ = 0;
  const LoadedModel loaded_;
  const ModelSettings settings_;
  const ChatFormat format_;
  Engine engine_;
  const Sampler sampler_;
  Json messages_;
  // The last member: until the model is loaded, an interrupt ends the process at once.
  std::atomic<bool>& interrupted_ = interrupt_request();
};

// Reads the next message: a line, and the following ones while it ends with a backslash. Returns
// false at the end of the input; throws InputError if it cannot be read.
bool read_message(bool terminal, std::string& message) {
  message.clear();
  for (std::string line;;) {
    if (terminal) std::cerr << (message.empty() ? "> " : ". ") << std::flush;
    if (!read_line(line)) return !message.empty();
    message += line;
    if (!message.ends_with('\\')) return true;
    message.back() = '\n';
  }
}

}  // namespace

int chat(const ChatOptions& options) {
  const bool terminal = isatty(STDIN_FILENO) == 1;
  Conversation conversation(options);
  for (std::string message; read_message(terminal, message);) {
    if (message.empty()) continue;
    if (message == "/new") {
      conversation.begin();
      continue;
    }
    try {
      conversation.reply_to(message);
    } catch (const InputError& error) {
      if (!terminal) throw;
      print_error(error.what());
    }
  }
  if (terminal) std::cerr << '\n';
  return kOk;
}

}  // namespace cohort::apps
