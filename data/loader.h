// Which example comes next: a shuffled, endless, resumable order over [0, size). The only state is
// a position.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/rng.h"

namespace cohort {

// Epoch e visits every index once in the order of a permutation addressed by (seed, e). An endless
// set (size INT64_MAX) is visited in ascending order.
class ShuffledOrder {
 public:
  ShuffledOrder(int64_t size, uint64_t seed);
  int64_t next();
  int64_t position() const { return position_; }  // indices handed out so far
  void seek(int64_t position);

 private:
  void load_epoch(int64_t epoch);
  int64_t size_, position_ = 0, epoch_ = -1;
  uint64_t seed_;
  std::vector<int64_t> order_;
};

// One text file for next-token training, split at a character: the last `held_out_fraction` is held
// out.
class TextCorpus {
 public:
  // Throws InputError: unreadable, empty, or too short to split.
  TextCorpus(const std::string& path, double held_out_fraction);
  const std::string& train_text() const { return train_; }
  const std::string& held_out_text() const { return held_out_; }

 private:
  std::string train_, held_out_;
};

// Start of the i-th random window of `window` tokens in a stream of `size` tokens: addressed by
// (seed, i). Throws InputError if the stream is shorter than the window.
int64_t random_window(int64_t size, int64_t window, uint64_t seed, int64_t i);

}  // namespace cohort
