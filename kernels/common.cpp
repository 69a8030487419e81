#include "kernels/common.h"

namespace cohort::kernels {

void check_tensor(const Tensor& t, const Shape& shape, DType dtype, const char* op,
                  const char* name, Device device) {
  COHORT_CHECK(t.defined() && t.shape() == shape && t.dtype() == dtype && t.is_contiguous() &&
                   t.device() == device,
               "[", op, "] expected ", name, " ", dtype_name(dtype), shape.str(), " on ",
               device.str(), ", got ", t.defined() ? t.str() : "an undefined tensor",
               t.is_contiguous() ? "" : str(" with strides ", t.strides().str()));
}

}  // namespace cohort::kernels
