// A chunk of one head of the gated delta rule in its canonical order, for packed sequences and for
// states alike.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/gated_delta/gated_delta.h"
#include "kernels/vector_math.h"

namespace cohort::kernels {

// A head's row of each input.
template <class T>
struct DeltaRow {
  const T *q, *k, *v;
  T g, beta;
};

// G of a token, from that of the one before.
template <class T>
T next_decay(T before, T g) {
  const T base2 = g * static_cast<T>(1.4426950408889634074);
  return before + base2;
}

// Refers to its matrix and to its rows, which must not change before fold() or start().
template <class T>
class DeltaChunk {
 public:
  explicit DeltaChunk(int64_t dim)
      : dim_(dim),
        columns_(static_cast<size_t>(dim * kDeltaChunk)),
        sums_(static_cast<size_t>(2 * dim)) {}

  int64_t size() const { return size_; }  // rows
  // The rows; decay: G.
  const T* k(int64_t i) const { return k_[i]; }
  const T* u(int64_t i) const { return u_[i]; }
  T decay(int64_t i) const { return decay_[i]; }

  // Makes it an empty one with the matrix `s` [D, D] at its start, which fold() overwrites.
  void start(T* s) {
    s_ = s;
    size_ = 0;
  }
  // Makes a full chunk the matrix of the next one.
  void fold() {
    const T last = decay_[kDeltaChunk - 1], factor = vexp2(last);
    T scaled[kDeltaChunk];
    for (int64_t i = 0; i < kDeltaChunk; ++i) scaled[i] = vexp2(last - decay_[i]);
    std::vector<T> sum(static_cast<size_t>(dim_)), rows(static_cast<size_t>(kDeltaChunk * dim_));
    for (int64_t i = 0; i < kDeltaChunk; ++i)
      for (int64_t j = 0; j < dim_; ++j)
        rows[static_cast<size_t>(i * dim_ + j)] = u(i)[j] * scaled[i];
    for (int64_t a = 0; a < dim_; ++a) {
      std::fill(sum.begin(), sum.end(), T{0});
      for (int64_t i = 0; i < kDeltaChunk; ++i)
        add_row(sum.data(), k(i)[a], rows.data() + i * dim_);
      T* const s = s_ + a * dim_;
      for (int64_t j = 0; j < dim_; ++j) s[j] = std::fma(factor, s[j], sum[static_cast<size_t>(j)]);
    }
    size_ = 0;
  }
  // Appends a row that has been computed before, by its G or its g.
  void append(const T* k, const T* u, T decay) {
    k_[size_] = k;
    u_[size_] = u;
    for (int64_t a = 0; a < dim_; ++a)
      columns_[static_cast<size_t>(a * kDeltaChunk + size_)] = k[a];
    decay_[size_++] = decay;
  }
  void append_by_g(const T* k, const T* u, T g) {
    if (size_ == kDeltaChunk) fold();
    append(k, u, next_decay(g));
  }
  // Computes u [D] and o [D] of the next token, and appends its row.
  void step(const DeltaRow<T>& row, T scale, T* u, T* o) {
    if (size_ == kDeltaChunk) fold();
    const T decay = next_decay(row.g), gamma = vexp2(decay);
    T factors[kDeltaChunk], w[kDeltaChunk];  // 2^(decay - G_i); factors of u_i
    COHORT_VECTORIZE
    for (int64_t i = 0; i < size_; ++i) factors[i] = vexp2(decay - decay_[i]);
    factors[size_] = 1;
    T* const read = sums_.data();  // S^T k and S^T q
    T* const queried = read + dim_;
    std::fill(sums_.begin(), sums_.end(), T{0});
    for (int64_t a = 0; a < dim_; ++a) {
      add_row(read, row.k[a], s_ + a * dim_);
      add_row(queried, row.q[a], s_ + a * dim_);
    }
    for (int64_t j = 0; j < dim_; ++j) u[j] = std::fma(-gamma, read[j], row.v[j]);
    dot_rows(w, row.k, factors);
    for (int64_t i = 0; i < size_; ++i) add_row(u, -w[i], this->u(i));
    for (int64_t j = 0; j < dim_; ++j) u[j] *= row.beta;
    append(row.k, u, decay);
    dot_rows(w, row.q, factors);
    for (int64_t j = 0; j < dim_; ++j) o[j] = gamma * queried[j];
    for (int64_t i = 0; i < size_; ++i) add_row(o, w[i], this->u(i));
    for (int64_t j = 0; j < dim_; ++j) o[j] *= scale;
  }

 private:
  T next_decay(T g) const { return kernels::next_decay(size_ == 0 ? T{0} : decay_[size_ - 1], g); }
  // to += factor row
  void add_row(T* to, T factor, const T* row) const {
    COHORT_VECTORIZE
    for (int64_t j = 0; j < dim_; ++j) to[j] = std::fma(factor, row[j], to[j]);
  }
  // out[i] = factors[i] (x k_i) for the rows i.
  void dot_rows(T* out, const T* x, const T* factors) const {
    T sums[kDeltaChunk] = {};
    for (int64_t a = 0; a < dim_; ++a) {
      const T* const column = columns_.data() + a * kDeltaChunk;
      COHORT_VECTORIZE
      for (int64_t i = 0; i < size_; ++i) sums[i] = std::fma(x[a], column[i], sums[i]);
    }
    for (int64_t i = 0; i < size_; ++i) out[i] = factors[i] * sums[i];
  }

  int64_t dim_, size_ = 0;
  T* s_ = nullptr;
  const T *k_[kDeltaChunk] = {}, *u_[kDeltaChunk] = {};
  std::vector<T> columns_, sums_;  // columns_: k transposed, [D, 64]
  T decay_[kDeltaChunk] = {};
};

}  // namespace cohort::kernels
