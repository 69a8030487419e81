// optimizer.place: what `auto` chooses, and runs with the state on the host.
#include "job/memory_plan.h"
#include "tests/job/small_runs.h"

namespace cohort::test {
namespace {

// The GRPO stage of a model of Llama 3 8B's shape.
struct EightBillion {
  EightBillion() {
    const std::string source =
        std::filesystem::path(__FILE__).parent_path().parent_path().parent_path();
    config = load_plan(source + "/bench/configs/llama_8b.yaml", {}).stages[0];
    config.batch.trainer = TrainerType::kGrpo;
    config.batch.prompts_per_step = 64;
    config.batch.num_generations = 8;
    config.sampling.max_completion_length = 256;
    config.model.recompute = Recompute::kCheap;
    stage.model = config.model;
    stage.model.vocab_size = 128256;
    stage.model.resolve();
    stage.lengths = {.longest_prompt = 128, .longest_sequence = 384};
  }
  TrainConfig config;
  StagePreview stage;
};

constexpr int64_t kGb = 1'000'000'000;

TEST(Place, AutoKeepsOnTheDeviceWhatFits) {
  const EightBillion eight;
  int64_t units = 35;
  bool on_device = false;
  for (int64_t gb = 72; gb <= 150; gb += 2) {
    SCOPED_TRACE(gb);
    TrainConfig config = eight.config;
    const std::string chosen =
        choose_by_memory(config, eight.stage, 1, {.device = gb * kGb, .host = 100 * kGb}).place;
    const OptimizerStorage& storage = config.optimizer.storage;
    ASSERT_NE(storage.place, StatePlace::kAuto);
    EXPECT_EQ(chosen.empty(), storage.place == StatePlace::kDevice);
    if (storage.place == StatePlace::kDevice) {
      on_device = true;
      continue;
    }
    EXPECT_FALSE(on_device) << "more memory does not move it to the host";
    const int64_t now = storage.host_units == 0 ? 34 : storage.host_units;
    EXPECT_LE(now, units);
    units = now;
    // It fits, and with one unit more on the device it would not.
    MemoryShape shape = step_size(config, eight.stage, 1).memory;
    shape.max_cache_tokens = shape.rollout_length;
    EXPECT_LE(estimate_memory(eight.stage.model, config.dtype, shape).peak(), 9 * gb * kGb / 10);
    if (now == 34 || now == 1) continue;
    config.optimizer.storage.host_units = now - 1;
    shape = step_size(config, eight.stage, 1).memory;
    EXPECT_GT(estimate_memory(eight.stage.model, config.dtype, shape).peak(), 9 * gb * kGb / 10);
  }
  EXPECT_TRUE(on_device);
  EXPECT_LT(units, 20);
}

// Adapters of rank 16 have 400 MiB of state, and the largest micro batch fits beside it.
TEST(Place, AutoKeepsTheStateOfAdaptersOnTheDevice) {
  EightBillion eight;
  eight.config.batch.micro_batch_tokens.reset();
  eight.config.model.recompute = Recompute::kNone;
  eight.config.model.lora.rank = 16;
  for (const int64_t gb : {40, 80}) {
    TrainConfig config = eight.config;
    EXPECT_EQ(
        choose_by_memory(config, eight.stage, 1, {.device = gb * kGb, .host = 100 * kGb}).place,
        "");
    EXPECT_EQ(config.optimizer.storage.place, StatePlace::kDevice);
  }
}

TEST(Place, AutoNeedsMemoryOfTheHost) {
  const EightBillion eight;
  for (const int64_t host : {20, 100}) {
    TrainConfig config = eight.config;
    choose_by_memory(config, eight.stage, 1, {.device = 76 * kGb, .host = host * kGb});
    EXPECT_EQ(config.optimizer.storage.place, host == 20 ? StatePlace::kDevice : StatePlace::kHost);
  }
  // A place that is given stays; the CPU has one memory.
  TrainConfig given = eight.config;
  given.optimizer.storage.place = StatePlace::kDevice;
  EXPECT_EQ(choose_by_memory(given, eight.stage, 1, {.device = 76 * kGb, .host = 100 * kGb}).place,
            "");
  EXPECT_EQ(given.optimizer.storage.place, StatePlace::kDevice);
  TrainConfig cpu = eight.config;
  cpu.device = "cpu";
  EXPECT_EQ(choose_by_memory(cpu, eight.stage, 1, {.device = kGb, .host = kGb}).place, "");
  EXPECT_EQ(cpu.optimizer.storage.place, StatePlace::kDevice);
}

TEST(Place, PlansOfTheEightBillionShape) {
  const EightBillion eight;
  const GpuPlan plan = plan_for_gpu(eight.config, eight.stage, 1, gpu_named("h100"));
  EXPECT_TRUE(plan.runs) << plan.shortage;
  EXPECT_EQ(plan.config.optimizer.storage.place, StatePlace::kHost);
  EXPECT_LT(plan.memory.peak(), 76 * kGb);
  const int64_t pinned = optimizer_bytes(plan.config.optimizer, eight.stage.model, DType::kBF16,
                                         Device::cuda())
                             .pinned,
                host = host_memory(plan.config, eight.stage.model, 1);
  EXPECT_GT(pinned, 20 * kGb);
  EXPECT_GT(host, pinned);
  EXPECT_LT(host, pinned + 6 * kGb);  // a process, and a checkpoint's largest master
  TrainConfig device = eight.config;
  device.optimizer.storage.place = StatePlace::kDevice;
  const GpuPlan changed = plan_for_gpu(device, eight.stage, 1, gpu_named("h100"));
  EXPECT_FALSE(changed.runs);
  EXPECT_NE(changed.changes.find("optimizer.place=auto"), std::string::npos) << changed.changes;
  // A pretraining step of 4,096 tokens mostly streams, a GRPO step does not.
  const double flops = train_flops_per_token(eight.stage.model, 2048);
  EXPECT_NE(streaming_note(48 * kGb, flops * 4096, gpu_named("h100")), "");
  EXPECT_EQ(streaming_note(48 * kGb, flops * 139200, gpu_named("h100")), "");
  EXPECT_EQ(streaming_note(0, 1, gpu_named("h100")), "");
}

// The files of a run do not depend on the place, and a run may change it.
TEST(Place, RunsInEitherPlaceAreOne) {
  const ExpectLog warnings("optimizer.place: host does nothing but copies with device: cpu");
  const TempDir dir;
  const std::string yaml = std::string(kSmallModel) + kSmallData + kSmallSft;
  const std::vector<std::string> on_host{"optimizer.place=host", "optimizer.host_units=2"};
  const std::string plain = train_new(small_plan(dir, "plain", yaml));
  const std::string host = train_new(small_plan(dir, "host", yaml, on_host));
  const std::string moved = train_interrupted(small_plan(dir, "moved", yaml), 3);
  train_rest(moved, on_host);
  const std::string back = train_interrupted(small_plan(dir, "back", yaml, on_host), 3);
  train_rest(back, {"optimizer.place=device"});
  for (const std::string& run : {host, moved, back})
    for (const char* file : {"model.safetensors", "training/optimizer.safetensors"})
      EXPECT_TRUE(checkpoint_bytes(run, file) == checkpoint_bytes(plain, file)) << run << file;
}

}  // namespace
}  // namespace cohort::test
