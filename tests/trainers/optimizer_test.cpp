// Learning rate schedules, weight decay, clipping, and the curve of the final report.
#include "trainers/optimizer.h"

#include <cmath>

#include "autograd/ops.h"
#include "core/allocator.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/tensor_files.h"
#include "tests/support/test_util.h"

namespace cohort::test {
namespace {

OptimizerConfig schedule(Schedule type, int64_t warmup) {
  OptimizerConfig c;
  c.learning_rate = 1;
  c.min_learning_rate = 0.1;
  c.lr_schedule = type;
  c.warmup_steps = warmup;
  return c;
}

// 4 steps of warm-up to the peak at step 4; the minimum would be at step 24, after the last of 24.
TEST(LearningRate, WarmsUpLinearlyAndReachesThePeak) {
  for (const Schedule type : {Schedule::kCosine, Schedule::kLinear, Schedule::kConstant})
    for (int64_t step = 0; step <= 4; ++step)
      EXPECT_DOUBLE_EQ(scheduled_learning_rate(schedule(type, 4), step, 24),
                       static_cast<double>(step + 1) / 5);
}

TEST(LearningRate, FollowsItsScheduleTowardsTheMinimum) {
  const auto rate = [](Schedule type, int64_t step) {
    return scheduled_learning_rate(schedule(type, 4), step, 24);
  };
  // A quarter and half of the way from step 4 to step 24, and the last step before its end.
  EXPECT_DOUBLE_EQ(rate(Schedule::kLinear, 9), 0.1 + 0.9 * 0.75);
  EXPECT_DOUBLE_EQ(rate(Schedule::kLinear, 14), 0.1 + 0.9 * 0.5);
  EXPECT_DOUBLE_EQ(rate(Schedule::kLinear, 23), 0.1 + 0.9 * 0.05);
  EXPECT_DOUBLE_EQ(rate(Schedule::kCosine, 9), 0.1 + 0.9 * (1 + std::sqrt(0.5)) / 2);
  EXPECT_DOUBLE_EQ(rate(Schedule::kCosine, 14), 0.1 + 0.9 * 0.5);
  EXPECT_DOUBLE_EQ(rate(Schedule::kCosine, 23), 0.1 + 0.45 * (1 + std::cos(0.95 * M_PI)));
  for (const int64_t step : {4, 9, 23}) EXPECT_DOUBLE_EQ(rate(Schedule::kConstant, step), 1);
}

TEST(LearningRate, TheLastStepStillTrains) {
  for (const Schedule type : {Schedule::kCosine, Schedule::kLinear})
    for (const int64_t steps : {1, 2, 10, 1000}) {
      OptimizerConfig config = schedule(type, 0);
      config.min_learning_rate = 0;
      EXPECT_GT(scheduled_learning_rate(config, steps - 1, steps), 0);
    }
}

TEST(LearningRate, ShortRunsStayInRange) {
  for (const Schedule type : {Schedule::kCosine, Schedule::kLinear, Schedule::kConstant})
    for (const int64_t warmup : {0, 1, 10})
      for (const int64_t steps : {1, 2, 5})
        for (int64_t step = 0; step < steps; ++step) {
          const double rate = scheduled_learning_rate(schedule(type, warmup), step, steps);
          EXPECT_GT(rate, 0) << step << " of " << steps << ", warm-up " << warmup;
          EXPECT_LE(rate, 1);
        }
}

// The random numbers of bf16 moments are addressed by unit and flat index, whatever comes before.
TEST(AdamW, RoundsMomentsByTheAddressOfEachParameter) {
  ParameterSet set(DType::kF32, {}, std::nullopt);
  set.add({"table", {10, 10}, ParameterUse::kLookup});
  set.begin_unit();
  set.add({"a", {70}});
  set.add({"b", {200}});
  for (const NamedParameter& p : set) {
    Tensor(p.value).fill_(1);
    p.grad().copy_(random_tensor(p.value.shape(), DType::kF32, 3));
  }
  OptimizerConfig config;
  config.storage.moments = MomentKind::kBF16;
  const auto optimizer = std::make_unique<Optimizer>(set, config, 4);
  std::vector<kernels::AdamWTensor> alone = {{.param = set[2].value.clone(),
                                              .grad = set[2].grad().clone(),
                                              .m = Tensor::zeros({200}, DType::kBF16),
                                              .v = Tensor::zeros({200}, DType::kBF16),
                                              .unit = 1,
                                              .flat_index = 65536 + 128}};
  optimizer->step(1e-3, {});
  kernels::adamw_step(alone, {.learning_rate = 1e-3,
                              .beta1 = config.adam_beta1,
                              .beta2 = config.adam_beta2,
                              .eps = config.adam_eps,
                              .seed = 4});
  const NamedTensors state = tensors_of(optimizer->state_sources());
  ASSERT_EQ(state[4].first, "b.m");
  EXPECT_TRUE(bit_equal(state[4].second, alone[0].m));
  EXPECT_TRUE(bit_equal(state[5].second, alone[0].v));
}

TEST(Optimizer, NeitherMovesFrozenParametersNorHoldsStateOfThem) {
  ParameterSet set(DType::kF32, {}, std::nullopt);
  set.add({"frozen", {3}, ParameterUse::kVector, 1, ParameterRole::kFrozen});
  set.add({"w", {4}, ParameterUse::kVector, 1}).grad().fill_(1);
  const auto optimizer = std::make_unique<Optimizer>(set, OptimizerConfig{});
  optimizer->step(0.1, {});
  EXPECT_EQ(set[0].value.to_vector<double>(), std::vector<double>(3, 1));
  EXPECT_LT(set[1].value.to_vector<double>()[3], 1);
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors_of(optimizer->state_sources())) names.push_back(name);
  EXPECT_EQ(names, (std::vector<std::string>{"w.m", "w.v"}));
  Tensor norm = Tensor::empty({1}, DType::kF64);
  kernels::grad_norm(norm, set.gradients());
  EXPECT_EQ(norm.item(), 2);
}

// A dry run counts the bytes that the optimizer allocates and saves.
TEST(Optimizer, BytesOfItsStateAreThoseItHoldsAndSaves) {
  ModelConfig c;
  c.num_layers = 2;
  c.d_model = 24;
  c.num_heads = 2;
  c.bias = true;
  c.vocab_size = 11;
  c.resolve();
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16})
    for (const MomentKind moments : {MomentKind::kF32, MomentKind::kBF16}) {
      OptimizerConfig config;
      config.storage.moments = moments;
      const Transformer model(c, dtype, 1);
      const int64_t before = allocator(Device{}).stats().live_bytes;
      const auto optimizer = std::make_unique<Optimizer>(model.parameters(), config);
      const int64_t held = allocator(Device{}).stats().live_bytes - before;
      int64_t saved = 0;
      for (const auto& [name, tensor] : tensors_of(optimizer->state_sources()))
        saved += tensor.nbytes();
      const OptimizerBytes bytes = optimizer_bytes(config, c, dtype, {});
      EXPECT_EQ(bytes.memory, held);
      EXPECT_EQ(bytes.saved, saved);
      EXPECT_EQ(bytes.host > 0, dtype == DType::kBF16);
    }
  // The f32 masters of bf16 weights are put together on the host, one at a time.
  const int64_t host = optimizer_bytes({}, c, DType::kBF16, Device::cuda()).host;
  int64_t largest = 0;
  const Transformer model(c, DType::kF32, 1);
  for (const NamedParameter& p : model.parameters()) largest = std::max(largest, p.value.numel());
  EXPECT_GE(host, 4 * largest);
  EXPECT_LT(host, 8 * largest + (1 << 16));
  EXPECT_EQ(optimizer_bytes({}, c, DType::kF32, Device::cuda()).host, 0);
}

// With zero gradients only weight decay moves a parameter.
TEST(AdamW, DecaysMatricesButNeitherNormsNorBiases) {
  ModelConfig c;
  c.num_layers = 1;
  c.d_model = 8;
  c.num_heads = 2;
  c.norm = NormType::kLayer;
  c.position = PositionType::kLearned;
  c.bias = c.qk_norm = true;
  c.vocab_size = 5;
  c.resolve();
  const Transformer model(c, DType::kF64, 1);
  for (const NamedParameter& p : model.parameters()) {
    Tensor value = p.value;
    value.fill_(1);
    p.grad().zero_();
  }
  OptimizerConfig config;
  config.weight_decay = 0.5;
  Optimizer(model.parameters(), config).step(0.1, {});
  int decayed = 0, kept = 0;
  for (const NamedParameter& p : model.parameters()) {
    const bool matrix = p.value.shape().rank() == 2;
    EXPECT_DOUBLE_EQ(p.value.to_vector<double>()[0], matrix ? 1 - 0.1 * 0.5 : 1) << p.name;
    (matrix ? decayed : kept) += 1;
  }
  EXPECT_GE(decayed, 8);  // embeddings, head, q, k, v, o, MLP
  EXPECT_GE(kept, 10);
}

// A matrix [300, 7] called "w" in training; its initial value is a copy of `start`.
struct OneMatrix {
  explicit OneMatrix(const Tensor& start, const OptimizerConfig& config = {}, uint64_t seed = 0)
      : set(start.dtype(), start.device(), std::nullopt) {
    set.add({"w", start.shape(), ParameterUse::kMatmul});
    value().copy_(start);
    optimizer = std::make_unique<Optimizer>(set, config, seed);
  }
  Tensor value() const { return set[0].value; }
  // 20 updates with gradients that follow from the step.
  void train(int64_t first) const {
    for (int64_t step = first; step < first + 20; ++step) {
      set[0].grad().copy_(random_tensor({300, 7}, DType::kF32, static_cast<uint64_t>(step)));
      optimizer->step(1e-3, {});
    }
  }
  ParameterSet set;
  std::unique_ptr<Optimizer> optimizer;
};

// Earlier versions could keep whole f32 masters, whose updates were those of f32 weights. They
// wrote the same file as is written today.
TEST(CudaAdamWState, ReadsF32Masters) {
  COHORT_REQUIRE_GPU(device);
  TempDir dir;
  const Tensor start = random_tensor({300, 7}, DType::kF32, 1).to(DType::kBF16);
  const OneMatrix earlier(start.to(DType::kF32).to(device)), uninterrupted(start.to(device)),
      later(start.to(device));
  const Tensor whole = earlier.value(), split = uninterrupted.value(), resumed = later.value();
  earlier.train(2);
  uninterrupted.train(2);
  NamedTensors saved = tensors_of(earlier.optimizer->state_sources());
  saved.emplace_back("w.master", whole);
  const NamedTensors written = tensors_of(uninterrupted.optimizer->state_sources());
  ASSERT_EQ(written.size(), saved.size());
  for (size_t i = 0; i < saved.size(); ++i) {
    EXPECT_EQ(written[i].first, saved[i].first);
    EXPECT_TRUE(bit_equal(written[i].second.to(Device{}), saved[i].second.to(Device{})));
  }
  const std::string path = dir.path("optimizer.safetensors");
  write_safetensors(path, saved);
  later.optimizer->load(safetensors_at(path), earlier.optimizer->updates());
  EXPECT_TRUE(bit_equal(resumed.to(Device{}), split.to(Device{})));
  for (const OneMatrix* model : {&earlier, &uninterrupted, &later}) model->train(22);
  EXPECT_TRUE(bit_equal(resumed.to(Device{}), split.to(Device{})));
  EXPECT_TRUE(
      bit_equal(tensors_of(later.optimizer->state_sources()).back().second, whole.to(Device{})));
}

// A head of 61 tokens in 64 rows: ten updates with weight decay are those without padding up to
// rounding, and the padding of weights and gradients stays zero. The state has the file's shape.
void expect_padding_is_not_trained(DType dtype, MomentKind moments, Device device) {
  OptimizerConfig config;
  config.weight_decay = 0.1;
  config.storage.moments = moments;
  const Variable x(random_tensor({40, 8}, DType::kF32, 1).to(dtype).to(device));
  std::vector<int32_t> targets(40);
  for (size_t t = 0; t < targets.size(); ++t) targets[t] = static_cast<int32_t>(7 * t % 61);
  const Tensor weights = Tensor::full({40}, 1.0 / 40, accumulate_dtype(dtype), device);
  const auto train = [&](int64_t leaf_rows) {
    ParameterSet set(dtype, device, 1);
    const Variable head = set.add({.name = "head",
                                   .shape = {61, 8},
                                   .use = ParameterUse::kMatmul,
                                   .init = 1,
                                   .leaf_rows = leaf_rows});
    const auto optimizer = std::make_unique<Optimizer>(set, config, 3);
    std::vector<double> losses;
    for (int step = 0; step < 10; ++step) {
      head.zero_grad();
      losses.push_back(
          cross_entropy(x, head, Tensor::from(targets).to(device), weights).loss.item());
      EXPECT_TRUE(kernels::test::padding_is(head.grad(), 0, 0)) << step;
      optimizer->step(0.05, {});
    }
    EXPECT_TRUE(kernels::test::padding_is(head.value(), 0, 0));
    for (const auto& [name, tensor] : tensors_of(optimizer->state_sources()))
      EXPECT_EQ(tensor.shape(), Shape({61, 8})) << name;
    return losses;
  };
  const auto plain = train(0), padded = train(64);
  EXPECT_LT(plain.back(), 0.9 * plain.front());
  // Gradients of bf16 are rounded to 8 bits in both, and moments to bf16 at random.
  const bool rounded = dtype == DType::kBF16 || moments == MomentKind::kBF16;
  for (size_t i = 0; i < plain.size(); ++i)
    EXPECT_NEAR(padded[i], plain[i], (rounded ? 1e-2 : 1e-5) * plain[i]) << i;
}

TEST(AdamW, DoesNotTrainThePaddingOfATable) {
  for (const MomentKind moments : {MomentKind::kF32, MomentKind::kBF16})
    expect_padding_is_not_trained(DType::kF32, moments, {});
}
TEST(CudaAdamWState, DoesNotTrainThePaddingOfATable) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : {DType::kF32, DType::kBF16})
    for (const MomentKind moments : {MomentKind::kF32, MomentKind::kBF16})
      expect_padding_is_not_trained(dtype, moments, device);
}

// State saved with either kind of moments can be resumed with either kind; exactly between bf16.
TEST(AdamWState, ServesEitherKindOfMoments) {
  TempDir dir;
  const auto make = [&](MomentKind kind) {
    OptimizerConfig config;
    config.storage.moments = kind;
    return config;
  };
  const Tensor start = random_tensor({300, 7}, DType::kF32, 1);
  for (const MomentKind saved : {MomentKind::kF32, MomentKind::kBF16})
    for (const MomentKind resumed : {MomentKind::kF32, MomentKind::kBF16}) {
      const OneMatrix first(start, make(saved), 5), second(start, make(resumed), 5);
      first.train(2);
      const std::string path = dir.path("optimizer.safetensors");
      write_safetensors(path, tensors_of(first.optimizer->state_sources()));
      EXPECT_EQ(SafetensorsFile(path).read("w.m").dtype(),
                saved == MomentKind::kBF16 ? DType::kBF16 : DType::kF32);
      second.optimizer->load(safetensors_at(path), first.optimizer->updates());
      second.value().copy_(first.value());
      first.train(22);
      second.train(22);
      if (saved == resumed)
        EXPECT_TRUE(bit_equal(second.value(), first.value()));
      else
        EXPECT_LT(relative_error(second.value(), first.value()), 1e-3);
    }
}

TEST(AdamW, ScalesGradientsDownToTheMaximumOnly) {
  ParameterSet parameters(DType::kF64, {}, std::nullopt);
  parameters.add({"a", {2}}).grad().copy_(Tensor::from(std::vector<double>{2, 1}));
  parameters.add({"b", {1}}).grad().copy_(Tensor::from(std::vector<double>{-2}));
  Tensor norm = Tensor::empty({1}, DType::kF64);
  kernels::grad_norm(norm, parameters.gradients());
  EXPECT_DOUBLE_EQ(norm.item(), 3);
  // The first moment after one step is (1 - beta1) times the scaled gradient.
  for (const auto& [max_norm, scale] : {std::pair{0.0, 1.0}, {3.0, 1.0}, {1.5, 0.5}}) {
    OptimizerConfig config;
    config.max_grad_norm = max_norm;
    const auto optimizer = std::make_unique<Optimizer>(parameters, config);
    optimizer->step(0, norm);
    EXPECT_NEAR(tensors_of(optimizer->state_sources())[0].second.to_vector<double>()[0],
                (1 - config.adam_beta1) * 2 * scale, 1e-6);
  }
}

}  // namespace
}  // namespace cohort::test
