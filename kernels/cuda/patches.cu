// Patches of images on CUDA: a thread per element of the rows.
#include "kernels/cuda/device.cuh"
#include "kernels/patches.h"

namespace cohort::kernels::cuda {
namespace {

constexpr int kThreads = 256;

struct Sizes {
  int size, channels, width, across, columns;
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    patches_kernel(T* y, const uint8_t* pixels, const float* values, int64_t elements,
                   const Sizes s) {
  wait_on_dependent_grids();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= elements) return;
  const int64_t row = i / s.columns;
  const int column = static_cast<int>(i % s.columns), area = s.size * s.size, k = column / area,
            u = column % area / s.size, v = column % s.size;
  const int64_t line = row / s.across * s.size + u;
  const int64_t pixel = line * s.width + row % s.across * s.size + v;
  y[i] = from_float<T>(values[k * 256 + pixels[pixel * s.channels + k]]);
}

}  // namespace

void patches(const Patches& args) {
  dispatch_device(args.y.dtype(), "patches", [&]<class T>() {
    const auto size = static_cast<int>(args.size), width = static_cast<int>(args.pixels.dim(2));
    const Sizes sizes{size, static_cast<int>(args.pixels.dim(3)), width, width / size,
                      static_cast<int>(args.y.dim(1))};
    launch("patches", patches_kernel<T>, {blocks_for(args.y.numel(), kThreads), kThreads},
           args.y.device(), pointer<T>(args.y), pointer<uint8_t>(args.pixels),
           pointer<float>(args.values), args.y.numel(), sizes);
  });
}

}  // namespace cohort::kernels::cuda
