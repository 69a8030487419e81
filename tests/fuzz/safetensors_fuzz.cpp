// Input: a safetensors file. All its tensors are read.
#include <unistd.h>

#include <fstream>

#include "data/safetensors.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string kPath = cohort::str("/dev/shm/cohort-fuzz-", getpid(), ".safetensors");
  std::ofstream(kPath, std::ios::binary)
      .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  return cohort::fuzz::run_target(data, size, [](std::string_view) {
    const cohort::SafetensorsFile file(kPath);
    for (const std::string& name : file.names()) file.read(name);
  });
}
