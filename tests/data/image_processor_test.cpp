// preprocessor_config.json and the pixels of ViTImageProcessor.
#include "data/image_processor.h"

#include "tests/data/image_fixture.h"
#include "tests/support/sha256.h"

namespace cohort {
namespace {

ImageProcessor read_processor(const std::string& text) {
  return ImageProcessor::from_json(parse_json(text, "p.json"), "p.json");
}

void expect_config_refused(const std::string& text, const std::string& message) {
  EXPECT_THROW_WITH(read_processor(text), InputError, "p.json: " + message);
}

// [channels, height, width], as transformers has them.
std::vector<float> pixel_values_of(const ImageProcessor& processor, const Image& image) {
  const std::vector<float> table = processor.table();
  std::vector<float> values;
  for (size_t c = 0; c < 3; ++c)
    for (size_t i = c; i < image.pixels.size(); i += 3)
      values.push_back(table[c * 256 + image.pixels[i]]);
  return values;
}

TEST(ImageProcessors, HaveTheF32BytesOfTransformers) {
  COHORT_REQUIRE_IMAGES(fixture);
  int compared = 0;
  for (const Json& expected : fixture.at("pipeline").as_array()) {
    std::string bytes;
    for (const Json& file : fixture.at("images").as_array())
      if (file.at("name").as_string() == expected.at("image").as_string())
        bytes = test::base64(file.at("file").as_string());
    ImageProcessor processor = ImageProcessor::from_json(expected.at("config"), "config");
    const Image image = decode_image(bytes, 3, "");
    const Image prepared = processor.do_resize ? processor.prepare(image) : image;
    EXPECT_EQ(prepared.height, expected.at("shape").as_array()[1].as_int());
    EXPECT_EQ(prepared.width, expected.at("shape").as_array()[2].as_int());
    const std::vector<float> values = pixel_values_of(processor, prepared);
    EXPECT_EQ(test::sha256(values.data(), values.size() * sizeof(float)),
              expected.at("sha256_f32").as_string());
    ++compared;
  }
  EXPECT_EQ(compared, 6);
}

TEST(ImageProcessors, ReadTheFieldsOfEachType) {
  const ImageProcessor defaults = read_processor("{}");
  EXPECT_TRUE(defaults.do_resize && defaults.do_rescale && defaults.do_normalize);
  EXPECT_EQ(defaults.height, 224);
  EXPECT_EQ(defaults.filter, ResizeFilter::kBilinear);
  EXPECT_EQ(defaults.rescale_factor, 1.0 / 255);
  const ImageProcessor old = read_processor(
      R"({"feature_extractor_type": "ViTFeatureExtractor", "size": 32, "resample": 3,
          "do_rescale": false, "image_mean": [1, 2, 3], "image_std": 2, "do_center_crop": false,
          "crop_size": {"height": 9, "width": 9}, "do_convert_rgb": null, "do_pad": null})");
  EXPECT_EQ(old.height, 32);
  EXPECT_EQ(old.width, 32);
  EXPECT_EQ(old.filter, ResizeFilter::kBicubic);
  EXPECT_FALSE(old.do_rescale);
  EXPECT_EQ(old.mean, (std::vector<double>{1, 2, 3}));
  EXPECT_EQ(old.deviation, (std::vector<double>{2}));
  read_processor(R"({"image_processor_type": "ViTImageProcessorFast", "default_to_square": true,
           "data_format": "channels_first", "size": {"height": 8, "width": 9}})");
}

TEST(ImageProcessors, WhatMayChangeThePixelsIsRefusedByName) {
  expect_config_refused(R"({"do_center_crop": true})", "do_center_crop: is not supported");
  expect_config_refused(R"({"do_flip_channel_order": true})", "do_flip_channel_order: ");
  expect_config_refused(R"({"image_processor_type": "CLIPImageProcessor"})",
                        "image_processor_type: ");
  expect_config_refused(R"({"size": {"shortest_edge": 224}})", "size: ");
  expect_config_refused(R"({"size": 8, "default_to_square": false})", "default_to_square: ");
  expect_config_refused(R"({"resample": 4})", "resample: ");
  expect_config_refused(R"({"resample": -1})", "resample: ");
  expect_config_refused(R"({"resample": 4294967296})", "resample: ");
  expect_config_refused(R"({"image_mean": "0.5"})", "image_mean: ");
  expect_config_refused(R"({"image_mean": [0.5, null, 1]})", "image_mean[1]: ");
  expect_config_refused(R"({"do_resize": 1})", "do_resize: ");
  expect_config_refused("[1]", "expected an object");
}

TEST(ImageProcessors, RoundTrip) {
  ImageProcessor processor = read_processor(R"({"size": {"height": 20, "width": 20}, "resample": 1,
      "image_mean": [0.485, 0.456, 0.406], "image_std": 0.25, "rescale_factor": 0.01})");
  processor.fit(20, 3, "p.json");
  const Json json = processor.to_json();
  EXPECT_EQ(json.at("image_std").dump(), "[0.25,0.25,0.25]");
  EXPECT_EQ(json.at("image_processor_type").as_string(), "ViTImageProcessor");
  const ImageProcessor again = ImageProcessor::from_json(json, "p.json");
  EXPECT_EQ(again.to_json().dump(), json.dump());
  EXPECT_EQ(again.table(), processor.table());
}

TEST(ImageProcessors, FitTheModelOrAreRefused) {
  ImageProcessor gray = read_processor(R"({"size": 8})");
  gray.fit(8, 1, "p.json");
  EXPECT_EQ(gray.table().size(), 256u);
  EXPECT_EQ(gray.table()[255], 1);
  EXPECT_EQ(gray.table()[0], -1);
  EXPECT_THROW_WITH(read_processor(R"({"size": 8})").fit(9, 3, "p.json"), InputError, "9 x 9");
  EXPECT_THROW_WITH(read_processor(R"({"size": 8, "image_mean": [1, 2]})").fit(8, 3, "p.json"),
                    InputError, "image_mean");
  EXPECT_THROW_WITH(read_processor(R"({"size": 8, "image_std": [1, 1]})").fit(8, 3, "p.json"),
                    InputError, "image_std");
  EXPECT_THROW_WITH(read_processor(R"({"size": 8, "image_std": 0})").fit(8, 3, "p.json"),
                    InputError, "finite");
  EXPECT_THROW_WITH(read_processor(R"({"size": 8, "image_mean": 1e300})").fit(8, 3, "p.json"),
                    InputError, "finite");
}

TEST(ImageProcessors, WithoutResizingOtherSizesAreRefused) {
  ImageProcessor processor = read_processor(R"({"do_resize": false, "do_normalize": false})");
  processor.fit(2, 1, "p.json");
  EXPECT_EQ(processor.prepare(Image{2, 2, 1, {1, 2, 3, 4}}).pixels,
            (std::vector<uint8_t>{1, 2, 3, 4}));
  EXPECT_THROW_WITH(processor.prepare(Image{2, 3, 1}), InputError, "do_resize");
  EXPECT_EQ(processor.table()[51], 0.2F);
}

}  // namespace
}  // namespace cohort
