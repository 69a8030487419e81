// HTTP requests in parallel, by libcurl, which is opened at run time: programs that make none do
// not need it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/non_copyable.h"
#include "sys/polling.h"

namespace cohort {

struct HttpOptions {
  std::string url;                   // http:// or https://; anything else is not spoken
  std::vector<std::string> headers;  // "Name: value"
  // PEM file with the authorities to trust in place of the system's; empty: the system's.
  std::string ca_file;
  std::string proxy;    // URL; empty: none, whatever the environment says
  double timeout = 60;  // seconds for a whole request
};

struct HttpAnswer {
  int64_t id = 0;
  int status = 0;           // 0: there is no answer, but an error
  std::string body, error;  // an error beside a status: the body was longer than 1 MB
  double retry_after = 0;   // seconds that the server asks to wait
  std::string location;     // where a redirect leads, which is not followed
};

// POST requests with JSON bodies to one address. Certificates are always verified; redirects are
// not followed, cookies not kept, and answers not decoded. All functions but wake() belong to one
// thread, in which SIGPIPE must be blocked or ignored.
class HttpClient : NonCopyable {
 public:
  // Throws InputError if libcurl is not installed, and for a ca_file that cannot be read.
  static std::unique_ptr<HttpClient> make(HttpOptions options);
  virtual ~HttpClient() = default;

  virtual void post(int64_t id, std::string body) = 0;  // `id` is not in use
  virtual void cancel(int64_t id) = 0;                  // no effect if its answer was returned
  // The requests that have ended since the last call. Waits until one ends, for the deadline, or
  // for wake(), which also ends the next call if none waits.
  virtual std::vector<HttpAnswer> wait(Clock::time_point deadline) = 0;
  virtual void wake() const = 0;
};

}  // namespace cohort
