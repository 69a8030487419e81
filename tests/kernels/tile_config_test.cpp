// Every generic attention kernel has tiles for every GPU, by the shared memory that it has.
#include "kernels/attention/tile_config.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>

#include "core/gpu.h"

namespace cohort::test {
namespace {

using namespace kernels;

struct Kernel {
  std::string name;
  std::function<size_t(Tiles)> shared_bytes;
};

std::vector<Kernel> kernels_of(int dim) {
  std::vector<Kernel> out = {
      {"forward", [=](Tiles t) { return forward_tiles(dim, t).shared_bytes(dim); }},
      {"paged", [=](Tiles t) { return paged_tiles(dim, t).shared_bytes(dim); }},
      {"forward and paged in f32", [=](Tiles) { return float_shared_bytes(dim); }},
      {"backward in f32", [=](Tiles) { return float_backward_shared_bytes(dim); }}};
  for (const Pass pass : {Pass::kKeys, Pass::kQueries})
    out.push_back({pass == Pass::kKeys ? "backward of keys" : "backward of queries",
                   [=](Tiles t) { return backward_tiles(dim, pass, t).shared_bytes(dim, pass); }});
  return out;
}

TEST(TileConfig, SomeTilesFitEveryGpu) {
  for (const GpuProperties& gpu : known_gpus())
    for (const int dim : {64, 128, 256})
      for (const Kernel& kernel : kernels_of(dim)) {
        const auto needs = [&](Tiles tiles) {
          return KernelNeeds{.shared_memory = static_cast<int64_t>(kernel.shared_bytes(tiles))};
        };
        const std::string what = gpu.name + ", " + kernel.name + ", D " + std::to_string(dim);
        EXPECT_TRUE(fits(needs(Tiles::kSmall), gpu)) << what;
        // Data center GPUs keep the large tiles.
        if (gpu.shared_memory < 163 << 10) continue;
        EXPECT_TRUE(fits(needs(Tiles::kLarge), gpu)) << what;
      }
}

TEST(TileConfig, TheSmallTilesAreNeededFromHeadsOf128On) {
  std::map<std::string, std::string> too_large;
  for (const int dim : {64, 128, 256})
    for (const Kernel& kernel : kernels_of(dim))
      if (kernel.shared_bytes(Tiles::kLarge) > size_t{99} << 10)
        too_large[kernel.name] += std::to_string(dim) + " ";
  const std::map<std::string, std::string> expected = {{"forward", "128 256 "},
                                                       {"paged", "128 256 "},
                                                       {"backward of keys", "128 256 "},
                                                       {"backward of queries", "256 "}};
  EXPECT_EQ(too_large, expected);
}

TEST(TileConfig, FitsComparesSharedMemoryAndComputeCapability) {
  const GpuProperties consumer{.name = "", .compute_capability = 120, .shared_memory = 99 << 10};
  const GpuProperties hopper{.name = "", .compute_capability = 90, .shared_memory = 227 << 10};
  EXPECT_TRUE(fits({.shared_memory = 99 << 10}, consumer));
  EXPECT_FALSE(fits({.shared_memory = (99 << 10) + 1}, consumer));
  EXPECT_FALSE(fits({.shared_memory = 137 << 10, .compute_capability = 90}, consumer));
  EXPECT_TRUE(fits({.shared_memory = 137 << 10, .compute_capability = 90}, hopper));
  EXPECT_TRUE(fits(kSm90a, hopper));
  EXPECT_FALSE(fits(kSm90a, consumer)) << "code for sm_90a runs on 9.0 alone";
  EXPECT_FALSE(fits({.compute_capability = 90}, {.compute_capability = 89}));
}

TEST(TileConfig, SharedMemoryFollowsTheComputeCapability) {
  for (const auto& [capability, kib] : {std::pair{80, 163},
                                        {86, 99},
                                        {87, 163},
                                        {89, 99},
                                        {90, 227},
                                        {100, 227},
                                        {120, 99},
                                        {121, 99}})
    EXPECT_EQ(shared_memory_of(capability), int64_t{kib} << 10) << capability;
}

}  // namespace
}  // namespace cohort::test
