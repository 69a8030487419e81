// Shuffled orders and windows. A permutation is addressed by (seed, epoch), so the position alone
// determines how a resumed run continues.
#include "data/loader.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <sstream>

#include "core/check.h"

namespace cohort {

// The purpose of rng_stream() for the order of examples and text windows.
constexpr uint64_t kShufflePurpose = 2;

ShuffledOrder::ShuffledOrder(int64_t size, uint64_t seed, Options options)
    : size_(size), seed_(seed), options_(std::move(options)) {
  COHORT_CHECK(size > 0, "[shuffled_order] expected a positive size, got ", size);
}

void ShuffledOrder::seek(int64_t position) {
  COHORT_CHECK(position >= 0, "[shuffled_order] cannot seek to position ", position);
  position_ = position;
}

int64_t ShuffledOrder::next() {
  if (size_ == std::numeric_limits<int64_t>::max()) return position_++;
  const int64_t position = position_++;
  if (position < begin_ || position >= begin_ + static_cast<int64_t>(order_.size())) {
    const auto [begin, end] = span_at(position);
    begin_ = begin;
    order_.clear();
    for (int64_t at = begin; at < end;) {
      const std::vector<int64_t> epoch = shuffled_epoch(at / size_);
      const int64_t next = std::min(end, (at / size_ + 1) * size_);
      order_.insert(order_.end(), epoch.begin() + at % size_,
                    epoch.begin() + at % size_ + (next - at));
      at = next;
    }
    const auto difficulty = [&](int64_t i) { return options_.difficulty[static_cast<size_t>(i)]; };
    if (!options_.difficulty.empty()) std::ranges::stable_sort(order_, {}, difficulty);
  }
  return order_[static_cast<size_t>(position - begin_)];
}

std::pair<int64_t, int64_t> ShuffledOrder::span_at(int64_t position) const {
  int64_t begin = 0;
  if (!options_.difficulty.empty())
    for (const int64_t end : options_.span_ends) {
      if (position < end) return {begin, end};
      begin = end;
    }
  begin += (position - begin) / size_ * size_;
  return {begin, begin + size_};
}

std::vector<int64_t> ShuffledOrder::shuffled_epoch(int64_t epoch) const {
  std::vector<int64_t> order(static_cast<size_t>(size_));
  std::iota(order.begin(), order.end(), int64_t{0});
  // Third words 1 and 2 of this purpose are used by windows and choices.
  const uint64_t source = options_.source == 0 ? 0 : options_.source + 2;
  Rng rng(seed_, rng_stream(kShufflePurpose, static_cast<uint64_t>(epoch), source));
  for (int64_t i = size_ - 1; i > 0; --i)
    std::swap(order[static_cast<size_t>(i)], order[static_cast<size_t>(rng.below(i + 1))]);
  return order;
}

MixedOrder::MixedOrder(std::vector<ShuffledOrder> orders, std::vector<int64_t> sizes,
                       std::vector<double> weights)
    : orders_(std::move(orders)), fractions_(std::move(weights)), counts_(orders_.size()) {
  COHORT_CHECK(
      !orders_.empty() && orders_.size() == sizes.size() && sizes.size() == fractions_.size(),
      "[mixed_order] expected an order, a size and a weight of each source");
  int64_t begin = 0;
  for (const int64_t size : sizes) source_begins_.push_back(std::exchange(begin, begin + size));
  const double sum = std::accumulate(fractions_.begin(), fractions_.end(), 0.0);
  for (double& fraction : fractions_) fraction /= sum;
}

// The source that lags furthest behind its fraction.
size_t MixedOrder::next_source() {
  ++position_;
  size_t best = 0;
  double most = -1;
  for (size_t s = 0; s < fractions_.size(); ++s) {
    const double lag =
        fractions_[s] * static_cast<double>(position_) - static_cast<double>(counts_[s]);
    if (s > 0 && lag <= most) continue;
    most = lag;
    best = s;
  }
  ++counts_[best];
  return best;
}

int64_t MixedOrder::next() {
  const size_t source = next_source();
  return source_begins_[source] + orders_[source].next();
}

void MixedOrder::seek(int64_t position) {
  position_ = 0;
  std::fill(counts_.begin(), counts_.end(), 0);
  if (orders_.size() == 1)
    counts_[0] = position_ = position;
  else
    while (position_ < position) next_source();
  for (size_t s = 0; s < orders_.size(); ++s) orders_[s].seek(counts_[s]);
}

// OnlineOrder doubles the epochs that pass over a problem at most so many times.
constexpr int64_t kMaxDoublings = 6;

OnlineOrder::OnlineOrder(MixedOrder order, int64_t problems, int64_t patience, const Json& state)
    : order_(std::move(order)), problems_(problems), patience_(patience) {
  if (patience == 0) return;
  histories_.resize(static_cast<size_t>(problems));
  if (state.is_null() || state.at("problems").as_int() != problems) return;
  const Json& saved = state.at("histories");
  std::istringstream text(saved.as_string());
  for (History& h : histories_)
    if (!(text >> h.streak >> h.skips) || h.streak != static_cast<int32_t>(h.streak) ||
        h.skips < 0 || h.skips > int64_t{1} << kMaxDoublings)
      throw JsonError(str("expected two numbers for each of ", problems,
                          " problems, its equal outcomes and its skips; those of problem ",
                          &h - histories_.data(), " are missing or out of range"),
                      &saved);
}

int64_t OnlineOrder::next() {
  int64_t index = order_.next();
  if (patience_ == 0) return index;
  for (int64_t passes = 0; passes < problems_; ++passes, ++skipped_, index = order_.next()) {
    int64_t& skips = histories_[static_cast<size_t>(index)].skips;
    if (skips == 0) break;
    --skips;
  }
  drawn_.push_back(static_cast<size_t>(index));
  return index;
}

void OnlineOrder::record(std::span<const double> outcomes) {
  if (patience_ == 0) return;
  COHORT_CHECK(outcomes.size() == drawn_.size(), "[online_order] expected ", drawn_.size(),
               " outcomes, got ", outcomes.size());
  for (size_t i = 0; i < outcomes.size(); ++i) {
    auto& [streak, skips] = histories_[drawn_[i]];
    const auto outcome = static_cast<int64_t>(outcomes[i]);
    streak = streak * outcome > 0 ? streak + outcome : outcome;
    const int64_t further = std::abs(streak) - patience_;
    skips = further < 0 ? 0 : int64_t{1} << std::min(further, kMaxDoublings);
  }
  drawn_.clear();
}

Json OnlineOrder::state() const {
  if (patience_ == 0) return {};
  std::string text;
  for (const auto& [streak, skips] : histories_)
    text += std::to_string(streak) + ' ' + std::to_string(skips) + ' ';
  return Json().set("problems", problems_).set("histories", std::move(text));
}

int64_t random_window(int64_t size, int64_t window, uint64_t seed, int64_t i) {
  COHORT_CHECK(window > 0, "[random_window] expected a positive window, got ", window);
  if (size < window)
    throw InputError(str("the text has ", size, " tokens, fewer than a window of ", window,
                         "; hint: use a longer text or a shorter window"));
  // Third word 1 separates these streams from those of epochs.
  Rng rng(seed, rng_stream(kShufflePurpose, static_cast<uint64_t>(i), 1));
  return rng.below(size - window + 1);
}

size_t weighted_choice(std::span<const double> weights, uint64_t seed, int64_t i) {
  Rng rng(seed, rng_stream(kShufflePurpose, static_cast<uint64_t>(i), 2));
  double at = rng.uniform() * std::accumulate(weights.begin(), weights.end(), 0.0);
  for (size_t chosen = 0; chosen + 1 < weights.size(); ++chosen)
    if ((at -= weights[chosen]) < 0) return chosen;
  return weights.size() - 1;
}

}  // namespace cohort
