// cohort.Tensor as Python's sequences and numbers: indexing, arithmetic, and elements as values.
#include <nanobind/stl/string.h>

#include <utility>
#include <vector>

#include "autograd/ops.h"
#include "python/bindings/bindings.h"

namespace cohort::python {
namespace {

// The other side of an operator: a scalar or an array.
class Operand : public nb::object {
 public:
  NB_OBJECT_DEFAULT(Operand, nb::object, "typing.Any", is_operand)
  static bool is_operand(nb::handle h) {
    return Array::is_array(h) || PyNumber_Check(h.ptr()) != 0;
  }
};

// `other` with the shape of `t`, which has a scalar in every element.
Variable operand_of(const Tensor& t, const Operand& other) {
  if (!is_float(t.dtype()))
    throw InputError(str("Tensor: arithmetic needs a float type, got ", t.str(),
                         "; hint: t.to(\"float32\"), or t.numpy() for integers"));
  Variable x;
  if (Array::is_array(other)) {
    x = nb::cast<Array>(other).variable();
    const Tensor& array = x.value();
    if (array.shape() == t.shape() && array.dtype() == t.dtype() && array.device() == t.device())
      return x;
    if (array.rank() > 0 || x.requires_grad())
      throw InputError(str(
          "Tensor: arithmetic needs scalars, or arrays of one shape, dtype and "
          "device, got ",
          t.str(), " and ", array.str(), "; hint: t.to(...) converts; numpy broadcasts t.numpy()"));
  }
  const double scalar =
      x.defined() ? x.value().item() : nb::cast<double>(nb::float_(nb::handle(other)));
  return without_gil(
      [&] { return Variable(Tensor::full(t.shape(), scalar, t.dtype(), t.device())); });
}

void bind_operators(nb::class_<Variable>& tensor) {
  using BinaryOp = Variable (*)(const Variable&, const Variable&);
  constexpr std::pair<const char*, BinaryOp> kOps[] = {
      {"add__", &add}, {"sub__", &sub}, {"mul__", &mul}, {"truediv__", &div}};
  for (const auto& [name, op] : kOps)
    for (const bool reflected : {false, true})
      tensor.def(
          str(reflected ? "__r" : "__", name).c_str(),
          [op, reflected](const Array& self, const Operand& other) {
            const Variable x = self.variable(), y = operand_of(x.value(), other);
            return without_gil([&] { return reflected ? op(y, x) : op(x, y); });
          },
          nb::is_operator(), nb::arg("other"));
  tensor.def("__neg__", [](const Array& self) {
    const Variable x = self.variable();
    return without_gil([&] { return neg(x); });
  });
  tensor.attr("__array_priority__") = 1000;  // array * tensor is the tensor's product
  for (const char* name : {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"})
    tensor.def(
        name,
        [](const Variable& v, const Operand&) -> bool {
          throw InputError(str("Tensor: ", v.value().str(),
                               " is not compared by value; hint: compare t.numpy() or t.item(); "
                               "`is` tells if two names have the same tensor"));
        },
        nb::is_operator(), nb::arg("other"));
  tensor.def("__hash__",
             [](nb::handle self) { return reinterpret_cast<intptr_t>(self.ptr()) >> 4; });
}

// Sizes, strides and offset of a view, in elements.
struct Part {
  Shape shape, strides;
  int64_t offset = 0;

  void keep(int64_t size, int64_t stride) {
    shape.push_back(size);
    strides.push_back(stride);
  }
  Tensor of(const Tensor& t) const {
    const int64_t bytes =
        shape.numel() == 0 ? 0 : offset * static_cast<int64_t>(dtype_size(t.dtype()));
    return Tensor::borrow(
        static_cast<char*>(const_cast<void*>(t.raw())) + bytes, [t] {}, shape, strides, t.dtype(),
        t.device());
  }
};

int64_t position_of(nb::handle index, const Tensor& t, int dim) {
  if (PyIndex_Check(index.ptr()) == 0 || PyBool_Check(index.ptr()) || Array::is_array(index))
    throw InputError(str("Tensor: expected integers, slices and ... as an index, got ",
                         nb::type_name(index.type()).c_str(),
                         "; hint: ops.embedding(t, ids) takes rows, t.numpy() other indices"));
  const Py_ssize_t i = PyNumber_AsSsize_t(index.ptr(), PyExc_IndexError);
  if (i == -1 && PyErr_Occurred() != nullptr) nb::raise_python_error();
  const int64_t size = t.dim(dim);
  if (i < -size || i >= size)
    throw nb::index_error(
        str("index ", i, " is out of range for dimension ", dim, " of ", t.str()).c_str());
  return i < 0 ? i + size : i;
}

Part part_of(const Tensor& t, nb::handle key) {
  const nb::tuple items =
      nb::isinstance<nb::tuple>(key) ? nb::borrow<nb::tuple>(key) : nb::make_tuple(key);
  int skipped = t.rank() - static_cast<int>(nb::len(items));
  bool has_ellipsis = false;
  for (const nb::handle item : items)
    if (nb::isinstance<nb::ellipsis>(item)) {
      if (std::exchange(has_ellipsis, true)) throw nb::index_error("an index has one ... at most");
      ++skipped;
    }
  if (skipped < 0)
    throw nb::index_error(str("the index has more dimensions than ", t.str()).c_str());
  Part out;
  int dim = 0;
  const auto keep_skipped = [&] {
    for (const int end = dim + skipped; dim < end; ++dim) out.keep(t.dim(dim), t.strides()[dim]);
  };
  for (const nb::handle item : items) {
    if (nb::isinstance<nb::ellipsis>(item)) {
      keep_skipped();
      continue;
    }
    const int64_t stride = t.strides()[dim];
    if (nb::isinstance<nb::slice>(item)) {
      const auto [start, stop, step, size] =
          nb::borrow<nb::slice>(item).compute(static_cast<size_t>(t.dim(dim)));
      if (step < 0)
        throw InputError("Tensor: a slice cannot have a negative step; hint: t.numpy()[::-1]");
      out.offset += start * stride;
      out.keep(static_cast<int64_t>(size), size > 1 ? step * stride : stride);
    } else {
      out.offset += position_of(item, t, dim) * stride;
    }
    ++dim;
  }
  if (!has_ellipsis) keep_skipped();
  return out;
}

Variable part(const Variable& v, nb::handle key) {
  check_process();
  const Part at = part_of(v.value(), key);
  const Tensor view = at.of(v.value());
  if (!needs_gradient({&v, 1})) return Variable(view);
  const auto backward = [at, whole = v.shape()](const Tensor& dy, Gradients& g) {
    const Tensor dx = Tensor::zeros(whole, dy.dtype(), dy.device());
    at.of(dx).copy_(dy);
    g.pass(0, dx);
  };
  return without_gil([&] { return make_node("index", view.contiguous(), {v}, backward); });
}

// Row-major elements from `next` on as nested lists, or the one element of rank 0.
template <class T>
nb::object nested(const Shape& shape, int dim, const T*& next) {
  if (dim == shape.rank()) return nb::cast(*next++);
  nb::list out;
  for (int64_t i = 0; i < shape[dim]; ++i) out.append(nested(shape, dim + 1, next));
  return out;
}

nb::object values_of(const Tensor& t, const Shape& shape) {
  const auto as = [&]<class T>(T) {
    const std::vector<T> values = without_gil([&] { return t.to_vector<T>(); });
    const T* next = values.data();
    return nested(shape, 0, next);
  };
  return is_integer(t.dtype()) ? as(int64_t{}) : as(double{});
}

nb::object item(const Variable& v) {
  if (v.value().numel() != 1)
    throw InputError(str("Tensor: expected one element as a value, got ", v.value().str(),
                         "; hint: an index, tolist() or numpy() for several; len(t) or `is None` "
                         "for conditions"));
  return values_of(v.value(), {});
}

int64_t length(const Variable& v) {
  if (v.shape().rank() == 0) throw nb::type_error("a tensor without dimensions has no len()");
  return v.shape()[0];
}

}  // namespace

void bind_elements(nb::class_<Variable>& tensor) {
  bind_operators(tensor);
  tensor
      .def(
          "__getitem__", &part, nb::arg("key").none(),
          nb::sig("def __getitem__(self, key: typing.SupportsIndex | slice | types.EllipsisType | "
                  "tuple[typing.SupportsIndex | slice | types.EllipsisType, ...]) -> Tensor"),
          R"(The elements at integers, slices and `...`: a view of a constant; a tensor that takes part in
differentiation is copied unless they are contiguous.)")
      .def("__len__", &length)
      .def(
          "__iter__",
          [](nb::handle self) {
            length(nb::cast<const Variable&>(self));
            return nb::steal(PySeqIter_New(self.ptr()));
          },
          nb::sig("def __iter__(self) -> collections.abc.Iterator[Tensor]"))
      .def("__bool__", [](const Variable& v) { return nb::cast<double>(item(v)) != 0; })
      .def("__float__", [](const Variable& v) { return nb::cast<double>(item(v)); })
      .def("__int__", [](const Variable& v) { return nb::int_(item(v)); })
      .def("item", &item, nb::sig("def item(self) -> typing.Any"),
           "The only element as a number. InputError for several.")
      .def(
          "tolist", [](const Variable& v) { return values_of(v.value(), v.shape()); },
          nb::sig("def tolist(self) -> typing.Any"), "Nested lists of numbers, or one for rank 0.");
}

}  // namespace cohort::python
