// The extension module cohort._cohort: errors, the fork check, texts and JSON of Python, and the
// parts in order.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>

#include <memory>
#include <typeinfo>

#include "apps/commands.h"
#include "core/device.h"
#include "core/log.h"
#include "core/text.h"
#include "python/bindings/bindings.h"

namespace cohort::python {
namespace {

bool g_is_forked = false;

void set_log_function(const nb::object& call) {
  logging::set_console_level(logging::Level::kNone);
  if (call.is_none()) return logging::set_observer({});
  const auto release = [](nb::object* object) {
    const nb::gil_scoped_acquire gil;
    delete object;
  };
  logging::set_observer([function = std::shared_ptr<nb::object>(new nb::object(call), release)](
                            logging::Level level, const std::string& text) {
    const nb::gil_scoped_acquire gil;
    try {
      (*function)(static_cast<int>(level), text_of(escape_controls(text)));
    } catch (nb::python_error& error) {
      if (error.matches(PyExc_KeyboardInterrupt)) return PyErr_SetInterrupt();
      error.discard_as_unraisable("cohort's log");
    }
  });
}

}  // namespace

nb::str text_of(const std::string& text) {
  return nb::steal<nb::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

std::string json_text(nb::handle value) {
  return nb::cast<std::string>(nb::module_::import_("cohort._json").attr("dumps")(value));
}

nb::object to_python(const Json& value) {
  return nb::module_::import_("json").attr("loads")(value.dump());
}

Json from_python(nb::handle value, const std::string& where) {
  return parse_json(json_text(value), where);
}

void rethrow_of_arguments(const Error& error) {
  const std::string message = error.what();  // "[matmul] expected ... (kernels/matmul.cpp:40)"
  const size_t place = message.rfind(" (");
  if (typeid(error) != typeid(Error) || !message.starts_with("[")) throw;
  const bool has_place = place != message.npos && message.find(".cpp:", place) != message.npos;
  throw InputError(message.substr(0, has_place ? place : message.npos));
}

void check_process() {
  if (g_is_forked)
    throw Error(
        "cohort: this process was forked from one that has imported cohort, whose threads and "
        "locks do not work here; hint: start workers with multiprocessing's 'spawn' method, or "
        "import cohort in the worker only");
}

NB_MODULE(_cohort, m) {
  nb::set_leak_warnings(false);  // threads may hold objects when the process ends
  m.attr("version") = COHORT_VERSION;
  pthread_atfork(nullptr, nullptr, [] { g_is_forked = true; });
  const nb::exception<Error> error(m, "Error", PyExc_RuntimeError);
  nb::exception<InputError>(m, "InputError", nb::make_tuple(error, nb::handle(PyExc_ValueError)));
  bind_tensor(m);
  nb::module_ ops = m.def_submodule("ops");
  bind_ops(ops);
  nb::delattr(m, "ops");  // cohort.ops has its functions, and its own stub
  bind_raw(m);
  bind_model(m);
  bind_train(m);
  m.def(
      "run_command",
      [](const std::vector<std::string>& program, const std::vector<nb::bytes>& arguments) {
        std::vector<std::string> texts;
        for (const nb::bytes& argument : arguments)
          texts.emplace_back(argument.c_str(), argument.size());
        logging::set_observer({});
        logging::set_console_level(logging::Level::kInfo);
        return without_gil([&] { return apps::run_command(program, texts); });
      },
      nb::arg("program"), nb::arg("arguments"), "`cohort ARGUMENT...`; the exit code.");
  m.def("set_log_function", &set_log_function, nb::arg("call").none(),
        "call(level, text) for each message; None: none are given any more.");
  m.def("cuda_device_count", &cuda_device_count,
        "Number of CUDA devices that this build can use; 0 for a CPU build.");
  m.def(
      "synchronize",
      [](const std::string& device) {
        const Device on = parse_device(device, "device");
        without_gil([&] { synchronize(on); });
      },
      nb::arg("device") = "cuda",
      "Blocks until the work enqueued on `device` by cohort is done. InputError for an unknown "
      "one.");
}

}  // namespace cohort::python
