// Images of other programs' making: images.json of the data folder, and base64.
#pragma once

#include <fstream>
#include <string>

#include "tests/support/test_util.h"
#include "text/json.h"

namespace cohort::test {

inline std::string base64(std::string_view text) {
  const std::string digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string bytes;
  uint32_t bits = 0;
  for (size_t i = 0; i < text.size() && text[i] != '='; ++i) {
    bits = bits << 6 | static_cast<uint32_t>(digits.find(text[i]));
    if (i % 4 != 0) bytes += static_cast<char>(bits >> (6 - i % 4 * 2));
  }
  return bytes;
}

// images.json, or null without the data folder.
inline Json image_fixture() {
  const std::string path = data_dir() + "/encoder/images.json";
  return std::ifstream(path).good() ? parse_json(read_file(path), path) : Json();
}
#define COHORT_REQUIRE_IMAGES(fixture)                  \
  const Json fixture = ::cohort::test::image_fixture(); \
  if (fixture.is_null()) GTEST_SKIP() << "no encoder/images.json in the data folder"

}  // namespace cohort::test
