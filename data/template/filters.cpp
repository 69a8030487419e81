// The filters of Jinja, and tojson as transformers defines it.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>

#include "data/template/format.h"
#include "data/template/interpreter.h"
#include "data/template/natives.h"
#include "data/template/text.h"
#include "data/utf8.h"

namespace cohort::jinja {
namespace {

Markup markup_of(const Value& v) {
  return v.text() != nullptr ? v.text()->markup : Markup::kNo;
}

// A value's attribute "a.b.0", or the value itself without one; `otherwise` for what is undefined.
Value attribute_of(Interpreter& in, Value value, const Value& path, const Value& otherwise = {}) {
  if (!path.given()) return value;
  if (path.text() == nullptr) return in.item(value, path);
  std::string_view rest = path.text()->bytes;
  for (bool more = true; more;) {
    const std::string_view part = rest.substr(0, rest.find('.'));
    more = part.size() < rest.size();
    rest.remove_prefix(std::min(part.size() + 1, rest.size()));
    int64_t index = 0;
    const auto end = std::from_chars(part.data(), part.data() + part.size(), index);
    const bool is_index =
        !part.starts_with('-') && end.ec == std::errc() && end.ptr == part.data() + part.size();
    value = in.item(value, is_index ? Value(index) : in.text(part));
    if (value.is<Undefined>() && otherwise.given()) value = otherwise;
  }
  return value;
}

// What a value is sorted by: without cases, unless they count.
Value folded(Interpreter& in, const Value& value, bool cases_count) {
  return cases_count || value.text() == nullptr ? value : in.text(lower(value.text()->bytes));
}

// Items in the order of their keys.
Value sorted(Call& c, const std::vector<Value>& items, bool reverse,
             const std::function<Value(const Value&)>& key) {
  std::vector<Value> keys, out;
  for (const Value& item : items) keys.push_back(key(item));
  for (const size_t i : sorted_places(c.in, keys, reverse ? Order::kDown : Order::kUp))
    out.push_back(items[i]);
  return c.in.list(std::move(out));
}

Value sort(Call& c) {
  const Items items(c.in, c.self());
  return sorted(c, items.list()->items, c.flag(1), [&](const Value& item) {
    return folded(c.in, attribute_of(c.in, item, c.args[3]), c.flag(2));
  });
}

std::vector<Value> pairs_of(Interpreter& in, const Value& value) {
  if (value.is<Undefined>()) throw Fault(value.why());
  if (value.dict() == nullptr) throw Fault("expected a dict, got " + type_name(value));
  std::vector<Value> pairs;
  for (const auto& [key, item] : value.dict()->entries)
    pairs.push_back(in.list({key, item}, Flavor::kTuple));
  return pairs;
}

Value dictsort(Call& c) {
  const std::string by = c.args[2].absent() ? "key" : c.text(2);
  if (by != "key" && by != "value") throw Fault("'dictsort' sorts by 'key' or 'value'");
  return sorted(c, pairs_of(c.in, c.self()), c.flag(3), [&](const Value& pair) {
    return folded(c.in, pair.list()->items[by == "key" ? 0 : 1], c.flag(1));
  });
}

Value unique(Call& c) {
  Entries seen;
  std::vector<Value> out;
  for (const Value& item : Items(c.in, c.self())) {
    const size_t before = seen.size();
    set_entry(c.in, seen, folded(c.in, attribute_of(c.in, item, c.args[2]), c.flag(1)), None{});
    if (seen.size() > before) out.push_back(item);
  }
  return c.in.list(std::move(out), Flavor::kGenerator);
}

template <bool (*better)(std::partial_ordering)>
Value extreme(Call& c) {
  Value best = Value::undefined("the list was empty"), best_key;
  for (const Value& item : Items(c.in, c.self())) {
    Value key = folded(c.in, attribute_of(c.in, item, c.args[2]), c.flag(1));
    if (best_key.absent() || better(compare(c.in, key, best_key))) best = item, best_key = key;
  }
  return best;
}

Value sum(Call& c) {
  Value total = c.args[2].absent() ? Value(int64_t{0}) : c.args[2];
  if (total.text() != nullptr) throw Fault("'sum' adds no texts; hint: use 'join'");
  for (const Value& item : Items(c.in, c.self()))
    total =
        find_operator(Level::kSum, "+")->apply(c.in, total, attribute_of(c.in, item, c.args[1]));
  return total;
}

Value join(Call& c) {
  const std::string separator = c.str(1);
  std::string out;
  bool first = true;
  for (const Value& item : Items(c.in, c.self())) {
    if (!first) c.in.append(out, separator);
    c.in.append(out, to_str(c.in, attribute_of(c.in, item, c.args[2])));
    first = false;
  }
  return c.in.text(out);
}

// Takes the first argument: the name of a filter or test.
const Native& take_native(Call& c, Natives natives) {
  const Value name = c.rest.values.empty() ? Value() : c.rest.values[0];
  const Native* native =
      name.text() == nullptr ? nullptr : find_native(natives, name.text()->bytes);
  if (native == nullptr) throw Fault("there is no filter or test " + excerpt(to_str(c.in, name)));
  c.rest.values.erase(c.rest.values.begin());
  return *native;
}

Value map(Call& c) {
  std::vector<Value> out;
  const Items items(c.in, c.flag(0) ? c.self() : Value());  // nothing for None
  if (c.rest.values.empty()) {
    const Value path = c.rest.take("attribute"), otherwise = c.rest.take("default");
    if (path.absent()) throw Fault("'map' needs a filter or attribute=");
    for (const Value& item : items) out.push_back(attribute_of(c.in, item, path, otherwise));
  } else {
    const Native& filter = take_native(c, filters_table());
    for (const Value& item : items) out.push_back(c.in.call_native(filter, item, c.rest));
  }
  return c.in.list(std::move(out), Flavor::kGenerator);
}

// select, reject, selectattr and rejectattr.
template <bool wanted, bool by_attribute>
Value select(Call& c) {
  Value path;
  if (by_attribute) {
    if (c.rest.values.empty()) throw Fault("'selectattr' and 'rejectattr' need an attribute");
    path = c.rest.values[0];
    c.rest.values.erase(c.rest.values.begin());
  }
  const Native* test = c.rest.values.empty() ? nullptr : &take_native(c, tests_table());
  std::vector<Value> out;
  for (const Value& item : Items(c.in, c.flag(0) ? c.self() : Value())) {
    const Value value = attribute_of(c.in, item, path);
    if (truthy(test == nullptr ? value : c.in.call_native(*test, value, c.rest)) == wanted)
      out.push_back(item);
  }
  return c.in.list(std::move(out), Flavor::kGenerator);
}

Value first(Call& c) {
  const Items items(c.in, c.self());
  return items.size() == 0 ? Value::undefined("the list was empty") : items[0];
}

Value last(Call& c) {
  if (!length(c.self())) throw Fault(str("a ", type_name(c.self()), " has no last item"));
  const Items items(c.in, c.self());
  return items.size() == 0 ? Value::undefined("the list was empty") : items[items.size() - 1];
}

Value reverse(Call& c) {
  if (const Text* t = c.self().text()) {
    std::u32string characters = decode(t->bytes);
    std::reverse(characters.begin(), characters.end());
    return c.in.text(encode(characters), t->markup);
  }
  const Items items(c.in, c.self());
  return c.in.list(
      {std::make_reverse_iterator(items.end()), std::make_reverse_iterator(items.begin())},
      Flavor::kGenerator);
}

Value replace(Call& c) {
  Args args{{c.in.text(c.str(1)), c.in.text(c.str(2))}, {}};
  if (c.args[3].given()) args.values.push_back(c.args[3]);
  const Value text = c.in.text(c.str(0));
  return c.in.call_native(*find_native(methods_of(text), "replace"), text, std::move(args));
}

Value indent(Call& c) {
  std::string indention, out;
  if (c.args[1].text() != nullptr)
    indention = c.text(1);
  else
    c.in.append(indention, " ", static_cast<size_t>(std::max<int64_t>(c.integer(1, 4), 0)));
  std::string_view rest = c.text(0);
  if (c.flag(2)) c.in.append(out, indention);
  while (true) {
    const size_t end = rest.find('\n');
    c.in.append(out, rest.substr(0, end == rest.npos ? end : end + 1));
    if (end == rest.npos) break;
    rest.remove_prefix(end + 1);
    if (c.flag(3) || (!rest.empty() && rest[0] != '\n')) c.in.append(out, indention);
  }
  return c.in.text(out, markup_of(c.self()));
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
  if (result.ptr != end || digits.empty() || result.ec != std::errc()) return {};
  return value;
}

Value to_int(Call& c) {
  if (c.self().is<Undefined>()) throw Fault(c.self().why());
  if (c.self().is_integral()) return c.self().integer();
  std::optional<double> number;
  if (c.self().is<double>()) number = c.self().number();
  if (c.self().text() != nullptr) {
    const auto base = static_cast<int>(std::clamp<int64_t>(c.integer(2, 10), 2, 36));
    if (const auto whole = parse_number<int64_t>(c.text(0), base)) return *whole;
    number = parse_number<double>(c.text(0));
  }
  if (number && std::abs(*number) > 9.2e18) throw Fault("a whole number leaves 64 bits");
  if (!number || std::isnan(*number)) return c.args[1].absent() ? Value(int64_t{0}) : c.args[1];
  return static_cast<int64_t>(*number);
}

Value to_float(Call& c) {
  if (c.self().is<Undefined>()) throw Fault(c.self().why());
  if (c.self().is_number()) return c.self().number();
  if (c.self().text() != nullptr)
    if (const auto number = parse_number<double>(c.text(0))) return *number;
  return c.args[1].absent() ? Value(0.0) : c.args[1];
}

Value absolute(Call& c) {
  const Value& number = checked_number(c.self());
  if (number.is<double>()) return std::abs(number.number());
  if (number.integer() >= 0) return number.integer();
  return find_operator(Level::kSum, "-")->apply(c.in, Value(int64_t{0}), number);
}

Value round(Call& c) {
  const double value = checked_number(c.self()).number();
  const auto digits = static_cast<int>(std::clamp<int64_t>(c.integer(1, 0), -400, 400));
  const std::string method = c.args[2].absent() ? "common" : c.text(2);
  const double scale = std::pow(10.0, digits);
  if (method == "ceil") return std::ceil(value * scale) / scale;
  if (method == "floor") return std::floor(value * scale) / scale;
  if (method != "common") throw Fault("'round' has the methods common, ceil and floor");
  if (c.self().is_integral() && digits >= 0) return c.self().integer();
  if (!std::isfinite(value)) return value;
  const double rounded = std::nearbyint(value * scale) / scale;
  return c.self().is<double>() ? Value(rounded) : Value(static_cast<int64_t>(rounded));
}

Value tojson(Call& c) {
  JsonStyle style{{}, ", ", ": ", c.flag(1), c.flag(4)};
  if (c.args[2].given()) {
    style.item_separator = ",";
    style.indent.emplace();
    if (c.args[2].text() != nullptr)
      style.indent = c.text(2);
    else
      c.in.append(*style.indent, " ", static_cast<size_t>(std::max<int64_t>(c.integer(2, 0), 0)));
  }
  if (c.args[3].given()) {
    const Items separators(c.in, c.args[3]);
    if (separators.size() != 2) throw Fault("'tojson' needs two separators");
    style.item_separator = to_str(c.in, separators[0]);
    style.key_separator = to_str(c.in, separators[1]);
  }
  return c.in.text(to_json(c.in, c.self(), style));
}

Value count(Call& c) {
  if (const auto n = length(c.self())) return make_int(*n);
  throw Fault(str("a ", type_name(c.self()), " has no length"));
}

// A filter that is a function of the text.
template <std::string (*function)(std::string_view)>
Value of_text(Call& c) {
  return c.in.text(function(c.str(0)), markup_of(c.self()));
}

Value otherwise(Call& c) {
  if (!c.self().is<Undefined>() && !(c.flag(2) && !c.flag(0))) return c.self();
  return c.args[1].absent() ? c.in.text("") : c.args[1];
}

Value escape(Call& c) {
  if (markup_of(c.self()) == Markup::kYes) return c.self();
  return c.in.text(escape_html(c.in, c.str(0)), Markup::kYes);
}

constexpr Native kFilters[] = {
    {"abs", "", absolute},
    {"capitalize", "", of_text<capitalize>},
    {"count", "", count},
    {"d", "| default_value boolean", otherwise},
    {"default", "| default_value boolean", otherwise},
    {"dictsort", "| case_sensitive by reverse", dictsort},
    {"e", "", escape},
    {"escape", "", escape},
    {"first", "", first},
    {"float", "| default", to_float},
    {"indent", "| width first blank", indent},
    {"int", "| default base", to_int},
    {"items", "",
     [](Call& c) {
       const bool none = c.self().is<Undefined>();
       return c.in.list(none ? std::vector<Value>() : pairs_of(c.in, c.self()), Flavor::kGenerator);
     }},
    {"join", "| d attribute", join},
    {"last", "", last},
    {"length", "", count},
    {"list", "", [](Call& c) { return c.in.list(Items(c.in, c.self()).list()->items); }},
    {"lower", "", of_text<lower>},
    {"map", "...", map},
    {"max", "| case_sensitive attribute", extreme<std::is_gt>},
    {"min", "| case_sensitive attribute", extreme<std::is_lt>},
    {"reject", "...", select<false, false>},
    {"rejectattr", "...", select<false, true>},
    {"replace", "old new | count", replace},
    {"reverse", "", reverse},
    {"round", "| precision method", round},
    {"safe", "", [](Call& c) { return c.in.text(c.str(0), Markup::kYes); }},
    {"select", "...", select<true, false>},
    {"selectattr", "...", select<true, true>},
    {"sort", "| reverse case_sensitive attribute", sort},
    {"string", "", [](Call& c) { return c.in.text(c.str(0), markup_of(c.self())); }},
    {"sum", "| attribute start", sum},
    {"title", "", of_text<title_words>},
    {"tojson", "| ensure_ascii indent separators sort_keys", tojson},
    {"trim", "| chars",
     [](Call& c) {
       const std::string* chars = c.args[1].given() ? &c.text(1) : nullptr;
       return c.in.text(strip(c.str(0), Side::kBoth, chars), markup_of(c.self()));
     }},
    {"unique", "| case_sensitive attribute", unique},
    {"upper", "", of_text<upper>},
};

}  // namespace

Natives filters_table() {
  return kFilters;
}

}  // namespace cohort::jinja
