// Input: a PNG file. The checksums of its chunks are corrected, so that mutations reach the pixels.
#include "data/image.h"
#include "tests/fuzz/fuzz.h"
#include "tests/support/png_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return cohort::fuzz::run_target(data, size, [](std::string_view text) {
    std::string bytes(text);
    for (size_t at = 8; at + 12 <= bytes.size();) {
      const size_t length = cohort::number_at(bytes, at, 4);
      if (length > bytes.size() - at - 12) break;
      const uint32_t crc = cohort::test::crc32(std::string_view(bytes).substr(at + 4, length + 4));
      bytes.replace(at + 8 + length, 4, cohort::test::big_endian(crc));
      at += 12 + length;
    }
    cohort::decode_image(bytes, 3, "a.png");
  });
}
