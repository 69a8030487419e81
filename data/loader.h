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

// The files of a text: one, all in a folder and its sub-folders but hidden ones, or those that a
// pattern matches ("books/*.txt"); by name. Throws InputError if there is none.
std::vector<std::string> text_files(const std::string& path);

// Documents for next-token training: a file is one, but of a .jsonl file the field `text` of each
// line. The last `held_out_fraction` of all text is held out, from a character on.
class TextCorpus {
 public:
  // `files`: not empty. Throws InputError: unreadable, without text, or too short to split.
  TextCorpus(const std::vector<std::string>& files, double held_out_fraction);
  const std::vector<std::string>& train() const { return train_; }
  const std::vector<std::string>& held_out() const { return held_out_; }
  // Whether something is to stand between them: a single file of plain text goes on at its cuts.
  bool has_ends() const { return has_ends_; }

 private:
  std::vector<std::string> train_, held_out_;
  bool has_ends_;
};

// Start of the i-th random window of `window` tokens in a stream of `size` tokens: addressed by
// (seed, i). Throws InputError if the stream is shorter than the window.
int64_t random_window(int64_t size, int64_t window, uint64_t seed, int64_t i);

}  // namespace cohort
