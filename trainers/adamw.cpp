// AdamW (Loshchilov and Hutter 2019): moments and masters of each parameter.
#include <algorithm>
#include <cmath>

#include "trainers/optimizer.h"

namespace cohort {

Optimizer::Optimizer(const ParameterSet& parameters, const OptimizerConfig& config, uint64_t seed)
    : config_(config), seed_(seed) {
  for (const NamedParameter& p : parameters) {
    if (!p.trained()) continue;
    const DType accumulated = accumulate_dtype(p.value.dtype());
    const bool small = config.storage.moments == MomentKind::kBF16 && accumulated == DType::kF32,
               on_host = config.storage.on_host(p.unit);
    const auto zeros = [&](const Shape& shape, DType dtype) {
      return on_host ? Tensor::pinned(shape, dtype) : Tensor::zeros(shape, dtype, p.value.device());
    };
    const DType moments = small ? DType::kBF16 : accumulated;
    parameters_.push_back(p);
    tensors_.push_back({.param = p.value,
                        .m = zeros(p.value.shape(), moments),
                        .v = zeros(p.value.shape(), moments),
                        .weight_decay = p.use == ParameterUse::kVector ? 0 : config.weight_decay,
                        .low_bits = p.value.dtype() == accumulated
                                        ? Tensor()
                                        : zeros({2 * p.value.numel()}, DType::kU8),
                        .unit = p.unit,
                        .flat_index = p.flat_index});
    if (on_host) host_count_ = tensors_.size();
  }
  if (host_count_ > 0) host_state_.emplace(std::span(tensors_).first(host_count_));
}

void Optimizer::allocate_workspace() {
  if (host_state_) host_state_->allocate_buffers();
}
void Optimizer::free_workspace() {
  if (host_state_) host_state_->free_buffers();
}

void Optimizer::step(double learning_rate, const Tensor& norm, const Tensor& non_finite) {
  allocate_workspace();
  for (size_t i = 0; i < tensors_.size(); ++i) tensors_[i].grad = parameters_[i].grad();
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
  kernels::adamw_step(all.subspan(host_count_), desc);
  for (kernels::AdamWTensor& t : tensors_) t.grad = {};
  ++updates_;
}

std::vector<double> Optimizer::sample_weights() const {
  constexpr int64_t kSampled = 4096;  // elements per parameter
  if (host_state_) host_state_->synchronize();
  std::vector<double> out;
  for (const kernels::AdamWTensor& t : tensors_) {
    const int64_t all = t.param.numel(), n = std::min(kSampled, all), begin = (all - n) / 2;
    Tensor weights = t.param.reshape({all}).narrow(0, begin, n).to(Device{});
    if (t.low_bits.defined())
      weights =
          kernels::combine_master(weights, t.low_bits.narrow(0, 2 * begin, 2 * n).to(Device{}));
    const double scale = std::sqrt(static_cast<double>(all) / static_cast<double>(n));
    for (const double weight : weights.to_vector<double>()) out.push_back(scale * weight);
  }
  return out;
}

std::vector<TensorSource> Optimizer::state_sources() const {
  if (host_state_) host_state_->synchronize();
  std::vector<TensorSource> out;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const kernels::AdamWTensor& t = tensors_[i];
    const std::string& name = parameters_[i].name;
    const auto add = [&](const char* suffix, DType dtype, std::function<Tensor()> make) {
      out.push_back({name + suffix, t.param.shape(), stored_name(dtype), std::move(make)});
    };
    add(".m", t.m.dtype(), [&t] { return t.m; });
    add(".v", t.v.dtype(), [&t] { return t.v; });
    if (t.low_bits.defined())
      add(".master", DType::kF32,
          [&t] { return kernels::combine_master(t.param.to(Device{}), t.low_bits.to(Device{})); });
  }
  return out;
}

void Optimizer::load(const SafetensorsFile& file, int64_t updates) {
  // Accepted dtypes of a saved tensor: the accumulation dtype, or also bf16.
  enum class Saved { kAccumulateDType, kOrBF16 };
  const auto read = [&](const std::string& name, const Tensor& param, Saved accepted) {
    Tensor saved = file.read(name);
    const DType accumulated = accumulate_dtype(param.dtype());
    if (saved.dtype() == DType::kBF16 && accepted == Saved::kOrBF16) saved = saved.to(DType::kF32);
    if (saved.shape() != param.shape() || saved.dtype() != accumulated)
      throw InputError(str("optimizer state '", name, "': expected ", dtype_name(accumulated),
                           param.shape().str(), ", the checkpoint has ", saved.str()));
    Tensor norm = Tensor::empty({1}, DType::kF64);
    kernels::grad_norm(norm, {&saved, 1});
    if (!std::isfinite(norm.item()))
      throw InputError(str("optimizer state '", name, "' holds a number that is not finite",
                           "; hint: resume from an earlier checkpoint"));
    return saved;
  };
  for (size_t i = 0; i < tensors_.size(); ++i) {
    kernels::AdamWTensor& t = tensors_[i];
    const std::string& name = parameters_[i].name;
    for (const auto& [suffix, moment] : {std::pair{".m", &t.m}, {".v", &t.v}})
      moment->copy_(read(name + suffix, t.param, Saved::kOrBF16).to(moment->dtype()));
    if (t.param.dtype() != DType::kBF16) continue;
    const Tensor master = read(name + ".master", t.param, Saved::kAccumulateDType);
    Tensor param = Tensor::empty(master.shape(), DType::kBF16),
           low_bits = Tensor::empty({2 * master.numel()}, DType::kU8);
    kernels::split_master(param, low_bits, master);
    t.param.copy_(param);
    t.low_bits.copy_(low_bits);
  }
  updates_ = updates;
}

}  // namespace cohort
