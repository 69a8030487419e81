#include "kernels/dropout.h"

#include "core/with_cuda.h"
#include "kernels/arguments.h"
#include "kernels/elementwise.h"

namespace cohort::kernels {

void check_dropout(ArgumentCheck& check, const DropoutSpec& spec) {
  // Random numbers are compared with p in f32, where a p just below 1 rounds to 1.
  check.require(spec.p >= 0 && static_cast<float>(spec.p) < 1, "expected dropout p in [0, 1), got ",
                spec.p);
  if (spec.p == 0) return;
  check("i64 [T] dropout.sequences; i32 [T] dropout.positions", spec.sequences, spec.positions);
}

void dropout(const Dropout& args) {
  const auto& [y, x, spec, mode] = args;
  ArgumentCheck check("dropout");
  check("[T, C] x, y", x, y);
  check_dropout(check, spec);
  if (spec.p == 0) return scale({.y = y, .x = x, .factor = 1, .mode = mode});
  on_device<cpu::dropout, cuda::dropout>(x.device(), args);
}

}  // namespace cohort::kernels
