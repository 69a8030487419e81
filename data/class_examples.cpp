#include "data/class_examples.h"

#include <algorithm>
#include <set>

#include "data/split.h"
#include "sys/input_file.h"
#include "text/tokenizers/json_fields.h"

namespace cohort {

ImageSplits load_images(const DataConfig& config) {
  const ImagesConfig& own = config.images;
  const bool split = own.eval_path.empty();
  const auto images = std::make_shared<const ImageSet>(own.path, own.field, own.label);
  const double fraction = split ? config.jsonl.held_out() : 0;
  std::vector<int64_t> train, held_out;
  for (int64_t i = 0; i < images->size(); ++i)
    (is_held_out(images->id(i).split, fraction) ? held_out : train).push_back(i);
  if (fraction > 0 && fraction < 1 && (train.empty() || held_out.empty()))
    throw InputError(str("data.held_out_fraction: ", fraction, " of the ", images->size(),
                         " images of ", own.path,
                         " leaves a part without any; hint: another "
                         "fraction, or data.images.eval_path"));
  const auto part = [&](std::vector<int64_t> indices) {
    return make_changed_set(
        images, [](Example&) {}, std::move(indices));
  };
  ImageSplits out{{part(std::move(train)), part(std::move(held_out)), {}}, images->fingerprint()};
  if (split) return out;
  const auto eval =
      std::make_shared<const ImageSet>(own.eval_path, own.field, own.label, images->labels());
  out.held_out = make_changed_set(eval, [](Example&) {});
  out.fingerprint += "+" + eval->fingerprint();
  return out;
}

NamedFiles new_image_files(int64_t size) {
  const ImageProcessor processor{.height = size, .width = size};
  return {{kImageFile, processor.to_json().dump(2) + "\n"}};
}

std::vector<std::string> class_labels(const DataSections& config) {
  const bool images = !config.data.images.path.empty();
  JsonlConfig jsonl = config.data.jsonl;
  jsonl.teaches = true;
  const auto [train, held_out, sizes] = images ? load_images(config.data) : load_jsonl(jsonl);
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
  if (!example.other_answers.empty())
    throw InputError(example.where + ": has several labels; hint: a text has one class");
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
    out = with_path(example.where, [&] { return read_image(image); });
  } else {
    EncodedText text = model_.tokenizer.encode_texts(example.prompt, example.pair, model_.context);
    out.tokens = std::move(text.ids);
    out.types = with_path(example.where,
                          [&] { return checked_types(std::move(text.types), model_.token_types); });
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
