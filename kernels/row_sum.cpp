#include "kernels/row_sum.h"

#include "core/with_cuda.h"

namespace cohort::kernels {
namespace {

// Checks a tensor of rows, and that of their sums.
void check_rows_and_sums(const Tensor& rows, const char* rows_name, const Tensor& sums,
                         const char* sums_name, const char* op) {
  COHORT_CHECK(rows.rank() >= 1 && rows.dim(-1) >= 1, "[", op, "] expected ", rows_name,
               " [..., C] with C of at least 1, got ", rows.str());
  check_tensor(rows, rows.shape(), rows.dtype(), op, rows_name, rows.device());
  check_tensor(sums, row_sum_shape(rows.shape()), accumulate_dtype(rows.dtype()), op, sums_name,
               rows.device());
}

}  // namespace

void row_sum_forward(const RowSumForward& args) {
  check_rows_and_sums(args.x, "x", args.y, "y", "row_sum");
  on_device<cpu::row_sum_forward, cuda::row_sum_forward>(args.x.device(), args);
}

void row_sum_backward(const RowSumBackward& args) {
  const Tensor& dx = args.dx.tensor;
  check_rows_and_sums(dx, "dx", args.dy, "dy", "row_sum_backward");
  on_device<cpu::row_sum_backward, cuda::row_sum_backward>(dx.device(), args);
}

}  // namespace cohort::kernels
