// What Python's operators and built-in functions do with values.
#pragma once

#include <compare>
#include <optional>
#include <string>
#include <vector>

#include "data/template/ast.h"
#include "data/template/value.h"

namespace cohort::jinja {

class Interpreter;

// For messages: "int", "str", "list", ...
std::string type_name(const Value& value);

bool truthy(const Value& value);
std::string to_str(Budget& budget, const Value& value);
std::string repr(Budget& budget, const Value& value);
std::string float_repr(double value);

bool equals(Budget& budget, const Value& a, const Value& b);
// Throws Fault for types without an order.
std::partial_ordering compare(Budget& budget, const Value& a, const Value& b);
bool compare(Interpreter& in, Op op, const Value& a, const Value& b);

bool is_iterable(const Value& value);
// The items, keys or characters. Throws Fault for what is not iterable.
std::vector<Value> iterate(Budget& budget, const Value& value);
// nullopt for what has no len().
std::optional<int64_t> length(const Value& value);
bool contains(Budget& budget, const Value& container, const Value& item);

// container[key]; nullopt if there is no such item, or `container` takes no such key.
std::optional<Value> find_item(Budget& budget, const Value& container, const Value& key);
Value slice(Budget& budget, const Value& value, const Value& start, const Value& stop,
            const Value& step);
// Adds or replaces an entry.
void set_entry(Budget& budget, DictItems& items, Value key, Value value);

Value binary(Interpreter& in, Op op, const Value& a, const Value& b);
Value unary(Op op, const Value& value);

std::string escape_html(Budget& budget, std::string_view text);

}  // namespace cohort::jinja
