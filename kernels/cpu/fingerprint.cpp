// Fingerprints on the CPU: blocks of words in parallel, added in any order.
#include "kernels/fingerprint.h"

#include <atomic>
#include <cstring>

#include "kernels/cpu/reduce.h"

namespace cohort::kernels::cpu {

void fingerprint(Tensor& sum, const Tensor& t, int64_t address) {
  const auto* const bytes = static_cast<const char*>(t.raw());
  const int64_t size = t.nbytes();
  std::atomic<uint64_t> total{0};
  parallel_for((size + 1) / 2, kElementGrain, [&](int64_t begin, int64_t end) {
    uint64_t block = 0;
    for (int64_t i = begin; i < end; ++i) {
      uint16_t word = 0;
      std::memcpy(&word, bytes + 2 * i, 2 * i + 2 <= size ? 2 : 1);
      block += mix_word(static_cast<uint64_t>(address + i), word);
    }
    total += block;
  });
  int64_t& out = *sum.data<int64_t>();
  out = static_cast<int64_t>(static_cast<uint64_t>(out) + total);
}

}  // namespace cohort::kernels::cpu
