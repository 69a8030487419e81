#include "data/dataset.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "data/class_examples.h"
#include "sys/files.h"
#include "sys/input_file.h"

namespace cohort {
namespace {

// Held-out problems are the same for every seed, so that runs can be compared.
constexpr uint64_t kHeldOutSeed = 0;

// The text after the last `c`, or all of it.
std::string after_last(const std::string& text, char c) {
  return text.substr(text.rfind(c) + 1);
}

// The checksum of a single file, or a checksum over the names and checksums of several.
std::string files_checksum(const std::vector<std::string>& files) {
  uint64_t sum = 0;
  for (const std::string& file : files) {
    open_input_file(file);  // has better messages for a wrong path
    const std::string own = file_checksum(file);
    if (files.size() == 1) return own;
    sum = checksum(own, checksum(after_last(file, '/'), sum));
  }
  return hex(sum);
}

// The files of each entry of the data, and their checksums.
struct Fingerprint {
  std::vector<std::vector<std::string>> files;  // none if the training data are not read
  std::vector<std::string> checksums;
  std::vector<std::string> eval_files;
  std::string eval_checksum;
  std::string text;  // value of data.fingerprint
};

// Throws InputError if a file does not match data.fingerprint.
Fingerprint checked_fingerprint(const DataSections& config, DataParts parts) {
  const DataConfig& data = config.data;
  const bool is_text = !data.text.empty();
  const std::vector<std::string>& paths = is_text ? data.text : data.jsonl.path;
  const std::vector<std::string>& eval_paths = is_text ? data.eval_text : data.jsonl.eval_path;
  Fingerprint out;
  if (!data.images.path.empty()) {
    out.text = load_images(data).fingerprint;
    if (!data.fingerprint.empty() && data.fingerprint != out.text)
      throw InputError(str(data.images.path, " does not hold the images that were meant: their ",
                           "fingerprint is ", out.text, ", expected ", data.fingerprint,
                           "; hint: restore them, or accept these with ", config.fingerprint_key,
                           "=", out.text));
  }
  if (paths.empty()) return out;
  const bool all = parts == DataParts::kAll || eval_paths.empty();
  if (all)
    for (const std::string& path : paths) out.files.push_back(text_files(path));
  for (const auto& files : out.files) out.checksums.push_back(files_checksum(files));
  out.text = join(out.checksums, "+");
  const std::string first = out.text;
  if (!eval_paths.empty()) {
    for (const std::string& path : eval_paths)
      for (const std::string& file : text_files(path)) out.eval_files.push_back(file);
    out.eval_checksum = files_checksum(out.eval_files);
    out.text += (all ? "+" : "") + out.eval_checksum;
  }
  const std::string meant = all ? data.fingerprint : after_last(data.fingerprint, '+');
  if (!meant.empty() && meant != out.text)
    throw InputError(
        str(!eval_paths.empty() && data.fingerprint.starts_with(first) ? eval_paths[0] : paths[0],
            " is not the file that was meant: its fingerprint is ", out.text, ", expected ", meant,
            "; hint: restore the file, or accept this one with ", config.fingerprint_key, "=",
            out.text));
  return out;
}

// Length of the common prefix of two token sequences.
size_t common_prefix(std::span<const int32_t> a, std::span<const int32_t> b) {
  return static_cast<size_t>(std::ranges::mismatch(a, b).in1 - a.begin());
}

// All characters of the problems.
std::string characters_of(const Dataset& data) {
  CharacterSet found;
  for (const ExampleSet* set : {data.train.get(), data.held_out_set.get()})
    for (int64_t i = 0; i < set->size(); ++i) {
      const Example e = set->get(i);
      for (const std::string* text : {&e.prompt, &e.answer, &e.solution}) found.add(*text);
      for (const Example& rejected : e.rejected) found.add(rejected.solution);
    }
  return found.text();
}

// Builds `out.tokenizer` from the characters of a text, or for bytes, if there is none.
using NeedTokenizer = std::function<void(const std::function<std::string()>&)>;

void load_text(const DataConfig& data, const Fingerprint& fingerprint, Dataset& out,
               const NeedTokenizer& need_tokenizer) {
  std::vector<TextCorpus> sources;
  std::vector<TextSpan> all;
  for (const auto& files : fingerprint.files)
    sources.emplace_back(files, data.eval_text.empty() ? data.jsonl.held_out() : 0);
  if (!data.eval_text.empty()) sources.emplace_back(fingerprint.eval_files, 0);
  for (const TextCorpus& source : sources)
    for (const auto* part : {&source.train(), &source.held_out()})
      all.insert(all.end(), part->begin(), part->end());
  need_tokenizer([&] { return TextPieces(all).characters(); });
  const auto tokens_of = [&](const TextCorpus& corpus, const std::vector<TextSpan>& part,
                             const std::string& checksum) {
    std::optional<int32_t> end;
    if (corpus.has_document_ends() || data.text.size() > 1) {
      const std::vector<int32_t> after = out.tokenizer->surrounding().after;
      end = after.size() == 1 ? after[0] : out.tokenizer->eos_id();
    }
    return load_tokens(part, *out.tokenizer, end, {data.cache_dir, checksum});
  };
  for (size_t i = 0; i < fingerprint.files.size(); ++i) {
    const std::string& checksum = fingerprint.checksums[i];
    TokenStream tokens = tokens_of(sources[i], sources[i].train(), checksum);
    out.text_weights.push_back(data.weights.empty() ? static_cast<double>(tokens.size())
                                                    : data.weights[i]);
    out.train_text.push_back(std::move(tokens));
    out.held_out_text.append(tokens_of(sources[i], sources[i].held_out(), checksum));
  }
  if (!data.eval_text.empty())
    out.held_out_text.append(
        tokens_of(sources.back(), sources.back().train(), fingerprint.eval_checksum));
}

}  // namespace

Dataset load_dataset(const DataSections& config, std::unique_ptr<Tokenizer> tokenizer,
                     DataParts parts) {
  const DataConfig& data = config.data;
  const TrainerType trainer = config.batch.trainer;
  if (tokenizer == nullptr && data.tokenizer_path.empty() && data.is_chat())
    throw InputError(
        "data: there is no chat template that renders the conversations, as no model is given; "
        "hint: model.path=DIR, the folder of a chat model");
  Dataset out;
  out.tokenizer = std::move(tokenizer);
  const Fingerprint fingerprint = checked_fingerprint(config, parts);
  out.fingerprint = fingerprint.text;
  if (out.tokenizer == nullptr && !data.tokenizer_path.empty())
    out.tokenizer = load_tokenizer(data.tokenizer_path);
  const auto need_tokenizer = [&](const auto& text) {
    if (out.tokenizer != nullptr) return;
    out.tokenizer = data.tokenizer == TokenizerType::kByte ? make_byte_tokenizer()
                                                           : make_char_tokenizer(text());
  };
  if (!data.text.empty()) {
    load_text(data, fingerprint, out, need_tokenizer);
    return out;
  }
  const bool images = !data.images.path.empty();
  if (images && out.tokenizer == nullptr)
    out.tokenizer = make_tokenizer(new_image_files(config.image_size), "data.images");
  if (!data.task.empty()) {
    out.task = &find_task(data.task);
    out.train = make_task_set(*out.task, data.task_sizes, Split::kTrain, config.seed, 0);
    out.held_out_set =
        make_task_set(*out.task, data.task_sizes, Split::kHeldOut, kHeldOutSeed, config.eval_size);
    need_tokenizer([&] { return std::string(out.task->alphabet); });
  } else {
    JsonlConfig jsonl = data.jsonl;
    jsonl.teaches = trainer != TrainerType::kGrpo;
    if (parts == DataParts::kHeldOut && !jsonl.eval_path.empty()) jsonl.path.clear();
    JsonlSplits splits = images ? load_images(data) : load_jsonl(jsonl);
    out.train = std::move(splits.train);
    out.source_sizes = std::move(splits.source_sizes);
    out.held_out_set = std::move(splits.held_out);
    need_tokenizer([&] { return characters_of(out); });
  }
  if (data.is_chat()) {
    out.chat = std::make_shared<ChatRenderer>(data, *out.tokenizer,
                                              trainer == TrainerType::kGrpo
                                                  ? ChatRenderer::Purpose::kAsk
                                                  : ChatRenderer::Purpose::kTeach);
    const auto render = [chat = out.chat](Example& example) { chat->render(example); };
    out.train = make_changed_set(std::move(out.train), render);
    out.held_out_set = make_changed_set(std::move(out.held_out_set), render);
  }
  return out;
}

int64_t window_length(TrainerType trainer, const Tokenizer& tokenizer, int64_t context) {
  if (trainer == TrainerType::kPretrain) return context + 1;
  const Surrounding around = tokenizer.surrounding();
  const int64_t length = context - std::ssize(around.before) - std::ssize(around.after);
  if (length < 1 || length > 1 << 20)
    throw InputError(str("model.context: ", context, " leaves ", length,
                         " tokens of a text beside ", context - length,
                         " special ones; hint: a context for 1 to ", 1 << 20));
  return length;
}

TokenSequence masked_sequence(std::span<const int32_t> window, const Tokenizer& tokenizer,
                              const Masking& masking, int64_t step, int64_t index) {
  TokenSequence out = masking.apply(window, step, index);
  const auto& [before, after] = tokenizer.surrounding();
  out.tokens.insert(out.tokens.begin(), before.begin(), before.end());
  out.tokens.insert(out.tokens.end(), after.begin(), after.end());
  out.labels.insert(out.labels.begin(), before.size(), -1);
  out.labels.resize(out.tokens.size(), -1);
  return out;
}

TextWindow text_window(const Dataset& data, int64_t length, uint64_t seed, int64_t i) {
  const size_t source =
      data.train_text.size() == 1 ? 0 : weighted_choice(data.text_weights, seed, i);
  const TokenStream& tokens = data.train_text[source];
  return {tokens, random_window(tokens.size(), length, seed, i)};
}

MixedOrder make_order(const DataSections& config, const Dataset& data,
                      std::span<const int64_t> planned_steps) {
  const bool mixed = !config.data.weights.empty();
  const std::vector<int64_t> sizes = mixed ? data.source_sizes : std::vector{data.train->size()};
  const std::vector<double> weights = mixed ? config.data.weights : std::vector{1.0};
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<ShuffledOrder> orders;
  auto difficulty = data.difficulty.begin();
  for (size_t i = 0; i < sizes.size(); ++i) {
    ShuffledOrder::Options options{.source = i};
    if (!data.difficulty.empty()) {
      options.difficulty.assign(difficulty, difficulty + sizes[i]);
      difficulty += sizes[i];
      // Each source contributes its fraction of the examples to within one.
      for (const int64_t steps : planned_steps)
        options.span_ends.push_back(static_cast<int64_t>(std::ceil(
            static_cast<double>(steps * config.batch.examples_per_step()) * weights[i] / sum)));
    }
    orders.emplace_back(sizes[i], config.seed, std::move(options));
  }
  return MixedOrder(std::move(orders), sizes, weights);
}

Example prompt_of(const DataConfig& config, const Tokenizer& tokenizer, const Json& fields,
                  const std::string& where) {
  Example example = read_prompt(config.jsonl, fields, where);
  example.fields = fields;
  if (config.is_chat())
    ChatRenderer(config, tokenizer, ChatRenderer::Purpose::kAsk).render(example);
  return example;
}

std::vector<int32_t> prompt_with(const FieldTemplate& text, const Example& example,
                                 const Dataset& data) {
  Json::Array messages;
  if (data.chat != nullptr) messages = example.conversation.as_array();
  const auto last = std::ranges::find_if(messages.rbegin(), messages.rend(), [](const Json& m) {
    return has_role(m, "user") && m.find_text("content") != nullptr;
  });
  if (data.chat != nullptr && last == messages.rend())
    throw InputError(str("reference_prompt: ", example.where,
                         " has no message of the user with a text in whose place it could be"));
  Json fields = example.fields;
  fields.set("prompt", data.chat != nullptr ? *last->find_text("content") : example.prompt);
  if (fields.find("solution") == nullptr) fields.set("solution", example.solution);
  if (fields.find("answer") == nullptr) fields.set("answer", example.answer);
  std::string prompt = text.render(fields, example.where);
  if (data.chat != nullptr) {
    last->set("content", prompt);
    prompt = data.chat->prompt_of(messages, example);
  }
  return encode_prompt(
      {.prompt = prompt, .whole_text = example.whole_text, .special = example.special},
      *data.tokenizer);
}

std::vector<int32_t> supervised_tokens(const Example& example, const Tokenizer& tokenizer) {
  std::vector<int32_t> tokens = encode_prompt({.prompt = example.prompt + example.solution,
                                               .whole_text = example.whole_text,
                                               .special = example.special},
                                              tokenizer);
  if (example.loss_spans.empty()) tokens.push_back(tokenizer.eos_id());
  return tokens;
}

TokenSequence supervised_sequence(const Example& example, const Tokenizer& tokenizer,
                                  int64_t context, TooLong too_long) {
  TokenSequence sequence{.tokens = supervised_tokens(example, tokenizer)};
  const std::string text = example.prompt + example.solution;
  // Loss mask position of the first token at or after a byte of the text: the length of the common
  // prefix of the text before the byte and the whole text.
  const auto mask_at = [&](size_t byte) {
    const Example before{.prompt = text.substr(0, byte),
                         .whole_text = example.whole_text,
                         .special = example.special};
    return sequence.loss_mask.begin() +
           static_cast<std::ptrdiff_t>(
               byte == text.size() && !example.loss_spans.empty()
                   ? sequence.tokens.size()
                   : common_prefix(encode_prompt(before, tokenizer), sequence.tokens));
  };
  sequence.loss_mask.assign(sequence.tokens.size(), 0);
  if (example.loss_spans.empty()) {
    if (encode_prompt(example, tokenizer).empty()) throw InputError("the prompt is empty");
    std::fill(mask_at(example.prompt.size()), sequence.loss_mask.end(), 1);
  }
  for (const auto& [begin, end] : example.loss_spans) std::fill(mask_at(begin), mask_at(end), 1);
  const auto max_tokens = static_cast<size_t>(context + 1);
  if (sequence.tokens.size() <= max_tokens) return sequence;
  if (too_long != TooLong::kTruncate)
    throw InputError(str("prompt, solution and end of sequence have ", sequence.tokens.size(),
                         " tokens, the model's context is ", context,
                         "; hint: a larger model.context"));
  sequence.tokens.resize(max_tokens);
  sequence.loss_mask.resize(max_tokens);
  return sequence;
}

std::array<TokenSequence, 2> pair_sequences(const Example& example, const Tokenizer& tokenizer,
                                            int64_t context, TooLong too_long, int64_t index) {
  COHORT_CHECK(example.rejected.size() == 1, "[pair_sequences] expected one rejected answer, got ",
               example.rejected.size());
  std::array<TokenSequence, 2> out = {
      supervised_sequence(example, tokenizer, context, too_long),
      supervised_sequence(example.rejected[0], tokenizer, context, too_long)};
  auto prefix = static_cast<int64_t>(common_prefix(out[0].tokens, out[1].tokens));
  for (const TokenSequence& s : out) {
    const auto first = std::find_if(s.loss_mask.begin() + 1, s.loss_mask.end(),
                                    [](uint8_t taught) { return taught != 0; });
    prefix = std::min<int64_t>(prefix, first - s.loss_mask.begin() - 1);
  }
  for (size_t k = 0; k < 2; ++k) {
    out[k].group = index;
    out[k].index = 2 * index + static_cast<int64_t>(k);
    out[k].prefix = prefix;
  }
  return out;
}

}  // namespace cohort
