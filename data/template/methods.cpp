// The methods of texts, dicts and lists, and what a loop knows of itself.
#include <algorithm>

#include "data/template/interpreter.h"
#include "data/template/natives.h"
#include "data/template/text.h"
#include "data/utf8.h"

namespace cohort::jinja {
namespace {

template <std::string (*function)(std::string_view)>
Value mapped(Call& c) {
  return c.in.text(function(c.text(0)));
}

template <Side side>
Value stripped(Call& c) {
  return c.in.text(strip(c.text(0), side, c.args[1].given() ? &c.text(1) : nullptr));
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

Value split(Call& c) {
  const std::string* separator = c.args[1].given() ? &c.text(1) : nullptr;
  if (separator != nullptr && separator->empty()) throw Fault("an empty separator");
  std::string_view rest = c.text(0);
  c.in.work(rest.size() / 8);
  if (separator == nullptr) rest = strip(rest, Side::kLeft);
  std::vector<Value> parts;
  // White space at the end makes no part, unless no cuts are left.
  for (int64_t left = c.integer(2, -1); separator != nullptr || !rest.empty(); --left) {
    const auto [begin, end] = find_cut(rest, separator);
    const bool cuts = left != 0 && begin != rest.npos;
    parts.push_back(c.in.text(cuts ? rest.substr(0, begin) : rest));
    if (!cuts) break;
    rest.remove_prefix(end);
  }
  return c.in.list(std::move(parts));
}

Value split_lines(Call& c) {
  std::string_view rest = c.text(0);
  std::vector<Value> lines;
  while (!rest.empty()) {
    const size_t end = std::min(rest.find_first_of("\n\r"), rest.size());
    const size_t next = std::min(end + (rest.substr(end).starts_with("\r\n") ? 2 : 1), rest.size());
    lines.push_back(c.in.text(rest.substr(0, c.flag(1) ? next : end)));
    rest.remove_prefix(next);
  }
  return c.in.list(std::move(lines));
}

template <Side side>
Value starts_or_ends(Call& c) {
  const Items affixes(c.in, c.args[1].is_tuple() ? c.args[1] : c.in.list({c.args[1]}));
  return std::any_of(affixes.begin(), affixes.end(), [&](const Value& affix) {
    if (affix.text() == nullptr) throw Fault("expected a text, got " + type_name(affix));
    const std::string& bytes = affix.text()->bytes;
    return side == Side::kLeft ? c.text(0).starts_with(bytes) : c.text(0).ends_with(bytes);
  });
}

template <Side from>
Value find_text(Call& c) {
  c.in.work(c.text(0).size() / 32);
  const size_t at = from == Side::kLeft ? c.text(0).find(c.text(1)) : c.text(0).rfind(c.text(1));
  if (at == std::string::npos) return int64_t{-1};
  return make_int(c.in.text(c.text(0).substr(0, at)).text()->length);
}

Value index_of_text(Call& c) {
  const Value found = find_text<Side::kLeft>(c);
  if (found.integer() < 0) throw Fault("the text " + excerpt(c.text(1)) + " was not found");
  return found;
}

Value count_text(Call& c) {
  c.in.work(c.text(0).size() / 32);
  const std::string &text = c.text(0), &part = c.text(1);
  size_t n = part.empty() ? c.self().text()->length + 1 : 0;
  for (size_t at = 0; !part.empty() && (at = text.find(part, at)) != text.npos; at += part.size())
    ++n;
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
  return c.in.text(out);
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
  return c.in.text(out);
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

constexpr Native kTextMethods[] = {
    {"capitalize", "", mapped<capitalize>},
    {"count", "sub", count_text},
    {"endswith", "suffix", starts_or_ends<Side::kRight>},
    {"find", "sub", find_text<Side::kLeft>},
    {"index", "sub", index_of_text},
    {"isalpha", "", all_are<is_alpha>},
    {"isdigit", "", all_are<is_digit>},
    {"islower", "", all_cased<lower>},
    {"isspace", "", all_are<is_space>},
    {"isupper", "", all_cased<upper>},
    {"join", "iterable", join},
    {"lower", "", mapped<lower>},
    {"lstrip", "| chars", stripped<Side::kLeft>},
    {"replace", "old new | count", replace},
    {"rfind", "sub", find_text<Side::kRight>},
    {"rstrip", "| chars", stripped<Side::kRight>},
    {"split", "| sep maxsplit", split},
    {"splitlines", "| keepends", split_lines},
    {"startswith", "prefix", starts_or_ends<Side::kLeft>},
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
  return self.list()->flavor <= Flavor::kRange ? Natives(kListMethods) : Natives();
}

}  // namespace cohort::jinja
