// Metrics by name, and their reduction over the ranks.
#include "trainers/metrics.h"

#include <limits>
#include <mutex>

#include "distributed/communicator.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

TEST(Metrics, AreFoundByNameInTheOrderInWhichTheyWereAdded) {
  Metrics metrics{{"loss", 2}, {"reward", kNaN}};
  metrics.add("tokens", 7);
  EXPECT_EQ(metrics.find("loss"), 2);
  EXPECT_EQ(metrics.at("tokens"), 7);
  EXPECT_TRUE(std::isnan(metrics.at("reward")));
  EXPECT_EQ(metrics.find("entropy"), std::nullopt);
  EXPECT_THROW_WITH(metrics.at("entropy"), Error, "there is no entropy");
  std::vector<std::string> names;
  for (const auto& [name, value] : metrics) names.push_back(name);
  EXPECT_EQ(names, (std::vector<std::string>{"loss", "reward", "tokens"}));
  EXPECT_FALSE(metrics.empty());
  EXPECT_TRUE(Metrics().empty());
}

TEST(Moments, LeaveNanOut) {
  Moments moments;
  EXPECT_TRUE(std::isnan(moments.mean()));
  EXPECT_TRUE(std::isnan(moments.deviation()));
  moments.add(kNaN);
  moments.add(3);
  EXPECT_EQ(moments.mean(), 3);
  EXPECT_EQ(moments.deviation(), 0);
  moments.add(5);
  EXPECT_EQ(moments.mean(), 4);
  EXPECT_EQ(moments.deviation(), std::sqrt(2.0));
}

// Ranks with 0, 1 and 2 values: the result is that of all values.
TEST(MetricSums, AreReducedOverTheRanks) {
  const std::vector<std::vector<double>> values = {{}, {kNaN, 4}, {1, 7}};
  std::mutex mutex;
  run_local_ranks(3, [&](Communicator& comm) {
    Moments moments;
    MetricSums sums;
    double max = 0;
    for (const double v : values[static_cast<size_t>(comm.rank())]) {
      moments.add(v);
      if (v > max) max = v;
    }
    sums.add_mean("mean", moments);
    sums.add_deviation("deviation", moments);
    sums.add_mean("fraction", comm.rank(), 2);
    sums.add_max("max", max);
    sums.add_sum("sum", moments.sum);
    sums.add_local("local", comm.rank());
    sums.add_mean("nothing", 0, 0);
    const Metrics metrics = sums.reduce(comm);
    const std::lock_guard lock(mutex);
    EXPECT_EQ(metrics.at("mean"), 4);
    EXPECT_EQ(metrics.at("deviation"), 3);
    EXPECT_EQ(metrics.at("fraction"), 0.5);
    EXPECT_EQ(metrics.at("max"), 7);
    EXPECT_EQ(metrics.at("sum"), 12);
    EXPECT_EQ(metrics.at("local"), comm.rank());
    EXPECT_TRUE(std::isnan(metrics.at("nothing")));
    EXPECT_EQ(metrics.front().first, "mean");
  });
}

}  // namespace
}  // namespace cohort
