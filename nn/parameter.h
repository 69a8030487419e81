// A model's parameters. Its modules describe them, in a fixed order: the order numbers the streams
// of the initial values and the gradient buckets. A maker turns descriptions into tensors, or only
// counts them.
#pragma once

#include <functional>
#include <string>

#include "autograd/variable.h"

namespace cohort {

struct ParameterSpec {
  // How a forward uses it: in a product with every token, as a table of rows, or elementwise. Only
  // vectors are free of weight decay.
  enum class Use : uint8_t { kProduct, kLookup, kVector };
  std::string name;  // Hugging Face Llama's, where it has one: model.layers.0.mlp.up_proj.weight
  Shape shape;
  Use use = Use::kVector;
  double init = 0;  // where it starts: a vector's constant, else the standard deviation of N(0, .)
};
using MakeParameter = std::function<Variable(const ParameterSpec& spec)>;

struct NamedParameter {
  std::string name;
  Variable variable;
  bool decay = false;  // weight decay applies
};

}  // namespace cohort
