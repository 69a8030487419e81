// Declarations that the parts of the extension module share. One file binds each area; docstrings
// say shapes, dtypes and errors.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

#include "autograd/variable.h"

namespace cohort::python {

namespace nb = nanobind;

// Throws Error in a forked child of the process that imported the module: locks and threads of the
// parent do not work there.
void check_process();

enum class Access { kRead, kWrite };
// A view of an array's memory: a Tensor, an object with __dlpack__, or a DLPack capsule whose
// memory this thread's current stream may use already. Throws InputError for what a Tensor cannot
// view, and for read-only memory unless only read access is wanted.
Variable import_array(nb::handle array, Access access);

// An argument that import_array() accepts.
class Array : public nb::object {
 public:
  NB_OBJECT_DEFAULT(Array, nb::object, "typing.Any", is_array)
  static bool is_array(nb::handle h) {
    return nb::isinstance<Variable>(h) || PyCapsule_CheckExact(h.ptr()) != 0 ||
           nb::hasattr(h, "__dlpack__");
  }
  // Contiguous if no gradient is wanted.
  Variable variable() const {
    Variable v = import_array(*this, Access::kRead);
    return v.requires_grad() || v.value().is_contiguous() ? v : Variable(v.value().contiguous());
  }
};

// fn() while other Python threads run.
template <class F>
auto without_gil(F&& fn) {
  check_process();
  const nb::gil_scoped_release release;
  return fn();
}

void bind_tensor(nb::module_& m);
void bind_ops(nb::module_& m);
void bind_raw(nb::module_& m);  // the kernels that cohort.torch calls

}  // namespace cohort::python
