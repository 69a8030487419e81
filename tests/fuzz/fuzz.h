// What the fuzz targets share. An InputError is an answer; anything else that is thrown, and
// whatever the sanitizers and libFuzzer's limits on time and memory notice, is a finding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/check.h"

namespace cohort::fuzz {

template <class Use>
int answer(const uint8_t* data, size_t size, const Use& use) {
  try {
    use(std::string_view(reinterpret_cast<const char*>(data), size));
  } catch (const InputError&) {
  }
  return 0;
}

}  // namespace cohort::fuzz
