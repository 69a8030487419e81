// kWithCuda, and on_device(): the only dispatch from common code to CUDA code. Separate from
// core/device.h so that most files preprocess identically in CPU and CUDA builds and ccache
// compiles them once: include it in .cpp files, not in widely included headers.
#pragma once

#include <type_traits>
#include <utility>

#include "core/allocator.h"
#include "core/device.h"
#include "core/trace.h"

namespace cohort {

#ifdef COHORT_WITH_CUDA
inline constexpr bool kWithCuda = true;
#else
inline constexpr bool kWithCuda = false;
#endif

struct NoSpan {
  explicit NoSpan(std::string_view) {}
};

// Calls the implementation for `device`: Cpu(args...) or Cuda(args...). A function that returns
// void is work: a dry run (core/dry_run.h) skips it, and a Trace records it under Cuda's name.
// Builds without CUDA compile no call of Cuda, which only `.cu` and `*_cuda.cpp` files define.
template <auto Cpu, auto Cuda, class... Args>
decltype(auto) on_device(Device device, Args&&... args) {
  constexpr bool kIsWork = std::is_void_v<std::invoke_result_t<decltype(Cpu), Args...>>;
  if constexpr (kIsWork)
    if (is_dry_run()) return;
  static constexpr std::string_view kName = function_name<Cuda>();
  [[maybe_unused]] const std::conditional_t<kIsWork, OpSpan, NoSpan> span(kName);
  if constexpr (kWithCuda)
    if (device.is_cuda()) return Cuda(std::forward<Args>(args)...);
  return Cpu(std::forward<Args>(args)...);
}

}  // namespace cohort
