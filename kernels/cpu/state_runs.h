// The tokens of sequences in progress, by the states that they continue.
#pragma once

#include <cstdint>
#include <vector>

#include "core/tensor.h"

namespace cohort::kernels {

// Adjacent tokens [first, first + count) of one state, at ascending positions; or one idle token,
// whose state is -1.
struct StateRun {
  int64_t first = 0, count = 0, state = -1, position = 0;

  bool is_idle() const { return state < 0; }
};
// The runs of tokens by states [T] and positions [T], i32; a token is idle if its state or position
// is negative. Throws Error for a state that is not below num_states, or that has two runs.
inline std::vector<StateRun> state_runs(const Tensor& states, const Tensor& positions,
                                        int64_t num_states, const char* op) {
  const int32_t *state = states.data<int32_t>(), *position = positions.data<int32_t>();
  std::vector<StateRun> out;
  std::vector<bool> seen(static_cast<size_t>(num_states));
  for (int64_t t = 0; t < states.dim(0); ++t) {
    if (state[t] < 0 || position[t] < 0) {
      out.push_back({.first = t, .count = 1});
      continue;
    }
    if (t > 0 && !out.back().is_idle() && state[t] == state[t - 1] &&
        position[t] == int64_t{position[t - 1]} + 1) {
      ++out.back().count;
      continue;
    }
    COHORT_CHECK(state[t] < num_states, "[", op, "] token ", t, " has state ", state[t], " of ",
                 num_states);
    COHORT_CHECK(!seen[static_cast<size_t>(state[t])], "[", op, "] expected adjacent tokens of ",
                 "state ", state[t], " at ascending positions, got ", position[t], " at token ", t);
    seen[static_cast<size_t>(state[t])] = true;
    out.push_back({t, 1, state[t], position[t]});
  }
  return out;
}

}  // namespace cohort::kernels
