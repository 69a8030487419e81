// Argument checks that every communicator makes before a rank talks to the others: what one rank
// can know by itself. Disagreement between ranks is the communicator's own business.
#pragma once

#include "core/tensor.h"

namespace cohort::detail {

inline void check_collective_tensor(const char* op, const char* name, const Tensor& t) {
  COHORT_CHECK(t.defined() && t.is_contiguous(), "[", op, "] expected ", name,
               " to be contiguous, got ", t.defined() ? "a strided " : "", t.str());
}

// all_gather: large = out, small = in. reduce_scatter: large = in, small = out. `small` may be this
// rank's part of `large`, and must not overlap it otherwise.
inline void check_parts(const char* op, const Tensor& large, const Tensor& small, int rank,
                        int size) {
  check_collective_tensor(op, "the whole", large);
  check_collective_tensor(op, "the part", small);
  COHORT_CHECK(large.dtype() == small.dtype() && large.numel() == size * small.numel(), "[", op,
               "] expected a whole of ", size, " times the part, got ", large.str(), " and ",
               small.str());
  if (!large.same_storage(small)) return;
  const char* begin = static_cast<const char*>(large.raw());
  const char* part = static_cast<const char*>(small.raw());
  const bool in_place = part == begin + rank * small.nbytes();
  const bool disjoint = part + small.nbytes() <= begin || begin + large.nbytes() <= part;
  COHORT_CHECK(in_place || disjoint, "[", op, "] the part overlaps the whole, but is not part ",
               rank, " of it");
}

inline void check_root(int root, int size) {
  COHORT_CHECK(root >= 0 && root < size, "[broadcast] expected a root from 0 to ", size - 1,
               ", got ", root);
}

inline void check_reducible(const char* op, const Tensor& t) {
  COHORT_CHECK(t.dtype() != DType::kU8, "[", op, "] expected numbers to reduce, got ", t.str());
}

}  // namespace cohort::detail
