// Instantiates the bf16 backward on sm_90 for head dims of 64; separate for parallel builds.
#include "kernels/attention/cuda/sm90/backward.cuh"

template void cohort::kernels::cuda::run_backward_sm90<64>(const BackwardArgs<bf16>&,
                                                           const AttentionBackward&);
