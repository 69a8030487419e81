#include "job/encode.h"

#include <algorithm>
#include <cmath>

#include "autograd/ops.h"
#include "data/class_examples.h"
#include "kernels/head.h"
#include "kernels/pooling.h"

namespace cohort {
namespace {

// [S, d_model] of the hidden states of packed sequences
Tensor pooled(const Variable& hidden, const Tensor& cu_seqlens, Pooling pooling) {
  const Tensor& x = hidden.value();
  const int64_t sequences = cu_seqlens.numel() - 1;
  if (pooling == Pooling::kMean) {
    Tensor y = Tensor::empty({sequences, x.dim(1)}, accumulate_dtype(x.dtype()), x.device());
    kernels::segment_mean({y, x, cu_seqlens.to(x.device())});
    return y;
  }
  const bool last = pooling == Pooling::kLast;
  auto rows = cu_seqlens.narrow(0, last ? 1 : 0, sequences).to_vector<int32_t>();
  for (int32_t& row : rows) row -= last ? 1 : 0;
  return select_rows(hidden, Tensor::from(rows).to(x.device())).value();
}

Predictions most_likely_of(std::span<const double> logits, int64_t top) {
  if (!std::ranges::all_of(logits, [](double z) { return std::isfinite(z); })) return {};
  const double highest = *std::ranges::max_element(logits);
  double sum = 0;
  Predictions all;
  for (const double z : logits)
    all.emplace_back(static_cast<int32_t>(all.size()), std::exp(z - highest));
  for (const auto& [id, p] : all) sum += p;
  Predictions out(std::min(all.size(), static_cast<size_t>(top)));
  const auto rank = [](const auto& prediction) {
    return std::pair(prediction.second, -prediction.first);
  };
  std::ranges::partial_sort_copy(all, out, std::greater{}, rank, rank);
  for (auto& [id, p] : out) p /= sum;
  return out;
}

}  // namespace

int64_t batch_tokens(Device device) {
  return device.is_cuda() ? 16384 : 1024;
}

std::vector<std::vector<float>> embed(const Transformer& model,
                                      std::span<const TokenSequence> texts, Pooling pooling,
                                      const std::function<void()>& before_batch) {
  NoGradGuard no_grad;
  // The longest first: memory runs out at once or never.
  std::vector<TokenSequence> sorted(texts.begin(), texts.end());
  for (size_t i = 0; i < sorted.size(); ++i) sorted[i].index = static_cast<int64_t>(i);
  std::ranges::stable_sort(sorted, std::greater{}, [](const auto& s) { return s.tokens.size(); });
  std::vector<std::vector<float>> out(texts.size());
  auto next = sorted.begin();
  for (const PackedBatch& batch : pack_micro_batches(sorted, batch_tokens(model.device()))) {
    if (before_batch) before_batch();
    const Variable hidden = model.forward(model.to_device(batch));
    const Tensor rows = pooled(hidden, batch.cu_seqlens, pooling).to(Device{});
    for (int64_t i = 0; i < rows.dim(0); ++i, ++next)
      out[static_cast<size_t>(next->index)] = rows.select(0, i).to_vector<float>();
  }
  return out;
}

void normalize(std::vector<float>& embedding) {
  double squares = 0;
  for (const double x : embedding) squares += x * x;
  for (float& x : embedding) x = static_cast<float>(x / std::max(std::sqrt(squares), 1e-12));
}

bool encode_text(const LoadedModel& loaded, const SentenceFolder& folder, std::string_view text,
                 std::optional<std::string_view> pair, TokenSequence& out) {
  const ModelConfig& config = loaded.model->config();
  if (config.has_images())
    throw InputError(str(loaded.checkpoint, ": the model reads images, not texts"));
  const std::string whole = str(folder.prompt, text);
  const int64_t longest = std::min(folder.max_tokens, config.context);
  EncodedText encoded = loaded.tokenizer->encode_texts(whole, pair);
  const bool is_cut = std::ssize(encoded.ids) > longest;
  if (is_cut) encoded = loaded.tokenizer->encode_texts(whole, pair, longest);
  if (encoded.ids.empty()) throw InputError("has no tokens; hint: leave empty texts out");
  out.labels.assign(encoded.ids.size(), -1);
  out.tokens = std::move(encoded.ids);
  out.types = checked_types(std::move(encoded.types), config.token_types);
  return is_cut;
}

std::vector<std::vector<float>> embed(const LoadedModel& loaded, const SentenceFolder& folder,
                                      std::span<const TokenSequence> texts,
                                      const std::function<void()>& before_batch) {
  const bool is_encoder = loaded.model->config().is_encoder();
  const Pooling pooling = folder.pooling.value_or(is_encoder ? Pooling::kMean : Pooling::kLast);
  auto embeddings = embed(*loaded.model, texts, pooling, before_batch);
  for (std::vector<float>& row : embeddings) {
    if (folder.normalize) normalize(row);
    if (!std::ranges::all_of(row, [](float x) { return std::isfinite(x); })) row.clear();
  }
  return embeddings;
}

std::vector<Predictions> predict(const Transformer& model, const PackedBatch& batch, int64_t top) {
  NoGradGuard no_grad;
  const Tensor x = model.hidden_at_targets(model.to_device(batch)).value();
  const Tensor &w = model.head().weight.value(), &bias = model.head().bias.value();
  std::vector<Predictions> out;
  kernels::for_logit_chunks(
      {x, w, bias}, kernels::head_chunk_tokens(w.dim(0), 0, model.device()),
      [&](int64_t, Tensor& logits) {
        for (int64_t i = 0; i < logits.dim(0); ++i)
          out.push_back(most_likely_of(logits.select(0, i).to_vector<double>(), top));
      });
  return out;
}

void throw_not_finite(const std::string& text, const std::string& checkpoint) {
  throw NonFiniteError(str(text, ": what the weights of ", checkpoint,
                           " compute is not finite; hint: another dtype or checkpoint"));
}

}  // namespace cohort
