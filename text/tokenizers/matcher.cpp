#include "text/tokenizers/matcher.h"

#include <algorithm>
#include <numeric>

#include "core/check.h"

namespace cohort {
Matcher::Matcher(const std::vector<std::string_view>& texts) : roots_(256, kRoot) {
  constexpr size_t kMaxBytes = (1 << 24) - 1;
  size_t bytes = 0;
  for (const std::string_view text : texts) bytes += text.size();
  if (bytes > kMaxBytes)
    throw InputError(str("the texts to look for have ", bytes, " bytes, more than ", kMaxBytes));
  edges_ = PairMap<uint32_t>(bytes);
  fail_ = {kRoot}, shorter_ = {kRoot}, text_ = {kNone};
  std::vector<uint32_t> states(texts.size(), kRoot);
  std::vector<size_t> longer(texts.size());  // texts that are not yet entered to their ends
  std::iota(longer.begin(), longer.end(), size_t{0});
  // In order of depth, as the suffixes of a state are shorter than it.
  for (size_t depth = 0; !longer.empty(); ++depth) {
    std::erase_if(longer, [&](size_t i) { return texts[i].size() == depth; });
    for (const size_t i : longer) {
      const auto byte = static_cast<uint8_t>(texts[i][depth]);
      uint32_t to = edges_.find(states[i], byte);
      if (to == kRoot) {
        to = static_cast<uint32_t>(text_.size());
        fail_.push_back(depth == 0 ? kRoot : next(fail_[states[i]], byte));
        shorter_.push_back(first(fail_.back()));
        text_.push_back(kNone);
        if (states[i] == kRoot) roots_[byte] = to;
        edges_.set(states[i], byte, to);
      }
      states[i] = to;
      if (depth + 1 == texts[i].size()) text_[to] = static_cast<int32_t>(i);
    }
  }
}

uint32_t Matcher::next(uint32_t state, uint8_t byte) const {
  while (state != kRoot) {
    if (const uint32_t to = edges_.find(state, byte); to != kRoot) return to;
    state = fail_[state];
  }
  return roots_[byte];
}

LeftmostLongest::LeftmostLongest(const std::vector<std::string>& texts) {
  std::vector<std::string> reversed;
  for (const std::string& text : texts) {
    reversed.emplace_back(text.rbegin(), text.rend());
    sizes_.push_back(text.size());
  }
  reversed_ = Matcher(std::vector<std::string_view>(reversed.begin(), reversed.end()));
}

std::vector<Match> LeftmostLongest::find_all(std::string_view text,
                                             const Filter& is_allowed) const {
  // Scanning backwards, the longest match that ends at a byte is the longest that starts there.
  std::vector<Match> found;
  if (reversed_.empty()) return found;
  uint32_t state = Matcher::kRoot;
  for (size_t at = text.size(); at-- > 0;) {
    const auto byte = static_cast<uint8_t>(text[at]);
    if (state == Matcher::kRoot && !reversed_.starts(byte)) continue;
    state = reversed_.next(state, byte);
    for (uint32_t s = reversed_.first(state); reversed_.text(s) != Matcher::kNone;
         s = reversed_.shorter(s)) {
      const int32_t index = reversed_.text(s);
      const Match match{at, at + sizes_[static_cast<size_t>(index)], index};
      if (is_allowed && !is_allowed(match)) continue;
      found.push_back(match);
      break;
    }
  }
  std::reverse(found.begin(), found.end());
  size_t from = 0;
  std::erase_if(found, [&](const Match& match) {
    if (match.begin < from) return true;
    from = match.end;
    return false;
  });
  return found;
}

}  // namespace cohort
