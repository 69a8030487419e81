#include "rl/engine/decode_slots.h"

#include <algorithm>

#include "core/sizes.h"
#include "kernels/decode.h"

namespace cohort {
namespace {

void set_rows(Tensor& t, const Tensor& at, const Tensor& rows) {
  kernels::set_rows({.t = t, .at = at, .rows = rows.to(t.dtype()).to(t.device())});
}

}  // namespace

bool SlotLimits::cover(const SlotLimits& other) const {
  return stop_tokens >= other.stop_tokens && biases >= other.biases &&
         (penalties || !other.penalties);
}

SlotLimits SlotLimits::with(const SlotLimits& other) const {
  return {.stop_tokens = std::max(stop_tokens, other.stop_tokens),
          .biases = std::max(biases, other.biases),
          .penalties = penalties || other.penalties};
}

// The sampled tokens of n slots, and their statistics as rows of one tensor, so that one copy
// transfers them to the host.
struct DecodeSlots::DeviceSamples {
  Tensor tokens, statistics;
  DeviceSamples(int64_t n, const Transformer& model)
      : tokens(Tensor::empty({n}, DType::kI32, model.device())),
        statistics(Tensor::empty({3, n}, accumulate_dtype(model.dtype()), model.device())) {}
  SampledTokens read_back() const { return {Readback(tokens), Readback(statistics)}; }
};

// A decode step of a fixed number of rows. It reads its inputs from the slots' state and updates
// that state, so that it can be replayed.
class DecodeSlots::Step {
 public:
  Step(DecodeSlots& slots, int64_t rows)
      : rows_(Tensor::empty({rows}, DType::kI32, slots.device_)),
        tokens_(Tensor::empty_like(rows_)),
        positions_(Tensor::empty_like(rows_)),
        active_(Tensor::empty_like(rows_)),
        rng_index_(Tensor::empty({rows}, DType::kI64, slots.device_)),
        samples_(rows, slots.model_),
        graph_(
            slots.device_,
            [this, &slots] {
              kernels::decode_inputs({.tokens = tokens_,
                                      .positions = positions_,
                                      .active = active_,
                                      .rng_index = rng_index_,
                                      .slots = slots.slots_,
                                      .rows = rows_});
              const Tensor hidden = slots.model_.forward_cached(tokens_, active_, positions_,
                                                                slots.cache_, CachedStep::kDecode);
              slots.sample_rows(samples_, hidden, active_, rng_index_);
            },
            slots.memory_) {}

  void choose(std::vector<int32_t> slots) {
    slots.resize(static_cast<size_t>(rows_.numel()), -1);
    rows_.copy_(Tensor::from(slots));
  }
  SampledTokens run() {
    graph_.run();
    return samples_.read_back();
  }

 private:
  Tensor rows_, tokens_, positions_, active_, rng_index_;
  DeviceSamples samples_;
  GraphRunner graph_;
};

DecodeSlots::DecodeSlots(const Transformer& model, KVCache& cache, const SlotLimits& limits)
    : model_(model), cache_(cache), device_(model.device()), limits_(limits) {
  const int64_t count = cache.config().num_sequences;
  slots_ = Tensor::full({count, kernels::kSlotColumns}, -1, DType::kI32, device_);
  stop_tokens_ = Tensor::full({count, limits.stop_tokens}, -1, DType::kI32, device_);
  sampling_.params =
      Tensor::zeros({count, int64_t{sizeof(kernels::SamplingParams)}}, DType::kU8, device_);
  if (limits.penalties)
    sampling_.counts = Tensor::zeros({count, model.config().vocab_size}, DType::kI32, device_);
  if (limits.biases > 0) {
    sampling_.bias_ids = Tensor::zeros({count, limits.biases}, DType::kI32, device_);
    sampling_.bias_values =
        Tensor::zeros({count, limits.biases}, accumulate_dtype(model.dtype()), device_);
  }
}

DecodeSlots::~DecodeSlots() = default;

Tensor DecodeSlots::upload(const std::vector<int32_t>& values) const {
  return Tensor::from(values).to(device_);
}

void DecodeSlots::start(std::span<const SlotStart> starts) {
  const auto n = static_cast<int64_t>(starts.size());
  std::vector<int32_t> at, states, stops;
  std::vector<kernels::SamplingParams> params;
  for (const SlotStart& s : starts) {
    at.push_back(s.slot);
    states.push_back(s.sampled.empty() ? s.prompt.back() : s.sampled.back());
    states.push_back(static_cast<int32_t>(s.prompt.size() + s.sampled.size()) - 1);
    states.push_back(static_cast<int32_t>(s.max_length));
    stops.insert(stops.end(), s.stop_tokens.begin(), s.stop_tokens.end());
    stops.resize(at.size() * static_cast<size_t>(limits_.stop_tokens), -1);
    params.push_back(s.params);
    params.back().num_bias = static_cast<int32_t>(s.logit_bias->size());
  }
  const Tensor rows = upload(at);
  set_rows(slots_, rows, Tensor::from(states, {n, kernels::kSlotColumns}));
  set_rows(stop_tokens_, rows, Tensor::from(stops, {n, limits_.stop_tokens}));
  set_rows(sampling_.params, rows, kernels::pack_params(params));
  if (limits_.biases > 0) start_biases(starts, rows);
  for (const SlotStart& s : starts)
    if (kernels::has_penalty(s.params)) start_counts(s);
}

void DecodeSlots::start_biases(std::span<const SlotStart> starts, const Tensor& at) {
  std::vector<int32_t> ids;
  std::vector<double> values;
  for (const SlotStart& s : starts) {
    for (const auto& [id, value] : *s.logit_bias) {
      ids.push_back(id);
      values.push_back(value);
    }
    const auto end =
        static_cast<size_t>(&s - starts.data() + 1) * static_cast<size_t>(limits_.biases);
    ids.resize(end, 0);
    values.resize(end, 0);
  }
  const Shape shape{static_cast<int64_t>(starts.size()), limits_.biases};
  set_rows(sampling_.bias_ids, at, Tensor::from(ids, shape));
  set_rows(sampling_.bias_values, at, Tensor::from(values, shape));
}

void DecodeSlots::start_counts(const SlotStart& start) {
  const int64_t vocab = sampling_.counts.dim(1);
  std::vector<int32_t> counts(static_cast<size_t>(vocab), 0);
  for (const int32_t token : start.prompt) counts[static_cast<size_t>(token)] = kernels::kInPrompt;
  for (const int32_t token : start.sampled) ++counts[static_cast<size_t>(token)];
  set_rows(sampling_.counts, upload({start.slot}), Tensor::from(counts, {1, vocab}));
}

void DecodeSlots::stop(const std::vector<int32_t>& slots) {
  if (slots.empty()) return;
  const auto n = static_cast<int64_t>(slots.size());
  set_rows(slots_, upload(slots), Tensor::full({n, kernels::kSlotColumns}, -1, DType::kI32));
}

void DecodeSlots::sample_rows(DeviceSamples& out, const Tensor& hidden, const Tensor& active,
                              const Tensor& rng_index) {
  kernels::Samples samples{.tokens = out.tokens,
                           .logprob = out.statistics.select(0, 0),
                           .entropy = out.statistics.select(0, 1),
                           .truncated_mass = out.statistics.select(0, 2)};
  kernels::head_sample({.out = samples,
                        .state = sampling_,
                        .x = hidden,
                        .w = model_.head().value(),
                        .slots = active,
                        .rng_index = rng_index});
  kernels::decode_advance(
      {.slots = slots_, .active = active, .tokens = out.tokens, .stop_tokens = stop_tokens_});
}

SampledTokens DecodeSlots::sample(const Tensor& hidden, const std::vector<int32_t>& slots) {
  const auto n = static_cast<int64_t>(slots.size());
  const Tensor rows = upload(slots);
  Tensor tokens = Tensor::empty({n}, DType::kI32, device_), positions = Tensor::empty_like(tokens),
         active = Tensor::empty_like(tokens), rng_index = Tensor::empty({n}, DType::kI64, device_);
  kernels::decode_inputs({.tokens = tokens,
                          .positions = positions,
                          .active = active,
                          .rng_index = rng_index,
                          .slots = slots_,
                          .rows = rows});
  DeviceSamples samples(n, model_);
  sample_rows(samples, hidden, active, rng_index);
  return samples.read_back();
}

int64_t DecodeSlots::rows_for(size_t slots) const {
  const auto count = static_cast<int64_t>(slots);
  if (device_.is_cpu()) return count;
  if (count > 64) return round_up(count, int64_t{64});
  int64_t rows = 1;
  while (rows < count) rows *= 2;
  return rows;
}

void DecodeSlots::choose(const std::vector<int32_t>& slots) {
  const int64_t rows = rows_for(slots.size());
  // Nothing is recorded on the CPU, where every number of rows is a size of its own.
  if (device_.is_cpu()) steps_.clear();
  std::unique_ptr<Step>& step = steps_[rows];
  if (step == nullptr) step = std::make_unique<Step>(*this, rows);
  step->choose(slots);
  chosen_ = step.get();
}

SampledTokens DecodeSlots::decode() {
  return chosen_->run();
}

}  // namespace cohort
