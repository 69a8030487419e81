// Input: a config.json.
#include "nn/model_config.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return cohort::fuzz::run_target(data, size, [](std::string_view text) {
    cohort::ModelConfig config =
        cohort::ModelConfig::from_json(cohort::parse_json(text, "config.json"));
    config.resolve();
    config.to_json().dump();
  });
}
