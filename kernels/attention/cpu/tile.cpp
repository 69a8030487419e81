#include "kernels/attention/cpu/tile.h"

namespace cohort::kernels::attention {
namespace {

// acc += factor * b on a row of accumulators. simdlen asks for full-width vectors where the
// compiler's tuning would take half.
template <class T, int kWidth>
inline void add_term(T* acc, T factor, const T* b) {
#pragma omp simd simdlen(kLanes <T>)
  for (int i = 0; i < kWidth; ++i) acc[i] = std::fma(factor, b[i], acc[i]);
}

// The accumulators live in registers: all trip counts but those over t are constants.
template <class T, int R, int V>
void product_block(const ChainProduct<T>& p, int64_t x) {
  constexpr int kWidth = V * static_cast<int>(kLanes<T>);
  T acc[R][kWidth];
  T* const c = p.c + x;
  const T* b = p.b + x;
  const T* a[R];
  for (int r = 0; r < R; ++r) a[r] = p.a[r];
  if (p.out == Grad::kOverwrite) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma omp simd simdlen(kLanes <T>)
      for (int i = 0; i < kWidth; ++i) acc[r][i] = 0;
  } else {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma omp simd simdlen(kLanes <T>)
      for (int i = 0; i < kWidth; ++i) acc[r][i] = c[r * p.ldc + i];
  }
  const int64_t count = p.count, step = p.a_step, ldb = p.ldb;
  for (int64_t t = 0; t < count; ++t, b += ldb) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) add_term<T, kWidth>(acc[r], a[r][t * step], b);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
    for (int64_t t = 0; t < p.extra[r]; ++t)
      add_term<T, kWidth>(acc[r], a[r][(count + t) * step], b + t * ldb);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma omp simd simdlen(kLanes <T>)
    for (int i = 0; i < kWidth; ++i) c[r * p.ldc + i] = acc[r][i];
}

template <class T, int R>
void product_rows(const ChainProduct<T>& p) {
  const int64_t lanes = kLanes<T>;
  int64_t x = 0;
  while (x < p.width) {
    const int64_t vectors = std::min<int64_t>((p.width - x) / lanes, kMaxVectors);
    switch (vectors) {
      case 1:
        product_block<T, R, 1>(p, x);
        break;
      case 2:
        product_block<T, R, 2>(p, x);
        break;
      case 3:
        product_block<T, R, 3>(p, x);
        break;
      default:
        product_block<T, R, kMaxVectors>(p, x);
    }
    x += vectors * lanes;
  }
}

template <class T>
void transpose_four_by_four(T* to, int64_t ld, const T* const* rows, int64_t d) {
  using V = typename Four<T>::Type;
  V r[4];
  for (int i = 0; i < 4; ++i) std::memcpy(&r[i], rows[i] + d, sizeof(V));
  const V a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5);
  const V b = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
  const V c = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
  const V e = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
  const V columns[4] = {
      __builtin_shufflevector(a, c, 0, 1, 4, 5), __builtin_shufflevector(a, c, 2, 3, 6, 7),
      __builtin_shufflevector(b, e, 0, 1, 4, 5), __builtin_shufflevector(b, e, 2, 3, 6, 7)};
  for (int i = 0; i < 4; ++i) std::memcpy(to + (d + i) * ld, &columns[i], sizeof(V));
}

}  // namespace

template <class T>
void chain_product(const ChainProduct<T>& product) {
  switch (product.rows) {
    case 1:
      return product_rows<T, 1>(product);
    case 2:
      return product_rows<T, 2>(product);
    case 3:
      return product_rows<T, 3>(product);
    default:
      return product_rows<T, kRows>(product);
  }
}

template <class T>
void gather_transposed(T* to, const KeyRows<T>& from, int64_t first, int64_t count,
                       int64_t head_dim) {
  const int64_t ld = score_stride(head_dim), end = round_up(count, kPad);
  int64_t j = 0;
  for (; j + 4 <= count; j += 4) {
    const T* rows[4];
    for (int64_t i = 0; i < 4; ++i) rows[i] = from.row(first + j + i);
    int64_t d = 0;
    for (; d + 4 <= head_dim; d += 4) transpose_four_by_four(to + j, ld, rows, d);
    for (; d < head_dim; ++d)
      for (int64_t i = 0; i < 4; ++i) to[d * ld + j + i] = rows[i][d];
  }
  for (; j < count; ++j) {
    const T* row = from.row(first + j);
    for (int64_t d = 0; d < head_dim; ++d) to[d * ld + j] = row[d];
  }
  if (count < end)
    for (int64_t d = 0; d < head_dim; ++d) std::fill(to + d * ld + count, to + d * ld + end, T{0});
}

template <class T>
void gather_rows(T* to, const KeyRows<T>& from, int64_t first, int64_t count, int64_t head_dim) {
  const int64_t ld = padded_dim<T>(head_dim);
  for (int64_t j = 0; j < count; ++j) copy_row(to + j * ld, from.row(first + j), head_dim);
}

ProbabilityDropout::ProbabilityDropout(const DropoutSpec& spec) : p(spec.p), seed(spec.seed) {
  if (p == 0) return;
  stream = dropout_stream(spec.step, spec.layer, spec.site);
  sequences = spec.sequences.data<int64_t>();
  positions = spec.positions.data<int32_t>();
}

template <class T>
void ProbabilityDropout::fill(T* factors, int64_t token, int64_t head, int64_t first,
                              int64_t count) const {
  // dropout_keep() of kernels/dropout.h, with one Philox call for the four keys that share it.
  const uint64_t row = dropout_row(stream, sequences[token], positions[token]);
  const uint64_t element = static_cast<uint64_t>(head) << 32 | static_cast<uint64_t>(first);
  const float threshold = static_cast<float>(p);
  const T kept = static_cast<T>(1 / (1 - p));
  for (int64_t j = 0; j < count; j += 4) {
    const auto words = philox(seed, row, (element + static_cast<uint64_t>(j)) >> 2);
    for (size_t i = 0; i < 4; ++i)
      factors[j + static_cast<int64_t>(i)] = uniform_f32(words[i]) >= threshold ? kept : T{0};
  }
}

void check_cu_seqlens(const Tensor& cu_seqlens, int64_t tokens, const char* op) {
  const int32_t* cu = cu_seqlens.data<int32_t>();
  const int64_t sequences = cu_seqlens.numel() - 1;
  COHORT_CHECK(cu[0] == 0 && cu[sequences] == tokens, "[", op, "] expected cu_seqlens from 0 to ",
               tokens, ", got ", cu[0], " to ", cu[sequences]);
  for (int64_t s = 0; s < sequences; ++s)
    COHORT_CHECK(cu[s] <= cu[s + 1], "[", op, "] expected ascending cu_seqlens, got ", cu[s],
                 " before ", cu[s + 1], " at sequence ", s);
}

template void chain_product<float>(const ChainProduct<float>&);
template void chain_product<double>(const ChainProduct<double>&);
template void gather_transposed<float>(float*, const KeyRows<float>&, int64_t, int64_t, int64_t);
template void gather_transposed<double>(double*, const KeyRows<double>&, int64_t, int64_t, int64_t);
template void gather_rows<float>(float*, const KeyRows<float>&, int64_t, int64_t, int64_t);
template void gather_rows<double>(double*, const KeyRows<double>&, int64_t, int64_t, int64_t);
template void ProbabilityDropout::fill<float>(float*, int64_t, int64_t, int64_t, int64_t) const;
template void ProbabilityDropout::fill<double>(double*, int64_t, int64_t, int64_t, int64_t) const;

}  // namespace cohort::kernels::attention
