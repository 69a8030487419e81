// Where the time of a training step goes: seconds of each op, and how near they are to what the
// op's arithmetic and memory traffic need on this GPU.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "trainers/config.h"

namespace cohort::bench {

// What an op has to do in one step: every tensor read once, results written once.
struct OpCost {
  double flops = 0, bytes = 0;
};
using OpCosts = std::map<std::string, OpCost>;

// Of the ops of a step over `tokens` tokens, in sequences of the model's context, that take time.
OpCosts step_costs(const Transformer& model, const OptimizerStorage& storage, int64_t tokens);

// Traces a few steps and prints a line for each op, the longest first: milliseconds a step, share
// of the step and, on CUDA, share of the roofline (Williams et al. 2009) of an H100 or H200 in
// bf16: the larger of FLOPs / 989 TFLOP/s and bytes / the memory's bandwidth, over the time. Time
// is that of kernels on CUDA, on the CPU that of the op, ops that it calls included.
// The last line: all ops, and their share of the `seconds` that a step takes untraced.
void print_op_times(Device device, const std::function<void()>& step, double seconds,
                    const OpCosts& costs);

}  // namespace cohort::bench
