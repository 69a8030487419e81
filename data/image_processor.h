// Preparation of images for a vision transformer: size and normalisation.
#pragma once

#include <string>
#include <vector>

#include "data/resize.h"
#include "text/json.h"

namespace cohort {

// The fields of a preprocessor_config.json of transformers' ViTImageProcessor, with its defaults.
struct ImageProcessor {
  bool do_resize = true;
  int64_t height = 224, width = 224;
  ResizeFilter filter = ResizeFilter::kBilinear;
  bool do_rescale = true;
  double rescale_factor = 1.0 / 255;
  bool do_normalize = true;
  std::vector<double> mean = {0.5}, deviation = {0.5};  // one for each channel, or one for all

  // Throws InputError naming `where` and a field that is not valid, or not known and not blank.
  static ImageProcessor from_json(const Json& json, const std::string& where);
  Json to_json() const;
  // Sets the channels that one value is for, and the size where none is set by resizing. Throws
  // InputError naming `where` if the model needs another size or number of channels, and if a
  // value of the table is not finite.
  void fit(int64_t image_size, int64_t channels, const std::string& where);
  // The image in the model's size. Throws InputError without a location if it has another one and
  // is not to be resized.
  Image prepare(const Image& image) const;
  // [channels][256]: the model's input for each byte. As ViTImageProcessor computes it: rescaled in
  // f64, then rounded to f32 after each step.
  std::vector<float> table() const;
};

}  // namespace cohort
