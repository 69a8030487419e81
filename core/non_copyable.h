// Base of classes that can be neither copied nor moved, such as the guards of a scope.
#pragma once

namespace cohort {

class NonCopyable {
 protected:
  NonCopyable() = default;
  NonCopyable(const NonCopyable&) = delete;
  NonCopyable& operator=(const NonCopyable&) = delete;
};

}  // namespace cohort
