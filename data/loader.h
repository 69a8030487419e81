// Which example comes next: a shuffled, endless, resumable order over [0, size). The only state is
// a position.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/rng.h"

namespace cohort {

// Epoch e visits every index once in the order of a permutation addressed by (seed, e). An endless
// set (size INT64_MAX) is visited in ascending order.
class ShuffledOrder {
 public:
  ShuffledOrder(int64_t size, uint64_t seed);
  // A curriculum: of the shuffled order, the examples up to each of `span_ends` (ascending), from
  // the one before on, come sorted, the easier before the harder; beyond the last one so does each
  // epoch. `difficulty`: of each example; none: no curriculum. `source`: keeps orders apart.
  struct Options {
    std::vector<float> difficulty;
    std::vector<int64_t> span_ends;
    uint64_t source = 0;
  };
  ShuffledOrder(int64_t size, uint64_t seed, Options options);
  int64_t next();
  int64_t position() const { return position_; }  // indices handed out so far
  void seek(int64_t position);

 private:
  // The positions [begin, end) that are sorted together with `position`; without a curriculum those
  // of its epoch.
  std::pair<int64_t, int64_t> span_at(int64_t position) const;
  std::vector<int64_t> shuffled_epoch(int64_t epoch) const;
  int64_t size_, position_ = 0;
  uint64_t seed_;
  Options options_;
  int64_t begin_ = 0;
  std::vector<int64_t> order_;  // of the positions from begin_ on
};

// Which example comes next of a set that has those of several sources one after the other: of each
// source as often as its weight says, to within one example at any time, in its own shuffled order.
class MixedOrder {
 public:
  MixedOrder(std::vector<ShuffledOrder> orders, std::vector<int64_t> sizes,
             std::vector<double> weights);
  int64_t next();
  int64_t position() const { return position_; }
  void seek(int64_t position);

 private:
  size_t next_source();
  std::vector<ShuffledOrder> orders_;
  std::vector<int64_t> begins_;  // of each source in the set
  std::vector<double> shares_;
  std::vector<int64_t> taken_;
  int64_t position_ = 0;
};

// Which of some weights a draw addressed by (seed, i) falls on.
size_t weighted_choice(std::span<const double> weights, uint64_t seed, int64_t i);

// Start of the i-th random window of `window` tokens in a stream of `size` tokens: addressed by
// (seed, i). Throws InputError if the stream is shorter than the window.
int64_t random_window(int64_t size, int64_t window, uint64_t seed, int64_t i);

}  // namespace cohort
