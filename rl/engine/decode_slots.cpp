#include "rl/engine/decode_slots.h"

#include <bit>

#include "core/sizes.h"
#include "kernels/decode.h"

namespace cohort {
namespace {

void set_rows(Tensor& t, const Tensor& at, const Tensor& rows) {
  kernels::set_rows({.t = t, .at = at, .rows = rows.to(t.dtype()).to(t.device())});
}

}  // namespace

// Inputs and outputs of the sampling for n sequences.
struct DecodeSlots::Rows {
  Tensor slots, tokens, positions, active, rng_index;  // [n]: kernels::DecodeInputs
  Tensor sampled;                                      // [n]
  Tensor statistics;  // [4, n]: one tensor, so that one copy transfers them to the host

  Rows(int64_t n, const Transformer& model)
      : slots(Tensor::empty({n}, DType::kI32, model.device())),
        tokens(Tensor::empty_like(slots)),
        positions(Tensor::empty_like(slots)),
        active(Tensor::empty_like(slots)),
        rng_index(Tensor::empty({n}, DType::kI64, model.device())),
        sampled(Tensor::empty_like(slots)),
        statistics(Tensor::empty({4, n}, accumulate_dtype(model.dtype()), model.device())) {}

  void set(const Scheduler::Sequences& sequences) {
    std::vector<int32_t> values;
    for (const Scheduler::SequencePtr& s : sequences) values.push_back(s->slot);
    values.resize(static_cast<size_t>(slots.numel()), -1);
    slots.copy_(Tensor::from(values));
  }
  void read(const Tensor& state) {
    kernels::decode_inputs({.tokens = tokens,
                            .positions = positions,
                            .active = active,
                            .rng_index = rng_index,
                            .slots = state,
                            .rows = slots});
  }
};

// A decode step of a fixed number of rows. It reads its inputs from the slots' state and updates
// that state, so that it can be replayed.
struct DecodeSlots::Step {
  Rows rows;
  GraphRunner graph;

  Step(DecodeSlots& slots, int64_t n)
      : rows(n, slots.model_),
        graph(
            slots.device_,
            [this, &slots] {
              rows.read(slots.slots_);
              slots.sample_rows(
                  rows, slots.model_.forward_cached(rows.tokens, rows.active, rows.positions,
                                                    slots.cache_, CachedStep::kDecode));
            },
            slots.memory_) {}
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

void DecodeSlots::start(const Scheduler::Sequences& sequences) {
  const auto n = static_cast<int64_t>(sequences.size());
  std::vector<int32_t> at, states, stops;
  std::vector<kernels::SamplingParams> params;
  for (const Scheduler::SequencePtr& s : sequences) {
    const EngineRequest& in = s->request->in;
    at.push_back(s->slot);
    states.push_back(s->output.empty() ? in.prompt.back() : s->output.back());
    states.push_back(static_cast<int32_t>(in.prompt.size() + s->output.size()) - 1);
    states.push_back(static_cast<int32_t>(s->max_length));
    stops.insert(stops.end(), in.stop_tokens.begin(), in.stop_tokens.end());
    stops.resize(at.size() * static_cast<size_t>(limits_.stop_tokens), -1);
    params.push_back(in.completions[static_cast<size_t>(s->completion)]);
    params.back().num_bias = static_cast<int32_t>(in.logit_bias.size());
  }
  const Tensor rows = Tensor::from(at).to(device_);
  set_rows(slots_, rows, Tensor::from(states, {n, kernels::kSlotColumns}));
  set_rows(stop_tokens_, rows, Tensor::from(stops, {n, limits_.stop_tokens}));
  set_rows(sampling_.params, rows, kernels::pack_params(params));
  if (limits_.biases > 0) start_biases(sequences, rows);
  for (size_t i = 0; i < params.size(); ++i)
    if (kernels::has_penalty(params[i])) start_counts(*sequences[i]);
  decoded_.clear();
}

void DecodeSlots::start_biases(const Scheduler::Sequences& sequences, const Tensor& at) {
  std::vector<int32_t> ids;
  std::vector<double> values;
  for (const Scheduler::SequencePtr& s : sequences) {
    const size_t end = ids.size() + static_cast<size_t>(limits_.biases);
    for (const auto& [id, value] : s->request->in.logit_bias) {
      ids.push_back(id);
      values.push_back(value);
    }
    ids.resize(end, 0);
    values.resize(end, 0);
  }
  const Shape shape{static_cast<int64_t>(sequences.size()), limits_.biases};
  set_rows(sampling_.bias_ids, at, Tensor::from(ids, shape));
  set_rows(sampling_.bias_values, at, Tensor::from(values, shape));
}

void DecodeSlots::start_counts(const Scheduler::Sequence& s) {
  const int64_t vocab = sampling_.counts.dim(1);
  std::vector<int32_t> counts(static_cast<size_t>(vocab), 0);
  for (const int32_t token : s.request->in.prompt)
    counts[static_cast<size_t>(token)] = kernels::kInPrompt;
  for (const int32_t token : s.output) ++counts[static_cast<size_t>(token)];
  for (const int32_t token : s.observed) {  // count as part of the prompt
    int32_t& count = counts[static_cast<size_t>(token)];
    count = (count - 1) | kernels::kInPrompt;
  }
  set_rows(sampling_.counts, Tensor::from(std::vector<int32_t>{s.slot}).to(device_),
           Tensor::from(counts, {1, vocab}));
}

void DecodeSlots::stop(const std::vector<int32_t>& slots) {
  if (slots.empty()) return;
  const auto n = static_cast<int64_t>(slots.size());
  set_rows(slots_, Tensor::from(slots).to(device_),
           Tensor::full({n, kernels::kSlotColumns}, -1, DType::kI32));
  decoded_.clear();
}

void DecodeSlots::sample_rows(Rows& rows, const Tensor& hidden) {
  kernels::Samples samples{.tokens = rows.sampled,
                           .logprob = rows.statistics.select(0, 0),
                           .entropy = rows.statistics.select(0, 1),
                           .truncated_mass = rows.statistics.select(0, 2),
                           .sampling_logprob = rows.statistics.select(0, 3)};
  kernels::head_sample({.out = samples,
                        .state = sampling_,
                        .x = hidden,
                        .w = model_.head().weight.value(),
                        .slots = rows.active,
                        .rng_index = rows.rng_index});
  kernels::decode_advance({.slots = slots_,
                           .active = rows.active,
                           .tokens = rows.sampled,
                           .stop_tokens = stop_tokens_});
}

SampledTokens DecodeSlots::sample(const Tensor& hidden, const Scheduler::Sequences& sequences) {
  Rows rows(static_cast<int64_t>(sequences.size()), model_);
  rows.set(sequences);
  rows.read(slots_);
  sample_rows(rows, hidden);
  return {sequences, Readback(rows.sampled), Readback(rows.statistics)};
}

int64_t DecodeSlots::rows_for(size_t sequences) const {
  const auto count = static_cast<int64_t>(sequences);
  if (device_.is_cpu()) return count;
  if (count > 64) return round_up(count, int64_t{64});
  return std::bit_ceil(static_cast<uint64_t>(count));
}

SampledTokens DecodeSlots::decode(const Scheduler::Sequences& running) {
  // Rows of ended sequences are idle; the rows are set again when a smaller step is enough.
  const bool set = decoded_.empty() || rows_for(running.size()) < rows_for(decoded_.size());
  if (set) decoded_ = running;
  // Nothing is recorded on the CPU, where every number of rows is a size of its own.
  if (set && device_.is_cpu()) steps_.clear();
  const int64_t n = rows_for(decoded_.size());
  std::unique_ptr<Step>& step = steps_[n];
  if (step == nullptr) step = std::make_unique<Step>(*this, n);
  if (set) step->rows.set(decoded_);
  step->graph.run();
  return {decoded_, Readback(step->rows.sampled), Readback(step->rows.statistics)};
}

}  // namespace cohort
