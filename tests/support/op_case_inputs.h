// Inputs and constants of the table of ops (op_cases.h).
#pragma once

#include <cmath>
#include <functional>
#include <span>
#include <vector>

#include "autograd/gradcheck.h"
#include "core/rng.h"

namespace cohort::test {

using Inputs = std::span<const Variable>;

enum class Domain { kReal, kPositive, kNonZero };
struct InputSpec {
  Shape shape;
  Domain domain = Domain::kReal;
};

// Standard normal values; at least 0.25 away from zero if the domain excludes it, which is far
// enough for the steps of a central difference.
inline Tensor random_input(const InputSpec& spec, uint64_t seed, uint64_t stream) {
  Rng rng(seed, rng_stream(kGradcheckPurpose, 3, stream));
  std::vector<double> values(static_cast<size_t>(spec.shape.numel()));
  for (double& v : values) {
    v = rng.normal();
    if (spec.domain == Domain::kReal) continue;
    const double size = 0.25 + std::abs(v);
    v = spec.domain == Domain::kPositive ? size : std::copysign(size, v);
  }
  return Tensor::from(values, spec.shape);
}

inline std::function<std::vector<Tensor>(uint64_t)> inputs(std::vector<InputSpec> specs) {
  return [specs = std::move(specs)](uint64_t seed) {
    std::vector<Tensor> out;
    for (size_t i = 0; i < specs.size(); ++i) out.push_back(random_input(specs[i], seed, i));
    return out;
  };
}

// A constant of an op, in the dtype of `like` and on its device: the same value in every dtype.
inline Tensor constant(const InputSpec& spec, const Variable& like) {
  const Tensor values = random_input(spec, 99, 99).to(DType::kBF16);
  return values.to(like.value().dtype()).to(like.value().device());
}
inline Tensor constant(const std::vector<double>& values, const Variable& like) {
  return Tensor::from(values).to(like.value().dtype()).to(like.value().device());
}
// A constant in accumulate_dtype(), which stays f32 with bf16 inputs.
template <class Values>
Tensor f32_constant(const Values& values, const Variable& like) {
  return constant(values, Variable(Tensor::empty({}, accumulate_dtype(like.value().dtype()),
                                                 like.value().device())));
}

inline Tensor ids(const std::vector<int32_t>& values, const Variable& like) {
  return Tensor::from(values).to(like.value().device());
}

}  // namespace cohort::test
