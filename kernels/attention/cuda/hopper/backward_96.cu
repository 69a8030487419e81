// The bf16 backward on sm_90 for head dims of 96: a file of its own, so that they compile side by
// side.
#include "kernels/attention/cuda/hopper/backward.cuh"

namespace cohort::kernels::cuda {

template void run_backward_hopper<96>(const BackwardArgs<__nv_bfloat16>&, const AttentionBackward&);

}  // namespace cohort::kernels::cuda
