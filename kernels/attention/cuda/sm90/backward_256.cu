// Instantiates the bf16 backward on sm_90 for head dims of 256; separate for parallel builds.
#include "kernels/attention/cuda/sm90/backward_wide.cuh"

template void cohort::kernels::cuda::run_backward_wide<256>(const BackwardArgs<bf16>&,
                                                            const AttentionBackward&);
