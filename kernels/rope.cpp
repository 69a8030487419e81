#include "kernels/rope.h"

#include <cmath>

#include "core/with_cuda.h"
#include "kernels/arguments.h"

namespace cohort::kernels {

Tensor rope_table(int64_t positions, std::span<const double> frequencies, double scale, DType dtype,
                  const RopeGain& gain) {
  const auto half = static_cast<int64_t>(frequencies.size());
  COHORT_CHECK(positions >= 0 && half > 0, "[rope_table] expected positions >= 0 and frequencies");
  const int64_t parts = gain ? 2 : 1;
  Tensor table = Tensor::empty({positions, 2 * half * parts}, dtype);
  if (is_dry_run()) return table;
  dispatch_float(dtype, "rope_table", [&]<class T>() {
    T* out = table.data<T>();
    for (int64_t p = 0; p < positions; ++p)
      for (int64_t part = 0; part < parts; ++part, out += 2 * half)
        for (int64_t i = 0; i < half; ++i) {
          const double angle = static_cast<double>(p) * frequencies[static_cast<size_t>(i)];
          const double factor = gain ? scale * gain(p, part * half + i) : scale;
          out[i] = static_cast<T>(factor * std::cos(angle));
          out[half + i] = static_cast<T>(factor * std::sin(angle));
        }
  });
  return table;
}

void check_rope_table(ArgumentCheck& check, const Tensor& table) {
  const int64_t dim = check["D"];
  check.require(dim % 2 == 0, "expected an even head size with a rotary table, got ", dim);
  const int64_t columns = table.rank() == 2 ? table.dim(1) : 0;
  if (columns == 2 * dim)
    check("accumulate [P, 2 D] table", table);
  else if (columns > 0 && columns < dim && columns % 2 == 0)
    check("accumulate [P, R] table", table);
  else
    check("accumulate [P, D] table", table);
}

void rope(const Rope& args) {
  ArgumentCheck check("rope");
  check("[T, H, D] x, y; i32 [T] positions", args.x, args.y, args.positions);
  if (args.table.defined()) check_rope_table(check, args.table);
  check.require(args.plain_heads >= 0 && args.plain_heads <= check["H"],
                "expected plain_heads from 0 to ", check["H"], ", got ", args.plain_heads);
  if (args.scales.defined()) {
    check("f32 [N] scales", args.scales);
    check.require(check["D"] % 2 == 0 && check["N"] <= check["H"] &&
                      args.direction == RopeDirection::kForward && args.mode == Grad::kOverwrite,
                  "expected scales of the last heads of x, of an even size, in a forward that "
                  "overwrites; got ",
                  args.scales, " for x ", args.x);
  }
  on_device<cpu::rope, cuda::rope>(args.x.device(), args);
}

}  // namespace cohort::kernels
