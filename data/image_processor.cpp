#include "data/image_processor.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "text/utf8.h"

namespace cohort {
namespace {

// Fields that are read, and those that change nothing: images are decoded as the model needs them.
constexpr std::string_view kFields =
    "do_resize size resample do_rescale rescale_factor do_normalize image_mean image_std "
    "do_convert_rgb crop_size processor_class _valid_processor_keys data_format device "
    "input_data_format return_tensors disable_grouping";
constexpr std::string_view kProcessors =
    "ViTImageProcessor ViTImageProcessorFast ViTFeatureExtractor";

// True if the images do not depend on the field, or as it is read.
bool is_known(const std::string& name, const Json& value) {
  if (value.is_null()) return true;
  if (name == "resample") return value.as_int() >= 0 && value.as_int() <= 3;
  if (name == "image_processor_type" || name == "feature_extractor_type")
    return has_word(kProcessors, value.as_string());
  // Other fields are off by no; but without default_to_square, `size` is the shortest edge.
  const bool no = value.is_bool() && !value.as_bool();
  return has_word(kFields, name) || no != (name == "default_to_square");
}

std::vector<double> numbers_of(const Json& value) {
  std::vector<double> numbers;
  if (value.is_number()) return {value.as_double()};
  for (const Json& number : value.as_array()) numbers.push_back(number.as_double());
  return numbers;
}

}  // namespace

ImageProcessor ImageProcessor::from_json(const Json& json, const std::string& where) {
  ImageProcessor out;
  const auto read = [&](const char* name, auto& to, const auto& get) {
    if (const Json& value = json.get_or_null(name); !value.is_null()) to = std::invoke(get, value);
  };
  cohort::with_location(json, where, [&] {
    for (const auto& [name, value] : json.as_object())
      if (!is_known(name, value))
        throw JsonError("is not supported; hint: write what ViTImageProcessor reads", &value);
    read("do_resize", out.do_resize, &Json::as_bool);
    read("do_rescale", out.do_rescale, &Json::as_bool);
    read("do_normalize", out.do_normalize, &Json::as_bool);
    read("rescale_factor", out.rescale_factor, &Json::as_double);
    read("image_mean", out.mean, numbers_of);
    read("image_std", out.deviation, numbers_of);
    read("resample", out.filter, [](const Json& v) { return ResizeFilter(v.as_int()); });
    const Json& size = json.get_or_null("size");
    if (size.is_int()) out.height = out.width = size.as_int();
    if (size.is_object())
      out.height = size.at("height").as_int(), out.width = size.at("width").as_int();
  });
  return out;
}

Json ImageProcessor::to_json() const {
  return Json::Object{{"do_normalize", do_normalize},
                      {"do_rescale", do_rescale},
                      {"do_resize", do_resize},
                      {"image_mean", Json::Array(mean.begin(), mean.end())},
                      {"image_processor_type", "ViTImageProcessor"},
                      {"image_std", Json::Array(deviation.begin(), deviation.end())},
                      {"resample", static_cast<int>(filter)},
                      {"rescale_factor", rescale_factor},
                      {"size", Json::Object{{"height", height}, {"width", width}}}};
}

void ImageProcessor::fit(int64_t image_size, int64_t channels, const std::string& where) {
  if (!do_resize) height = width = image_size;
  for (std::vector<double>* values : {&mean, &deviation})
    if (values->size() == 1) values->resize(static_cast<size_t>(channels), values->front());
  const auto is_finite = [](float value) { return std::isfinite(value); };
  if (height != image_size || width != image_size || std::ssize(mean) != channels ||
      std::ssize(deviation) != channels || !std::ranges::all_of(table(), is_finite))
    throw InputError(str(where, ": size, rescale_factor, image_mean and image_std give no finite ",
                         "images of ", image_size, " x ", image_size, " pixels and ", channels,
                         " channels, as the model takes; hint: correct them"));
}

Image ImageProcessor::prepare(const Image& image) const {
  if (do_resize) return resized(image, height, width, filter);
  if (image.height != height || image.width != width)
    throw InputError(str("has ", image.height, " x ", image.width, " pixels, but the model takes ",
                         height, " x ", width, "; hint: do_resize: true"));
  return image;
}

std::vector<float> ImageProcessor::table() const {
  std::vector<float> values;
  for (size_t c = 0; c < mean.size(); ++c)
    for (int byte = 0; byte < 256; ++byte) {
      const auto value = static_cast<float>(do_rescale ? byte * rescale_factor : byte);
      const float centered = value - static_cast<float>(mean[c]);
      values.push_back(do_normalize ? centered / static_cast<float>(deviation[c]) : value);
    }
  return values;
}

}  // namespace cohort
