// Shape: the sizes of up to kMaxRank dimensions, stored inline (no heap). Strides use the same
// type.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "core/check.h"

namespace cohort {

inline constexpr int kMaxRank = 6;

class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<int64_t> dims) {
    COHORT_CHECK(dims.size() <= kMaxRank, "[shape] rank ", dims.size(), " exceeds ", kMaxRank);
    for (const int64_t d : dims) push_back(d);
  }

  int rank() const { return rank_; }
  // Negative indices count from the last dimension.
  int64_t operator[](int i) const { return dims_[check_index(i)]; }
  int64_t& operator[](int i) { return dims_[check_index(i)]; }
  void push_back(int64_t d) {
    COHORT_CHECK(rank_ < kMaxRank, "[shape] rank exceeds ", kMaxRank);
    dims_[rank_++] = d;
  }
  void erase(int i) {
    i = check_index(i);
    for (int k = i; k + 1 < rank_; ++k) dims_[k] = dims_[k + 1];
    dims_[--rank_] = 0;
  }

  // Product of all sizes; 1 for rank 0.
  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < rank_; ++i) n *= dims_[i];
    return n;
  }
  const int64_t* begin() const { return dims_; }
  const int64_t* end() const { return dims_ + rank_; }
  bool operator==(const Shape& other) const {
    return std::equal(begin(), end(), other.begin(), other.end());
  }

  // "[2, 3]".
  std::string str() const {
    std::string text = "[";
    for (int i = 0; i < rank_; ++i) text += (i ? ", " : "") + std::to_string(dims_[i]);
    return text + "]";
  }

 private:
  int check_index(int i) const {
    const int k = i < 0 ? i + rank_ : i;
    COHORT_CHECK(k >= 0 && k < rank_, "[shape] dimension ", i, " of a rank ", rank_, " shape");
    return k;
  }

  int64_t dims_[kMaxRank] = {};
  int rank_ = 0;
};

// Row-major strides in elements.
inline Shape contiguous_strides(const Shape& shape) {
  Shape strides = shape;
  int64_t step = 1;
  for (int i = shape.rank() - 1; i >= 0; --i) {
    strides[i] = step;
    step *= shape[i];
  }
  return strides;
}

}  // namespace cohort
