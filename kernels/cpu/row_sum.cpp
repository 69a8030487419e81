#include "kernels/row_sum.h"

#include "kernels/cpu/reduce.h"

namespace cohort::kernels::cpu {

void row_sum_forward(const RowSumForward& args) {
  dispatch_float(args.x.dtype(), "row_sum", [&]<class T>() {
    const int64_t cols = args.x.cols();
    const T* x = args.x.data<T>();
    T* y = args.y.data<T>();
    for_rows(args.x.rows(), cols, [=](int64_t r) {
      const T* row = x + r * cols;
      y[r] = lane_sum<T>(cols, [=](int64_t c) { return row[c]; });
    });
  });
}

void row_sum_backward(const RowSumBackward& args) {
  dispatch_float(args.dy.dtype(), "row_sum_backward", [&]<class T>() {
    const int64_t cols = args.dx.tensor.cols();
    const T* dy = args.dy.data<T>();
    T* dx = args.dx.tensor.data<T>();
    for_rows(args.dx.tensor.rows(), cols, [=, mode = args.dx.mode](int64_t r) {
      write_range(dx + r * cols, 0, cols, mode, [value = dy[r]](int64_t) { return value; });
    });
  });
}

}  // namespace cohort::kernels::cpu
