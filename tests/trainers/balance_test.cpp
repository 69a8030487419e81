// The assignment of work to ranks, and the sequences that change ranks, which arrive whole.
#include "trainers/balance.h"

#include "core/rng.h"
#include "tests/rl/tiny_policy.h"

namespace cohort::test {
namespace {

double largest_load(std::span<const double> costs, std::span<const int> ranks, int num_ranks) {
  return load_of(costs, ranks, num_ranks).largest;
}

TEST(Balance, TheCostliestGoesToTheRankWithTheLeast) {
  const std::vector<double> costs{1, 7, 3, 6, 2, 0};
  EXPECT_EQ(assign_ranks(costs, {0, 0, 0, 0, 0, 0}, 2), (std::vector<int>{0, 0, 1, 1, 0, 1}));
  const RankLoad load = load_of(costs, std::vector<int>{0, 0, 1, 1, 0, 1}, 2);
  EXPECT_EQ(load.mean, 9.5);
  EXPECT_EQ(load.largest, 10);
}

// Ranks keep what they have if that is nearly as good.
TEST(Balance, NothingMovesForLessThanTwoPercent) {
  const std::vector<double> costs{50, 1, 50};
  for (const std::vector<int>& present : {std::vector{0, 0, 1}, {1, 0, 0}, {1, 1, 0}})
    EXPECT_EQ(assign_ranks(costs, present, 2), present);
  EXPECT_EQ(assign_ranks({}, {}, 3), std::vector<int>());
}

TEST(Balance, IsNeverWorseThanByCountAndDoesNotDependOnTheOrder) {
  Rng rng(1, 2);
  for (const int num_ranks : {1, 2, 3, 8})
    for (const int64_t count : {1, 5, 64}) {
      std::vector<double> costs;
      std::vector<int> present;
      for (int64_t i = 0; i < count; ++i) {
        costs.push_back(std::exp(rng.normal()));
        present.push_back(static_cast<int>(i * num_ranks / count));
      }
      const std::vector<int> assigned = assign_ranks(costs, present, num_ranks);
      const double largest = largest_load(costs, assigned, num_ranks);
      EXPECT_LE(largest, largest_load(costs, present, num_ranks));
      const std::vector<int> on_one(costs.size());
      const std::vector<double> reversed(costs.rbegin(), costs.rend());
      EXPECT_NEAR(largest_load(reversed, assign_ranks(reversed, on_one, num_ranks), num_ranks),
                  largest_load(costs, assign_ranks(costs, on_one, num_ranks), num_ranks),
                  1e-12 * largest);
    }
}

std::vector<PolicySequence> random_sequences(int64_t groups, int64_t each) {
  Rng rng(3, 4);
  std::vector<PolicySequence> out;
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t k = 0; k < each; ++k) {
      PolicySequence& s = out.emplace_back();
      s.index = g * each + k;
      s.group = g;
      s.prefix = 3;
      const double advantage = rng.normal();
      const int64_t length = 5 + rng.below(g == 0 ? 90 : 10);
      for (int64_t t = 0; t < length; ++t) {
        s.tokens.push_back(static_cast<int32_t>(rng.below(1 << 30)));
        s.loss_mask.push_back(t > 3);
        s.old_logprob.push_back(-rng.uniform());
        s.advantage.push_back(advantage + static_cast<double>(t));
        s.sampling_logprob.push_back(-rng.uniform());
        s.surrogate_mask.push_back(rng.below(2) > 0);
        s.old_distance_coef.push_back(rng.uniform());
      }
    }
  return out;
}

TEST(Balance, SequencesArriveWholeAndGroupsTogether) {
  const std::vector<PolicySequence> all = random_sequences(7, 3);
  const Transformer model(tiny_model(), DType::kF32, 1);
  for (const int num_ranks : {1, 2, 3, 9}) {
    std::vector<int> owners(all.size(), -1);
    std::vector<RankLoad> loads(static_cast<size_t>(num_ranks));
    run_local_ranks(num_ranks, [&](Communicator& comm) {
      std::vector<PolicySequence> mine;  // the last rank has none
      for (const PolicySequence& s : all)
        if (s.group * std::max(1, num_ranks - 1) / 7 == comm.rank()) mine.push_back(s);
      loads[static_cast<size_t>(comm.rank())] = balance(comm, model, mine, std::ssize(all));
      for (const PolicySequence& s : mine) {
        const PolicySequence& sent = all[static_cast<size_t>(s.index)];
        owners[static_cast<size_t>(s.index)] = comm.rank();
        EXPECT_EQ(s.group, sent.group);
        EXPECT_EQ(s.prefix, sent.prefix);
        EXPECT_EQ(s.advantage, sent.advantage);
        EXPECT_EQ(s.tokens, sent.tokens);
        EXPECT_EQ(s.loss_mask, sent.loss_mask);
        EXPECT_EQ(s.old_logprob, sent.old_logprob);
        EXPECT_EQ(s.ref_logprob, sent.ref_logprob);
        EXPECT_EQ(s.sampling_logprob, sent.sampling_logprob);
        EXPECT_EQ(s.surrogate_mask, sent.surrogate_mask);
        EXPECT_EQ(s.old_distance_coef, sent.old_distance_coef);
      }
      EXPECT_TRUE(std::ranges::is_sorted(mine, {}, &PolicySequence::index));
    });
    for (const PolicySequence& s : all) {
      const auto i = static_cast<size_t>(s.index);
      EXPECT_GE(owners[i], 0) << "sequence " << i << " is lost";
      EXPECT_EQ(owners[i], owners[static_cast<size_t>(s.group) * 3]) << "group " << s.group;
    }
    for (const RankLoad& load : loads) {
      EXPECT_EQ(load.largest, loads[0].largest);
      EXPECT_LE(load.mean, load.largest);
    }
    // The first group costs more than the six others.
    if (num_ranks == 2) {
      EXPECT_EQ(std::ranges::count(owners, owners[0]), 3);
    }
  }
}

// The labels of encoders, and types, which other sequences lack.
TEST(Balance, SequencesWithLabelsArriveToo) {
  const Transformer model(tiny_model(), DType::kF32, 1);
  run_local_ranks(2, [&](Communicator& comm) {
    std::vector<TokenSequence> mine;
    for (int64_t i = 0; i < 4 && comm.rank() == 1; ++i) {
      const auto n = static_cast<size_t>(4 + i);
      mine.push_back({.tokens = std::vector<int32_t>(n, static_cast<int32_t>(i)),
                      .index = i,
                      .labels = std::vector<int32_t>(n, -1),
                      .types = std::vector<int32_t>(n, 1)});
    }
    balance(comm, model, mine, 4);
    ASSERT_EQ(mine.size(), 2u);
    for (const TokenSequence& s : mine) {
      const auto n = static_cast<size_t>(4 + s.index);
      EXPECT_EQ(s.tokens, std::vector<int32_t>(n, static_cast<int32_t>(s.index)));
      EXPECT_TRUE(s.loss_mask.empty());
      EXPECT_EQ(s.group, -1);
      EXPECT_EQ(s.labels, std::vector<int32_t>(n, -1));
      EXPECT_EQ(s.types, std::vector<int32_t>(n, 1));
    }
  });
}

}  // namespace
}  // namespace cohort::test
