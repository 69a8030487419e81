// Input: a preprocessor_config.json.
#include "data/image_processor.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return cohort::fuzz::run_target(data, size, [](std::string_view text) {
    cohort::ImageProcessor processor =
        cohort::ImageProcessor::from_json(cohort::parse_json(text, "p.json"), "p.json");
    processor.fit(8, 3, "p.json");
    processor.prepare(cohort::Image{8, 9, 3});
    processor.to_json().dump();
  });
}
