// Shuffled orders and text corpora. A permutation is addressed by (seed, epoch), so a position
// alone says where a resumed run goes on.
#include "data/loader.h"

#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "core/check.h"
#include "data/file.h"
#include "data/utf8.h"

namespace cohort {

// The purpose of rng_stream() for the order of examples and text windows.
constexpr uint64_t kShufflePurpose = 2;

ShuffledOrder::ShuffledOrder(int64_t size, uint64_t seed) : size_(size), seed_(seed) {
  COHORT_CHECK(size > 0, "[shuffled_order] expected a positive size, got ", size);
}

void ShuffledOrder::seek(int64_t position) {
  COHORT_CHECK(position >= 0, "[shuffled_order] cannot seek to position ", position);
  position_ = position;
}

int64_t ShuffledOrder::next() {
  if (size_ == std::numeric_limits<int64_t>::max()) return position_++;
  if (position_ / size_ != epoch_) load_epoch(position_ / size_);
  return order_[static_cast<size_t>(position_++ % size_)];
}

void ShuffledOrder::load_epoch(int64_t epoch) {
  order_.resize(static_cast<size_t>(size_));
  std::iota(order_.begin(), order_.end(), int64_t{0});
  Rng rng(seed_, rng_stream(kShufflePurpose, static_cast<uint64_t>(epoch)));
  for (int64_t i = size_ - 1; i > 0; --i)
    std::swap(order_[static_cast<size_t>(i)], order_[static_cast<size_t>(rng.below(i + 1))]);
  epoch_ = epoch;
}

TextCorpus::TextCorpus(const std::string& path, double held_out_fraction) {
  COHORT_CHECK(held_out_fraction >= 0 && held_out_fraction <= 1,
               "[text_corpus] expected a held-out fraction from 0 to 1, got ", held_out_fraction);
  train_ = read_input_file(path);
  if (train_.empty())
    throw InputError(str(path, ": is empty; hint: name a file that holds the training text"));
  const double cut = std::floor(static_cast<double>(train_.size()) * (1 - held_out_fraction));
  const size_t boundary = next_utf8_boundary(train_, static_cast<size_t>(cut));
  held_out_ = train_.substr(boundary);
  train_.resize(boundary);
  if ((held_out_fraction < 1 && train_.empty()) || (held_out_fraction > 0 && held_out_.empty()))
    throw InputError(str(path, ": ", train_.size() + held_out_.size(),
                         " bytes are too few to hold out ", held_out_fraction,
                         " of them; hint: use a longer text"));
}

int64_t random_window(int64_t size, int64_t window, uint64_t seed, int64_t i) {
  COHORT_CHECK(window > 0, "[random_window] expected a positive window, got ", window);
  if (size < window)
    throw InputError(str("the text has ", size, " tokens, fewer than a window of ", window,
                         "; hint: use a longer text or a shorter window"));
  // The second word keeps these streams apart from those of epochs.
  Rng rng(seed, rng_stream(kShufflePurpose, static_cast<uint64_t>(i), 1));
  return rng.below(size - window + 1);
}

}  // namespace cohort
