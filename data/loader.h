// Order of examples: shuffled, endless and resumable over [0, size). The only state is a position,
// and of an online curriculum the outcomes so far.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/rng.h"
#include "text/json.h"

namespace cohort {

// Epoch e visits every index once in the order of a permutation addressed by (seed, e). An endless
// set (size INT64_MAX) is visited in ascending order.
class ShuffledOrder {
 public:
  // Curriculum: each span of the shuffled order between consecutive `span_ends` (ascending), and
  // after the last one each epoch, is sorted from easy to hard. `difficulty`: per example; empty:
  // no curriculum. `source`: separates the RNG streams of several orders.
  struct Options {
    std::vector<float> difficulty;
    std::vector<int64_t> span_ends;
    uint64_t source;  // default: 0
  };
  ShuffledOrder(int64_t size, uint64_t seed, Options options = {});
  int64_t next();
  int64_t position() const { return position_; }  // indices returned so far
  void seek(int64_t position);

 private:
  // Positions [begin, end) that are sorted together with `position`; its epoch without a
  // curriculum.
  std::pair<int64_t, int64_t> span_at(int64_t position) const;
  std::vector<int64_t> shuffled_epoch(int64_t epoch) const;
  int64_t size_, position_ = 0;
  uint64_t seed_;
  Options options_;
  int64_t begin_ = 0;
  std::vector<int64_t> order_;  // indices at positions begin_, begin_ + 1, ...
};

// Mixed order over a set that concatenates several sources: each source appears in proportion to
// its weight, to within one example at any time, in its own shuffled order.
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
  std::vector<int64_t> source_begins_;
  std::vector<double> fractions_;
  std::vector<int64_t> counts_;  // examples returned so far, per source
  int64_t position_ = 0;
};

// A mixed order that passes over problems without a signal (data.curriculum: online). After
// `patience` equal outcomes in a row, all solved or all failed, a problem is passed over the next
// time that its turn comes, in the next epoch; each further one doubles these epochs, up to 64.
class OnlineOrder {
 public:
  // `problems`: the size of `order`. patience 0: passes over none. `state`: that of an order at
  // this position; null, or of another number of problems: no outcomes yet. Throws JsonError if it
  // is not valid.
  OnlineOrder(MixedOrder order, int64_t problems, int64_t patience, const Json& state = {});
  // The next index that is not passed over; after `problems` passes in a row the next one anyway.
  int64_t next();
  int64_t position() const { return order_.position(); }
  // Takes the outcomes of all indices that next() has returned since the last call, in their order:
  // 1 (solved), -1 (failed), 0 (neither).
  void record(std::span<const double> outcomes);
  // The number of indices passed over since the last call.
  int64_t take_skipped() { return std::exchange(skipped_, 0); }
  Json state() const;  // null with patience 0

 private:
  struct History {
    int64_t streak = 0;  // equal outcomes in a row: above 0 solved, below 0 failed
    int64_t skips = 0;   // draws that are still to be passed over
  };
  MixedOrder order_;
  int64_t problems_, patience_;
  std::vector<History> histories_;  // per problem; empty with patience 0
  std::vector<size_t> drawn_;       // since the last record()
  int64_t skipped_ = 0;
};

// Index of a weight, drawn in proportion to the weights; the draw is addressed by (seed, i).
size_t weighted_choice(std::span<const double> weights, uint64_t seed, int64_t i);

// Start of the i-th random window of `window` tokens in a stream of `size` tokens: addressed by
// (seed, i). Throws InputError if the stream is shorter than the window.
int64_t random_window(int64_t size, int64_t window, uint64_t seed, int64_t i);

}  // namespace cohort
