// What core needs of CUDA, behind on_device(). Defined in CUDA builds only.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "core/allocator.h"
#include "core/replay.h"
#include "core/tensor.h"
#include "core/trace.h"

namespace cohort::cuda {

// Devices that can be used, those before the first one that is too old; 0 where there is no driver.
int device_count();
// Why there is none.
const std::string& no_device_reason();
double memory_bandwidth(Device device);
Stream default_stream(Device device);
void synchronize(Stream stream);

Allocator& device_allocator(Device device);
int64_t free_memory(Device device);  // by the driver's count
// Page-locked host memory; null when there is no more.
void* take_pinned(size_t bytes);
void give_back_pinned(void* pointer);

// Copies and fills as Tensor's; at least one tensor is on a CUDA device and has elements.
void copy(Tensor& to, const Tensor& from);
void fill(Tensor& t, double value);
void zero(Tensor& t);  // contiguous

// Enqueues the copy of `t` to page-locked memory, and makes `host` a tensor for it; the other
// function waits for the copy and fills `host`.
std::shared_ptr<void> start_readback(const Tensor& t, Tensor& host);
void finish_readback(const std::shared_ptr<void>& copy, Tensor& host);

// Starts the graph on the device's current stream. A null one is recorded first: what `work`
// enqueues.
bool is_recording(Device device);
void replay(Device device, std::shared_ptr<void>& graph, ReplayMemory& memory,
            const std::function<void()>& work);

// What Trace has of CUDA: kernels and copies of this process, by CUPTI. Those that this thread
// starts between enter_op() and leave_op() belong to the op of that index.
void start_kernel_trace();
std::vector<TraceEvent> finish_kernel_trace();
void enter_op(int64_t index);
void leave_op();

}  // namespace cohort::cuda
