// `cohort tokenizer`: encodes and decodes line by line, and trains tokenizers from text files.
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <list>

#include "apps/commands.h"
#include "data/loader.h"
#include "nn/model_folder.h"
#include "sys/files.h"
#include "sys/input_file.h"
#include "text/tokenizers/bpe_trainer.h"
#include "text/utf8.h"

namespace cohort::apps {
namespace {

// Prints `convert` of each line of standard input, flushed per line. Throws InputError naming the
// line if `convert` does.
int for_each_line(const TokenizerOptions& options,
                  const std::function<std::string(const Json& line)>& convert) {
  int64_t number = 0;
  for (std::string line; read_line(line);) {
    const std::string where = str("line ", ++number);
    print_now(with_path(where, [&] { return convert(parse_json(line, where)); }) + "\n",
              options.raw);
  }
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

// The patterns that split text into words, by name.
const std::pair<const char*, const char*> kPatterns[] = {
    {"qwen", kQwenPattern}, {"gpt4", kLlama3Pattern}, {"gpt2", kGpt2Pattern}};

// Reads in parts, split at line ends if possible, so that files of any size fit into memory.
void add_file(const std::string& path, BpeTrainer& trainer) {
  constexpr size_t kPart = size_t{16} << 20;
  open_input_file(path, Streams::kInherited);  // has a better error message for a wrong path
  std::string held;
  size_t done = 0;
  const auto add = [&](size_t size) {
    with_path(str(path, ", from byte ", done, " on"),
              [&] { trainer.add_text(std::string_view(held).substr(0, size)); });
    held.erase(0, size);
    done += size;
  };
  const int error = read_chunks(path, [&](std::string_view chunk) {
    held += chunk;
    if (held.size() < kPart) return;
    const size_t line = held.rfind('\n');
    add(line != held.npos ? line + 1 : held.size() - unfinished_utf8(held));
  });
  if (error != 0) throw InputError(str(path, ": cannot be read: ", std::strerror(error)));
  add(held.size());
}

std::string write_error(DurableFile::Step, const std::string& path, const std::string& reason) {
  return str(path, ": cannot be written: ", reason);
}

// Writes all files or, if the system refuses one, none, and no folder for them.
void write_files(const std::filesystem::path& folder, const NamedFiles& files) {
  namespace fs = std::filesystem;
  std::vector<fs::path> made;  // the innermost folder first
  std::error_code error;
  for (fs::path at = fs::absolute(folder); !path_exists(at); at = at.parent_path())
    made.push_back(at);
  try {
    fs::create_directories(folder, error);
    if (error) throw InputError(str(folder.string(), ": cannot be created: ", error.message()));
    std::list<DurableFile> writers;
    for (const auto& [name, content] : files)
      writers.emplace_back(folder / name, write_error).write(content);
    for (DurableFile& writer : writers) writer.finish();
  } catch (const Error&) {
    for (const fs::path& path : made) fs::remove(path, error);
    throw;
  }
}

}  // namespace

std::vector<std::string> split_pattern_names() {
  std::vector<std::string> names;
  for (const auto& [name, pattern] : kPatterns) names.push_back(name);
  return names;
}

int tokenizer_train(const TokenizerTrainOptions& options) {
  namespace fs = std::filesystem;
  BpeTrainerOptions training{.vocab_size = options.vocab_size};
  if (!options.special.empty()) training.special = options.special;
  for (const auto& [name, pattern] : kPatterns)
    if (options.pattern == name) training.pattern = pattern;
  const fs::path folder = options.output;
  if (path_exists(folder / "tokenizer.json"))
    throw InputError(
        str(options.output, ": already has a tokenizer.json; hint: name another folder"));
  BpeTrainer trainer(training);
  for (const std::string& given : options.files)
    for (const std::string& path : text_files(given)) add_file(path, trainer);
  const NamedFiles files = trainer.train();
  write_files(folder, files);
  print(stdout, str(options.output, ": ", make_tokenizer(files, options.output)->vocab_size(),
                    " tokens\n"));
  return kOk;
}

int tokenizer_encode(const TokenizerOptions& options) {
  const auto tokenizer = load_tokenizer(options.folder);
  return for_each_line(options, [&](const Json& line) {
    return ids_text(tokenizer->encode(line.as_string(), options.special_tokens));
  });
}

int tokenizer_decode(const TokenizerOptions& options) {
  const auto tokenizer = load_tokenizer(options.folder);
  return for_each_line(options, [&](const Json& line) {
    return Json(tokenizer->decode(read_ids(line), options.special_text)).dump();
  });
}

}  // namespace cohort::apps
