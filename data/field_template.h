// Texts over the fields of a JSON object: "{numbers} = {target}\n".
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "text/json.h"

namespace cohort {

// "{name}" is a field, "{question|problem}" the first of these that the object has, "{{" and "}}"
// are braces.
class FieldTemplate {
 public:
  using ValueText = std::function<std::string(const Json&)>;
  // The end of the message of a missing field, given the names of those that there are.
  using MissingHint = std::function<std::string(
      const std::string& field, const std::vector<std::string>& present, const Json& fields)>;
  // `key`: the configuration key, for messages. Throws InputError for braces that do not match.
  FieldTemplate(const char* key, const std::string& text, MissingHint hint = {});
  // `where`: file and line of `fields`. Throws InputError for a field that is missing.
  std::string render(const Json& fields, const std::string& where,
                     const ValueText& text_of = &Json::to_text) const;

 protected:
  struct Piece {
    std::string literal, field;  // the field follows the literal; "": no field
  };
  // Value of the first of the names in "question|problem" that the object has, and not as null
  // unless all of them are.
  const Json& value_of(const std::string& names, const Json& fields,
                       const std::string& where) const;

  const char* const key_;
  std::vector<Piece> pieces_;

 private:
  const MissingHint hint_;
};

}  // namespace cohort
