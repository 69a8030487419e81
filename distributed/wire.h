// Transport between the ranks of a run: non-blocking connections of length-prefixed frames. Numbers
// are in host byte order: all hosts of a run have the same.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "sys/polling.h"

namespace cohort::wire {

// Payload limit of a frame after the handshake.
inline constexpr size_t kMaxPayload = size_t{1} << 30;

enum class FrameType : uint8_t {
  kHello = 1,
  kWelcome,
  kFail,
  kHeartbeat,
  kData,
  kResult,
  kExit,
  kHang
};
struct Frame {
  FrameType type;
  std::string payload;
};

class Connection {
 public:
  // `max_payload`: a larger frame is not from a peer and closes the connection.
  Connection(Descriptor socket, size_t max_payload);
  int fd() const { return socket_.get(); }
  bool is_open() const { return socket_.is_open(); }
  void set_max_payload(size_t bytes) { max_payload_ = bytes; }

  // Queues a frame.
  void post(FrameType type, std::string_view payload);
  bool has_output() const { return output_sent_ < output_.size(); }
  // Send and receive without blocking. When the peer has closed its end the connection is closed;
  // frames already received remain available.
  void send();
  void receive();
  std::optional<Frame> next();
  // Time of the last received bytes.
  Clock::time_point heard() const { return heard_; }
  void set_heard(Clock::time_point time) { heard_ = time; }
  void close() { socket_.close(); }

 private:
  Descriptor socket_;
  size_t max_payload_;
  std::string input_, output_;
  size_t input_read_ = 0, output_sent_ = 0;  // bytes
  Clock::time_point heard_;
};

// Builds and reads payloads.
class Packer {
 public:
  Packer& integer(uint64_t value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Packer& text(std::string_view value) {
    integer(value.size());
    bytes_.append(value);
    return *this;
  }
  std::string bytes() { return std::move(bytes_); }

 private:
  std::string bytes_;
};
// Throws Error if the payload is too short.
class Unpacker {
 public:
  explicit Unpacker(std::string_view bytes) : bytes_(bytes) {}
  uint64_t integer();
  std::string text() { return std::string(read(integer())); }
  std::string rest() const { return std::string(bytes_); }

 private:
  std::string_view read(size_t n);
  std::string_view bytes_;
};

}  // namespace cohort::wire
