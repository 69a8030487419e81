// CPU parallelism: fixed blocks of work over a thread pool. The partition does not depend on the
// number of threads, so neither do results. Nested calls and calls from a rank with one thread run
// inline.
#pragma once

#include <cstdint>
#include <functional>
#include <type_traits>

namespace cohort {

// Threads that parallel_for of the calling thread may use (default: COHORT_NUM_THREADS, else the
// cores the process may run on); 1 inside a block of it; fewer, with a warning, where the system
// starts no more. Thread-local, so that each in-process rank has its own number.
int num_threads();
void set_num_threads(int n);

// Calls fn() with a stack that holds the deepest nesting that parsers accept. If the stack is
// limited to less (ulimit -s), fn runs on a thread of its own, to which all signals go, and the
// threads that it starts get such stacks too. Throws what fn throws, and Error if that thread
// cannot be started.
void with_full_stack(const std::function<void()>& fn);

namespace detail {
using BlockFn = void (*)(void* context, int64_t begin, int64_t end);
void parallel_blocks(int64_t n, int64_t grain, BlockFn fn, void* context);
}  // namespace detail

// Calls fn(begin, end) for consecutive blocks of `grain` indices that cover [0, n). fn must not
// throw.
template <class F>
void parallel_for(int64_t n, int64_t grain, F&& fn) {
  auto call = [](void* context, int64_t begin, int64_t end) {
    (*static_cast<std::remove_reference_t<F>*>(context))(begin, end);
  };
  detail::parallel_blocks(n, grain, call, const_cast<void*>(static_cast<const void*>(&fn)));
}

}  // namespace cohort
