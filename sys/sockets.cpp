#include "sys/sockets.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include <memory>
#include <thread>

#include "sys/polling.h"

namespace cohort {
namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses resolve(const char* host, int port, int flags, std::string& why) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int code = getaddrinfo(host, std::to_string(port).c_str(), &hints, &list);
  if (code != 0) why = code == EAI_SYSTEM ? system_reason() : gai_strerror(code);
  return {code == 0 ? list : nullptr, freeaddrinfo};
}

Descriptor open_socket(const addrinfo& address) {
  return Descriptor(::socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK,
                             address.ai_protocol));
}

void set_option(const Descriptor& socket, int level, int name, int value) {
  ::setsockopt(socket.get(), level, name, &value, sizeof value);
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
      error = ETIMEDOUT;
      socklen_t size = sizeof error;
      if (poll_until(Clock::now() + wait, {{socket.get(), POLLOUT, 0}}))
        ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    }
  }
  if (error == 0 && is_self_connected(socket)) error = ECONNREFUSED;
  if (error != 0) {
    why = system_reason(error);
    return Descriptor();
  }
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);  // heartbeats are small and must not be delayed
  return socket;
}

}  // namespace

Descriptor listen_on(const std::string& host, int port, std::string& why) {
  // Only explicit loopback names select the loopback interface: many systems resolve their own host
  // name to 127.0.1.1, which other hosts cannot reach.
  const bool is_loopback = host == "localhost" || host == "::1" || host.starts_with("127.");
  const char* interface = is_loopback ? host.c_str() : nullptr;
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
        why = system_reason();
      }
  }
  return Descriptor();
}

std::optional<Descriptor> accept_from(const Descriptor& listener) {
  Descriptor socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket.is_open()) return std::nullopt;
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);  // heartbeats are small and must not be delayed
  return socket;
}

Descriptor connect_to(const std::string& host, int port, std::chrono::milliseconds wait,
                      std::string& why) {
  const Addresses addresses = resolve(host.c_str(), port, 0, why);
  for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next)
    if (Descriptor socket = connect_address(*a, wait, why); socket.is_open()) return socket;
  return Descriptor();
}

std::pair<Descriptor, Descriptor> socket_pair(int type, const char* problem) {
  int ends[2];
  if (::socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, ends) != 0) throw_errno(problem);
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
    throw_errno("cannot find a free TCP port");
  return ntohs(address.sin_port);
}

std::string host_name() {
  char name[256] = "unknown host";
  ::gethostname(name, sizeof name - 1);
  return name;
}

}  // namespace cohort
