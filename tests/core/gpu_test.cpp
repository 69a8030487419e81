#include "core/gpu.h"

#include "tests/support/test_util.h"

namespace cohort {
namespace {

TEST(Gpus, AreKnownByName) {
  for (const GpuProperties& gpu : known_gpus()) {
    const GpuProperties found = gpu_named(gpu.name);
    EXPECT_EQ(found.memory, gpu.memory);
    EXPECT_GE(gpu.compute_capability, 80) << gpu.name;
    EXPECT_GT(gpu.memory, int64_t{11} << 30) << gpu.name;
    EXPECT_GT(gpu.multiprocessors, 0) << gpu.name;
  }
  for (const char* name : {"rtx3090", "rtx4090", "rtx5090", "l4", "a10", "a100-40", "a100-80",
                           "h100", "h200", "RTX4090", "H100"})
    EXPECT_NO_THROW(gpu_named(name)) << name;
  EXPECT_EQ(gpu_named("rtx4090").shared_memory, 99 << 10);
  EXPECT_EQ(gpu_named("h100").shared_memory, 227 << 10);
  EXPECT_EQ(gpu_named("a100-80").shared_memory, 163 << 10);
}

TEST(Gpus, CanBeDescribed) {
  for (const char* text : {"GiB=24,sm=89", "sm=89,GiB=24", "GiB=24.0,sm=89"}) {
    const GpuProperties gpu = gpu_named(text);
    EXPECT_EQ(gpu.memory, int64_t{24} << 30) << text;
    EXPECT_EQ(gpu.compute_capability, 89) << text;
    EXPECT_EQ(gpu.shared_memory, 99 << 10) << text;
    EXPECT_EQ(gpu.name, text);
  }
  EXPECT_EQ(gpu_named("GiB=1.5,sm=80").memory, int64_t{3} << 29);
}

TEST(Gpus, OtherNamesAreRefusedWithTheNearest) {
  EXPECT_THROW_WITH(gpu_named("rtx4900"), InputError, "did you mean 'rtx4090'?");
  EXPECT_THROW_WITH(gpu_named("a100_80"), InputError, "did you mean 'a100-80'?");
  for (const char* text : {"", " ", "abacus", "24", "h100\n", "\xff"})
    EXPECT_THROW_WITH(gpu_named(text), InputError, "; hint: one of rtx3060, ");
  EXPECT_THROW_WITH(gpu_named(std::string(1 << 20, 'x')), InputError, "no GPU is known as");
}

TEST(Gpus, OtherCardsAreNamedWithWhatToGive) {
  for (const char* name : {"a100", "A100"})
    EXPECT_THROW_WITH(gpu_named(name), InputError, str("'", name, "'; hint: a100-40 or a100-80"));
  for (const char* name : {"t4", "T4", "v100", "rtx2080ti", "gtx1080"})
    EXPECT_THROW_WITH(gpu_named(name), InputError,
                      str("'", name,
                          "': it is too old, as the kernels need compute capability 8.0 "
                          "(sm=80) or newer; hint: "));
  EXPECT_THROW_WITH(gpu_named("rtx3080"), InputError, "'; hint: GiB=10,sm=86 describes it");
  EXPECT_THROW_WITH(gpu_named("RTX4070"), InputError, "'; hint: GiB=12,sm=89 describes it");
  for (const char* description : {"GiB=10,sm=86", "GiB=16,sm=120", "GiB=24,sm=80"})
    EXPECT_NO_THROW(gpu_named(description));
}

TEST(Gpus, BadDescriptionsAreRefused) {
  for (const char* text :
       {"=", "GiB=", "GiB=,sm=89", "GiB=24;sm=89", "GiB=24,sm=89,", ",GiB=24,sm=89", "gib=24,sm=89",
        "GiB=24,sm=89,GiB=24", "GiB=24,GiB=24", "GiB=24,sm=89,cores=3", "GiB=24x,sm=89",
        "GiB= 24,sm=89", "GiB=24,sm=8.9.1", "GiB=1e999,sm=89", "GiB=24,sm=0x59", "GiB==24,sm=89"})
    EXPECT_THROW_WITH(gpu_named(text), InputError, "expected GiB and sm once each");
  EXPECT_THROW_WITH(gpu_named("GiB=24"), InputError, "lacks sm");
  EXPECT_THROW_WITH(gpu_named("sm=89"), InputError, "lacks GiB");
  for (const char* text : {"GiB=-1,sm=89", "GiB=nan,sm=89", "GiB=inf,sm=89", "GiB=0,sm=89",
                           "GiB=1e30,sm=89", "GiB=1025,sm=89"})
    EXPECT_THROW_WITH(gpu_named(text), InputError, "expected GiB from 1 to 1024");
}

TEST(Gpus, ThatCannotRunAreNamed) {
  for (const char* text : {"GiB=16,sm=75", "GiB=16,sm=-1", "GiB=16,sm=0"})
    EXPECT_THROW_WITH(gpu_named(text), InputError, "need compute capability 8.0 (sm=80) or newer");
  EXPECT_THROW_WITH(gpu_named("GiB=24,sm=8.9"), InputError, "hint: sm=89");
  for (const char* text : {"GiB=64,sm=87", "GiB=128,sm=110", "GiB=128,sm=121"})
    EXPECT_THROW_WITH(gpu_named(text), InputError, "aarch64");
  for (const char* text : {"GiB=16,sm=999", "GiB=16,sm=nan", "GiB=16,sm=1e30", "GiB=16,sm=88.5"})
    EXPECT_THROW_WITH(gpu_named(text), InputError, "unknown compute capability; known are sm=80, ");
}

}  // namespace
}  // namespace cohort
