// Patches of images on the CPU.
#include "kernels/patches.h"

#include "kernels/cpu/reduce.h"

namespace cohort::kernels::cpu {

void patches(const Patches& args) {
  const int64_t p = args.size, channels = args.pixels.dim(3), width = args.pixels.dim(2),
                across = width / p;
  const uint8_t* const pixels = args.pixels.data<uint8_t>();
  dispatch_float(args.y.dtype(), "patches", [&]<class T>() {
    const T* const values = args.values.data<T>();
    T* const y = args.y.data<T>();
    for_rows(args.y.dim(0), args.y.dim(1), [&](int64_t row) {
      const int64_t first = row / across * p * width + row % across * p;
      T* out = y + row * args.y.dim(1);
      for (int64_t k = 0; k < channels; ++k)
        for (int64_t u = 0; u < p; ++u)
          for (int64_t v = 0; v < p; ++v)
            *out++ = values[k * 256 + pixels[(first + u * width + v) * channels + k]];
    });
  });
}

}  // namespace cohort::kernels::cpu
