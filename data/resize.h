// Resizing with the bits of Pillow 12 and before, and random crops.
#pragma once

#include "data/image.h"

namespace cohort {

enum class ResizeFilter { kNearest, kLanczos, kBilinear, kBicubic };  // as Pillow numbers them

// The image with this height and width: its rows are filtered and rounded to bytes, then
// its columns. (Pillow 13 filters the columns of tall images first, which differs by up to 1.)
Image resized(const Image& image, int64_t height, int64_t width, ResizeFilter filter);

// data.images.augment: crop_flip: a random part of the image, with 0.08 to 1 of its area and 3/4
// to 4/3 of its height as width, resized to `size` x `size` and mirrored in half of all cases
// (Inception's crop, with the constants of torchvision's RandomResizedCrop). It depends only on
// the image, the seed, the step and the index of the image in the step.
Image augmented(const Image& image, uint64_t seed, int64_t step, int64_t index, int64_t size,
                ResizeFilter filter);

}  // namespace cohort
