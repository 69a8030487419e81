// Python objects as Json, and the other way round, through their text.
#include "text/json.h"

#include <nanobind/stl/string.h>

#include "python/bindings/bindings.h"

namespace cohort::python {

std::string json_text(nb::handle value) {
  return nb::cast<std::string>(nb::module_::import_("cohort._json").attr("dumps")(value));
}

nb::object to_python(const Json& value) {
  return nb::module_::import_("json").attr("loads")(value.dump());
}

Json from_python(nb::handle value, const std::string& where) {
  return parse_json(json_text(value), where);
}

}  // namespace cohort::python
