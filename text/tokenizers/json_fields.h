// Reading the components of a tokenizer.json, with errors that name the component.
#pragma once

#include <iterator>
#include <string>

#include "text/json.h"

namespace cohort {

// The flag under `key`, or `otherwise` if it is missing or null.
inline bool flag(const Json& json, const char* key, bool otherwise) {
  const Json* value = json.find(key);
  return value == nullptr || value->is_null() ? otherwise : value->as_bool();
}

inline std::string text_or(const Json& json, const char* key, const std::string& otherwise) {
  const Json* value = json.find(key);
  return value == nullptr || value->is_null() ? otherwise : value->as_string();
}

// The value under `key`, or null if it is missing.
inline const Json& value_or_null(const Json& json, const char* key) {
  static const Json null;
  const Json* value = json.find(key);
  return value == nullptr ? null : *value;
}

// Limits the steps of a component, which are nested calls that may each process the whole text.
inline void check_steps(size_t steps) {
  constexpr size_t kMaxSteps = 64;
  if (steps > kMaxSteps)
    throw InputError(str("a sequence of ", steps, " steps; at most ", kMaxSteps, " are allowed"));
}

// Calls fn() and prefixes the message of an InputError with "CONTEXT: ", except for errors of
// accessors, which get their place from with_places().
template <class F>
auto with_context(const std::string& context, const F& fn) {
  try {
    return fn();
  } catch (const JsonError&) {
    throw;
  } catch (const InputError& e) {
    throw InputError(context + ": " + e.what());
  }
}

// The entry of a table for the component's "type". `kind` names the kind of component in errors.
template <class Entry, size_t N>
const Entry& find_component(const Json& json, const char* kind, const Entry (&table)[N]) {
  const std::string& type = json.at("type").as_string();
  std::string known;
  for (const Entry& entry : table) {
    if (type == entry.type) return entry;
    known += (known.empty() ? "" : ", ") + std::string(entry.type);
  }
  throw InputError(str("unknown ", kind, " '", type, "'; known: ", known));
}

}  // namespace cohort
