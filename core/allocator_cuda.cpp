// Caching allocator of device memory: segments from cudaMalloc, split into blocks. A request is
// served by the smallest sufficient free block of its pool (best fit), whose remainder stays free;
// a freed block is merged with its free neighbours. Each stream has its own pool (see allocator.h),
// and so has each MemoryPool.
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/allocator.h"
#include "core/cuda.h"
#include "core/cuda_backend.h"
#include "core/parallel.h"
#include "core/sizes.h"

namespace cohort {
namespace {

// Small requests have separate segments, so that long-lived small tensors do not fragment large
// ones.
constexpr size_t kSmallRequest = size_t{1} << 20;
constexpr size_t kSmallSegment = size_t{2} << 20;
constexpr size_t kLargeSegment = size_t{32} << 20;
// Free segments are joined if they exceed what was live by kMaxWaste; the new one by kSlack.
constexpr double kMaxWaste = 1.25, kSlack = 1.05;
constexpr size_t kReleasedBlock = 512;  // bytes that remain of a block after release_to_pool()

bool is_cache_enabled() {
  const char* setting = std::getenv("COHORT_CUDA_CACHE");
  return setting == nullptr || std::string_view(setting) != "0";
}

struct Pool;
struct Block {
  char* begin = nullptr;
  size_t size = 0;
  Pool* pool = nullptr;
  Block *previous = nullptr, *next = nullptr;  // neighbours in the segment
  bool is_free = false;
  bool whole_segment() const { return previous == nullptr && next == nullptr; }
};
struct SmallestFirst {
  bool operator()(const Block* a, const Block* b) const {
    return a->size != b->size ? a->size < b->size : a->begin < b->begin;
  }
};
// Graph replays write to the memory of their pool even if no tensor is live there, so it must not
// be freed or reused before the graph is destroyed.
enum class Owner : uint8_t { kStream, kGraph, kDestroyed };

struct Pool {
  explicit Pool(uint64_t id) : id(id), owner(id == 0 ? Owner::kStream : Owner::kGraph) {}
  // Adds to the live bytes.
  void count(int64_t bytes) { peak = std::max(peak, live += bytes); }

  uint64_t id;
  Owner owner;
  int64_t segments = 0;
  int64_t live = 0, peak = 0;  // bytes; the peak since join_segments()
  double needed = 0;           // bytes; the most that were live beside those of a join_segments()
  std::set<Block*, SmallestFirst> free;
};

struct PoolKey {
  uint64_t id;  // MemoryPool; 0: the stream's pool
  const void* stream;
  bool small;
  auto operator<=>(const PoolKey&) const = default;
};

// Allows cudaMalloc and cudaFree during a stream capture of this thread.
class RelaxedCapture : NonCopyable {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class CudaAllocator final : public Allocator {
 public:
  explicit CudaAllocator(Device device) : device_(device), cached_(is_cache_enabled()) {}

  void* allocate(size_t bytes) override {
    check_faults(device_);
    cuda::activate(device_);
    const Stream stream = current_stream(device_);
    const size_t size = allocation_size(bytes, device_);
    const bool small = size <= kSmallRequest;
    std::lock_guard lock(mutex_);
    Pool& pool = pools_.try_emplace({stream.pool, stream.handle, small}, stream.pool).first->second;
    Block* block = take_smallest_fit(pool, size);
    if (block == nullptr) {
      size_t segment = size;
      if (cached_)
        segment = small ? kSmallSegment
                        : std::max((size + kSmallSegment - 1) / kSmallSegment * kSmallSegment,
                                   size <= kLargeSegment / 2 ? kLargeSegment : 0);
      block = new_segment(pool, segment, bytes);
    }
    if (block->size > size) split(block, size);
    block->is_free = false;
    live_.emplace(block->begin, block);
    stats_.allocations += 1;
    count_live(block->size);
    pool.count(static_cast<int64_t>(block->size));
    return block->begin;
  }

  void deallocate(void* pointer, size_t) noexcept override {
    if (pointer == nullptr) return;
    std::lock_guard lock(mutex_);
    released_.erase(pointer);
    Block* block = live_block(pointer);
    live_.erase(pointer);
    stats_.live_bytes -= static_cast<int64_t>(block->size);
    block->is_free = true;
    Pool& pool = *block->pool;
    pool.count(-static_cast<int64_t>(block->size));
    if (block->next != nullptr && block->next->is_free) {
      pool.free.erase(block->next);
      absorb_next(block);
    }
    if (block->previous != nullptr && block->previous->is_free) {
      block = block->previous;
      pool.free.erase(block);
      absorb_next(block);
    }
    pool.free.insert(block);
    if (pool.owner == Owner::kDestroyed)
      close(pool.id);
    else if (pool.owner == Owner::kStream && !cached_)
      release(block);
  }

  // The block keeps its first bytes, so that its address is not reused; the remainder becomes free.
  void release_to_pool(void* pointer) override {
    std::lock_guard lock(mutex_);
    Block* block = live_block(pointer);
    const size_t size = block->size;
    if (!cached_ || size <= kSmallRequest) return;
    split(block, kReleasedBlock);
    if (Block* rest = block->next; rest->next != nullptr && rest->next->is_free) {
      block->pool->free.erase(rest);
      block->pool->free.erase(rest->next);
      absorb_next(rest);
      block->pool->free.insert(rest);
    }
    released_.emplace(pointer, size);
    stats_.live_bytes -= static_cast<int64_t>(size - kReleasedBlock);
    block->pool->count(-static_cast<int64_t>(size - kReleasedBlock));
  }

  bool reclaim(void* pointer) override {
    std::lock_guard lock(mutex_);
    const auto it = released_.find(pointer);
    if (it == released_.end()) return true;
    const size_t size = it->second;
    Block* block = live_block(pointer);
    Block* next = block->next;
    if (!next->is_free || block->size + next->size < size) return false;
    block->pool->free.erase(next);
    absorb_next(block);
    if (block->size > size) split(block, size);
    released_.erase(it);
    count_live(size - kReleasedBlock);
    block->pool->count(static_cast<int64_t>(size - kReleasedBlock));
    return true;
  }

  void release_cached() override {
    std::lock_guard lock(mutex_);
    release_free_segments();
  }

  void join_segments() override {
    const Stream stream = current_stream(device_);
    std::lock_guard lock(mutex_);
    const auto it = pools_.find({stream.pool, stream.handle, false});
    if (it == pools_.end() || it->second.owner != Owner::kStream || !cached_) return;
    Pool& pool = it->second;
    int64_t unused = 0, segments = 0;
    for (const Block* block : pool.free)
      if (block->whole_segment()) {
        unused += static_cast<int64_t>(block->size);
        ++segments;
      }
    pool.needed = std::max(pool.needed, static_cast<double>(pool.peak - pool.live));
    pool.peak = pool.live;
    if (segments < 2 || static_cast<double>(unused) <= kMaxWaste * pool.needed) return;
    release_free_segments(pool);
    const size_t units = 1 + static_cast<size_t>(kSlack * pool.needed) / kSmallSegment;
    void* pointer = nullptr;
    if (cudaMalloc(&pointer, units * kSmallSegment) != cudaSuccess) {
      cudaGetLastError();  // requests will make segments
      return;
    }
    pool.free.insert(add_segment(pool, pointer, units * kSmallSegment));
  }

  int64_t live_bytes(uint64_t id) const {
    std::lock_guard lock(mutex_);
    int64_t bytes = 0;
    for (const auto& [pointer, block] : live_)
      if (block->pool->id == id) bytes += static_cast<int64_t>(block->size);
    return bytes;
  }

  // Called by the destructor of MemoryPool.
  void close_pool(uint64_t id) {
    std::lock_guard lock(mutex_);
    close(id);
  }

 private:
  Block* live_block(void* pointer) const {
    const auto it = live_.find(pointer);
    // The caller's memory is corrupt; thrown from deallocate(), this terminates the process.
    COHORT_CHECK(it != live_.end(), "[allocator] ", pointer, " is not live on ", device_.str());
    return it->second;
  }

  static Block* take_smallest_fit(Pool& pool, size_t size) {
    Block wanted;
    wanted.size = size;
    const auto it = pool.free.lower_bound(&wanted);
    if (it == pool.free.end()) return nullptr;
    Block* block = *it;
    pool.free.erase(it);
    return block;
  }

  Block* new_segment(Pool& pool, size_t size, size_t requested) {
    const RelaxedCapture relaxed;
    void* pointer = nullptr;
    cudaError_t code = cudaMalloc(&pointer, size);
    if (code == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      release_free_segments();
      code = cudaMalloc(&pointer, size);
    }
    if (code == cudaErrorMemoryAllocation) throw_out_of_memory(requested);
    COHORT_CUDA_CHECK(code);
    return add_segment(pool, pointer, size);
  }

  Block* add_segment(Pool& pool, void* pointer, size_t size) {
    stats_.reserved_bytes += static_cast<int64_t>(size);
    pool.segments += 1;
    return new Block{.begin = static_cast<char*>(pointer), .size = size, .pool = &pool};
  }

  // Splits `block` at `size`; the remainder becomes a free block.
  static void split(Block* block, size_t size) {
    auto* remainder = new Block{.begin = block->begin + size,
                                .size = block->size - size,
                                .pool = block->pool,
                                .previous = block,
                                .next = block->next,
                                .is_free = true};
    if (remainder->next != nullptr) remainder->next->previous = remainder;
    block->next = remainder;
    block->size = size;
    block->pool->free.insert(remainder);
  }

  // Merges the next block into `block`. Neither may be in the free list, which is ordered by size.
  static void absorb_next(Block* block) {
    Block* next = block->next;
    block->size += next->size;
    block->next = next->next;
    if (block->next != nullptr) block->next->previous = block;
    delete next;
  }

  void release(Block* block) noexcept {
    const RelaxedCapture relaxed;
    block->pool->free.erase(block);
    block->pool->segments -= 1;
    stats_.reserved_bytes -= static_cast<int64_t>(block->size);
    cudaFree(block->begin);  // synchronises with work that uses the memory
    delete block;
  }
  void release_free_segments(Pool& pool) noexcept {
    std::vector<Block*> free_segments;
    for (Block* block : pool.free)
      if (block->whole_segment()) free_segments.push_back(block);
    for (Block* block : free_segments) release(block);
  }
  void release_free_segments() noexcept {
    for (auto& [key, pool] : pools_)
      if (pool.owner == Owner::kStream) release_free_segments(pool);
  }
  // Frees the unused segments of a graph's pool, and erases the pool once it has none.
  void close(uint64_t id) noexcept {
    for (auto it = pools_.lower_bound({id, nullptr, false});
         it != pools_.end() && it->first.id == id;) {
      Pool& pool = it->second;
      pool.owner = Owner::kDestroyed;
      release_free_segments(pool);
      it = pool.segments == 0 ? pools_.erase(it) : std::next(it);
    }
  }

  [[noreturn]] void throw_out_of_memory(size_t requested) {
    cudaGetLastError();
    size_t available = 0, total = 0;
    cudaMemGetInfo(&available, &total);
    std::map<size_t, int64_t, std::greater<>> sizes;
    for (const auto& [pointer, block] : live_) ++sizes[block->size];
    std::string largest;
    int shown = 0;
    for (const auto& [size, count] : sizes) {
      if (++shown > 6) break;
      largest += str(shown > 1 ? ", " : "", count, " x ", mib(static_cast<int64_t>(size)));
    }
    throw OutOfMemoryError(
        str("[allocator] out of memory on ", device_.str(), ": asked for ",
            mib(static_cast<int64_t>(requested)), " with ", mib(stats_.live_bytes), " live (peak ",
            mib(stats_.peak_bytes), "), ", mib(stats_.reserved_bytes), " held from the driver, ",
            mib(static_cast<int64_t>(available)), " of ", mib(static_cast<int64_t>(total)),
            " free there; largest live tensors: ", largest));
  }

  const Device device_;
  const bool cached_;
  std::map<PoolKey, Pool> pools_;
  std::unordered_map<void*, Block*> live_;
  std::map<void*, size_t> released_;  // sizes of blocks before release_to_pool()
};

CudaAllocator& cuda_allocator(Device device) {
  static std::array<CudaAllocator*, cuda::kMaxDevices> all{};
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  CudaAllocator*& allocator = all.at(static_cast<size_t>(device.index));
  if (allocator == nullptr) {
    COHORT_CHECK(device.index < cuda::device_count(), "[allocator] no such device: ", device.str());
    allocator = new CudaAllocator(device);  // never destroyed: see allocator()
  }
  return *allocator;
}

}  // namespace

namespace cuda {
Allocator& device_allocator(Device device) {
  return cuda_allocator(device);
}

std::pair<int64_t, int64_t> memory_info(Device device) {
  activate(device);
  size_t available = 0, total = 0;
  COHORT_CUDA_CHECK(cudaMemGetInfo(&available, &total));
  return {static_cast<int64_t>(available), static_cast<int64_t>(total)};
}

// Large blocks are zeroed by all threads, in huge pages where the system has them, and then locked:
// 0.05 to 0.09 s a GiB, where cudaHostAlloc() takes 0.65 s (16 cores) and lets no other thread
// use the device.
void* allocate_pinned(size_t bytes) {
  void* pointer = nullptr;
  if (bytes <= kLargePinned) {
    const cudaError_t code = cudaHostAlloc(&pointer, bytes, cudaHostAllocPortable);
    if (code != cudaErrorMemoryAllocation) {
      COHORT_CUDA_CHECK(code);
      return pointer;
    }
    cudaGetLastError();  // clears the error
    return nullptr;
  }
  constexpr size_t kHugePage = size_t{2} << 20;
  void* const mapped =
      mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  // The block begins with a huge page; the rest of the mapping is returned.
  char* const begin = static_cast<char*>(mapped);
  const size_t skipped = (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
  if (skipped > 0) munmap(begin, skipped);
  char* const block = begin + skipped;
  munmap(block + bytes, kHugePage - skipped);
  madvise(block, bytes, MADV_HUGEPAGE);
  parallel_for(static_cast<int64_t>(bytes), int64_t{4} << 20, [&](int64_t first, int64_t end) {
    std::memset(block + first, 0, static_cast<size_t>(end - first));
  });
  const cudaError_t code = cudaHostRegister(block, bytes, cudaHostRegisterPortable);
  if (code == cudaSuccess) return block;
  cudaGetLastError();
  munmap(block, bytes);
  if (code == cudaErrorMemoryAllocation) return nullptr;
  throw_error(code, "cudaHostRegister", __FILE__, __LINE__);
}
void free_pinned(void* pointer, size_t bytes) {
  if (bytes <= kLargePinned) {
    cudaFreeHost(pointer);
    return;
  }
  cudaHostUnregister(pointer);
  munmap(pointer, bytes);
}
}  // namespace cuda

MemoryPool::MemoryPool(Device device) : device_(device) {
  static std::atomic<uint64_t> last{0};
  id_ = ++last;
}
MemoryPool::~MemoryPool() {
  cuda_allocator(device_).close_pool(id_);
}
int64_t MemoryPool::live_bytes() const {
  return cuda_allocator(device_).live_bytes(id_);
}
Stream MemoryPool::stream() const {
  Stream out = current_stream(device_);
  out.pool = id_;
  return out;
}

}  // namespace cohort
