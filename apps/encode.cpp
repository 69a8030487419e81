// `cohort fill-mask`, `classify` and `embed`: encoders asked about texts, and images.
#include <algorithm>

#include "apps/commands.h"
#include "data/class_examples.h"
#include "data/parallel_try.h"
#include "job/encode.h"
#include "nn/model_folder.h"
#include "sys/files.h"

namespace cohort::apps {
namespace {

// Bytes of a block of texts or images: they are read and answered in blocks, as input may never
// end.
constexpr size_t kBlock = size_t{1} << 20, kImageBlock = size_t{1} << 26;

struct TextBlock {
  size_t begin = 0;         // texts before it
  std::vector<Json> lines;  // with "text", "text_pair"; or "image": its path or data URI
  std::vector<TokenSequence> sequences;  // without targets
  std::string name_of(size_t i) const { return str("text ", begin + i + 1); }
};

// encode_text() of a line.
bool encode(const LoadedModel& loaded, const SentenceFolder& folder, const Json& line,
            TokenSequence& out) {
  if (line.find("pair") != nullptr) throw InputError("pair: a second text is called text_pair");
  const std::string& text = line.at("text").as_string();
  std::optional<std::string_view> pair;
  if (const Json* const second = line.find("text_pair")) pair = second->as_string();
  return encode_text(loaded, folder, text, pair, out);
}

void for_blocks(const EncodeOptions& options, const LoadedModel& loaded,
                const SentenceFolder& folder, const std::function<void(TextBlock&)>& use) {
  const auto next = text_source(options.texts);
  const ModelConfig& config = loaded.model->config();
  std::optional<ClassReader> images;
  if (config.has_images())
    images.emplace(ClassReader::Model{*loaded.tokenizer, config.labels, config.context,
                                      config.image_size, config.channels, config.token_types},
                   Augment::kNone, 0);
  const char* const field = images ? "image" : "text";
  const auto of_image =
      static_cast<size_t>(config.image_size * config.image_size * config.channels);
  bool noted = false;
  for (TextBlock block;; block = {.begin = block.begin + block.lines.size()}) {
    size_t bytes = 0;
    for (std::string text; bytes < (images ? kImageBlock : kBlock) && next(text);
         bytes += text.size() + sizeof(Json) + of_image) {
      Json line = text;
      if (options.json_input) line = parse_json(text, block.name_of(block.lines.size()));
      block.lines.push_back(line.is_object() ? line : Json().set(field, line));
    }
    if (block.lines.empty()) return;
    block.sequences.resize(block.lines.size());
    std::vector<uint8_t> cut(block.lines.size());
    parallel_try(std::ssize(cut), 4, [&](int64_t at) {
      const auto i = static_cast<size_t>(at);
      const Json& line = block.lines[i];
      with_path(block.name_of(i), [&] {
        if (images)
          block.sequences[i] =
              images->read_image(read_image(line.at(field).as_string(), config.channels));
        else
          cut[i] = encode(loaded, folder, line, block.sequences[i]);
      });
    });
    for (size_t i = 0; i < cut.size() && !noted; ++i)
      if ((noted = cut[i] != 0))
        print_error(str(block.name_of(i), " is cut to ", block.sequences[i].tokens.size(),
                        " tokens; others are without a note"));
    use(block);
  }
}

// Prints the lines of a block, to which add(line, predictions of its targets) adds the answer.
void answer(const TextBlock& block, const LoadedModel& loaded, int64_t top,
            const std::function<void(Json&, std::span<const Predictions>)>& add) {
  std::vector<Predictions> all;
  for (const PackedBatch& batch :
       pack_micro_batches(block.sequences, batch_tokens(loaded.model->device())))
    for (Predictions& one : predict(*loaded.model, batch, top)) all.push_back(std::move(one));
  auto begin = all.cbegin();
  for (size_t i = 0; i < block.lines.size(); ++i) {
    const std::span targets(begin, begin + block.sequences[i].num_targets());
    begin += std::ssize(targets);
    if (std::ranges::any_of(targets, &Predictions::empty))
      throw_not_finite(block.name_of(i), loaded.checkpoint);
    Json line = block.lines[i];
    add(line, targets);
    print_now(line.dump() + "\n");
  }
}

void require_head(const LoadedModel& loaded, HeadType head, const char* name, const char* hint) {
  if (loaded.model->config().head != head)
    throw InputError(
        str(loaded.checkpoint, ": the model has no head for ", name, "; hint: ", hint));
}

// Header of NumPy's format 1.0, of 128 bytes.
std::string npy_header(int64_t rows, int64_t cols) {
  std::string out("\x93NUMPY\x01\0v\0", 10);
  out += str("{'descr': '<f4', 'fortran_order': False, 'shape': (", rows, ", ", cols, "), }");
  out.resize(127, ' ');
  return out + "\n";
}

}  // namespace

int fill_mask(const EncodeOptions& options) {
  const LoadedModel loaded = load(options.model, options.compute);
  const Tokenizer& tokenizer = *loaded.tokenizer;
  require_head(loaded, HeadType::kMaskedToken, "masked tokens",
               "trainer mlm trains one; decoders continue texts: cohort generate");
  const std::optional<int32_t> mask = tokenizer.mask_id();
  if (!mask)
    throw InputError(str(loaded.checkpoint,
                         ": the tokenizer has no mask token; hint: name it as "
                         "mask_token in tokenizer_config.json"));
  const auto text_of = [&](int32_t id) { return tokenizer.decode({&id, 1}, SpecialText::kShow); };
  for_blocks(options, loaded, {}, [&](TextBlock& block) {
    for (size_t i = 0; i < block.lines.size(); ++i) {
      TokenSequence& text = block.sequences[i];
      std::ranges::replace_copy_if(
          text.tokens, text.labels.begin(), [&](int32_t id) { return id != *mask; }, -1);
      if (text.num_targets() == 0)
        throw InputError(str(block.name_of(i), ": has no mask token in its ", text.tokens.size(),
                             " tokens; hint: write ", text_of(*mask), " where one is missing"));
    }
    answer(block, loaded, options.top, [&](Json& line, std::span<const Predictions> targets) {
      Json::Array masks;
      for (const Predictions& likely : targets) {
        Json tokens;
        for (const auto& [id, probability] : likely)
          tokens.push_back(
              Json().set("token", text_of(id)).set("id", id).set("probability", probability));
        masks.push_back(std::move(tokens));
      }
      line.set("masks", masks);
    });
  });
  return kOk;
}

int classify(const EncodeOptions& options) {
  const LoadedModel loaded = load(options.model, options.compute);
  const std::vector<std::string>& labels = loaded.model->config().labels;
  require_head(loaded, HeadType::kClasses, "classes", "trainer classify trains one");
  for_blocks(options, loaded, {}, [&](TextBlock& block) {
    for (TokenSequence& text : block.sequences) text.labels[0] = 0;
    answer(block, loaded, std::ssize(labels), [&](Json& line, std::span<const Predictions> target) {
      Json::Object all;
      for (const auto& [id, probability] : target[0])
        all.emplace_back(labels[static_cast<size_t>(id)], probability);
      line.set("label", all[0].first).set("probability", all[0].second).set("probabilities", all);
    });
  });
  return kOk;
}

int embed_texts(const EncodeOptions& options) {
  SentenceFolder folder = read_sentence_folder(options.model, options.prompt, options.pooling);
  folder.normalize = folder.normalize && options.normalize;
  const LoadedModel loaded = load(folder.model, options.compute);
  const ModelConfig& config = loaded.model->config();
  if (config.has_images())
    throw InputError(str(loaded.checkpoint, ": the model reads images, and embed reads texts"));
  std::optional<DurableFile> file;
  int64_t rows = 0;
  if (!options.output.empty()) {
    file.emplace(options.output).rewind();  // a pipe cannot, and is refused before the work
    file->write(npy_header(0, config.d_model));
  }
  for_blocks(options, loaded, folder, [&](TextBlock& block) {
    const auto embeddings = embed(loaded, folder, block.sequences);
    for (size_t i = 0; i < embeddings.size(); ++i, ++rows) {
      const std::vector<float>& row = embeddings[i];
      if (row.empty()) throw_not_finite(block.name_of(i), loaded.checkpoint);
      if (file)
        file->write({reinterpret_cast<const char*>(row.data()), row.size() * sizeof(float)});
      else
        print_now(block.lines[i].set("embedding", Json::Array(row.begin(), row.end())).dump() +
                  "\n");
    }
  });
  if (!file) return kOk;
  file->rewind();
  file->write(npy_header(rows, config.d_model));
  file->finish();
  return kOk;
}

}  // namespace cohort::apps
