// Shuffled orders and text corpora. A permutation is addressed by (seed, epoch), so a position
// alone says where a resumed run goes on.
#include "data/loader.h"

#include <glob.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <numeric>
#include <utility>

#include "core/check.h"
#include "data/example.h"
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

std::vector<std::string> text_files(const std::string& path) {
  namespace fs = std::filesystem;
  std::vector<std::string> files;
  std::error_code error, ignored;
  if (fs::is_directory(path, ignored)) {
    fs::recursive_directory_iterator it(path, error);
    for (; !error && it != fs::end(it); it.increment(error)) {
      const bool hidden = it->path().filename().string().starts_with('.');
      if (hidden && it->is_directory(ignored)) it.disable_recursion_pending();
      if (!hidden && it->is_regular_file(ignored)) files.push_back(it->path().string());
    }
    if (error) throw InputError(str(path, ": cannot be read: ", error.message()));
    if (files.empty()) throw InputError(str(path, ": there is no file in this folder"));
  } else if (!fs::exists(path, ignored) && path.find_first_of("*?[") != path.npos) {
    glob_t found{};
    if (::glob(path.c_str(), 0, nullptr, &found) == 0)
      files.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    ::globfree(&found);
    if (files.empty()) throw InputError(str(path, ": no file matches this pattern"));
  } else {
    return {path};
  }
  std::sort(files.begin(), files.end());
  return files;
}

TextCorpus::TextCorpus(const std::vector<std::string>& files, double held_out_fraction)
    : has_ends_(files.size() > 1 || files[0].ends_with(".jsonl")) {
  COHORT_CHECK(!files.empty() && held_out_fraction >= 0 && held_out_fraction <= 1,
               "[text_corpus] expected files and a held-out fraction from 0 to 1, got ",
               held_out_fraction);
  size_t size = 0;
  for (const std::string& file : files) {
    std::vector<std::string> documents =
        file.ends_with(".jsonl") ? jsonl_texts(file) : std::vector{read_input_file(file)};
    for (std::string& document : documents) {
      size += document.size();
      if (!document.empty()) train_.push_back(std::move(document));
    }
  }
  const std::string where = files.size() == 1 ? files[0] : str(files[0], " and others");
  if (train_.empty())
    throw InputError(str(where, ": is empty; hint: name a file that holds the training text"));
  // The last documents go, and the end of the one before them.
  const double cut = std::floor(static_cast<double>(size) * (1 - held_out_fraction));
  size_t rest = size - static_cast<size_t>(cut);
  while (!train_.empty() && rest >= train_.back().size()) {
    rest -= train_.back().size();
    held_out_.push_back(std::move(train_.back()));
    train_.pop_back();
  }
  if (rest > 0) {
    std::string& last = train_.back();
    const size_t boundary = next_utf8_boundary(last, last.size() - rest);
    if (boundary < last.size()) held_out_.push_back(last.substr(boundary));
    last.resize(boundary);
    if (last.empty()) train_.pop_back();
  }
  std::reverse(held_out_.begin(), held_out_.end());
  if ((held_out_fraction < 1 && train_.empty()) || (held_out_fraction > 0 && held_out_.empty()))
    throw InputError(str(where, ": ", size, " bytes are too few to hold out ", held_out_fraction,
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
