// `cohort tokenizer`: text to ids and back, line by line.
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <functional>
#include <iostream>

#include "apps/commands.h"
#include "data/utf8.h"

namespace cohort::apps {
namespace {

// Prints what `use` makes of each line of standard input, at once. Throws InputError naming the
// line that `use` refuses.
int for_each_line(const std::function<std::string(const Json& line)>& use) {
  char* line = nullptr;
  size_t capacity = 0;
  const std::unique_ptr<char*, void (*)(char**)> owner(&line, [](char** p) { std::free(*p); });
  int64_t number = 0;
  for (ssize_t size; (size = ::getline(&line, &capacity, stdin)) >= 0;) {
    std::string_view text(line, static_cast<size_t>(size));
    if (text.ends_with('\n')) text.remove_suffix(1);
    const std::string where = str("line ", ++number);
    const Json json = parse_json(text, where);
    std::string result;
    try {
      result = use(json);
    } catch (const InputError& e) {
      throw InputError(where + ": " + e.what());
    }
    std::cout << result << '\n' << std::flush;
    if (!std::cout) throw Error(str("cannot write to standard output: ", std::strerror(errno)));
  }
  if (std::ferror(stdin) != 0)
    throw InputError(str("cannot read standard input: ", std::strerror(errno),
                         "; hint: give lines through a pipe or a file"));
  return kOk;
}

std::string ids_text(std::span<const int32_t> ids) {
  std::string text = "[";
  for (const int32_t id : ids) {
    char digits[16];
    const auto end = std::to_chars(digits, digits + sizeof digits, id).ptr;
    if (text.size() > 1) text += ',';
    text.append(digits, end);
  }
  return text + "]";
}

std::vector<int32_t> read_ids(const Json& json) {
  std::vector<int32_t> ids;
  for (const Json& item : json.as_array()) {
    const int64_t id = item.as_int();
    if (id < 0 || id > INT32_MAX) throw InputError(str("the id ", id, " is out of range"));
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

}  // namespace

int tokenizer_encode(const TokenizerOptions& options) {
  const auto tokenizer = load_tokenizer(options.folder);
  return for_each_line([&](const Json& line) {
    return ids_text(tokenizer->encode(line.as_string(), options.added));
  });
}

int tokenizer_decode(const TokenizerOptions& options) {
  const auto tokenizer = load_tokenizer(options.folder);
  return for_each_line([&](const Json& line) {
    return Json(tokenizer->decode(read_ids(line), options.shown)).dump();
  });
}

}  // namespace cohort::apps
