// Errors and checks. Depends on no formatting library, so that every `.cu` file may include it.
//
//   COHORT_CHECK(x.rank() == 2, "[matmul] expected a matrix, got shape ", x.shape().str());
//
// throws Error("[matmul] expected a matrix, got shape [3] (kernels/matmul.cpp:40)").
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace cohort {

// A broken contract or a failed system call. Libraries throw, only apps/ turns errors into exit
// codes.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Invalid user input (configuration, data, command line, checkpoint). The message names the
// location and the next step; the command line tool prints only the message and exits with 2.
class InputError : public Error {
 public:
  using Error::Error;
};

// A non-finite loss, gradient, weight or logit during training.
class NonFiniteError : public Error {
 public:
  using Error::Error;
};

// Concatenates its arguments as `operator<<` prints them.
template <class... Args>
std::string str(Args&&... args) {
  std::ostringstream out;
  (out << ... << std::forward<Args>(args));
  return std::move(out).str();
}

// Returns message + " (file:line)", the file relative to the source root.
std::string with_location(const std::string& message, const char* file, int line);
[[noreturn]] void throw_check_error(const char* file, int line, const std::string& message);

}  // namespace cohort

#define COHORT_CHECK(condition, ...)                                               \
  do {                                                                             \
    if (!(condition)) [[unlikely]]                                                 \
      ::cohort::throw_check_error(__FILE__, __LINE__, ::cohort::str(__VA_ARGS__)); \
  } while (false)
