#include "kernels/dropout.h"

#include "core/with_cuda.h"
#include "kernels/elementwise.h"

namespace cohort::kernels {

void dropout(const Dropout& args) {
  constexpr const char* kOp = "dropout";
  const auto& [y, x, spec, mode] = args;
  // Random numbers are compared with p in f32, where a p just below 1 rounds to 1.
  COHORT_CHECK(spec.p >= 0 && static_cast<float>(spec.p) < 1,
               "[dropout] expected p in [0, 1), got ", spec.p);
  COHORT_CHECK(x.rank() == 2, "[dropout] expected x [T, C], got ", x.str());
  const Shape tokens = {x.dim(0)};
  const Device device = x.device();
  check_tensor(x, x.shape(), x.dtype(), kOp, "x", device);
  check_tensor(y, x.shape(), x.dtype(), kOp, "y", device);
  if (spec.p == 0) return scale({.y = y, .x = x, .factor = 1, .mode = mode});
  check_tensor(spec.sequences, tokens, DType::kI64, kOp, "sequences", device);
  check_tensor(spec.positions, tokens, DType::kI32, kOp, "positions", device);
  on_device<cpu::dropout, cuda::dropout>(device, args);
}

}  // namespace cohort::kernels
