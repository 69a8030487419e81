// The numbers of a step by name: accumulated on each rank, then reduced over the ranks.
#pragma once

#include <cmath>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/trace.h"

namespace cohort {

class Communicator;

// Named numbers in the order of display and output; NaN: not measured.
class Metrics {
 public:
  using Entry = std::pair<std::string, double>;
  Metrics() = default;
  Metrics(std::initializer_list<Entry> entries) : entries_(entries) {}
  void add(std::string name, double value) { entries_.emplace_back(std::move(name), value); }
  std::optional<double> find(const std::string& name) const;
  double at(const std::string& name) const;  // throws Error naming it if there is none
  bool empty() const { return entries_.empty(); }
  const Entry& front() const { return entries_.front(); }
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }

 private:
  std::vector<Entry> entries_;
};

// Sums for mean and standard deviation (n - 1), which may be reduced over ranks. NaN values are
// skipped; without values the results are NaN.
struct Moments {
  double sum = 0, count = 0, squares = 0;
  void add(double v) {
    if (std::isnan(v)) return;
    count += 1;
    sum += v;
    squares += v * v;
  }
  double mean() const { return count > 0 ? sum / count : std::nan(""); }
  double deviation() const {
    if (count == 0) return std::nan("");
    // The difference of equal values is rounding, whose root would be 1e-8 of them.
    const double rest = squares - sum * sum / count;
    return rest > 1e-13 * squares ? std::sqrt(rest / (count - 1)) : 0;
  }
};

// Collects the metrics of a rank. Every rank adds the same metrics in the same order, even without
// values.
class MetricSums {
 public:
  void add_sum(const std::string& name, double sum) { add(name, Kind::kSum, {.sum = sum}); }
  void add_mean(const std::string& name, const Moments& moments) {
    add(name, Kind::kMean, moments);
  }
  void add_mean(const std::string& name, double sum, double count) {
    add(name, Kind::kMean, {.sum = sum, .count = count});
  }
  void add_deviation(const std::string& name, const Moments& moments) {
    add(name, Kind::kDeviation, moments);
  }
  // Infinite for a rank without values; NaN if no rank has any.
  void add_max(const std::string& name, double max) { add(name, Kind::kMax, {.sum = max}); }
  void add_min(const std::string& name, double min) { add(name, Kind::kMin, {.sum = -min}); }
  // A value that is equal on all ranks and not reduced.
  void add_local(const std::string& name, double value) { add(name, Kind::kLocal, {.sum = value}); }

  // Reduces over all ranks, in the order of addition; every rank calls it.
  Metrics reduce(Communicator& comm) const;

 private:
  enum class Kind { kSum, kMean, kDeviation, kMax, kMin, kLocal };
  struct Metric {
    std::string name;
    Kind kind;
    Moments moments;  // a sum, maximum, negative minimum or local value is its sum
    double value() const;
  };
  void add(const std::string& name, Kind kind, const Moments& moments) {
    metrics_.push_back({name, kind, moments});
  }
  std::vector<Metric> metrics_;
};

}  // namespace cohort
