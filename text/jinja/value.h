// The values of a template: Python's None, bool, int, float, str, list, tuple, dict and functions,
// and Jinja's undefined, namespace and loop. Only namespaces and loops are mutable.
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
#include "core/non_copyable.h"
#include "text/chat_template.h"

namespace cohort::jinja {

// An error in a template, at compile time or while rendering.
class TemplateError : public std::runtime_error {
 public:
  static constexpr size_t kUnknown = static_cast<size_t>(-1);  // until a caller sets it
  explicit TemplateError(const std::string& message, size_t at = kUnknown)
      : std::runtime_error(message), at(at) {}
  size_t at;  // byte offset in the source
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
  std::string_view why;  // the message; empty: an omitted argument
};
struct None {
  bool operator==(const None&) const = default;
};

// A whole number beyond 64 bits: it is printed and compared, and refused in arithmetic.
struct BigInteger {
  bool operator==(const BigInteger&) const = default;
  std::string_view digits;
};

using Alternatives =
    std::variant<Undefined, None, bool, int64_t, double, std::string_view, const List*, const Dict*,
                 Scope*, Loop*, const Function*, BigInteger>;

// A small value that is copied freely. The objects it refers to belong to the Heap that made it, to
// the template's source or to the context, and outlive the rendering. == is true for references to
// one object and for equal scalars of one type.
struct Value : Alternatives {
  Value() = default;
  // Excludes std::string: a Value does not own bytes.
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
  bool is_big() const { return is<BigInteger>(); }
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
  mutable bool exhausted = false;  // a generator yields its items once
};

using Entries = std::vector<std::pair<Value, Value>>;
struct Dict {
  Entries entries;
};

// The variables of a scope of the template. A namespace is a scope without a parent.
struct Scope {
  Value* find(std::string_view name);  // nullptr if not found

  Scope* parent = nullptr;
  std::vector<std::pair<std::string_view, Value>> variables = {};
  bool is_shared = false;  // captured by a macro, which may be called later
};

struct Loop {
  const std::vector<Value>& items;
  size_t index = 0;
  Value last_changed = {};  // the arguments of loop.changed()
};

// A native bound to the value whose method it is, or a macro with its defining scope.
struct Function {
  const Native* native = nullptr;
  Value self = {};
  const Macro* macro = nullptr;
  Scope* scope = nullptr;
};

// Owns the objects of one rendering, and counts its use of the limits. Every 16 bytes count as a
// step, so the limit on steps bounds memory too.
class Heap {
 public:
  explicit Heap(const RenderLimits& limits) : limits_(limits) {}

  // Charges `steps` before the work is done. Throws TemplateError beyond the limit.
  void work(size_t steps);
  // Charges a search of `part` in `text`, whose time may be proportional to both lengths.
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
  Value from_json(const Json& json);  // `json` must outlive the value

 private:
  friend class Nested;
  RenderLimits limits_;
  int64_t steps_ = 0;
  int depth_ = 0;
  std::tuple<std::deque<std::string>, std::deque<List>, std::deque<Dict>, std::deque<Scope>,
             std::deque<Loop>, std::deque<Function>>
      objects_;
};

// Counts a nested evaluation, which recurses on the C++ stack. Throws TemplateError beyond the
// limit.
class Nested : NonCopyable {
 public:
  explicit Nested(Heap& heap);
  ~Nested() { --heap_.depth_; }

 private:
  Heap& heap_;
};

// Python's built-in functions on values. All throw TemplateError where Python raises an error.
std::string type_name(const Value& value);  // for messages: "int", "str", ...
void check_defined(const Value& value);
// Returns the value if it `fits`. Throws TemplateError: "expected NOUN, got TYPE", or the message
// of an undefined value.
const Value& checked(const Value& value, bool fits, const char* noun);
bool truthy(const Value& value);
bool is_iterable(const Value& value);
std::optional<size_t> length(const Value& value);  // nullopt if the type has no len()
// The items, keys or characters of a value.
const std::vector<Value>& items_of(Heap& heap, const Value& value);
bool equals(Heap& heap, const Value& a, const Value& b);
std::partial_ordering compare(Heap& heap, const Value& a, const Value& b);
// Stable sort by the first of each pair.
void sort_entries(Heap& heap, Entries& entries);
bool contains(Heap& heap, const Value& container, const Value& item);
// container[key]; nullopt if there is no such item.
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
// `name` must be an operator of `level`.
Value operate(Heap& heap, Level level, std::string_view name, const Value& a, const Value& b);

}  // namespace cohort::jinja
