// AdamW (Loshchilov and Hutter 2019): moments and masters of each parameter.
#include <algorithm>
#include <cmath>

#include "trainers/optimizer.h"

namespace cohort {
namespace {

class AdamW final : public Optimizer {
 public:
  AdamW(const ParameterSet& parameters, const OptimizerConfig& config, uint64_t seed)
      : config_(config), seed_(seed) {
    for (const NamedParameter& p : parameters) {
      if (!p.trained()) continue;
      const Tensor &value = p.value, &grad = p.grad();
      const bool small = config.storage.moments == MomentKind::kBF16 && grad.dtype() == DType::kF32;
      const auto moment = [&] {
        return Tensor::zeros(grad.shape(), small ? DType::kBF16 : grad.dtype(), grad.device());
      };
      names_.push_back(p.name);
      tensors_.push_back({.param = value,
                          .grad = grad,
                          .m = moment(),
                          .v = moment(),
                          .weight_decay = p.use == ParameterUse::kVector ? 0 : config.weight_decay,
                          .unit = p.unit,
                          .flat_index = p.flat_index});
      if (value.dtype() != grad.dtype())
        tensors_.back().low_bits = Tensor::zeros({2 * value.numel()}, DType::kU8, value.device());
    }
  }

  void step(double learning_rate, const Tensor& norm, const Tensor& non_finite) override {
    kernels::adamw_step(tensors_, {.learning_rate = learning_rate,
                                   .beta1 = config_.adam_beta1,
                                   .beta2 = config_.adam_beta2,
                                   .eps = config_.adam_eps,
                                   .step = ++updates_,
                                   .seed = seed_,
                                   .norm = norm,
                                   .max_norm = config_.max_grad_norm,
                                   .non_finite = non_finite});
  }

  double relative_update(double learning_rate) const override {
    constexpr int64_t kSampled = 4096;  // elements per parameter
    constexpr size_t kParameters = 16;
    if (updates_ == 0) return std::nan("");
    const double correction1 = 1 - std::pow(config_.adam_beta1, static_cast<double>(updates_)),
                 correction2 = 1 - std::pow(config_.adam_beta2, static_cast<double>(updates_));
    double update = 0, weight = 0;
    const size_t stride = (tensors_.size() + kParameters - 1) / kParameters;
    for (size_t i = 0; i < tensors_.size(); i += stride) {
      const kernels::AdamWTensor& t = tensors_[i];
      const int64_t n = std::min(kSampled, t.param.numel());
      const auto sample = [&](const Tensor& tensor) {
        return tensor.reshape({tensor.numel()})
            .narrow(0, (tensor.numel() - n) / 2, n)
            .to_vector<double>();
      };
      const std::vector<double> w = sample(t.param), m = sample(t.m), v = sample(t.v);
      for (size_t k = 0; k < w.size(); ++k) {
        const double step =
            m[k] / correction1 / (std::sqrt(v[k] / correction2) + config_.adam_eps) +
            t.weight_decay * w[k];
        update += step * step;
        weight += w[k] * w[k];
      }
    }
    return learning_rate * std::sqrt(update / weight);
  }

  NamedTensors state() const override {
    NamedTensors out;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const kernels::AdamWTensor& t = tensors_[i];
      out.emplace_back(names_[i] + ".m", t.m);
      out.emplace_back(names_[i] + ".v", t.v);
      if (t.low_bits.defined())
        out.emplace_back(names_[i] + ".master",
                         kernels::combine_master(t.param.to(Device{}), t.low_bits.to(Device{})));
    }
    return out;
  }

  void load(const SafetensorsFile& file, int64_t updates) override {
    // Accepted dtypes of a saved tensor: the accumulation dtype, or also bf16.
    enum class Saved { kAccumulateDType, kOrBF16 };
    const auto read = [&](const std::string& name, const Tensor& grad, Saved accepted) {
      Tensor saved = file.read(name);
      if (saved.dtype() == DType::kBF16 && accepted == Saved::kOrBF16)
        saved = saved.to(DType::kF32);
      if (saved.shape() != grad.shape() || saved.dtype() != grad.dtype())
        throw InputError(str("optimizer state '", name, "': expected ", dtype_name(grad.dtype()),
                             grad.shape().str(), ", the checkpoint has ", saved.str()));
      Tensor norm = Tensor::empty({1}, DType::kF64);
      kernels::grad_norm(norm, {&saved, 1});
      if (!std::isfinite(norm.item()))
        throw InputError(str("optimizer state '", name, "' holds a number that is not finite",
                             "; hint: resume from an earlier checkpoint"));
      return saved;
    };
    for (size_t i = 0; i < tensors_.size(); ++i) {
      kernels::AdamWTensor& t = tensors_[i];
      for (const auto& [name, moment] : {std::pair{".m", &t.m}, {".v", &t.v}})
        moment->copy_(read(names_[i] + name, t.grad, Saved::kOrBF16).to(moment->dtype()));
      if (t.param.dtype() != DType::kBF16) continue;
      const Tensor master = read(names_[i] + ".master", t.grad, Saved::kAccumulateDType);
      Tensor param = Tensor::empty(master.shape(), DType::kBF16),
             low_bits = Tensor::empty({2 * master.numel()}, DType::kU8);
      kernels::split_master(param, low_bits, master);
      t.param.copy_(param);
      t.low_bits.copy_(low_bits);
    }
    updates_ = updates;
  }

 private:
  OptimizerConfig config_;
  uint64_t seed_;
  std::vector<std::string> names_;
  std::vector<kernels::AdamWTensor> tensors_;
};

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(const ParameterSet& parameters,
                                          const OptimizerConfig& config, uint64_t seed) {
  return std::make_unique<AdamW>(parameters, config, seed);
}

}  // namespace cohort
