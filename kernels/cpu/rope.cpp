// Rotary embedding from a table on the CPU.
#include "kernels/rope.h"

#include <algorithm>

#include "kernels/cpu/reduce.h"
#include "kernels/cpu/rotate.h"

namespace cohort::kernels::cpu {
void rope(const Rope& args) {
  const int64_t tokens = args.x.dim(0), heads = args.x.dim(1), dim = args.x.dim(2);
  const int64_t rows = args.table.dim(0), rotated = heads - args.plain_heads;
  dispatch_float(args.x.dtype(), "rope", [&]<class T>() {
    const int32_t* position = args.positions.data<int32_t>();
    for (int64_t t = 0; t < tokens; ++t)
      COHORT_CHECK(position[t] >= 0 && position[t] < rows, "[rope] position ", position[t],
                   " of token ", t, " is outside the table of ", rows, " positions");
    const T* in = args.x.data<T>();
    T* out = args.y.data<T>();
    for_rows(tokens, heads * dim, [&](int64_t t) {
      const Rotation<T> rotation(args.table, position[t], dim / 2, args.direction);
      const T* x = in + t * heads * dim;
      T* y = out + t * heads * dim;
      for (int64_t h = 0; h < rotated; ++h, x += dim, y += dim) rotate(y, x, rotation, args.mode);
      if (args.mode == Grad::kAccumulate)
        for (int64_t i = 0; i < args.plain_heads * dim; ++i) y[i] += x[i];
      else if (y != x)
        std::copy_n(x, args.plain_heads * dim, y);
    });
  });
}

}  // namespace cohort::kernels::cpu
