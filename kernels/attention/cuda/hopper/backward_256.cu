// The bf16 backward on sm_90 for head dims over 128: a file of its own, so that they compile side
// by side.
#include "kernels/attention/cuda/hopper/backward_wide.cuh"
