#include "distributed/wire.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

#include "core/check.h"

namespace cohort::wire {
namespace {

constexpr size_t kHeader = sizeof(uint32_t) + 1;  // length, type
constexpr size_t kChunk = size_t{1} << 16;

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses resolve(const char* host, int port, int flags, std::string& why) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int code = getaddrinfo(host, std::to_string(port).c_str(), &hints, &list);
  if (code != 0) why = code == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(code);
  return {code == 0 ? list : nullptr, freeaddrinfo};
}

Descriptor open_socket(const addrinfo& address) {
  return Descriptor(::socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK,
                             address.ai_protocol));
}

void set_option(const Descriptor& socket, int level, int name, int value) {
  ::setsockopt(socket.get(), level, name, &value, sizeof value);
}

// Heartbeats are small and must not be delayed by Nagle's algorithm.
void no_delay(const Descriptor& socket) {
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
}

// A connection to a local port without a listener may be assigned that same port and then connect
// to itself.
bool is_self_connected(const Descriptor& socket) {
  sockaddr_storage local{}, remote{};
  socklen_t local_size = sizeof local, remote_size = sizeof remote;
  return ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&local), &local_size) == 0 &&
         ::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&remote), &remote_size) == 0 &&
         local_size == remote_size && std::memcmp(&local, &remote, local_size) == 0;
}

Descriptor connect_address(const addrinfo& address, std::chrono::milliseconds wait,
                           std::string& why) {
  Descriptor socket = open_socket(address);
  int error = 0;
  if (!socket.is_open()) {
    error = errno;
  } else if (::connect(socket.get(), address.ai_addr, address.ai_addrlen) != 0) {
    error = errno;
    if (error == EINPROGRESS) {
      pollfd ready{.fd = socket.get(), .events = POLLOUT, .revents = 0};
      error = ETIMEDOUT;
      socklen_t size = sizeof error;
      if (::poll(&ready, 1, static_cast<int>(wait.count())) > 0)
        ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    }
  }
  if (error == 0 && is_self_connected(socket)) error = ECONNREFUSED;
  if (error != 0) {
    why = std::strerror(error);
    return Descriptor();
  }
  no_delay(socket);
  return socket;
}

bool is_loopback_name(const std::string& host) {
  return host == "localhost" || host == "::1" || host.rfind("127.", 0) == 0;
}

}  // namespace

Descriptor listen_on(const std::string& host, int port) {
  // Only explicit loopback names select the loopback interface: many systems resolve their own host
  // name to 127.0.1.1, which other hosts cannot reach.
  const char* interface = is_loopback_name(host) ? host.c_str() : nullptr;
  std::string why;
  // The port may be occupied briefly by the connection attempt of a peer that started earlier.
  for (int attempt = 0; attempt < 20; ++attempt) {
    if (attempt > 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const Addresses addresses = resolve(interface, port, AI_PASSIVE, why);
    for (const int family : {AF_INET6, AF_INET})  // "::" accepts both families
      for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
        if (a->ai_family != family) continue;
        Descriptor socket = open_socket(*a);
        if (!socket.is_open()) continue;
        set_option(socket, SOL_SOCKET, SO_REUSEADDR, 1);
        if (family == AF_INET6) set_option(socket, IPPROTO_IPV6, IPV6_V6ONLY, 0);
        if (::bind(socket.get(), a->ai_addr, a->ai_addrlen) == 0 &&
            ::listen(socket.get(), SOMAXCONN) == 0)
          return socket;
        why = std::strerror(errno);
      }
  }
  throw Error(str("rank 0 cannot listen on port ", port, ": ", why,
                  "; hint: set MASTER_PORT to a port that is free on ", host));
}

std::optional<Descriptor> accept_from(const Descriptor& listener) {
  Descriptor socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket.is_open()) return std::nullopt;
  no_delay(socket);
  return socket;
}

Descriptor connect_to(const std::string& host, int port, std::chrono::milliseconds wait,
                      std::string& why) {
  const Addresses addresses = resolve(host.c_str(), port, 0, why);
  for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next)
    if (Descriptor socket = connect_address(*a, wait, why); socket.is_open()) return socket;
  return Descriptor();
}

std::pair<Descriptor, Descriptor> socket_pair() {
  int ends[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0)
    throw Error(str("cannot connect two ranks: ", std::strerror(errno)));
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

int free_port() {
  Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* any = reinterpret_cast<sockaddr*>(&address);
  if (!socket.is_open() || ::bind(socket.get(), any, size) != 0 ||
      ::getsockname(socket.get(), any, &size) != 0)
    throw Error(str("cannot find a free TCP port: ", std::strerror(errno)));
  return ntohs(address.sin_port);
}

std::string host_name() {
  char name[256] = "unknown host";
  ::gethostname(name, sizeof name - 1);
  return name;
}

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
    if (n > 0) {
      output_sent_ += static_cast<size_t>(n);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return;
    } else if (errno != EINTR) {
      // Nothing more can be sent, but the peer's last frames may still be readable.
      break;
    }
  }
  output_.clear();
  output_sent_ = 0;
}

void Connection::receive() {
  // Backpressure: stop reading while unread frames exceed the limit.
  while (is_open() && input_.size() - input_read_ <= kHeader + max_payload_) {
    const size_t old = input_.size();
    input_.resize(old + kChunk);
    const ssize_t n = ::recv(fd(), input_.data() + old, kChunk, MSG_DONTWAIT);
    input_.resize(old + static_cast<size_t>(n > 0 ? n : 0));
    if (n > 0) {
      heard_ = Clock::now();
      if (static_cast<size_t>(n) < kChunk) return;  // drained
    } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      return;
    } else if (n == 0 || errno != EINTR) {
      return close();
    }
  }
}

std::optional<Frame> Connection::next() {
  const auto rest = std::string_view(input_).substr(input_read_);
  uint32_t length = 0;
  if (rest.size() >= sizeof length) std::memcpy(&length, rest.data(), sizeof length);
  if (length > max_payload_) {
    input_.clear();
    input_read_ = 0;
    close();
    return std::nullopt;
  }
  if (rest.size() < kHeader + length) {
    input_.erase(0, input_read_);
    input_read_ = 0;
    return std::nullopt;
  }
  input_read_ += kHeader + length;
  return Frame{static_cast<FrameType>(rest[sizeof length]),
               std::string(rest.substr(kHeader, length))};
}

Packer& Packer::integer(uint64_t value) {
  bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  return *this;
}
Packer& Packer::text(std::string_view value) {
  integer(value.size());
  bytes_.append(value);
  return *this;
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
std::string Unpacker::text() {
  const uint64_t size = integer();
  return std::string(read(size));
}

}  // namespace cohort::wire
