// CUDA functions that common code calls by on_device(). Defined in CUDA builds only.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "core/allocator.h"
#include "core/graph.h"
#include "core/tensor.h"
#include "core/trace.h"

namespace cohort::cuda {

// Number of usable devices: those before the first unsupported one; 0 without a driver.
int device_count();
// Reason for a count of 0.
std::string no_device_reason();
double memory_bandwidth(Device device);
int compute_capability(Device device);
Stream default_stream(Device device);
void synchronize(Stream stream);
void synchronize_all_streams(Device device);
void order_streams(Stream earlier, Stream later);

Allocator& device_allocator(Device device);
// Free and total bytes, as reported by the driver.
std::pair<int64_t, int64_t> memory_info(Device device);
// Page-locked host memory, above 1 MiB zeros; null if exhausted.
void* allocate_pinned(size_t bytes);
void free_pinned(void* pointer, size_t bytes);

// Implementations of Tensor's functions for non-empty tensors, of which at least one is on a GPU.
void copy(Tensor& to, const Tensor& from);
void copy_async(Tensor& to, const Tensor& from);
void fill(Tensor& t, double value);
void zero(Tensor& t);  // contiguous

// start_readback() enqueues a copy of `t` to page-locked memory and allocates `host`;
// finish_readback() waits for the copy and fills `host`.
std::shared_ptr<void> start_readback(const Tensor& t, Tensor& host);
void finish_readback(const std::shared_ptr<void>& copy, Tensor& host);

bool is_capturing(Device device);
// Launches the graph on the device's current stream. If null, it is first captured from `work`.
void launch_graph(Device device, std::shared_ptr<void>& graph, GraphMemory& memory,
                  const std::function<void()>& work);

// Trace of the kernels and copies of this process, by CUPTI. Those launched by this thread between
// enter_op() and leave_op() belong to the op of that index.
void start_kernel_trace();
std::vector<TraceEvent> finish_kernel_trace();
void enter_op(int64_t index);
void leave_op();

}  // namespace cohort::cuda
