// PCRE2 with a budget. PCRE2's own match limit counts backtracking from one starting position only,
// so a call over a long text could still take hours. Automatic callouts, which run before every
// item of the pattern, count all work of one call instead; the count does not depend on the
// machine.
#define PCRE2_CODE_UNIT_WIDTH 8
#include "data/regex.h"

#include <pcre2.h>

#include <cstdlib>
#include <utility>

#include "core/check.h"

namespace cohort {
namespace {

// Work of one call: kItemCost for each item tried and 1 for each byte that an item passed over.
// The whole takes below a second.
constexpr int64_t kMaxWork = 500'000'000;
constexpr int64_t kItemCost = 16;
constexpr uint32_t kMaxMatchSteps = 10'000'000, kMaxHeapKiB = 64 * 1024;

struct Budget {
  int64_t left = kMaxWork;
  size_t position = 0;  // of the last callout
};

int charge(pcre2_callout_block* block, void* context) {
  auto& budget = *static_cast<Budget*>(context);
  const size_t at = block->current_position;
  budget.left -= kItemCost + static_cast<int64_t>(at > budget.position ? at - budget.position
                                                                       : budget.position - at);
  budget.position = at;
  return budget.left > 0 ? 0 : PCRE2_ERROR_MATCHLIMIT;
}

template <class T, void (*free)(T*)>
struct Free {
  void operator()(T* pointer) const { free(pointer); }
};
template <class T, void (*free)(T*)>
using Handle = std::unique_ptr<T, Free<T, free>>;

using MatchData = Handle<pcre2_match_data, pcre2_match_data_free>;
using MatchContext = Handle<pcre2_match_context, pcre2_match_context_free>;

// One search over one text, with one budget for all its matches.
class Search {
 public:
  Search(const void* code, std::string_view text)
      : code_(static_cast<const pcre2_code*>(code)),
        text_(text),
        data_(pcre2_match_data_create_from_pattern(code_, nullptr)),
        context_(pcre2_match_context_create(nullptr)) {
    COHORT_CHECK(data_ && context_, "[regex] out of memory");
    pcre2_set_callout(context_.get(), charge, &budget_);
    pcre2_set_match_limit(context_.get(), kMaxMatchSteps);
    pcre2_set_depth_limit(context_.get(), kMaxMatchSteps);
    pcre2_set_heap_limit(context_.get(), kMaxHeapKiB);
  }

  // Looks for a match at or after `start`.
  bool match(size_t start, uint32_t options) {
    // The first call has checked the whole text.
    const uint32_t checked = checked_ ? PCRE2_NO_UTF_CHECK : 0;
    budget_.position = start;
    const int rc = pcre2_match(code_, reinterpret_cast<PCRE2_SPTR>(text_.data()), text_.size(),
                               start, options | checked, data_.get(), context_.get());
    checked_ = true;
    failed_ = rc < 0 && rc != PCRE2_ERROR_NOMATCH;
    return rc > 0;
  }
  // The last search ended at a limit or at invalid text: what lies behind is unknown.
  bool failed() const { return failed_; }
  size_t begin() const { return pcre2_get_ovector_pointer(data_.get())[0]; }
  size_t end() const { return pcre2_get_ovector_pointer(data_.get())[1]; }

  std::vector<std::string> groups() const {
    const size_t* ends = pcre2_get_ovector_pointer(data_.get());
    std::vector<std::string> groups(pcre2_get_ovector_count(data_.get()));
    for (size_t i = 0; i < groups.size(); ++i, ends += 2)
      if (ends[0] != PCRE2_UNSET && ends[0] <= ends[1])
        groups[i] = text_.substr(ends[0], ends[1] - ends[0]);
    return groups;
  }

 private:
  const pcre2_code* code_;
  std::string_view text_;
  MatchData data_;
  MatchContext context_;
  Budget budget_;
  bool checked_ = false, failed_ = false;
};

}  // namespace

Regex::Regex(const std::string& pattern) {
  constexpr uint32_t kOptions = PCRE2_UTF | PCRE2_NEVER_BACKSLASH_C | PCRE2_AUTO_CALLOUT;
  int error = 0;
  size_t offset = 0;
  code_ =
      std::shared_ptr<pcre2_code>(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()),
                                                pattern.size(), kOptions, &error, &offset, nullptr),
                                  pcre2_code_free);
  if (code_) return;
  char reason[256] = "";
  pcre2_get_error_message(error, reinterpret_cast<PCRE2_UCHAR*>(reason), sizeof reason);
  throw InputError(str("regular expression '", pattern, "': ", reason, ", at byte ", offset));
}

bool Regex::full_match(std::string_view text) const {
  return Search(code_.get(), text).match(0, PCRE2_ANCHORED | PCRE2_ENDANCHORED);
}

std::optional<std::vector<std::string>> Regex::find_last(std::string_view text) const {
  Search search(code_.get(), text);
  std::optional<std::vector<std::string>> last;
  size_t start = 0;
  uint32_t options = 0;
  while (search.match(start, options)) {
    last = search.groups();
    // After an empty match the next one must not be the same again.
    options = search.begin() == search.end() ? PCRE2_NOTEMPTY_ATSTART : 0;
    start = search.end();
  }
  if (search.failed()) return {};
  return last;
}

}  // namespace cohort
