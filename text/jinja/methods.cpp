// Methods of texts, dicts and loops, Jinja's tests (`x is defined`), and its global functions.
#include <algorithm>

#include "text/jinja/interpreter.h"
#include "text/jinja/text.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace cohort::jinja {

namespace {

// Texts.

template <Side side>
Value stripped(Call& c) {
  return strip(c.text(0), side, c.optional_text(1));
}

Value split(Call& c) {
  const auto separator = c.optional_text(1);
  if (separator && separator->empty()) throw TemplateError("split(): the separator is empty");
  std::string_view rest = c.text(0);
  c.in.work_for_search(rest, separator.value_or(""));
  if (!separator) rest = strip(rest, Side::kLeft);
  std::vector<Value> parts;
  // Trailing white space makes no part, unless no splits are left.
  for (int64_t left = c.integer(2, -1); separator || !rest.empty(); --left) {
    size_t end = separator ? std::min(rest.find(*separator), rest.size()) : 0;
    while (!separator && end < rest.size() && !is_space(decode_utf8(rest, end).code))
      end = next_utf8_boundary(rest, end + 1);
    if (left == 0) end = rest.size();
    parts.push_back(rest.substr(0, left == 0 ? rest.npos : end));
    c.in.work(3);
    if (left == 0 || end == rest.size()) break;
    rest.remove_prefix(end + (separator ? separator->size() : 0));
    if (!separator) rest = strip(rest, Side::kLeft);
  }
  return c.in.list(std::move(parts));
}

Value split_lines(Call& c) {
  std::vector<Value> lines;
  for (std::string_view rest = c.text(0); !rest.empty();) {
    const size_t end = std::min(rest.find_first_of("\n\r"), rest.size());
    const size_t next = std::min(end + (rest.substr(end).starts_with("\r\n") ? 2 : 1), rest.size());
    c.in.work(3);
    lines.push_back(rest.substr(0, c.flag(1) ? next : end));
    rest.remove_prefix(next);
  }
  return c.in.list(std::move(lines));
}

template <Side side>
Value starts_or_ends(Call& c) {
  std::vector<Value> affixes{c.args[1]};
  if (const List* list = c.args[1].list(); list != nullptr && list->flavor == Flavor::kTuple)
    affixes = c.items(1);
  return std::any_of(affixes.begin(), affixes.end(), [&](const Value& affix) {
    checked(affix, affix.is_text(), "a text");
    return side == Side::kLeft ? c.text(0).starts_with(affix.text())
                               : c.text(0).ends_with(affix.text());
  });
}

template <Side from>
Value find_text(Call& c) {
  c.in.work_for_search(c.text(0), c.text(1));
  const size_t at = from == Side::kLeft ? c.text(0).find(c.text(1)) : c.text(0).rfind(c.text(1));
  return at == std::string::npos ? Value(-1) : make_int(count_characters(c.text(0).substr(0, at)));
}

Value replace(Call& c) {
  const std::string_view text = c.text(0), from = c.text(1), to = c.text(2);
  std::string out;
  size_t at = 0;
  c.in.work_for_search(text, from);
  for (int64_t left = c.args[3].given() ? c.integer(3, -1) : -1; left != 0; --left) {
    const size_t found = text.find(from, at);
    if (found == text.npos) break;
    c.in.work(1);
    c.in.append(out, text.substr(at, found - at));
    c.in.append(out, to);
    at = found + from.size();
    if (!from.empty()) continue;
    // An empty text matches before every character, and at the end.
    if (at == text.size()) break;
    const size_t next = next_utf8_boundary(text, at + 1);
    c.in.append(out, text.substr(at, next - at));
    at = next;
  }
  c.in.append(out, text.substr(at));
  return c.in.text(std::move(out));
}

bool is_letter(char32_t c) {
  return has_class(c, kLetter);
}
bool is_digit(char32_t c) {
  return c >= '0' && c <= '9';
}

// True if the text is not empty and `kind` holds for all its characters.
template <bool (*kind)(char32_t)>
Value all_are(Call& c) {
  c.in.work(c.text(0).size() / 4);
  const std::u32string characters = decode(c.text(0));
  return !characters.empty() && std::all_of(characters.begin(), characters.end(), kind);
}

// True if the text has cased letters and `map` does not change it.
template <std::string (*map)(std::string_view)>
Value is_cased(Call& c) {
  const std::string_view text = c.str(0);
  c.in.work(text.size() / 8);
  return map(text) == text && lower(text) != upper(text);
}

Value join(Call& c) {
  std::string out;
  bool first = true;
  for (const Value& item : c.items(1)) {
    checked(item, item.is_text(), "a text");
    if (!std::exchange(first, false)) c.in.append(out, c.text(0));
    c.in.append(out, item.text());
  }
  return c.in.text(std::move(out));
}

constexpr Native kTextMethods[] = {
    {"capitalize", "", of_text<capitalize>},
    {"endswith", "suffix", starts_or_ends<Side::kRight>},
    {"find", "sub", find_text<Side::kLeft>},
    {"isalpha", "", all_are<is_letter>},
    {"isdigit", "", all_are<is_digit>},
    {"islower", "", is_cased<lower>},
    {"isspace", "", all_are<is_space>},
    {"isupper", "", is_cased<upper>},
    {"join", "iterable", join},
    {"lower", "", of_text<lower>},
    {"lstrip", "?chars", stripped<Side::kLeft>},
    {"replace", "old new ?count", replace},
    {"rfind", "sub", find_text<Side::kRight>},
    {"rstrip", "?chars", stripped<Side::kRight>},
    {"split", "?sep ?maxsplit", split},
    {"splitlines", "?keepends", split_lines},
    {"startswith", "prefix", starts_or_ends<Side::kLeft>},
    {"strip", "?chars", stripped<Side::kBoth>},
    {"title", "", of_text<title>},
    {"upper", "", of_text<upper>},
};

// Dicts.

template <Flavor flavor>
Value view(Call& c) {
  std::vector<Value> out;
  for (const auto& [key, value] : c.dict(0).entries)
    out.push_back(flavor == Flavor::kKeys     ? key
                  : flavor == Flavor::kValues ? value
                                              : c.in.list({key, value}, Flavor::kTuple));
  return c.in.list(std::move(out), flavor);
}

Value get(Call& c) {
  if (contains(c.in, c.self(), c.args[1])) return *find_item(c.in, c.self(), c.args[1]);
  return c.args[2].absent() ? None{} : c.args[2];
}

constexpr Native kDictMethods[] = {
    {"get", "key ?default", get},
    {"items", "", view<Flavor::kItems>},
    {"keys", "", view<Flavor::kKeys>},
    {"values", "", view<Flavor::kValues>},
};

// Loops.

Value cycle(Call& c) {
  const size_t n = c.args.size() - 1;
  if (n == 0) throw TemplateError("cycle() needs at least one value");
  return c.args[1 + c.self().as<Loop*>()->index % n];
}

Value changed(Call& c) {
  Value& before = c.self().as<Loop*>()->last_changed;
  const Value now = c.in.list({c.args.begin() + 1, c.args.end()});
  return !equals(c.in, now, std::exchange(before, now));
}

constexpr Native kLoopMethods[] = {{"changed", "...", changed}, {"cycle", "...", cycle}};

// Tests.

template <class T>
Value is_a(Call& c) {
  return c.self().is<T>();
}

template <int64_t rest>
Value is_modulo(Call& c) {
  const Value by = c.args.size() > 1 ? c.args[1] : Value(2);
  return equals(c.in, operate(c.in, Level::kProduct, "%", c.self(), by), rest);
}

// `==` and the like as tests.
template <char name, char second = '='>
Value holds(Call& c) {
  constexpr char kName[] = {name, second};
  return operate(c.in, Level::kComparison, {kName, second == ' ' ? 1u : 2u}, c.self(), c.args[1]);
}

constexpr Native kTests[] = {
    {"== eq equalto", "other", holds<'='>},
    {"!= ne", "other", holds<'!'>},
    {"< lt lessthan", "other", holds<'<', ' '>},
    {"<= le", "other", holds<'<'>},
    {"> gt greaterthan", "other", holds<'>', ' '>},
    {">= ge", "other", holds<'>'>},
    {"boolean", "", is_a<bool>},
    {"callable", "", is_a<const Function*>},
    {"defined", "", [](Call& c) { return Value(!c.self().is<Undefined>()); }},
    {"divisibleby", "num", is_modulo<0>},
    {"even", "", is_modulo<0>},
    {"false", "", [](Call& c) { return Value(c.self() == Value(false)); }},
    {"float", "", is_a<double>},
    {"in", "seq", holds<'i', 'n'>},
    {"integer", "", [](Call& c) { return Value(c.self().is<int64_t>() || c.self().is_big()); }},
    {"iterable", "", [](Call& c) { return Value(is_iterable(c.self())); }},
    {"lower", "", is_cased<lower>},
    {"mapping", "", is_a<const Dict*>},
    {"none", "", is_a<None>},
    {"number", "", [](Call& c) { return Value(c.self().is_number() || c.self().is_big()); }},
    {"odd", "", is_modulo<1>},
    {"sameas", "other", [](Call& c) { return Value(c.self() == c.args[1]); }},
    {"sequence", "", [](Call& c) { return Value(length(c.self()).has_value()); }},
    {"string", "", is_a<std::string_view>},
    {"true", "", [](Call& c) { return Value(c.self() == Value(true)); }},
    {"undefined", "", is_a<Undefined>},
    {"upper", "", is_cased<upper>},
};

// Global functions.

Value range(Call& c) {
  int64_t start = 0, stop = c.integer(1, 0);
  const int64_t step = c.integer(3, 1);
  if (c.args[2].given()) start = stop, stop = c.integer(2, 0);
  if (step == 0) throw TemplateError("the step of range() cannot be 0");
  std::vector<Value> items;
  while (step > 0 ? start < stop : start > stop) {
    c.in.work(3);
    items.push_back(start);
    if (__builtin_add_overflow(start, step, &start)) break;
  }
  return c.in.list(std::move(items), Flavor::kRange);
}

// dict(...) and namespace(...): the entries of a dict, and keyword arguments.
Entries entries_of(Call& c) {
  Entries entries;
  for (size_t i = 1; i < c.args.size(); ++i)
    for (const auto& [key, item] : c.dict(i).entries) set_entry(c.in, entries, key, item);
  for (const auto& [name, value] : c.keywords) set_entry(c.in, entries, name, value);
  return entries;
}

Value make_namespace(Call& c) {
  Scope* const ns = c.in.make(Scope{});
  for (const auto& [key, value] : entries_of(c))
    ns->variables.emplace_back(to_str(c.in, key), value);
  return ns;
}

// joiner(sep): a function that returns "" on the first call, and the separator afterwards.
constexpr Native kJoin = {"joiner", "", [](Call& c) {
                            Scope& state = *c.self().as<Scope*>();
                            return std::exchange(*state.find("now"), *state.find("separator"));
                          }};

Value joiner(Call& c) {
  const Value separator = c.args[1].absent() ? ", " : c.args[1];
  Scope* const state = c.in.make(Scope{});
  state->variables = {{"now", ""}, {"separator", separator}};
  return c.in.make(Function{.native = &kJoin, .self = state});
}

constexpr Native kGlobals[] = {
    {"dict", "...", [](Call& c) { return c.in.dict(entries_of(c)); }},
    {"joiner", "?sep", joiner},
    {"namespace", "...", make_namespace},
    {"raise_exception", "message",
     [](Call& c) -> Value { throw TemplateError(std::string(c.str(1))); }},
    {"range", "start ?stop ?step", range},
    {"strftime_now", "format",
     [](Call& c) { return c.in.text(format_time(c.in.now(), c.text(1))); }},
};

}  // namespace

Value loop_field(const Loop& loop, std::string_view name) {
  const size_t i = loop.index, n = loop.items.size();
  const Value none = Undefined{"the loop has no item there"};
  const std::pair<std::string_view, Value> fields[] = {
      {"depth", 1},
      {"depth0", 0},
      {"first", i == 0},
      {"index", make_int(i + 1)},
      {"index0", make_int(i)},
      {"last", i + 1 == n},
      {"length", make_int(n)},
      {"nextitem", i + 1 < n ? loop.items[i + 1] : none},
      {"previtem", i > 0 ? loop.items[i - 1] : none},
      {"revindex", make_int(n - i)},
      {"revindex0", make_int(n - i - 1)},
  };
  const auto* found = std::ranges::find(fields, name, [](auto& field) { return field.first; });
  return found == std::end(fields) ? Value() : found->second;
}

Natives methods_of(const Value& self) {
  if (self.is_text()) return kTextMethods;
  if (self.dict() != nullptr) return kDictMethods;
  return self.is<Loop*>() ? Natives(kLoopMethods) : Natives();
}

const Natives kTestTable = kTests, kGlobalTable = kGlobals;

}  // namespace cohort::jinja
