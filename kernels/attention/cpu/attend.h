// The one routine behind training forward, prefill and decode: up to kQueryRows query rows against
// the keys they see, in the canonical order of attention.h. A row is a (token, head) pair; the rows
// of a call share a key head and nothing else.
#pragma once

#include <span>

#include "kernels/attention/cpu/tile.h"

namespace cohort::kernels::attention {

inline constexpr int64_t kQueryRows = 128;

template <class T>
struct QueryRow {
  const T* q;
  T* o;
  T* lse;           // null: not wanted
  int64_t visible;  // sees keys 0 .. visible - 1; at least 1
  int64_t token, head;
};

template <class T>
class Attend {
 public:
  // Scratch of O(tile); may be used for any number of calls with this head dim.
  Attend(int64_t head_dim, double scale, const ProbabilityDropout& dropout);

  // Writes o and lse of each row. At most kQueryRows rows.
  void run(std::span<const QueryRow<T>> rows, const KeyRows<T>& keys, const KeyRows<T>& values);

 private:
  static constexpr int64_t kGroup = 16;  // rows between which a tile stays in the nearest cache
  struct RowState {
    T row_max_log2;  // m c: what the exponents are relative to
    T partial[4];    // l, by (key mod 8) / 2
  };
  void tile_step(std::span<const QueryRow<T>> rows, int64_t row0, int64_t key0);
  void scores(std::span<const QueryRow<T>> rows, const int64_t* seen);
  void raise_reference(int64_t group_row, int64_t seen, int64_t row, int64_t key0);
  void exponentials(const int64_t* seen, int64_t row0, int64_t count);
  void add_values(const int64_t* seen, int64_t group_row, int64_t row, int64_t rows, Grad out);
  void finish(const QueryRow<T>& row, int64_t index);

  int64_t head_dim_, width_, stride_;
  T exponent_scale_;  // c = scale log2(e)
  ProbabilityDropout dropout_;
  Scratch<T> scratch_;
  T *keys_, *values_, *scores_, *factors_, *out_;
  RowState state_[kQueryRows];
};
extern template class Attend<float>;
extern template class Attend<double>;

}  // namespace cohort::kernels::attention
