// Jinja's filters, and tojson as transformers defines it.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "text/jinja/interpreter.h"
#include "text/jinja/text.h"
#include "text/utf8.h"

namespace cohort::jinja {
namespace {

// The attribute "a.b.0" of a value, or the value itself without a path; `otherwise` if undefined.
Value attribute_of(Interpreter& in, Value value, const Value& path, const Value& otherwise = {}) {
  if (!path.given()) return value;
  if (!path.is_text()) return in.item(value, path);
  std::string_view rest = path.text();
  for (bool more = true; more;) {
    const std::string_view part = rest.substr(0, rest.find('.'));
    more = part.size() < rest.size();
    rest.remove_prefix(part.size() + more);
    int64_t index = 0;
    const auto end = std::from_chars(part.data(), part.data() + part.size(), index);
    const bool is_index =
        index >= 0 && end.ec == std::errc() && end.ptr == part.data() + part.size();
    value = in.item(value, is_index ? Value(index) : part);
    if (value.is<Undefined>() && otherwise.given()) value = otherwise;
  }
  return value;
}

// Lists.

Value first_of(Call& c, const std::vector<Value>& items) {
  return items.empty() ? c.in.undefined("the list was empty") : items[0];
}

Value last(Call& c) {
  const auto& items = c.items(0);
  return items.empty() ? first_of(c, items) : items.back();
}

// Sort key of a value: case-insensitive, unless the argument `case_sensitive` is true.
Value sort_key(Call& c, const Value& value, size_t case_sensitive) {
  return c.flag(case_sensitive) || !value.is_text() ? value : c.in.text(lower(value.text()));
}

// The items with their keys.
Entries keyed_items(Call& c, size_t attribute, size_t case_sensitive) {
  Entries keyed;
  for (const Value& item : c.items(0))
    keyed.emplace_back(sort_key(c, attribute_of(c.in, item, c.args[attribute]), case_sensitive),
                       item);
  return keyed;
}

enum class Order : bool { kUp, kDown };

// Items in the order of their keys; the sort is stable.
std::vector<Value> sorted(Call& c, Entries keyed, Order order) {
  if (order == Order::kDown) std::reverse(keyed.begin(), keyed.end());
  sort_entries(c.in, keyed);
  if (order == Order::kDown) std::reverse(keyed.begin(), keyed.end());
  std::vector<Value> items;
  for (const auto& [key, item] : keyed) items.push_back(item);
  return items;
}

Value sort(Call& c) {
  return c.in.list(sorted(c, keyed_items(c, 3, 2), c.flag(1) ? Order::kDown : Order::kUp));
}

template <Order order>
Value extreme(Call& c) {
  return first_of(c, sorted(c, keyed_items(c, 2, 1), order));
}

Value unique(Call& c) {
  Entries seen;
  std::vector<Value> out;
  for (const auto& [key, item] : keyed_items(c, 2, 1)) {
    const size_t before = seen.size();
    set_entry(c.in, seen, key, None{});
    if (seen.size() > before) out.push_back(item);
  }
  return c.in.list(std::move(out), Flavor::kGenerator);
}

std::vector<Value> pairs_of(Call& c) {
  std::vector<Value> pairs;
  for (const auto& [key, item] : c.dict(0).entries)
    pairs.push_back(c.in.list({key, item}, Flavor::kTuple));
  return pairs;
}

Value items(Call& c) {
  const bool none = c.self().is<Undefined>();
  return c.in.list(none ? std::vector<Value>() : pairs_of(c), Flavor::kGenerator);
}

Value dictsort(Call& c) {
  const std::string_view by = c.args[2].absent() ? "key" : c.text(2);
  if (by != "key" && by != "value") throw TemplateError("'dictsort' sorts by 'key' or 'value'");
  Entries keyed;
  for (const Value& pair : pairs_of(c))
    keyed.emplace_back(sort_key(c, pair.list()->items[by == "key" ? 0 : 1], 1), pair);
  return c.in.list(sorted(c, std::move(keyed), c.flag(3) ? Order::kDown : Order::kUp));
}

Value sum(Call& c) {
  Value total = c.args[2].absent() ? Value(0) : c.args[2];
  checked(total, !total.is_text(), "a number");
  for (const Value& item : c.items(0))
    total = operate(c.in, Level::kSum, "+", total, attribute_of(c.in, item, c.args[1]));
  return total;
}

Value join_filter(Call& c) {
  const std::string_view separator = c.str(1);
  std::string out;
  bool first = true;
  for (const Value& item : c.items(0)) {
    if (!std::exchange(first, false)) c.in.append(out, separator);
    print(c.in, out, attribute_of(c.in, item, c.args[2]));
  }
  return c.in.text(std::move(out));
}

// The filter or test that an argument names, with the arguments after it, applied to a value.
Value apply_named(Call& c, Natives natives, size_t name, const Value& value) {
  const Native* native = find_native(natives, c.args[name].text());
  if (native == nullptr) throw TemplateError("there is no filter or test " + excerpt(c.str(name)));
  const auto rest = c.args.begin() + static_cast<std::ptrdiff_t>(name) + 1;
  return c.in.call_native(*native, value, {{rest, c.args.end()}, c.keywords});
}

// The items of a list; no items for None.
const std::vector<Value>& items_or_none(Call& c) {
  return items_of(c.in, c.flag(0) ? c.self() : Value());
}

Value map(Call& c) {
  const bool by_name = c.args.size() > 1;
  const Value path = by_name ? Value() : take(c.keywords, "attribute");
  const Value otherwise = by_name ? Value() : take(c.keywords, "default");
  if (!by_name && path.absent()) throw TemplateError("'map' needs a filter or attribute=");
  std::vector<Value> out;
  for (const Value& item : items_or_none(c))
    out.push_back(by_name ? apply_named(c, kFilterTable, 1, item)
                          : attribute_of(c.in, item, path, otherwise));
  return c.in.list(std::move(out), Flavor::kGenerator);
}

// select, reject, selectattr and rejectattr.
template <bool wanted, bool by_attribute>
Value select(Call& c) {
  constexpr size_t kTest = by_attribute ? 2 : 1;
  if (c.args.size() < kTest) throw TemplateError("'selectattr' and 'rejectattr' need an attribute");
  std::vector<Value> out;
  for (const Value& item : items_or_none(c)) {
    Value value = by_attribute ? attribute_of(c.in, item, c.args[1]) : item;
    if (c.args.size() > kTest) value = apply_named(c, kTestTable, kTest, value);
    if (truthy(value) == wanted) out.push_back(item);
  }
  return c.in.list(std::move(out), Flavor::kGenerator);
}

Value reverse(Call& c) {
  if (c.self().is_text()) return slice(c.in, c.self(), {None{}, None{}, -1});
  const auto& items = c.items(0);
  return c.in.list({items.rbegin(), items.rend()}, Flavor::kGenerator);
}

Value count(Call& c) {
  if (const auto n = length(c.self())) return make_int(*n);
  throw TemplateError(str("a ", type_name(c.self()), " has no length"));
}

// Texts.

Value escape(Call& c) {
  constexpr std::string_view kFrom = "&<>'\"";
  constexpr std::string_view kTo[] = {"&amp;", "&lt;", "&gt;", "&#39;", "&#34;"};
  std::string out;
  for (std::string_view rest = c.str(0); !rest.empty();) {
    const size_t end = std::min(rest.find_first_of(kFrom), rest.size());
    c.in.append(out, rest.substr(0, end));
    if (end < rest.size()) c.in.append(out, kTo[kFrom.find(rest[end])]);
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return c.in.text(std::move(out));
}

// The indentation of an argument: a text, or a number of spaces.
std::string indentation_of(Call& c, size_t i, int64_t otherwise) {
  if (c.args[i].is_text()) return std::string(c.text(i));
  std::string out;
  c.in.append(out, " ", static_cast<size_t>(std::max<int64_t>(c.integer(i, otherwise), 0)));
  return out;
}

Value indent(Call& c) {
  const std::string indentation = indentation_of(c, 1, 4);
  std::string out = c.flag(2) ? indentation : "";
  for (std::string_view rest = c.text(0);;) {
    const size_t end = std::min(rest.find('\n'), rest.size() - 1) + 1;
    c.in.append(out, rest.substr(0, end));
    if (rest.empty() || rest[end - 1] != '\n') return c.in.text(std::move(out));
    rest.remove_prefix(end);
    if (c.flag(3) || (!rest.empty() && rest[0] != '\n')) c.in.append(out, indentation);
  }
}

Value replace_filter(Call& c) {
  for (const size_t i : {0, 1, 2}) c.args[i] = c.str(i);
  const Native& method = *find_native(methods_of(c.self()), "replace");
  return method.apply(c);
}

Value tojson(Call& c) {
  Style style{.json = true, .ascii = c.flag(1), .sort_keys = c.flag(4)};
  if (c.args[2].given()) {
    style.indent = indentation_of(c, 2, 0);
    style.item_separator = ",";
  }
  if (c.args[3].given()) {
    const auto& separators = c.items(3);
    if (separators.size() != 2) throw TemplateError("'tojson' needs two separators");
    style.item_separator = to_str(c.in, separators[0]);
    style.key_separator = to_str(c.in, separators[1]);
  }
  std::string out;
  write(c.in, out, c.self(), style);
  return c.in.text(std::move(out));
}

// Numbers.

// Python's int() and float() of a text: spaces around it, underscores inside.
template <class Number, class... Base>
std::optional<Number> parse_number(std::string_view text, Base... base) {
  std::string digits(strip(text, Side::kBoth));
  std::erase(digits, '_');
  if (digits.starts_with('+') && !digits.starts_with("+-")) digits.erase(0, 1);
  Number value = 0;
  const char* end = digits.data() + digits.size();
  const auto result = std::from_chars(digits.data(), end, value, base...);
  if (result.ptr != end || result.ec != std::errc()) return {};
  return value;
}

// The value of a number, or of a text that is one.
std::optional<double> number_of(const Value& value) {
  check_defined(value);
  if (value.is_number()) return value.number();
  if (value.is_big()) return parse_number<double>(value.as<BigInteger>().digits);
  return parse_number<double>(value.text());
}

Value to_int(Call& c) {
  if (c.self().is_integral()) return c.self().integer();
  const auto base = static_cast<int>(std::clamp<int64_t>(c.integer(2, 10), 2, 36));
  if (const auto whole = parse_number<int64_t>(c.self().text(), base)) return *whole;
  const auto number = number_of(c.self());
  if (number && std::abs(*number) > 9.2e18) throw TemplateError("a whole number overflows 64 bits");
  if (number && !std::isnan(*number)) return static_cast<int64_t>(*number);
  return c.args[1].absent() ? Value(0) : c.args[1];
}

Value to_float(Call& c) {
  if (const auto number = number_of(c.self())) return *number;
  return c.args[1].absent() ? Value(0.0) : c.args[1];
}

Value absolute(Call& c) {
  const Value& number = c.number(0);
  if (number.is<double>()) return std::abs(number.number());
  return operate(c.in, Level::kProduct, "*", number, number.integer() < 0 ? -1 : 1);
}

Value round(Call& c) {
  const Value& number = c.number(0);
  const int64_t digits = c.integer(1, 0);
  const std::string_view method = c.args[2].absent() ? "common" : c.text(2);
  if (method != "common" && method != "ceil" && method != "floor")
    throw TemplateError("'round' has the methods common, ceil and floor");
  if (digits < 0) throw TemplateError("'round' needs a precision of 0 or more");
  if (number.is_integral() && method == "common") return number.integer();
  const double scale = std::pow(10.0, digits), scaled = number.number() * scale;
  const double rounded = method == "ceil"    ? std::ceil(scaled)
                         : method == "floor" ? std::floor(scaled)
                                             : std::nearbyint(scaled);
  return std::isfinite(scaled) ? rounded / scale : number;
}

// The rest.

Value otherwise(Call& c) {
  if (!c.self().is<Undefined>() && !(c.flag(2) && !c.flag(0))) return c.self();
  return c.args[1].absent() ? "" : c.args[1];
}

constexpr Native kFilters[] = {
    {"abs", "", absolute},
    {"capitalize", "", of_text<capitalize>},
    {"count length", "", count},
    {"default d", "?default_value ?boolean", otherwise},
    {"dictsort", "?case_sensitive ?by ?reverse", dictsort},
    {"escape e", "", escape},
    {"first", "", [](Call& c) { return first_of(c, c.items(0)); }},
    {"float", "?default", to_float},
    {"indent", "?width ?first ?blank", indent},
    {"int", "?default ?base", to_int},
    {"items", "", items},
    {"join", "?d ?attribute", join_filter},
    {"last", "", last},
    {"list", "", [](Call& c) { return c.in.list(c.items(0)); }},
    {"lower", "", of_text<lower>},
    {"map", "...", map},
    {"max", "?case_sensitive ?attribute", extreme<Order::kDown>},
    {"min", "?case_sensitive ?attribute", extreme<Order::kUp>},
    {"reject", "...", select<false, false>},
    {"rejectattr", "...", select<false, true>},
    {"replace", "old new ?count", replace_filter},
    {"reverse", "", reverse},
    {"round", "?precision ?method", round},
    {"select", "...", select<true, false>},
    {"selectattr", "...", select<true, true>},
    {"sort", "?reverse ?case_sensitive ?attribute", sort},
    {"string safe", "", [](Call& c) { return Value(c.str(0)); }},
    {"sum", "?attribute ?start", sum},
    {"title", "", of_text<title_words>},
    {"tojson", "?ensure_ascii ?indent ?separators ?sort_keys", tojson},
    {"trim", "?chars",
     [](Call& c) { return Value(strip(c.str(0), Side::kBoth, c.optional_text(1))); }},
    {"unique", "?case_sensitive ?attribute", unique},
    {"upper", "", of_text<upper>},
};

}  // namespace

const Natives kFilterTable = kFilters;

}  // namespace cohort::jinja
