// Between the ranks of a run: sockets, and connections that carry length-prefixed frames
// without ever blocking. Numbers travel in the host's byte order: the hosts of a run are alike.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "core/descriptor.h"

namespace cohort::wire {

using Clock = std::chrono::steady_clock;

// Listens on this machine, where peers know it as `host`: on the loopback interface alone if that
// is what `host` names, else on all. Throws Error.
Descriptor listen_on(const std::string& host, int port);
// A caller, if one waits.
std::optional<Descriptor> accept_from(const Descriptor& listener);
// One attempt at every address of `host`. Not open on failure, which `why` then explains.
Descriptor connect_to(const std::string& host, int port, std::chrono::milliseconds wait,
                      std::string& why);
// Two sockets that are connected to each other. Throws Error.
std::pair<Descriptor, Descriptor> socket_pair();
// A TCP port of the loopback interface that nobody uses now.
int free_port();
std::string host_name();

// Of a frame between ranks that have met.
inline constexpr size_t kMaxPayload = size_t{1} << 30;

enum class FrameType : uint8_t { kHello = 1, kWelcome, kFail, kBeat, kData, kResult, kLeft };
struct Frame {
  FrameType type;
  std::string payload;
};

class Connection {
 public:
  // `max_payload`: what announces more is no peer of ours, and closes the connection.
  Connection(Descriptor socket, size_t max_payload);
  int fd() const { return socket_.get(); }
  bool is_open() const { return socket_.is_open(); }
  void set_max_payload(size_t bytes) { max_payload_ = bytes; }

  // Queues a frame.
  void post(FrameType type, std::string_view payload);
  bool has_output() const { return sent_ < output_.size(); }
  // Send and receive as much as goes without waiting. A peer that is gone closes the connection;
  // frames that came before stay.
  void send();
  void receive();
  std::optional<Frame> next();
  // When bytes last came.
  Clock::time_point heard() const { return heard_; }
  void set_heard(Clock::time_point time) { heard_ = time; }
  void close() { socket_.close(); }

 private:
  Descriptor socket_;
  size_t max_payload_;
  std::string input_, output_;
  size_t taken_ = 0, sent_ = 0;  // of input_, of output_
  Clock::time_point heard_;
};

// Builds and reads payloads.
class Packer {
 public:
  Packer& integer(uint64_t value);
  Packer& text(std::string_view value);
  std::string bytes() { return std::move(bytes_); }

 private:
  std::string bytes_;
};
// Throws Error if the payload is shorter than what is asked of it.
class Unpacker {
 public:
  explicit Unpacker(std::string_view bytes) : bytes_(bytes) {}
  uint64_t integer();
  std::string text();
  std::string rest() const { return std::string(bytes_); }

 private:
  std::string_view read(size_t n);
  std::string_view bytes_;
};

}  // namespace cohort::wire
