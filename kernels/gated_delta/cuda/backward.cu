// Gradients of the gated delta rule on CUDA.
#include "kernels/gated_delta/gated_delta.h"

namespace cohort::kernels::cuda {

void gated_delta_backward(const GatedDeltaBackward&) {
  throw Error("[gated_delta_backward] there is no CUDA kernel of this op yet");
}

}  // namespace cohort::kernels::cuda
