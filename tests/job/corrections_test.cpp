// Tokens that lose their surrogate by rejection and by covariance; an entropy bonus that adapts.
#include <mutex>
#include <set>

#include "tests/job/small_runs.h"
#include "trainers/step_advantages.h"

namespace cohort::test {
namespace {

const std::string kCorrections = kSmallCommon + kSmallGrpo;

std::vector<double> metrics_of(const std::string& run, const std::string& name) {
  std::vector<double> out;
  for (const Json& line : json_lines(run + "/metrics.jsonl"))
    if (line.find("eval") == nullptr) out.push_back(metric(line, name));
  return out;
}
bool same_model(const std::string& a, const std::string& b) {
  return checkpoint_bytes(a, "model.safetensors") == checkpoint_bytes(b, "model.safetensors");
}

// A = (1, 1, -1, -1) and log-probs of (-0.1, -3, -0.2, -4): covariances of 1.725, -1.175, -1.625
// and 2.175, of which the first and the last are between 1 and 5. The sequences whose token is
// taken.
std::set<int64_t> taken(Covariance covariance, double fraction, int ranks, int64_t update,
                        std::array<double, 4> logprobs = {-0.1, -3, -0.2, -4}) {
  const double advantages[] = {1, 1, -1, -1};
  TrainConfig config;
  config.batch.prompts_per_step = 4;
  config.batch.num_generations = 1;
  config.grpo.covariance = covariance;
  config.grpo.covariance_fraction = fraction;
  config.grpo.covariance_kl_coef = 0.5;
  std::set<int64_t> out;
  std::mutex mutex;
  run_local_ranks(ranks, [&](Communicator& comm) {
    std::vector<PolicySequence> sequences;
    for (int64_t i = comm.rank(); i < 4; i += ranks)
      sequences.push_back(PolicySequence{{.tokens = {1, 2}, .loss_mask = {0, 1}, .index = i},
                                         {0, logprobs[static_cast<size_t>(i)]},
                                         {0, advantages[i]}});
    limit_covariance(comm, sequences, config, update);
    const std::lock_guard lock(mutex);
    for (const PolicySequence& s : sequences) {
      if (s.surrogate_mask.empty()) continue;
      out.insert(s.index);
      EXPECT_EQ(s.surrogate_mask[1], covariance == Covariance::kKl);
      EXPECT_EQ(s.old_distance_coef[1], covariance == Covariance::kKl ? 0.5 : 0);
    }
  });
  return out;
}

TEST(Covariance, ClipDrawsFromTokensOfHighCovariance) {
  constexpr Covariance kClip = Covariance::kClip;
  EXPECT_EQ(taken(kClip, 0.5, 1, 0), (std::set<int64_t>{0, 3}));
  EXPECT_EQ(taken(kClip, 1, 1, 0), (std::set<int64_t>{0, 3}));
  std::set<int64_t> seen;
  for (int64_t update = 0; update < 40; ++update) {
    const std::set<int64_t> one = taken(kClip, 2e-4, 1, update);
    ASSERT_EQ(one.size(), 1u);
    EXPECT_EQ(taken(kClip, 2e-4, 2, update), one);
    EXPECT_EQ(taken(kClip, 2e-4, 3, update), one);
    seen.insert(one.begin(), one.end());
  }
  EXPECT_EQ(seen, (std::set<int64_t>{0, 3}));
}

TEST(Covariance, KlTakesTheTokensOfHighestCovariance) {
  constexpr Covariance kKl = Covariance::kKl;
  for (const int ranks : {1, 2, 3}) {
    EXPECT_EQ(taken(kKl, 2e-4, ranks, 0), (std::set<int64_t>{3}));
    EXPECT_EQ(taken(kKl, 0.5, ranks, 0), (std::set<int64_t>{0, 3}));
    EXPECT_EQ(taken(kKl, 0.75, ranks, 0), (std::set<int64_t>{0, 1, 3}));
    EXPECT_EQ(taken(kKl, 1, ranks, 0), (std::set<int64_t>{0, 1, 2, 3}));
  }
  // Equal covariances: a draw decides.
  std::set<int64_t> seen;
  for (int64_t update = 0; update < 40; ++update) {
    const std::set<int64_t> one = taken(kKl, 2e-4, 1, update, {-1, -1, -1, -1});
    ASSERT_EQ(one.size(), 1u);
    EXPECT_EQ(taken(kKl, 2e-4, 2, update, {-1, -1, -1, -1}), one);
    seen.insert(one.begin(), one.end());
  }
  EXPECT_EQ(seen.size(), 4u);
}

TEST(Covariance, RunsResumeToTheSameWeights) {
  const TempDir dir;
  for (const std::string name : {"clip", "kl"}) {
    SCOPED_TRACE(name);
    const auto plan = [&](const std::string& run, const std::string& other = "steps=4") {
      return small_plan(dir, run + name, kCorrections,
                        {"dtype=f64", "num_minibatches=2", "covariance=" + name,
                         "covariance_fraction=0.3", other});
    };
    const std::string whole = train_new(plan("whole"));
    const std::string cut = train_interrupted(plan("cut"), 2);
    train_rest(cut);
    EXPECT_TRUE(same_model(whole, cut));
    // Another weight of the penalty; without the mask.
    EXPECT_FALSE(same_model(
        whole, train_new(name == "kl" ? plan("other", "covariance_kl_coef=0.5")
                                      : small_plan(dir, "none", kCorrections,
                                                   {"dtype=f64", "num_minibatches=2"}))));
  }
}

// With restricted sampling the log-probs of policy and sampler differ.
TEST(Rejection, OfSequencesChangesARestrictedRunOnly) {
  const TempDir dir;
  const auto run = [&](const std::string& name, std::vector<std::string> keys) {
    keys.insert(keys.end(), {"dtype=f64", "importance_weights=truncate"});
    return train_new(small_plan(dir, name, kCorrections, keys));
  };
  const std::string restricted = run("plain", {"top_k=3"});
  EXPECT_FALSE(same_model(restricted, run("mean", {"top_k=3", "rejection=seq_mean_k3 > 0.01"})));
  EXPECT_FALSE(same_model(restricted, run("token", {"top_k=3", "rejection=[token_k1 > 0.1]"})));
  EXPECT_TRUE(same_model(restricted, run("never", {"top_k=3", "rejection=seq_sum_k1 > 1000"})));
  EXPECT_THROW_WITH(run("wrong", {"rejection=mean > 1"}), InputError, "rejection: expected a rule");
}

// After each step the coefficient grows by 0.005 if the entropy is at most the target, else it
// falls; the bonus acts only in the first case.
TEST(EntropyTarget, AdaptsTheCoefficient) {
  const TempDir dir;
  const auto plan = [&](const std::string& name, double target) {
    return small_plan(dir, name, kCorrections,
                      {str("entropy_target=", target), "entropy_coef=0.01", "dtype=f64"});
  };
  const std::string low = train_new(plan("low", 100)), high = train_new(plan("high", 0));
  const std::vector<double> grows = metrics_of(low, "entropy_coef");
  ASSERT_EQ(grows.size(), 4u);
  for (size_t i = 0; i < 4; ++i)
    EXPECT_NEAR(grows[i], 0.01 + 0.005 * static_cast<double>(i), 1e-15);
  EXPECT_EQ(metrics_of(high, "entropy_coef"), (std::vector<double>{0.01, 0, 0, 0}));
  const std::string cut = train_interrupted(plan("cut", 100), 2);
  train_rest(cut);
  EXPECT_TRUE(same_model(low, cut));
  EXPECT_FALSE(same_model(low, high));
}

}  // namespace
}  // namespace cohort::test
