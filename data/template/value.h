// The values of a template: Python's None, bool, int, float, str, list, tuple, dict and functions,
// and Jinja's undefined, namespace and loop. All but the last two never change, and may be shared.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/check.h"
#include "data/chat_template.h"

namespace cohort::jinja {

// What a template has done wrong.
class Fault : public std::runtime_error {
 public:
  static constexpr size_t kNowhere = static_cast<size_t>(-1);  // until a caller fills it in
  explicit Fault(const std::string& message, size_t at = kNowhere)
      : std::runtime_error(message), at(at) {}
  size_t at;  // byte of the source
};

struct Text;
struct List;
struct Dict;
struct Object;
class Heap;

struct Undefined {
  std::shared_ptr<const std::string> why;  // null: an argument that was not given
};
struct None {};

class Value {
 public:
  using Storage = std::variant<Undefined, None, bool, int64_t, double, std::shared_ptr<const Text>,
                               std::shared_ptr<const List>, std::shared_ptr<const Dict>,
                               std::shared_ptr<Object>>;
  Value() = default;  // absent: an argument that was not given
  template <class T>
  requires std::is_constructible_v<Storage, T> Value(T&& value)
      : storage_(std::forward<T>(value)) {}
  static Value undefined(std::string why) {
    return Undefined{std::make_shared<const std::string>(std::move(why))};
  }

  template <class T>
  bool is() const {
    return std::holds_alternative<T>(storage_);
  }
  bool absent() const { return is<Undefined>() && std::get<Undefined>(storage_).why == nullptr; }
  bool given() const { return !absent() && !is<None>(); }
  bool is_integral() const { return is<int64_t>() || is<bool>(); }
  bool is_number() const { return is_integral() || is<double>(); }
  bool is_tuple() const;

  // nullptr for other kinds.
  const Text* text() const { return pointer<const Text>(); }
  const List* list() const { return pointer<const List>(); }
  std::shared_ptr<const List> shared_list() const {
    return std::get<std::shared_ptr<const List>>(storage_);
  }
  const Dict* dict() const { return pointer<const Dict>(); }
  template <class T>
  T* object() const {
    return dynamic_cast<T*>(pointer<Object>());
  }

  int64_t integer() const;  // of an integral value
  double number() const;    // of a number
  std::string why() const;  // of an undefined value
  int depth() const;        // containers inside each other
  // Whether both are one object, or equal scalars of one type.
  bool same(const Value& other) const;

 private:
  template <class T>
  T* pointer() const {
    const auto* p = std::get_if<std::shared_ptr<T>>(&storage_);
    return p == nullptr ? nullptr : p->get();
  }
  Storage storage_;
};

inline Value make_int(size_t n) {
  return static_cast<int64_t>(n);
}

// Bytes taken from a heap for as long as the object lives.
class Charge {
 public:
  Charge(Heap* heap, size_t bytes) : heap_(heap) { add(bytes); }
  ~Charge();
  Charge(const Charge&) = delete;
  Charge& operator=(const Charge&) = delete;
  void add(size_t bytes);

 private:
  Heap* heap_;
  size_t bytes_ = 0;
};

enum class Markup : bool { kNo, kYes };  // escaped HTML: + escapes what it is joined with

struct Text {
  Text(std::string text, Markup markup, Heap* heap);
  std::string bytes;  // UTF-8
  size_t length;      // characters
  Markup markup;
  Charge charge;
};

enum class Flavor : uint8_t { kList, kTuple, kRange, kKeys, kValues, kItems, kGenerator };

struct List {
  List(Flavor flavor, std::vector<Value> values, Heap* heap);
  Flavor flavor;
  std::vector<Value> items;
  int depth;
  mutable bool used_up = false;  // a generator gives its items once
  Charge charge;
};

using Entries = std::vector<std::pair<Value, Value>>;
struct Dict {
  Dict(Entries entries, Heap* heap);
  Entries entries;
  int depth;
  Charge charge;
};

// What has an identity. The interpreter clears those that outlive their use one by one, as they
// may refer to themselves, or to a chain of others too long for recursive destructors.
struct Object {
  virtual ~Object() = default;
  virtual void clear() {}
  int depth = 0;
};

// The variables of a part of the template; without a parent, a namespace.
struct Scope : Object {
  Scope(Heap* heap, std::shared_ptr<Scope> parent) : parent(std::move(parent)), charge(heap, 128) {}
  void set(std::string_view name, Value value);
  void clear() override {
    variables.clear();
    parent.reset();
  }
  std::map<std::string, Value, std::less<>> variables;
  std::shared_ptr<Scope> parent;
  Charge charge;
};

struct Loop : Object {
  void clear() override { last_changed.clear(); }
  std::shared_ptr<const List> list;
  size_t index = 0, depth0 = 0;
  std::vector<Value> last_changed;
};

// What a rendering has used of its limits. All that a template makes comes from here.
class Heap {
 public:
  explicit Heap(const RenderLimits& limits) : limits_(limits) {}

  // Both throw Fault beyond the limit, and are called before the work is done.
  void work(size_t steps);
  void take(size_t bytes);
  void give_back(size_t bytes) { memory_ -= static_cast<int64_t>(bytes); }
  void append(std::string& out, std::string_view piece, size_t times = 1);

  Value text(std::string_view bytes, Markup markup = Markup::kNo);
  Value list(std::vector<Value> items, Flavor flavor = Flavor::kList);
  Value dict(Entries entries);

 private:
  RenderLimits limits_;
  int64_t steps_ = 0, memory_ = 0;
};

// A value of a context, which is not counted.
Value from_json(const Json& json);

// The items, keys or characters of a value. Throws Fault for what is not iterable.
class Items {
 public:
  Items(Heap& heap, const Value& value);
  auto begin() const { return list_->items.begin(); }
  auto end() const { return list_->items.end(); }
  size_t size() const { return list_->items.size(); }
  const Value& operator[](size_t i) const { return list_->items[i]; }
  const std::shared_ptr<const List>& list() const { return list_; }

 private:
  std::shared_ptr<const List> list_;
};

// What Python's built-in functions make of values. `type_name` is for messages: "int", "str", ...
std::string type_name(const Value& value);
const Value& checked_number(const Value& value);  // Fault for other types
bool truthy(const Value& value);
bool is_iterable(const Value& value);
std::optional<size_t> length(const Value& value);  // nothing for what has no len()
std::string to_str(Heap& heap, const Value& value);
std::string repr(Heap& heap, const Value& value);
bool equals(Heap& heap, const Value& a, const Value& b);
// Throws Fault for types without an order.
std::partial_ordering compare(Heap& heap, const Value& a, const Value& b);
// The places of keys in ascending or descending order; equal ones stay as they are.
enum class Order : bool { kUp, kDown };
std::vector<size_t> sorted_places(Heap& heap, const std::vector<Value>& keys, Order order);
bool contains(Heap& heap, const Value& container, const Value& item);
// container[key], if there is such an item.
std::optional<Value> find_item(Heap& heap, const Value& container, const Value& key);
// Adds or replaces an entry.
void set_entry(Heap& heap, Entries& entries, Value key, Value value);
// `bounds`: start, stop, step; None where absent.
Value slice(Heap& heap, const Value& value, const Value (&bounds)[3]);

// A binary operator; those of a higher level bind tighter.
enum class Level : uint8_t { kComparison, kSum, kConcat, kProduct, kEnd };
struct Operator {
  std::string_view name;
  Level level;
  Value (*apply)(Heap& heap, const Value& a, const Value& b);
};
const Operator* find_operator(Level level, std::string_view name);

std::string escape_html(Heap& heap, std::string_view text);

}  // namespace cohort::jinja
