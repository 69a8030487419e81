#include "data/resize.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/rng.h"

namespace cohort {
namespace {

constexpr uint64_t kCropPurpose = 12;  // for rng_stream(), with step and index

// Weights are multiples of 2^-22: a sum of products with bytes fits 32 bits.
constexpr int kFraction = 22;
constexpr int64_t kMostBytes = 768, kStripPixels = 1 << 22;  // in a row, and in a strip of columns

// An output pixel is the sum of the input's pixels from `first` on times the weights.
struct Taps {
  int64_t first;
  std::vector<int32_t> weights;
};

double sinc(double x) {
  return x == 0 ? 1 : std::sin(x * std::numbers::pi) / (x * std::numbers::pi);
}

double filter_value(ResizeFilter filter, double x) {
  constexpr double a = -0.5;  // Keys' cubic
  if (filter == ResizeFilter::kLanczos) return x >= -3 && x < 3 ? sinc(x) * sinc(x / 3) : 0;
  x = std::abs(x);
  if (filter == ResizeFilter::kBilinear) return std::max(1 - x, 0.0);
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
}

// The taps of all pixels of a row or column.
std::vector<Taps> taps_of(int64_t in, int64_t out, ResizeFilter filter) {
  constexpr int kSupports[] = {0, 3, 1, 2};
  const double scale = static_cast<double>(in) / static_cast<double>(out);
  const double stretch = std::max(scale, 1.0);
  const double support = kSupports[static_cast<int>(filter)] * stretch;
  std::vector<Taps> taps;
  double nearest = scale * 0.5;  // which Pillow finds by repeated addition
  for (int64_t x = 0; x < out; ++x, nearest += scale) {
    if (filter == ResizeFilter::kNearest) {
      taps.push_back({std::min(in - 1, static_cast<int64_t>(nearest)), {1 << kFraction}});
      continue;
    }
    const double center = (static_cast<double>(x) + 0.5) * scale;
    const int64_t first = std::max<int64_t>(0, static_cast<int64_t>(center - support + 0.5));
    const int64_t end = std::min(in, static_cast<int64_t>(center + support + 0.5));
    const auto value = [&](int64_t i) {
      return filter_value(filter, (static_cast<double>(i) - center + 0.5) * (1 / stretch));
    };
    double sum = 0;
    for (int64_t i = first; i < end; ++i) sum += value(i);
    taps.push_back({first, {}});
    for (int64_t i = first; i < end; ++i) {
      const double weight = value(i) / sum * (1 << kFraction);
      taps.back().weights.push_back(static_cast<int32_t>(weight + std::copysign(0.5, weight)));
    }
  }
  return taps;
}

// The weighted sum of vectors of `n` bytes, which lie one after another.
void add_weighted(const uint8_t* in, const Taps& taps, size_t n, uint8_t* out) {
  int32_t sums[kMostBytes];
  std::fill_n(sums, n, 1 << (kFraction - 1));
  in += static_cast<size_t>(taps.first) * n;
  for (const int32_t weight : taps.weights)
    for (size_t i = 0; i < n; ++i) sums[i] += *in++ * weight;
  for (size_t i = 0; i < n; ++i)
    out[i] = static_cast<uint8_t>(std::clamp(sums[i] >> kFraction, 0, 255));
}

}  // namespace

Image resized(const Image& image, int64_t height, int64_t width, ResizeFilter filter) {
  if (image.height == height && image.width == width) return image;
  Image out{height, width, image.channels};
  const std::vector<Taps> columns = taps_of(image.width, width, filter);
  const std::vector<Taps> rows = taps_of(image.height, height, filter);
  // In strips, because all columns of a tall image may take much more memory than the image.
  const int64_t strip =
      std::clamp<int64_t>(kStripPixels / image.height, 1, kMostBytes / image.channels);
  for (int64_t left = 0; left < width; left += strip) {
    Image narrow{image.height, std::min(strip, width - left), image.channels};
    for (int64_t y = 0; y < image.height; ++y)
      for (int64_t x = 0; x < narrow.width; ++x)
        add_weighted(&image.pixels[image.offset(y, 0)], columns[static_cast<size_t>(left + x)],
                     image.offset(0, 1), &narrow.pixels[narrow.offset(y, x)]);
    for (int64_t y = 0; y < height; ++y)
      add_weighted(narrow.pixels.data(), rows[static_cast<size_t>(y)], narrow.offset(1, 0),
                   &out.pixels[out.offset(y, left)]);
  }
  return out;
}

Image augmented(const Image& image, uint64_t seed, int64_t step, int64_t index, int64_t size,
                ResizeFilter filter) {
  constexpr double kLeastArea = 0.08, kRatio = 4.0 / 3;
  constexpr int kTries = 10, kMirrored = 2;  // an orientation
  Rng rng(seed,
          rng_stream(kCropPurpose, static_cast<uint64_t>(step), static_cast<uint64_t>(index)));
  const auto height = static_cast<double>(image.height), width = static_cast<double>(image.width);
  // Unless a try fits: the largest part in the center with such a ratio.
  int64_t h = std::min<int64_t>(image.height, std::llround(width * kRatio));
  int64_t w = std::min<int64_t>(image.width, std::llround(height * kRatio));
  int64_t top = (image.height - h) / 2, left = (image.width - w) / 2;
  for (int i = 0; i < kTries; ++i) {
    const double area = height * width * (kLeastArea + (1 - kLeastArea) * rng.uniform());
    const double ratio = std::exp(std::log(kRatio) * (2 * rng.uniform() - 1));
    const int64_t try_h = std::llround(std::sqrt(area / ratio));
    const int64_t try_w = std::llround(std::sqrt(area * ratio));
    if (try_h < 1 || try_w < 1 || try_h > image.height || try_w > image.width) continue;
    h = try_h, w = try_w;
    top = rng.below(image.height - h + 1), left = rng.below(image.width - w + 1);
    break;
  }
  Image part{h, w, image.channels};
  for (int64_t y = 0; y < h; ++y)
    std::copy_n(&image.pixels[image.offset(top + y, left)], w * image.channels,
                &part.pixels[part.offset(y, 0)]);
  return upright(resized(part, size, size, filter), rng.below(2) == 0 ? 1 : kMirrored);
}

}  // namespace cohort
