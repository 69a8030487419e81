// Sums over ranks on the CPU: blocks of elements, each added over all parts.
#include "kernels/sum_parts.h"

#include <cstring>

#include "core/parallel.h"
#include "kernels/cpu/reduce.h"
#include "kernels/pairwise_sum.h"
#include "kernels/vector_math.h"

namespace cohort::kernels::cpu {
namespace {

constexpr int64_t kBlock = 64;  // elements

template <class T>
struct Lanes {
  T v[kBlock];
  friend Lanes operator+(const Lanes& a, const Lanes& b) {
    Lanes out;
    COHORT_VECTORIZE
    for (int64_t i = 0; i < kBlock; ++i) out.v[i] = a.v[i] + b.v[i];
    return out;
  }
};

template <class T>
void sum_block(const SumParts& args, int64_t begin, int64_t count) {
  const int64_t parts = args.parts.dim(0), n = args.parts.dim(1);
  PairwiseSum<Lanes<T>> sum;
  Lanes<T> part = {};
  for (int64_t r = 0; r < parts; ++r) {
    std::memcpy(part.v, args.parts.data<T>() + r * n + begin,
                static_cast<size_t>(count) * sizeof(T));
    sum.add(part);
  }
  const Lanes<T> total = sum.total();
  write_range(args.y.tensor.data<T>(), begin, begin + count, args.y.mode,
              [&](int64_t i) { return total.v[i - begin]; });
}

}  // namespace

void sum_parts(const SumParts& args) {
  const int64_t n = args.y.tensor.numel();
  dispatch_float(args.y.tensor.dtype(), "sum_parts", [&]<class T>() {
    parallel_for(ceil_div(n, kBlock), kElementGrain / kBlock, [&](int64_t first, int64_t last) {
      for (int64_t b = first; b < last; ++b)
        sum_block<T>(args, b * kBlock, std::min(kBlock, n - b * kBlock));
    });
  });
}

}  // namespace cohort::kernels::cpu
