// The values of a template: Python's None, bool, int, float, str, list, tuple, dict and functions,
// and Jinja's undefined, namespace and loop. Containers are shared and never change, but for
// namespaces and loops.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "data/chat_template.h"

namespace cohort::jinja {

// What a template has done wrong. The place is added where the error leaves the engine.
class Fault : public std::runtime_error {
 public:
  static constexpr size_t kHere = static_cast<size_t>(-1);  // where the interpreter is
  explicit Fault(const std::string& message, size_t at = kHere)
      : std::runtime_error(message), at(at) {}
  size_t at;  // byte of the source
};

// What a rendering has used of its limits.
class Budget {
 public:
  explicit Budget(const RenderLimits& limits) : limits_(limits) {}
  // Throws Fault beyond the limit. To be called before the work is done.
  void work(size_t steps);
  // Memory of a value, until it is given back.
  void take(size_t bytes);
  void give_back(size_t bytes) { memory_ -= static_cast<int64_t>(bytes); }
  // Makes one text longer.
  void append(std::string& out, std::string_view piece);
  void append(std::string& out, size_t count, char c);

 private:
  RenderLimits limits_;
  int64_t steps_ = 0, memory_ = 0;
};

// Bytes taken from a budget for as long as the object lives.
class Charge {
 public:
  Charge(Budget* budget, size_t bytes) : budget_(budget), bytes_(bytes) {
    if (budget_ != nullptr) budget_->take(bytes_);
  }
  ~Charge() {
    if (budget_ != nullptr) budget_->give_back(bytes_);
  }
  Charge(const Charge&) = delete;
  Charge& operator=(const Charge&) = delete;

 private:
  Budget* budget_;
  size_t bytes_;
};

struct Text;
struct Sequence;
struct Dict;
struct Namespace;
struct Callable;
struct Loop;

struct Undefined {
  std::shared_ptr<const std::string> why;  // null: an argument that was not given
};
struct None {};

class Value {
 public:
  using Storage = std::variant<Undefined, None, bool, int64_t, double, std::shared_ptr<const Text>,
                               std::shared_ptr<const Sequence>, std::shared_ptr<const Dict>,
                               std::shared_ptr<Namespace>, std::shared_ptr<const Callable>,
                               std::shared_ptr<Loop>>;
  Value() = default;  // absent: an argument that was not given
  explicit Value(Storage storage) : storage_(std::move(storage)) {}
  static Value undefined(std::string why);
  static Value none() { return Value(None{}); }

  bool absent() const { return is_undefined() && std::get<Undefined>(storage_).why == nullptr; }
  bool is_undefined() const { return std::holds_alternative<Undefined>(storage_); }
  bool is_none() const { return std::holds_alternative<None>(storage_); }
  bool is_bool() const { return std::holds_alternative<bool>(storage_); }
  bool is_int() const { return std::holds_alternative<int64_t>(storage_); }  // a bool is none
  bool is_float() const { return std::holds_alternative<double>(storage_); }
  bool is_integral() const { return is_int() || is_bool(); }
  bool is_number() const { return is_integral() || is_float(); }

  // nullptr for other kinds.
  const Text* text() const { return pointer<const Text>(); }
  const Sequence* sequence() const { return pointer<const Sequence>(); }
  const Dict* dict() const { return pointer<const Dict>(); }
  Namespace* ns() const { return pointer<Namespace>(); }
  const Callable* callable() const { return pointer<const Callable>(); }
  Loop* loop() const { return pointer<Loop>(); }

  int64_t integer() const;  // of an integral value
  double number() const;    // of a number
  // Of an undefined value.
  std::string why() const;
  // Whether both are one and the same object, or equal scalars of one type.
  bool same(const Value& other) const;

 private:
  template <class T>
  T* pointer() const {
    const auto* p = std::get_if<std::shared_ptr<T>>(&storage_);
    return p == nullptr ? nullptr : p->get();
  }
  Storage storage_;
};

struct Text {
  Text(std::string text, bool markup, Budget* budget);
  std::string bytes;  // UTF-8
  size_t length;      // characters
  bool markup;        // escaped HTML: + escapes what it is joined with
  Charge charge;
};

enum class Flavor { kList, kTuple, kGroup, kRange, kKeys, kValues, kItems, kIterator };

struct Sequence {
  Sequence(Flavor flavor, std::vector<Value> items, Budget* budget);
  Flavor flavor;
  std::vector<Value> items;
  int depth;                     // containers inside each other
  mutable bool used_up = false;  // an iterator gives its items once
  Charge charge;
};

using DictItems = std::vector<std::pair<Value, Value>>;
struct Dict {
  Dict(DictItems items, Budget* budget);
  DictItems items;
  int depth;
  Charge charge;
};

struct Namespace {
  DictItems attributes;  // keys are texts
};

struct Stmt;
class Interpreter;

// The arguments of a call. Natives get `values` bound to their parameters: [0] is the value that is
// filtered or tested, or whose method it is, and what was not given is absent.
struct Args {
  std::vector<Value> values;
  std::vector<std::pair<std::string, Value>> keywords;
};

// A filter, test, method or global function.
struct Native {
  std::string_view name;
  // Names of the parameters; those after '|' may be left out. "...": whatever comes, not bound.
  std::string_view parameters;
  Value (*call)(Interpreter& in, const Args& args);
};

struct Scope {
  std::unordered_map<std::string_view, Value> variables;  // names live in the source or the context
  std::shared_ptr<Scope> parent;
};

struct Callable {
  const Native* native = nullptr;  // with the value whose method it is
  Value self;
  const Stmt* macro = nullptr;  // with the scope that it was defined in
  std::shared_ptr<Scope> scope;
};

// `loop` inside a {% for %}. Items are drawn one by one: a condition of the loop may depend on what
// its body has done.
struct Loop {
  std::vector<Value> items;
  size_t next = 0;
  bool drained = false;                      // all items have passed the condition
  std::function<bool(const Value&)> accept;  // the loop's condition, if any
  std::optional<Value> before, current, after;
  std::optional<std::vector<Value>> last_changed;
  std::optional<int64_t> length;
  int64_t index0 = -1, depth0 = 0;
  const Stmt* recursive = nullptr;
  std::shared_ptr<Scope> scope;  // outside the loop; for recursion
  std::unique_ptr<Charge> charge;

  std::optional<Value> draw();
  bool advance();
  const std::optional<Value>& peek();
  int64_t count();
};

Value make_text(Budget& budget, std::string bytes, bool markup = false);
Value make_list(Budget& budget, std::vector<Value> items, Flavor flavor = Flavor::kList);
Value make_dict(Budget& budget, DictItems items);
// A value of a context, which is not counted.
Value from_json(const Json& json);

}  // namespace cohort::jinja
