// Methods of texts, dicts, lists and loops. Those that would change a value do not exist.
#include <algorithm>
#include <span>

#include "data/template/natives.h"
#include "data/template/python.h"
#include "data/template/text.h"
#include "data/utf8.h"

namespace cohort::jinja {
namespace {

const Text& self(const Args& a) {
  return *a.values[0].text();
}

// Results of a method of escaped HTML are escaped HTML.
Value text_like(Interpreter& in, const Args& a, std::string_view bytes) {
  return in.text(std::string(bytes), self(a).markup);
}

bool given(const Args& a, size_t i) {
  return !a.values[i].absent() && !a.values[i].is_none();
}

template <std::string (*function)(std::string_view)>
Value mapped(Interpreter& in, const Args& a) {
  return text_like(in, a, function(self(a).bytes));
}

std::string title(std::string_view text) {
  std::u32string out;
  bool inside = false;
  for (const char32_t c : decode(text)) {
    out += inside ? to_lower(c) : to_upper(c);
    inside = to_lower(c) != c || to_upper(c) != c;
  }
  return encode(out);
}

std::string swap_case(std::string_view text) {
  std::u32string out;
  for (const char32_t c : decode(text)) out += to_lower(c) != c ? to_lower(c) : to_upper(c);
  return encode(out);
}

template <Side side>
Value stripped(Interpreter& in, const Args& a) {
  const std::string* chars = given(a, 1) ? &text_argument(a, 1, "chars") : nullptr;
  return text_like(in, a, strip(self(a).bytes, side, chars));
}

// Pieces of a text between separators, or between runs of white space, at most `limit` cuts from
// the left or from the right; they stand in the order of the text.
std::vector<std::string_view> pieces(std::string_view text, const std::string* separator,
                                     int64_t limit, Side from) {
  std::vector<std::string_view> out;
  const bool right = from == Side::kRight;
  if (separator == nullptr) text = strip(text, from == Side::kRight ? Side::kRight : Side::kLeft);
  while (separator != nullptr || !text.empty()) {
    std::string_view piece = text, rest;
    bool found = false;
    if (limit < 0 || static_cast<int64_t>(out.size()) < limit) {
      if (separator != nullptr) {
        const size_t at = right ? text.rfind(*separator) : text.find(*separator);
        if (found = at != text.npos; found) {
          piece = right ? text.substr(at + separator->size()) : text.substr(0, at);
          rest = right ? text.substr(0, at) : text.substr(at + separator->size());
        }
      } else {
        size_t at = right ? text.size() : 0;
        const auto step = [&] {  // over one character
          const size_t before = at;
          if (right) do
              --at;
            while (at > 0 && (text[at] & 0xc0) == 0x80);
          else
            at = next_utf8_boundary(text, at + 1);
          return is_space(decode_utf8(text, std::min(before, at)).code);
        };
        size_t edge = at;
        while (at != (right ? 0 : text.size()) && !found) {
          edge = at;
          found = step();
        }
        if (found) {
          piece = right ? text.substr(edge) : text.substr(0, edge);
          rest = right ? strip(text.substr(0, edge), Side::kRight)
                       : strip(text.substr(edge), Side::kLeft);
          if (rest.empty()) found = false;
        }
      }
    } else if (separator == nullptr) {
      // What is left keeps its spaces at the far end.
      piece = text;
    }
    out.push_back(piece);
    if (!found) break;
    text = rest;
  }
  if (right) std::reverse(out.begin(), out.end());
  return out;
}

Value texts(Interpreter& in, const Args& a, const std::vector<std::string_view>& parts,
            Flavor flavor = Flavor::kList) {
  in.budget.work(parts.size());
  std::vector<Value> out;
  for (const std::string_view part : parts) out.push_back(text_like(in, a, part));
  return in.list(std::move(out), flavor);
}

template <Side from>
Value split(Interpreter& in, const Args& a) {
  const std::string* separator = given(a, 1) ? &text_argument(a, 1, "sep") : nullptr;
  if (separator != nullptr && separator->empty()) throw Fault("an empty separator");
  in.budget.work(self(a).bytes.size() / 8);
  return texts(in, a, pieces(self(a).bytes, separator, int_argument(a, 2, -1), from));
}

template <Side from>
Value partition(Interpreter& in, const Args& a) {
  const std::string& separator = text_argument(a, 1, "sep");
  if (separator.empty()) throw Fault("an empty separator");
  const std::string_view text = self(a).bytes;
  const size_t at = from == Side::kRight ? text.rfind(separator) : text.find(separator);
  if (at == text.npos && from == Side::kRight) return texts(in, a, {"", "", text}, Flavor::kTuple);
  if (at == text.npos) return texts(in, a, {text, "", ""}, Flavor::kTuple);
  return texts(in, a, {text.substr(0, at), separator, text.substr(at + separator.size())},
               Flavor::kTuple);
}

// A part of the text, by the arguments `i` (start) and `i + 1` (end); nothing where Python finds
// not even an empty text. `at` is the character where it starts.
std::optional<std::string_view> section(const Args& a, size_t i, int64_t& at) {
  const auto size = static_cast<int64_t>(self(a).length);
  const auto bound = [&](size_t index, int64_t otherwise) {
    const int64_t v = given(a, index) ? int_argument(a, index, 0) : otherwise;
    return v < 0 ? std::max<int64_t>(v + size, 0) : v;
  };
  at = bound(i, 0);
  const int64_t end = std::min(bound(i + 1, size), size);
  if (at > end) return {};
  const size_t first = byte_of(self(a), static_cast<size_t>(at));
  return std::string_view(self(a).bytes)
      .substr(first, byte_of(self(a), static_cast<size_t>(end)) - first);
}

template <bool at_end>
Value starts_or_ends(Interpreter& in, const Args& a) {
  std::vector<Value> affixes{a.values[1]};
  if (const Sequence* s = a.values[1].sequence(); s != nullptr && s->flavor == Flavor::kTuple)
    affixes = s->items;
  int64_t at = 0;
  const auto text = section(a, 2, at);
  bool found = false;
  for (const Value& affix : affixes) {
    in.budget.work(1);
    if (affix.text() == nullptr) throw Fault("expected a text, got " + type_name(affix));
    const std::string& bytes = affix.text()->bytes;
    found = found || (text && (at_end ? text->ends_with(bytes) : text->starts_with(bytes)));
  }
  return Value(found);
}

// find, rfind, index and rindex.
template <bool from_right, bool must_find>
Value find_text(Interpreter& in, const Args& a) {
  const std::string& part = text_argument(a, 1, "sub");
  int64_t start = 0;
  in.budget.work(self(a).bytes.size() / 32);
  const auto text = section(a, 2, start);
  const size_t at = !text ? std::string::npos : from_right ? text->rfind(part) : text->find(part);
  if (at == std::string::npos) {
    if (must_find) throw Fault("the text " + excerpt(part) + " was not found");
    return Value(int64_t{-1});
  }
  const std::string_view before = text->substr(0, at);
  return Value(start + std::count_if(before.begin(), before.end(),
                                     [](char c) { return (c & 0xc0) != 0x80; }));
}

Value count_text(Interpreter& in, const Args& a) {
  const std::string& part = text_argument(a, 1, "sub");
  int64_t start = 0, n = 0;
  in.budget.work(self(a).bytes.size() / 32);
  const auto text = section(a, 2, start);
  if (!text) return Value(n);
  for (size_t at = 0; (at = text->find(part, at)) != text->npos; ++n)
    at = part.empty() ? next_utf8_boundary(*text, at + 1) + (at == text->size()) : at + part.size();
  return Value(n);
}

Value replace(Interpreter& in, const Args& a) {
  const std::string &from = text_argument(a, 1, "old"), &to = text_argument(a, 2, "new");
  const std::string_view text = self(a).bytes;
  int64_t left = int_argument(a, 3, -1);
  std::string out;
  size_t at = 0;
  while (left != 0 && at <= text.size()) {
    const size_t found = text.find(from, at);
    if (found == text.npos) break;
    in.budget.work(1);
    in.budget.append(out, text.substr(at, found - at));
    in.budget.append(out, to);
    at = found + from.size();
    if (from.empty()) {
      const size_t next = std::min(next_utf8_boundary(text, at + 1), text.size());
      in.budget.append(out, text.substr(std::min(at, text.size()), next - std::min(at, next)));
      at = at == text.size() ? at + 1 : next;
    }
    --left;
  }
  if (at < text.size()) in.budget.append(out, text.substr(at));
  return text_like(in, a, out);
}

Value join(Interpreter& in, const Args& a) {
  std::string out;
  bool first = true;
  for (const Value& item : iterate(in.budget, a.values[1])) {
    if (item.text() == nullptr) throw Fault("join() needs texts, got " + type_name(item));
    if (!first) in.budget.append(out, self(a).bytes);
    in.budget.append(out, item.text()->bytes);
    first = false;
  }
  return text_like(in, a, out);
}

// ljust, rjust, center: where the text stands in its field.
template <Side side>
Value justified(Interpreter& in, const Args& a) {
  const int64_t width = int_argument(a, 1, 0), size = static_cast<int64_t>(self(a).length);
  const std::u32string fill = a.values[2].absent() ? U" " : decode(text_argument(a, 2, "fillchar"));
  if (fill.size() != 1) throw Fault("a field is filled with one character");
  const int64_t missing = std::max<int64_t>(width - size, 0);
  // As CPython rounds the half.
  const int64_t left = side == Side::kLeft    ? 0
                       : side == Side::kRight ? missing
                                              : missing / 2 + (missing & width & 1);
  std::string out;
  const auto pad = [&](int64_t n) {
    for (; n > 0; --n) {
      in.budget.work(1);
      in.budget.append(out, encode(fill));
    }
  };
  pad(left);
  in.budget.append(out, self(a).bytes);
  pad(missing - left);
  return text_like(in, a, out);
}

Value zfill(Interpreter& in, const Args& a) {
  const std::string& text = self(a).bytes;
  const bool sign = text.starts_with('-') || text.starts_with('+');
  const auto missing = int_argument(a, 1, 0) - static_cast<int64_t>(self(a).length);
  std::string out = text.substr(0, sign);
  in.budget.append(out, static_cast<size_t>(std::max<int64_t>(missing, 0)), '0');
  in.budget.append(out, std::string_view(text).substr(sign));
  return text_like(in, a, out);
}

template <bool suffix>
Value remove_affix(Interpreter& in, const Args& a) {
  const std::string& affix = text_argument(a, 1, suffix ? "suffix" : "prefix");
  std::string_view text = self(a).bytes;
  if (suffix && text.ends_with(affix)) text.remove_suffix(affix.size());
  if (!suffix && text.starts_with(affix)) text.remove_prefix(affix.size());
  return text_like(in, a, text);
}

// Whether there are characters, and all are of a kind.
template <bool (*kind)(char32_t)>
Value all_are(Interpreter&, const Args& a) {
  const std::u32string text = decode(self(a).bytes);
  return Value(!text.empty() && std::all_of(text.begin(), text.end(), kind));
}
bool is_alnum(char32_t c) {
  return is_alpha(c) || is_digit(c);
}

Value is_ascii(Interpreter&, const Args& a) {
  return Value(self(a).length == self(a).bytes.size());
}

template <char32_t (*map)(char32_t), char32_t (*other)(char32_t)>
Value all_cased(Interpreter&, const Args& a) {
  bool all = true, any = false;
  for (const char32_t c : decode(self(a).bytes)) {
    all = all && map(c) == c;
    any = any || other(c) != c;
  }
  return Value(all && any);
}

Value is_title(Interpreter&, const Args& a) {
  return Value(self(a).bytes == title(self(a).bytes) &&
               lower(self(a).bytes) != upper(self(a).bytes));
}

Value lines(Interpreter& in, const Args& a) {
  return texts(in, a, split_lines(self(a).bytes, truthy(a.values[1])));
}

Value format(Interpreter& in, const Args& a) {
  return text_like(in, a, format_braces(in, self(a).bytes, a));
}

constexpr Native kTextMethods[] = {
    {"capitalize", "", mapped<capitalize>},
    {"casefold", "", mapped<lower>},
    {"center", "width | fillchar", justified<Side::kBoth>},
    {"count", "sub | start end", count_text},
    {"endswith", "suffix | start end", starts_or_ends<true>},
    {"find", "sub | start end", find_text<false, false>},
    {"format", "...", format},
    {"index", "sub | start end", find_text<false, true>},
    {"isalnum", "", all_are<is_alnum>},
    {"isalpha", "", all_are<is_alpha>},
    {"isascii", "", is_ascii},
    {"isdecimal", "", all_are<is_digit>},
    {"isdigit", "", all_are<is_digit>},
    {"islower", "", all_cased<to_lower, to_upper>},
    {"isnumeric", "", all_are<is_digit>},
    {"isspace", "", all_are<is_space>},
    {"istitle", "", is_title},
    {"isupper", "", all_cased<to_upper, to_lower>},
    {"join", "iterable", join},
    {"ljust", "width | fillchar", justified<Side::kLeft>},
    {"lower", "", mapped<lower>},
    {"lstrip", "| chars", stripped<Side::kLeft>},
    {"partition", "sep", partition<Side::kLeft>},
    {"removeprefix", "prefix", remove_affix<false>},
    {"removesuffix", "suffix", remove_affix<true>},
    {"replace", "old new | count", replace},
    {"rfind", "sub | start end", find_text<true, false>},
    {"rindex", "sub | start end", find_text<true, true>},
    {"rjust", "width | fillchar", justified<Side::kRight>},
    {"rpartition", "sep", partition<Side::kRight>},
    {"rsplit", "| sep maxsplit", split<Side::kRight>},
    {"rstrip", "| chars", stripped<Side::kRight>},
    {"split", "| sep maxsplit", split<Side::kLeft>},
    {"splitlines", "| keepends", lines},
    {"startswith", "prefix | start end", starts_or_ends<false>},
    {"strip", "| chars", stripped<Side::kBoth>},
    {"swapcase", "", mapped<swap_case>},
    {"title", "", mapped<title>},
    {"upper", "", mapped<upper>},
    {"zfill", "width", zfill},
};

// Dicts.

template <Flavor flavor>
Value view(Interpreter& in, const Args& a) {
  std::vector<Value> out;
  for (const auto& [key, value] : a.values[0].dict()->items)
    out.push_back(flavor == Flavor::kKeys     ? key
                  : flavor == Flavor::kValues ? value
                                              : in.list({key, value}, Flavor::kTuple));
  return in.list(std::move(out), flavor);
}

Value get(Interpreter& in, const Args& a) {
  if (const auto found = find_item(in.budget, a.values[0], a.values[1])) return *found;
  const Value& key = a.values[1];
  if (key.dict() != nullptr ||
      (key.sequence() != nullptr && key.sequence()->flavor == Flavor::kList))
    throw Fault(str("a ", type_name(key), " is no key of a dict"));
  return a.values[2].absent() ? Value::none() : a.values[2];
}

Value itself(Interpreter&, const Args& a) {
  return a.values[0];
}

constexpr Native kDictMethods[] = {
    {"copy", "", itself},
    {"get", "key | default", get},
    {"items", "", view<Flavor::kItems>},
    {"keys", "", view<Flavor::kKeys>},
    {"values", "", view<Flavor::kValues>},
};

// Lists.

Value index_of(Interpreter& in, const Args& a) {
  const std::vector<Value>& items = a.values[0].sequence()->items;
  const auto size = static_cast<int64_t>(items.size());
  const auto bound = [&](size_t i, int64_t otherwise) {
    const int64_t v = int_argument(a, i, otherwise);
    return v < 0 ? std::max<int64_t>(v + size, 0) : std::min(v, size);
  };
  const int64_t end = bound(3, size);
  for (int64_t i = bound(2, 0); i < end; ++i)
    if (equals(in.budget, items[static_cast<size_t>(i)], a.values[1])) return Value(i);
  throw Fault("index() of a value that is not in the list");
}

Value count_of(Interpreter& in, const Args& a) {
  const std::vector<Value>& items = a.values[0].sequence()->items;
  return Value(int64_t{std::count_if(items.begin(), items.end(), [&](const Value& item) {
    return equals(in.budget, item, a.values[1]);
  })});
}

constexpr Native kListMethods[] = {
    {"copy", "", itself},
    {"count", "value", count_of},
    {"index", "value | start stop", index_of},
};

// Loops.

Value cycle(Interpreter&, const Args& a) {
  if (a.values.size() < 2) throw Fault("cycle() needs something to go through");
  const auto n = static_cast<int64_t>(a.values.size()) - 1;
  return a.values[static_cast<size_t>(1 + a.values[0].loop()->index0 % n)];
}

Value changed(Interpreter& in, const Args& a) {
  Loop& loop = *a.values[0].loop();
  std::vector<Value> now(a.values.begin() + 1, a.values.end());
  const bool same =
      loop.last_changed && loop.last_changed->size() == now.size() &&
      std::equal(now.begin(), now.end(), loop.last_changed->begin(),
                 [&](const Value& x, const Value& y) { return equals(in.budget, x, y); });
  loop.last_changed = std::move(now);
  return Value(!same);
}

constexpr Native kLoopMethods[] = {
    {"changed", "...", changed},
    {"cycle", "...", cycle},
};

}  // namespace

const Native* find_method(const Value& self, std::string_view name) {
  std::span<const Native> table;
  if (self.text() != nullptr) table = kTextMethods;
  if (self.dict() != nullptr) table = kDictMethods;
  if (self.loop() != nullptr) table = kLoopMethods;
  if (const Sequence* s = self.sequence()) {
    if (s->flavor == Flavor::kList) table = kListMethods;
    if (s->flavor == Flavor::kTuple || s->flavor == Flavor::kGroup || s->flavor == Flavor::kRange)
      table = std::span(kListMethods).subspan(1);  // no copy()
  }
  const auto found =
      std::find_if(table.begin(), table.end(), [&](const Native& n) { return n.name == name; });
  return found == table.end() ? nullptr : &*found;
}

}  // namespace cohort::jinja
