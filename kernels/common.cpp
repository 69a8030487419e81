#include "kernels/common.h"

namespace cohort::kernels {

namespace {

void check_layout(const Tensor& t, const Shape& shape, const Shape& strides, DType dtype,
                  const char* op, const char* name, Device device) {
  COHORT_CHECK(t.defined(), "[", op, "] expected ", name, " ", dtype_name(dtype), shape.str(),
               ", got an undefined tensor");
  COHORT_CHECK(t.shape() == shape && t.dtype() == dtype, "[", op, "] expected ", name, " ",
               dtype_name(dtype), shape.str(), ", got ", t.str());
  COHORT_CHECK(t.strides() == strides, "[", op, "] expected contiguous ", name,
               ", got a view of shape ", shape.str(), " with strides ", t.strides().str());
  COHORT_CHECK(t.device() == device, "[", op, "] expected ", name, " on ", device.str(), ", got ",
               t.str());
}

}  // namespace

void check_tensor(const Tensor& t, const Shape& shape, DType dtype, const char* op,
                  const char* name, Device device) {
  check_layout(t, shape, contiguous_strides(shape), dtype, op, name, device);
}

void check_rows(const Tensor& t, const Shape& shape, DType dtype, const char* op, const char* name,
                Device device) {
  Shape strides = contiguous_strides(shape);
  if (t.rank() == shape.rank() && t.rank() > 0) strides[0] = t.strides()[0];
  check_layout(t, shape, strides, dtype, op, name, device);
}

void check_columns(const Tensor& t, const Shape& shape, DType dtype, const char* op,
                   const char* name, Device device) {
  Shape strides = t.strides();
  if (t.rank() > 0) strides[-1] = 1;
  check_layout(t, shape, strides, dtype, op, name, device);
}

void check_grad(const GradOut& grad, const Shape& shape, DType dtype, const char* op,
                const char* name, Device device) {
  if (grad.wanted()) check_tensor(grad.tensor, shape, dtype, op, name, device);
}

}  // namespace cohort::kernels
