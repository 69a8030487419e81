// Instantiates the fused GEMMs of geglu_tanh, in a separate file for parallel compilation.
#include "kernels/cuda/sm90/gemm_activation.cuh"

namespace cohort::kernels::cuda {

template void gemm_activation<GeGluTanh>(const LinearActivation&);
template void gemm_activation_backward<GeGluTanh>(const LinearActivationBackward&);

}  // namespace cohort::kernels::cuda
