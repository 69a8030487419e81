// Checks analytic gradients against central differences in f64. Public API: use it on your own ops.
//
//   const auto fn = [](std::span<const Variable> in) { return my_op(in[0], in[1]); };
//   const GradcheckResult r = gradcheck(fn, {x, w});
//   EXPECT_TRUE(r.ok) << r.message;
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "autograd/variable.h"

namespace cohort {

// The purpose of rng_stream() for inputs and weights of checks.
inline constexpr uint64_t kGradcheckPurpose = 6;

struct GradcheckOptions {
  double step = 2e-3;      // h of the fourth-order stencil, relative to max(1, |x|)
  double relative = 1e-6;  // |analytic - numeric| <= relative max(|a|, |n|) + absolute max |g|
  double absolute = 1e-9;
  int64_t elements = 64;   // random elements per input (all, if it has no more)
  int64_t directions = 8;  // random directions over all inputs together
  uint64_t seed = 0;
};

struct GradcheckResult {
  bool ok = true;
  double worst = 0;  // largest error as a fraction of its tolerance; ok means <= 1
  int64_t checks = 0;
  std::string message;  // where the worst error is, with both numbers
};

// Checks the gradient of the sum of fn(inputs) times fixed random weights. `fn` is deterministic
// and maps the inputs (f64, all differentiated) to a tensor of any shape. Throws Error for inputs
// that are not f64 or a result outside the tape.
GradcheckResult gradcheck(const std::function<Variable(std::span<const Variable>)>& fn,
                          const std::vector<Tensor>& inputs, const GradcheckOptions& options = {});

}  // namespace cohort
