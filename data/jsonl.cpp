// JSONL: one problem per line. Prompt, answer and solution are templates over the line's fields, or
// fields hold conversations. Files may be larger than memory.
#include <algorithm>

#include "config/visitor.h"
#include "data/corpus.h"
#include "data/example.h"
#include "data/field_template.h"
#include "data/parallel_try.h"
#include "data/split.h"
#include "sys/input_file.h"
#include "text/chat.h"

namespace cohort {
namespace {

// True for a list of {role, content}.
bool is_conversation(const Json* value) {
  return value != nullptr && value->is_array() && !value->as_array().empty() &&
         value->as_array().front().find("role") != nullptr;
}

// Data in the format of other tools: the rest of a message that says how they are read; "": none.
std::string foreign_hint(const Json& line) {
  const auto given = [&](const char* name) { return line.find(name) != nullptr; };
  if (!line.is_object()) return "";
  for (const auto& [name, value] : line.as_object())
    if (value.is_array() && !value.as_array().empty() &&
        value.as_array().front().find("from") != nullptr &&
        value.as_array().front().find("value") != nullptr)
      return str("; '", name,
                 "' has the turns of ShareGPT; hint: write {\"messages\": [{\"role\": \"user\", "
                 "\"content\": ...}, {\"role\": \"assistant\", \"content\": ...}]}: 'value' is "
                 "the content, and 'from' the role: human is user, gpt is assistant");
  if (given("instruction") && given("output"))
    return str("; hint: the fields are Alpaca's: jsonl: {prompt: \"{instruction}",
               given("input") ? "\\n{input}" : "", "\", answer: \"{output}\"}");
  if (given("chosen") && given("rejected"))
    return "; hint: trainer=dpo learns from both answers, and finds the format without "
           "data.jsonl.prompt, answer and rejected; data.jsonl.answer='{chosen}' teaches the "
           "chosen "
           "ones alone";
  return "";
}

// Refuses files that are no JSONL, by their first line. Throws InputError with a way to convert.
void refuse_other_formats(std::string_view line, const std::string& file) {
  const auto refuse = [&](const char* what, const std::string& hint) {
    throw InputError(str(file, ": is ", what, ", not one JSON object per line; hint: ", hint));
  };
  const auto pandas = [&](const char* reader) {
    return str("python3 -c \"import pandas; pandas.", reader, "('", file,
               "').to_json('data.jsonl', orient='records', lines=True)\"");
  };
  line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
  if (line.starts_with("PAR1")) refuse("a Parquet file", pandas("read_parquet"));
  if (line.starts_with("ARROW1")) refuse("an Arrow file", pandas("read_feather"));
  if (line.starts_with("\x1f\x8b")) refuse("compressed by gzip", "gunzip " + file);
  if (line.starts_with('[')) refuse("a JSON array", "jq -c '.[]' " + file + " > data.jsonl");
  if (line.starts_with('{') && line.find_first_not_of(" \t", 1) == line.npos)
    refuse("JSON with a value on several lines", "jq -c . " + file + " > data.jsonl");
  if (file.ends_with(".csv") && !line.starts_with('{')) refuse("a CSV file", pandas("read_csv"));
}

// The template of a key of data.jsonl.
class Template : public FieldTemplate {
 public:
  Template(const char* key, const std::string& text)
      : FieldTemplate(
            key, text,
            [key](const std::string& field, const std::vector<std::string>& present,
                  const Json& fields) {
              const std::string list = "; fields here: " + join(present, ", "),
                                foreign = foreign_hint(fields);
              if (!foreign.empty()) return list + foreign;
              const std::string fill =
                  present.empty() ? "" : str("; hint: data.jsonl.", key, "='{", present[0], "}'");
              return did_you_mean(field, present, list + fill);
            }) {}

  const char* key() const { return key_; }
  // render() of a text that there must be. Throws InputError for a field that is null or a list of
  // messages.
  std::string text(const Json& fields, const std::string& where) const {
    const std::string null = null_field(fields, where);
    if (null.empty()) return render(fields, where);
    throw InputError(str(where, ": the field '", null, "' of the ", key_,
                         " template is null; hint: complete or remove the line"));
  }
  // The right answers: one for each item of a list that is the only field; none where a field is
  // null. Throws InputError for a field that is a list of messages.
  std::vector<std::string> answers(const Json& fields, const std::string& where) const {
    if (!null_field(fields, where).empty()) return {};
    const Json* only = pieces_.size() == 2 ? &value_of(pieces_[0].field, fields, where) : nullptr;
    if (only == nullptr || !only->is_array()) return {render(fields, where)};
    std::vector<std::string> texts;
    for (const Json& item : only->as_array())
      if (!item.is_null())
        texts.push_back(render(fields, where, [&](const Json&) { return item.to_text(); }));
    return texts;
  }

 private:
  // A field that is null; empty: none. Throws InputError for a field that is a list of messages: no
  // text shows its roles.
  std::string null_field(const Json& fields, const std::string& where) const {
    std::string null;
    for (const Piece& piece : pieces_) {
      if (piece.field.empty()) continue;
      const Json& value = value_of(piece.field, fields, where);
      if (value.is_null()) null = piece.field;
      if (!is_conversation(&value) && value.find_text("role") == nullptr) continue;
      const std::string foreign = foreign_hint(fields);
      throw InputError(str(where, ": data.jsonl.", key_, ": the field '", piece.field,
                           "' is a list of messages, which a text template cannot render",
                           !foreign.empty()
                               ? foreign
                               : str("; hint: name the conversation by data.jsonl.messages: ",
                                     key_ == std::string_view("prompt") ? piece.field : "FIELD",
                                     " in place of data.jsonl.", key_)));
    }
    return null;
  }
};

// The normalized_messages() of a field. Throws InputError naming the location.
Json messages_of(const Json& fields, const std::string& name, const std::string& where,
                 const char* key = "data.jsonl.messages") {
  const Json* found = fields.find(name);
  if (found == nullptr)
    throw InputError(str(where, ": no field '", name, "' (", key, ")", foreign_hint(fields)));
  if (!found->is_array() || found->as_array().empty())
    throw InputError(str(where, ": ", name, ": expected a list of {role, content}"));
  for (const Json& message : found->as_array())
    if (message.find_text("role") == nullptr)
      throw InputError(str(where, ": ", name, ": message ", 1 + (&message - &found->as_array()[0]),
                           ": expected messages like {\"role\": \"user\", \"content\": \"...\"}",
                           foreign_hint(fields)));
  return normalized_messages(*found, str(where, ": ", name));
}

// Messages before the assistant's last: the same problem with another answer is not a new one.
Json without_last_answer(const Json& messages) {
  Json::Array before = messages.as_array();
  const auto last = std::find_if(before.rbegin(), before.rend(), [](const Json& message) {
    return has_role(message, "assistant");
  });
  if (last != before.rend()) before.erase(last.base() - 1, before.end());
  return before;
}

// Text of a value for the split hash: equal for lists that differ only in order and for
// conversations that differ only in the last answer.
std::string split_text(const Json& value) {
  if (is_conversation(&value)) return without_last_answer(value).dump();
  if (!value.is_array()) return value.to_text();
  std::vector<std::string> items;
  for (const Json& item : value.as_array()) items.push_back(item.to_text());
  std::sort(items.begin(), items.end());
  return join(items, ", ");
}

// Text of the last message if it is the assistant's, else empty.
std::string last_assistant_text(const Json& messages) {
  const Json& last = messages.as_array().back();
  const std::string* content = last.find_text("content");
  return has_role(last, "assistant") && content != nullptr ? *content : "";
}

// The messages of a completion: a text, the first one of a list of texts, or a list of messages;
// none if it is null and need not be there. Throws InputError naming the location.
Json::Array completion_of(const Json& fields, const std::string& name, const std::string& where,
                          const char* key, bool may_be_null) {
  const Json* found = fields.find(name);
  if (found == nullptr || is_conversation(found))
    return messages_of(fields, name, where, key).as_array();
  const Json::Array items = found->is_array() ? found->as_array() : Json::Array{*found};
  const auto first = std::ranges::find_if_not(items, &Json::is_null);
  const Json value = first == items.end() ? Json() : *first;
  if (value.is_null() && may_be_null) return {};
  if (value.is_null() || value.is_object())
    throw InputError(str(where, ": ", name, ": expected a text or a list of {role, content}",
                         value.is_null() ? ", got null" : ""));
  return {make_message("assistant", value.to_text())};
}

// Parses lines into problems by the keys of data.jsonl.
class LineReader {
 public:
  explicit LineReader(const JsonlConfig& config)
      : config_(config),
        prompt_("prompt", config.prompt),
        answer_("answer", config.answer),
        solution_("solution", config.solution),
        pair_("pair", config.pair),
        rejected_("rejected", config.messages.empty() ? config.rejected : ""),
        // One field per line.
        split_("data.split_by",
               config.split_by.empty() ? "" : str("{", join(config.split_by, "}\n{"), "}")) {}

  Example read(std::string_view text, int64_t line, const std::string& file) const {
    const std::string where = str(file, ":", line);
    if (line == 1) refuse_other_formats(text, file);
    Json fields = parse_json(text, where);
    if (!fields.is_object())
      throw InputError(str(where, ": expected an object like {\"prompt\": ..., \"answer\": ...}"));
    Example example{.where = where};
    if (config_.messages.empty()) {
      example.prompt = prompt_.text(fields, where);
      example.whole_text = config_.prompt.empty();
      if (!config_.pair.empty()) example.pair = pair_.text(fields, where);
      const bool has_answer = read_answers(fields, where, example);
      const bool is_answer = config_.solution.empty() || config_.solution == config_.answer;
      if (is_answer && !has_answer && must_complete(config_.solution))
        throw InputError(where + ": the answer, which is taught, is null; hint: remove the line");
      example.solution = is_answer ? example.answer : solution_.text(fields, where);
      example.split_key =
          example.whole_text ? example.solution : prompt_.render(fields, where, split_text);
      if (example.pair) example.split_key += "\n" + *example.pair;
    } else {
      read_messages(fields, where, example);
    }
    if (!config_.split_by.empty()) example.split_key = split_.render(fields, where, split_text);
    example.fields = std::move(fields);
    if (!config_.rejected.empty()) add_rejected(example);
    return example;
  }

 private:
  // The answer of a pair. Throws InputError for a list of several, and for none.
  static std::string one_text(const Template& of, const Example& example) {
    const std::vector<std::string> texts = of.answers(example.fields, example.where);
    if (texts.size() == 1) return texts[0];
    throw InputError(str(example.where, ": data.jsonl.", of.key(), ": expected one answer, got ",
                         texts.size(), "; hint: complete or remove the line"));
  }
  // Adds the rejected answer of a pair. Of two conversations the common messages become the prompt.
  // Throws InputError naming the location if there is no prompt, or nothing to prefer.
  void add_rejected(Example& example) const {
    const std::string &where = example.where, &name = config_.rejected;
    constexpr const char* kKey = "data.jsonl.rejected";
    Example rejected = example;
    if (config_.messages.empty()) {
      example.solution = one_text(config_.solution.empty() ? answer_ : solution_, example);
      rejected.solution = one_text(rejected_, example);
    } else {
      const Json::Array& all = example.messages.as_array();
      Json::Array messages = all;
      if (config_.completion.empty()) {
        messages = messages_of(example.fields, name, where, kKey).as_array();
        const auto equal = [](const Json& a, const Json& b) { return a.dump() == b.dump(); };
        const auto same = std::ranges::mismatch(all, messages, equal).in1;
        example.completion_begin = rejected.completion_begin =
            static_cast<size_t>(same - all.begin());
        if (config_.split_by.empty())
          example.split_key = Json(Json::Array(all.begin(), same)).dump();
      } else {
        messages.resize(example.completion_begin);
        std::ranges::move(completion_of(example.fields, name, where, kKey, false),
                          std::back_inserter(messages));
      }
      rejected.prompt = Json(messages).dump();
      rejected.solution = last_assistant_text(messages);
      rejected.messages = std::move(messages);
    }
    if (rejected.solution == example.solution &&
        rejected.messages.dump() == example.messages.dump())
      throw InputError(str(where, ": the chosen and the rejected answer are equal, so there is ",
                           "nothing to prefer; hint: remove the line"));
    const size_t begin = example.completion_begin;
    if (!config_.messages.empty() && config_.completion.empty() &&
        (begin == 0 || begin == example.messages.as_array().size() ||
         begin == rejected.messages.as_array().size()))
      throw InputError(str(where, ": ", config_.messages, " and ", name, ": expected the same ",
                           "first messages, which are the prompt, and other answers after them"));
    example.rejected.push_back(std::move(rejected));
  }
  // True if a completion, by its template or field, must not be null: unless only rewards need it.
  bool must_complete(const std::string& name) const {
    return config_.teaches || name == "{completion}" || name == "completion";
  }
  // Returns false if there is no answer.
  bool read_answers(const Json& fields, const std::string& where, Example& example) const {
    example.other_answers = answer_.answers(fields, where);
    if (example.other_answers.empty()) return false;
    example.answer = std::move(example.other_answers.front());
    example.other_answers.erase(example.other_answers.begin());
    return true;
  }
  void read_messages(const Json& fields, const std::string& where, Example& example) const {
    example.messages = messages_of(fields, config_.messages, where);
    example.split_key = split_text(example.messages);
    if (!config_.completion.empty()) {
      Json::Array all = example.messages.as_array();
      if (has_role(all.back(), "assistant"))
        throw InputError(str(where, ": ", config_.messages, ": ends with a message of the ",
                             "assistant, which the field '", config_.completion,
                             "' cannot continue; hint: end it with the user's message"));
      example.completion_begin = all.size();
      example.split_key = example.messages.dump();
      for (Json& message : completion_of(fields, config_.completion, where, "data.jsonl.completion",
                                         !must_complete(config_.completion)))
        all.push_back(std::move(message));
      example.messages = std::move(all);
    }
    example.prompt = example.messages.dump();
    example.solution = last_assistant_text(example.messages);
    // Some rewards need no answer.
    if (config_.answer != JsonlConfig{}.answer || fields.find("answer") != nullptr) {
      read_answers(fields, where, example);
    } else if (!config_.completion.empty()) {
      example.answer = example.solution;
    }
  }

  const JsonlConfig config_;
  const Template prompt_, answer_, solution_, pair_, rejected_, split_;
};

// Removes a byte order mark and a carriage return.
std::string_view clean_line(std::string_view line, int64_t number) {
  if (number == 1 && line.starts_with("\xEF\xBB\xBF")) line.remove_prefix(3);
  if (line.ends_with('\r')) line.remove_suffix(1);
  return line;
}

// Problems that stay in their files: only line offsets are in memory.
class JsonlSet final : public ExampleSet {
 public:
  explicit JsonlSet(std::shared_ptr<const LineReader> reader) : reader_(std::move(reader)) {}
  // Subsequent add() calls refer to this file.
  void begin_file(const std::string& file) { files_.push_back(file); }
  void add(int64_t begin, int64_t number, std::string_view text, uint64_t split) {
    lines_.push_back({begin,
                      static_cast<uint32_t>(text.size()),
                      static_cast<uint32_t>(number),
                      static_cast<uint32_t>(files_.size() - 1),
                      {split, hash_of(text)}});
  }

  int64_t size() const override { return static_cast<int64_t>(lines_.size()); }
  Example get(int64_t index) const override {
    const Line& line = lines_.at(static_cast<size_t>(index));
    const std::string& file = files_[line.file];
    const std::string text = InputFile(file).read(line.begin, line.begin + line.size);
    if (hash_of(text) != line.id.content)
      throw InputError(str(file, ":", line.number, ": has changed since the run read it; hint: ",
                           "restore the file and resume"));
    return reader_->read(clean_line(text, line.number), line.number, file);
  }
  ExampleId id(int64_t index) const override { return lines_.at(static_cast<size_t>(index)).id; }

 private:
  struct Line {
    int64_t begin;
    uint32_t size, number, file;
    ExampleId id;
  };
  static uint64_t hash_of(std::string_view text) { return std::hash<std::string_view>()(text); }

  std::shared_ptr<const LineReader> reader_;
  std::vector<std::string> files_;
  std::vector<Line> lines_;
};

// Reads the lines of a file in blocks of some megabytes, skipping blank ones.
class LineBlocks {
 public:
  struct Line {
    int64_t begin, number;
    std::string_view text;
  };
  explicit LineBlocks(const std::string& file) : file_(file) {}

  // The next lines, valid until the next call; empty at the end of the file.
  std::vector<Line> next() {
    std::vector<Line> lines;
    while (lines.empty() && at_ < file_.size()) {
      int64_t size = kBlock;
      size_t end = 0;  // behind the last complete line
      do {
        text_ = file_.read(at_, std::min(file_.size(), at_ + size));
        end = at_ + static_cast<int64_t>(text_.size()) == file_.size() ? text_.size()
                                                                       : text_.rfind('\n') + 1;
        size *= 2;
      } while (end == 0);
      for (size_t begin = 0; begin < end; ++number_) {
        const size_t stop = std::min(text_.find('\n', begin), end);
        const auto line = std::string_view(text_).substr(begin, stop - begin);
        if (clean_line(line, number_).find_first_not_of(" \t") != line.npos)
          lines.push_back({at_ + static_cast<int64_t>(begin), number_, line});
        begin = stop + 1;
      }
      at_ += static_cast<int64_t>(end);
    }
    return lines;
  }

 private:
  static constexpr int64_t kBlock = 8 << 20;  // bytes
  InputFile file_;
  std::string text_;
  int64_t at_ = 0, number_ = 1;
};

// ExampleId::split of each line. Throws the error of the first invalid line.
std::vector<uint64_t> check_lines(const LineReader& reader, const std::string& file,
                                  const std::vector<LineBlocks::Line>& lines) {
  std::vector<uint64_t> splits(lines.size());
  parallel_try(std::ssize(lines), 64, [&](int64_t i) {
    const LineBlocks::Line& line = lines[static_cast<size_t>(i)];
    const std::string_view text = clean_line(line.text, line.number);
    splits[static_cast<size_t>(i)] = split_hash(reader.read(text, line.number, file).split_key);
  });
  return splits;
}

// Reads files once, with all threads, to validate every line and assign it to a split. Adds at most
// `limit` problems; 0: all.
void add_files(const LineReader& reader, const std::vector<std::string>& files, int64_t limit,
               double held_out_fraction, JsonlSet& train, JsonlSet& held_out) {
  int64_t seen = 0;
  for (const std::string& file : files) {
    LineBlocks blocks(file);
    train.begin_file(file);
    held_out.begin_file(file);
    bool empty = true;
    for (auto lines = blocks.next(); !lines.empty(); lines = blocks.next()) {
      empty = false;
      if (limit > 0) lines.resize(std::min(lines.size(), static_cast<size_t>(limit - seen)));
      seen += std::ssize(lines);
      const std::vector<uint64_t> splits = check_lines(reader, file, lines);
      for (size_t i = 0; i < lines.size(); ++i)
        (is_held_out(splits[i], held_out_fraction) ? held_out : train)
            .add(lines[i].begin, lines[i].number, lines[i].text, splits[i]);
      if (limit > 0 && seen == limit) return;
    }
    if (empty)
      throw InputError(str(file, ": holds no example; hint: write one JSON object per line"));
  }
}

// Sets the keys that read pairs in TRL's formats: texts, or conversations with a prompt of their
// own or with that of their common messages. Returns false, and changes nothing, for other lines.
bool set_pair_format(const Json& line, JsonlConfig& config) {
  if (line.find("chosen") == nullptr || line.find("rejected") == nullptr) return false;
  const bool has_prompt = is_conversation(line.find("prompt")),
             is_chat = has_prompt || is_conversation(line.find("chosen"));
  config.rejected = is_chat ? "rejected" : "{rejected}";
  if (!is_chat) config.answer = "{chosen}";
  if (is_chat) config.messages = has_prompt ? "prompt" : "chosen";
  if (has_prompt) config.completion = "chosen";
  return true;
}

// Sets the keys that read lines with these fields, the formats of TRL among them. Returns false,
// and changes nothing, if the defaults fit or the format is not known. A field that is null counts
// only where no other one of the same use is there.
bool set_format(const Json& line, LineKind kind, JsonlConfig& config) {
  const auto given = [&](const char* name) { return line.find(name) != nullptr; };
  if (kind == LineKind::kPairs) return set_pair_format(line, config);
  // The fields of common sets of labelled texts, and of pairs.
  constexpr std::pair<const char*, const char*> kTexts[] = {
      {"sentence1", "sentence2"}, {"premise", "hypothesis"}, {"question1", "question2"},
      {"question", "sentence"},   {"text", "text_pair"},     {"text", nullptr},
      {"sentence", nullptr},      {"prompt", nullptr}};
  if (kind == LineKind::kLabels && given("label") && !given("answer"))
    for (const auto& [text, pair] : kTexts) {
      if (!given(text) || (pair != nullptr && !given(pair))) continue;
      config.prompt = str("{", text, "}");
      config.answer = "{label}";
      if (pair != nullptr) config.pair = str("{", pair, "}");
      return true;
    }
  const auto has = [&](const char* name) { return !line.get_or_null(name).is_null(); };
  const bool chat = is_conversation(line.find("prompt")),
             solved = given("answer") || given("solution");
  const char* completion = "";
  for (const bool null : {true, false})
    for (const char* name : {"answer", "solution", "completion"})
      if (given(name) && has(name) != null) completion = name;
  if (has("prompt") && !chat && (has("answer") || completion == std::string_view("answer")))
    return false;
  if (has("prompt") && !chat && *completion != '\0') {
    config.solution = str("{", completion, "}");
    config.answer = given("answer")     ? "{answer|solution}"
                    : given("solution") ? "{solution}"
                                        : config.solution;
  } else if (chat && (*completion != '\0' || !has("messages"))) {
    config.messages = "prompt";
    config.completion = completion;
    if (solved) config.answer = "{answer|solution}";
  } else if (is_conversation(line.find("messages"))) {
    config.messages = "messages";
    if (solved) config.answer = "{answer|solution}";
  } else if (given("text") && !has("prompt") && !has(completion)) {
    config.prompt = config.answer = "";
    config.solution = "{text}";
  } else {
    return false;
  }
  return true;
}

std::string format_text(const JsonlConfig& config) {
  std::string text;
  const auto add = [&](const char* key, const std::string& value) {
    if (!value.empty()) text += str(text.empty() ? "" : ", ", key, ": ", value);
  };
  add("messages", config.messages);
  add("completion", config.completion);
  if (config.messages.empty()) add("prompt", config.prompt.empty() ? "none" : config.prompt);
  add("answer", config.answer == "{answer}" ? "" : config.answer);
  add("solution", config.solution);
  add("pair", config.pair);
  add("rejected", config.rejected);
  return text;
}

}  // namespace

void detect_format(JsonlConfig& config, LineKind kind) {
  Json line;
  std::string where;
  try {
    const std::string file = text_files(config.path.at(0)).at(0);
    LineBlocks blocks(file);
    const auto lines = blocks.next();
    if (lines.empty()) return;
    where = str(file, ":", lines[0].number);
    line = parse_json(clean_line(lines[0].text, lines[0].number), where);
  } catch (const InputError&) {
    return;
  }
  if (line.is_object() && set_format(line, kind, config))
    config.detected = str("data.jsonl: by the fields of ", where, ": ", format_text(config));
}

Example read_prompt(const JsonlConfig& config, const Json& fields, const std::string& where) {
  if (!config.messages.empty()) {
    const bool is_prompt =
        fields.find(config.messages) == nullptr && is_conversation(fields.find("prompt"));
    return {.messages = messages_of(fields, is_prompt ? "prompt" : config.messages, where)};
  }
  const Template prompt("prompt", config.prompt);
  return {.prompt = prompt.text(fields, where), .whole_text = config.prompt.empty()};
}

JsonlSplits load_jsonl(const JsonlConfig& config) {
  const auto reader = std::make_shared<const LineReader>(config);
  const double fraction = config.held_out();
  auto train = std::make_unique<JsonlSet>(reader);
  auto held_out = std::make_unique<JsonlSet>(reader);
  JsonlSplits out;
  for (const std::string& path : config.path) {
    const int64_t before = train->size();
    add_files(*reader, text_files(path), config.limit, fraction, *train, *held_out);
    out.source_sizes.push_back(train->size() - before);
  }
  for (const std::string& path : config.eval_path)
    add_files(*reader, text_files(path), 0, 1, *train, *held_out);
  const bool lacks_train = !config.path.empty() && train->size() == 0 && fraction != 1;
  if (lacks_train || (held_out->size() == 0 && fraction != 0))
    throw InputError(str(config.path.at(0), ": no example in the ",
                         lacks_train ? "training" : "held-out", " split at data.held_out_fraction ",
                         fraction, ", of ", train->size() + held_out->size(),
                         "; hint: data.held_out_fraction=0 holds nothing out, data.jsonl.eval_path "
                         "names held-out problems, and another fraction splits otherwise"));
  out.train = std::move(train);
  out.held_out = std::move(held_out);
  return out;
}

bool has_fewer_problems(const JsonlConfig& config, int64_t count) {
  try {
    for (const std::string& path : config.path) {
      const int64_t most = config.limit > 0 ? std::min(config.limit, count) : count;
      int64_t left = most;
      for (const std::string& file : text_files(path)) {
        LineBlocks blocks(file);
        for (auto lines = blocks.next(); !lines.empty() && left > 0; lines = blocks.next())
          left -= std::ssize(lines);
      }
      count -= most - std::max<int64_t>(left, 0);
    }
  } catch (const InputError&) {  // load_jsonl() reports it
    return false;
  }
  return count > 0;
}

}  // namespace cohort
