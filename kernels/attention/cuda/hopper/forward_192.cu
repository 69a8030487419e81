// The bf16 forward on sm_90 for head dims of 192: a file of its own, so that they compile side by
// side.
#include "kernels/attention/cuda/hopper/forward.cuh"

namespace cohort::kernels::cuda {

template void run_forward_hopper<192>(ForwardProblem<__nv_bfloat16>, const AttentionForward&);

}  // namespace cohort::kernels::cuda
