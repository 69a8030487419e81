// cohort.Tensor: a Variable, and its exchange with other libraries by DLPack, without copies.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "core/gpu.h"
#include "python/bindings/bindings.h"

namespace cohort::python {
namespace {

using nb::dlpack::dltensor;

// The structs of DLPack 1.1 that nanobind keeps to itself.
struct Managed {
  dltensor tensor;
  void* context;
  void (*deleter)(Managed*);
  static constexpr const char *kName = "dltensor", *kUsed = "used_dltensor";
  bool read_only() const { return false; }
};
struct ManagedVersioned {
  struct {
    uint32_t major = 1, minor = 1;
  } version;
  void* context;
  void (*deleter)(ManagedVersioned*);
  uint64_t flags = 0;
  dltensor tensor;
  static constexpr const char *kName = "dltensor_versioned", *kUsed = "used_dltensor_versioned";
  bool read_only() const { return (flags & 1) != 0; }
};

// DLPack 1.3's functions for calls without capsules, as torch has them.
struct ExchangeApi {
  uint32_t major, minor;
  void *previous, *allocate, *export_owned, *import_owned;
  int (*describe)(void* object, dltensor* out);
  int (*current_stream)(int device_type, int32_t device_index, void** out);
};
const ExchangeApi& exchange_api(nb::handle tensor) {
  const nb::object capsule = nb::getattr(tensor.type(), "__dlpack_c_exchange_api__", nb::none());
  const auto api = static_cast<const ExchangeApi*>(
      PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api") != 0
          ? PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api")
          : nullptr);
  if (api == nullptr || api->major != 1 || api->describe == nullptr)
    throw InputError(str("expected a torch tensor, got ", nb::type_name(tensor.type()).c_str()));
  return *api;
}

constexpr int kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13;

struct Element {
  DType dtype;
  const char* name;
  nb::dlpack::dtype code;
};
constexpr Element kElements[] = {
    {DType::kF64, "float64", {2, 64, 1}},   {DType::kF32, "float32", {2, 32, 1}},
    {DType::kBF16, "bfloat16", {4, 16, 1}}, {DType::kI32, "int32", {0, 32, 1}},
    {DType::kI64, "int64", {0, 64, 1}},     {DType::kU8, "uint8", {1, 8, 1}},
    {DType::kF16, "float16", {2, 16, 1}},   {DType::kE4M3, "e4m3", {10, 8, 1}},
    {DType::kI8, "int8", {0, 8, 1}}};

const Element& element_of(DType dtype) {
  return kElements[static_cast<int>(dtype)];
}

DType dtype_of_code(const nb::dlpack::dtype& code) {
  if (code == nb::dlpack::dtype{6, 8, 1}) return DType::kU8;  // bool
  for (const Element& e : kElements)
    if (e.code == code) return e.dtype;
  constexpr const char* kKinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  throw InputError(str("from_dlpack: elements of type ",
                       code.code < 7 ? kKinds[code.code] : "code ", static_cast<int>(code.bits),
                       code.lanes == 1 ? "" : " in vectors",
                       " are not supported; hint: convert them to float64, float32, float16, "
                       "bfloat16, int32, int64, int8 or uint8"));
}

Device device_of(const std::pair<int, int>& dl_device) {
  const auto [type, index] = dl_device;
  if (type == kCpu || type == kCudaHost) return {};
  if (type != kCuda && type != kCudaManaged)
    throw InputError(str("from_dlpack: devices of DLPack's type ", type,
                         " are not supported; hint: copy the array to the CPU or a CUDA device"));
  return parse_device(Device::cuda(index).str(), "from_dlpack: device");
}

// fn() in a destructor. After a fatal error of a device the next op reports it again.
template <class F>
void without_errors(F&& fn) {
  try {
    fn();
  } catch (const Error&) {
  }
}

// A view of the memory that `t` describes; `release` as for Tensor::borrow().
Tensor view_of(const dltensor& t, std::function<void()> release) {
  const DType dtype = dtype_of_code(t.dtype);
  Shape shape, strides;
  for (int i = 0; i < t.ndim; ++i) {
    shape.push_back(t.shape[i]);
    strides.push_back(t.strides == nullptr ? 0 : t.strides[i]);
    if (strides[i] < 0 && shape[i] > 1)
      throw InputError(
          "from_dlpack: negative strides are not supported; hint: from_dlpack(x, copy=True) "
          "of a numpy array, or copy the array");
  }
  if (t.strides == nullptr) strides = contiguous_strides(shape);
  return Tensor::borrow(static_cast<char*>(t.data) + t.byte_offset, std::move(release), shape,
                        strides, dtype, device_of({t.device.device_type, t.device.device_id}));
}

// A view of the capsule's memory, which it then owns no longer.
template <class M>
Tensor adopt(PyObject* capsule, Access access) {
  M* m = static_cast<M*>(PyCapsule_GetPointer(capsule, M::kName));
  if (m->read_only() && access == Access::kWrite)
    throw InputError("from_dlpack: the array is read-only; hint: from_dlpack(x, copy=True)");
  const Device device = device_of({m->tensor.device.device_type, m->tensor.device.device_id});
  // The producer may reuse the memory at once, so work of ours that is still queued must end first.
  Tensor view = view_of(m->tensor, [m, device] {
    without_errors([&] { synchronize(device); });
    if (m->deleter != nullptr) m->deleter(m);
  });
  PyCapsule_SetName(capsule, M::kUsed);
  return view;
}

Tensor adopt(nb::handle capsule, Access access) {
  if (PyCapsule_IsValid(capsule.ptr(), ManagedVersioned::kName) != 0)
    return adopt<ManagedVersioned>(capsule.ptr(), access);
  if (PyCapsule_IsValid(capsule.ptr(), Managed::kName) != 0)
    return adopt<Managed>(capsule.ptr(), access);
  throw InputError("from_dlpack: expected a DLPack capsule that has not been used");
}

// A capsule that shares the tensor's memory and calls `release` with it.
template <class M>
nb::object export_as(const Tensor& t, std::function<void()> release, bool is_copied) {
  struct Shared {
    Tensor tensor;
    Shape shape, strides;
    std::function<void()> release;
    M managed;
  };
  const auto shared = new Shared{t, t.shape(), t.strides(), std::move(release), {}};
  M& m = shared->managed;
  m.context = shared;
  m.deleter = [](M* managed) {
    const auto owner = static_cast<Shared*>(managed->context);
    if (owner->release) owner->release();
    delete owner;
  };
  if constexpr (requires { m.flags; }) m.flags = is_copied ? 2 : 0;
  const Device device = t.device();
  m.tensor = {.data = shared->tensor.raw(),
              .device = {device.is_cpu() ? kCpu : kCuda, device.index},
              .ndim = t.rank(),
              .dtype = element_of(t.dtype()).code,
              .shape = const_cast<int64_t*>(shared->shape.begin()),
              .strides = const_cast<int64_t*>(shared->strides.begin())};
  PyObject* capsule = PyCapsule_New(&m, M::kName, [](PyObject* self) {
    if (PyCapsule_IsValid(self, M::kName) == 0) return;
    M* managed = static_cast<M*>(PyCapsule_GetPointer(self, M::kName));
    managed->deleter(managed);
  });
  return nb::steal(capsule);
}

using Pair = std::optional<std::pair<int, int>>;

// Tensor.__dlpack__(), by the array API's protocol.
nb::object export_tensor(const Variable& v, std::optional<int64_t> stream, const Pair& max_version,
                         const Pair& dl_device, std::optional<bool> copy) {
  check_process();
  Tensor t = v.value();
  const std::pair<int, int> own{t.device().is_cpu() ? kCpu : kCuda, t.device().index};
  const bool to_cpu = dl_device && *dl_device != own && dl_device->first == kCpu;
  if ((dl_device && *dl_device != own && !to_cpu) || (to_cpu && copy == false))
    throw nb::buffer_error(
        "__dlpack__: a tensor is exported to its own device, or copied to the CPU");
  const bool is_copied = to_cpu || copy == true;
  if (is_copied) t = to_cpu ? t.to(Device{}) : t.clone();
  std::function<void()> release;
  if (const Device device = t.device(); device.is_cuda() && stream != -1) {
    if (stream == 0) throw InputError("__dlpack__: stream 0 is ambiguous; hint: 1 or 2");
    // The values 1 and 2 are handles of the legacy and the per-thread default stream in CUDA too.
    const Stream consumer{device, reinterpret_cast<void*>(stream.value_or(1))};
    const Stream ours = current_stream(device);
    order_streams(ours, consumer);
    // The consumer's own stream may no longer exist then.
    const bool is_permanent = stream.value_or(1) <= 2;
    release = [ours, consumer, is_permanent] {
      without_errors([&] {
        if (is_permanent)
          order_streams(consumer, ours);
        else
          synchronize_all_streams(ours.device);
      });
    };
  }
  const bool is_versioned = max_version && max_version->first >= 1;
  return is_versioned ? export_as<ManagedVersioned>(t, std::move(release), is_copied)
                      : export_as<Managed>(t, std::move(release), is_copied);
}

nb::object to_numpy(const Variable& v) {
  Tensor t = v.value();
  if (t.dtype() == DType::kBF16) t = t.to(DType::kF32);
  if (t.dtype() == DType::kE4M3) {
    t = t.to(Device{});
    t = Tensor::borrow(
        t.raw(), [t] {}, t.shape(), t.strides(), DType::kU8);
  }
  return nb::module_::import_("numpy").attr("from_dlpack")(Variable(t.to(Device{})));
}

nb::object as_array(const Variable& v, nb::handle dtype, std::optional<bool> copy) {
  if (copy == false && (v.value().dtype() == DType::kBF16 || !v.value().device().is_cpu()))
    throw InputError(str("__array__: ", v.value().str(), " needs a copy; hint: numpy.asarray(t)"));
  return nb::module_::import_("numpy").attr("array")(to_numpy(v), nb::arg("dtype") = dtype,
                                                     nb::arg("copy") = copy);
}

Variable converted(const Variable& v, const std::string& to) {
  for (const Element& e : kElements)
    if (e.name == to) return without_gil([&] { return Variable(v.value().to(e.dtype)); });
  const Device device = parse_device(to, "device");
  return without_gil([&] { return Variable(v.value().to(device)); });
}

void set_requires_grad(Variable& v, bool wanted) {
  if (wanted != v.requires_grad()) v = wanted ? Variable::parameter(v.value()) : v.detach();
}

nb::tuple tuple_of(const Shape& shape) {
  return nb::tuple(nb::cast(std::vector<int64_t>(shape.begin(), shape.end())));
}

}  // namespace

DType dtype_named(const std::string& name) {
  std::string known;
  for (const Element& e : kElements) {
    if (e.name == name) return e.dtype;
    known += str(known.empty() ? "" : ", ", e.name);
  }
  throw InputError(str("dtype: expected one of ", known, ", got \"", name, "\""));
}

Variable import_array(nb::handle array, Access access) {
  check_process();
  if (nb::isinstance<Variable>(array)) return nb::cast<Variable>(array);
  std::pair<int, int> dl_device;
  if (!nb::try_cast(array.attr("__dlpack_device__")(), dl_device))
    throw InputError(
        "from_dlpack: expected a device as a pair of numbers from __dlpack_device__()");
  const Device device = device_of(dl_device);
  nb::dict options;
  if (device.is_cuda()) {
    const auto handle = reinterpret_cast<intptr_t>(current_stream(device).handle);
    options["stream"] = handle == 0 ? 1 : handle;
  }
  const nb::object method = array.attr("__dlpack__");
  try {
    nb::dict versioned(options);
    versioned["max_version"] = nb::make_tuple(1, 1);
    return Variable(adopt(method(**versioned), access));
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) throw;
  }
  return Variable(adopt(method(**options), access));  // before DLPack 1.0
}

Tensor borrow_from_torch(nb::handle tensor) {
  dltensor t;
  if (exchange_api(tensor).describe(tensor.ptr(), &t) != 0) nb::raise_python_error();
  return view_of(t, [] {});
}

Stream torch_stream(nb::handle tensor, Device device) {
  Stream out{.device = device};
  if (exchange_api(tensor).current_stream(kCuda, device.index, &out.handle) != 0)
    nb::raise_python_error();
  return out;
}

namespace {

void backward_of(const Variable& v, const std::optional<Array>& grad) {
  const Tensor seed = grad ? grad->variable().value() : Tensor();
  without_gil([&] { backward(v, seed.defined() ? seed.clone() : seed); });
}

Variable from_dlpack(const Array& x, bool copy) {
  nb::object array = x;
  if (copy && nb::hasattr(x, "__array_interface__"))  // numpy also copies from negative strides
    array = nb::module_::import_("numpy").attr("asarray")(x, nb::arg("order") = "C");
  const Variable v = import_array(array, copy ? Access::kRead : Access::kWrite);
  return copy ? without_gil([&] { return Variable(v.value().clone()); }) : v;
}

std::pair<int, int> dlpack_device(const Variable& v) {
  const Device device = v.value().device();
  return {device.is_cpu() ? kCpu : kCuda, device.index};
}

// nanobind writes numpy.ndarray[] as NDArray into the stub.
void bind_exchange(nb::class_<Variable>& tensor) {
  tensor
      .def(
          "numpy", &to_numpy, nb::sig("def numpy(self) -> numpy.ndarray[][typing.Any]"),
          R"(A numpy array that shares the memory of a CPU tensor; a copy of tensors on other devices and, as
float32, of bfloat16. The bytes of e4m3 are uint8.)")
      .def("__array__", &as_array, nb::arg("dtype") = nb::none(), nb::arg("copy") = nb::none(),
           nb::sig("def __array__(self, dtype: typing.Any = None, copy: bool | None = None) -> "
                   "numpy.ndarray[][typing.Any]"),
           "numpy.asarray(): the array of numpy().")
      .def("__dlpack_device__", &dlpack_device)
      .def(
          "__dlpack__", &export_tensor, nb::kw_only(), nb::arg("stream") = nb::none(),
          nb::arg("max_version") = nb::none(), nb::arg("dl_device") = nb::none(),
          nb::arg("copy") = nb::none(),
          nb::sig("def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] "
                  "| None = None, dl_device: tuple[int, int] | None = None, copy: bool | None = "
                  "None) -> typing.Any"),
          "The array API's protocol: on CUDA `stream` waits for the work that is enqueued.");
}

}  // namespace

void bind_tensor(nb::module_& m) {
  nb::class_<Variable> tensor(
      m, "Tensor",
      R"(A tensor of float64, float32, bfloat16, float16, e4m3, int32, int64, int8 or uint8 with at most 6
dimensions on a device. It may take part in differentiation; ops do not take float16 and e4m3 (torch's
float8_e4m3fn), which to() converts.)");
  tensor
      .def_prop_ro(
          "shape", [](const Variable& v) { return tuple_of(v.shape()); },
          nb::sig("def shape(self) -> tuple[int, ...]"))
      .def_prop_ro(
          "strides", [](const Variable& v) { return tuple_of(v.value().strides()); },
          nb::sig("def strides(self) -> tuple[int, ...]"), "Strides in elements.")
      .def_prop_ro("dtype", [](const Variable& v) { return element_of(v.value().dtype()).name; })
      .def_prop_ro(
          "device", [](const Variable& v) { return v.value().device().str(); },
          "\"cpu\" or \"cuda:N\".")
      .def_prop_ro(
          "data_ptr",
          [](const Variable& v) { return reinterpret_cast<uintptr_t>(v.value().raw()); },
          "Address of the first element.")
      .def_prop_rw(
          "requires_grad", &Variable::requires_grad, &set_requires_grad,
          R"(Set it to True to make a leaf, whose gradient backward() computes (Error unless the dtype is a
float type), and to False to make a constant.)")
      .def_prop_ro(
          "grad",
          [](const Variable& v) -> std::optional<Variable> {
            if (!v.requires_grad()) return std::nullopt;
            return without_gil([&] { return Variable(v.grad()); });
          },
          R"(The gradient of a leaf, float32 for bfloat16, which accumulates over backwards; None for a
constant. Error for the result of an op.)")
      .def("zero_grad", [](const Variable& v) { without_gil([&] { v.zero_grad(); }); })
      .def(
          "backward", &backward_of, nb::arg("grad") = nb::none(),
          R"(Accumulates the gradients of sum(self * grad) into the leaves. `grad`: shape and dtype of this
tensor; None: 1, for one element. Frees the graph: Error for a second backward.)")
      .def("detach", &Variable::detach, "A constant that shares the memory.")
      .def(
          "to", &converted, nb::arg("to"),
          R"(A constant of another dtype ("bfloat16") or on another device ("cuda:0"); shares the memory if
nothing changes. InputError for an unknown one.)")
      .def("__repr__",
           [](const Variable& v) { return str("cohort.Tensor(", v.value().str(), ")"); });
  bind_exchange(tensor);
  bind_elements(tensor);
  m.def(
      "from_dlpack", &from_dlpack, nb::arg("x"), nb::kw_only(), nb::arg("copy") = false,
      R"(A Tensor that shares the memory of an array of numpy, torch, CuPy, JAX or another library with
DLPack, or a copy; uint8 for bool. InputError for other dtypes than a Tensor's, and for negative strides and
read-only memory unless they are copied.)");
}

}  // namespace cohort::python
