// Resizing to Pillow's bits, and addressed crops.
#include "data/resize.h"

#include <cmath>
#include <set>

#include "tests/data/image_fixture.h"

namespace cohort {
namespace {

constexpr ResizeFilter kFilters[] = {ResizeFilter::kNearest, ResizeFilter::kLanczos,
                                     ResizeFilter::kBilinear, ResizeFilter::kBicubic};
constexpr const char* kFilterNames[] = {"nearest", "lanczos", "bilinear", "bicubic"};

Image gray_image(int64_t height, int64_t width, std::vector<uint8_t> pixels) {
  return {height, width, 1, std::move(pixels)};
}

// Pixel (y, x) has the channels 7 y + x, 255 - x, y.
Image ramp(int64_t height, int64_t width) {
  Image image{height, width, 3};
  for (int64_t y = 0; y < height; ++y)
    for (int64_t x = 0; x < width; ++x) {
      uint8_t* const pixel = &image.pixels[image.offset(y, x)];
      pixel[0] = static_cast<uint8_t>(7 * y + x);
      pixel[1] = static_cast<uint8_t>(255 - x);
      pixel[2] = static_cast<uint8_t>(y);
    }
  return image;
}

TEST(Resizing, HasPillowsBits) {
  COHORT_REQUIRE_IMAGES(fixture);
  int compared = 0;
  for (const Json& file : fixture.at("images").as_array()) {
    const Json* all = file.find("resized");
    if (all == nullptr) continue;
    const Image image = decode_image(test::base64(file.at("file").as_string()), 3, "");
    for (const Json& expected : all->as_array())
      for (const ResizeFilter filter : kFilters) {
        if (expected.at("filter").as_string() != kFilterNames[static_cast<int>(filter)]) continue;
        const Image out =
            resized(image, expected.at("height").as_int(), expected.at("width").as_int(), filter);
        const std::string bytes = test::base64(expected.at("rgb").as_string());
        EXPECT_EQ(std::string(out.pixels.begin(), out.pixels.end()), bytes)
            << file.at("name").as_string() << expected.at("filter").as_string();
        ++compared;
      }
  }
  EXPECT_EQ(compared, 48);
}

// By Pillow 12: Image.fromarray(...).resize((5, 1), filter) and ((2, 1), filter).
TEST(Resizing, HasPillowsBitsOfARow) {
  const Image row = gray_image(1, 4, {0, 255, 10, 100});
  const std::vector<std::vector<uint8_t>> five = {
      {0, 255, 10, 10, 100}, {0, 203, 156, 5, 110}, {0, 179, 133, 37, 100}, {0, 201, 143, 18, 104}};
  const std::vector<std::vector<uint8_t>> two = {{255, 100}, {113, 87}, {111, 84}, {114, 81}};
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(resized(row, 1, 5, kFilters[i]).pixels, five[i]);
    EXPECT_EQ(resized(row, 1, 2, kFilters[i]).pixels, two[i]);
    EXPECT_EQ(resized(gray_image(4, 1, row.pixels), 5, 1, kFilters[i]).pixels, five[i]);
  }
}

TEST(Resizing, TheSameSizeIsTheSameImage) {
  for (const ResizeFilter filter : kFilters)
    EXPECT_EQ(resized(ramp(5, 9), 5, 9, filter).pixels, ramp(5, 9).pixels);
}

TEST(Resizing, ChannelsAndStripsDoNotMix) {
  // More columns than a strip has: each channel is as if it were alone.
  const Image image = ramp(3, 40);
  for (const ResizeFilter filter : kFilters) {
    const Image all = resized(image, 4, 700, filter);
    for (size_t c = 0; c < 3; ++c) {
      Image one{3, 40, 1};
      for (size_t i = 0; i < one.pixels.size(); ++i) one.pixels[i] = image.pixels[3 * i + c];
      const Image out = resized(one, 4, 700, filter);
      for (size_t i = 0; i < out.pixels.size(); ++i)
        ASSERT_EQ(all.pixels[3 * i + c], out.pixels[i]) << i;
    }
  }
}

TEST(Resizing, ExtremeSidesAreFinite) {
  for (const ResizeFilter filter : kFilters) {
    const Image tall = resized(Image{20000, 1, 1, std::vector<uint8_t>(20000, 9)}, 2, 300, filter);
    EXPECT_EQ(tall.pixels, std::vector<uint8_t>(600, 9));
    EXPECT_EQ(resized(Image{1, 1, 3, {1, 2, 3}}, 1, 2, filter).pixels,
              (std::vector<uint8_t>{1, 2, 3, 1, 2, 3}));
  }
}

TEST(Crops, DependOnSeedStepAndIndexAlone) {
  const Image image = ramp(30, 40);
  std::set<std::vector<uint8_t>> found;
  for (uint64_t seed = 0; seed < 2; ++seed)
    for (int64_t step = 0; step < 4; ++step)
      for (int64_t index = 0; index < 4; ++index) {
        const Image crop = augmented(image, seed, step, index, 8, ResizeFilter::kBilinear);
        EXPECT_EQ(crop.height, 8);
        EXPECT_EQ(crop.width, 8);
        EXPECT_EQ(crop.pixels,
                  augmented(image, seed, step, index, 8, ResizeFilter::kBilinear).pixels);
        found.insert(crop.pixels);
      }
  EXPECT_EQ(found.size(), 32u);
}

TEST(Crops, HaveTheAreasAndRatiosOfTheDefinition) {
  // Nearest pixels of a ramp whose value is the column tell the crop's width and its direction.
  Image image{200, 200, 3};
  for (int64_t y = 0; y < 200; ++y)
    for (int64_t x = 0; x < 200; ++x) {
      image.pixels[image.offset(y, x)] = static_cast<uint8_t>(x);
      image.pixels[image.offset(y, x) + 1] = static_cast<uint8_t>(y);
    }
  constexpr int kDraws = 2000;
  int mirrored = 0;
  double area = 0, least = 1, ratio_logs = 0;
  for (int i = 0; i < kDraws; ++i) {
    // 100 pixels of the result span 100 of 101 parts of the crop.
    const Image crop = augmented(image, 1, 0, i, 101, ResizeFilter::kNearest);
    const auto first = crop.pixels[0], last = crop.pixels[crop.offset(0, 100)];
    mirrored += first > last ? 1 : 0;
    const double width = std::abs(last - first) * 1.01,
                 height = (crop.pixels[crop.offset(100, 0) + 1] - crop.pixels[1]) * 1.01;
    area += width * height / 40000 / kDraws;
    least = std::min(least, width * height / 40000);
    ratio_logs += std::log(width / height) / kDraws;
    EXPECT_LT(std::abs(std::log(width / height)), std::log(4.0 / 3) + 0.06);
  }
  // Half of 2,000: the standard deviation is 22.
  EXPECT_NEAR(mirrored, kDraws / 2, 100);
  // Uniform from 0.08 to 1, of which the largest fit only with ratios near 1: below its mean, 0.54.
  EXPECT_NEAR(area, 0.51, 0.03);
  EXPECT_NEAR(least, 0.08, 0.01);
  EXPECT_NEAR(ratio_logs, 0, 0.02);
}

TEST(Crops, OfExtremeImagesAreCentral) {
  // No ratio from 3/4 to 4/3 fits: the central part with 4/3.
  Image wide{3, 300, 1};
  for (int64_t x = 0; x < 300; ++x)
    wide.pixels[static_cast<size_t>(x)] = wide.pixels[static_cast<size_t>(300 + x)] =
        wide.pixels[static_cast<size_t>(600 + x)] = static_cast<uint8_t>(x % 251);
  bool central = false;
  for (int64_t i = 0; i < 20; ++i) {
    Image crop = augmented(wide, 1, 0, i, 4, ResizeFilter::kNearest);
    if (crop.pixels[0] > crop.pixels[3]) crop = upright(crop, 2);
    central = central || (crop.pixels[0] == 148 && crop.pixels[3] == 151);
  }
  EXPECT_TRUE(central);
}

}  // namespace
}  // namespace cohort
