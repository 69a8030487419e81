// The methods of texts, dicts and lists, and what a loop knows of itself.
#include <algorithm>

#include "data/template/interpreter.h"
#include "data/template/natives.h"
#include "data/template/text.h"
#include "data/utf8.h"

namespace cohort::jinja {
namespace {

Value text_like_self(Call& c, std::string_view bytes) {
  return c.in.text(bytes, c.self().text()->markup);
}

template <std::string (*function)(std::string_view)>
Value mapped(Call& c) {
  return text_like_self(c, function(c.text(0)));
}

template <Side side>
Value stripped(Call& c) {
  return text_like_self(c, strip(c.text(0), side, c.args[1].given() ? &c.text(1) : nullptr));
}

// The first separator, or the first white space, as its begin and end; npos if there is none.
std::pair<size_t, size_t> find_cut(std::string_view text, const std::string* separator) {
  if (separator != nullptr) {
    const size_t at = text.find(*separator);
    return {at, at + separator->size()};
  }
  for (size_t at = 0; at < text.size(); at = next_utf8_boundary(text, at + 1))
    if (is_space(decode_utf8(text, at).code))
      return {at, text.size() - strip(text.substr(at), Side::kLeft).size()};
  return {text.npos, text.npos};
}

std::pair<size_t, size_t> find_last_cut(std::string_view text, const std::string* separator) {
  if (separator != nullptr) {
    const size_t at = text.rfind(*separator);
    return {at, at + separator->size()};
  }
  for (size_t end = text.size(), at = end; at > 0; end = at) {
    do --at;
    while (at > 0 && (text[at] & 0xc0) == 0x80);
    if (is_space(decode_utf8(text, at).code))
      return {strip(text.substr(0, end), Side::kRight).size(), end};
  }
  return {text.npos, text.npos};
}

// split and rsplit: the side from which the cuts are counted.
template <Side side>
Value split(Call& c) {
  const std::string* separator = c.args[1].given() ? &c.text(1) : nullptr;
  if (separator != nullptr && separator->empty()) throw Fault("an empty separator");
  std::string_view rest = c.text(0);
  c.in.work(rest.size() / 8);
  if (separator == nullptr) rest = strip(rest, side);
  std::vector<Value> parts;
  for (int64_t left = c.integer(2, -1); separator != nullptr || !rest.empty(); --left) {
    const auto [begin, end] = (side == Side::kLeft ? find_cut : find_last_cut)(rest, separator);
    // White space at the far end makes no part, unless it is left over.
    const bool cuts = left != 0 && begin != rest.npos;
    if (!cuts) {
      parts.push_back(text_like_self(c, rest));
      break;
    }
    parts.push_back(
        text_like_self(c, side == Side::kLeft ? rest.substr(0, begin) : rest.substr(end)));
    rest = side == Side::kLeft ? rest.substr(end) : rest.substr(0, begin);
  }
  if (side == Side::kRight) std::reverse(parts.begin(), parts.end());
  return c.in.list(std::move(parts));
}

Value split_lines(Call& c) {
  std::string_view rest = c.text(0);
  std::vector<Value> lines;
  while (!rest.empty()) {
    size_t end = 0;
    const auto is_break = [](char32_t b) {
      return (b >= '\n' && b <= '\r') || (b >= 0x1c && b <= 0x1e) || b == 0x85 || b == 0x2028 ||
             b == 0x2029;
    };
    Utf8Char last;
    while (end < rest.size() && !is_break((last = decode_utf8(rest, end)).code)) end += last.size;
    size_t next = std::min(end + last.size, rest.size());
    if (rest.substr(end).starts_with("\r\n")) ++next;
    lines.push_back(text_like_self(c, rest.substr(0, c.flag(1) ? next : end)));
    rest.remove_prefix(next);
  }
  return c.in.list(std::move(lines));
}

// A part of the text, by the arguments 2 (start) and 3 (end); nothing where Python finds not even
// an empty text. `start` is the character where it starts.
std::optional<std::string_view> section(const Call& c, int64_t& start) {
  const auto size = static_cast<int64_t>(c.self().text()->length);
  const auto bound = [&](size_t i, int64_t otherwise) {
    const int64_t v = c.args[i].given() ? c.integer(i, 0) : otherwise;
    return v < 0 ? std::max<int64_t>(v + size, 0) : v;
  };
  start = bound(2, 0);
  const int64_t end = std::min(bound(3, size), size);
  if (start > end) return {};
  const std::string_view text =
      std::string_view(c.text(0)).substr(byte_of(c.text(0), static_cast<size_t>(start)));
  return text.substr(0, byte_of(text, static_cast<size_t>(end - start)));
}

template <Side side>
Value starts_or_ends(Call& c) {
  const Items affixes(c.in, c.args[1].is_tuple() ? c.args[1] : c.in.list({c.args[1]}));
  int64_t start = 0;
  const auto text = section(c, start);
  return std::any_of(affixes.begin(), affixes.end(), [&](const Value& affix) {
    if (affix.text() == nullptr) throw Fault("expected a text, got " + type_name(affix));
    const std::string& bytes = affix.text()->bytes;
    return text && (side == Side::kLeft ? text->starts_with(bytes) : text->ends_with(bytes));
  });
}

// find, rfind, index and rindex.
template <Side from, bool must_find>
Value find_text(Call& c) {
  int64_t start = 0;
  const auto text = section(c, start);
  c.in.work(c.text(0).size() / 32);
  const size_t at = !text                 ? std::string::npos
                    : from == Side::kLeft ? text->find(c.text(1))
                                          : text->rfind(c.text(1));
  if (at == std::string::npos && must_find)
    throw Fault("the text " + excerpt(c.text(1)) + " was not found");
  if (at == std::string::npos) return int64_t{-1};
  return start + static_cast<int64_t>(c.in.text(text->substr(0, at)).text()->length);
}

Value count_text(Call& c) {
  int64_t start = 0;
  size_t n = 0;
  const auto text = section(c, start);
  c.in.work(c.text(0).size() / 32);
  const std::string& part = c.text(1);
  if (part.empty()) return make_int(text ? decode(*text).size() + 1 : 0);
  for (size_t at = 0; text && (at = text->find(part, at)) != text->npos; at += part.size()) ++n;
  return make_int(n);
}

Value replace(Call& c) {
  const std::string &from = c.text(1), &to = c.text(2);
  const std::string_view text = c.text(0);
  std::string out;
  size_t at = 0;
  for (int64_t left = c.args[3].given() ? c.integer(3, -1) : -1; left != 0; --left) {
    const size_t found = text.find(from, at);
    if (found == text.npos) break;
    c.in.work(1);
    c.in.append(out, text.substr(at, found - at));
    c.in.append(out, to);
    at = found + from.size();
    if (!from.empty()) continue;
    // Nothing is found before every character, and at the end.
    if (at == text.size()) break;
    const size_t next = std::min(next_utf8_boundary(text, at + 1), text.size());
    c.in.append(out, text.substr(at, next - at));
    at = next;
  }
  c.in.append(out, text.substr(at));
  return text_like_self(c, out);
}

Value join(Call& c) {
  std::string out;
  bool first = true;
  for (const Value& item : Items(c.in, c.args[1])) {
    if (item.text() == nullptr) throw Fault("join() needs texts, got " + type_name(item));
    if (!first) c.in.append(out, c.text(0));
    c.in.append(out, item.text()->bytes);
    first = false;
  }
  return text_like_self(c, out);
}

// Whether there are characters, and all are of a kind.
template <bool (*kind)(char32_t)>
Value all_are(Call& c) {
  const std::u32string text = decode(c.text(0));
  return !text.empty() && std::all_of(text.begin(), text.end(), kind);
}

template <std::string (*map)(std::string_view)>
Value all_cased(Call& c) {
  return map(c.text(0)) == c.text(0) && lower(c.text(0)) != upper(c.text(0));
}

template <Side side>
Value remove_affix(Call& c) {
  std::string_view text = c.text(0);
  if (side == Side::kLeft && text.starts_with(c.text(1))) text.remove_prefix(c.text(1).size());
  if (side == Side::kRight && text.ends_with(c.text(1))) text.remove_suffix(c.text(1).size());
  return text_like_self(c, text);
}

constexpr Native kTextMethods[] = {
    {"capitalize", "", mapped<capitalize>},
    {"count", "sub | start end", count_text},
    {"endswith", "suffix | start end", starts_or_ends<Side::kRight>},
    {"find", "sub | start end", find_text<Side::kLeft, false>},
    {"index", "sub | start end", find_text<Side::kLeft, true>},
    {"isalnum", "", all_are<[](char32_t c) { return is_alpha(c) || is_digit(c); }>},
    {"isalpha", "", all_are<is_alpha>},
    {"isdigit", "", all_are<is_digit>},
    {"islower", "", all_cased<lower>},
    {"isspace", "", all_are<is_space>},
    {"isupper", "", all_cased<upper>},
    {"join", "iterable", join},
    {"lower", "", mapped<lower>},
    {"lstrip", "| chars", stripped<Side::kLeft>},
    {"removeprefix", "prefix", remove_affix<Side::kLeft>},
    {"removesuffix", "suffix", remove_affix<Side::kRight>},
    {"replace", "old new | count", replace},
    {"rfind", "sub | start end", find_text<Side::kRight, false>},
    {"rindex", "sub | start end", find_text<Side::kRight, true>},
    {"rsplit", "| sep maxsplit", split<Side::kRight>},
    {"rstrip", "| chars", stripped<Side::kRight>},
    {"split", "| sep maxsplit", split<Side::kLeft>},
    {"splitlines", "| keepends", split_lines},
    {"startswith", "prefix | start end", starts_or_ends<Side::kLeft>},
    {"strip", "| chars", stripped<Side::kBoth>},
    {"title", "", mapped<title>},
    {"upper", "", mapped<upper>},
};

template <Flavor flavor>
Value view(Call& c) {
  std::vector<Value> out;
  for (const auto& [key, value] : c.self().dict()->entries)
    out.push_back(flavor == Flavor::kKeys     ? key
                  : flavor == Flavor::kValues ? value
                                              : c.in.list({key, value}, Flavor::kTuple));
  return c.in.list(std::move(out), flavor);
}

Value get(Call& c) {
  if (!contains(c.in, c.self(), c.args[1])) return c.args[2].absent() ? Value(None{}) : c.args[2];
  return *find_item(c.in, c.self(), c.args[1]);
}

constexpr Native kDictMethods[] = {
    {"get", "key | default", get},
    {"items", "", view<Flavor::kItems>},
    {"keys", "", view<Flavor::kKeys>},
    {"values", "", view<Flavor::kValues>},
};

Value count_items(Call& c) {
  const auto& items = c.self().list()->items;
  return int64_t{std::count_if(items.begin(), items.end(),
                               [&](const Value& item) { return equals(c.in, item, c.args[1]); })};
}

Value index_of(Call& c) {
  const auto& items = c.self().list()->items;
  for (size_t i = 0; i < items.size(); ++i)
    if (equals(c.in, items[i], c.args[1])) return make_int(i);
  throw Fault("index() of a value that is not in the list");
}

constexpr Native kListMethods[] = {{"count", "value", count_items}, {"index", "value", index_of}};

constexpr Native kGroupFields[] = {
    {"grouper", "property", [](Call& c) { return c.self().list()->items[0]; }},
    {"list", "property", [](Call& c) { return c.self().list()->items[1]; }},
};

const Loop& loop_of(const Call& c) {
  return *c.self().object<Loop>();
}

Value cycle(Call& c) {
  if (c.rest.values.empty()) throw Fault("cycle() needs something to go through");
  return c.rest.values[loop_of(c).index % c.rest.values.size()];
}

Value changed(Call& c) {
  std::vector<Value>& before = c.self().object<Loop>()->last_changed;
  const auto same = [&](const Value& a, const Value& b) { return equals(c.in, a, b); };
  const std::vector<Value>& now = c.rest.values;
  const bool is_same =
      !now.empty() && std::equal(now.begin(), now.end(), before.begin(), before.end(), same);
  before = now;
  return !is_same;
}

// The item so many passes away.
template <int away>
Value neighbour(Call& c) {
  const auto& items = loop_of(c).list->items;
  const size_t i = loop_of(c).index + static_cast<size_t>(away);
  return i < items.size() ? items[i] : Value::undefined("the loop has no item there");
}

constexpr Native kLoopFields[] = {
    {"changed", "...", changed},
    {"cycle", "...", cycle},
    {"depth", "property", [](Call&) { return Value(int64_t{1}); }},
    {"depth0", "property", [](Call&) { return Value(int64_t{0}); }},
    {"first", "property", [](Call& c) { return Value(loop_of(c).index == 0); }},
    {"index", "property", [](Call& c) { return make_int(loop_of(c).index + 1); }},
    {"index0", "property", [](Call& c) { return make_int(loop_of(c).index); }},
    {"last", "property",
     [](Call& c) { return Value(loop_of(c).index + 1 == loop_of(c).list->items.size()); }},
    {"length", "property", [](Call& c) { return make_int(loop_of(c).list->items.size()); }},
    {"nextitem", "property", neighbour<1>},
    {"previtem", "property", neighbour<-1>},
    {"revindex", "property",
     [](Call& c) { return make_int(loop_of(c).list->items.size() - loop_of(c).index); }},
    {"revindex0", "property",
     [](Call& c) { return make_int(loop_of(c).list->items.size() - loop_of(c).index - 1); }},
};

}  // namespace

Natives methods_of(const Value& self) {
  if (self.text() != nullptr) return kTextMethods;
  if (self.dict() != nullptr) return kDictMethods;
  if (self.object<Loop>() != nullptr) return kLoopFields;
  if (self.list() == nullptr) return {};
  if (self.list()->flavor == Flavor::kGroup) return kGroupFields;
  return self.list()->flavor <= Flavor::kRange ? Natives(kListMethods) : Natives();
}

}  // namespace cohort::jinja
