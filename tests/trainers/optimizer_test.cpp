// Learning rate schedules, weight decay, clipping, and the curve of the final report.
#include "trainers/optimizer.h"

#include <cmath>

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
  AdamW(model.parameters(), config).step(0.1, {});
  int decayed = 0, kept = 0;
  for (const NamedParameter& p : model.parameters()) {
    const bool matrix = p.value.shape().rank() == 2;
    EXPECT_DOUBLE_EQ(p.value.to_vector<double>()[0], matrix ? 1 - 0.1 * 0.5 : 1) << p.name;
    (matrix ? decayed : kept) += 1;
  }
  EXPECT_GE(decayed, 8);  // embeddings, head, q, k, v, o, MLP
  EXPECT_GE(kept, 10);
}

// Earlier versions could keep whole f32 masters, whose updates were those of f32 weights. They
// wrote the same file as is written today.
TEST(CudaAdamWState, ReadsF32Masters) {
  COHORT_REQUIRE_GPU(device);
  TempDir dir;
  const Tensor start = random_tensor({300, 7}, DType::kF32, 1).to(DType::kBF16);
  const auto leaf = [&](DType dtype) {
    return Variable::parameter(start.to(dtype).to(device), "w");
  };
  const auto optimizer = [](const Variable& w) {
    return AdamW({{"w", w.value(), w}}, OptimizerConfig{});
  };
  const auto train = [&](AdamW& adamw, const Variable& w, int64_t first) {
    for (int64_t step = first; step < first + 20; ++step) {
      w.grad().copy_(random_tensor({300, 7}, DType::kF32, static_cast<uint64_t>(step)));
      adamw.step(1e-3, {});
    }
  };
  const Variable whole = leaf(DType::kF32), split = leaf(DType::kBF16),
                 resumed = leaf(DType::kBF16);
  AdamW earlier = optimizer(whole), uninterrupted = optimizer(split), later = optimizer(resumed);
  train(earlier, whole, 2);
  train(uninterrupted, split, 2);
  NamedTensors saved = earlier.state();
  saved.emplace_back("w.master", whole.value());
  const NamedTensors written = uninterrupted.state();
  ASSERT_EQ(written.size(), saved.size());
  for (size_t i = 0; i < saved.size(); ++i) {
    EXPECT_EQ(written[i].first, saved[i].first);
    EXPECT_TRUE(bit_equal(written[i].second.to(Device{}), saved[i].second.to(Device{})));
  }
  const std::string path = dir.path("optimizer.safetensors");
  write_safetensors(path, saved);
  later.load(SafetensorsFile(path), earlier.updates());
  EXPECT_TRUE(bit_equal(resumed.value().to(Device{}), split.value().to(Device{})));
  train(earlier, whole, 22);
  train(uninterrupted, split, 22);
  train(later, resumed, 22);
  EXPECT_TRUE(bit_equal(resumed.value().to(Device{}), split.value().to(Device{})));
  EXPECT_TRUE(bit_equal(later.state().back().second, whole.value().to(Device{})));
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
  const auto leaf = [&] { return Variable::parameter(start.clone(), "w"); };
  const auto train = [&](AdamW& optimizer, const Variable& w, int64_t first) {
    for (int64_t step = first; step < first + 20; ++step) {
      w.grad().copy_(random_tensor({300, 7}, DType::kF32, static_cast<uint64_t>(step)));
      optimizer.step(1e-3, {});
    }
  };
  for (const MomentKind saved : {MomentKind::kF32, MomentKind::kBF16})
    for (const MomentKind resumed : {MomentKind::kF32, MomentKind::kBF16}) {
      const Variable w = leaf(), other = leaf();
      AdamW first({{"w", w.value(), w}}, make(saved), 5);
      train(first, w, 2);
      const std::string path = dir.path("optimizer.safetensors");
      write_safetensors(path, first.state());
      EXPECT_EQ(SafetensorsFile(path).read("w.m").dtype(),
                saved == MomentKind::kBF16 ? DType::kBF16 : DType::kF32);
      AdamW second({{"w", other.value(), other}}, make(resumed), 5);
      second.load(SafetensorsFile(path), first.updates());
      Tensor(other.value()).copy_(w.value());
      train(first, w, 22);
      train(second, other, 22);
      if (saved == resumed)
        EXPECT_TRUE(bit_equal(other.value(), w.value()));
      else
        EXPECT_LT(relative_error(other.value(), w.value()), 1e-3);
    }
}

TEST(AdamW, ScalesGradientsDownToTheMaximumOnly) {
  const Variable a = Variable::parameter(Tensor::zeros({2}, DType::kF64)),
                 b = Variable::parameter(Tensor::zeros({1}, DType::kF64));
  a.grad().copy_(Tensor::from(std::vector<double>{2, 1}));
  b.grad().copy_(Tensor::from(std::vector<double>{-2}));
  const std::vector<NamedParameter> parameters{{"a", a.value(), a}, {"b", b.value(), b}};
  Tensor norm = Tensor::empty({1}, DType::kF64);
  global_grad_norm(norm, parameters);
  EXPECT_DOUBLE_EQ(norm.item(), 3);
  // The first moment after one step is (1 - beta1) times the scaled gradient.
  for (const auto& [max_norm, scale] : {std::pair{0.0, 1.0}, {3.0, 1.0}, {1.5, 0.5}}) {
    OptimizerConfig config;
    config.max_grad_norm = max_norm;
    AdamW optimizer(parameters, config);
    optimizer.step(0, norm);
    EXPECT_NEAR(optimizer.state()[0].second.to_vector<double>()[0],
                (1 - config.adam_beta1) * 2 * scale, 1e-6);
  }
}

}  // namespace
}  // namespace cohort::test
