// The products beside geglu on sm_90: a file of its own, so that they compile side by side.
#include "kernels/cuda/hopper/product_activation.cuh"

namespace cohort::kernels::cuda {

template void product_activation<GeGlu>(const LinearActivation&);
template void product_activation_backward<GeGlu>(const LinearActivationBackward&);

}  // namespace cohort::kernels::cuda
