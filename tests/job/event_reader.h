// Reads event files by their specification, independently of the program: frames, bitwise
// checksums, and the few message fields in use.
#pragma once

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/test_util.h"

namespace cohort::test {

struct ReadEvent {
  double time = 0;
  int64_t step = 0;
  std::string version;
  int64_t session = 0;  // 1: START
  std::vector<std::pair<std::string, float>> scalars;
};

inline uint32_t slow_crc32c(std::string_view bytes) {
  uint32_t crc = ~0u;
  for (const char c : bytes) {
    crc ^= static_cast<uint8_t>(c);
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) != 0 ? (crc >> 1) ^ 0x82f63b78u : crc >> 1;
  }
  return ~crc;
}

template <class T>
T number_at(std::string_view bytes, size_t at) {
  T value;
  if (at + sizeof value > bytes.size()) throw Error("the file ends within a number");
  std::memcpy(&value, bytes.data() + at, sizeof value);  // the machine is little-endian
  return value;
}

// Calls use(number, varint or bits, bytes) for each field of a message.
template <class Use>
void for_each_field(std::string_view message, const Use& use) {
  size_t at = 0;
  const auto varint = [&] {
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = number_at<uint8_t>(message, at++);
      value |= uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return value;
    }
  };
  while (at < message.size()) {
    const uint64_t key = varint(), kind = key & 7;
    uint64_t value = 0;
    std::string_view bytes;
    if (kind == 0) value = varint();
    if (kind == 1) value = number_at<uint64_t>(message, at), at += 8;
    if (kind == 5) value = number_at<uint32_t>(message, at), at += 4;
    if (kind == 2) {
      const uint64_t size = varint();
      if (size > message.size() - at) throw Error("a field is longer than its message");
      bytes = message.substr(at, size);
      at += size;
    }
    use(key >> 3, value, bytes);
  }
}

inline ReadEvent read_event(std::string_view message) {
  ReadEvent event;
  const auto scalar = [&](uint64_t, uint64_t, std::string_view value) {
    auto& [tag, number] = event.scalars.emplace_back();
    for_each_field(value, [&, &tag = tag, &number = number](uint64_t field, uint64_t bits,
                                                            std::string_view bytes) {
      const auto word = static_cast<uint32_t>(bits);
      if (field == 1) tag = bytes;
      if (field == 2) std::memcpy(&number, &word, sizeof number);
    });
  };
  for_each_field(message, [&](uint64_t field, uint64_t value, std::string_view bytes) {
    if (field == 1) std::memcpy(&event.time, &value, sizeof value);
    if (field == 2) event.step = static_cast<int64_t>(value);
    if (field == 3) event.version = bytes;
    if (field == 5) for_each_field(bytes, scalar);
    if (field == 7)
      for_each_field(bytes, [&](uint64_t, uint64_t status, std::string_view) {
        event.session = static_cast<int64_t>(status);
      });
  });
  return event;
}

// Throws Error for a file that does not end with a whole record, or with a wrong checksum.
inline std::vector<ReadEvent> read_events(const std::string& path) {
  const auto masked = [](std::string_view bytes) {
    const uint32_t crc = slow_crc32c(bytes);
    return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
  };
  const std::string file = read_file(path);
  const std::string_view all = file;
  std::vector<ReadEvent> events;
  for (size_t at = 0; at < all.size();) {
    const auto size = number_at<uint64_t>(all, at);
    if (number_at<uint32_t>(all, at + 8) != masked(all.substr(at, 8))) throw Error("length's CRC");
    const std::string_view message = all.substr(at + 12, size);
    if (number_at<uint32_t>(all, at + 12 + size) != masked(message)) throw Error("message's CRC");
    events.push_back(read_event(message));
    at += 16 + size;
  }
  return events;
}

// The event files of a stage, in the order of their starts.
inline std::vector<std::string> event_files(const std::string& dir) {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(dir))
    if (entry.path().filename().string().starts_with("events.out.tfevents."))
      paths.push_back(entry.path().string());
  std::sort(paths.begin(), paths.end());
  return paths;
}

// Tag and step -> value over all files of a stage, without values discarded by a START. Throws
// Error for a duplicate value.
using Scalars = std::map<std::pair<std::string, int64_t>, float>;
inline Scalars read_scalars(const std::string& dir) {
  Scalars scalars;
  for (const std::string& path : event_files(dir))
    for (const ReadEvent& event : read_events(path)) {
      if (event.session == 1)
        std::erase_if(scalars, [&](const auto& s) { return s.first.second >= event.step; });
      for (const auto& [tag, value] : event.scalars)
        if (!scalars.emplace(std::pair(tag, event.step), value).second)
          throw Error(str(tag, " of step ", event.step, " is a duplicate"));
    }
  return scalars;
}

}  // namespace cohort::test
