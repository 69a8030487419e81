// The reference that follows the policy (ref_sync_every), and beta that follows the KL (kl_target).
#include "sys/files.h"
#include "tests/job/small_runs.h"
#include "trainers/grpo_step.h"

namespace cohort::test {
namespace {

const std::string kReferenceGrpo = kSmallCommon + kSmallGrpo;
const std::vector<std::string> kFollow{"beta=0.1", "dtype=f64", "ref_sync_every=2",
                                       "ref_sync_alpha=0.25"};

std::vector<std::string> with(std::vector<std::string> keys, const std::string& more) {
  keys.push_back(more);
  return keys;
}

// Runs that save every step, of whole models or of adapters on a model.
class FollowingReference : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (GetParam())
      base_ = train_new(small_plan(dir_, "base", std::string(kSmallModel) + kSmallData + kSmallSft,
                                   {"dtype=f64"}));
  }
  RunPlan plan(const std::string& name, std::vector<std::string> keys) {
    keys.insert(keys.end(), {"checkpoint.every=1", "checkpoint.keep_last=9"});
    if (GetParam())
      keys.insert(keys.end(), {"init_from=" + base_, "lora.rank=3", "reference=start"});
    return small_plan(dir_, name, kReferenceGrpo, keys);
  }
  std::string weights() const {
    return GetParam() ? "adapter_model.safetensors" : "model.safetensors";
  }

  TempDir dir_;
  std::string base_;
};
INSTANTIATE_TEST_SUITE_P(OfWholeModels, FollowingReference, testing::Values(false));
INSTANTIATE_TEST_SUITE_P(OfAdapters, FollowingReference, testing::Values(true));

TEST_P(FollowingReference, IsMixedWithThePolicyEverySecondStep) {
  const std::string run = train_new(plan("run", kFollow));
  const auto file = [&](int64_t step, const std::string& name) {
    return SafetensorsFile(checkpoint_path(run + "/checkpoints", step) + "/" + name);
  };
  for (int64_t step = 2; step <= 4; ++step) {
    const SafetensorsFile before = file(step - 1, "training/reference.safetensors"),
                          now = file(step, "training/reference.safetensors"),
                          policy = file(step, weights());
    ASSERT_EQ(now.names(), policy.names());
    double moved = 0;
    for (const std::string& name : now.names()) {
      const auto old = before.read(name).to_vector<double>(),
                 mixed = now.read(name).to_vector<double>(),
                 towards = policy.read(name).to_vector<double>();
      for (size_t i = 0; i < old.size(); ++i) {
        const double expected = step % 2 == 0 ? 0.25 * towards[i] + 0.75 * old[i] : old[i];
        ASSERT_NEAR(mixed[i], expected, 1e-15) << name << " in step " << step;
        moved = std::max(moved, std::abs(mixed[i] - old[i]));
      }
    }
    EXPECT_EQ(moved > 1e-4, step % 2 == 0) << step;
  }
}

TEST_P(FollowingReference, IsThatOfAnUninterruptedRunAfterAResume) {
  const std::string whole = train_new(plan("whole", kFollow));
  for (const int64_t steps : {1, 2, 3}) {
    const std::string run = train_interrupted(plan(str("cut-", steps), kFollow), steps);
    train_rest(run);
    for (const std::string& name : {weights(), std::string("training/reference.safetensors"),
                                    std::string("training/optimizer.safetensors")})
      EXPECT_TRUE(checkpoint_bytes(run, name) == checkpoint_bytes(whole, name))
          << name << " after step " << steps;
  }
}

// Once the reference is the policy itself, the next step finds no distance.
TEST_P(FollowingReference, IsThePolicyWithAnAlphaOfOne) {
  const std::string run =
      train_new(plan("run", {"beta=0.1", "dtype=f64", "ref_sync_every=1", "ref_sync_alpha=1"}));
  for (const Json& line : json_lines(run + "/metrics.jsonl"))
    if (line.find("eval") == nullptr) {
      EXPECT_EQ(metric(line, "kl"), 0);
    }
  const SafetensorsFile policy(find_checkpoint(run) + "/" + weights()),
      reference(find_checkpoint(run) + "/training/reference.safetensors");
  for (const std::string& name : policy.names())
    EXPECT_TRUE(bit_equal(policy.read(name), reference.read(name))) << name;
}

TEST_P(FollowingReference, IsTheSameOnTwoRanks) {
  std::vector<std::string> runs;
  for (const char* ranks : {"ranks=1", "ranks=2"})
    runs.push_back(train_new(plan(ranks, with(with(kFollow, ranks), "adam_eps=1e-3"))));
  const auto file = [](const std::string& run) {
    return SafetensorsFile(find_checkpoint(run) + "/training/reference.safetensors");
  };
  const SafetensorsFile one = file(runs[0]), two = file(runs[1]);
  for (const std::string& name : one.names())
    EXPECT_LT(relative_error(two.read(name), one.read(name)), 1e-12) << name;
}

TEST(MixWeights, MixesTensorsOfAnySize) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const double tolerance = dtype == DType::kF32 ? 1e-7 : 1e-16;
    std::vector<Tensor> reference, policy;
    for (const Shape& shape : {Shape{3, 2}, Shape{1}, Shape{(1 << 22) + 3}}) {
      reference.push_back(Tensor::full(shape, 0.5, dtype));
      policy.push_back(Tensor::full(shape, -1, dtype));
    }
    mix_weights(reference, policy, 0.6);
    for (const Tensor& t : reference)
      for (const double value : t.to_vector<double>()) ASSERT_NEAR(value, -0.4, tolerance);
    for (const Tensor& t : policy) EXPECT_EQ(t.to_vector<double>().back(), -1);
  }
  const std::vector<Tensor> one{Tensor::zeros({2}, DType::kF32)},
      other{Tensor::zeros({3}, DType::kF32)};
  EXPECT_THROW_WITH(mix_weights(one, other, 0.5), Error, "[mix_weights] tensor 0: ");
  EXPECT_THROW_WITH(mix_weights(one, {}, 0.5), Error, "expected 1 tensors, got 0");
}

TEST(CudaMixWeights, RoundsTheSumOnce) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Tensor old = random_tensor({(1 << 22) + 5}, DType::kF32, 1, 1).to(dtype),
                 now = random_tensor({(1 << 22) + 5}, DType::kF32, 2, 1).to(dtype);
    const std::vector<Tensor> reference{old.to(device).clone()}, policy{now.to(device)};
    mix_weights(reference, policy, 0.6);
    const auto got = reference[0].to(Device{}).to_vector<double>(), a = old.to_vector<double>(),
               b = now.to_vector<double>();
    const double unit = dtype == DType::kBF16 ? 0x1p-7 : 0x1p-23;
    for (size_t i = 0; i < got.size(); ++i) {
      const double exact = 0.4 * a[i] + 0.6 * b[i];
      // Half a unit of the result, and the roundings of the sum in f32.
      const double rounding =
          0.5 * unit * std::abs(exact) + 0x1p-23 * (std::abs(a[i]) + std::abs(b[i]));
      ASSERT_NEAR(got[i], exact, rounding) << i;
    }
  }
}

const std::vector<std::string> kAdapt{"beta=0.1", "dtype=f64", "kl_target=0.001", "kl_horizon=50"};

// The values of a metric in the steps of a run.
std::vector<double> values(const std::string& run, const std::string& name) {
  std::vector<double> out;
  for (const Json& line : json_lines(run + "/metrics.jsonl"))
    if (line.find("eval") == nullptr) out.push_back(metric(line, name));
  return out;
}

TEST(AdaptiveBeta, ChangesByAClippedShareOfTheError) {
  GrpoConfig config{.beta = 0.2, .kl_target = 0.05, .kl_horizon = 1000};
  EXPECT_DOUBLE_EQ(next_beta(config, 0.05, 100), 0.2);
  EXPECT_DOUBLE_EQ(next_beta(config, 0.055, 100), 0.2 * (1 + 0.1 * 0.1));
  EXPECT_DOUBLE_EQ(next_beta(config, 0.045, 100), 0.2 * (1 - 0.1 * 0.1));
  EXPECT_DOUBLE_EQ(next_beta(config, 9, 100), 0.2 * (1 + 0.2 * 0.1));
  EXPECT_DOUBLE_EQ(next_beta(config, 0, 1000), 0.2 * (1 - 0.2));
  EXPECT_EQ(next_beta(config, std::nan(""), 100), 0.2);
  config.beta = 1e-30;
  EXPECT_EQ(next_beta(config, 0, 100), 1e-30) << "never 0, which would mean no reference";
}

TEST(AdaptiveBeta, FollowsTheKlOfEachStep) {
  const TempDir dir;
  for (const char* place : {"kl_in=loss", "kl_in=reward"}) {
    std::vector<std::string> keys =
        with(with(with(kAdapt, place), "scale_rewards=none"), "kl_estimator=k1");
    if (place == std::string("kl_in=loss")) keys.back() = "kl_estimator=k3";
    const std::string run = train_new(small_plan(dir, place, kReferenceGrpo, keys));
    const std::vector<double> beta = values(run, "beta"), kl = values(run, "kl");
    ASSERT_EQ(beta.size(), 4u);
    EXPECT_EQ(beta[0], 0.1);
    GrpoConfig config{.kl_target = 0.001, .kl_horizon = 50};
    for (size_t step = 0; step < 4; ++step) {
      config.beta = beta[step];
      const double next = next_beta(config, kl[step], 24);
      EXPECT_EQ(step < 3 ? beta[step + 1] : load_state(find_checkpoint(run)).beta, next) << step;
    }
    EXPECT_LT(beta[1], beta[0]);  // the policy is the reference
    EXPECT_GT(beta[3], beta[2]);
  }
}

// The update uses it: with a far target beta falls, and the weights are others.
TEST(AdaptiveBeta, IsTheOneOfTheUpdate) {
  const TempDir dir;
  const std::vector<std::string> fixed{"beta=0.5", "dtype=f64"};
  const std::string first = train_new(small_plan(dir, "fixed", kReferenceGrpo, fixed)),
                    other =
                        train_new(small_plan(dir, "adapted", kReferenceGrpo,
                                             with(with(fixed, "kl_target=9"), "kl_horizon=24")));
  EXPECT_FALSE(checkpoint_bytes(first) == checkpoint_bytes(other));
  EXPECT_EQ(json_lines(first + "/metrics.jsonl").at(1).find("beta"), nullptr);
  EXPECT_EQ(parse_json(checkpoint_bytes(first, "training/state.json"), "").find("beta"), nullptr);
}

TEST(AdaptiveBeta, IsThatOfAnUninterruptedRunAfterAResume) {
  const TempDir dir;
  const std::string whole = train_new(small_plan(dir, "whole", kReferenceGrpo, kAdapt));
  for (const int64_t steps : {1, 2, 3}) {
    const std::string run =
        train_interrupted(small_plan(dir, str("cut-", steps), kReferenceGrpo, kAdapt), steps);
    train_rest(run);
    EXPECT_TRUE(checkpoint_bytes(run) == checkpoint_bytes(whole)) << steps;
    EXPECT_EQ(values(run, "beta"), values(whole, "beta")) << steps;
  }
  // Another configured value is a new start, and without kl_target the configured one is used.
  const RunPlan plan = small_plan(dir, "changed", kReferenceGrpo, kAdapt);
  const std::string changed = train_interrupted(plan, 2), fixed = train_interrupted(plan, 2);
  train_rest(changed, {"beta=0.4"});
  EXPECT_EQ(values(changed, "beta")[2], 0.4);
  train_rest(fixed, {"kl_target=null", "kl_horizon=10000"});
  EXPECT_EQ(load_state(find_checkpoint(fixed)).beta, 0);
}

TEST(AdaptiveBeta, IsTheSameOnTwoRanks) {
  const TempDir dir;
  std::vector<std::vector<double>> beta;
  for (const char* ranks : {"ranks=1", "ranks=2"})
    beta.push_back(values(train_new(small_plan(dir, ranks, kReferenceGrpo,
                                               with(with(kAdapt, ranks), "adam_eps=1e-3"))),
                          "beta"));
  ASSERT_EQ(beta[0].size(), beta[1].size());
  for (size_t step = 0; step < beta[0].size(); ++step)
    EXPECT_NEAR(beta[1][step], beta[0][step], 1e-11) << step;
}

TEST(AdaptiveBeta, IsAPositiveNumberInACheckpoint) {
  Json good = TrainState{.beta = 0.25, .start_beta = 0.5, .report = Json(Json::Object{})}.to_json();
  const auto read = [&](const Json& json) {
    return with_location(json, "state.json", [&] { return TrainState::from_json(json); });
  };
  EXPECT_EQ(read(good).beta, 0.25);
  EXPECT_EQ(read(good).start_beta, 0.5);
  Json bad = good;
  EXPECT_THROW_WITH(read(bad.set("start_beta", 0)), InputError,
                    "state.json: start_beta: expected a number above 0, got 0");
  EXPECT_THROW_WITH(read(bad.set("beta", -1.5)), InputError,
                    "state.json: beta: expected a number above 0, got -1.5");
  EXPECT_THROW_WITH(read(bad.set("beta", "x")), InputError, "state.json: beta: expected");
}

}  // namespace
}  // namespace cohort::test
