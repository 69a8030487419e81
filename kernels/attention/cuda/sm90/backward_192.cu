// Instantiates the bf16 backward on sm_90 for head dims of 192; separate for parallel builds.
#include "kernels/attention/cuda/sm90/backward_wide.cuh"

namespace cohort::kernels::cuda {

template <>
void run_backward_sm90<192>(const BackwardArgs<bf16>& args, const AttentionBackward& in) {
  run_backward_wide<192>(args, in);
}

}  // namespace cohort::kernels::cuda
