// A model's parameters. Its modules describe them in a fixed order, which numbers the RNG streams
// of initial values and the gradient buckets. A MakeParameter creates tensors from the descriptions
// or only counts them.
#pragma once

#include <functional>
#include <string>

#include "autograd/variable.h"

namespace cohort {

struct ParameterSpec {
  // Use in the forward: in a matmul with every token, as a table of rows, or elementwise. Only
  // vectors have no weight decay.
  enum class Use : uint8_t { kMatmul, kLookup, kVector };
  std::string name;  // as in Hugging Face's Llama if it exists: model.layers.0.mlp.up_proj.weight
  Shape shape;
  Use use = Use::kVector;
  double init = 0;  // initial value: constant of a vector, else the standard deviation of N(0, .)
  // Parameters of the same matmul are rows of one leaf. The first of them (first_row 0) creates the
  // leaf with leaf_rows rows; the others pass it as `leaf`.
  Variable leaf = {};
  int64_t first_row = 0, leaf_rows = 0;  // leaf_rows 0: a leaf of its own
};
// Creates a parameter and returns its leaf.
using MakeParameter = std::function<Variable(const ParameterSpec& spec)>;

// A parameter as named rows of a leaf. Matmuls use the whole leaf.
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
