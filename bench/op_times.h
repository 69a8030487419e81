// Profile of a training step: seconds of each op, and the fraction of the roofline that it reaches.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "trainers/optimizer.h"

namespace cohort::bench {

// Work of an op in one step: every input is read once, every result is written once.
struct OpCost {
  double flops = 0, bytes = 0;
};
using OpCosts = std::map<std::string, OpCost>;

// Costs of the main ops of a step over `tokens` tokens, of which `targets` have a target, in
// sequences of the model's context.
OpCosts step_costs(const Transformer& model, const OptimizerStorage& storage, int64_t tokens,
                   int64_t targets);

// Traces a few steps and prints a line per op, the longest first: milliseconds per step, fraction
// of the step and, on CUDA, fraction of the roofline (Williams et al. 2009) of an H100 or H200 in
// bf16: the larger of FLOPs / 989 TFLOP/s and bytes / memory bandwidth, over the time. The time is
// that of kernels on CUDA, and on the CPU that of the op with the ops that it calls. The last line
// is the sum over all ops, as a fraction of the `seconds` of an untraced step.
void print_op_times(Device device, const std::function<void()>& step, double seconds,
                    const OpCosts& costs);

}  // namespace cohort::bench
