#include "core/gpu.h"

namespace cohort {

int64_t shared_memory_of(int compute_capability) {
  switch (compute_capability) {
    case 80:
    case 87:
      return 163 << 10;
    case 90:
    case 100:
    case 103:
    case 110:
      return 227 << 10;
    default:
      return 99 << 10;  // 8.6, 8.9, 12.0 and 12.1
  }
}

bool fits(const KernelNeeds& needs, const GpuProperties& gpu) {
  return needs.shared_memory <= gpu.shared_memory &&
         (needs.is_exact ? gpu.compute_capability == needs.compute_capability
                         : gpu.compute_capability >= needs.compute_capability);
}

std::span<const GpuProperties> known_gpus() {
  // Memory as the driver reports it, with ECC where it is on by default.
  constexpr double kGiB = 1 << 30;
  const auto gpu = [](const char* name, int capability, int multiprocessors, double gib) {
    return GpuProperties{.name = name,
                         .compute_capability = capability,
                         .multiprocessors = multiprocessors,
                         .shared_memory = shared_memory_of(capability),
                         .memory = static_cast<int64_t>(gib * kGiB)};
  };
  static const GpuProperties gpus[] = {
      gpu("rtx3060", 86, 28, 11.8),  gpu("rtx3090", 86, 82, 23.7),   gpu("rtx4060ti", 89, 34, 15.6),
      gpu("rtx4090", 89, 128, 23.6), gpu("rtx5090", 120, 170, 31.4), gpu("a10", 86, 72, 22.1),
      gpu("l4", 89, 58, 22.1),       gpu("a6000", 86, 84, 47.4),     gpu("l40s", 89, 142, 44.4),
      gpu("a100-40", 80, 108, 39.4), gpu("a100-80", 80, 108, 79.2),  gpu("h100", 90, 132, 79.1),
      gpu("h200", 90, 132, 139.8),   gpu("b200", 100, 148, 178.4)};
  return gpus;
}

}  // namespace cohort
