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
  // Parameters that one product uses are rows of one leaf. The first of them, at first_row 0, makes
  // the leaf, with leaf_rows rows; for the others it is `leaf`.
  Variable leaf = {};
  int64_t first_row = 0, leaf_rows = 0;  // leaf_rows 0: a leaf of its own
};
// Makes a parameter; returns its leaf.
using MakeParameter = std::function<Variable(const ParameterSpec& spec)>;

// A parameter as everybody but the products sees it: some rows of a leaf, or all.
struct NamedParameter {
  std::string name;
  Tensor value;  // shares the leaf's storage
  Variable leaf;
  int64_t first_row = 0;
  bool decay = false;  // weight decay applies

  // Shares the storage of the leaf's gradient.
  Tensor grad() const { return leaf.grad().narrow(0, first_row, value.dim(0)); }
};

}  // namespace cohort
