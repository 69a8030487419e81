// The edges of the automaton are in one hash table: a vocabulary has a million of them.
#include "text/tokenizers/matcher.h"

#include <algorithm>
#include <bit>

#include "core/check.h"

namespace cohort {
namespace {

// An edge is packed as 32 bits of state, 8 of byte, and 24 of child: at most 2^24 states.
constexpr int kChildBits = 24;
constexpr uint64_t kChildMask = (uint64_t{1} << kChildBits) - 1;

uint64_t edge_key(uint32_t state, uint8_t byte) {
  return uint64_t{state} << 8 | byte;
}

size_t hash_key(uint64_t key) {
  return static_cast<size_t>((key * 0x9e3779b97f4a7c15u) >> 20);
}

}  // namespace

Matcher::Matcher(const std::vector<std::string_view>& texts) : roots_(256, kRoot) {
  size_t bytes = 0;
  for (const std::string_view text : texts) bytes += text.size();
  if (bytes > kChildMask)
    throw InputError(str("the texts to look for have ", bytes, " bytes, more than ", kChildMask));
  edges_.assign(std::bit_ceil(2 * bytes + 16), 0);
  fail_ = {kRoot}, shorter_ = {kRoot}, text_ = {kNone};
  std::vector<std::pair<uint32_t, uint8_t>> parents{{kRoot, 0}};  // by state, with the edge's byte
  for (size_t i = 0; i < texts.size(); ++i) {
    uint32_t state = kRoot;
    for (const char c : texts[i]) {
      const auto byte = static_cast<uint8_t>(c);
      uint32_t to = child(state, byte);
      if (to == kRoot) {
        to = static_cast<uint32_t>(text_.size());
        add(state, byte, to);
        fail_.push_back(kRoot), shorter_.push_back(kRoot), text_.push_back(kNone);
        parents.emplace_back(state, byte);
      }
      state = to;
    }
    if (state != kRoot) text_[state] = static_cast<int32_t>(i);
  }
  // In order of depth, as the suffixes of a state are shorter than it.
  std::vector<uint32_t> depth(text_.size(), 0), order(text_.size());
  for (size_t s = 1; s < text_.size(); ++s) depth[s] = depth[parents[s].first] + 1;
  for (size_t s = 0; s < order.size(); ++s) order[s] = static_cast<uint32_t>(s);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return depth[a] < depth[b]; });
  for (const uint32_t state : order) {
    if (depth[state] < 2) continue;
    const auto [parent, byte] = parents[state];
    fail_[state] = next(fail_[parent], byte);
    shorter_[state] = first(fail_[state]);
  }
}

uint32_t Matcher::child(uint32_t state, uint8_t byte) const {
  if (state == kRoot) return roots_[byte];
  const uint64_t key = edge_key(state, byte);
  const size_t mask = edges_.size() - 1;
  for (size_t slot = hash_key(key) & mask; edges_[slot] != 0; slot = (slot + 1) & mask)
    if (edges_[slot] >> kChildBits == key) return static_cast<uint32_t>(edges_[slot] & kChildMask);
  return kRoot;
}

void Matcher::add(uint32_t state, uint8_t byte, uint32_t child) {
  if (state == kRoot) {
    roots_[byte] = child;
    return;
  }
  const uint64_t key = edge_key(state, byte);
  const size_t mask = edges_.size() - 1;
  size_t slot = hash_key(key) & mask;
  while (edges_[slot] != 0) slot = (slot + 1) & mask;
  edges_[slot] = key << kChildBits | child;
}

uint32_t Matcher::next(uint32_t state, uint8_t byte) const {
  while (state != kRoot) {
    if (const uint32_t to = child(state, byte); to != kRoot) return to;
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

std::vector<Match> LeftmostLongest::find_all(std::string_view text) const {
  // Scanning backwards, the longest match that ends at a byte is the longest that starts there.
  std::vector<Match> found;
  if (reversed_.empty()) return found;
  uint32_t state = Matcher::kRoot;
  for (size_t at = text.size(); at-- > 0;) {
    const auto byte = static_cast<uint8_t>(text[at]);
    if (state == Matcher::kRoot && !reversed_.starts(byte)) continue;
    state = reversed_.next(state, byte);
    const int32_t index = reversed_.text(reversed_.first(state));
    if (index != Matcher::kNone)
      found.push_back({at, at + sizes_[static_cast<size_t>(index)], index});
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
