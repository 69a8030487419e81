// TCP sockets, which are non-blocking, and local ones. Programs that are started inherit none.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "sys/descriptor.h"

namespace cohort {

// Listens on this machine, which peers address as `host`: on the loopback interface only if `host`
// names it, else on all interfaces. Tries for two seconds. On failure the result is not open and
// `why` has the reason.
Descriptor listen_on(const std::string& host, int port, std::string& why);
// Accepts a pending connection, if any.
std::optional<Descriptor> accept_from(const Descriptor& listener);
// Tries every address of `host` once, each for at most `wait`. On failure the result is not open
// and `why` has the reason.
Descriptor connect_to(const std::string& host, int port, std::chrono::milliseconds wait,
                      std::string& why);
// Two connected local sockets of a type such as SOCK_STREAM | SOCK_NONBLOCK. Throws
// Error("PROBLEM: REASON").
std::pair<Descriptor, Descriptor> socket_pair(int type, const char* problem);
// A currently unused TCP port of the loopback interface. Throws Error.
int free_port();
std::string host_name();

}  // namespace cohort
