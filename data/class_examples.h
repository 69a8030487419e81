// Examples of a classifier: texts or images with a label.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "data/dataset.h"
#include "data/image_processor.h"
#include "data/image_set.h"

namespace cohort {

// The images of data.images as problems.
// Throws InputError where ImageSet does, and if a split is empty.
struct ImageSplits : JsonlSplits {
  std::string fingerprint;
};
ImageSplits load_images(const DataConfig& config);
// preprocessor_config.json of a new model of images of `size` x `size` pixels.
NamedFiles new_image_files(int64_t size);

// The distinct answers of the training problems, sorted. Throws InputError if a held-out one has
// another answer, or if there are fewer than two.
std::vector<std::string> class_labels(const DataSections& config);

// The types of a text as a model of `token_types` takes them: none if it has none. Throws
// InputError for a type that it does not have.
std::vector<int32_t> checked_types(std::vector<int32_t> types, int64_t token_types);

// The input of a classifier.
class ClassReader {
 public:
  struct Model {
    const Tokenizer& tokenizer;
    const std::vector<std::string>& labels;
    int64_t context = 0;
    int64_t image_size = 0, channels = 0;  // 0: it reads texts
    int64_t token_types = 0;
  };
  // Throws InputError if the tokenizer's files do not give images of this size. `seed`: of crops.
  ClassReader(const Model& model, Augment augment, uint64_t seed);
  // Text and pair as the tokenizer's files say, cut to the context: of a pair the longer text; or
  // the pixels of an image, which is augmented but at step -1. Position 0 has the index of the
  // answer in `labels`. Throws InputError naming the example for another answer, and an image that
  // cannot be read.
  TokenSequence read(const Example& example, int64_t step, int64_t index) const;
  // An image as the model's input.
  TokenSequence read_image(const Image& image) const;

 private:
  const Model model_;
  const Augment augment_;
  const uint64_t seed_;
  std::optional<ImageProcessor> processor_;
  Tensor pixel_values_;
};

}  // namespace cohort
