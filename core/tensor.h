// Tensor: a typed, strided view of reference-counted storage on one device. The maths is in
// kernels/. Copying a Tensor copies the handle, not the elements. Factories and views throw Error
// on bad arguments.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/device.h"
#include "core/dtype.h"
#include "core/shape.h"

namespace cohort {

class Allocator;

class Tensor {
 public:
  Tensor() = default;  // undefined: no storage, rank 0

  // Uninitialised row-major storage.
  static Tensor empty(const Shape& shape, DType dtype, Device device = {});
  static Tensor zeros(const Shape& shape, DType dtype, Device device = {}) {
    return empty(shape, dtype, device).zero_();
  }
  static Tensor full(const Shape& shape, double value, DType dtype, Device device = {}) {
    return empty(shape, dtype, device).fill_(value);
  }
  // Zeros in page-locked host memory, for copy_async_(); in ordinary memory if the machine has no
  // GPU.
  static Tensor pinned(const Shape& shape, DType dtype);
  static Tensor empty_like(const Tensor& other) {
    return empty(other.shape_, other.dtype_, other.device());
  }
  // Copies `values` (row-major) into a new CPU tensor; sizes must match.
  template <class T>
  static Tensor from(std::span<const T> values, const Shape& shape) {
    COHORT_CHECK(static_cast<int64_t>(values.size()) == shape.numel(), "[tensor] ", values.size(),
                 " values for shape ", shape.str());
    Tensor t = empty(shape, dtype_of<T>);
    if (!values.empty()) std::memcpy(t.raw(), values.data(), values.size_bytes());
    return t;
  }
  template <class T>
  static Tensor from(const std::vector<T>& values, const Shape& shape) {
    return from(std::span<const T>(values), shape);
  }
  template <class T>
  static Tensor from(const std::vector<T>& values) {
    return from(std::span<const T>(values), {static_cast<int64_t>(values.size())});
  }

  // A view of memory that others own: elements from `pointer` on, which is aligned to the dtype, at
  // strides in elements, none of them negative. `release` is called when the last tensor that
  // shares the view's storage goes, in the thread where it goes, and must not throw. On a device,
  // work that uses the memory may then still be queued. If a check throws, it is not called.
  static Tensor borrow(void* pointer, std::function<void()> release, const Shape& shape,
                       const Shape& strides, DType dtype, Device device = {});

  // A shape and a dtype alone: reading an element throws Error.
  static Tensor without_elements(const Shape& shape, DType dtype, Device device = {});

  bool defined() const { return storage_ != nullptr; }
  const Shape& shape() const { return shape_; }
  const Shape& strides() const { return strides_; }
  int rank() const { return shape_.rank(); }
  int64_t dim(int i) const { return shape_[i]; }
  int64_t numel() const { return defined() ? shape_.numel() : 0; }
  DType dtype() const { return dtype_; }
  Device device() const;
  int64_t nbytes() const { return numel() * static_cast<int64_t>(dtype_size(dtype_)); }
  bool is_contiguous() const { return strides_ == contiguous_strides(shape_); }
  // Rows and columns of the tensor as the matrix [numel / last, last]; rank 0 is [1, 1].
  int64_t cols() const { return rank() == 0 ? 1 : dim(-1); }
  int64_t rows() const { return cols() == 0 ? 0 : numel() / cols(); }

  // The first element. T must be the dtype's type.
  template <class T>
  T* data() {
    check_type(dtype_of<T>);
    return static_cast<T*>(raw());
  }
  template <class T>
  const T* data() const {
    check_type(dtype_of<T>);
    return static_cast<const T*>(raw());
  }
  void* raw() { return const_cast<void*>(std::as_const(*this).raw()); }
  const void* raw() const;

  // Views: they share storage.
  // One size may be -1. The tensor must be contiguous, or its t[i] are and the first size stays the
  // same: [T, H D] with any stride of t[i] becomes [T, H, D] with that stride.
  Tensor reshape(const Shape& shape) const;
  Tensor narrow(int dim, int64_t start, int64_t length) const;
  Tensor select(int dim, int64_t index) const;
  Tensor transpose(int a, int b) const;
  // Padding: elements in memory after those of a view, along one dimension, which give matmuls
  // aligned sizes. hide_padding() is narrow(dim, 0, length) that remembers the rest as padding, and
  // with_padding() gives the tensor that was narrowed; *this if there is no padding. Other views
  // and copies have none.
  Tensor hide_padding(int dim, int64_t length) const;
  Tensor with_padding() const;

  // The memory of a contiguous tensor as [n] elements of another dtype, of which it holds a whole
  // number.
  Tensor reinterpret(DType dtype) const;

  // Gives the storage that this tensor is all of the memory of `memory`, as many bytes on the same
  // device, in place of its own, which is freed: all views move. Undefined: no memory, and reading
  // an element throws Error.
  void rebind(const Tensor& memory) const;

  // Copies. Copies to the host are complete on return; copies to a device are ordered by its
  // current stream, and the host memory may be reused immediately.
  Tensor contiguous() const { return is_contiguous() ? *this : clone(); }
  Tensor clone() const { return empty(shape_, dtype_, device()).copy_(*this); }
  Tensor to(DType dtype) const {  // *this if it already is
    return dtype == dtype_ ? *this : empty(shape_, dtype, device()).copy_(*this);
  }
  Tensor to(Device target) const {  // *this if it already is
    const bool stays = target == device() || !defined();
    return stays ? *this : empty(shape_, dtype_, target).copy_(contiguous());
  }

  // In place. copy_ converts the dtype and needs equal shapes.
  Tensor& copy_(const Tensor& source);
  // copy_() between a device and page-locked memory, both contiguous and of one dtype, which does
  // not wait: the host's elements belong to the copy until the device's current stream has reached
  // it.
  Tensor& copy_async_(const Tensor& source);
  Tensor& fill_(double value);
  Tensor& zero_();

  // The only element, converted.
  double item() const;
  // Row-major elements, converted to T.
  template <class T>
  std::vector<T> to_vector() const {
    std::vector<T> out(static_cast<size_t>(numel()));
    const Tensor t = contiguous().to(Device{});
    if (t.numel() == 0) return out;
    dispatch_all(dtype_, [&]<class S>() {
      const S* source = t.data<S>();
      for (size_t i = 0; i < out.size(); ++i) {
        if constexpr (is_narrow<S>)
          out[i] = static_cast<T>(static_cast<float>(source[i]));
        else
          out[i] = static_cast<T>(source[i]);
      }
    });
    return out;
  }
  // "f32[2, 3] on cpu".
  std::string str() const;
  // True if no other Tensor shares this one's storage, and it is not borrowed.
  bool sole_owner() const;

 private:
  struct Storage;
  static Tensor allocate(const Shape& shape, DType dtype, Device device, Allocator& memory);
  void check_type(DType expected) const {
    COHORT_CHECK(defined() && dtype_ == expected, "[tensor] expected elements of type ",
                 dtype_name(expected), ", got ", str());
  }

  std::shared_ptr<Storage> storage_;
  int64_t offset_ = 0;  // in elements
  Shape shape_, strides_;
  int padded_dim_ = 0;
  int64_t padding_ = 0;  // elements after those of padded_dim_
  DType dtype_ = DType::kF32;
};

}  // namespace cohort
