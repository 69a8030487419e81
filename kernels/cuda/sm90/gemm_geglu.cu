// Instantiates the fused GEMMs of geglu, in a separate file for parallel compilation.
#include "kernels/cuda/sm90/gemm_activation.cuh"

namespace cohort::kernels::cuda {

template void gemm_activation<GeGlu>(const LinearActivation&);
template void gemm_activation_backward<GeGlu>(const LinearActivationBackward&);

}  // namespace cohort::kernels::cuda
