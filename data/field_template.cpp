#include "data/field_template.h"

#include <algorithm>

#include "core/text.h"

namespace cohort {

FieldTemplate::FieldTemplate(const char* key, const std::string& text, MissingHint hint)
    : key_(key), hint_(std::move(hint)) {
  const auto fail = [&](const char* error) {
    throw InputError(str(key, ": ", error, " in '", text,
                         "'; hint: write {name} for a field, and {{ or }} for a brace"));
  };
  std::string literal;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if ((c == '{' || c == '}') && i + 1 < text.size() && text[i + 1] == c) {
      literal += text[i++];
    } else if (c == '{') {
      const size_t end = text.find_first_of("{}", i + 1);
      if (end == text.npos || text[end] != '}' || end == i + 1) fail("'{' opens no field");
      pieces_.push_back({std::move(literal), text.substr(i + 1, end - i - 1)});
      literal.clear();
      i = end;
    } else if (c == '}') {
      fail("'}' closes no field");
    } else {
      literal += c;
    }
  }
  pieces_.push_back({std::move(literal), ""});
}

std::string FieldTemplate::render(const Json& fields, const std::string& where,
                                  const ValueText& text_of) const {
  std::string text;
  for (const Piece& piece : pieces_) {
    text += piece.literal;
    if (piece.field.empty()) continue;
    text += text_of(value_of(piece.field, fields, where));
  }
  return text;
}

const Json& FieldTemplate::value_of(const std::string& names, const Json& fields,
                                    const std::string& where) const {
  const Json* found = nullptr;
  for (size_t begin = 0; begin <= names.size() && (found == nullptr || found->is_null());) {
    const size_t end = std::min(names.find('|', begin), names.size());
    if (const Json* value = fields.find(names.substr(begin, end - begin))) found = value;
    begin = end + 1;
  }
  if (found != nullptr) return *found;
  std::vector<std::string> present;
  for (const auto& [name, value] : fields.as_object()) present.push_back(name);
  throw InputError(
      str(where, ": no field '", names, "', which the ", key_, " template needs",
          hint_ ? hint_(names, present, fields)
                : did_you_mean(names, present, "; fields here: " + join(present, ", "))));
}

}  // namespace cohort
