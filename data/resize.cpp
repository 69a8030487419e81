#include "data/resize.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "core/check.h"
#include "core/rng.h"

namespace cohort {
namespace {

// Weights are multiples of 2^-22; a sum of products with bytes fits 32 bits.
constexpr int kFraction = 22;
constexpr int32_t kHalf = 1 << (kFraction - 1);

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

double support_of(ResizeFilter filter) {
  return filter == ResizeFilter::kLanczos ? 3 : filter == ResizeFilter::kBilinear ? 1 : 2;
}

// An output pixel is the sum of the input's pixels from `first` on times the weights.
struct Taps {
  int64_t first;
  std::vector<int32_t> weights;
};

Taps taps_of(int64_t x, int64_t in, int64_t out, ResizeFilter filter) {
  const double scale = static_cast<double>(in) / static_cast<double>(out);
  const double stretch = std::max(scale, 1.0), support = support_of(filter) * stretch;
  const double center = (static_cast<double>(x) + 0.5) * scale;
  const int64_t first = std::max<int64_t>(0, static_cast<int64_t>(center - support + 0.5));
  const int64_t end = std::min(in, static_cast<int64_t>(center + support + 0.5));
  std::vector<double> values;
  double sum = 0;
  for (int64_t i = first; i < end; ++i) {
    values.push_back(filter_value(filter, (static_cast<double>(i) - center + 0.5) * (1 / stretch)));
    sum += values.back();
  }
  Taps taps{first, {}};
  for (const double value : values) {
    const double weight = (sum != 0 ? value / sum : value) * (1 << kFraction);
    taps.weights.push_back(static_cast<int32_t>(weight < 0 ? weight - 0.5 : weight + 0.5));
  }
  return taps;
}

std::vector<Taps> all_taps(int64_t in, int64_t out, ResizeFilter filter) {
  std::vector<Taps> taps;
  for (int64_t x = 0; x < out; ++x) taps.push_back(taps_of(x, in, out, filter));
  return taps;
}

uint8_t to_byte(int32_t sum) {
  return static_cast<uint8_t>(std::clamp(sum >> kFraction, 0, 255));
}

template <int64_t kChannels>
void filter_row_of(const uint8_t* row, const Taps* taps, int64_t count, uint8_t* out) {
  for (const Taps* end = taps + count; taps != end; ++taps) {
    int32_t sums[kChannels];
    std::fill_n(sums, kChannels, kHalf);
    const uint8_t* in = row + taps->first * kChannels;
    for (const int32_t weight : taps->weights)
      for (int64_t c = 0; c < kChannels; ++c) sums[c] += *in++ * weight;
    for (const int32_t sum : sums) *out++ = to_byte(sum);
  }
}

void filter_columns(const Image& image, const Taps& taps, std::vector<int32_t>& sums,
                    uint8_t* out) {
  sums.assign(static_cast<size_t>(image.width * image.channels), kHalf);
  const uint8_t* in = image.at(taps.first, 0);
  for (const int32_t weight : taps.weights)
    for (int32_t& sum : sums) sum += *in++ * weight;
  std::ranges::transform(sums, out, to_byte);
}

// Pillow adds the scale repeatedly.
std::vector<int64_t> nearest_positions(int64_t in, int64_t out) {
  const double scale = static_cast<double>(in) / static_cast<double>(out);
  std::vector<int64_t> positions;
  double at = scale * 0.5;
  for (int64_t x = 0; x < out; ++x, at += scale)
    positions.push_back(std::min(in - 1, static_cast<int64_t>(at)));
  return positions;
}

void resize_nearest(const Image& in, Image& out) {
  const std::vector<int64_t> columns = nearest_positions(in.width, out.width);
  uint8_t* to = out.pixels.data();
  for (const int64_t y : nearest_positions(in.height, out.height))
    for (const int64_t x : columns) to = std::copy_n(in.at(y, x), in.channels, to);
}

// ---- Crops -------------------------------------------------------------------------------------

constexpr uint64_t kCropPurpose = 12;  // of rng_stream(), with the step
constexpr uint64_t kCropTries = 10, kCropBlocks = 16;

// Random words of a try; those of try kCropTries decide whether the image is mirrored.
std::array<uint32_t, 4> crop_words(const CropAddress& address, uint64_t crop_try) {
  return philox(address.seed, rng_stream(kCropPurpose, static_cast<uint64_t>(address.step)),
                static_cast<uint64_t>(address.index) * kCropBlocks + crop_try);
}

struct Crop {
  int64_t top, left, height, width;
};

Crop random_crop(const Image& image, const CropAddress& address) {
  constexpr double kLeastArea = 0.08, kRatio = 4.0 / 3;
  const auto height = static_cast<double>(image.height), width = static_cast<double>(image.width);
  const auto below = [](int64_t n, uint32_t word) {
    return static_cast<int64_t>(static_cast<uint64_t>(n) * word >> 32);
  };
  for (uint64_t i = 0; i < kCropTries; ++i) {
    const auto words = crop_words(address, i);
    const double area = height * width * (kLeastArea + (1 - kLeastArea) * (words[0] * 0x1p-32));
    const double ratio = std::exp(std::log(kRatio) * (words[1] * 0x1p-31 - 1));
    const int64_t w = std::llround(std::sqrt(area * ratio));
    const int64_t h = std::llround(std::sqrt(area / ratio));
    if (w > 0 && h > 0 && w <= image.width && h <= image.height)
      return {below(image.height - h + 1, words[2]), below(image.width - w + 1, words[3]), h, w};
  }
  // The largest part in the center with such a ratio.
  const int64_t w = std::min<int64_t>(image.width, std::llround(height * kRatio));
  const int64_t h = std::min<int64_t>(image.height, std::llround(width * kRatio));
  return {(image.height - h) / 2, (image.width - w) / 2, h, w};
}

}  // namespace

Image resized(const Image& image, int64_t height, int64_t width, ResizeFilter filter) {
  const int64_t channels = image.channels;
  COHORT_CHECK(height > 0 && width > 0 && (channels == 1 || channels == 3),
               "[resize] expected a size and 1 or 3 channels, got ", height, " x ", width, ", ",
               channels);
  if (image.height == height && image.width == width) return image;
  Image out = image_of_size(height, width, channels);
  if (filter == ResizeFilter::kNearest) {
    resize_nearest(image, out);
    return out;
  }
  // In strips, because all columns of a tall image may take much more memory than the image.
  constexpr int64_t kStripPixels = 1 << 22;
  const int64_t strip = std::clamp<int64_t>(kStripPixels / image.height, 1, width);
  const std::vector<Taps> columns = all_taps(image.width, width, filter);
  const std::vector<Taps> rows = all_taps(image.height, height, filter);
  const auto filter_row = channels == 3 ? filter_row_of<3> : filter_row_of<1>;
  std::vector<int32_t> sums;
  for (int64_t x = 0; x < width; x += strip) {
    const int64_t n = std::min(strip, width - x);
    Image narrow = image_of_size(image.height, n, channels);
    for (int64_t y = 0; y < image.height; ++y)
      filter_row(image.at(y, 0), &columns[static_cast<size_t>(x)], n, narrow.at(y, 0));
    for (int64_t y = 0; y < height; ++y)
      filter_columns(narrow, rows[static_cast<size_t>(y)], sums, out.at(y, x));
  }
  return out;
}

Image augmented(const Image& image, const CropAddress& address, int64_t size, ResizeFilter filter) {
  const Crop crop = random_crop(image, address);
  Image part = image_of_size(crop.height, crop.width, image.channels);
  for (int64_t y = 0; y < crop.height; ++y)
    std::copy_n(image.at(crop.top + y, crop.left), crop.width * image.channels, part.at(y, 0));
  constexpr int kMirrored = 2;  // an orientation
  return upright(resized(part, size, size, filter),
                 crop_words(address, kCropTries)[0] >> 31 != 0 ? kMirrored : 1);
}

}  // namespace cohort
