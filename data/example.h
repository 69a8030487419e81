// Problems: what a prompt asks, what a right answer is, and where they come from (a JSONL file or a
// generated task).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/config.h"
#include "core/rng.h"
#include "data/json.h"
#include "data/tokenizer.h"

namespace cohort {

struct Example {
  std::string prompt;
  std::string answer;    // ground truth for rewards
  std::string solution;  // the completion that supervised training teaches; `answer` if none given
  Json fields;           // everything the source says about the problem (an object)
  Json messages;         // a conversation that is to be rendered; null: prompt and solution are all
  // A rendered conversation: what of prompt + solution is to be learned, bytes [begin, end), its
  // end of sequence included; and its prompt brings its own special tokens.
  std::vector<std::pair<size_t, size_t>> learned;
  SpecialTokens special = SpecialTokens::kAdd;
  std::string where;      // it comes from: "FILE:LINE"; empty: generated
  std::string split_key;  // the text that decides the split; empty: the prompt
  // A rendered conversation: its messages, the system's included (null: not rendered), and the last
  // of a user.
  Json conversation;
  std::string question;
  const std::string& key() const { return split_key.empty() ? prompt : split_key; }
};

// The tokens of a prompt, as the model is given it: without an end of sequence.
std::vector<int32_t> encode_prompt(const Example& example, const Tokenizer& tokenizer);

enum class Split { kTrain, kHeldOut };

// Two examples are the same problem if they have one of these hashes in common.
struct ExampleId {
  uint64_t split = 0;    // split_hash() of Example::key()
  uint64_t content = 0;  // of all that its source says; 0: nothing but the prompt
};

// A deterministic, indexable set of examples: get(i) depends on i and the set's own seed only.
class ExampleSet {
 public:
  virtual ~ExampleSet() = default;
  // Number of distinct indices; generated training sets are endless and say INT64_MAX.
  virtual int64_t size() const = 0;
  virtual Example get(int64_t index) const = 0;
  virtual ExampleId id(int64_t index) const;
};

// The given examples, in their order.
std::unique_ptr<ExampleSet> make_example_set(std::vector<Example> examples);

// ---- Generated tasks ---------------------------------------------------------------------------

// Sizes a task understands (digits, string length, bits, numbers) and, for tasks with worked steps,
// the share of solutions that show them; see each task's `what`.
struct TaskConfig {
  int64_t min_size = 2, max_size = 4;
  double worked_share = 1;
  void visit(ConfigVisitor& v) {
    v.field("min_size", min_size, "smallest problem; what size means is said by the task",
            {.min = 1});
    v.field("max_size", max_size, "largest problem", {.min = 1});
    v.field("worked_share", worked_share, "share of solutions with worked steps (parity)",
            {.min = 0, .max = 1});
  }
};

// A generator and a checker. Both are pure: a problem depends on the Rng only, a verdict on its
// arguments only.
struct Task {
  const char* name;
  const char* what;            // one line: what a problem is, what size means
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
  // The same, of held-out problems; empty: they are a part of `path`.
  std::vector<std::string> eval_path;
  // Templates over the line's fields: "{numbers} = {target}\n"; "{{" and "}}" are braces, and
  // "{question|problem}" is the first of these fields that a line has.
  std::string prompt = "{prompt}", answer = "{answer}";
  std::string solution;  // empty: the answer
  // The field with a conversation, a list of {role, content}; empty: prompt and solution are texts.
  std::string messages;
  // Fields whose hash decides what is held out (data.split_by); empty: the prompt, or the messages
  // before the assistant's last. Lists count without their order: permuted problems are one.
  std::vector<std::string> split_by;
  // Of `path`, chosen by that hash: stable under reordering. Where none is given it is a tenth, or
  // nothing beside a file of held-out problems.
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
    v.field("messages", messages,
            "field with a conversation, a list of {role, content}, in the place of prompt and "
            "solution; empty: none");
    v.field("held_out_fraction", held_out_fraction,
            "share of path's problems that is held out, chosen by the hash of data.split_by; none: "
            "0.1, or 0 with eval_path",
            {.min = 0, .max = 1});
    v.field("limit", limit, "use the first examples of each entry of path only; 0: all",
            {.min = 0});
  }
};
struct JsonlSplits {
  std::unique_ptr<ExampleSet> train, held_out;
  // Problems of each entry of `path` in `train`, which has them one after the other.
  std::vector<int64_t> source_sizes;
};
// The problems stay in the files: get() reads one of them again, and throws InputError if it has
// changed. A fraction of 0 or 1 gives one empty split. Throws InputError naming file and line:
// cannot be read, malformed JSON, no object, a missing field; or, for any other fraction, no
// example at all in a split.
JsonlSplits load_jsonl(const JsonlConfig& config);
// What one object asks: prompt or messages. Throws InputError naming `where` for a missing field.
Example read_prompt(const JsonlConfig& config, const Json& fields, const std::string& where);

}  // namespace cohort
