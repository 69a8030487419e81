#include "data/class_examples.h"

#include <algorithm>
#include <set>

#include "data/split.h"
#include "sys/input_file.h"

namespace cohort {
namespace {

// Some of the images of a set.
class ImageExamples final : public ExampleSet {
 public:
  ImageExamples(std::shared_ptr<const ImageSet> images, std::vector<int64_t> indices)
      : images_(std::move(images)), indices_(std::move(indices)) {}
  int64_t size() const override { return std::ssize(indices_); }
  Example get(int64_t index) const override {
    const int64_t i = indices_.at(static_cast<size_t>(index));
    const auto label = static_cast<size_t>(images_->label(i));
    return {.prompt = images_->where(i),
            .answer = images_->labels()[label],
            .images = images_,
            .image = i,
            .where = images_->where(i)};
  }
  ExampleId id(int64_t index) const override {
    return {.split = images_->split(indices_.at(static_cast<size_t>(index)))};
  }

 private:
  std::shared_ptr<const ImageSet> images_;
  std::vector<int64_t> indices_;
};

}  // namespace

ImageSplits load_images(const DataConfig& config) {
  const ImagesConfig& own = config.images;
  const auto all = std::make_shared<const ImageSet>(own.path, own.field, own.label);
  ImageSplits out{.fingerprint = all->fingerprint()};
  // The images of a part of a set: all of it, or those that are held out, or are not.
  const auto part = [](const std::shared_ptr<const ImageSet>& set, const auto& wanted) {
    std::vector<int64_t> indices;
    for (int64_t i = 0; i < set->size(); ++i)
      if (wanted(set->split(i))) indices.push_back(i);
    return std::make_unique<ImageExamples>(set, std::move(indices));
  };
  const double fraction = own.eval_path.empty() ? config.jsonl.held_out() : 0;
  out.train = part(all, [&](uint64_t hash) { return !is_held_out(hash, fraction); });
  if (own.eval_path.empty()) {
    out.held_out = part(all, [&](uint64_t hash) { return is_held_out(hash, fraction); });
  } else {
    const auto eval =
        std::make_shared<const ImageSet>(own.eval_path, own.field, own.label, all->labels());
    out.held_out = part(eval, [](uint64_t) { return true; });
    out.fingerprint += "+" + eval->fingerprint();
  }
  if (fraction > 0 && fraction < 1 && (out.train->size() == 0 || out.held_out->size() == 0))
    throw InputError(str("data.held_out_fraction: ", fraction, " of the ", all->size(),
                         " images of ", own.path,
                         " leaves a part without any; hint: another "
                         "fraction, or data.images.eval_path"));
  return out;
}

NamedFiles new_image_files(int64_t size) {
  const ImageProcessor processor{.height = size, .width = size};
  return {{kImageFile, processor.to_json().dump(2) + "\n"}};
}

std::vector<std::string> class_labels(const DataSections& config) {
  const bool images = !config.data.images.path.empty();
  std::unique_ptr<ExampleSet> train, held_out;
  if (images) {
    ImageSplits splits = load_images(config.data);
    train = std::move(splits.train);
    held_out = std::move(splits.held_out);
  } else {
    JsonlConfig jsonl = config.data.jsonl;
    jsonl.teaches = true;
    JsonlSplits splits = load_jsonl(jsonl);
    train = std::move(splits.train);
    held_out = std::move(splits.held_out);
  }
  std::set<std::string> labels;
  for (int64_t i = 0; i < train->size(); ++i) labels.insert(train->get(i).answer);
  for (int64_t i = 0; i < held_out->size() && !labels.empty(); ++i)
    if (const Example e = held_out->get(i); !labels.contains(e.answer))
      throw InputError(str(e.where, ": no training example has the label '", e.answer,
                           "' of this held-out one; hint: other files, data.split_by or another "
                           "data.held_out_fraction"));
  if (labels.size() < 2)
    throw InputError(str(
        images ? "data.images" : "data.jsonl", ": the training examples have ",
        labels.empty() ? std::string("no label") : str("only the label '", *labels.begin(), "'"),
        images ? "" : "; hint: data.jsonl.answer names the field of the label"));
  return {labels.begin(), labels.end()};
}

std::vector<int32_t> checked_types(std::vector<int32_t> types, int64_t token_types) {
  if (token_types == 0 || types.empty()) return {};
  if (const int32_t largest = *std::ranges::max_element(types); largest >= token_types)
    throw InputError(str("the tokenizer gives a second text the type ", largest,
                         ", and the model has ", token_types, token_types == 1 ? " type" : " types",
                         "; hint: the tokenizer of another model?"));
  return types;
}

ClassReader::ClassReader(const Model& model, Augment augment, uint64_t seed)
    : model_(model), augment_(augment), seed_(seed) {
  if (model.image_size == 0) return;
  const NamedFiles files = model.tokenizer.files();
  const std::string* const text = find_file(files, kImageFile);
  processor_ = ImageProcessor{.height = model.image_size, .width = model.image_size};
  if (text != nullptr)
    processor_ = ImageProcessor::from_json(parse_json(*text, kImageFile), kImageFile);
  processor_->fit(model.image_size, model.channels, kImageFile);
  pixel_values_ = Tensor::from(processor_->table(), {model.channels, 256});
}

TokenSequence ClassReader::read(const Example& example, int64_t step, int64_t index) const {
  const auto label = std::ranges::find(model_.labels, example.answer);
  if (label == model_.labels.end())
    throw InputError(str(example.where, ": the label '", example.answer,
                         "' is none of the model's: ", join(model_.labels, ", "),
                         did_you_mean(example.answer, model_.labels)));
  if ((example.images != nullptr) != processor_.has_value())
    throw InputError(str(example.where, ": the model reads ", processor_ ? "images" : "texts"));
  TokenSequence out;
  if (processor_) {
    Image image = example.images->load(example.image, model_.channels);
    if (augment_ == Augment::kCropFlip && step >= 0)
      image = augmented(image, seed_, step, index, model_.image_size, processor_->filter);
    try {
      out = read_image(image);
    } catch (const InputError& e) {
      throw InputError(str(example.where, ": ", e.what()));
    }
  } else {
    const auto pair = example.pair.empty() ? std::nullopt : std::optional(example.pair);
    EncodedText text = model_.tokenizer.encode_texts(example.prompt, pair, model_.context);
    out.tokens = std::move(text.ids);
    out.types = checked_types(std::move(text.types), model_.token_types);
    out.labels.assign(out.tokens.size(), -1);
  }
  out.index = index;
  out.labels.at(0) = static_cast<int32_t>(label - model_.labels.begin());
  return out;
}

TokenSequence ClassReader::read_image(const Image& image) const {
  return {.labels = std::vector<int32_t>(static_cast<size_t>(model_.context), -1),
          .pixels = processor_->prepare(image).pixels,
          .pixel_values = pixel_values_};
}

}  // namespace cohort
