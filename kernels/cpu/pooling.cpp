// Means over the tokens of sequences on the CPU.
#include "kernels/pooling.h"

#include "kernels/cpu/reduce.h"

namespace cohort::kernels::cpu {

void segment_mean(const SegmentMean& args) {
  const int64_t cols = args.y.dim(1);
  const auto bounds_of = args.cu_seqlens.to_vector<int32_t>();
  COHORT_CHECK(
      std::ranges::is_sorted(bounds_of) && bounds_of[0] >= 0 && bounds_of.back() <= args.x.dim(0),
      "[segment_mean] cu_seqlens do not ascend from 0 to ", args.x.dim(0));
  dispatch_float(args.x.dtype(), "segment_mean", [&]<class T>() {
    for_rows(args.y.dim(0), args.x.numel() / std::max<int64_t>(1, args.y.dim(0)), [&](int64_t s) {
      const int32_t* const bounds = bounds_of.data() + s;
      T* const out = args.y.data<T>() + s * cols;
      std::fill(out, out + cols, T{0});
      for (int64_t t = bounds[0]; t < bounds[1]; ++t) {
        const T* const x = args.x.data<T>() + t * cols;
        write_range(out, 0, cols, Grad::kAccumulate, [&](int64_t c) { return x[c]; });
      }
      const T count = static_cast<T>(bounds[1] - bounds[0]);
      write_range(out, 0, cols, Grad::kOverwrite, [&](int64_t c) { return out[c] / count; });
    });
  });
}

}  // namespace cohort::kernels::cpu
