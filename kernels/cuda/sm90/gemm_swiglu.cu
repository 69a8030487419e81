// Instantiates the fused GEMMs of swiglu, in a separate file for parallel compilation.
#include "kernels/cuda/sm90/gemm_activation.cuh"

namespace cohort::kernels::cuda {

template void gemm_activation<SwiGlu>(const LinearActivation&);
template void gemm_activation_backward<SwiGlu>(const LinearActivationBackward&);

}  // namespace cohort::kernels::cuda
