#include "kernels/arguments.h"

#include <algorithm>
#include <span>

namespace cohort::kernels {
namespace {

// The strides that a tensor must have; those that are free are its own.
Shape wanted_strides(const ArgumentSpec& spec, const Tensor& t) {
  const bool is_view = spec.layout == "view";
  Shape strides = is_view ? t.strides() : contiguous_strides(t.shape());
  if (t.rank() == 0) return strides;
  if (is_view) strides[-1] = 1;
  if (spec.layout == "strided" && (!spec.is_matrix || t.rank() == 2)) strides[0] = t.strides()[0];
  return strides;
}

}  // namespace

int64_t ArgumentCheck::operator[](std::string_view name) const {
  for (const Value& value : std::span(values_).first(num_values_))
    if (value.name == name) return value.value;
  return -1;
}

Shape ArgumentCheck::sizes(const ArgumentSpec& spec, const Tensor& t) {
  const Shape own = spec.is_matrix && t.defined() ? Shape{t.rows(), t.cols()} : t.shape();
  const int others = static_cast<int>(spec.num_sizes) - 1;
  Shape out;
  for (const auto& [multiple, name, factor, offset] : std::span(spec.sizes).first(spec.num_sizes)) {
    const int i = out.rank();
    if (name == "...") {
      if (!rest_) {
        rest_.emplace();
        for (int k = i; k < i + own.rank() - others; ++k) rest_->push_back(own[k]);
        bind("rows", t.rows()).bind("numel", t.numel());
      }
      for (const int64_t size : *rest_) out.push_back(size);
      continue;
    }
    const int64_t times = multiple.empty() ? factor : factor * (*this)[multiple];
    int64_t value = name.empty() ? 0 : (*this)[name];
    if (value < 0 && times > 0 && i < own.rank() && own[i] >= offset) {
      value = (own[i] - offset) / times;
      values_.at(num_values_++) = {name, value, spec.name};
    }
    out.push_back(value < 0 ? -1 : times * value + offset);
  }
  return out;
}

std::string ArgumentCheck::origins(const ArgumentSpec& spec) const {
  std::string out;
  for (const SizeSpec& size : spec.sizes)
    for (const auto& [name, value, argument] : std::span(values_).first(num_values_))
      if ((name == size.name || name == size.multiple) && argument != spec.name)
        out += str(out.empty() ? ", where " : ", ", name, " = ", value,
                   argument.empty() ? "" : " as in ", argument);
  return out;
}

void ArgumentCheck::fail(const std::string& message) const {
  throw Error(str("[", op_, "] ", message));
}

void ArgumentCheck::check(const ArgumentSpec& spec, const Tensor& t) {
  if (!t.defined() && spec.is_optional) return;
  if (!device_ && t.defined()) device_ = t.device();
  if (!dtype_ && t.defined() && spec.dtype.empty()) dtype_ = t.dtype();
  std::string_view dtype = spec.dtype;
  if (dtype.empty() || dtype == "accumulate") {
    const DType base = dtype_.value_or(t.dtype());
    dtype = dtype_name(dtype.empty() ? base : accumulate_dtype(base));
  }
  const bool fits = dtype == "any" || dtype == dtype_name(t.dtype());
  const Shape wanted = sizes(spec, t), own = spec.is_matrix ? Shape{t.rows(), t.cols()} : t.shape();
  if (!t.defined() || own != wanted || !fits) {
    const bool known = std::find(wanted.begin(), wanted.end(), -1) == wanted.end();
    fail(str("expected ", spec.name, " ", dtype == "any" ? "" : dtype,
             known ? wanted.str() + " = " : "", spec.text, origins(spec), ", got ", text_of(t)));
  }
  if (t.strides() != wanted_strides(spec, t))
    fail(str("expected contiguous ", spec.name, ", got ", t.str(), " with strides ",
             t.strides().str()));
  if (t.device() != *device_)
    fail(str("expected ", spec.name, " on ", device_->str(), ", got ", t.str()));
}

}  // namespace cohort::kernels
