// Input: files of a sentence-transformers folder, in the order of kFiles, with a zero byte between
// two; an empty one does not exist. The model that is found must lie inside of the folder.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "job/sentence_folder.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  namespace fs = std::filesystem;
  static constexpr const char* kFiles[] = {"modules.json", "1_Pooling/config.json",
                                           "config_sentence_transformers.json",
                                           "sentence_bert_config.json", "tokenizer_config.json"};
  static const std::string kRoot = cohort::str("/dev/shm/cohort-fuzz-", getpid(), "-sentence");
  fs::create_directories(kRoot + "/1_Pooling");
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  for (const char* file : kFiles) {
    const std::string_view text = rest.substr(0, rest.find('\0'));
    rest.remove_prefix(std::min(text.size() + 1, rest.size()));
    const std::string path = cohort::str(kRoot, "/", file);
    fs::remove(path);
    if (!text.empty()) std::ofstream(path, std::ios::binary) << text;
  }
  for (const char* prompt : {"", "query"})
    cohort::fuzz::run_target(data, size, [&](std::string_view) {
      const fs::path model = cohort::read_sentence_folder(kRoot, prompt).model;
      const std::string inside = model.lexically_normal().string();
      if (!inside.starts_with(kRoot)) std::abort();
    });
  return 0;
}
