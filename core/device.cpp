#include "core/device.h"

#include "core/check.h"

namespace cohort {
namespace {
thread_local Stream t_stream;
}

namespace cuda {
int device_count();
Stream default_stream(Device device);
void synchronize(Stream stream);
}  // namespace cuda

std::string Device::str() const {
  return is_cpu() ? "cpu" : "cuda:" + std::to_string(index);
}

int cuda_device_count() {
  if constexpr (kWithCuda) return cuda::device_count();
  return 0;
}

Device parse_device(const std::string& text) {
  if (text == "cpu") return {};
  const bool numbered = text.size() > 5 && text.size() < 12 && text.rfind("cuda:", 0) == 0 &&
                        text.find_first_not_of("0123456789", 5) == std::string::npos;
  if (text != "cuda" && !numbered)
    throw InputError(str("device: expected 'cpu', 'cuda' or 'cuda:N', got '", text, "'"));
  if (!kWithCuda)
    throw InputError(str("device: '", text,
                         "' was asked for, but this build of cohort has no CUDA support; hint: set "
                         "device: cpu, or build with scripts/build.sh cuda"));
  const int count = cuda_device_count(), index = numbered ? std::stoi(text.substr(5)) : 0;
  if (index >= count)
    throw InputError(str("device: '", text, "' was asked for, but this machine has ", count,
                         " usable CUDA device", count == 1 ? "" : "s",
                         count == 0 ? "; hint: set device: cpu" : ""));
  return Device::cuda(index);
}

Stream current_stream(Device device) {
  if (t_stream.device == device) return t_stream;
  if constexpr (kWithCuda)
    if (device.is_cuda()) return cuda::default_stream(device);
  return {device, nullptr};
}

void synchronize(Device device) {
  if constexpr (kWithCuda)
    if (device.is_cuda()) cuda::synchronize(current_stream(device));
}

StreamGuard::StreamGuard(Stream stream) : previous_(t_stream) {
  t_stream = stream;
}
StreamGuard::~StreamGuard() {
  t_stream = previous_;
}

}  // namespace cohort
