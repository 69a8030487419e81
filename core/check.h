// Errors and checks. Free of fmt and iostream formatting libraries, so that every `.cu` may include
// it.
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

// What the user gave (configuration, data, command line, checkpoint) cannot be used. The message
// names the place and the next step; the command line tool prints it alone and exits with 2.
class InputError : public Error {
 public:
  using Error::Error;
};

// A number that is not finite where training needs one: a loss, a gradient, a weight, a logit.
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

// message + " (file:line)", the file relative to the source root.
std::string with_place(const std::string& message, const char* file, int line);
[[noreturn]] void throw_check_error(const char* file, int line, const std::string& message);

}  // namespace cohort

#define COHORT_CHECK(condition, ...)                                               \
  do {                                                                             \
    if (!(condition)) [[unlikely]]                                                 \
      ::cohort::throw_check_error(__FILE__, __LINE__, ::cohort::str(__VA_ARGS__)); \
  } while (false)
