#include "kernels/attention/cpu/attend.h"

#include "kernels/vector_math.h"

namespace cohort::kernels::attention {
namespace {

// Largest of s[0 .. n - 1], n a multiple of kPad. Which zero wins among zeros of both signs does
// not matter.
template <class T>
T row_max(const T* s, int64_t n) {
  T best[kPad];
  std::memcpy(best, s, sizeof best);
  for (int64_t j = kPad; j < n; j += kPad)
#pragma omp simd simdlen(kLanes <T>)
    for (int64_t i = 0; i < kPad; ++i) best[i] = s[j + i] > best[i] ? s[j + i] : best[i];
#pragma GCC unroll 4
  for (int64_t width = kPad / 2; width > 0; width /= 2)
    for (int64_t i = 0; i < width; ++i)
      best[i] = best[i + width] > best[i] ? best[i + width] : best[i];
  return best[0];
}

// The four partial sums go up by p[0 .. n - 1], n a multiple of 8, in ascending order.
template <class T>
void add_partials(T* partial, const T* p, int64_t n) {
  using V = typename Four<T>::Type;
  V l;
  std::memcpy(&l, partial, sizeof l);
  for (int64_t j = 0; j < n; j += 8) {
    V low, high;
    std::memcpy(&low, p + j, sizeof low);
    std::memcpy(&high, p + j + 4, sizeof high);
    l += __builtin_shufflevector(low, high, 0, 2, 4, 6);
    l += __builtin_shufflevector(low, high, 1, 3, 5, 7);
  }
  std::memcpy(partial, &l, sizeof l);
}

}  // namespace

template <class T>
Attend<T>::Attend(int64_t head_dim, double scale, const ProbabilityDropout& dropout)
    : head_dim_(head_dim),
      width_(padded_dim<T>(head_dim)),
      stride_(score_stride(head_dim)),
      exponent_scale_(static_cast<T>(scale * kLog2e)),
      dropout_(dropout),
      scratch_(Scratch<T>::piece(head_dim * stride_) +
               Scratch<T>::piece(attention_tile(head_dim) * width_) +
               Scratch<T>::piece(kGroup * stride_) + Scratch<T>::piece(stride_) +
               Scratch<T>::piece(kQueryRows * width_)) {
  keys_ = scratch_.take(head_dim * stride_);
  values_ = scratch_.take(attention_tile(head_dim) * width_);
  scores_ = scratch_.take(kGroup * stride_);
  factors_ = scratch_.take(stride_);
  out_ = scratch_.take(kQueryRows * width_);
}

template <class T>
void Attend<T>::run(std::span<const QueryRow<T>> rows, const KeyRows<T>& keys,
                    const KeyRows<T>& values) {
  const int64_t count = static_cast<int64_t>(rows.size()), tile = attention_tile(head_dim_);
  int64_t last = 0;
  for (const QueryRow<T>& row : rows) last = std::max(last, row.visible);
  for (int64_t key0 = 0; key0 < last; key0 += tile) {
    const int64_t n = std::min(tile, last - key0);
    gather_transposed(keys_, keys, key0, n, head_dim_);
    gather_rows(values_, values, key0, n, head_dim_);
    for (int64_t r = 0; r < count; r += kGroup)
      tile_step(
          rows.subspan(static_cast<size_t>(r), static_cast<size_t>(std::min(kGroup, count - r))), r,
          key0);
  }
  for (int64_t r = 0; r < count; ++r) finish(rows[static_cast<size_t>(r)], r);
}

// One group of rows against the tile in scratch.
template <class T>
void Attend<T>::tile_step(std::span<const QueryRow<T>> rows, int64_t row0, int64_t key0) {
  const int64_t count = static_cast<int64_t>(rows.size()), tile = attention_tile(head_dim_);
  int64_t seen[kGroup] = {};
  for (int64_t r = 0; r < count; ++r)
    seen[r] = std::clamp<int64_t>(rows[static_cast<size_t>(r)].visible - key0, 0, tile);
  scores(rows, seen);
  for (int64_t r = 0; r < count; ++r)
    if (seen[r] > 0) raise_reference(r, seen[r], row0 + r, key0);
  exponentials(seen, row0, count);
  if (dropout_.p > 0)
    for (int64_t r = 0; r < count; ++r) {
      const QueryRow<T>& row = rows[static_cast<size_t>(r)];
      dropout_.fill(factors_, row.token, row.head, key0, seen[r]);
      for (int64_t j = 0; j < seen[r]; ++j) scores_[r * stride_ + j] *= factors_[j];
    }
  const Grad out = key0 == 0 ? Grad::kOverwrite : Grad::kAccumulate;
  for (int64_t r = 0; r < count; r += kRows)
    add_values(seen + r, r, row0 + r, std::min<int64_t>(kRows, count - r), out);
}

// S of each row for the keys it sees, and for some more: up to kPad and to the neighbouring rows'.
template <class T>
void Attend<T>::scores(std::span<const QueryRow<T>> rows, const int64_t* seen) {
  const int64_t count = static_cast<int64_t>(rows.size()), chunk = kMaxVectors * kLanes<T>;
  int64_t width[kGroup / kRows] = {}, widest = 0;
  for (int64_t r = 0; r < count; ++r) {
    int64_t& w = width[r / kRows];
    w = std::max(w, round_up(seen[r], kPad));
    widest = std::max(widest, w);
  }
  for (int64_t x = 0; x < widest; x += chunk)
    for (int64_t r = 0; r < count; r += kRows) {
      if (width[r / kRows] <= x) continue;
      ChainProduct<T> product{.rows = std::min<int64_t>(kRows, count - r),
                              .width = std::min(chunk, width[r / kRows] - x),
                              .count = head_dim_,
                              .a = {},
                              .a_step = 1,
                              .b = keys_ + x,
                              .ldb = stride_,
                              .c = scores_ + r * stride_ + x,
                              .ldc = stride_,
                              .out = Grad::kOverwrite};
      for (int64_t i = 0; i < product.rows; ++i) product.a[i] = rows[static_cast<size_t>(r + i)].q;
      chain_product(product);
    }
}

// m, l and O of a row follow the maximum of its scores. With the exponents' row_max_log2 m c
// rounded, exp2(S c - m c) and alpha refer to the same number, and alpha is exactly 1 while m
// stays.
template <class T>
void Attend<T>::raise_reference(int64_t group_row, int64_t seen, int64_t row, int64_t key0) {
  RowState& state = state_[row];
  T* const s = scores_ + group_row * stride_;
  const int64_t end = round_up(seen, kPad);
  // A visible score, where -inf would do too but for its exponential: a slow denormal.
  fill_tail(s, seen, end, s[0]);
  const T row_max_log2 = row_max(s, end) * exponent_scale_;
  if (key0 == 0) {
    state = {row_max_log2, {0, 0, 0, 0}};
  } else if (row_max_log2 > state.row_max_log2) {
    const T alpha = vexp2(state.row_max_log2 - row_max_log2);
    state.row_max_log2 = row_max_log2;
    for (T& l : state.partial) l *= alpha;
    T* const o = out_ + row * width_;
    for (int64_t d = 0; d < width_; ++d) o[d] *= alpha;
  }
}

// S becomes P, zero from what the row sees to the next multiple of kPad, and goes into l.
template <class T>
void Attend<T>::exponentials(const int64_t* seen, int64_t row0, int64_t count) {
  const T c = exponent_scale_;
  for (int64_t r = 0; r < count; ++r) {
    T* const s = scores_ + r * stride_;
    const T minus = -state_[row0 + r].row_max_log2;
    const int64_t end = round_up(seen[r], kPad);
#pragma omp simd simdlen(kLanes <T>)
    for (int64_t j = 0; j < end; ++j) s[j] = vexp2(std::fma(s[j], c, minus));
  }
  for (int64_t r = 0; r < count; ++r) {
    T* const s = scores_ + r * stride_;
    const int64_t end = round_up(seen[r], kPad);
    fill_tail(s, seen[r], end, T{0});
    add_partials(state_[row0 + r].partial, s, end);
  }
}

// O += P V, each row over exactly the keys it sees: a product with a masked key would turn -0 into
// +0, and an infinite value into NaN.
template <class T>
void Attend<T>::add_values(const int64_t* seen, int64_t group_row, int64_t row, int64_t rows,
                           Grad out) {
  ChainProduct<T> product{.rows = rows,
                          .width = width_,
                          .count = 0,
                          .a = {},
                          .a_step = 1,
                          .b = values_,
                          .ldb = width_,
                          .c = out_ + row * width_,
                          .ldc = width_,
                          .out = out};
  product.set_a(scores_ + group_row * stride_, stride_);
  product.set_counts(seen);
  chain_product(product);
}

template <class T>
void Attend<T>::finish(const QueryRow<T>& row, int64_t index) {
  const RowState& state = state_[index];
  const T l = (state.partial[0] + state.partial[1]) + (state.partial[2] + state.partial[3]);
  const T inverse = 1 / l;
  const T* const o = out_ + index * width_;
  for (int64_t d = 0; d < head_dim_; ++d) row.o[d] = o[d] * inverse;
  if (row.lse != nullptr)
    *row.lse = std::fma(state.row_max_log2, static_cast<T>(kLn2), std::log(l));
}

template class Attend<float>;
template class Attend<double>;

}  // namespace cohort::kernels::attention
