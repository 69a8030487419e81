// Instantiates the bf16 forward on sm_90 for head dims of 96; separate for parallel builds.
#include "kernels/attention/cuda/sm90/forward.cuh"

template void cohort::kernels::cuda::run_forward_sm90<96>(ForwardProblem<bf16>,
                                                          const AttentionForward&);
