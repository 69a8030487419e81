// Input: a JPEG file, whose pixels are then resized.
#include "data/resize.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return cohort::fuzz::run_target(data, size, [](std::string_view text) {
    const cohort::Image image = cohort::decode_image(text, 1, "a.jpg");
    cohort::resized(image, 16, 16, static_cast<cohort::ResizeFilter>(text.size() % 4));
  });
}
