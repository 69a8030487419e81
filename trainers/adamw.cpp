// AdamW (Loshchilov and Hutter 2019): moments and masters of each parameter.
#include <algorithm>
#include <cmath>
#include <utility>

#include "trainers/optimizer.h"

namespace cohort {

Optimizer::Optimizer(const ParameterSet& parameters, const OptimizerConfig& config, uint64_t seed,
                     const Slices& slices)
    : config_(config),
      seed_(seed),
      slices_(slices),
      set_(parameters),
      parts_(parts_in(parameters, slices)) {
  for (const ParameterPart& part : parts_) {
    const NamedParameter& p = set_[part.parameter];
    const bool on_host = config.storage.on_host(p.unit);
    const auto zeros = [&](int64_t count, DType dtype) {
      return on_host ? Tensor::pinned({count}, dtype)
                     : Tensor::zeros({count}, dtype, p.value.device());
    };
    kernels::AdamWTensor& t = tensors_.emplace_back();
    t.param = part.of(p.value);
    t.m = zeros(part.count, moments_of(p.value.dtype()));
    t.v = zeros(part.count, moments_of(p.value.dtype()));
    t.weight_decay = p.use == ParameterUse::kVector ? 0 : config.weight_decay;
    if (p.value.dtype() == DType::kBF16) t.low_bits = zeros(2 * part.count, DType::kU8);
    t.unit = p.unit;
    t.flat_index = p.flat_index + part.begin;
    if (on_host) host_count_ = tensors_.size();
  }
  if (host_count_ > 0) host_state_.emplace(std::span(tensors_).first(host_count_));
}

DType Optimizer::moments_of(DType parameter) const {
  const DType accumulated = accumulate_dtype(parameter);
  const bool small = config_.storage.moments == MomentKind::kBF16 && accumulated == DType::kF32;
  return small ? DType::kBF16 : accumulated;
}

void Optimizer::allocate_workspace() {
  if (host_state_) host_state_->allocate_buffers();
  allocate_gather_memory();
}
void Optimizer::allocate_gather_memory() {
  if (is_sharded() && !gather_memory_.defined())
    gather_memory_ =
        Tensor::empty({PartGather::memory_bytes(set_, slices_)}, DType::kU8, set_.device());
}
void Optimizer::free_workspace() {
  if (host_state_) host_state_->free_buffers();
  gather_memory_ = {};
}

void Optimizer::step(double learning_rate, const Tensor& norm, const Tensor& non_finite,
                     std::span<const Tensor> gradients, std::span<const Tensor> weights,
                     const std::function<void(size_t unit)>& after_unit) {
  allocate_workspace();
  for (size_t i = 0; i < tensors_.size(); ++i) {
    tensors_[i].grad =
        gradients.empty() ? parts_[i].of(set_[parts_[i].parameter].grad()) : gradients[i];
    if (!weights.empty() && weights[i].defined()) tensors_[i].param = weights[i];
  }
  const kernels::AdamWDesc desc{.learning_rate = learning_rate,
                                .beta1 = config_.adam_beta1,
                                .beta2 = config_.adam_beta2,
                                .eps = config_.adam_eps,
                                .step = updates_ + 1,
                                .seed = seed_,
                                .norm = norm,
                                .max_norm = config_.max_grad_norm,
                                .non_finite = non_finite};
  const std::span<kernels::AdamWTensor> all(tensors_);
  if (host_state_) host_state_->step(all.first(host_count_), desc);
  if (after_unit == nullptr) kernels::adamw_step(all.subspan(host_count_), desc);
  size_t end = host_count_;
  for (size_t unit = 0; after_unit != nullptr && unit < set_.units().size(); ++unit) {
    const size_t begin = end;
    while (end < all.size() && all[end].unit == unit) ++end;
    kernels::adamw_step(all.subspan(begin, end - begin), desc);
    after_unit(unit);
  }
  for (size_t i = 0; i < tensors_.size(); ++i) {
    tensors_[i].grad = {};
    tensors_[i].param = parts_[i].of(set_[parts_[i].parameter].value);
  }
  ++updates_;
}

void Optimizer::gather_weights(Communicator& comm) const {
  const PartGather parts(set_, comm, config_.reduction_lanes);
  for (size_t unit = 0; unit < set_.units().size(); ++unit) gather_weights(parts, unit, false);
}

void Optimizer::gather_weights(const PartGather& parts, size_t unit,
                               bool blocks_are_sharded) const {
  if (!is_sharded()) return;
  const auto weights_of = [&](const ParameterPart& piece) {
    return piece.of(set_[piece.parameter].value);
  };
  std::vector<DType> dtypes{set_.dtype()};
  if (accumulate_dtype(set_.dtype()) != set_.dtype())
    dtypes.push_back(accumulate_dtype(set_.dtype()));
  const bool is_block = unit > 0 && unit + 1 < set_.units().size();
  for (const DType dtype : dtypes)
    if (!blocks_are_sharded || !is_block || dtype != set_.dtype())
      parts.gather(unit,
                   {.parameter = dtype,
                    .dtype = dtype,
                    .width = 1,
                    .mine = weights_of,
                    .store = [&](const ParameterPart& piece,
                                 const Tensor& values) { weights_of(piece).copy_(values); }},
                   gather_memory_);
}

std::vector<double> Optimizer::sample_weights() const {
  constexpr int64_t kSampled = 4096;  // elements per parameter
  if (host_state_) host_state_->synchronize();
  std::vector<double> out;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const kernels::AdamWTensor& t = tensors_[i];
    const int64_t all = set_[parts_[i].parameter].value.numel(), n = std::min(kSampled, all),
                  first = (all - n) / 2 - parts_[i].begin, begin = std::max<int64_t>(0, first),
                  count = std::min(first + n, parts_[i].count) - begin;
    if (count <= 0) continue;
    Tensor weights = t.param.narrow(0, begin, count).to(Device{});
    if (t.low_bits.defined())
      weights =
          kernels::combine_master(weights, t.low_bits.narrow(0, 2 * begin, 2 * count).to(Device{}));
    const double scale = std::sqrt(static_cast<double>(all) / static_cast<double>(n));
    for (const double weight : weights.to_vector<double>()) out.push_back(scale * weight);
  }
  return out;
}

std::vector<Fingerprint> Optimizer::fingerprints() const {
  if (host_state_) host_state_->synchronize();
  std::vector<FingerprintSource> sources;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const kernels::AdamWTensor& t = tensors_[i];
    sources.push_back({".m", t.m, parts_[i]});
    sources.push_back({".v", t.v, parts_[i]});
    if (t.low_bits.defined()) sources.push_back({".low_bits", t.low_bits, parts_[i]});
  }
  return cohort::fingerprints(set_, sources);
}

size_t Optimizer::part_of(size_t parameter) const {
  const auto part = std::ranges::lower_bound(parts_, parameter, {}, &ParameterPart::parameter);
  return static_cast<size_t>(part - parts_.begin());
}

Optimizer::State Optimizer::state_of(const ParameterPart& piece) const {
  const size_t i = part_of(piece.parameter);
  const kernels::AdamWTensor& t = tensors_[i];
  const int64_t begin = piece.begin - parts_[i].begin;
  State out{t.m.narrow(0, begin, piece.count), t.v.narrow(0, begin, piece.count), {}};
  if (t.low_bits.defined()) out.low_bits = t.low_bits.narrow(0, 2 * begin, 2 * piece.count);
  return out;
}

std::vector<TensorSource> Optimizer::state_sources(std::optional<size_t> unit) {
  if (host_state_) host_state_->synchronize();
  std::vector<TensorSource> out;
  for (size_t i = 0; i < set_.size(); ++i) {
    const NamedParameter& p = set_[i];
    if (!p.trained() || (unit && p.unit != *unit)) continue;
    const Shape shape = p.value.shape();
    const auto take = [this, i](Tensor State::*member) {
      return is_sharded() ? std::exchange(gathered_.at(i).*member, {})
                          : state_of({.parameter = i, .count = set_[i].value.numel()}).*member;
    };
    const auto add = [&](const char* suffix, DType dtype, std::function<Tensor()> make) {
      out.push_back({p.name + suffix, shape, stored_name(dtype), std::move(make)});
    };
    add(".m", moments_of(p.value.dtype()), [=] { return take(&State::m).reshape(shape); });
    add(".v", moments_of(p.value.dtype()), [=] { return take(&State::v).reshape(shape); });
    if (p.value.dtype() == DType::kBF16)
      add(".master", DType::kF32, [=, this] {
        return kernels::combine_master(set_[i].value.to(Device{}),
                                       take(&State::low_bits).to(Device{}));
      });
  }
  return out;
}

void Optimizer::allocate_gathered(std::optional<size_t> unit) {
  if (!is_sharded()) return;
  gathered_.clear();
  allocate_gather_memory();
  for (size_t i = 0; i < set_.size(); ++i) {
    const NamedParameter& p = set_[i];
    if (!p.trained() || p.unit != unit) continue;
    State& state = gathered_[i];
    for (Tensor* moment : {&state.m, &state.v})
      *moment = Tensor::empty({p.value.numel()}, moments_of(p.value.dtype()));
    if (p.value.dtype() == DType::kBF16)
      state.low_bits = Tensor::empty({2 * p.value.numel()}, DType::kU8);
  }
}

void Optimizer::free_gathered() {
  gathered_.clear();
  gather_memory_ = {};
}

void Optimizer::gather_state(Communicator& comm, size_t unit, int to) {
  if (!is_sharded()) return;
  if (host_state_) host_state_->synchronize();
  const PartGather parts(set_, comm, config_.reduction_lanes);
  const auto gather = [&](DType parameter, DType dtype, int64_t width, Tensor State::*member) {
    parts.gather(unit,
                 {.parameter = parameter,
                  .dtype = dtype,
                  .width = width,
                  .mine = [&](const ParameterPart& piece) { return state_of(piece).*member; },
                  .store =
                      [&](const ParameterPart& piece, const Tensor& values) {
                        if (comm.rank() != to) return;
                        piece.of(gathered_.at(piece.parameter).*member, width).copy_(values);
                      }},
                 gather_memory_);
  };
  const DType accumulated = accumulate_dtype(set_.dtype());
  for (const DType dtype : {set_.dtype(), accumulated}) {
    for (Tensor State::*moment : {&State::m, &State::v})
      gather(dtype, moments_of(dtype), 1, moment);
    if (dtype == DType::kBF16) gather(dtype, DType::kU8, 2, &State::low_bits);
    if (dtype == accumulated) break;
  }
}

void Optimizer::load(const SafetensorsFolder& files, int64_t updates) {
  for (size_t i = 0; i < tensors_.size(); ++i) load_part(files, i);
  updates_ = updates;
}

void Optimizer::load_part(const SafetensorsFolder& files, size_t i) {
  kernels::AdamWTensor& t = tensors_[i];
  const NamedParameter& p = set_[parts_[i].parameter];
  const DType accumulated = accumulate_dtype(p.value.dtype());
  // Saved moments have the accumulation dtype, or are bf16.
  const auto read = [&](const char* suffix, bool may_be_bf16) {
    const std::string name = p.name + suffix;
    const SafetensorsFile& file = files.get(name);
    const DType dtype = file.dtype(name);
    if (file.shape(name) != p.value.shape() ||
        (dtype != accumulated && !(may_be_bf16 && dtype == DType::kBF16)))
      throw InputError(str("optimizer state '", name, "': expected ", dtype_name(accumulated),
                           p.value.shape().str(), ", the checkpoint has ", dtype_name(dtype),
                           file.shape(name).str()));
    Tensor saved = Tensor::empty({parts_[i].count}, accumulated),
           norm = Tensor::empty({1}, DType::kF64);
    file.read_range(name, parts_[i].begin, saved);
    kernels::grad_norm(norm, {&saved, 1});
    if (!std::isfinite(norm.item()))
      throw InputError(str("optimizer state '", name, "' holds a number that is not finite",
                           "; hint: resume from an earlier checkpoint"));
    return saved;
  };
  t.m.copy_(read(".m", true).to(t.m.dtype()));
  t.v.copy_(read(".v", true).to(t.v.dtype()));
  if (!t.low_bits.defined()) return;
  const Tensor master = read(".master", false);
  Tensor param = Tensor::empty(master.shape(), DType::kBF16),
         low_bits = Tensor::empty({2 * master.numel()}, DType::kU8);
  kernels::split_master(param, low_bits, master);
  t.param.copy_(param);
  t.low_bits.copy_(low_bits);
}

}  // namespace cohort
