// Shared by the fuzz targets. An InputError is an expected result. Any other exception is a
// finding, as are reports of the sanitizers and of libFuzzer's limits on time and memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/check.h"

namespace cohort::fuzz {

template <class Use>
int run_target(const uint8_t* data, size_t size, const Use& use) {
  try {
    use(std::string_view(reinterpret_cast<const char*>(data), size));
  } catch (const InputError&) {
  }
  return 0;
}

}  // namespace cohort::fuzz
