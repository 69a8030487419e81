// JSONL: one problem per line. Prompt, answer and solution are templates over the line's fields.
#include "core/config.h"
#include "data/example.h"
#include "data/file.h"
#include "data/split.h"

namespace cohort {
namespace {

// "{numbers} = {target}\n" cut into text and field names.
class Template {
 public:
  // `key`: the configuration key, for messages.
  Template(const char* key, const std::string& text) : key_(key) {
    std::string literal;
    for (size_t i = 0; i < text.size(); ++i) {
      const char c = text[i];
      if ((c == '{' || c == '}') && i + 1 < text.size() && text[i + 1] == c) {
        literal += text[i++];
      } else if (c == '{') {
        const size_t end = text.find_first_of("{}", i + 1);
        if (end == text.npos || text[end] != '}' || end == i + 1) fail(text, "'{' opens no field");
        pieces_.push_back({std::move(literal), text.substr(i + 1, end - i - 1)});
        literal.clear();
        i = end;
      } else if (c == '}') {
        fail(text, "'}' closes no field");
      } else {
        literal += c;
      }
    }
    pieces_.push_back({std::move(literal), ""});
  }

  // `where`: file and line of `fields`.
  std::string render(const Json& fields, const std::string& where) const {
    std::string text;
    for (const Piece& piece : pieces_) {
      text += piece.literal;
      if (piece.field.empty()) continue;
      const Json* value = fields.find(piece.field);
      if (value == nullptr) fail_missing(piece.field, fields, where);
      text += value->to_text();
    }
    return text;
  }

 private:
  struct Piece {
    std::string literal, field;  // the field follows the literal text; "": none does
  };

  [[noreturn]] void fail(const std::string& text, const char* fault) const {
    throw InputError(str(key_, ": ", fault, " in '", text,
                         "'; hint: write {name} for a field, and {{ or }} for a brace"));
  }
  [[noreturn]] void fail_missing(const std::string& field, const Json& fields,
                                 const std::string& where) const {
    std::vector<std::string> names;
    std::string known;
    for (const auto& [name, value] : fields.as_object()) {
      names.push_back(name);
      known += (known.empty() ? "" : ", ") + name;
    }
    const std::string near = nearest_name(field, names);
    throw InputError(
        str(where, ": no field '", field, "', which the ", key_, " template needs",
            near.empty() ? "; fields here: " + known : "; did you mean '" + near + "'?"));
  }

  const char* key_;
  std::vector<Piece> pieces_;
};

// Drops what editors and other systems add to a line: a byte order mark, a carriage return.
std::string_view clean_line(std::string_view line, int64_t number) {
  if (number == 1 && line.starts_with("\xEF\xBB\xBF")) line.remove_prefix(3);
  if (line.ends_with('\r')) line.remove_suffix(1);
  return line;
}

// Calls visit(fields, line, "FILE:LINE") for every line that is not blank, at most `limit` times if
// `limit` is not 0.
template <class F>
void for_each_line(const std::string& path, int64_t limit, F&& visit) {
  std::ifstream file = open_input_file(path);
  std::string line;
  int64_t visited = 0;
  for (int64_t number = 1; std::getline(file, line); ++number) {
    const std::string_view text = clean_line(line, number);
    if (text.find_first_not_of(" \t") == text.npos) continue;
    if (limit > 0 && visited == limit) return;
    const std::string where = str(path, ":", number);
    Json fields = parse_json(text, where);
    if (!fields.is_object())
      throw InputError(str(where, ": expected an object like {\"prompt\": ..., \"answer\": ...}"));
    visit(std::move(fields), number, where);
    ++visited;
  }
  check_read(file, path);
  if (visited == 0)
    throw InputError(str(path, ": holds no example; hint: write one JSON object per line"));
}

// A list of messages, each an object with the text `role`. Throws InputError naming the place.
const Json& messages_of(const Json& fields, const std::string& name, const std::string& where) {
  const Json* found = fields.find(name);
  if (found == nullptr)
    throw InputError(str(where, ": no field '", name, "' (data.jsonl.messages)"));
  if (!found->is_array() || found->as_array().empty())
    throw InputError(str(where, ": ", name, ": expected a list of {role, content}"));
  for (const Json& message : found->as_array()) {
    const Json* role = message.find("role");
    if (role == nullptr || !role->is_string())
      throw InputError(str(where, ": ", name, ": expected messages like {\"role\": \"user\", ",
                           "\"content\": \"...\"}"));
  }
  return *found;
}

// What the assistant says last; empty: nothing.
std::string last_words(const Json& messages) {
  const Json& last = messages.as_array().back();
  const Json* content = last.find("content");
  if (last.at("role").as_string() != "assistant" || content == nullptr || !content->is_string())
    return "";
  return content->as_string();
}

}  // namespace

std::vector<std::string> jsonl_texts(const std::string& path) {
  std::vector<std::string> texts;
  for_each_line(path, 0, [&](Json fields, int64_t, const std::string& where) {
    const Json* text = fields.find("text");
    if (text == nullptr || !text->is_string())
      throw InputError(str(where, ": expected a text as the field 'text'"));
    texts.push_back(text->as_string());
  });
  return texts;
}

Example read_prompt(const JsonlConfig& config, const Json& fields, const std::string& where) {
  if (!config.messages.empty()) return {.messages = messages_of(fields, config.messages, where)};
  return {.prompt = Template("prompt", config.prompt).render(fields, where)};
}

JsonlSplits load_jsonl(const JsonlConfig& config) {
  const Template prompt("prompt", config.prompt), answer("answer", config.answer);
  const Template solution("solution", config.solution);
  const double fraction = config.held_out();
  std::vector<Example> train, held_out;
  const auto example_of = [&](Json fields, int64_t line, const std::string& where) {
    Example example{.line = line};
    if (config.messages.empty()) {
      example.prompt = prompt.render(fields, where);
      example.answer = answer.render(fields, where);
      example.solution = config.solution.empty() ? example.answer : solution.render(fields, where);
    } else {
      example.messages = messages_of(fields, config.messages, where);
      example.prompt = example.messages.dump();
      example.solution = last_words(example.messages);
      // Rewards may need none.
      if (config.answer != JsonlConfig{}.answer || fields.find("answer") != nullptr)
        example.answer = answer.render(fields, where);
    }
    example.fields = std::move(fields);
    return example;
  };
  for_each_line(
      config.path, config.limit, [&](Json fields, int64_t line, const std::string& where) {
        Example example = example_of(std::move(fields), line, where);
        (is_held_out(example.prompt, fraction) ? held_out : train).push_back(std::move(example));
      });
  if (!config.eval_path.empty())
    for_each_line(config.eval_path, 0, [&](Json fields, int64_t line, const std::string& where) {
      held_out.push_back(example_of(std::move(fields), line, where));
    });
  const bool lacks_train = train.empty() && fraction != 1;
  if (lacks_train || (held_out.empty() && fraction != 0))
    throw InputError(str(config.path, ": no example in the ", lacks_train ? "training" : "held-out",
                         " split at held_out_fraction ", fraction,
                         "; hint: change held_out_fraction, or give more examples"));
  return {make_example_set(std::move(train)), make_example_set(std::move(held_out))};
}

}  // namespace cohort
