// Work at the end of a scope.
#pragma once

#include <utility>

#include "core/non_copyable.h"

namespace cohort {

// Calls a function, which does not throw, when it is destroyed.
template <class Fn>
class OnExit : NonCopyable {
 public:
  explicit OnExit(Fn fn) : fn_(std::move(fn)) {}
  ~OnExit() { fn_(); }

 private:
  const Fn fn_;
};

}  // namespace cohort
