#include "core/allocator.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <fstream>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/cuda_backend.h"
#include "core/dry_run.h"
#include "core/with_cuda.h"

#if defined(__SANITIZE_ADDRESS__)
#define COHORT_CACHE_BLOCKS 0  // a cached block would hide a use-after-free
#else
#define COHORT_CACHE_BLOCKS 1
#endif

namespace cohort {
namespace {

constexpr size_t kAlignment = 64, kCudaAlignment = 512, kPage = 4096;

// Source of an allocator's memory; allocate() returns null when memory is exhausted.
struct HostMemory {
  void* (*allocate)(size_t bytes);
  void (*free)(void* pointer, size_t bytes);
  size_t largest_cached = SIZE_MAX;  // larger blocks have no size classes and are not cached
};

size_t host_size(size_t bytes, size_t largest_cached) {
  return bytes <= largest_cached ? allocation_size(bytes) : (bytes + kPage - 1) / kPage * kPage;
}

class HostAllocator final : public Allocator {
 public:
  // `device`: the one that AllocationFaults counts its requests for.
  HostAllocator(Device device, HostMemory memory) : device_(device), memory_(memory) {}

  void* allocate(size_t bytes) override {
    check_faults(device_);
    const size_t size = host_size(bytes, memory_.largest_cached);
    std::lock_guard lock(mutex_);
    void* pointer = nullptr;
    if (auto it = cached_.find(size); it != cached_.end() && !it->second.empty()) {
      pointer = it->second.back();
      it->second.pop_back();
      cached_bytes_ -= static_cast<int64_t>(size);
    } else {
      pointer = memory_.allocate(size);
      if (pointer == nullptr) {
        release_cached_locked();
        pointer = memory_.allocate(size);
      }
      if (pointer == nullptr)
        throw OutOfMemoryError(str("[allocator] out of memory: asked for ", size, " bytes with ",
                                   stats_.live_bytes, " live (peak ", stats_.peak_bytes, ")"));
      stats_.reserved_bytes += static_cast<int64_t>(size);
    }
    stats_.allocations += 1;
    count_live(size);
    return pointer;
  }

  void deallocate(void* pointer, size_t bytes) noexcept override {
    if (pointer == nullptr) return;
    const size_t size = host_size(bytes, memory_.largest_cached);
    std::lock_guard lock(mutex_);
    stats_.live_bytes -= static_cast<int64_t>(size);
    if (COHORT_CACHE_BLOCKS && size <= memory_.largest_cached) {
      cached_[size].push_back(pointer);
      cached_bytes_ += static_cast<int64_t>(size);
      // Bounds the memory cached for shapes that do not recur to that of one more peak.
      if (cached_bytes_ > stats_.peak_bytes + (int64_t{64} << 20)) release_cached_locked();
    } else {
      memory_.free(pointer, size);
      stats_.reserved_bytes -= static_cast<int64_t>(size);
    }
  }

  void release_cached() override {
    std::lock_guard lock(mutex_);
    release_cached_locked();
  }

  ~HostAllocator() override { release_cached_locked(); }

 private:
  void release_cached_locked() noexcept {
    for (auto& [size, blocks] : cached_) {
      for (void* block : blocks) memory_.free(block, size);
      stats_.reserved_bytes -= static_cast<int64_t>(size * blocks.size());
      blocks.clear();
    }
    cached_bytes_ = 0;
  }

  const Device device_;
  const HostMemory memory_;
  std::map<size_t, std::vector<void*>> cached_;
  int64_t cached_bytes_ = 0;
};

class CountingAllocator final : public Allocator {
 public:
  enum class Kind { kDevice, kPinned };
  explicit CountingAllocator(Device device, Kind kind = Kind::kDevice)
      : device_(device), kind_(kind) {}
  void* allocate(size_t bytes) override {
    stats_.allocations += 1;
    count_live(size_of(bytes));
    return nullptr;
  }
  void deallocate(void*, size_t bytes) noexcept override {
    stats_.live_bytes -= static_cast<int64_t>(size_of(bytes));
  }
  void release_cached() override {}

 private:
  size_t size_of(size_t bytes) const {
    return kind_ == Kind::kPinned ? host_size(bytes, kLargePinned)
                                  : allocation_size(bytes, device_);
  }
  const Device device_;
  const Kind kind_;
};

thread_local DryRun* t_dry_run = nullptr;

// The state of AllocationFaults: requests [first, end) of devices of the type fail.
struct Faults {
  std::atomic<bool> active{false};
  DeviceType type = DeviceType::kCPU;
  int64_t first = 0, end = 0;
  std::atomic<int64_t> requests{0};
};
Faults g_faults;

// Never destroyed: tensors with static storage may be destroyed after it.
Allocator& cpu_allocator(Device device) {
  COHORT_CHECK(device.is_cpu(), "[allocator] no memory for device ", device.str(),
               " in this build");
  static auto* cpu =
      new HostAllocator(device, {[](size_t bytes) { return std::aligned_alloc(kAlignment, bytes); },
                                 [](void* pointer, size_t) { std::free(pointer); }});
  return *cpu;
}

void* no_pinned_memory(size_t) {
  throw Error("[allocator] no page-locked memory in this build: it has no CUDA support");
}

// Available and total bytes of the host; 1 TiB if unknown.
std::pair<int64_t, int64_t> host_memory(Device) {
  const auto bytes = [](std::string_view key) {
    std::ifstream file("/proc/meminfo");
    for (std::string line; std::getline(file, line);)
      if (line.starts_with(key)) return int64_t{std::atoll(line.c_str() + key.size())} << 10;
    return int64_t{1} << 40;
  };
  return {bytes("MemAvailable:"), bytes("MemTotal:")};
}

}  // namespace

// Size classes on the CPU: multiples of 64 up to 1 KiB, then eight steps per power of two.
size_t allocation_size(size_t bytes, Device device) {
  bytes = std::max<size_t>(bytes, 1);
  const size_t step = device.is_cuda() ? kCudaAlignment
                      : bytes <= 1024  ? kAlignment
                                       : std::bit_floor(bytes) / 8;
  return (bytes + step - 1) / step * step;
}

void Allocator::check_faults(Device device) {
  if (!g_faults.active || device.type != g_faults.type) return;
  const int64_t number = g_faults.requests++;
  if (number >= g_faults.first && number < g_faults.end)
    throw OutOfMemoryError(str("[allocator] out of memory: request ", number, " on ", device.str(),
                               " fails, as a test wants it to"));
}

AllocationFaults::AllocationFaults(Device device, int64_t first, int64_t count) {
  COHORT_CHECK(!g_faults.active, "[allocator] one AllocationFaults at a time");
  g_faults.type = device.type;
  g_faults.first = first;
  g_faults.end = first + count;
  g_faults.requests = 0;
  g_faults.active = true;
}
AllocationFaults::~AllocationFaults() {
  g_faults.active = false;
}
int64_t AllocationFaults::requests() const {
  return g_faults.requests;
}

bool is_dry_run() {
  return t_dry_run != nullptr;
}

DryRun::DryRun(Device device)
    : memory_(std::make_unique<CountingAllocator>(device)),
      pinned_(std::make_unique<CountingAllocator>(device, CountingAllocator::Kind::kPinned)),
      outer_(std::exchange(t_dry_run, this)) {}

DryRun::~DryRun() {
  t_dry_run = outer_;
}

Allocator& allocator(Device device) {
  if (is_dry_run()) return *t_dry_run->memory_;
  return on_device<cpu_allocator, cuda::device_allocator>(device, device);
}

int64_t available_memory(Device device) {
  const AllocatorStats stats = allocator(device).stats();
  return on_device<host_memory, cuda::memory_info>(device, device).first + stats.reserved_bytes -
         stats.live_bytes;
}

int64_t total_memory(Device device) {
  return on_device<host_memory, cuda::memory_info>(device, device).second;
}

Allocator& pinned_allocator() {
  if (is_dry_run()) return *t_dry_run->pinned_;
  static auto* pinned = new HostAllocator(
      Device::cuda(),
      {[](size_t bytes) {
         return on_device<no_pinned_memory, cuda::allocate_pinned>(Device::cuda(), bytes);
       },
       [](void* pointer, size_t bytes) {
         on_device<[](void*, size_t) {}, cuda::free_pinned>(Device::cuda(), pointer, bytes);
       },
       kLargePinned});
  return *pinned;
}

}  // namespace cohort
