#include "distributed/wire.h"

#include <sys/socket.h>

namespace cohort::wire {
namespace {

constexpr size_t kHeader = sizeof(uint32_t) + 1;  // length, type

}  // namespace

Connection::Connection(Descriptor socket, size_t max_payload)
    : socket_(std::move(socket)), max_payload_(max_payload), heard_(Clock::now()) {}

void Connection::post(FrameType type, std::string_view payload) {
  if (!is_open()) return;
  const auto length = static_cast<uint32_t>(payload.size());
  output_.append(reinterpret_cast<const char*>(&length), sizeof length);
  output_ += static_cast<char>(type);
  output_.append(payload);
}

void Connection::send() {
  while (is_open() && has_output()) {
    const ssize_t n = ::send(fd(), output_.data() + output_sent_, output_.size() - output_sent_,
                             MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    // After any other failure nothing more can be sent, but the peer's last frames may still be
    // readable.
    if (n < 0) break;
    output_sent_ += static_cast<size_t>(n);
  }
  output_.clear();
  output_sent_ = 0;
}

void Connection::receive() {
  // Backpressure: stop reading while unread frames exceed the limit.
  while (is_open() && input_.size() - input_read_ <= kHeader + max_payload_) {
    const ssize_t n = read_available(fd(), input_);
    if (n < 0) return close();
    if (n > 0) heard_ = Clock::now();
    if (n < kMaxRead) return;  // drained
  }
}

std::optional<Frame> Connection::next() {
  const auto rest = std::string_view(input_).substr(input_read_);
  uint32_t length = 0;
  if (rest.size() >= sizeof length) std::memcpy(&length, rest.data(), sizeof length);
  const bool is_valid = length <= max_payload_;
  if (is_valid && rest.size() >= kHeader + length) {
    input_read_ += kHeader + length;
    return Frame{static_cast<FrameType>(rest[sizeof length]),
                 std::string(rest.substr(kHeader, length))};
  }
  input_.erase(0, is_valid ? input_read_ : input_.npos);
  input_read_ = 0;
  if (!is_valid) close();
  return std::nullopt;
}

std::string_view Unpacker::read(size_t n) {
  if (n > bytes_.size()) throw Error("a message from another rank is truncated");
  const std::string_view out = bytes_.substr(0, n);
  bytes_.remove_prefix(n);
  return out;
}
uint64_t Unpacker::integer() {
  uint64_t value = 0;
  std::memcpy(&value, read(sizeof value).data(), sizeof value);
  return value;
}

}  // namespace cohort::wire
