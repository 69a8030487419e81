// Instantiates the bf16 backward on sm_90 for head dims of 64; separate for parallel builds.
#include "kernels/attention/cuda/hopper/backward.cuh"

namespace cohort::kernels::cuda {

template void run_backward_hopper<64>(const BackwardArgs<bf16>&, const AttentionBackward&);

}  // namespace cohort::kernels::cuda
