// The products beside swiglu on sm_90: a file of its own, so that they compile side by side.
#include "kernels/cuda/hopper/product_activation.cuh"

namespace cohort::kernels::cuda {

template void product_activation<SwiGlu>(const LinearActivation&);
template void product_activation_backward<SwiGlu>(const LinearActivationBackward&);

}  // namespace cohort::kernels::cuda
