// Declarations that the parts of the extension module share. One file binds each area; docstrings
// say shapes, dtypes and errors.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>

#include "autograd/variable.h"
#include "text/json.h"

namespace cohort::python {

namespace nb = nanobind;

// Throws Error in a forked child of the process that imported the module: locks and threads of the
// parent do not work there.
void check_process();

enum class Access { kRead, kWrite };
// A view of the memory of a Tensor or an object with __dlpack__. Throws InputError for what a
// Tensor cannot view, and for read-only memory unless only read access is wanted.
Variable import_array(nb::handle array, Access access);

// An argument that import_array() accepts.
class Array : public nb::object {
 public:
  NB_OBJECT_DEFAULT(Array, nb::object, "typing.Any", is_array)
  static bool is_array(nb::handle h) {
    return nb::isinstance<Variable>(h) || nb::hasattr(h, "__dlpack__");
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

// A text in which bytes that are not UTF-8 become U+FFFD, as a model may write them.
nb::str text_of(const std::string& text);
// In a handler: throws a failed check of an op's arguments as InputError, and other errors as they
// are.
[[noreturn]] void rethrow_of_arguments(const Error& error);

// Parameters of functions for define(): a Variable is contiguous if no gradient is wanted, a
// Strided one is as it was passed, a MaybeVariable is undefined for None. A Tensor and a
// MaybeTensor are torch tensors, without a stream's order.
struct Strided : Variable {};
struct MaybeVariable : Variable {};
struct MaybeTensor : Tensor {};
// A view of a torch tensor, valid while the caller holds it. Throws InputError for other objects.
Tensor borrow_from_torch(nb::handle tensor);
// The stream on which torch enqueues work of the device now.
Stream torch_stream(nb::handle tensor, Device device);

template <class T>
struct Argument {
  using Type = T;
  static T of(const T& value) { return value; }
};
template <>
struct Argument<Variable> {
  using Type = Array;
  static Variable of(const Type& x) { return x.variable(); }
};
template <>
struct Argument<Strided> {
  using Type = Array;
  static Strided of(const Type& x) { return {import_array(x, Access::kRead)}; }
};
template <>
struct Argument<MaybeVariable> {
  using Type = std::optional<Array>;
  static MaybeVariable of(const Type& x) { return {x ? x->variable() : Variable()}; }
};
template <>
struct Argument<Tensor> {
  using Type = nb::handle;
  static Tensor of(Type x) { return borrow_from_torch(x); }
};
template <>
struct Argument<MaybeTensor> {
  using Type = std::optional<nb::handle>;
  static MaybeTensor of(Type x) { return {x ? borrow_from_torch(*x) : Tensor()}; }
};

// Binds fn as a function of arrays that runs while other Python threads run.
template <class R, class... T, class... Extra>
void define(nb::module_& m, const char* name, R (*fn)(T...), const Extra&... extra) {
  m.def(
      name,
      [fn](typename Argument<std::decay_t<T>>::Type... arguments) {
        std::tuple<std::decay_t<T>...> values{Argument<std::decay_t<T>>::of(arguments)...};
        try {
          return without_gil([&] { return std::apply(fn, values); });
        } catch (const Error& error) {
          rethrow_of_arguments(error);
        }
      },
      extra...);
}

// [B, T, H, D] as packed tokens [B T, H, D] of attention; others as they are. A view where the
// strides allow it and, on CUDA, the kernels' alignment of rows to 16 bytes; else a copy.
Tensor packed(const Tensor& t);
// `cu_seqlens`, or if it is undefined the offsets of a batch of equal sequences of `q`.
Tensor sequence_offsets(const Tensor& cu_seqlens, const Tensor& q);

// The dtype of a name such as "bfloat16". Throws InputError listing the names.
DType dtype_named(const std::string& name);

// cohort._json.dumps(value), which is YAML too.
std::string json_text(nb::handle value);
Json from_python(nb::handle value, const std::string& where);  // `where` names it in errors
nb::object to_python(const Json& value);

void bind_tensor(nb::module_& m);
void bind_elements(nb::class_<Variable>& tensor);  // a part of bind_tensor()
void bind_ops(nb::module_& m);
void bind_raw(nb::module_& m);  // the kernels that cohort.torch calls
void bind_model(nb::module_& m);
void bind_train(nb::module_& m);

}  // namespace cohort::python
