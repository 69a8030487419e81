// Arithmetic of sizes: whole units, and bytes for people.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace cohort {

// Units of `unit` that hold n; both are 0 or more, and `unit` is not 0.
constexpr int64_t ceil_div(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit;
}
// The least multiple of `unit` that is not below n.
constexpr int64_t round_up(int64_t n, int64_t unit) {
  return ceil_div(n, unit) * unit;
}

// "12.5 MiB".
inline std::string mib(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

}  // namespace cohort
