#include "kernels/embedding.h"

#include "core/with_cuda.h"

namespace cohort::kernels {
namespace {

// Throws unless table is [V, C], rows [T, C] and ids [T].
void check_shapes(const Tensor& table, DType table_dtype, const char* table_name,
                  const Tensor& rows, DType rows_dtype, const char* rows_name, const Tensor& ids,
                  const char* op) {
  const Device device = table.device();
  COHORT_CHECK(table.rank() == 2, "[", op, "] expected ", table_name, " of rank 2, got ",
               table.str());
  COHORT_CHECK(ids.rank() == 1, "[", op, "] expected ids of rank 1, got ", ids.str());
  check_tensor(table, table.shape(), table_dtype, op, table_name, device);
  check_tensor(rows, {ids.numel(), table.dim(1)}, rows_dtype, op, rows_name, device);
  check_tensor(ids, ids.shape(), DType::kI32, op, "ids", device);
}

}  // namespace

void embedding_forward(const EmbeddingForward& args) {
  const auto& [y, table, ids] = args;
  constexpr const char* kOp = "embedding";
  check_shapes(table, table.dtype(), "table", y, table.dtype(), "y", ids, kOp);
  on_device<cpu::embedding_forward, cuda::embedding_forward>(table.device(), args);
}

void embedding_backward(const EmbeddingBackward& args) {
  const auto& [dtable, dy, ids] = args;
  constexpr const char* kOp = "embedding_backward";
  check_shapes(dtable.tensor, accumulate_dtype(dy.dtype()), "dtable", dy, dy.dtype(), "dy", ids,
               kOp);
  on_device<cpu::embedding_backward, cuda::embedding_backward>(dtable.tensor.device(), args);
}

}  // namespace cohort::kernels
