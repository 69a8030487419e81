#include "data/image_processor.h"

#include <algorithm>
#include <cmath>

namespace cohort {
namespace {

constexpr const char* kTypes[] = {"ViTImageProcessor", "ViTImageProcessorFast",
                                  "ViTFeatureExtractor"};
// Fields that are read, and those that change nothing: images are decoded as the model needs them.
constexpr const char* kKnownFields[] = {"do_resize",
                                        "size",
                                        "resample",
                                        "do_rescale",
                                        "rescale_factor",
                                        "do_normalize",
                                        "image_mean",
                                        "image_std",
                                        "image_processor_type",
                                        "feature_extractor_type",
                                        "do_convert_rgb",
                                        "crop_size",
                                        "processor_class",
                                        "_valid_processor_keys",
                                        "data_format",
                                        "input_data_format",
                                        "return_tensors",
                                        "device",
                                        "disable_grouping",
                                        "default_to_square"};

// Calls read(value) unless the field is absent or null.
template <class Read>
void if_given(const Json& json, const char* field, const Read& read) {
  if (const Json& value = json.get_or_null(field); !value.is_null()) read(value);
}

void check_fields(const Json& json) {
  for (const auto& [name, value] : json.as_object()) {
    const bool blank = value.is_null() || (value.is_bool() && !value.as_bool());
    if (!blank && std::ranges::find(kKnownFields, name) == std::end(kKnownFields))
      throw JsonError("is not supported; hint: images are prepared as by ViTImageProcessor",
                      &value);
  }
  for (const char* field : {"image_processor_type", "feature_extractor_type"})
    if_given(json, field, [](const Json& type) {
      if (std::ranges::find(kTypes, type.as_string()) == std::end(kTypes))
        throw JsonError(str("expected ", kTypes[0], ", ", kTypes[1], " or ", kTypes[2], ", got ",
                            type.as_string()),
                        &type);
    });
}

int64_t side_of(const Json& value) {
  constexpr int64_t kMost = 4096;
  if (value.as_int() >= 1 && value.as_int() <= kMost) return value.as_int();
  throw JsonError(str("expected 1 to ", kMost, ", got ", value.as_int()), &value);
}

void read_size(const Json& json, const Json& size, ImageProcessor& out) {
  if (size.is_int()) {
    const Json& square = json.get_or_null("default_to_square");
    if (!square.is_null() && !square.as_bool())
      throw JsonError("is the shortest edge; hint: size: {height: ..., width: ...}", &size);
    out.height = out.width = side_of(size);
    return;
  }
  if (size.as_object().size() != 2)
    throw JsonError("expected height and width alone; hint: ViT takes one size", &size);
  out.height = side_of(size.at("height"));
  out.width = side_of(size.at("width"));
}

std::vector<double> numbers_of(const Json& value) {
  if (value.is_number()) return {value.as_double()};
  std::vector<double> numbers;
  for (const Json& number : value.as_array()) numbers.push_back(number.as_double());
  return numbers;
}

Json json_of(const std::vector<double>& numbers) {
  return Json::Array(numbers.begin(), numbers.end());
}

}  // namespace

ImageProcessor ImageProcessor::from_json(const Json& json, const std::string& where) {
  return cohort::with_location(json, where, [&] {
    check_fields(json);
    ImageProcessor out;
    const auto flag = [&](const char* field, bool& to) {
      if_given(json, field, [&](const Json& value) { to = value.as_bool(); });
    };
    flag("do_resize", out.do_resize);
    flag("do_rescale", out.do_rescale);
    flag("do_normalize", out.do_normalize);
    if_given(json, "size", [&](const Json& size) { read_size(json, size, out); });
    if_given(json, "resample", [&](const Json& value) {
      if (value.as_int() < 0 || value.as_int() > 3)
        throw JsonError("expected 0 (nearest), 1 (lanczos), 2 (bilinear) or 3 (bicubic)", &value);
      out.filter = static_cast<ResizeFilter>(value.as_int());
    });
    if_given(json, "rescale_factor",
             [&](const Json& value) { out.rescale_factor = value.as_double(); });
    if_given(json, "image_mean", [&](const Json& value) { out.mean = numbers_of(value); });
    if_given(json, "image_std", [&](const Json& value) { out.deviation = numbers_of(value); });
    return out;
  });
}

Json ImageProcessor::to_json() const {
  return Json::Object{{"do_normalize", do_normalize},
                      {"do_rescale", do_rescale},
                      {"do_resize", do_resize},
                      {"image_mean", json_of(mean)},
                      {"image_processor_type", kTypes[0]},
                      {"image_std", json_of(deviation)},
                      {"resample", static_cast<int>(filter)},
                      {"rescale_factor", rescale_factor},
                      {"size", Json::Object{{"height", height}, {"width", width}}}};
}

void ImageProcessor::fit(int64_t image_size, int64_t channels, const std::string& where) {
  if (!do_resize) height = width = image_size;
  if (height != image_size || width != image_size)
    throw InputError(str(where, ": size: ", height, " x ", width,
                         ", but the model's image_size is ", image_size,
                         "; hint: size: {height: ", image_size, ", width: ", image_size, "}"));
  for (auto [field, values] :
       {std::pair{"image_mean", &mean}, std::pair{"image_std", &deviation}}) {
    if (values->size() == 1) values->resize(static_cast<size_t>(channels), values->front());
    if (std::ssize(*values) != channels)
      throw InputError(str(where, ": ", field, ": has ", values->size(),
                           " numbers, but the model has ", channels,
                           " channels; hint: one number for each"));
  }
  const std::vector<float> values = table();
  if (!std::ranges::all_of(values, [](float v) { return std::isfinite(v); }))
    throw InputError(str(where,
                         ": rescale_factor, image_mean and image_std give pixels that are not "
                         "finite; hint: image_std must not be 0"));
}

Image ImageProcessor::prepare(const Image& image) const {
  if (do_resize) return resized(image, height, width, filter);
  if (image.height != height || image.width != width)
    throw InputError(str("has ", image.width, " x ", image.height, " pixels, but the model takes ",
                         width, " x ", height, " and do_resize is false; hint: do_resize: true"));
  return image;
}

std::vector<float> ImageProcessor::table() const {
  std::vector<float> values;
  for (size_t c = 0; c < mean.size(); ++c)
    for (int byte = 0; byte < 256; ++byte) {
      const float value =
          do_rescale ? static_cast<float>(byte * rescale_factor) : static_cast<float>(byte);
      const float centered = value - static_cast<float>(mean[c]);
      values.push_back(do_normalize ? centered / static_cast<float>(deviation[c]) : value);
    }
  return values;
}

}  // namespace cohort
