// Environments of dialogues by name: `environment:` of a configuration (docs/environments.md).
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "config/visitor.h"
#include "data/data_config.h"
#include "rl/caller.h"
#include "rl/engine/environment.h"
#include "text/chat.h"
#include "text/tool_calls.h"

namespace cohort {

// Earlier turns that the chat template would render otherwise, such as thinking that it leaves out,
// stay as they were sampled, or such templates are an error.
enum class PastTurns : uint8_t { kAsSampled, kStrict };
inline constexpr EnumName<PastTurns> kPastTurns[] = {{PastTurns::kAsSampled, "as_sampled"},
                                                     {PastTurns::kStrict, "strict"}};

// The keys of tool_format.
inline constexpr EnumName<ToolFormat> kToolFormats[] = {
    {ToolFormat::kAuto, "auto"},        {ToolFormat::kHermes, "hermes"},
    {ToolFormat::kLlama3, "llama3"},    {ToolFormat::kMistral, "mistral"},
    {ToolFormat::kQwenXml, "qwen_xml"}, {ToolFormat::kInline, "inline"}};

struct EnvironmentConfig {
  std::string name;  // one of environment_names(), or that of a callback; empty: none
  int64_t max_turns = 8, max_sequence_length = 0;
  double discount = 1;
  PastTurns turns = PastTurns::kAsSampled;
  ToolFormat tool_format = ToolFormat::kAuto;
  // `tools`: names of built-in tools, the JSON lines that `search` looks in, their field of text,
  // and how many of them it returns; where `python` runs its code.
  std::vector<std::string> tools;
  std::string corpus, corpus_field = "text";
  int64_t search_results = 3;
  std::string sandbox = "auto";
  // `command` (rl/environments/command.cpp): the programs, the turns that each has at a time, and a
  // JSON file with the list of tools that the prompts show.
  ProgramConfig program;
  ServerConfig server;  // `http`, in place of the programs
  int64_t concurrent = 256;
  std::string tool_schemas;
  bool starts = false;  // the environment begins the dialogues: see Environment::starts()
  bool operator==(const EnvironmentConfig&) const = default;
  bool is_set() const { return !name.empty(); }
  // True if programs run: those of `command`, or the tool `python`.
  bool has_program() const;
  void visit(ConfigVisitor& v);
  // Throws InputError naming the key, for keys that do not fit together. Other names than built-in
  // ones are those of callbacks.
  void validate() const;
};

std::vector<std::string> environment_names();  // built in

// The parts of a run that an environment needs.
struct EnvironmentContext {
  const Tokenizer& tokenizer;  // must outlive the environment
  // The chat format of the prompts, with the tools in its variables; nullopt: prompts are plain
  // text, and so are observations.
  std::optional<ChatFormat> chat;
};

// The JSON schemas of the tools that the prompts show, a list as chat templates take it; null:
// none. Reads `tool_schemas`. Throws InputError naming the key.
Json tool_schemas(const EnvironmentConfig& config);

// Throws InputError for a configuration that does not validate(), an unknown name, a corpus that
// cannot be read, a chat template without a known format of tool calls or, with turns: strict, one
// that changes earlier turns. nullptr if config has no name.
std::unique_ptr<Environment> make_environment(const EnvironmentConfig& config,
                                              EnvironmentContext context);

// make_environment() for problems that `data` renders.
std::unique_ptr<Environment> environment_of(const EnvironmentConfig& config, const DataConfig& data,
                                            const Tokenizer& tokenizer);
// Text that says which turns the chat template would change, all of which stay as they were sampled
// (turns: as_sampled); empty: none, or there is no environment.
std::string changed_turns(const EnvironmentConfig& config, const DataConfig& data,
                          const Tokenizer& tokenizer);
// The options of the configuration with an environment that it has made; nullptr: none.
DialogueOptions dialogue_options(const EnvironmentConfig& config, Environment* environment);

// The tool calls of the last turn. `tools`: those of the configuration, in whose place the example
// may have its own; null: unknown.
std::vector<ToolCall> calls_of_turn(ToolFormat format, const Tokenizer& tokenizer,
                                    const Example& example, const Trajectory& trajectory,
                                    const Json& tools);
// The tokens that follow a turn: `messages` under the chat template, after the end of the turn
// unless it has_end, and the prompt of the next turn; or, without a chat format, their contents.
// `variables`: Example::template_variables.
// Throws InputError if the template rejects the messages.
std::vector<int32_t> observation_tokens(const EnvironmentContext& context, const Json& messages,
                                        bool has_end, const Json& variables = {});
// Returns true if the last turn has the end of a turn as the chat template writes it.
bool has_end_of_turn(const EnvironmentContext& context, const Trajectory& trajectory);

}  // namespace cohort
