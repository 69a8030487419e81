// The hash of weights on the CPU: blocks of elements in parallel, added in any order.
#include "kernels/weight_hash.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "kernels/cpu/reduce.h"

namespace cohort::kernels::cpu {

void weight_hash(Tensor& hash, std::span<const Tensor> tensors) {
  std::atomic<uint64_t> total{0};
  uint64_t first = 0;  // index of a tensor's first word
  for (const Tensor& t : tensors) {
    const auto* const bytes = static_cast<const char*>(t.raw());
    const int64_t size = static_cast<int64_t>(t.nbytes()), words = (size + 3) / 4;
    parallel_for(words, kElementGrain, [&](int64_t begin, int64_t end) {
      uint64_t sum = 0;
      for (int64_t i = begin; i < end; ++i) {
        uint32_t word = 0;
        if (4 * i + 4 <= size)
          std::memcpy(&word, bytes + 4 * i, 4);
        else
          std::memcpy(&word, bytes + 4 * i, static_cast<size_t>(size % 4));
        sum += hashed_word(word, first + static_cast<uint64_t>(i));
      }
      total += sum;
    });
    first += static_cast<uint64_t>(words);
  }
  *hash.data<int64_t>() = static_cast<int64_t>(total.load());
}

}  // namespace cohort::kernels::cpu
