// attention_backward on the CPU. Per (block of query rows, tile of keys), with S recomputed:
//
//   P = exp(S - lse),  dP = keep / (1 - p) (dO V^T),  dS = P (dP - delta) scale,  delta = dO . O
//   dV += dropout(P)^T dO,  dK += dS^T Q,  dQ += dS K
//
// Every element of dq, dk and dv is one fma chain: dq over ascending keys, dk and dv over ascending
// (token, head of the group), begun at the old value when accumulating. So a whole (sequence, key
// head) in one pass, or key tiles and query blocks apart on many threads, give the same bits.
#include "kernels/attention/cpu/tile.h"
#include "kernels/vector_math.h"

namespace cohort::kernels::cpu {
namespace {

using namespace attention;

constexpr int64_t kBlockRows = 64;
constexpr int64_t kBlocksPerItem = 4;  // query blocks that share gathered keys in a pass for dq

enum class Part { kAll, kKeys, kQueries };  // which gradients an item writes

// Key tiles [tile0, tile1) against query blocks [block0, block1) of one sequence and key head.
struct BackwardItem {
  int64_t sequence, kv_head, tile0, tile1, block0, block1;
  Part part;
  int64_t cost;
};

// A dot product in 16 interleaved sums, so that its bits do not depend on the vector width.
template <class T>
T dot(const T* a, const T* b, int64_t n) {
  using V = typename Four<T>::Type;
  V sum[4] = {};
  const auto add = [&](const T* x, const T* y) {
    V u[4], v[4];
    std::memcpy(u, x, sizeof u);
    std::memcpy(v, y, sizeof v);
    for (int i = 0; i < 4; ++i) sum[i] += u[i] * v[i];
  };
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) add(a + i, b + i);
  if (i < n) {
    T x[16] = {}, y[16] = {};
    std::copy(a + i, a + n, x);
    std::copy(b + i, b + n, y);
    add(x, y);
  }
  const V all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  return (all[0] + all[1]) + (all[2] + all[3]);
}

template <class T>
class Backward {
 public:
  explicit Backward(const AttentionBackward& args);
  void run(const BackwardItem& item);

 private:
  void load_tile(int64_t key0);
  void store_tile(int64_t key0);
  void load_block(int64_t row0, int64_t key0);
  void block_step(int64_t row0, int64_t key0);
  void scores(const T* a, const T* b, T* c);
  void probabilities(int64_t key0);
  void add_transposed(T* grad, const T* weights, const T* rows);
  void add_dq(int64_t key0);

  int64_t key_offset(int64_t key) const {
    return ((begin_ + key) * sizes_.kv_heads + kv_head_) * dim_;
  }

  const AttentionBackward& args_;
  const PackedSizes sizes_;
  const int32_t* const cu_;
  const bool causal_;
  const ProbabilityDropout dropout_;
  const double scale_;
  const int64_t dim_, width_, tile_, stride_, group_;
  Scratch<T> scratch_;
  T *keys_t_, *values_t_, *keys_, *dk_, *dv_;           // of the key tile
  T *q_, *dout_, *dq_, *p_, *ds_, *delta_, *lse_log2_;  // of the query block
  T* factors_;
  int64_t begin_ = 0, length_ = 0, kv_head_ = 0;  // of the item
  Part part_ = Part::kAll;
  int64_t keys_n_ = 0, rows_n_ = 0;  // in the tile, in the block
  struct Row {
    int64_t token, head, offset;  // offset: of the row in q, o and their gradients
  };
  Row rows_[kBlockRows];
  int64_t seen_[kBlockRows];  // keys of the tile that each row sees; ascending
};

template <class T>
Backward<T>::Backward(const AttentionBackward& args)
    : args_(args),
      sizes_(packed_sizes(args.q, args.k, args.cu_seqlens)),
      cu_(args.cu_seqlens.data<int32_t>()),
      causal_(args.desc.mask == Mask::kCausal),
      dropout_(args.desc.dropout),
      scale_(softmax_scale(args.desc, sizes_.head_dim)),
      dim_(sizes_.head_dim),
      width_(padded_dim<T>(dim_)),
      tile_(attention_tile(dim_)),
      stride_(score_stride(dim_)),
      group_(sizes_.group()),
      scratch_(2 * Scratch<T>::piece(dim_ * stride_) + 3 * Scratch<T>::piece(tile_ * width_) +
               3 * Scratch<T>::piece(kBlockRows * width_) +
               2 * Scratch<T>::piece(kBlockRows * stride_) + 2 * Scratch<T>::piece(kBlockRows) +
               Scratch<T>::piece(stride_)) {
  for (T** piece : {&keys_t_, &values_t_}) *piece = scratch_.take(dim_ * stride_);
  for (T** piece : {&keys_, &dk_, &dv_}) *piece = scratch_.take(tile_ * width_);
  for (T** piece : {&q_, &dout_, &dq_}) *piece = scratch_.take(kBlockRows * width_);
  for (T** piece : {&p_, &ds_}) *piece = scratch_.take(kBlockRows * stride_);
  for (T** piece : {&delta_, &lse_log2_}) *piece = scratch_.take(kBlockRows);
  factors_ = scratch_.take(stride_);
}

template <class T>
void Backward<T>::run(const BackwardItem& item) {
  begin_ = cu_[item.sequence];
  length_ = cu_[item.sequence + 1] - begin_;
  kv_head_ = item.kv_head;
  part_ = item.part;
  for (int64_t tile = item.tile0; tile < item.tile1; ++tile) {
    const int64_t key0 = tile * tile_;
    load_tile(key0);
    // Causal rows before the tile's first key see none of it.
    const int64_t first = causal_ ? key0 * group_ / kBlockRows : 0;
    for (int64_t block = std::max(item.block0, first); block < item.block1; ++block)
      block_step(block * kBlockRows, key0);
    if (part_ != Part::kQueries) store_tile(key0);
  }
}

template <class T>
void Backward<T>::load_tile(int64_t key0) {
  keys_n_ = std::min(tile_, length_ - key0);
  const int64_t stride = sizes_.kv_heads * dim_;
  const KeyRows<T> keys{.data = args_.k.data<T>() + key_offset(0), .stride = stride};
  const KeyRows<T> values{.data = args_.v.data<T>() + key_offset(0), .stride = stride};
  gather_transposed(keys_t_, keys, key0, keys_n_, dim_);
  gather_transposed(values_t_, values, key0, keys_n_, dim_);
  if (part_ != Part::kKeys) gather_rows(keys_, keys, key0, keys_n_, dim_);
  if (part_ == Part::kQueries) return;
  const auto start = [&](T* sums, const GradOut& grad) {
    if (grad.mode == Grad::kOverwrite)
      std::fill_n(sums, keys_n_ * width_, T{0});
    else
      gather_rows(sums, KeyRows<T>{.data = grad.tensor.data<T>() + key_offset(0), .stride = stride},
                  key0, keys_n_, dim_);
  };
  start(dk_, args_.dk);
  start(dv_, args_.dv);
}

template <class T>
void Backward<T>::store_tile(int64_t key0) {
  for (int64_t j = 0; j < keys_n_; ++j) {
    store_row(args_.dk.tensor.data<T>() + key_offset(key0 + j), dk_ + j * width_, dim_);
    store_row(args_.dv.tensor.data<T>() + key_offset(key0 + j), dv_ + j * width_, dim_);
  }
}

template <class T>
void Backward<T>::load_block(int64_t row0, int64_t key0) {
  rows_n_ = std::min(kBlockRows, length_ * group_ - row0);
  const T *const q = args_.q.data<T>(), *const dout = args_.dout.data<T>();
  const T *const o = args_.o.data<T>(), *const lse = args_.lse.data<T>();
  int64_t at = row0 / group_, in_group = row0 % group_;
  for (int64_t r = 0; r < rows_n_; ++r) {
    const int64_t token = begin_ + at, head = kv_head_ * group_ + in_group;
    const int64_t offset = (token * sizes_.heads + head) * dim_;
    rows_[r] = {token, head, offset};
    seen_[r] = causal_ ? std::clamp<int64_t>(at + 1 - key0, 0, keys_n_) : keys_n_;
    copy_row(q_ + r * width_, q + offset, dim_);
    copy_row(dout_ + r * width_, dout + offset, dim_);
    delta_[r] = dot(dout_ + r * width_, o + offset, dim_);
    lse_log2_[r] = lse[head * sizes_.tokens + token] * static_cast<T>(kLog2e);
    if (++in_group == group_) {
      in_group = 0;
      ++at;
    }
  }
}

template <class T>
void Backward<T>::block_step(int64_t row0, int64_t key0) {
  load_block(row0, key0);
  scores(q_, keys_t_, p_);
  scores(dout_, values_t_, ds_);
  probabilities(key0);
  if (part_ != Part::kQueries) {
    add_transposed(dv_, p_, dout_);
    add_transposed(dk_, ds_, q_);
  }
  if (part_ != Part::kKeys) add_dq(key0);
}

// c[r][j] = a[r] . row j of the tile, for the keys that row r sees and some more: up to kPad and to
// the neighbouring rows'.
template <class T>
void Backward<T>::scores(const T* a, const T* b, T* c) {
  const int64_t chunk = kMaxVectors * kLanes<T>;
  for (int64_t x = 0; x < keys_n_; x += chunk)
    for (int64_t r = 0; r < rows_n_; r += kRows) {
      const int64_t rows = std::min<int64_t>(kRows, rows_n_ - r);
      const int64_t width = round_up(seen_[r + rows - 1], kPad);
      if (width <= x) continue;
      ChainProduct<T> product{.rows = rows,
                              .width = std::min(chunk, width - x),
                              .count = dim_,
                              .a = {},
                              .a_step = 1,
                              .b = b + x,
                              .ldb = stride_,
                              .c = c + r * stride_ + x,
                              .ldc = stride_,
                              .out = Grad::kOverwrite};
      product.set_a(a + r * width_, width_);
      chain_product(product);
    }
}

// From S in p_ and dO V^T in ds_: the dropped P and dS, zero from what a row sees to the next
// multiple of kPad.
template <class T>
void Backward<T>::probabilities(int64_t key0) {
  const T c = static_cast<T>(scale_ * kLog2e), scale = static_cast<T>(scale_);
  for (int64_t r = 0; r < rows_n_; ++r) {
    T *const p = p_ + r * stride_, minus = -lse_log2_[r];
    const int64_t end = round_up(seen_[r], kPad);
#pragma omp simd simdlen(kLanes <T>)
    for (int64_t j = 0; j < end; ++j) p[j] = vexp2(std::fma(p[j], c, minus));
  }
  for (int64_t r = 0; r < rows_n_; ++r) {
    T *const p = p_ + r * stride_, *const ds = ds_ + r * stride_;
    const int64_t n = seen_[r], end = round_up(n, kPad);
    const T delta = delta_[r];
    if (dropout_.p > 0) {
      dropout_.fill(factors_, rows_[r].token, rows_[r].head, key0, n);
      for (int64_t j = 0; j < n; ++j) {
        ds[j] = p[j] * (ds[j] * factors_[j] - delta) * scale;
        p[j] *= factors_[j];
      }
    } else {
#pragma omp simd simdlen(kLanes <T>)
      for (int64_t j = 0; j < end; ++j) ds[j] = p[j] * (ds[j] - delta) * scale;
    }
    fill_tail(p, n, end, T{0});
    fill_tail(ds, n, end, T{0});
  }
}

// grad[j] += sum over rows of weights[row][j] rows[row]: dV from P and dO, dK from dS and Q.
template <class T>
void Backward<T>::add_transposed(T* grad, const T* weights, const T* rows) {
  int64_t first = 0;  // the first row that sees key j
  for (int64_t j = 0; j < keys_n_; j += kRows) {
    while (first < rows_n_ && seen_[first] <= j) ++first;
    if (first == rows_n_) return;
    ChainProduct<T> product{.rows = std::min<int64_t>(kRows, keys_n_ - j),
                            .width = width_,
                            .count = rows_n_ - first,
                            .a = {},
                            .a_step = stride_,
                            .b = rows + first * width_,
                            .ldb = width_,
                            .c = grad + j * width_,
                            .ldc = width_,
                            .out = Grad::kAccumulate};
    product.set_a(weights + first * stride_ + j, 1);
    chain_product(product);
  }
}

template <class T>
void Backward<T>::add_dq(int64_t key0) {
  T* const dq = args_.dq.tensor.data<T>();
  const Grad out = key0 == 0 ? args_.dq.mode : Grad::kAccumulate;
  for (int64_t r = 0; r < rows_n_; r += kRows) {
    const int64_t rows = std::min<int64_t>(kRows, rows_n_ - r);
    if (seen_[r + rows - 1] == 0) continue;
    if (out == Grad::kAccumulate)
      for (int64_t i = r; i < r + rows; ++i) copy_row(dq_ + i * width_, dq + rows_[i].offset, dim_);
    ChainProduct<T> product{.rows = rows,
                            .width = width_,
                            .count = 0,
                            .a = {},
                            .a_step = 1,
                            .b = keys_,
                            .ldb = width_,
                            .c = dq_ + r * width_,
                            .ldc = width_,
                            .out = out};
    product.set_a(ds_ + r * stride_, stride_);
    product.set_counts(seen_ + r);
    chain_product(product);
    for (int64_t i = r; i < r + rows; ++i) store_row(dq + rows_[i].offset, dq_ + i * width_, dim_);
  }
}

// Short sequences go whole, five products per pair. One that would keep the other threads waiting
// is cut into its key tiles and into groups of query blocks, seven products per pair.
std::vector<BackwardItem> backward_items(const PackedSizes& sizes, const int32_t* cu, Mask mask) {
  const int64_t tile = attention_tile(sizes.head_dim);
  const auto pairs = [&](int64_t queries, int64_t keys) {
    return queries * keys * sizes.group() / (mask == Mask::kCausal ? 2 : 1) + 1;
  };
  int64_t total = 0;
  for (int64_t s = 0; s < sizes.sequences; ++s)
    total += sizes.kv_heads * pairs(cu[s + 1] - cu[s], cu[s + 1] - cu[s]);
  std::vector<BackwardItem> items;
  for (int64_t s = 0; s < sizes.sequences; ++s) {
    const int64_t n = cu[s + 1] - cu[s], tiles = (n + tile - 1) / tile;
    const int64_t blocks = (n * sizes.group() + kBlockRows - 1) / kBlockRows;
    if (n == 0) continue;
    const int threads = num_threads();
    const bool whole = tiles == 1 || threads == 1 || pairs(n, n) * threads * 2 <= total;
    for (int64_t h = 0; h < sizes.kv_heads; ++h) {
      if (whole) {
        items.push_back({s, h, 0, tiles, 0, blocks, Part::kAll, 5 * sizes.head_dim * pairs(n, n)});
        continue;
      }
      const int64_t by_tile = 4 * sizes.head_dim * pairs(n, tile);
      for (int64_t t = 0; t < tiles; ++t)
        items.push_back({s, h, t, t + 1, 0, blocks, Part::kKeys, by_tile});
      for (int64_t b = (blocks - 1) / kBlocksPerItem * kBlocksPerItem; b >= 0;
           b -= kBlocksPerItem) {
        // The last key that the item's last row sees.
        const int64_t last_row = std::min((b + kBlocksPerItem) * kBlockRows, n * sizes.group()) - 1;
        const int64_t seen_tiles =
            mask == Mask::kCausal ? last_row / sizes.group() / tile + 1 : tiles;
        const int64_t by_block =
            3 * sizes.head_dim * pairs(kBlocksPerItem * kBlockRows / sizes.group() + 1, n);
        items.push_back({s, h, 0, seen_tiles, b, std::min(b + kBlocksPerItem, blocks),
                         Part::kQueries, by_block});
      }
    }
  }
  return items;
}

}  // namespace

void attention_backward(const AttentionBackward& args) {
  const PackedSizes sizes = packed_sizes(args.q, args.k, args.cu_seqlens);
  check_cu_seqlens(args.cu_seqlens, sizes.tokens, "attention_backward");
  const auto items = backward_items(sizes, args.cu_seqlens.data<int32_t>(), args.desc.mask);
  dispatch_float(args.q.dtype(), "attention_backward", [&]<class T>() {
    parallel_items(items, [&](int64_t first, int64_t last) {
      Backward<T> backward(args);
      for (int64_t i = first; i < last; ++i) backward.run(items[static_cast<size_t>(i)]);
    });
  });
}

}  // namespace cohort::kernels::cpu
