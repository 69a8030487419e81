// Whether this build has CUDA, and the one way from code that every build has to code that only
// CUDA builds have. A header of its own and no part of core/device.h, so that most files are the
// same text to a CPU and a CUDA build and ccache compiles them once: it is for .cpp files, not for
// headers that many include.
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

// Calls the function that serves `device`: Cpu(args...) or Cuda(args...). One that returns nothing
// is work: a dry run (core/dry_run.h) leaves it out, and a Trace shows it by Cuda's name. A build
// without CUDA compiles no call of Cuda, which only `.cu` and `*_cuda.cpp` files define.
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
