// Table lookup and its gradient. The gradient groups tokens by id first, so that each row of the
// table has one owner, which adds its tokens in ascending order.
#include <algorithm>
#include <vector>

#include "core/parallel.h"
#include "kernels/cuda_dispatch.h"
#include "kernels/embedding.h"
#include "kernels/reduce.h"

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

// Throws for the first id outside [0, vocab).
void check_ids(const Tensor& ids, int64_t vocab, const char* op) {
  const int32_t* id = ids.data<int32_t>();
  for (int64_t t = 0; t < ids.numel(); ++t)
    COHORT_CHECK(id[t] >= 0 && id[t] < vocab, "[", op, "] id ", id[t], " at position ", t,
                 " is outside the table of ", vocab, " rows");
}

// Token positions ordered by id, then by position. Group g is positions [starts[g], starts[g + 1])
// of `order`.
struct Groups {
  std::vector<int64_t> order, starts;
};

Groups group_by_id(const int32_t* ids, int64_t n, int64_t vocab) {
  std::vector<int64_t> next(static_cast<size_t>(vocab) + 1);
  for (int64_t t = 0; t < n; ++t) ++next[static_cast<size_t>(ids[t]) + 1];
  Groups groups;
  for (int64_t v = 0; v < vocab; ++v) {
    const auto i = static_cast<size_t>(v);
    if (next[i + 1] > 0) groups.starts.push_back(next[i]);
    next[i + 1] += next[i];
  }
  groups.starts.push_back(n);
  groups.order.resize(static_cast<size_t>(n));
  for (int64_t t = 0; t < n; ++t)
    groups.order[static_cast<size_t>(next[static_cast<size_t>(ids[t])]++)] = t;
  return groups;
}

}  // namespace

COHORT_DECLARE_CUDA(embedding_forward)
void embedding_forward(Tensor& y, const Tensor& table, const Tensor& ids) {
  constexpr const char* kOp = "embedding";
  check_shapes(table, table.dtype(), "table", y, table.dtype(), "y", ids, kOp);
  COHORT_FORWARD_TO_CUDA(table, embedding_forward(y, table, ids));
  check_ids(ids, table.dim(0), kOp);
  dispatch_float(table.dtype(), kOp, [&]<class T>() {
    const int64_t n = ids.numel(), cols = table.dim(1);
    const T* source = table.data<T>();
    const int32_t* id = ids.data<int32_t>();
    T* out = y.data<T>();
    parallel_for(n, row_grain(cols), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t)
        std::copy_n(source + id[t] * cols, cols, out + t * cols);
    });
  });
}

COHORT_DECLARE_CUDA(embedding_backward)
void embedding_backward(Tensor& dtable, const Tensor& dy, const Tensor& ids, Grad mode) {
  constexpr const char* kOp = "embedding_backward";
  check_shapes(dtable, accumulate_dtype(dy.dtype()), "dtable", dy, dy.dtype(), "dy", ids, kOp);
  COHORT_FORWARD_TO_CUDA(dtable, embedding_backward(dtable, dy, ids, mode));
  check_ids(ids, dtable.dim(0), kOp);
  dispatch_float(dtable.dtype(), kOp, [&]<class T>() {
    const int64_t n = ids.numel(), vocab = dtable.dim(0), cols = dtable.dim(1);
    const int32_t* id = ids.data<int32_t>();
    const T* source = dy.data<T>();
    T* out = dtable.data<T>();
    if (mode == Grad::kOverwrite)
      parallel_for(vocab, row_grain(cols), [&](int64_t begin, int64_t end) {
        std::fill(out + begin * cols, out + end * cols, T(0));
      });
    const Groups groups = group_by_id(id, n, vocab);
    const auto count = static_cast<int64_t>(groups.starts.size()) - 1;
    parallel_for(count, row_grain(cols), [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; ++g) {
        const auto first = static_cast<size_t>(groups.starts[static_cast<size_t>(g)]);
        const auto last = static_cast<size_t>(groups.starts[static_cast<size_t>(g) + 1]);
        for (size_t i = first; i < last; ++i) {
          const int64_t t = groups.order[i];
          T* row = out + id[t] * cols;
          for (int64_t c = 0; c < cols; ++c) row[c] += source[t * cols + c];
        }
      }
    });
  });
}

}  // namespace cohort::kernels
