// Sums over ranks on the CPU, added in rank order: the same bits for any number of threads and
// wherever the ranks are.
#pragma once

#include <type_traits>

#include "core/parallel.h"
#include "dist/communicator.h"

namespace cohort {
namespace detail {

template <class T>
T combine(Reduce reduce, T a, T b) {
  if (reduce == Reduce::kSum) return a + b;
  return a != a || a > b ? a : b;  // a NaN wins, so that it is seen
}

}  // namespace detail

// Reduces the elements [begin, end) of values_of(0) ... values_of(ranks - 1) and calls store(at,
// values, count) for consecutive blocks of the result, from several threads.
template <class T, class Values, class Store>
void reduce_in_rank_order(Reduce reduce, int ranks, int64_t begin, int64_t end, Values&& values_of,
                          Store&& store) {
  constexpr int64_t kBlock = 2048;  // elements; two blocks fit on a stack
  using Accumulator = std::conditional_t<std::is_same_v<T, bf16>, float, T>;
  parallel_for(end - begin, kBlock, [&](int64_t block_begin, int64_t block_end) {
    const int64_t at = begin + block_begin, count = block_end - block_begin;
    Accumulator total[kBlock];
    T rounded[kBlock];
    for (int r = 0; r < ranks; ++r) {
      const T* values = values_of(r) + at;
      for (int64_t i = 0; i < count; ++i) {
        const auto value = static_cast<Accumulator>(values[i]);
        total[i] = r == 0 ? value : detail::combine(reduce, total[i], value);
      }
    }
    for (int64_t i = 0; i < count; ++i) rounded[i] = static_cast<T>(total[i]);
    store(at, rounded, count);
  });
}

// Calls fn.operator()<T>() for the element types that can be reduced.
template <class F>
void dispatch_reducible(DType dtype, F&& fn) {
  dispatch_all(dtype, [&]<class T>() {
    if constexpr (!std::is_same_v<T, uint8_t>) fn.template operator()<T>();
  });
}

}  // namespace cohort
