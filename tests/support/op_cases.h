// The table of differentiable ops: for each a few sizes and options, with inputs from the op's
// domain. `cohort gradcheck` and the tests iterate over it. Elementwise ops come from the lists of
// kernels/elementwise.h; any other op has its rows in op_cases.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "autograd/gradcheck.h"
#include "autograd/variable.h"

namespace cohort {

struct OpCase {
  std::string op;       // the function's name in autograd/ops.h: "attention"
  std::string variant;  // distinguishes the rows of an op: "4 heads on 2, lengths 5 1 0 9"
  // The differentiated inputs, in f64: inside the op's domain and away from its kinks.
  std::function<std::vector<Tensor>(uint64_t seed)> inputs;
  // The op on them. Its constants take the dtype of the first input, so that any dtype works.
  std::function<Variable(std::span<const Variable>)> fn;
  bool on_gpus = true;  // false: the op is not there yet
};

std::vector<OpCase> op_cases();
// Adds those of the policy loss, which op_cases() has too.
void add_policy_loss(std::vector<OpCase>& table);

// Gradients of a case against central differences, with gradcheck()'s default tolerances.
GradcheckResult run_op_case(const OpCase& test);

}  // namespace cohort
