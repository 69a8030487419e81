// Making values: what they take of the limits, and how deep they may be nested.
#include "data/template/value.h"

#include <algorithm>

namespace cohort::jinja {
namespace {

// Values are printed, compared and destroyed recursively.
constexpr int kMaxDepth = 300;

int depth_around(int inner) {
  if (inner >= kMaxDepth) throw Fault(str("a value is nested deeper than ", kMaxDepth));
  return inner + 1;
}

}  // namespace

int64_t Value::integer() const {
  return is<bool>() ? std::get<bool>(storage_) : std::get<int64_t>(storage_);
}

double Value::number() const {
  return is<double>() ? std::get<double>(storage_) : static_cast<double>(integer());
}

std::string Value::why() const {
  return absent() ? "a value is undefined" : *std::get<Undefined>(storage_).why;
}

bool Value::is_tuple() const {
  return list() != nullptr && list()->flavor == Flavor::kTuple;
}

int Value::depth() const {
  if (list() != nullptr) return list()->depth;
  if (dict() != nullptr) return dict()->depth;
  return pointer<Object>() != nullptr ? pointer<Object>()->depth : 0;
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

Charge::~Charge() {
  if (heap_ != nullptr) heap_->give_back(bytes_);
}

void Charge::add(size_t bytes) {
  if (heap_ != nullptr) heap_->take(bytes);
  bytes_ += bytes;
}

Text::Text(std::string text, Markup markup, Heap* heap)
    : bytes(std::move(text)),
      length(static_cast<size_t>(
          std::count_if(bytes.begin(), bytes.end(), [](char c) { return (c & 0xc0) != 0x80; }))),
      markup(markup),
      charge(heap, 2 * sizeof(Text) + bytes.size()) {}

List::List(Flavor flavor, std::vector<Value> values, Heap* heap)
    : flavor(flavor),
      items(std::move(values)),
      charge(heap, sizeof(List) + items.size() * sizeof(Value)) {
  int inner = 0;
  for (const Value& item : items) inner = std::max(inner, item.depth());
  depth = depth_around(inner);
}

Dict::Dict(Entries entries, Heap* heap)
    : entries(std::move(entries)),
      charge(heap, sizeof(Dict) + this->entries.size() * sizeof(this->entries[0])) {
  int inner = 0;
  for (const auto& [key, value] : this->entries)
    inner = std::max({inner, key.depth(), value.depth()});
  depth = depth_around(inner);
}

void Scope::set(std::string_view name, Value value) {
  if (const auto found = variables.find(name); found != variables.end()) {
    found->second = std::move(value);
  } else {
    charge.add(128 + name.size());
    variables.emplace(name, std::move(value));
  }
}

void Heap::work(size_t steps) {
  if (steps > static_cast<size_t>(limits_.steps) ||
      (steps_ += static_cast<int64_t>(steps)) > limits_.steps)
    throw Fault(str("the template takes more than ", limits_.steps, " steps"));
}

void Heap::take(size_t bytes) {
  if (bytes > static_cast<size_t>(limits_.memory) ||
      memory_ + static_cast<int64_t>(bytes) > limits_.memory)
    throw Fault(str("the template needs more than ", limits_.memory, " bytes of memory"));
  memory_ += static_cast<int64_t>(bytes);
}

void Heap::append(std::string& out, std::string_view piece, size_t times) {
  if (piece.empty()) return;
  if (times > (static_cast<size_t>(limits_.text_bytes) - out.size()) / piece.size())
    throw Fault(str("a text is longer than ", limits_.text_bytes, " bytes"));
  work(times == 1 ? piece.size() / 32 : times * (1 + piece.size() / 32));
  for (; times > 0; --times) out += piece;
}

Value Heap::text(std::string_view bytes, Markup markup) {
  if (bytes.size() > static_cast<size_t>(limits_.text_bytes))
    throw Fault(str("a text is longer than ", limits_.text_bytes, " bytes"));
  work(1 + bytes.size() / 32);
  return Value(std::make_shared<const Text>(std::string(bytes), markup, this));
}

Value Heap::list(std::vector<Value> items, Flavor flavor) {
  work(1 + items.size());
  return Value(std::make_shared<const List>(flavor, std::move(items), this));
}

Value Heap::dict(Entries entries) {
  work(1 + entries.size());
  return Value(std::make_shared<const Dict>(std::move(entries), this));
}

Value from_json(const Json& json) {
  const auto text = [](const std::string& bytes) {
    return Value(std::make_shared<const Text>(bytes, Markup::kNo, nullptr));
  };
  if (json.is_null()) return Value(None{});
  if (json.is_bool()) return Value(json.as_bool());
  if (json.is_int()) return Value(json.as_int());
  if (json.is_number()) return Value(json.as_double());
  if (json.is_string()) return text(json.as_string());
  if (json.is_array()) {
    std::vector<Value> items;
    for (const Json& item : json.as_array()) items.push_back(from_json(item));
    return Value(std::make_shared<const List>(Flavor::kList, std::move(items), nullptr));
  }
  Entries entries;
  for (const auto& [key, value] : json.as_object())
    entries.emplace_back(text(key), from_json(value));
  return Value(std::make_shared<const Dict>(std::move(entries), nullptr));
}

}  // namespace cohort::jinja
