// Properties of CUDA GPUs that kernels and plans depend on, known without a GPU too.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "core/device.h"

namespace cohort {

struct GpuProperties {
  std::string name;
  int compute_capability = 0;  // 10 major + minor: 89
  int multiprocessors = 0;     // 0: unknown
  int64_t shared_memory = 0;   // maximum bytes per block, with opt-in
  int64_t memory = 0;          // bytes in all, as the driver reports them
  // Rates per second by data sheets; 0: unknown.
  double flops = 0;      // dense bf16 with sums in f32
  double bandwidth = 0;  // bytes of memory
  double link = 0;       // bytes to other GPUs of the host, each way
  double network = 0;    // bytes to other hosts, each way, of a host with a card for each GPU
};

// Maximum bytes of shared memory per block of a compute capability (CUDA programming guide, table
// of technical specifications). Unknown ones get that of 8.6, the least of the supported ones.
int64_t shared_memory_of(int compute_capability);

// Requirements of a kernel.
struct KernelNeeds {
  int64_t shared_memory = 0;    // bytes per block
  int compute_capability = 80;  // at least
  bool is_exact = false;        // no other than that: code for sm_90a runs on 9.0 alone
};
// Code for sm_90a: wgmma, setmaxnreg.
inline constexpr KernelNeeds kSm90a{.compute_capability = 90, .is_exact = true};
// True if a GPU can run such a kernel. Every choice between kernels asks this function.
bool fits(const KernelNeeds& needs, const GpuProperties& gpu);

// The GPUs that `cohort check --gpu` knows by name, such as "rtx4090".
std::span<const GpuProperties> known_gpus();

// A known GPU by its name, in either case, or one that is described: "GiB=24,sm=89". Throws
// InputError for another name, with the nearest one, and for a GPU that is not supported: compute
// capabilities below 8.0, and the GPUs of aarch64 machines.
GpuProperties gpu_named(const std::string& text);

// Blocks until all work on the device has completed, that of other libraries on their own streams
// too. A no-op on the CPU.
void synchronize_all_streams(Device device);

}  // namespace cohort
