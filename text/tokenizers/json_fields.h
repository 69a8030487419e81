// Reading JSON files, such as the components of a tokenizer.json, with errors that name the file
// and the component.
#pragma once

#include <string>

#include "sys/input_file.h"
#include "text/json.h"
#include "text/utf8.h"

namespace cohort {

// The flag under `key`, or `otherwise` if it is missing or null.
inline bool flag(const Json& json, const char* key, bool otherwise) {
  const Json& value = json.get_or_null(key);
  return value.is_null() ? otherwise : value.as_bool();
}

inline std::string text_or(const Json& json, const char* key, const std::string& otherwise) {
  const Json& value = json.get_or_null(key);
  return value.is_null() ? otherwise : value.as_string();
}

// The object in a file, which errors call `where`; an empty one if there is no such file.
inline Json read_object(const NamedFiles& files, const std::string& name,
                        const std::string& where) {
  const std::string* text = find_file(files, name);
  if (text == nullptr) return Json::Object{};
  Json json = parse_json(*text, where);
  if (!json.is_object()) throw InputError(where + ": expected an object");
  return json;
}

// The only character of the text of a field.
inline char32_t only_character(const char* field, const std::string& text) {
  const Utf8Char c = decode_utf8(text, 0);
  if (c.size == 0 || c.size != text.size())
    throw InputError(str(field, " must be one character, got ", excerpt(text)));
  return c.code;
}

// Limits the steps of a component, which are nested calls that may each process the whole text.
inline void check_steps(size_t steps) {
  constexpr size_t kMaxSteps = 64;
  if (steps > kMaxSteps)
    throw InputError(str("a sequence of ", steps, " steps; at most ", kMaxSteps, " are allowed"));
}

// Calls read(). InputErrors whose message does not begin with `path`, of a file or a place in it,
// get it as their location.
template <class Read>
auto with_path(const std::string& path, const Read& read) {
  try {
    return read();
  } catch (const InputError& e) {
    const std::string message = e.what();
    throw InputError(message.starts_with(path) ? message : str(path, ": ", message));
  }
}

// Calls fn() and prefixes the message of an InputError with "CONTEXT: ", except for errors of
// accessors, which get their location from with_location().
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

// A row of a table of components: a "type", and the function that reads such a component.
template <class Function>
struct Component {
  const char* type;
  Function* read;
};

// The function of a table for the component's "type". `kind` names the kind of component in errors.
template <class Function, size_t N>
Function& find_component(const Json& json, const char* kind,
                         const Component<Function> (&table)[N]) {
  const std::string& type = json.at("type").as_string();
  std::string known;
  for (const Component<Function>& component : table) {
    if (type == component.type) return *component.read;
    known += (known.empty() ? "" : ", ") + std::string(component.type);
  }
  throw InputError(str("unknown ", kind, " '", type, "'; known: ", known));
}

}  // namespace cohort
