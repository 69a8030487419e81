// CUDA parts of core: memory, copies, streams, errors, graphs.
#include <cstring>

#include "core/allocator.h"
#include "core/cuda.h"
#include "core/graph.h"
#include "core/rng.h"
#include "core/tensor.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

using test::bit_equal;
using test::random_tensor;

TEST(CudaDevice, ParsesDevicesThatExist) {
  COHORT_REQUIRE_GPU(device);
  EXPECT_EQ(parse_device("cuda", "device"), device);
  EXPECT_EQ(parse_device("cuda:0", "device"), device);
  EXPECT_THROW_WITH(parse_device("cuda:63", "device"), InputError, "this machine has");
}

TEST(CudaDevice, ReportsInsufficientSharedMemory) {
  cuda::check_shared_memory("op", 96 << 10, 96 << 10);
  EXPECT_THROW_WITH(cuda::check_shared_memory("op", 1 << 30, 227 << 10), Error,
                    "[op] needs 1048576 KiB of shared memory per block, this GPU has 227");
}

TEST(CudaDevice, FatalErrorsSayHowToContinue) {
  const auto text_of = [](cudaError_t code) -> std::string {
    try {
      cuda::throw_error(code, "call", "file", 1);
    } catch (const Error& e) {
      return e.what();
    }
  };
  for (const cudaError_t code :
       {cudaErrorIllegalAddress, cudaErrorNvlinkUncorrectable, cudaErrorTensorMemoryLeak,
        cudaErrorMpsClientTerminated, cudaErrorExternalDevice, cudaErrorUnknown})
    EXPECT_NE(text_of(code).find("resume from the last checkpoint"), std::string::npos) << code;
  for (const cudaError_t code : {cudaErrorMemoryAllocation, cudaErrorInvalidValue})
    EXPECT_EQ(text_of(code).find("resume"), std::string::npos) << code;
}

TEST(CudaDevice, ALackOfMemoryIsAnOutOfMemoryErrorOfTheCall) {
  EXPECT_THROW_WITH(cuda::throw_error(cudaErrorMemoryAllocation, "call", "file", 1),
                    OutOfMemoryError, "[cuda] call: out of memory");
}

TEST(CudaDevice, ACallWithoutMemoryIsMadeOnceMoreWithoutCachedBlocks) {
  COHORT_REQUIRE_GPU(device);
  cuda::activate(device);
  for (const int failures : {0, 1, 2}) {
    Tensor::empty({1 << 24}, DType::kU8, device);
    const int64_t reserved = allocator(device).stats().reserved_bytes;
    int calls = 0;
    const cudaError_t code = cuda::with_memory(
        [&] { return calls++ < failures ? cudaErrorMemoryAllocation : cudaSuccess; });
    EXPECT_EQ(code, failures < 2 ? cudaSuccess : cudaErrorMemoryAllocation);
    EXPECT_EQ(calls, failures == 0 ? 1 : 2);
    const bool freed = allocator(device).stats().reserved_bytes < reserved;
    EXPECT_EQ(freed, failures > 0);
  }
}

TEST(CudaAllocator, CountsAndReusesBlocks) {
  COHORT_REQUIRE_GPU(device);
  Allocator& memory = allocator(device);
  const AllocatorStats before = memory.stats();
  void* p = memory.allocate(5000);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(p) % 512, 0u);
  EXPECT_EQ(memory.stats().live_bytes - before.live_bytes, 5120);
  memory.deallocate(p, 5000);
  EXPECT_EQ(memory.stats().live_bytes, before.live_bytes);
  void* again = memory.allocate(5000);
  EXPECT_EQ(again, p);
  memory.deallocate(again, 5000);
}

TEST(CudaAllocator, MergesFreedNeighbours) {
  COHORT_REQUIRE_GPU(device);
  Allocator& memory = allocator(device);
  memory.release_cached();
  const size_t size = size_t{8} << 20;
  std::vector<void*> parts;
  for (int i = 0; i < 4; ++i) parts.push_back(memory.allocate(size));
  const int64_t reserved = memory.stats().reserved_bytes;
  for (const size_t i : {1, 3, 0, 2}) memory.deallocate(parts[i], size);
  void* whole = memory.allocate(4 * size);
  EXPECT_EQ(memory.stats().reserved_bytes, reserved);
  memory.deallocate(whole, 4 * size);
  memory.release_cached();
  EXPECT_LE(memory.stats().reserved_bytes, reserved - static_cast<int64_t>(4 * size));
}

// Work whose tensors have other sizes each time keeps at most a quarter more than it needs, and in
// the end makes no more segments.
TEST(CudaAllocator, JoinsTheSegmentsOfRaggedWork) {
  COHORT_REQUIRE_GPU(device);
  Allocator& memory = allocator(device);
  memory.release_cached();
  const int64_t before = memory.stats().reserved_bytes, live = memory.stats().live_bytes;
  memory.reset_peak();
  Rng rng(1, rng_stream(kTestPurpose));
  int64_t last_change = -1, reserved = 0;
  for (int64_t step = 0; step < 300; ++step) {
    memory.join_segments();
    const auto tokens = static_cast<size_t>(1000 + rng.below(1000));
    std::vector<std::pair<void*, size_t>> blocks;
    for (size_t i = 0; i < 24; ++i) {
      const size_t bytes = tokens * (4096 + 8192 * (i % 5));
      blocks.emplace_back(memory.allocate(bytes), bytes);
      if (i % 3 != 2) continue;  // a temporary of an op
      memory.deallocate(blocks.back().first, blocks.back().second);
      blocks.pop_back();
    }
    for (const auto& [pointer, bytes] : blocks) memory.deallocate(pointer, bytes);
    if (memory.stats().reserved_bytes != reserved) last_change = step;
    reserved = memory.stats().reserved_bytes;
  }
  memory.join_segments();
  const double peak = static_cast<double>(memory.stats().peak_bytes - live);
  EXPECT_LE(static_cast<double>(memory.stats().reserved_bytes - before), 1.25 * peak + (4 << 20));
  EXPECT_LT(last_change, 200);
  memory.release_cached();
}

TEST(CudaAllocator, OutOfMemoryReportsLiveMemory) {
  COHORT_REQUIRE_GPU(device);
  const Tensor held = Tensor::zeros({1 << 20}, DType::kF32, device);
  EXPECT_THROW_WITH(Tensor::empty({int64_t{1} << 46}, DType::kU8, device), OutOfMemoryError,
                    "largest live tensors");
  EXPECT_EQ(held.to_vector<float>()[5], 0);  // the device remains usable
}

TEST(CudaAllocator, APoolKeepsItsMemoryToItself) {
  COHORT_REQUIRE_GPU(device);
  Allocator& memory = allocator(device);
  const MemoryPool pool(device);
  void* inside = nullptr;
  {
    const StreamGuard use(pool.stream());
    inside = memory.allocate(4096);
    memory.deallocate(inside, 4096);
  }
  void* outside = memory.allocate(4096);
  EXPECT_NE(outside, inside);
  memory.deallocate(outside, 4096);
  const StreamGuard use(pool.stream());
  void* again = memory.allocate(4096);
  EXPECT_EQ(again, inside);
  memory.deallocate(again, 4096);
}

TEST(CudaAllocator, APoolIsFreedWithItsLastBlock) {
  COHORT_REQUIRE_GPU(device);
  Allocator& memory = allocator(device);
  const size_t size = size_t{8} << 20;
  const auto reserved = [&] { return memory.stats().reserved_bytes; };
  const int64_t before = reserved();
  void *first = nullptr, *second = nullptr;
  {
    const MemoryPool pool(device);
    const StreamGuard use(pool.stream());
    first = memory.allocate(size);
    second = memory.allocate(size);
  }
  EXPECT_GT(reserved(), before);
  memory.deallocate(first, size);
  EXPECT_GT(reserved(), before);
  memory.deallocate(second, size);
  EXPECT_EQ(reserved(), before);
}

TEST(CudaAllocator, ReleasedMemoryServesOthersUntilReclaimed) {
  COHORT_REQUIRE_GPU(device);
  Allocator& memory = allocator(device);
  memory.release_cached();
  const size_t size = size_t{96} << 20, part = size_t{40} << 20;
  void* first = memory.allocate(part);
  void* released = memory.allocate(size);
  const AllocatorStats before = memory.stats();
  memory.release_to_pool(released);
  EXPECT_LE(memory.stats().live_bytes, before.live_bytes - static_cast<int64_t>(size) + 512);
  memory.release_cached();  // does not free the released block
  void* others[] = {memory.allocate(part), memory.allocate(part)};
  for (void* other : others) EXPECT_NE(other, released);
  EXPECT_EQ(memory.stats().reserved_bytes, before.reserved_bytes);
  for (void* other : others) {
    EXPECT_FALSE(memory.reclaim(released));
    memory.deallocate(other, part);
  }
  EXPECT_TRUE(memory.reclaim(released));
  EXPECT_TRUE(memory.reclaim(released));  // already reclaimed
  EXPECT_EQ(memory.stats().live_bytes, before.live_bytes);
  void* other = memory.allocate(part);
  EXPECT_TRUE(other < released || other >= static_cast<char*>(released) + size);
  memory.deallocate(other, part);
  memory.release_to_pool(released);
  memory.deallocate(released, size);
  memory.deallocate(first, part);
  memory.release_cached();
  EXPECT_LE(memory.stats().reserved_bytes, before.reserved_bytes - static_cast<int64_t>(size));
}

TEST(CudaAllocator, ABlockServesItsStreamOnly) {
  COHORT_REQUIRE_GPU(device);
  Allocator& memory = allocator(device);
  const cuda::OwnedStream side(device);
  const size_t size = size_t{40} << 20;
  memory.release_cached();
  const int64_t reserved = memory.stats().reserved_bytes;
  void *here = memory.allocate(size), *there = nullptr;
  memory.deallocate(here, size);
  if (memory.stats().reserved_bytes == reserved)
    return;  // no cache: the memory was returned to the driver
  {
    const StreamGuard guard(side.get());
    there = memory.allocate(size);
    EXPECT_NE(there, here);
    memory.deallocate(there, size);
  }
  void* again = memory.allocate(size);
  EXPECT_NE(again, there);
  memory.deallocate(again, size);
}

TEST(CudaAllocator, CachedMemoryIsReleasedForAnotherSize) {
  COHORT_REQUIRE_GPU(device);
  Allocator& memory = allocator(device);
  memory.release_cached();
  cuda::activate(device);
  size_t available = 0, total = 0;
  COHORT_CUDA_CHECK(cudaMemGetInfo(&available, &total));
  const size_t first = available / 10 * 6, larger = first + (size_t{64} << 20);
  memory.deallocate(memory.allocate(first), first);
  void* p = memory.allocate(larger);  // does not fit with cached memory
  EXPECT_NE(p, nullptr);
  memory.deallocate(p, larger);
  memory.release_cached();
}

TEST(CudaAllocator, PinnedBlocksAreHostMemoryFromACache) {
  COHORT_REQUIRE_GPU(device);
  Allocator& memory = pinned_allocator();
  const int64_t live = memory.stats().live_bytes;
  void* block = memory.allocate(100000);
  std::memset(block, 1, 100000);
  cudaPointerAttributes attributes{};
  COHORT_CUDA_CHECK(cudaPointerGetAttributes(&attributes, block));
  EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
  EXPECT_GE(memory.stats().live_bytes, live + 100000);
  memory.deallocate(block, 100000);
  EXPECT_EQ(memory.stats().live_bytes, live);
  void* again = memory.allocate(100000);
  EXPECT_EQ(again, block);
  memory.deallocate(again, 100000);
}

// Large page-locked tensors have no size classes, are zeros, and copy without waiting.
TEST(CudaTensor, LargePinnedTensorsCopyAsynchronously) {
  COHORT_REQUIRE_GPU(device);
  const int64_t before = pinned_allocator().stats().reserved_bytes;
  constexpr int64_t kSize = (int64_t{5} << 20) + 12345;
  {
    Tensor host = Tensor::pinned({kSize}, DType::kU8);
    EXPECT_TRUE(host.device().is_cpu());
    EXPECT_LT(pinned_allocator().stats().reserved_bytes - before, kSize + 4096);
    EXPECT_TRUE(bit_equal(host, Tensor::zeros({kSize}, DType::kU8)));
    cudaPointerAttributes attributes{};
    COHORT_CUDA_CHECK(cudaPointerGetAttributes(&attributes, host.raw()));
    EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
    const Tensor values = random_tensor({kSize}, DType::kF32, 1).to(DType::kBF16);
    Tensor there = Tensor::empty({kSize}, DType::kBF16, device),
           pinned = Tensor::pinned({kSize}, DType::kBF16),
           back = Tensor::pinned({kSize}, DType::kBF16);
    pinned.copy_(values);
    there.copy_async_(pinned);
    back.copy_async_(there);
    synchronize(device);
    EXPECT_TRUE(bit_equal(back, values));
    EXPECT_THROW_WITH(there.copy_async_(host), Error, "[copy_async_]");
  }
  EXPECT_EQ(pinned_allocator().stats().reserved_bytes, before);
}

TEST(CudaTensor, MovesBetweenHostAndDevice) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kI32, DType::kI64,
                            DType::kU8, DType::kE4M3, DType::kI8}) {
    const Tensor host = Tensor::from(std::vector<double>{0, 1, 2, 100, 7}).to(dtype);
    const Tensor there = host.to(device);
    EXPECT_EQ(there.device(), device);
    EXPECT_TRUE(bit_equal(there.clone().to(Device{}), host)) << dtype_name(dtype);
  }
  EXPECT_EQ(Tensor::empty({0, 3}, DType::kF32, device).to(Device{}).numel(), 0);
  EXPECT_DOUBLE_EQ(Tensor::full({1}, 2.5, DType::kBF16, device).item(), 2.5);
}

TEST(CudaTensor, CopiesViewsAndConverts) {
  COHORT_REQUIRE_GPU(device);
  const Tensor host = random_tensor({5, 7, 6}, DType::kF64, 1);
  const Tensor there = host.to(device);
  EXPECT_TRUE(bit_equal(there.transpose(0, 2).contiguous(), host.transpose(0, 2).contiguous()));
  EXPECT_TRUE(
      bit_equal(there.narrow(1, 2, 3).to(DType::kBF16), host.narrow(1, 2, 3).to(DType::kBF16)));
  EXPECT_TRUE(bit_equal(there.to(DType::kF32), host.to(DType::kF32)));
  Tensor target = Tensor::zeros({5, 7, 6}, DType::kF32, device),
         expected = Tensor::zeros({5, 7, 6}, DType::kF32);
  target.narrow(2, 1, 2).copy_(host.narrow(2, 0, 2));
  expected.narrow(2, 1, 2).copy_(host.narrow(2, 0, 2));
  EXPECT_TRUE(bit_equal(target, expected));
  target.select(1, 3).fill_(4);
  expected.select(1, 3).fill_(4);
  EXPECT_TRUE(bit_equal(target, expected));
  Tensor back = Tensor::zeros({5, 7, 6}, DType::kF64);
  back.narrow(0, 1, 2).copy_(target.narrow(0, 1, 2));
  EXPECT_EQ(back.narrow(0, 1, 2).to_vector<double>(), target.narrow(0, 1, 2).to_vector<double>());
  EXPECT_THROW_WITH(Tensor::zeros({2}, DType::kI32, device).to(DType::kF32), Error, "on the CPU");
}

// Bytes to numbers and every bf16 value to bytes, as on the CPU.
TEST(CudaTensor, ConvertsE4m3AsTheCpuDoes) {
  COHORT_REQUIRE_GPU(device);
  std::vector<e4m3> bytes(256);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i].bits = static_cast<uint8_t>(i);
  std::vector<bf16> values(1 << 16);
  for (size_t i = 0; i < values.size(); ++i) values[i].bits = static_cast<uint16_t>(i);
  const Tensor eights = Tensor::from(bytes), halves = Tensor::from(values);
  for (const DType dtype : {DType::kF32, DType::kBF16})
    EXPECT_TRUE(bit_equal(eights.to(device).to(dtype), eights.to(dtype)));
  EXPECT_TRUE(bit_equal(halves.to(device).to(DType::kE4M3), halves.to(DType::kE4M3)));
  const Tensor random = random_tensor({1 << 16}, DType::kF64, 1);
  for (const DType dtype : {DType::kF64, DType::kF32})
    EXPECT_TRUE(
        bit_equal(random.to(dtype).to(device).to(DType::kE4M3), random.to(dtype).to(DType::kE4M3)));
}

// Slices of rows with multiples of 16 bytes, and with others.
TEST(CudaTensor, CopiesPartsOfRows) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF64})
    for (const int64_t dim : {1, 3, 4, 8, 64}) {
      const Tensor host = random_tensor({9, 7, dim}, DType::kF64, 1).to(dtype);
      Tensor expected = Tensor::zeros({9, 6, dim}, dtype), got = expected.to(device);
      const Tensor part = host.narrow(1, 4, 2);
      expected.narrow(1, 1, 2).copy_(part);
      got.narrow(1, 1, 2).copy_(host.to(device).narrow(1, 4, 2));
      EXPECT_TRUE(bit_equal(got, expected)) << dtype_name(dtype) << " " << dim;
      EXPECT_TRUE(bit_equal(host.to(device).narrow(1, 4, 2).contiguous(), part.contiguous()));
    }
}

TEST(CudaStream, WorkOnAnotherStreamIsOrderedByEvents) {
  COHORT_REQUIRE_GPU(device);
  const cuda::OwnedStream side(device);
  cuda::Event ready(device), done(device);
  Tensor x = Tensor::zeros({1 << 22}, DType::kF32, device), y = Tensor::empty_like(x);
  synchronize(device);
  for (int i = 1; i <= 20; ++i) {
    x.fill_(i);
    ready.record(current_stream(device));
    ready.wait(side.get());
    {
      const StreamGuard guard(side.get());
      y.copy_(x);
    }
    done.record(side.get());
    done.wait(current_stream(device));
  }
  EXPECT_EQ(y.narrow(0, (1 << 22) - 1, 1).item(), 20);
}

TEST(CudaGraph, CapturesOnceAndReplays) {
  COHORT_REQUIRE_GPU(device);
  const int64_t n = 1 << 23;  // a separate segment, which could serve `disturbance` once freed
  Tensor x = Tensor::full({n}, 1, DType::kF32, device), y = Tensor::zeros({n}, DType::kF32, device);
  int calls = 0;
  GraphRunner replay(device, [&] {
    ++calls;
    const Tensor scratch = x.clone();  // lives in the graph's pool
    y.copy_(scratch);
  });
  const auto full_of = [&](double value) { return Tensor::full({n}, value, DType::kF32); };
  for (int i = 0; i < 6; ++i) {
    x.fill_(i);
    allocator(device).release_cached();
    const Tensor disturbance = Tensor::full({n}, -1, DType::kF32, device);
    replay.run();
    EXPECT_TRUE(bit_equal(y, full_of(i)));
    EXPECT_TRUE(bit_equal(disturbance, full_of(-1)));
  }
  EXPECT_EQ(calls, 2);
}

TEST(CudaError, AFailedCallIsNamedAndCleared) {
  COHORT_REQUIRE_GPU(device);
  cuda::activate(device);
  EXPECT_THROW_WITH(COHORT_CUDA_CHECK(cudaMemset(nullptr, 0, 16)), cuda::CudaError, "cudaMemset");
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(Tensor::full({1}, 3, DType::kF32, device).item(), 3);
}

// The host memory changes right after the call, while the device is still busy with earlier work.
TEST(CudaUpload, TheSourceMayBeOverwrittenImmediately) {
  COHORT_REQUIRE_GPU(device);
  Tensor busy = Tensor::zeros({1 << 26}, DType::kF32, device);
  for (const int64_t n : {int64_t{1}, int64_t{63}, int64_t{1001}, (int64_t{1} << 20) - 1,
                          (int64_t{1} << 20) + 1, (int64_t{11} << 20) + 7}) {
    Tensor host = random_tensor({n}, DType::kF32, 1),
           there = Tensor::zeros({n}, DType::kF32, device);
    const Tensor expected = host.clone();
    for (int i = 0; i < 10; ++i) busy.fill_(i);
    there.copy_(host);
    host.fill_(-7);
    EXPECT_TRUE(bit_equal(there, expected)) << n;
  }
}

TEST(CudaUpload, ConsecutiveUploadsOnTwoStreams) {
  COHORT_REQUIRE_GPU(device);
  const cuda::OwnedStream side(device);
  constexpr int kCount = 400;
  Tensor host = Tensor::empty({30011}, DType::kI32),
         there = Tensor::empty({kCount, 30011}, DType::kI32, device);
  synchronize(device);
  for (int i = 0; i < kCount; ++i) {
    const StreamGuard guard(i % 3 == 0 ? side.get() : current_stream(device));
    host.fill_(i);
    there.select(0, i).copy_(host);
  }
  cuda::Event done(device);
  done.record(side.get());
  done.wait(current_stream(device));
  const Tensor back = there.to(Device{});
  for (int i = 0; i < kCount; ++i)
    EXPECT_TRUE(bit_equal(back.select(0, i), Tensor::full({30011}, i, DType::kI32))) << i;
}

TEST(CudaUpload, CapturedWorkMayNotUpload) {
  COHORT_REQUIRE_GPU(device);
  const Tensor host = Tensor::full({4}, 1, DType::kF32);
  Tensor there = Tensor::zeros({4}, DType::kF32, device);
  GraphRunner replay(device, [&] { there.copy_(host); });
  replay.run();
  EXPECT_THROW_WITH(replay.run(), Error, "graph capture");
  EXPECT_EQ(there.to_vector<double>(), std::vector<double>(4, 1));  // the device remains usable
}

TEST(CudaMultiGpuTensor, TwoGpusAreNotMixed) {
  COHORT_REQUIRE_GPUS(2);
  const Tensor a = Tensor::zeros({4}, DType::kF32, Device::cuda(0));
  EXPECT_THROW_WITH(a.to(Device::cuda(1)), Error, "another GPU");
  EXPECT_EQ(a.to(Device{}).to(Device::cuda(1)).to_vector<double>(), std::vector<double>(4, 0));
}

}  // namespace
}  // namespace cohort
