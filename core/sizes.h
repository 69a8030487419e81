// Size arithmetic: rounding to whole units, and human-readable byte counts.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace cohort {

// ceil(n / unit), for n >= 0 and unit > 0.
constexpr int64_t ceil_div(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit;
}
// Smallest multiple of `unit` that is at least n.
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
