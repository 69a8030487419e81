#include "nn/parameter_set.h"

#include <algorithm>
#include <cmath>

#include "core/dry_run.h"
#include "core/parallel.h"
#include "core/rng.h"
#include "core/sizes.h"

namespace cohort {
namespace {

// N(0, std), computed in f64 on the CPU: the same values for every device.
Tensor normal_values(const Shape& shape, double std, uint64_t seed, uint64_t stream) {
  Tensor value = Tensor::empty(shape, DType::kF64);
  double* p = value.data<double>();
  parallel_for(value.numel(), 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += 2) {
      const auto pair = normal_pair(seed, stream, static_cast<uint64_t>(i / 2));
      p[i] = std * pair[0];
      if (i + 1 < end) p[i + 1] = std * pair[1];
    }
  });
  return value;
}

// U(-bound, bound), likewise.
Tensor uniform_values(const Shape& shape, double bound, uint64_t seed, uint64_t stream) {
  Tensor value = Tensor::empty(shape, DType::kF64);
  double* p = value.data<double>();
  parallel_for(value.numel(), 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto bits = philox(seed, stream, static_cast<uint64_t>(i));
      p[i] = bound * (2 * uniform_f64(bits[0], bits[1]) - 1);
    }
  });
  return value;
}

Tensor vector_values(const ParameterLeaf& leaf, const Shape& shape, uint64_t seed,
                     uint64_t stream) {
  if (leaf.values == InitialValues::kUniform) return uniform_values(shape, leaf.init, seed, stream);
  Tensor value = uniform_values(shape, 1, seed, stream);
  double* const p = value.data<double>();
  for (int64_t i = 0; i < value.numel(); ++i) {
    const double unit = (p[i] + 1) / 2, dt = 0.001 * std::pow(100, unit);
    p[i] = leaf.values == InitialValues::kLogUniform ? std::log(std::max(leaf.init * unit, 1e-4))
                                                     : dt + std::log(-std::expm1(-dt));
  }
  return value;
}

}  // namespace

void ParameterSet::begin_unit() {
  const ParameterUnit& last = units_.back();
  end_ = last.end;
  units_.push_back({last.end, last.end, last.end_leaf, last.end_leaf, 0});
}

Variable ParameterSet::add(const ParameterSpec& spec) {
  const ParameterLeaf leaf = add_leaf(spec);
  add_rows(leaf, spec.name, 0, spec.shape[0]);
  return leaf.variable;
}

ParameterLeaf ParameterSet::add_leaf(const ParameterSpec& spec) {
  COHORT_CHECK(spec.padding == 0 || spec.leaf_rows == 0, "[parameters] ", spec.name,
               ": padding of both dimensions");
  const int dim = spec.padding > 0 ? 1 : 0;
  const int64_t size = spec.shape[dim];
  Shape padded = spec.shape;
  padded[dim] = std::max(size + spec.padding, spec.leaf_rows);
  const bool is_quantized = spec.format != kernels::WeightFormat::kModel;
  const DType dtype = spec.dtype == ParameterDType::kStatistic ? accumulate_dtype(dtype_) : dtype_;
  const Tensor all = is_quantized ? Tensor::without_elements(padded, dtype, device_)
                                  : Tensor::empty(padded, dtype, device_);
  if (!is_quantized) all.narrow(dim, size, padded[dim] - size).zero_();
  const Tensor value = all.hide_padding(dim, size);
  const bool trained = spec.role == ParameterRole::kAdapter ||
                       (spec.role == ParameterRole::kTrained && !adapter_seed_ && !is_quantized);
  const Variable leaf = trained ? Variable::parameter(value, spec.name) : Variable(value);
  if (trained) trained_.push_back(leaf);
  const int64_t flat_index = round_up(end_, kLeafAlignment);
  end_ = flat_index + value.numel();
  units_.back().end = round_up(end_, kUnitAlignment);
  units_.back().end_leaf = trained_.size();
  const int64_t gradient_begin = units_.back().gradients;
  if (trained) units_.back().gradients += round_up(all.numel(), kLeafAlignment);
  kernels::QuantizedWeight quantized;
  if (is_quantized) quantized = kernels::QuantizedWeight::empty(spec.format, spec.shape, device_);
  return {leaf,       quantized,   spec.use,   spec.init,     spec.role,
          flat_index, spec.values, spec.dtype, gradient_begin};
}

void ParameterSet::add_rows(const ParameterLeaf& leaf, const std::string& name, int64_t first_row,
                            int64_t rows) {
  const Tensor& all = leaf.variable.value();
  Tensor value = all.narrow(0, first_row, rows);
  kernels::QuantizedWeight quantized;
  if (leaf.quantized.defined()) quantized = leaf.quantized.rows(first_row, rows);
  const bool is_adapter = leaf.role == ParameterRole::kAdapter;
  const uint64_t stream = is_adapter ? rng_stream(kInitPurpose, adapters_, 1)
                                     : rng_stream(kInitPurpose, parameters_.size() - adapters_);
  const auto adapter_values = [&] {
    return uniform_values(value.shape(), leaf.init, adapter_seed_.value(), stream);
  };
  if (is_adapter && is_dry_run())
    value.zero_();
  else if (is_adapter)
    value.copy_(adapter_values().to(dtype_));
  else if (leaf.use == ParameterUse::kVector && leaf.values == InitialValues::kOfUse)
    value.fill_(leaf.init);
  else if (leaf.use == ParameterUse::kVector) {
    if (seed_) value.copy_(vector_values(leaf, value.shape(), *seed_, stream).to(value.dtype()));
  } else if (seed_ && quantized.defined())
    quantized.copy_(kernels::quantize_weight(
        normal_values(value.shape(), leaf.init, *seed_, stream).to(DType::kF32), base_format_));
  else if (seed_)
    value.copy_(normal_values(value.shape(), leaf.init, *seed_, stream).to(dtype_));
  parameters_.push_back(
      {.name = name,
       .value = value,
       .quantized = quantized,
       .quantized_leaf = leaf.quantized,
       .leaf = leaf.variable,
       .first_row = first_row,
       .use = leaf.use,
       .role = leaf.role,
       .unit = units_.size() - 1,
       .flat_index = leaf.flat_index + first_row * (all.numel() / all.dim(0)),
       .gradient_begin = leaf.gradient_begin + first_row * (all.numel() / all.dim(0)),
       .dtype = leaf.dtype});
  if (is_adapter) ++adapters_;
}

std::vector<Tensor> ParameterSet::gradients() const {
  std::vector<Tensor> out;
  for (const NamedParameter& p : parameters_)
    if (p.trained()) out.push_back(p.grad());
  return out;
}

int64_t ParameterSet::slice_size(size_t unit, int64_t slices) const {
  return round_up(ceil_div(units_[unit].gradients, slices), kLeafAlignment);
}

Tensor ParameterSet::allocate_gradients(size_t unit, int64_t slices) const {
  Tensor all =
      Tensor::empty({slices * slice_size(unit, slices)}, accumulate_dtype(dtype_), device_);
  set_gradients(unit, all);
  return all;
}

void ParameterSet::set_gradients(size_t unit, const Tensor& all) const {
  const size_t first = units_[unit].first_leaf, last = units_[unit].end_leaf;
  int64_t begin = 0;
  for (size_t i = first; i < last; ++i) {
    const Tensor& value = trained_[i].value();
    const Shape shape = value.with_padding().shape();
    const int64_t end =
        i + 1 == last ? all.numel() : begin + round_up(shape.numel(), kLeafAlignment);
    trained_[i].set_grad_storage(
        all.narrow(0, begin, shape.numel()).reshape(shape).hide_padding(0, value.dim(0)));
    // Padding, which no backward writes.
    all.narrow(0, begin + value.numel(), end - begin - value.numel()).zero_();
    begin = end;
  }
}

void ParameterSet::free_gradients(size_t unit) const {
  for (size_t i = units_[unit].first_leaf; i < units_[unit].end_leaf; ++i)
    trained_[i].set_grad_storage({});
}

void ParameterSet::free_gradients() const {
  for (const Variable& leaf : trained_) leaf.set_grad_storage({});
}

}  // namespace cohort
