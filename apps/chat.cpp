// `cohort chat`: a conversation with a model on the terminal.
#include <unistd.h>

#include <algorithm>
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
#include "sys/input_file.h"
#include "text/chat.h"
#include "trainers/sampling.h"

namespace cohort::apps {
namespace {

constexpr const char* kSamplingFields[] = {"do_sample", "temperature", "top_k", "top_p", "min_p"};

// True if generation_config.json, of the model or its base, samples.
bool recommends_sampling(const LoadedModel& loaded) {
  const std::string path = generation_config_path(loaded);
  const Json recommended = path.empty() ? Json() : parse_json(read_input_file(path), path);
  return std::ranges::any_of(
      kSamplingFields, [&](const char* key) { return !recommended.get_or_null(key).is_null(); });
}

// The settings of the model's run, but for what the options give. Replies are greedy where no
// option, run or generation_config.json samples, as with transformers.
ModelSettings chat_settings(const ChatOptions& options, const LoadedModel& loaded) {
  const auto config = find_run_config(loaded.checkpoint);
  if (config) logging::info("system message, template variables and sampling of ", *config);
  const auto& given = options.sampling.given;
  ModelSettings settings = model_settings(loaded, config, options.sampling.config, given);
  const bool samples =
      std::ranges::any_of(kSamplingFields, [&](const char* key) { return given.contains(key); });
  if (!config && !samples && !recommends_sampling(loaded)) settings.sampling.temperature = 0;
  if (!options.system.empty()) settings.data.system = options.system;
  if (!parse_template_kwargs(options.template_kwargs, "--chat-template-kwargs").is_null())
    settings.data.chat_template_kwargs = options.template_kwargs;
  return settings;
}

// The format of a model, whose end of turn is added to `sampling`. Throws InputError without a
// chat template, as such a model is none to chat with.
ChatFormat format_of(const LoadedModel& loaded, const std::string& model, const DataConfig& data,
                     SamplingConfig& sampling) {
  loaded.model->config().require_decoder();
  if (!find_chat_template(loaded.tokenizer->files()))
    throw InputError(str(loaded.checkpoint,
                         " has no chat template (chat_template.jinja, or a field of "
                         "tokenizer_config.json), so that it is no chat model; hint: cohort "
                         "generate ",
                         model, " \"TEXT\" continues a text"));
  ChatFormat format = chat_format(data, *loaded.tokenizer);
  add_end_of_turn(sampling, format.end_of_turn(*loaded.tokenizer));
  return format;
}

std::string sampling_text(const SamplingConfig& sampling) {
  std::string text =
      sampling.temperature == 0 ? "greedy" : str("temperature ", sampling.temperature);
  if (sampling.temperature > 0 && sampling.top_k > 0) text += str(", top-k ", sampling.top_k);
  if (sampling.temperature > 0 && sampling.top_p < 1) text += str(", top-p ", sampling.top_p);
  return str(text, ", at most ", sampling.max_completion_length, " tokens a reply");
}

constexpr const char* kCommands =
    "/new begins another conversation, /help lists this, Ctrl-C stops a reply, Ctrl-D exits; a "
    "line that ends with a backslash continues";

// True for "/name", unlike a path or a text, and for commands of other programs with arguments.
bool is_command(const std::string& message) {
  const std::string name = message.substr(0, message.find(' '));
  const auto is_letter = [](char c) { return c >= 'a' && c <= 'z'; };
  constexpr const char* kWithArguments[] = {"/help", "/new", "/system", "/set", "/load", "/save"};
  return name.size() > 1 && name[0] == '/' && std::ranges::all_of(name.substr(1), is_letter) &&
         (name == message || std::ranges::find(kWithArguments, name) != std::end(kWithArguments));
}

// Notice for a reply that the model did not end itself, else nullptr.
const char* stop_notice(StopReason reason) {
  if (reason == StopReason::kLength) return "[the reply has reached --max-tokens]";
  if (reason == StopReason::kContext)
    return "[the context is full; /new begins another conversation]";
  return reason == StopReason::kCancelled ? "[stopped]" : nullptr;
}

class Conversation {
 public:
  explicit Conversation(const ChatOptions& options)
      : seed_(static_cast<uint64_t>(options.seed)),
        raw_(options.raw),
        loaded_(load(options.model, options.compute)),
        settings_(chat_settings(options, loaded_)),
        format_(format_of(loaded_, options.model, settings_.data, settings_.sampling)),
        engine_(*loaded_.model, {}),
        sampler_(engine_, *loaded_.tokenizer, settings_.sampling) {
    begin();
  }

  // The sampling of replies, and the commands.
  std::string help() const { return str(sampling_text(settings_.sampling), "; ", kCommands, "\n"); }

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
  ModelSettings settings_;
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

void render_messages(const GenerateOptions& options, const LoadedModel& loaded,
                     std::vector<Example>& prompts, SamplingConfig& sampling) {
  ChatOptions chat;
  chat.sampling = options.sampling;
  const ModelSettings settings = chat_settings(chat, loaded);
  sampling = settings.sampling;
  const ChatFormat format = format_of(loaded, options.model, settings.data, sampling);
  for (Example& example : prompts) {
    const Json message = Json::Array{make_message("user", example.prompt)};
    example = {.prompt = format.prompt(with_system(message, settings.data.system)),
               .special = SpecialTokens::kNone};
  }
}

int chat(const ChatOptions& options) {
  const bool terminal = isatty(STDIN_FILENO) == 1;
  Conversation conversation(options);
  if (terminal) std::cerr << conversation.help();
  for (std::string message; read_message(terminal, message);) {
    if (message.empty()) continue;
    if (message == "/new") {
      conversation.begin();
      continue;
    }
    if (message == "/help") {
      std::cerr << conversation.help();
      continue;
    }
    try {
      if (is_command(message))
        throw InputError(
            str("unknown command '", message,
                "'; hint: /help lists the commands; --system sets the system message"));
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
