// Embeddings of texts, and the most likely tokens or labels of texts and images, by trained models.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "job/checkpoint.h"
#include "job/sentence_folder.h"
#include "nn/transformer.h"

namespace cohort {

// The embedding of each sequence, [d_model], whose bits do not depend on the other sequences. Calls
// `before_batch` before each batch; it may throw to end the call.
std::vector<std::vector<float>> embed(const Transformer& model,
                                      std::span<const TokenSequence> texts, Pooling pooling,
                                      const std::function<void()>& before_batch = {});
// Divides an embedding by its L2 norm, in f64.
void normalize(std::vector<float>& embedding);

// The tokens, without targets, of the folder's prompt, a text and maybe a second one. Returns true
// if they were cut to the folder's limit or the model's context. Throws InputError without a token.
bool encode_text(const LoadedModel& loaded, const SentenceFolder& folder, std::string_view text,
                 std::optional<std::string_view> pair, TokenSequence& out);
// embed() as the folder says; without a pooling an encoder's is the mean, a decoder's the last. An
// embedding that is not finite is empty.
std::vector<std::vector<float>> embed(const LoadedModel& loaded, const SentenceFolder& folder,
                                      std::span<const TokenSequence> texts,
                                      const std::function<void()>& before_batch = {});

// Tokens of a packed batch of texts; a longer text is one by itself. More on the CPU would leave
// its caches.
int64_t batch_tokens(Device device);
// Ids of tokens or labels and their probabilities: the `top` most likely ones of a target, most
// likely first, the lowest id first among equals. Empty if the logits are not finite.
using Predictions = std::vector<std::pair<int32_t, double>>;
// Predicts each target of a batch of texts or images, which is on the CPU. The values of the
// targets do not matter.
std::vector<Predictions> predict(const Transformer& model, const PackedBatch& batch, int64_t top);

// Throws NonFiniteError for a text, by its name, whose result is not finite.
[[noreturn]] void throw_not_finite(const std::string& text, const std::string& checkpoint);

}  // namespace cohort
