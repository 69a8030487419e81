#include "core/parallel.h"

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <cstdlib>

#include "core/check.h"

namespace cohort {
namespace {

int default_threads() {
  if (const char* text = std::getenv("COHORT_NUM_THREADS")) {
    char* end = nullptr;
    const long n = std::strtol(text, &end, 10);
    if (end == text || *end != '\0' || n < 1 || n > 4096)
      throw InputError(
          str("COHORT_NUM_THREADS: expected a number from 1 to 4096, got '", text, "'"));
    return static_cast<int>(n);
  }
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? std::max(1, CPU_COUNT(&set)) : 1;
}

thread_local int t_threads = 0;  // 0: not asked yet
thread_local bool t_inside = false;

}  // namespace

int num_threads() {
  if (t_threads == 0) t_threads = default_threads();
  return t_threads;
}

void set_num_threads(int n) {
  COHORT_CHECK(n >= 1, "[parallel] expected at least one thread, got ", n);
  t_threads = n;
}

void detail::parallel_blocks(int64_t n, int64_t grain, BlockFn fn, void* context) {
  if (n <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  const int64_t blocks = (n + grain - 1) / grain;
  const int threads = static_cast<int>(std::min<int64_t>(num_threads(), blocks));
  if (threads == 1 || t_inside) {
    for (int64_t b = 0; b < blocks; ++b) fn(context, b * grain, std::min(n, (b + 1) * grain));
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    t_inside = true;
#pragma omp for schedule(dynamic, 1)
    for (int64_t b = 0; b < blocks; ++b) fn(context, b * grain, std::min(n, (b + 1) * grain));
    t_inside = false;
  }
}

}  // namespace cohort
