// Patches of images as rows, the input of a linear layer (ViT, Dosovitskiy et al. 2021).
#pragma once

#include "kernels/common.h"

namespace cohort::kernels {

// y[(i h + r) w + s, (k P + u) P + v] = values[k, pixels[i, r P + u, s P + v, k]]: a patch's
// channels, rows and columns in the order of a convolution's weight [d, c, P, P].
struct Patches {
  Tensor& y;             // [N h w, c P P]
  const Tensor& pixels;  // [N, h P, w P, c] u8
  const Tensor& values;  // [c, 256] in accumulate_dtype(y): the value of each byte
  int64_t size;          // P
};
COHORT_KERNEL(void patches(const Patches& args));

}  // namespace cohort::kernels
