#include "core/tensor.h"

#include <algorithm>

#include "core/allocator.h"
#include "core/cuda_backend.h"
#include "core/with_cuda.h"

namespace cohort {

struct Tensor::Storage : NonCopyable {
  Storage(size_t bytes, Device device, Allocator& memory)
      : memory(&memory), device(device), bytes(bytes), pointer(memory.allocate(bytes)) {}
  Storage(void* pointer, Device device, std::function<void()> release)
      : device(device), pointer(pointer), release(std::move(release)) {}
  ~Storage() { free(); }
  void free() {
    if (memory != nullptr)
      memory->deallocate(pointer, bytes);
    else if (release)
      release();
  }
  Allocator* memory = nullptr;  // null: borrowed
  Device device;
  size_t bytes = 0;
  void* pointer;
  std::function<void()> release;
};

namespace {

// Calls fn(element offset in a, element offset in b) for each element, in row-major order of
// `shape`.
template <class F>
void for_each_offset(const Shape& shape, const Shape& a, const Shape& b, F&& fn) {
  const int rank = shape.rank();
  if (shape.numel() == 0) return;
  int64_t index[kMaxRank] = {}, offset_a = 0, offset_b = 0;
  while (true) {
    fn(offset_a, offset_b);
    int d = rank - 1;
    for (; d >= 0; --d) {
      offset_a += a[d];
      offset_b += b[d];
      if (++index[d] < shape[d]) break;
      offset_a -= a[d] * shape[d];
      offset_b -= b[d] * shape[d];
      index[d] = 0;
    }
    if (d < 0) return;
  }
}

template <class To, class From>
To convert(From value) {
  if constexpr (is_narrow<From>)
    return convert<To>(static_cast<float>(value));
  else if constexpr (std::is_same_v<To, bf16> || std::is_same_v<To, e4m3>)
    return To(static_cast<float>(value));
  else if constexpr (std::is_same_v<To, f16>)
    return f16(static_cast<double>(value));
  else
    return static_cast<To>(value);
}

void copy_on_cpu(Tensor& to, const Tensor& from) {
  if (to.dtype() == from.dtype() && to.is_contiguous() && from.is_contiguous()) {
    std::memmove(to.raw(), from.raw(), static_cast<size_t>(to.nbytes()));
    return;
  }
  dispatch_all(to.dtype(), [&]<class To>() {
    dispatch_all(from.dtype(), [&]<class From>() {
      To* target = to.data<To>();
      const From* source = from.data<From>();
      for_each_offset(to.shape(), to.strides(), from.strides(),
                      [&](int64_t t, int64_t f) { target[t] = convert<To>(source[f]); });
    });
  });
}

void fill_on_cpu(Tensor& t, double value) {
  dispatch_all(t.dtype(), [&]<class T>() {
    T* p = t.data<T>();
    const T v = convert<T>(value);
    if (t.is_contiguous())
      std::fill(p, p + t.numel(), v);
    else
      for_each_offset(t.shape(), t.strides(), t.strides(), [&](int64_t i, int64_t) { p[i] = v; });
  });
}

void zero_on_cpu(Tensor& t) {
  std::memset(t.raw(), 0, static_cast<size_t>(t.nbytes()));
}

}  // namespace

Tensor Tensor::empty(const Shape& shape, DType dtype, Device device) {
  return allocate(shape, dtype, device, allocator(device));
}

Tensor Tensor::pinned(const Shape& shape, DType dtype) {
  const bool locks = is_dry_run() || cuda_device_count() > 0;
  Tensor t = allocate(shape, dtype, {}, locks ? pinned_allocator() : allocator({}));
  const bool is_zero = locks && static_cast<size_t>(t.nbytes()) > kLargePinned;
  return is_zero ? t : t.zero_();
}

Tensor Tensor::allocate(const Shape& shape, DType dtype, Device device, Allocator& memory) {
  int64_t bytes = static_cast<int64_t>(dtype_size(dtype));
  bool fits = true;
  for (const int64_t d : shape) {
    COHORT_CHECK(d >= 0, "[tensor] negative size in shape ", shape.str());
    fits &= !__builtin_mul_overflow(bytes, d, &bytes);
  }
  COHORT_CHECK(fits, "[tensor] shape ", shape.str(), " is too large");
  Tensor t;
  t.storage_ = std::make_shared<Storage>(static_cast<size_t>(bytes), device, memory);
  t.shape_ = shape;
  t.strides_ = contiguous_strides(shape);
  t.dtype_ = dtype;
  return t;
}

Tensor Tensor::without_elements(const Shape& shape, DType dtype, Device device) {
  Tensor t = borrow(nullptr, {}, {0}, {1}, dtype, device);
  t.shape_ = shape;
  t.strides_ = contiguous_strides(shape);
  return t;
}

Tensor Tensor::borrow(void* pointer, std::function<void()> release, const Shape& shape,
                      const Shape& strides, DType dtype, Device device) {
  COHORT_CHECK(strides.rank() == shape.rank(), "[borrow] ", strides.rank(), " strides for shape ",
               shape.str());
  for (int i = 0; i < shape.rank(); ++i)
    COHORT_CHECK(shape[i] >= 0 && (strides[i] >= 0 || shape[i] < 2),
                 "[borrow] negative size or stride: shape ", shape.str(), ", strides ",
                 strides.str());
  COHORT_CHECK(reinterpret_cast<uintptr_t>(pointer) % dtype_size(dtype) == 0,
               "[borrow] the memory is not aligned to elements of type ", dtype_name(dtype));
  COHORT_CHECK(pointer != nullptr || shape.numel() == 0, "[borrow] no memory for ", shape.str());
  Tensor t;
  t.shape_ = shape;
  t.strides_ = shape.numel() == 0 ? contiguous_strides(shape) : strides;
  // The stride of a single element means nothing: the canonical one lets is_contiguous() hold.
  for (int i = shape.rank() - 1; i >= 0; --i)
    if (shape[i] == 1) t.strides_[i] = i + 1 < shape.rank() ? t.strides_[i + 1] * shape[i + 1] : 1;
  t.dtype_ = dtype;
  t.storage_ = std::make_shared<Storage>(pointer, device, std::move(release));
  return t;
}

bool Tensor::sole_owner() const {
  return storage_.use_count() == 1 && storage_->memory != nullptr;
}

Device Tensor::device() const {
  return storage_ ? storage_->device : Device{};
}

const void* Tensor::raw() const {
  COHORT_CHECK(defined(), "[tensor] an undefined tensor has no data");
  COHORT_CHECK(storage_->pointer != nullptr || numel() == 0, "[tensor] ", str(),
               " has no elements: it is of a dry run, stands for weights in 8 or 4 bits, or is not "
               "gathered");
  return static_cast<const char*>(storage_->pointer) +
         offset_ * static_cast<int64_t>(dtype_size(dtype_));
}

Tensor Tensor::reshape(const Shape& shape) const {
  Shape target = shape;
  int64_t known = 1;
  int unknown = -1;
  const auto check = [&](bool fits) {
    COHORT_CHECK(fits, "[reshape] cannot turn ", str(), " into ", shape.str());
  };
  for (int i = 0; i < shape.rank(); ++i) {
    COHORT_CHECK(shape[i] != -1 || unknown < 0, "[reshape] more than one -1 in ", shape.str());
    // Larger products than the number of elements could overflow.
    check(shape[i] >= -1 && (numel() == 0 || known <= numel() / std::max<int64_t>(1, shape[i])));
    if (shape[i] == -1)
      unknown = i;
    else
      known *= shape[i];
  }
  if (unknown >= 0) target[unknown] = numel() / std::max<int64_t>(1, known);
  check(target.numel() == numel() && (unknown < 0 || known > 0));
  Shape strides = contiguous_strides(target), rows = contiguous_strides(shape_);
  if (!is_contiguous() && target.rank() > 0 && target[0] == dim(0))
    rows[0] = strides[0] = strides_[0];
  COHORT_CHECK(strides_ == rows, "[reshape] needs a contiguous tensor, got ", str());
  Tensor view = *this;
  view.shape_ = target;
  view.strides_ = strides;
  view.padding_ = 0;
  return view;
}

Tensor Tensor::narrow(int dim, int64_t start, int64_t length) const {
  const int64_t size = shape_[dim];
  COHORT_CHECK(start >= 0 && length >= 0 && start + length <= size, "[narrow] [", start, ", ",
               start + length, ") of dimension ", dim, " of ", str());
  Tensor view = *this;
  view.shape_[dim] = length;
  view.offset_ += start * strides_[dim];
  view.padding_ = 0;
  return view;
}

Tensor Tensor::select(int dim, int64_t index) const {
  Tensor view = narrow(dim, index, 1);
  const int d = dim < 0 ? dim + rank() : dim;
  view.shape_.erase(d);
  view.strides_.erase(d);
  return view;
}

Tensor Tensor::transpose(int a, int b) const {
  Tensor view = *this;
  std::swap(view.shape_[a], view.shape_[b]);
  std::swap(view.strides_[a], view.strides_[b]);
  view.padding_ = 0;
  return view;
}

Tensor Tensor::hide_padding(int dim, int64_t length) const {
  Tensor view = narrow(dim, 0, length);
  view.padded_dim_ = dim;
  view.padding_ = shape_[dim] - length;
  return view;
}

Tensor Tensor::with_padding() const {
  Tensor view = *this;
  if (padding_ > 0) view.shape_[padded_dim_] += std::exchange(view.padding_, 0);
  return view;
}

Tensor Tensor::reinterpret(DType dtype) const {
  const int64_t size = static_cast<int64_t>(dtype_size(dtype)),
                begin = offset_ * static_cast<int64_t>(dtype_size(dtype_));
  COHORT_CHECK(is_contiguous() && nbytes() % size == 0 && begin % size == 0, "[reinterpret] ",
               str(), " as ", dtype_name(dtype));
  Tensor view = *this;
  view.shape_ = {nbytes() / size};
  view.strides_ = {1};
  view.offset_ = begin / size;
  view.padding_ = 0;
  view.dtype_ = dtype;
  return view;
}

void Tensor::rebind(const Tensor& memory) const {
  COHORT_CHECK(
      offset_ == 0 && is_contiguous() && static_cast<size_t>(nbytes()) == storage_->bytes &&
          (!memory.defined() ||
           (memory.nbytes() == nbytes() && memory.is_contiguous() && memory.device() == device())),
      "[rebind] ", str(), " to ", memory.str());
  storage_->free();
  storage_->memory = nullptr;
  storage_->pointer = nullptr;
  storage_->release = nullptr;
  if (!memory.defined()) return;
  storage_->release = [memory] {};
  if (char* const begin = static_cast<char*>(memory.storage_->pointer))
    storage_->pointer = begin + memory.offset_ * static_cast<int64_t>(dtype_size(memory.dtype_));
}

Tensor& Tensor::copy_(const Tensor& source) {
  COHORT_CHECK(shape_ == source.shape_, "[copy_] from ", source.str(), " to ", str());
  if (numel() == 0) return *this;
  const Device executor = device().is_cuda() ? device() : source.device();
  on_device<copy_on_cpu, cuda::copy>(executor, *this, source);
  return *this;
}

Tensor& Tensor::copy_async_(const Tensor& source) {
  COHORT_CHECK(shape_ == source.shape_ && dtype_ == source.dtype_ && is_contiguous() &&
                   source.is_contiguous(),
               "[copy_async_] from ", source.str(), " to ", str());
  if (numel() == 0) return *this;
  const Device executor = device().is_cuda() ? device() : source.device();
  on_device<copy_on_cpu, cuda::copy_async>(executor, *this, source);
  return *this;
}

Tensor& Tensor::fill_(double value) {
  if (numel() > 0) on_device<fill_on_cpu, cuda::fill>(device(), *this, value);
  return *this;
}

Tensor& Tensor::zero_() {
  if (!is_contiguous()) return fill_(0);
  if (numel() > 0) on_device<zero_on_cpu, cuda::zero>(device(), *this);
  return *this;
}

double Tensor::item() const {
  COHORT_CHECK(numel() == 1, "[item] expected one element, got ", str());
  return to_vector<double>()[0];
}

std::string Tensor::str() const {
  if (!defined()) return "undefined tensor";
  return cohort::str(dtype_name(dtype_), shape_.str(), " on ", device().str());
}

}  // namespace cohort
