#include "kernels/rope.h"

#include <cmath>

#include "core/with_cuda.h"

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

void check_rope_table(const Tensor& table, int64_t dim, DType dtype, const char* op,
                      Device device) {
  COHORT_CHECK(dim % 2 == 0 && table.rank() == 2, "[", op,
               "] expected an even head size and a table, got ", dim, " and ", table.str());
  const bool wide = table.dim(1) == 2 * dim;
  check_tensor(table, {table.dim(0), wide ? 2 * dim : dim}, dtype, op, "table", device);
}

void rope(const Rope& args) {
  const Tensor &y = args.y, &x = args.x, &positions = args.positions, &table = args.table;
  constexpr const char* kOp = "rope";
  COHORT_CHECK(x.rank() == 3 && table.rank() == 2, "[rope] expected x [T, H, D] and a table, got ",
               x.str(), " and ", table.str());
  const int64_t tokens = x.dim(0), dim = x.dim(2);
  COHORT_CHECK(args.plain_heads >= 0 && args.plain_heads <= x.dim(1),
               "[rope] expected plain_heads from 0 to ", x.dim(1), ", got ", args.plain_heads);
  const Device device = x.device();
  check_tensor(x, x.shape(), x.dtype(), kOp, "x", device);
  check_tensor(y, x.shape(), x.dtype(), kOp, "y", device);
  check_rope_table(table, dim, accumulate_dtype(x.dtype()), kOp, device);
  check_tensor(positions, {tokens}, DType::kI32, kOp, "positions", device);
  on_device<cpu::rope, cuda::rope>(x.device(), args);
}

}  // namespace cohort::kernels
