// Input: a JSONL file of problems.
#include <unistd.h>

#include <fstream>

#include "data/example.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string kPath = cohort::str("/dev/shm/cohort-fuzz-", getpid(), ".jsonl");
  std::ofstream(kPath, std::ios::binary)
      .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  return cohort::fuzz::run_target(data, size, [](std::string_view) {
    cohort::JsonlConfig config;
    config.path = {kPath};
    config.prompt = "{prompt}{{}}";
    config.held_out_fraction = 0.5;
    const cohort::JsonlSplits splits = cohort::load_jsonl(config);
    for (int64_t i = 0; i < splits.train->size(); ++i) splits.train->get(i);
  });
}
