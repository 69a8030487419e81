#include "nn/transformer.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

namespace cohort {

static const ModelConfig& checked(const ModelConfig& c, Device device, DType dtype) {
  c.check_device(device, dtype);
  c.check_gpu(device, dtype);
  COHORT_CHECK((c.vocab_size > 0 || c.has_images()) && c.head_dim > 0 && c.d_ff > 0,
               "[transformer] expected a resolved configuration");
  return c;
}

Transformer::Transformer(const ModelConfig& config, DType dtype, std::optional<uint64_t> seed,
                         Device device)
    : config_(checked(config, device, dtype)),
      parameters_(dtype, device, seed,
                  config.lora.rank > 0 ? std::optional(config.lora.seed) : std::nullopt,
                  config.precision.base),
      embedding_(parameters_, config_),
      backbone_(parameters_, config_),
      head_(parameters_, config_, embedding_),
      adapted_(backbone_.adapted()) {
  int64_t largest = 0;  // elements of a layer's B
  for (const Linear* layer : adapted_) largest = std::max(largest, layer->lora.b.value().numel());
  if (largest > 0) lora_workspace_ = Tensor::empty({largest}, dtype, device);
  check_precision(config_, dtype);
  COHORT_CHECK(config_.lora.slots == 1 || !config_.precision.rounds_keys(),
               "[transformer] scales of rounded keys are those of one adapter");
  if (seed) update_derived();
}

PackedBatch Transformer::to_device(const PackedBatch& batch) const {
  COHORT_CHECK(batch.pixels.defined() == config_.has_images(), "[transformer] expected a batch of ",
               config_.has_images() ? "images" : "tokens");
  if (batch.pixels.defined())
    COHORT_CHECK(
        batch.pixels.dim(1) == config_.image_size * config_.image_size * config_.channels &&
            batch.size() == batch.pixels.dim(0) * config_.context,
        "[transformer] images ", batch.pixels.str(), " with ", batch.size(),
        " positions, expected a side of ", config_.image_size, " pixels in ", config_.channels,
        " channels and ", config_.context, " positions each");
  if (device().is_cuda() && batch.positions.device().is_cpu()) {
    const auto check = [](const char* name, const Tensor& values, int64_t low, int64_t end) {
      if (!values.defined()) return;
      const int32_t* value = values.data<int32_t>();
      for (int64_t t = 0; t < values.numel(); ++t)
        COHORT_CHECK(value[t] >= low && value[t] < end, "[transformer] ", name, " ", value[t],
                     " at index ", t, " of the batch, expected ", low, " to ", end - 1);
    };
    check("token", batch.tokens, 0, config_.vocab_size);
    check("position", batch.positions, 0, config_.context);
    check("target position", batch.target_positions, 0, batch.size());
    if (config_.token_types > 0) check("type", batch.types, 0, config_.token_types);
    if (const int64_t logits = config_.num_logits(); logits > 0)
      check("target", batch.targets, 0, logits);
  }
  return batch.to(device());
}

Variable Transformer::forward(const PackedBatch& batch, const ForwardOptions& options) const {
  const auto mixing = std::make_shared<PackedMixing>(batch);
  const auto terms = backbone_.position_terms();
  return run({.batch = batch, .options = options, .mixing = mixing, .position_terms = terms});
}

Variable Transformer::hidden_at_targets(const PackedBatch& batch,
                                        const ForwardOptions& options) const {
  const Tensor positions =
      Tensor::zeros(batch.target_sequences.defined() ? batch.target_sequences.shape() : Shape{0},
                    DType::kI32, device());
  return head_(
      select_rows(forward(batch, options), batch.target_positions),
      {.batch = {.positions = positions, .sequences = batch.target_sequences}, .options = options});
}

// COHORT_PREFETCH=0 turns prefetching off, to find out whether wrong results come from it.
static bool allows_prefetch() {
  const char* const setting = std::getenv("COHORT_PREFETCH");
  return setting == nullptr || std::string_view(setting) != "0";
}

Tensor Transformer::forward_cached(const Tensor& tokens, const Tensor& sequences,
                                   const Tensor& positions, KVCache& cache, CachedStep step) const {
  COHORT_CHECK(!config_.is_encoder(), "[transformer] an encoder has no cache");
  NoGradGuard no_grad;
  Stream stream = current_stream(device());
  // run() begins with the embedding.
  stream.may_prefetch = allows_prefetch();
  const StreamGuard guard(stream);
  ForwardOptions options;
  if (config_.lora.slots > 1) options.adapters = {sequences, cache.adapters()};
  // Outside of the initialiser below: if one of its parts throws, GCC 12 destroys others twice.
  const auto mixing = std::make_shared<CachedMixing>(sequences, positions, cache, step);
  const auto terms = backbone_.position_terms();
  return run({.batch = {.tokens = tokens, .positions = positions},
              .options = options,
              .mixing = mixing,
              .position_terms = terms})
      .value();
}

void Transformer::copy_from(const Transformer& source) {
  COHORT_CHECK(parameters_.size() == source.parameters_.size(), "[copy_from] models differ");
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (kernels::QuantizedWeight w = parameters_[i].quantized; w.defined())
      w.copy_(source.parameters_[i].quantized);
    else
      Tensor(parameters_[i].value).copy_(source.parameters_[i].value);
  update_derived();
}

static std::vector<Tensor> adapters_of(const ParameterSet& parameters) {
  std::vector<Tensor> out;
  for (const NamedParameter& p : parameters)
    if (p.role == ParameterRole::kAdapter) out.push_back(p.value);
  return out;
}

std::vector<Tensor> Transformer::adapters() const {
  std::vector<Tensor> out = adapters_of(parameters_);
  for (Tensor& value : out) value = value.clone();
  return out;
}

void Transformer::set_adapters(std::span<const Tensor> values) {
  std::vector<Tensor> own = adapters_of(parameters_);
  COHORT_CHECK(own.size() == values.size(), "[transformer] expected ", own.size(),
               " tensors of adapters, got ", values.size());
  for (size_t i = 0; i < own.size(); ++i) own[i].copy_(values[i]);
  update_derived();
}

void Transformer::set_adapter_slot(int64_t slot, std::span<const Tensor> values, double scale) {
  COHORT_CHECK(
      slot > 0 && slot < config_.lora.slots && values.size() == adapters_of(parameters_).size(),
      "[transformer] expected all tensors of adapter 1 to ", config_.lora.slots - 1, ", got ",
      values.size(), " of adapter ", slot);
  for (const Linear* layer : adapted_)
    values = values.subspan(write_adapter_slot(layer->lora, layer->weight, slot, values, scale));
}

void Transformer::update_derived() {
  for (const Linear* layer : adapted_)
    write_lora_columns(layer->lora, layer->weight, lora_workspace_);
  backbone_.write_kv_scales();
}

}  // namespace cohort
