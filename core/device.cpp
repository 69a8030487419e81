#include "core/device.h"

#include "core/check.h"
#include "core/cuda_backend.h"
#include "core/with_cuda.h"

namespace cohort {
namespace {

thread_local const StreamGuard* t_innermost = nullptr;

}  // namespace

int cuda_device_count() {
  return on_device<[] { return 0; }, cuda::device_count>(Device::cuda());
}

std::string usable_cuda_devices() {
  const int count = cuda_device_count();
  const std::string reason =
      on_device<[] { return std::string(); }, cuda::no_device_reason>(Device::cuda());
  return str(count, " usable CUDA device", count == 1 ? "" : "s",
             count == 0 && !reason.empty() ? " (" + reason + ")" : "");
}

double memory_bandwidth(Device device) {
  return on_device<[](Device) { return 0.0; }, cuda::memory_bandwidth>(device, device);
}

Device device_named(const std::string& text, const std::string& key) {
  if (text == "cpu") return {};
  const bool numbered = text.size() > 5 && text.size() < 12 && text.rfind("cuda:", 0) == 0 &&
                        text.find_first_not_of("0123456789", 5) == std::string::npos;
  if (text != "cuda" && !numbered)
    throw InputError(str(key, ": expected 'cpu', 'cuda' or 'cuda:N', got '", text, "'"));
  return Device::cuda(numbered ? std::stoi(text.substr(5)) : 0);
}

Device parse_device(const std::string& text, const std::string& key) {
  const Device device = device_named(text, key);
  if (device.is_cpu()) return device;
  if (!kWithCuda)
    throw InputError(
        str(key, ": '", text,
            "' was asked for, but this build of cohort has no CUDA support; hint: set ", key,
            ": cpu, or build with scripts/build.sh cuda"));
  const int count = cuda_device_count();
  if (device.index >= count)
    throw InputError(str(key, ": '", text, "' was asked for, but this machine has ",
                         usable_cuda_devices(), "; hint: set ", key, ": cpu",
                         count > 0 ? str(" or cuda:", count - 1) : ""));
  return device;
}

Stream current_stream(Device device) {
  for (const StreamGuard* guard = t_innermost; guard != nullptr; guard = guard->outer_)
    if (guard->stream_.device == device) return guard->stream_;
  return on_device<[](Device on) { return Stream{on}; }, cuda::default_stream>(device, device);
}

void synchronize(Device device) {
  on_device<[](Stream) {}, cuda::synchronize>(device, current_stream(device));
}

void order_streams(Stream earlier, Stream later) {
  on_device<[](Stream, Stream) {}, cuda::order_streams>(earlier.device, earlier, later);
}

StreamGuard::StreamGuard(Stream stream) : stream_(stream), outer_(t_innermost) {
  t_innermost = this;
}
StreamGuard::~StreamGuard() {
  t_innermost = outer_;
}

}  // namespace cohort
