// Python objects as Json, and the other way round, through their text.
#include "text/json.h"

#include <nanobind/stl/string.h>

#include "python/bindings/bindings.h"

namespace cohort::python {

std::string json_text(nb::handle value) {
  const nb::object dumps = nb::module_::import_("json").attr("dumps");
  return nb::cast<std::string>(dumps(value, nb::arg("ensure_ascii") = false));
}

nb::object to_python(const Json& value) {
  return nb::module_::import_("json").attr("loads")(value.dump());
}

Json from_python(nb::handle value, const std::string& where) {
  return parse_json(json_text(value), where);
}

}  // namespace cohort::python
