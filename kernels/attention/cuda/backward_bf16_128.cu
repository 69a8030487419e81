// The bf16 backward for head dims up to 128: a file of its own, so that they compile side by side.
#include "kernels/attention/cuda/backward_bf16.cuh"

namespace cohort::kernels::cuda {

template void run_backward_bf16<128>(const BackwardArgs<bf16>&, Device);

}  // namespace cohort::kernels::cuda
