#include "kernels/pooling.h"

#include "core/with_cuda.h"
#include "kernels/arguments.h"

namespace cohort::kernels {

void segment_mean(const SegmentMean& args) {
  ArgumentCheck("segment_mean")("accumulate [S, C] y; [T, C] x; i32 [S + 1] cu_seqlens", args.y,
                                args.x, args.cu_seqlens);
  on_device<cpu::segment_mean, cuda::segment_mean>(args.y.device(), args);
}

}  // namespace cohort::kernels
