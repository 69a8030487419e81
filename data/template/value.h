// The values of a template: Python's None, bool, int, float, str, list, tuple, dict and functions,
// and Jinja's undefined, namespace and loop. All but the last two never change.
#pragma once

#include <compare>
#include <cstdint>
#include <deque>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
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

struct List;
struct Dict;
struct Scope;
struct Loop;
struct Function;
struct Native;
struct Macro;

struct Undefined {
  bool operator==(const Undefined&) const { return true; }
  std::string_view why;  // empty: an argument that was not given
};
struct None {
  bool operator==(const None&) const = default;
};

using Alternatives = std::variant<Undefined, None, bool, int64_t, double, std::string_view,
                                  const List*, const Dict*, Scope*, Loop*, const Function*>;

// Small, and copied freely. What it refers to belongs to the Heap that made it, to the template's
// source or to the context, and outlives the rendering. == tells whether two are one object, or
// equal scalars of one type.
struct Value : Alternatives {
  Value() = default;
  // Of no std::string, whose bytes nobody would keep.
  template <class T>
  requires(std::is_constructible_v<Alternatives, T> &&
           !std::is_same_v<std::remove_cvref_t<T>, std::string>) Value(T&& value)
      : Alternatives(std::forward<T>(value)) {}

  template <class T>
  bool is() const {
    return std::holds_alternative<T>(*this);
  }
  // T() for other types: nullptr, or an empty text.
  template <class T>
  T as() const {
    const T* value = std::get_if<T>(this);
    return value == nullptr ? T() : *value;
  }
  bool absent() const { return is<Undefined>() && as<Undefined>().why.empty(); }
  bool given() const { return !absent() && !is<None>(); }
  bool is_text() const { return is<std::string_view>(); }
  std::string_view text() const { return as<std::string_view>(); }
  const List* list() const { return as<const List*>(); }
  const Dict* dict() const { return as<const Dict*>(); }
  bool is_integral() const { return is<int64_t>() || is<bool>(); }
  bool is_number() const { return is_integral() || is<double>(); }
  int64_t integer() const { return is<bool>() ? as<bool>() : as<int64_t>(); }
  double number() const { return is<double>() ? as<double>() : static_cast<double>(integer()); }
};

inline Value make_int(size_t n) {
  return static_cast<int64_t>(n);
}

enum class Flavor : uint8_t { kList, kTuple, kRange, kKeys, kValues, kItems, kGenerator };

struct List {
  std::vector<Value> items;
  Flavor flavor = Flavor::kList;
  mutable bool used_up = false;  // a generator gives its items once
};

using Entries = std::vector<std::pair<Value, Value>>;
struct Dict {
  Entries entries;
};

// The variables of a part of the template; without a parent, a namespace.
struct Scope {
  Value* find(std::string_view name);  // nullptr: there is none of that name

  Scope* parent = nullptr;
  std::vector<std::pair<std::string_view, Value>> variables = {};
  bool is_shared = false;  // with a macro, which may be called later
};

struct Loop {
  const std::vector<Value>& items;
  size_t index = 0;
  Value last_changed = {};  // the arguments of loop.changed()
};

// A native with the value whose method it is, or a macro with the scope that it was defined in.
struct Function {
  const Native* native = nullptr;
  Value self = {};
  const Macro* macro = nullptr;
  Scope* scope = nullptr;
};

// All that a template makes, until the end of the rendering, and what it has used of its limits.
// Every 16 bytes are a step, so that the limit of steps is one of memory too.
class Heap {
 public:
  explicit Heap(const RenderLimits& limits) : limits_(limits) {}

  // Throws Fault beyond the limit; called before the work is done.
  void work(size_t steps);
  // For a search of a part in a text, which may take time in proportion to both.
  void work_for_search(std::string_view text, std::string_view part) {
    work((1 + text.size() / 64) * (1 + part.size() / 64));
  }
  void append(std::string& out, std::string_view piece, size_t times = 1);

  template <class T>
  T* make(T object) {
    work(1 + sizeof(T) / 16);
    return &std::get<std::deque<T>>(objects_).emplace_back(std::move(object));
  }
  Value text(std::string bytes);
  Value list(std::vector<Value> items, Flavor flavor = Flavor::kList);
  Value dict(Entries entries);
  Value undefined(std::string why) { return Undefined{text(std::move(why)).text()}; }
  Value from_json(const Json& json);  // which must outlive the value

 private:
  friend class Nested;
  RenderLimits limits_;
  int64_t steps_ = 0;
  int depth_ = 0;
  std::tuple<std::deque<std::string>, std::deque<List>, std::deque<Dict>, std::deque<Scope>,
             std::deque<Loop>, std::deque<Function>>
      objects_;
};

// One more evaluation inside others, which are recursive here too. Throws Fault beyond the limit.
class Nested {
 public:
  explicit Nested(Heap& heap);
  ~Nested() { --heap_.depth_; }
  Nested(const Nested&) = delete;
  Nested& operator=(const Nested&) = delete;

 private:
  Heap& heap_;
};

// What Python's built-in functions make of values. All throw Fault where Python raises an error.
std::string type_name(const Value& value);  // for messages: "int", "str", ...
void check_defined(const Value& value);
// The value, if it `fits`. Throws Fault: "expected NOUN, got TYPE", or why it is undefined.
const Value& checked(const Value& value, bool fits, const char* noun);
bool truthy(const Value& value);
bool is_iterable(const Value& value);
std::optional<size_t> length(const Value& value);  // nothing for what has no len()
// The items, keys or characters of a value.
const std::vector<Value>& items_of(Heap& heap, const Value& value);
bool equals(Heap& heap, const Value& a, const Value& b);
std::partial_ordering compare(Heap& heap, const Value& a, const Value& b);
// By the first of each pair; equal ones stay as they are.
void sort_entries(Heap& heap, Entries& entries);
bool contains(Heap& heap, const Value& container, const Value& item);
// container[key], if there is such an item.
std::optional<Value> find_item(Heap& heap, const Value& container, const Value& key);
// Adds or replaces an entry.
void set_entry(Heap& heap, Entries& entries, const Value& key, const Value& value);
// `bounds`: start, stop, step; None where absent.
Value slice(Heap& heap, const Value& value, const Value (&bounds)[3]);

// A binary operator; those of a higher level bind tighter.
enum class Level : uint8_t { kOr, kAnd, kNot, kComparison, kSum, kConcat, kProduct, kEnd };
struct Operator {
  std::string_view name;
  Level level;
  Value (*apply)(Heap& heap, const Value& a, const Value& b);  // nullptr: `or` and `and`
};
const Operator* find_operator(Level level, std::string_view name);
// With a name that there is.
Value operate(Heap& heap, Level level, std::string_view name, const Value& a, const Value& b);

}  // namespace cohort::jinja
