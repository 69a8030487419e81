// Problems: prompts with their reference answers, from a JSONL file or a generated task.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "config/visitor.h"
#include "core/rng.h"
#include "text/json.h"
#include "text/tokenizer.h"

namespace cohort {

class ImageSet;

struct Example {
  std::string prompt;
  std::string answer;    // ground truth for rewards; empty: none
  std::string solution;  // target completion of supervised training; `answer` if none is given
  std::optional<std::string> pair;  // (classify) the second text
  // (classify) An image in place of the prompt, which is then its path: one of a set; null: none.
  std::shared_ptr<const ImageSet> images = nullptr;
  int64_t image = 0;
  Json fields = Json::Object{};  // all fields of the source
  Json messages;  // a conversation to be rendered; null: prompt and solution are complete
  // Index in `messages` (rendered: in `conversation`) of the first message of the completion: only
  // the assistant's messages from there on are learned, and prompts end before it. 0: none is
  // given.
  size_t completion_begin = 0;
  // A text without a prompt: where the tokenizer begins texts with no token of its own, the end of
  // sequence precedes it, as it precedes a document of pretraining.
  bool whole_text = false;
  // Rendered conversations: bytes [begin, end) of prompt + solution whose tokens are targets, with
  // the end of sequence. Their prompts contain their own special tokens.
  std::vector<std::pair<size_t, size_t>> loss_spans;
  SpecialTokens special = SpecialTokens::kAdd;
  std::string where;      // source location "FILE:LINE"; empty: generated
  std::string split_key;  // the text that decides the split; empty: the prompt
  // Rendered conversations: all messages with the system's (null: not rendered), and the last user
  // message.
  Json conversation;
  std::string question;
  Json template_variables;  // those of this problem alone, such as `tools`; null: none
  std::vector<std::string> other_answers;  // as right as `answer`
  // (dpo) The same prompt with the rejected answer as its solution, or its completion: one example;
  // empty: the data have no pairs.
  std::vector<Example> rejected;
  std::vector<int32_t> prompt_tokens;  // in place of the prompt's text; empty: not given
  std::string start_error;  // why the environment could not begin its dialogues; empty: it could
  const std::string& key() const { return split_key.empty() ? prompt : split_key; }
};

// Tokens of the prompt as model input, without an end of sequence.
std::vector<int32_t> encode_prompt(const Example& example, const Tokenizer& tokenizer);

enum class Split { kTrain, kHeldOut };

// Two examples are the same problem if either hash is equal.
struct ExampleId {
  uint64_t split = 0;    // split_hash() of Example::key()
  uint64_t content = 0;  // hash of the source record; 0: there is only the prompt
};

// A deterministic, indexable set of examples: get(i) depends on i and the set's own seed only.
class ExampleSet {
 public:
  virtual ~ExampleSet() = default;
  // Number of distinct indices; INT64_MAX for generated training sets, which are endless.
  virtual int64_t size() const = 0;
  virtual Example get(int64_t index) const = 0;
  virtual ExampleId id(int64_t index) const;
};

// The given examples, in their order.
std::unique_ptr<ExampleSet> make_example_set(std::vector<Example> examples);
// The examples of a set at `indices` (nullopt: all), in their order, each after change(example).
std::unique_ptr<ExampleSet> make_changed_set(
    std::shared_ptr<const ExampleSet> examples, std::function<void(Example&)> change,
    std::optional<std::vector<int64_t>> indices = std::nullopt);

// ---- Generated tasks ---------------------------------------------------------------------------

// Problem sizes (digits, string length, bits, numbers; see Task::description) and, for tasks with
// worked steps, the fraction of solutions that contain them.
struct TaskConfig {
  int64_t min_size = 2, max_size = 4;
  double worked_share = 1;
  void visit(ConfigVisitor& v) {
    v.field("min_size", min_size, "smallest problem; the task defines what size means", {.min = 1});
    v.field("max_size", max_size, "largest problem", {.min = 1});
    v.field("worked_share", worked_share,
            "fraction of solutions with worked steps (parity, arithmetic)", {.min = 0, .max = 1});
  }
};

// A problem generator and an answer checker, both pure functions of their arguments.
struct Task {
  const char* name;
  const char* description;     // one line: an example and the meaning of size
  const char* alphabet;        // every character a prompt or solution can hold
  int64_t min_size, max_size;  // accepted sizes
  Example (*generate)(Rng& rng, const TaskConfig& config);
  // 1 if the completion solves the problem, else 0.
  double (*check)(const Example& example, std::string_view completion);
};
std::vector<const Task*> tasks();
// Throws InputError listing the known names.
const Task& find_task(const std::string& name);

// A problem belongs to the held-out split if a hash of its prompt falls in the lowest tenth, so the
// splits cannot overlap, whatever the seeds. Training sets are endless and ignore `size`; held-out
// sets have `size` distinct prompts. Throws InputError for sizes the task does not accept, and if
// the task has too few problems (saying how many were found).
std::unique_ptr<ExampleSet> make_task_set(const Task& task, const TaskConfig& config, Split split,
                                          uint64_t seed, int64_t size);

// ---- JSONL -------------------------------------------------------------------------------------

struct JsonlConfig {
  std::vector<std::string> path;  // files, folders and patterns
  // Held-out problems, in the same form; empty: a part of `path` is held out.
  std::vector<std::string> eval_path;
  // Templates over the line's fields: "{numbers} = {target}\n"; "{{" and "}}" are braces, and
  // "{question|problem}" is the first of these fields that the line has.
  std::string prompt = "{prompt}", answer = "{answer}";
  std::string solution;  // empty: the answer
  std::string pair;      // (classify) the second text; empty: none
  // (dpo) The rejected answer beside the solution: a template, or with `messages` the field that
  // has it, as `completion` has the chosen one. Without `completion` both fields have whole
  // conversations, whose common messages are the prompt. Empty: the data have no pairs.
  std::string rejected;
  // The field with a conversation, a list of {role, content}; empty: prompt and solution are texts.
  std::string messages;
  // The field with the completion of `messages`: text or a list of messages; empty: the
  // conversation ends with it.
  std::string completion;
  // Description of the keys that detect_format() has set; empty: none. It is no key.
  std::string detected;
  // A solution that is null is an error, as one must be taught. It is no key.
  bool teaches = false;
  // Fields whose hash decides the split (data.split_by); empty: the prompt, or the messages before
  // the assistant's last. The order inside lists is ignored: permuted problems are the same.
  std::vector<std::string> split_by;
  // Fraction of `path` that is held out (data.held_out_fraction), selected by that hash: stable
  // under reordering. Default: 0.1, or 0 with `eval_path`.
  std::optional<double> held_out_fraction;
  int64_t limit = 0;  // use the first examples of each entry of `path` only; 0: all
  double held_out() const { return held_out_fraction.value_or(eval_path.empty() ? 0.1 : 0); }
  void visit(ConfigVisitor& v) {
    v.field("path", path,
            "problems, one JSON object per line; one or a list of files, folders and patterns");
    v.field("eval_path", eval_path, "held-out problems, as path; empty: they are a part of path");
    v.field("prompt", prompt,
            "template of the prompt: {name} is a field, {one|other} the first that a line has, {{ "
            "and }} are braces");
    v.field("answer", answer, "template of the right answer, for rewards");
    v.field("solution", solution, "template of the completion to teach; empty: the answer");
    v.field("pair", pair, "(classify) template of a second text beside the prompt; empty: none");
    v.field("rejected", rejected,
            "(dpo) template of the rejected answer, beside that of the chosen one in answer or "
            "solution; with messages the field that has it; empty: none");
    v.field("messages", messages,
            "field with a conversation, a list of {role, content}, instead of prompt and solution; "
            "empty: none");
    v.field("completion", completion,
            "field with the completion of messages, a text or a list of messages: only it is "
            "learned; empty: every message of the assistant is");
    v.field("limit", limit, "use the first examples of each entry of path only; 0: all",
            {.min = 0});
  }
};
// The content of lines: problems, texts with a label (classify), or pairs of answers (dpo).
enum class LineKind : uint8_t { kProblems, kLabels, kPairs };
// Sets prompt, answer, solution, messages, completion and rejected, none of which the configuration
// gives, by the fields of the first line of `path`, and `detected`. They keep their defaults where
// these fit, where no known format does, and where the line cannot be read, which load_jsonl()
// reports.
void detect_format(JsonlConfig& config, LineKind kind = LineKind::kProblems);

struct JsonlSplits {
  std::unique_ptr<ExampleSet> train, held_out;
  // Number of problems in `train` from each entry of `path`, stored in this order.
  std::vector<int64_t> source_sizes;
};
// The problems stay in the files: get() reads one again and throws InputError if it has changed. A
// fraction of 0 or 1 gives one empty split. Throws InputError naming file and line: unreadable,
// malformed JSON, not an object, a missing field, a prompt or solution that is null, a pair whose
// answers are equal; and for any other fraction if a split is empty.
JsonlSplits load_jsonl(const JsonlConfig& config);
// True if `path` has fewer than `count` problems; false if a file cannot be read.
bool has_fewer_problems(const JsonlConfig& config, int64_t count);
// Prompt or messages of one object. A conversation may also be its field `prompt`. Throws
// InputError naming `where` for a missing field.
Example read_prompt(const JsonlConfig& config, const Json& fields, const std::string& where);

}  // namespace cohort
