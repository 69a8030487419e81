// Shuffled orders are permutations that a position resumes; windows.
#include "data/loader.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <set>

#include "tests/support/test_util.h"

namespace cohort {
namespace {

std::vector<int64_t> take(ShuffledOrder& order, int64_t n) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < n; ++i) out.push_back(order.next());
  return out;
}

TEST(ShuffledOrder, EveryEpochVisitsEveryIndexOnceInAnotherOrder) {
  constexpr int64_t kSize = 101;
  ShuffledOrder order(kSize, 5);
  std::vector<int64_t> ascending(kSize);
  std::iota(ascending.begin(), ascending.end(), 0);
  std::set<std::vector<int64_t>> orders{ascending};
  for (int epoch = 0; epoch < 4; ++epoch) {
    std::vector<int64_t> visited = take(order, kSize);
    orders.insert(visited);
    std::sort(visited.begin(), visited.end());
    EXPECT_EQ(visited, ascending);
  }
  EXPECT_EQ(orders.size(), 5u);
}

TEST(ShuffledOrder, DependsOnTheSeedOnly) {
  ShuffledOrder a(50, 5), b(50, 5), c(50, 6);
  const auto first = take(a, 50);
  EXPECT_EQ(first, take(b, 50));
  EXPECT_NE(first, take(c, 50));
}

TEST(ShuffledOrder, FirstIndexIsUniform) {
  // 4,000 orders of 8: each index comes first 500 times, standard deviation 21; 5 of those.
  std::vector<int> count(8);
  for (uint64_t seed = 0; seed < 4000; ++seed) ++count[ShuffledOrder(8, seed).next()];
  for (const int n : count) EXPECT_NEAR(n, 500, 105);
}

TEST(ShuffledOrder, SeekContinuesWhereTheOrderStood) {
  for (const int64_t position : {0, 1, 9, 10, 11, 29, 35}) {
    ShuffledOrder whole(10, 3);
    take(whole, position);
    EXPECT_EQ(whole.position(), position);
    const auto expected = take(whole, 25);
    ShuffledOrder resumed(10, 3);
    resumed.seek(position);
    EXPECT_EQ(take(resumed, 25), expected);
    // Also from another epoch, back and forth.
    resumed.seek(0);
    take(resumed, 3);
    resumed.seek(position);
    EXPECT_EQ(take(resumed, 25), expected);
  }
}

TEST(ShuffledOrder, EndlessSetsAscend) {
  ShuffledOrder order(INT64_MAX, 3);
  EXPECT_EQ(take(order, 3), (std::vector<int64_t>{0, 1, 2}));
  order.seek(int64_t{1} << 40);
  EXPECT_EQ(order.next(), int64_t{1} << 40);
}

MixedOrder mixed(int64_t size) {
  return MixedOrder({ShuffledOrder(size, 5)}, {size}, {1});
}

// Draws for `epochs` passes of an order of `size` problems, of which problem 3 always has the
// outcomes of `outcome`, called with the number of times it has come. Returns its epochs.
std::vector<int64_t> epochs_of_problem(int64_t size, int64_t patience, int64_t epochs,
                                       const std::function<double(size_t)>& outcome) {
  OnlineOrder order(mixed(size), size, patience);
  std::vector<int64_t> out;
  while (order.position() < size * epochs) {
    const int64_t index = order.next(), epoch = (order.position() - 1) / size;
    if (index == 3 && epoch < epochs) out.push_back(epoch);
    order.record(std::vector<double>{index == 3 ? outcome(out.size()) : 0});
  }
  return out;
}

TEST(OnlineOrder, PassesOverAProblemOfEqualOutcomesForTwiceAsManyEpochsEachTime) {
  const auto always = [](double outcome) { return [=](size_t) { return outcome; }; };
  EXPECT_EQ(epochs_of_problem(7, 2, 20, always(1)), (std::vector<int64_t>{0, 1, 3, 6, 11}));
  EXPECT_EQ(epochs_of_problem(7, 2, 20, always(-1)), (std::vector<int64_t>{0, 1, 3, 6, 11}));
  EXPECT_EQ(epochs_of_problem(7, 1, 12, always(1)), (std::vector<int64_t>{0, 2, 5, 10}));
  EXPECT_EQ(epochs_of_problem(7, 2, 4, always(0)), (std::vector<int64_t>{0, 1, 2, 3}));
  // At most 64 epochs: 0, then 2, 5, 10, 19, 36, 69, and from there every 65th.
  EXPECT_EQ(epochs_of_problem(7, 1, 300, always(1)),
            (std::vector<int64_t>{0, 2, 5, 10, 19, 36, 69, 134, 199, 264}));
  // Solved and failed in turn is neither; another outcome begins anew.
  EXPECT_EQ(epochs_of_problem(7, 2, 5, [](size_t n) { return n % 2 == 0 ? 1.0 : -1.0; }),
            (std::vector<int64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(epochs_of_problem(7, 2, 9, [](size_t n) { return n == 3 ? 0.0 : 1.0; }),
            (std::vector<int64_t>{0, 1, 3, 4, 5, 7}));
}

TEST(OnlineOrder, TakesTheNextProblemWhereAllAreToBePassedOver) {
  OnlineOrder order(mixed(5), 5, 1);
  for (int i = 0; i < 5; ++i) order.next();
  order.record(std::vector<double>(5, 1));
  EXPECT_EQ(order.take_skipped(), 0);
  order.next();
  EXPECT_EQ(order.position(), 11);
  EXPECT_EQ(order.take_skipped(), 5);
  EXPECT_EQ(order.take_skipped(), 0);
}

TEST(OnlineOrder, WithoutPatienceIsTheOrderItself) {
  MixedOrder plain = mixed(9);
  OnlineOrder order(mixed(9), 9, 0);
  for (int i = 0; i < 30; ++i) {
    EXPECT_EQ(order.next(), plain.next());
    order.record(std::vector<double>{1, 1});
  }
  EXPECT_TRUE(order.state().is_null());
}

TEST(OnlineOrder, ContinuesFromItsStateAndPosition) {
  const auto outcome = [](int64_t index) { return index < 4 ? 1.0 : index < 6 ? -1.0 : 0.0; };
  const auto draw = [&](OnlineOrder& order, int n) {
    std::vector<int64_t> out;
    for (int i = 0; i < n; ++i) {
      out.push_back(order.next());
      order.record(std::vector<double>{outcome(out.back())});
    }
    return out;
  };
  OnlineOrder whole(mixed(9), 9, 2);
  draw(whole, 40);
  MixedOrder base = mixed(9);
  base.seek(whole.position());
  OnlineOrder resumed(base, 9, 2, parse_json(whole.state().dump(), "state"));
  MixedOrder other_base = base;
  OnlineOrder forgetful(other_base, 9, 2, whole.state().set("problems", 8));
  const auto expected = draw(whole, 40);
  EXPECT_EQ(draw(resumed, 40), expected);
  EXPECT_NE(draw(forgetful, 40), expected);
}

TEST(OnlineOrder, RefusesAStateThatIsNotValid) {
  const auto refuse = [](const std::string& state, const std::string& message) {
    const Json json = parse_json(state, "state");
    EXPECT_THROW_WITH(with_location(json, "state.json", [&] { OnlineOrder(mixed(2), 2, 1, json); }),
                      InputError, message);
  };
  const auto histories = [](const char* text) {
    return str("{\"problems\": 2, \"histories\": \"", text, "\"}");
  };
  refuse("3", "state.json: ");
  refuse("{\"problems\": 2}", "histories");
  refuse("{\"problems\": 2, \"histories\": [1]}", "state.json: histories: expected text");
  refuse(histories("0 0 1"), "state.json: histories: expected two numbers for each of 2 problems");
  refuse(histories("0 0 1"), "those of problem 1 are");
  for (const char* text : {"0 0 x 1", "0 0 1 65", "0 0 1 -1", "0 0 9999999999 1",
                           "0 0 -9223372036854775808 1", "99999999999999999999 0 0 0"})
    refuse(histories(text), "are missing or out of range");
}

TEST(ShuffledOrder, RefusesBrokenArguments) {
  EXPECT_THROW_WITH(ShuffledOrder(0, 1), Error, "positive size");
  ShuffledOrder order(3, 1);
  EXPECT_THROW_WITH(order.seek(-1), Error, "-1");
}

TEST(ShuffledOrder, ACurriculumSortsEachSpanOfTheRunOnce) {
  const std::vector<float> difficulty = {5, 3, 9, 1, 7, 0, 2, 8, 4, 6};
  const auto order = [&](std::vector<int64_t> ends) {
    return ShuffledOrder(10, 4, {.difficulty = difficulty, .span_ends = std::move(ends)});
  };
  const auto hardness = [&](ShuffledOrder from, int count) {
    std::vector<float> out;
    for (int i = 0; i < count; ++i) out.push_back(difficulty[static_cast<size_t>(from.next())]);
    return out;
  };
  ShuffledOrder plain(10, 4);
  std::vector<float> shuffled = hardness(plain, 50);
  // Two and a half epochs: the examples that a plain order visits, sorted from easy to hard.
  const auto once = hardness(order({25}), 25);
  std::vector<float> expected(shuffled.begin(), shuffled.begin() + 25);
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(once, expected);
  // A run of 4 examples visits the first 4 of the plain order, the easiest first.
  expected.assign(shuffled.begin(), shuffled.begin() + 4);
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(hardness(order({4}), 4), expected);
  // A longer run continues with a second span, sorted separately.
  const auto longer = hardness(order({25, 45}), 50);
  EXPECT_EQ(std::vector<float>(longer.begin(), longer.begin() + 25), once);
  expected.assign(shuffled.begin() + 25, shuffled.begin() + 45);
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(std::vector<float>(longer.begin() + 25, longer.begin() + 45), expected);
  // The order can be resumed at any position.
  for (const int64_t position : {0, 7, 24, 25, 30, 44, 46}) {
    ShuffledOrder resumed = order({25, 45});
    resumed.next();
    resumed.seek(position);
    EXPECT_EQ(hardness(resumed, 50 - static_cast<int>(position)),
              std::vector<float>(longer.begin() + position, longer.end()));
  }
}

TEST(MixedOrder, FollowsTheWeightsOfTheSourcesAndResumes) {
  const std::vector<int64_t> sizes = {5, 100, 7};
  const std::vector<double> weights = {3, 1, 0.5};
  const auto make = [&] {
    std::vector<ShuffledOrder> orders;
    for (size_t s = 0; s < sizes.size(); ++s)
      orders.emplace_back(sizes[s], 9, ShuffledOrder::Options{.source = s});
    return MixedOrder(std::move(orders), sizes, weights);
  };
  MixedOrder order = make();
  std::vector<int64_t> all;
  double taken[3] = {};
  for (int i = 1; i <= 900; ++i) {
    all.push_back(order.next());
    ++taken[all.back() < 5 ? 0 : all.back() < 105 ? 1 : 2];
    for (size_t s = 0; s < 3; ++s) ASSERT_NEAR(taken[s], i * weights[s] / 4.5, 1.01) << i;
  }
  // Each source is visited in whole epochs.
  std::multiset<int64_t> first;
  for (const int64_t i : all) first.insert(i);
  EXPECT_EQ(first.count(0), 120u);
  EXPECT_EQ(first.count(5), 2u);
  for (const int64_t position : {0, 1, 444, 899}) {
    MixedOrder resumed = make();
    resumed.seek(position);
    EXPECT_EQ(resumed.position(), position);
    for (auto i = static_cast<size_t>(position); i < all.size(); ++i)
      ASSERT_EQ(resumed.next(), all[i]);
  }
}

TEST(WeightedChoice, IsAddressedAndFollowsTheWeights) {
  const std::vector<double> weights = {1, 0.5, 2.5};
  double count[3] = {};
  for (int64_t i = 0; i < 20000; ++i) {
    const size_t chosen = weighted_choice(weights, 3, i);
    ASSERT_EQ(chosen, weighted_choice(weights, 3, i));
    ++count[chosen];
  }
  for (size_t s = 0; s < 3; ++s)
    EXPECT_NEAR(count[s] / 20000, weights[s] / 4, 0.017);  // 5 standard deviations of 0.0034
}

TEST(RandomWindow, StaysInsideAndReachesBothEnds) {
  std::set<int64_t> starts;
  for (int64_t i = 0; i < 200; ++i) {
    const int64_t start = random_window(20, 16, 9, i);
    EXPECT_EQ(start, random_window(20, 16, 9, i));
    starts.insert(start);
  }
  EXPECT_EQ(starts, (std::set<int64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(random_window(16, 16, 9, 3), 0);
  EXPECT_THROW_WITH(random_window(15, 16, 9, 0), InputError,
                    "15 tokens, fewer than a window of 16");
}

}  // namespace
}  // namespace cohort
