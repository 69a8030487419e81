// Rotary embedding from a table on the CPU.
#include "kernels/rope.h"

#include <algorithm>

#include "kernels/cpu/reduce.h"
#include "kernels/cpu/rotate.h"

namespace cohort::kernels::cpu {
void rope(const Rope& args) {
  const int64_t tokens = args.x.dim(0), heads = args.x.dim(1), dim = args.x.dim(2);
  const bool rotates = args.table.defined();
  const int64_t rows = rotates ? args.table.dim(0) : 0, plain = rotates ? args.plain_heads : heads,
                rotated = heads - plain;
  dispatch_float(args.x.dtype(), "rope", [&]<class T>() {
    const int32_t* position = args.positions.data<int32_t>();
    for (int64_t t = 0; rotates && t < tokens; ++t)
      COHORT_CHECK(position[t] >= 0 && position[t] < rows, "[rope] position ", position[t],
                   " of token ", t, " is outside the table of ", rows, " positions");
    const T* in = args.x.data<T>();
    T* out = args.y.data<T>();
    for_rows(tokens, heads * dim, [&](int64_t t) {
      const T* x = in + t * heads * dim;
      T* y = out + t * heads * dim;
      if (rotates) {
        const Rotation<T> rotation(args.table, position[t], dim, args.direction);
        for (int64_t h = 0; h < rotated; ++h, x += dim, y += dim)
          rotate(y, x, dim, rotation, args.mode);
      }
      if (args.mode == Grad::kAccumulate)
        for (int64_t i = 0; i < plain * dim; ++i) y[i] += x[i];
      else if (y != x)
        std::copy_n(x, plain * dim, y);
      if (args.scales.defined())
        round_heads(out + ((t + 1) * heads - args.scales.numel()) * dim, args.scales, dim);
    });
  });
}

}  // namespace cohort::kernels::cpu
