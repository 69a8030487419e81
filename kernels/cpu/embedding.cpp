// Table lookup and its gradient. The gradient groups tokens by id first, so that one thread adds
// all tokens of a row of the table, in ascending order.
#include <algorithm>
#include <vector>

#include "kernels/cpu/reduce.h"
#include "kernels/embedding.h"

namespace cohort::kernels::cpu {
namespace {

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

void embedding_forward(const EmbeddingForward& args) {
  check_ids(args.ids, args.table.dim(0), "embedding");
  dispatch_float(args.table.dtype(), "embedding", [&]<class T>() {
    const int64_t n = args.ids.numel(), cols = args.table.dim(1);
    const T* source = args.table.data<T>();
    const int32_t* id = args.ids.data<int32_t>();
    T* out = args.y.data<T>();
    for_rows(n, cols, [&](int64_t t) { std::copy_n(source + id[t] * cols, cols, out + t * cols); });
  });
}

void embedding_backward(const EmbeddingBackward& args) {
  check_ids(args.ids, args.dtable.tensor.dim(0), "embedding_backward");
  dispatch_float(args.dtable.tensor.dtype(), "embedding_backward", [&]<class T>() {
    const int64_t n = args.ids.numel(), vocab = args.dtable.tensor.dim(0),
                  cols = args.dtable.tensor.dim(1);
    const int32_t* id = args.ids.data<int32_t>();
    const T* source = args.dy.data<T>();
    T* out = args.dtable.tensor.data<T>();
    if (args.dtable.mode == Grad::kOverwrite)
      for_rows(vocab, cols, [&](int64_t v) { std::fill_n(out + v * cols, cols, T(0)); });
    const Groups groups = group_by_id(id, n, vocab);
    const auto count = static_cast<int64_t>(groups.starts.size()) - 1;
    for_rows(count, cols, [&](int64_t g) {
      const auto first = static_cast<size_t>(groups.starts[static_cast<size_t>(g)]);
      const auto last = static_cast<size_t>(groups.starts[static_cast<size_t>(g) + 1]);
      for (size_t i = first; i < last; ++i) {
        const int64_t t = groups.order[i];
        T* row = out + id[t] * cols;
        for (int64_t c = 0; c < cols; ++c) row[c] += source[t * cols + c];
      }
    });
  });
}

}  // namespace cohort::kernels::cpu
