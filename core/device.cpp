#include "core/device.h"

#include "core/check.h"

namespace cohort {
namespace {
thread_local Stream t_stream;
}

std::string Device::str() const {
  return is_cpu() ? "cpu" : "cuda:" + std::to_string(index);
}

Device parse_device(const std::string& text) {
  if (text == "cpu") return {};
  const bool numbered = text.size() > 5 && text.rfind("cuda:", 0) == 0 &&
                        text.find_first_not_of("0123456789", 5) == std::string::npos;
  if (text == "cuda" || numbered) {
    throw InputError(str("device: '", text,
                         "' was asked for, but this build of cohort has no CUDA support; "
                         "hint: set device: cpu"));
  }
  throw InputError(str("device: expected 'cpu', 'cuda' or 'cuda:N', got '", text, "'"));
}

Stream current_stream() {
  return t_stream;
}

StreamGuard::StreamGuard(Stream stream) : previous_(t_stream) {
  t_stream = stream;
}
StreamGuard::~StreamGuard() {
  t_stream = previous_;
}

}  // namespace cohort
