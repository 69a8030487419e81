// Instantiates the bf16 backward for head dims up to 256; separate for parallel builds.
#include "kernels/attention/cuda/backward_bf16.cuh"

namespace cohort::kernels::cuda {

template void run_backward_bf16<256>(const BackwardArgs<bf16>&, Device);

}  // namespace cohort::kernels::cuda
