// Stick-breaking attention of query rows, in the canonical order of stick_breaking.h, with the
// interface of FlashAttention.
#pragma once

#include "kernels/attention/cpu/flash_attention.h"
#include "kernels/attention/stick_breaking_rule.h"

namespace cohort::kernels::attention {

// Replaces 64 values of a tile by the sum over the later keys, or over the earlier ones, and
// returns the sum of all.
template <bool kLater, class T>
T exclusive_sums(T* values) {
  T total = 0;
  for (int64_t g = 0; g < kStickTile; g += 8) {
    T* const group = values + (kLater ? kStickTile - 8 - g : g);
    T p[4];
    for (int64_t i = 0; i < 4; ++i) p[i] = group[2 * i] + group[2 * i + 1];
    const T low = p[0] + p[1], high = p[2] + p[3];
    const T near[4] = {kLater ? p[1] + high : 0, kLater ? high : p[0], kLater ? p[3] : low,
                       kLater ? 0 : low + p[2]};
    for (int64_t i = 0; i < 4; ++i) {
      T &first = group[2 * i], &second = group[2 * i + 1];
      const T beyond = total + near[i], both = beyond + (kLater ? second : first);
      first = kLater ? both : beyond;
      second = kLater ? beyond : both;
    }
    total += low + high;
  }
  return total;
}

// Logarithms of a row's shares of the keys of a tile, of which it sees the first `end`.
template <class T>
struct StickTerms {
  T log_beta[kStickTile];  // log2 beta
  T spent[kStickTile];     // L, 0 for keys that it does not see

  StickTerms(const T* scores, T exponent, int64_t end) {
    const int64_t runs = round_up(end, kKeyRun);
#pragma omp simd simdlen(kVectorLanes <T>)
    for (int64_t j = 0; j < runs; ++j) {
      const T x = scores[j] * exponent, more = log2_one_plus(vexp2(-std::fabs(x)));
      log_beta[j] = (x < 0 ? x : 0) - more;
      spent[j] = j < end ? (x > 0 ? x : 0) + more : 0;
    }
    std::fill(spent + runs, spent + kStickTile, T{0});
  }
  // Writes A of the visible keys. `later`: sum of L over the later tiles, to which this one is
  // added. Then `spent` holds sums.
  void weights(T* a, int64_t end, T& later) {
    const T total = exclusive_sums<true>(spent);
#pragma omp simd simdlen(kVectorLanes <T>)
    for (int64_t j = 0; j < end; ++j) a[j] = vexp2(log_beta[j] - (spent[j] + later));
    later += total;
  }
};

// Owns scratch memory of the size of a tile; reusable for any number of calls.
template <class T>
class StickBreaking {
 public:
  StickBreaking(int64_t head_dim, const StickRule<T>& rule)
      : head_dim_(head_dim),
        exponent_(rule.exponent),
        keys_(head_dim),
        values_(head_dim, kStickTile),
        scores_(Tensor::empty({kQueryRows, score_stride(head_dim)}, dtype_of<T>)) {}
  // Writes o of each row, for at most kQueryRows rows.
  void run(std::span<const QueryRow<T>> rows, const KeyRows<T>& keys, const KeyRows<T>& values) {
    int64_t end = 0;
    T later[kQueryRows] = {};
    for (const QueryRow<T>& row : rows) {
      std::fill_n(row.o, head_dim_, T{0});
      end = std::max(end, row.visible.end);
    }
    for (int64_t key0 = (end - 1) / kStickTile * kStickTile; key0 >= 0 && end > 0;
         key0 -= kStickTile) {
      const int64_t count = std::min(kStickTile, end - key0);
      keys_.load(count, [&](int64_t j) { return keys.row(key0 + j); });
      values_.load(count, [&](int64_t j) { return values.row(key0 + j); });
      tile_step(rows, later, key0);
    }
  }

 private:
  void tile_step(std::span<const QueryRow<T>> rows, T* later, int64_t key0) {
    MatmulRow<T> scores[kQueryRows], values[kQueryRows];
    T* s = scores_.template data<T>();
    for (size_t r = 0; r < rows.size(); ++r, s += scores_.dim(1)) {
      const int64_t seen = std::clamp<int64_t>(rows[r].visible.end - key0, 0, keys_.count);
      scores[r] = {rows[r].q, s, 0, head_dim_, round_up(seen, kKeyRun)};
      values[r] = {s, rows[r].o, 0, seen, head_dim_};
    }
    chain_matmul<T>({scores, rows.size()}, 1, keys_.transposed.data(), Grad::kOverwrite);
    for (size_t r = 0; r < rows.size(); ++r)
      if (const int64_t seen = values[r].end; seen > 0)
        StickTerms<T>(scores[r].c, exponent_, seen).weights(scores[r].c, seen, later[r]);
    chain_matmul<T>({values, rows.size()}, 1, values_.rows.data(), Grad::kAccumulate);
  }

  const int64_t head_dim_;
  const T exponent_;
  KeyTile<T> keys_;
  RowTile<T> values_;
  Tensor scores_;  // [kQueryRows, score_stride]
};

}  // namespace cohort::kernels::attention
