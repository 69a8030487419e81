// Instantiates the bf16 backward for head dims up to 256; separate for parallel builds.
#include "kernels/attention/cuda/backward_bf16.cuh"

template void cohort::kernels::cuda::run_backward_bf16<256>(const BackwardArgs<bf16>&,
                                                            const AttentionDesc&, Device);
