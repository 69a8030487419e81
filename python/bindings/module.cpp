// The extension module cohort._cohort: errors, the fork check, and the parts in order.
#include <nanobind/stl/string.h>
#include <pthread.h>

#include "core/device.h"
#include "python/bindings/bindings.h"

namespace cohort::python {
namespace {

bool g_is_forked = false;

}  // namespace

void check_process() {
  if (g_is_forked)
    throw Error(
        "cohort: this process was forked from one that has imported cohort, whose threads and "
        "locks do not work here; hint: start workers with multiprocessing's 'spawn' method, or "
        "import cohort in the worker only");
}

NB_MODULE(_cohort, m) {
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
