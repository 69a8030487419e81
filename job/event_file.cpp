#include "job/event_file.h"

#include <unistd.h>

#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "core/text.h"
#include "text/json.h"

namespace cohort {
namespace {

constexpr auto kCrcTable = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    table[i] = i;
    for (int bit = 0; bit < 8; ++bit)
      table[i] = (table[i] >> 1) ^ ((table[i] & 1) != 0 ? 0x82f63b78u : 0u);
  }
  return table;
}();

template <class T>
std::string little_endian(T value) {
  std::string bytes;
  for (size_t i = 0; i < sizeof value; ++i)
    bytes += static_cast<char>(static_cast<uint64_t>(value) >> (8 * i));
  return bytes;
}

// Stored CRCs are masked, because the CRC of data that contains CRCs is problematic.
std::string masked_crc(std::string_view bytes) {
  return little_endian(std::rotr(crc32c(bytes), 15) + 0xa282ead8u);
}

std::string record(const std::string& event) {
  const std::string length = little_endian(uint64_t{event.size()});
  return length + masked_crc(length) + event + masked_crc(event);
}

// Fields of a protocol buffer message, by number.

std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>(value | 0x80);
  return bytes + static_cast<char>(value);
}
std::string field(uint64_t number, int64_t value) {
  return varint(number << 3) + varint(static_cast<uint64_t>(value));
}
std::string field(uint64_t number, double value) {
  return varint(number << 3 | 1) + little_endian(std::bit_cast<uint64_t>(value));
}
std::string field(uint64_t number, std::string_view bytes) {
  return varint(number << 3 | 2).append(varint(bytes.size())).append(bytes);
}
std::string field(uint64_t number, float value) {
  return varint(number << 3 | 5) + little_endian(std::bit_cast<uint32_t>(value));
}

std::string scalars(double time, const Json& line) {
  std::string summary;
  for (const auto& [name, value] : line.as_object()) {
    if (!value.is_number() || name == "step") continue;
    const auto number = static_cast<float>(value.as_double());
    if (std::isfinite(number)) summary += field(1, field(1, name) + field(2, number));
  }
  return field(1, time) + field(2, line.at("step").as_int()) + field(5, summary);
}

int64_t microseconds_now() {
  using namespace std::chrono;
  return duration_cast<microseconds>(system_clock::now().time_since_epoch()).count();
}

double seconds_now() {
  return static_cast<double>(microseconds_now()) * 1e-6;
}

// TensorBoard reads the files of a folder in the order of their names, here that of their starts.
std::string file_name() {
  constexpr int64_t kSecond = 1'000'000;
  const int64_t now = microseconds_now();
  return str("events.out.tfevents.", now / kSecond, ".", padded(now % kSecond, 6), ".", ::getpid());
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = ~0u;
  for (const char c : bytes) crc = (crc >> 8) ^ kCrcTable[(crc ^ static_cast<uint8_t>(c)) & 0xff];
  return ~crc;
}

// The head has two messages: the version of the format, and the start of a session.
EventFile::EventFile(const std::string& dir, int64_t first_step)
    : path_(dir + "/" + file_name()),
      head_(record(field(1, seconds_now()) + field(3, "brain.Event:2")) +
            record(field(1, seconds_now()) + field(2, first_step) +
                   field(7, field(1, int64_t{1})))) {}

void EventFile::write(const Json& line) {
  std::string why = file_.is_open() ? "" : file_.open(path_);
  if (why.empty()) why = file_.append(head_ + record(scalars(seconds_now(), line)));
  if (why.empty()) {
    head_.clear();
  } else if (!std::exchange(warned_, true)) {
    logging::warn("cannot write ", path_, ": ", why,
                  "; TensorBoard lacks the skipped records; hint: metrics.jsonl is complete");
  }
}

}  // namespace cohort
