// Building values: what they take of the budget, and how deep they may be nested.
#include "data/template/value.h"

#include <algorithm>

#include "data/utf8.h"

namespace cohort::jinja {
namespace {

// Values are printed, compared and destroyed recursively.
constexpr int kMaxNesting = 300;

int depth_of(const Value& value) {
  if (const Sequence* s = value.sequence()) return s->depth;
  if (const Dict* d = value.dict()) return d->depth;
  return 0;
}

int checked_depth(int inner) {
  if (inner >= kMaxNesting) throw Fault(str("a value is nested deeper than ", kMaxNesting));
  return inner + 1;
}

int depth_of(const std::vector<Value>& items) {
  int depth = 0;
  for (const Value& item : items) depth = std::max(depth, depth_of(item));
  return checked_depth(depth);
}

int depth_of(const DictItems& items) {
  int depth = 0;
  for (const auto& [key, value] : items) depth = std::max({depth, depth_of(key), depth_of(value)});
  return checked_depth(depth);
}

size_t count_characters(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

}  // namespace

void Budget::work(size_t steps) {
  if (steps > static_cast<size_t>(limits_.steps) ||
      (steps_ += static_cast<int64_t>(steps)) > limits_.steps)
    throw Fault(str("the template takes more than ", limits_.steps, " steps"));
}

void Budget::take(size_t bytes) {
  if (bytes > static_cast<size_t>(limits_.memory) ||
      memory_ + static_cast<int64_t>(bytes) > limits_.memory)
    throw Fault(str("the template needs more than ", limits_.memory, " bytes of memory"));
  memory_ += static_cast<int64_t>(bytes);
}

void Budget::append(std::string& out, std::string_view piece) {
  work(piece.size() / 32);
  if (out.size() + piece.size() > static_cast<size_t>(limits_.text_bytes))
    throw Fault(str("a text is longer than ", limits_.text_bytes, " bytes"));
  out += piece;
}

void Budget::append(std::string& out, size_t count, char c) {
  if (count > static_cast<size_t>(limits_.text_bytes) - out.size())
    throw Fault(str("a text is longer than ", limits_.text_bytes, " bytes"));
  work(count / 32);
  out.append(count, c);
}

Value Value::undefined(std::string why) {
  return Value(Undefined{std::make_shared<const std::string>(std::move(why))});
}

int64_t Value::integer() const {
  return is_bool() ? std::get<bool>(storage_) : std::get<int64_t>(storage_);
}

double Value::number() const {
  return is_float() ? std::get<double>(storage_) : static_cast<double>(integer());
}

std::string Value::why() const {
  return absent() ? "a value is undefined" : *std::get<Undefined>(storage_).why;
}

bool Value::same(const Value& other) const {
  return std::visit(
      []<class A, class B>(const A& a, const B& b) {
        if constexpr (!std::is_same_v<A, B>)
          return false;
        else if constexpr (std::is_same_v<A, Undefined>)
          return a.why == b.why;
        else if constexpr (std::is_same_v<A, None>)
          return true;
        else if constexpr (std::is_same_v<A, std::shared_ptr<const Text>>)
          return a->bytes == b->bytes;
        else
          return a == b;
      },
      storage_, other.storage_);
}

Text::Text(std::string text, bool markup, Budget* budget)
    : bytes(std::move(text)),
      length(count_characters(bytes)),
      markup(markup),
      charge(budget, sizeof(Text) + bytes.size()) {}

Sequence::Sequence(Flavor flavor, std::vector<Value> items, Budget* budget)
    : flavor(flavor),
      items(std::move(items)),
      depth(depth_of(this->items)),
      charge(budget, sizeof(Sequence) + this->items.size() * sizeof(Value)) {}

Dict::Dict(DictItems items, Budget* budget)
    : items(std::move(items)),
      depth(depth_of(this->items)),
      charge(budget, sizeof(Dict) + this->items.size() * sizeof(this->items[0])) {}

std::optional<Value> Loop::draw() {
  while (next < items.size()) {
    Value item = items[next++];
    if (drained || !accept || accept(item)) return item;
  }
  return {};
}

bool Loop::advance() {
  std::optional<Value> item = after ? std::exchange(after, {}) : draw();
  if (!item) return false;
  ++index0;
  before = std::exchange(current, std::move(item));
  return true;
}

const std::optional<Value>& Loop::peek() {
  if (!after) after = draw();
  return after;
}

int64_t Loop::count() {
  if (length) return *length;
  std::vector<Value> rest;
  while (auto item = draw()) rest.push_back(*item);
  items = std::move(rest);
  next = 0;
  drained = true;
  length = static_cast<int64_t>(items.size()) + index0 + 1 + (after ? 1 : 0);
  return *length;
}

Value make_text(Budget& budget, std::string bytes, bool markup) {
  budget.work(1 + bytes.size() / 32);
  return Value(std::make_shared<const Text>(std::move(bytes), markup, &budget));
}

Value make_list(Budget& budget, std::vector<Value> items, Flavor flavor) {
  budget.work(1 + items.size());
  return Value(std::make_shared<const Sequence>(flavor, std::move(items), &budget));
}

Value make_dict(Budget& budget, DictItems items) {
  budget.work(1 + items.size());
  return Value(std::make_shared<const Dict>(std::move(items), &budget));
}

Value from_json(const Json& json) {
  const auto text = [](const std::string& bytes) {
    return Value(std::make_shared<const Text>(bytes, false, nullptr));
  };
  if (json.is_null()) return Value::none();
  if (json.is_bool()) return Value(json.as_bool());
  if (json.is_int()) return Value(json.as_int());
  if (json.is_number()) return Value(json.as_double());
  if (json.is_string()) return text(json.as_string());
  if (json.is_array()) {
    std::vector<Value> items;
    for (const Json& item : json.as_array()) items.push_back(from_json(item));
    return Value(std::make_shared<const Sequence>(Flavor::kList, std::move(items), nullptr));
  }
  DictItems items;
  for (const auto& [key, value] : json.as_object()) items.emplace_back(text(key), from_json(value));
  return Value(std::make_shared<const Dict>(std::move(items), nullptr));
}

}  // namespace cohort::jinja
