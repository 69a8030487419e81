// PCRE2 with a budget. PCRE2's own match limit counts backtracking from one starting position only,
// so a call over a long text could still take hours. Automatic callouts, which run before every
// item of the pattern, count all work of one call instead; the count does not depend on the
// machine.
#define PCRE2_CODE_UNIT_WIDTH 8
#include "text/regex.h"

#include <pcre2.h>

#include <utility>

#include "core/check.h"
#include "text/utf8.h"

namespace cohort {
namespace {

// Budget of one call: kItemCost for each item tried and 1 for each byte an item advances. All of it
// takes less than a second.
constexpr int64_t kMaxWork = 500'000'000;
constexpr int64_t kItemCost = 16;
constexpr uint32_t kMaxMatchSteps = 10'000'000, kMaxHeapKiB = 64 * 1024;

struct Budget {
  int64_t left;
  size_t last_position = 0;  // at the previous callout
};

int charge(pcre2_callout_block* block, void* context) {
  auto& budget = *static_cast<Budget*>(context);
  const size_t at = block->current_position;
  budget.left -=
      kItemCost + static_cast<int64_t>(at > budget.last_position ? at - budget.last_position
                                                                 : budget.last_position - at);
  budget.last_position = at;
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
  Search(const void* code, std::string_view text, int64_t work = kMaxWork)
      : code_(static_cast<const pcre2_code*>(code)),
        text_(text),
        data_(pcre2_match_data_create_from_pattern(code_, nullptr)),
        context_(pcre2_match_context_create(nullptr)),
        budget_{.left = work} {
    COHORT_CHECK(data_ && context_, "[regex] out of memory");
    pcre2_set_callout(context_.get(), charge, &budget_);
    pcre2_set_match_limit(context_.get(), kMaxMatchSteps);
    pcre2_set_depth_limit(context_.get(), kMaxMatchSteps);
    pcre2_set_heap_limit(context_.get(), kMaxHeapKiB);
  }

  // Looks for a match that begins at the end of the last one, or after it.
  bool next(uint32_t options = 0) {
    // The first call has checked the whole text.
    if (matched_) options |= PCRE2_NO_UTF_CHECK;
    // After an empty match the next one at this position must not be empty.
    if (matched_ && begin() == end()) options |= PCRE2_NOTEMPTY_ATSTART;
    budget_.last_position = matched_ ? end() : 0;
    const int rc = pcre2_match(code_, reinterpret_cast<PCRE2_SPTR>(text_.data()), text_.size(),
                               budget_.last_position, options, data_.get(), context_.get());
    matched_ = rc > 0;
    failed_ = rc < 0 && rc != PCRE2_ERROR_NOMATCH;
    return matched_;
  }
  // True if the last search ended at a limit or at invalid text: later matches are unknown.
  bool failed() const { return failed_; }
  int64_t work_left() const { return budget_.left; }
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
  bool matched_ = false, failed_ = false;
};

// Characters of \s, \S and \w for a bracketed class. PCRE2 10.42 differs: it counts U+180E as a
// space, and no marks as word characters.
constexpr const char* kSpaces =
    R"(\x09-\x0d\x20\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
constexpr const char* kNoSpaces =
    R"(\x00-\x08\x0e-\x1f\x21-\x{84}\x{86}-\x{9f}\x{a1}-\x{167f}\x{1681}-\x{1fff}\x{200b}-\x{2027})"
    R"(\x{202a}-\x{202e}\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{10ffff})";
constexpr const char* kWord = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc})";

// Items that PCRE2 reads otherwise than Oniguruma, for which tokenizers write their patterns:
// classes in a class, intersections, \W in a class; \h, \v, \Q, \p without braces, \x of a byte;
// {2}+, {,2}, and the option m. Items before (*SKIP) are the same.
constexpr const char* kOtherwise =
    R"((?:\\(?:x(?:\{|(?![89a-fA-F]))|[pP]\{[^}]+\}|[^xpPhHvVQ])|\[\^?\]?(?:\\(?![hHvVQW]|[pP])"
    R"((?!\{[^}]+\})|x[89a-fA-F]).|[^][\\&]|&(?!&))*+\])(*SKIP)(*F)|\\.|\[.*|\{,\d|\{[\d,]+\}\+|)"
    R"(\(\?[ix-]*m)";

// Null if the pattern has an error, whose number and offset are set.
Handle<pcre2_code, pcre2_code_free> compile(const std::string& pattern, uint32_t options,
                                            std::pair<int, size_t>& error) {
  return Handle<pcre2_code, pcre2_code_free>(
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), options,
                    &error.first, &error.second, nullptr));
}

// "sc:" before the name of a script, which PCRE2 from 10.40 on would take for its extensions.
const char* script_prefix(const std::string& name) {
  std::pair<int, size_t> error;
  return compile("\\p{sc:" + name + "}", PCRE2_UTF, error) ? "sc:" : "";
}

// The pattern with \s, \S, \w, \W, \b and \B expanded and the names of scripts qualified.
std::string with_unicode_classes(const std::string& pattern) {
  if (const auto other = Regex(kOtherwise).find_last(pattern))
    throw InputError(str("regular expression '", pattern, "': not supported: ", (*other)[0]));
  std::string out;
  bool in_class = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i], next = i + 1 < pattern.size() ? pattern[i + 1] : '\0';
    if (c != '\\') {
      out += c;
      if (c == '[' && !in_class) {
        if (next == '^') out += pattern[++i];
        if (i + 1 < pattern.size() && pattern[i + 1] == ']') out += pattern[++i];  // a member
      }
      in_class = c == '[' || (in_class && c != ']');
      continue;
    }
    ++i;
    const char* const word = next == 's' ? kSpaces : next == 'S' ? kNoSpaces : kWord;
    if (std::string_view("sSwW").find(next) != std::string_view::npos)
      out += in_class ? word : str(next == 'W' ? "[^" : "[", word, "]");
    else if (!in_class && (next == 'b' || next == 'B'))
      out += replaced(next == 'b' ? "(?(?<=[w])(?![w])|(?=[w]))" : "(?(?<=[w])(?=[w])|(?![w]))",
                      "w", word);
    else
      out.append(1, c).append(1, next);
    if (next != 'p' && next != 'P') continue;
    const size_t name = pattern.find_first_not_of("{^", i + 1), end = pattern.find('}', i);
    out += pattern.substr(i + 1, name - i - 1) + script_prefix(pattern.substr(name, end - name));
    i = name - 1;
  }
  return out;
}

}  // namespace

Regex::Regex(const std::string& pattern, Classes classes) {
  constexpr uint32_t kOptions = PCRE2_UTF | PCRE2_NEVER_BACKSLASH_C | PCRE2_AUTO_CALLOUT;
  const bool unicode = classes == Classes::kUnicode;
  std::pair<int, size_t> error;
  code_ = compile(unicode ? with_unicode_classes(pattern) : pattern,
                  kOptions | (unicode ? PCRE2_UCP | PCRE2_MULTILINE : 0), error);
  if (code_) return;
  char reason[256] = "";
  pcre2_get_error_message(error.first, reinterpret_cast<PCRE2_UCHAR*>(reason), sizeof reason);
  throw InputError(str("regular expression '", pattern, "': ", reason, ", at byte ", error.second));
}

bool Regex::full_match(std::string_view text) const {
  return Search(code_.get(), text).next(PCRE2_ANCHORED | PCRE2_ENDANCHORED);
}

std::optional<std::vector<std::string>> Regex::find_last(std::string_view text) const {
  Search search(code_.get(), text);
  std::optional<std::vector<std::string>> last;
  while (search.next()) last = search.groups();
  return search.failed() ? std::nullopt : last;
}

void Regex::find_all(std::string_view text, int64_t& work,
                     const std::function<void(size_t, size_t)>& found) const {
  Search search(code_.get(), text, work);
  for (size_t from = 0; search.next(); from = search.end()) {
    // \K in a lookahead can give a match with end < begin, or one that begins before the last.
    if (search.end() < search.begin() || search.begin() < from)
      throw InputError("a regular expression with \\K in an assertion is not supported");
    found(search.begin(), search.end());
  }
  work = search.work_left();
  if (search.failed())
    throw InputError(str("the regular expression needs too much work for a text of ", text.size(),
                         " bytes; hint: simplify it"));
}

}  // namespace cohort
