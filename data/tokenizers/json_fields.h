// Reading the components of a tokenizer.json, with errors that name the place.
#pragma once

#include <iterator>
#include <string>

#include "core/config.h"
#include "data/json.h"

namespace cohort {

// The flag under `key`, or `otherwise` where there is none or null.
inline bool flag(const Json& json, const char* key, bool otherwise) {
  const Json* value = json.find(key);
  return value == nullptr || value->is_null() ? otherwise : value->as_bool();
}

inline std::string text_or(const Json& json, const char* key, const std::string& otherwise) {
  const Json* value = json.find(key);
  return value == nullptr || value->is_null() ? otherwise : value->as_string();
}

// The value under `key`, null if there is none.
inline const Json& value_or_null(const Json& json, const char* key) {
  static const Json null;
  const Json* value = json.find(key);
  return value == nullptr ? null : *value;
}

// A component's steps call each other, and each may pass over the whole text.
inline void check_steps(size_t steps) {
  constexpr size_t kMaxSteps = 64;
  if (steps > kMaxSteps)
    throw InputError(str("a sequence of ", steps, " steps; at most ", kMaxSteps, " are allowed"));
}

// use(), with the place before the message of an InputError.
template <class Use>
auto in_place(const std::string& place, const Use& use) {
  try {
    return use();
  } catch (const InputError& e) {
    throw InputError(place + ": " + e.what());
  }
}

// The entry of a table for the component's "type". `what` names the kind of component.
template <class Entry, size_t N>
const Entry& find_component(const Json& json, const char* what, const Entry (&table)[N]) {
  const std::string& type = json.at("type").as_string();
  std::string known;
  for (const Entry& entry : table) {
    if (type == entry.type) return entry;
    known += (known.empty() ? "" : ", ") + std::string(entry.type);
  }
  throw InputError(str("unknown ", what, " '", type, "'; known: ", known));
}

}  // namespace cohort
