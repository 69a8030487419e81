// stick_breaking_backward on the CPU. A work item is a key head of a sequence and of those that
// share it as a prefix. It takes the query rows in blocks: for each, the tiles of keys descending,
// to sum L, and then ascending. Every element of dq, dk and dv is one fma chain, started from the
// old value when accumulating: dq over ascending keys, dk and dv over ascending (token, head of the
// group).
#include "kernels/attention/cpu/stick_breaking.h"

namespace cohort::kernels::cpu {
namespace {

using namespace attention;

constexpr int64_t kBlockRows = 64;

// Computes the gradients of one sequence and key head per run(), sequences ascending.
template <class T>
class StickBackward {
 public:
  StickBackward(const StickBreakingBackward& args, const StickRule<T>& rule)
      : args_(args),
        rule_(rule),
        sizes_(packed_sizes(args.q, args.k, args.cu_seqlens)),
        keys_(sizes_.head_dim),
        values_(sizes_.head_dim),
        q_(sizes_.head_dim, kBlockRows),
        dout_(sizes_.head_dim, kBlockRows) {
    for (Tensor* t : {&a_, &dz_})
      *t = Tensor::empty({kBlockRows, score_stride(sizes_.head_dim)}, dtype_of<T>);
  }

  void run(const PackedSequence& sequence, int64_t kv_head) {
    sequence_ = sequence;
    kv_head_ = kv_head;
    const int64_t group = sizes_.group();
    for (row0_ = 0; row0_ < sequence.length * group; row0_ += kBlockRows) {
      load_block();
      const int64_t keys = position_[count_ - 1], tiles = ceil_div(keys, kStickTile);
      later_.assign(static_cast<size_t>((tiles + 1) * kBlockRows), T{0});
      std::fill_n(earlier_, kBlockRows, T{0});
      for (int64_t tile = tiles - 1; tile >= 0; --tile) sum_tile(tile, keys);
      for (int64_t tile = 0; tile < tiles; ++tile) gradients_of(tile, keys);
    }
  }

 private:
  void load_block() {
    const int64_t group = sizes_.group(), dim = sizes_.head_dim;
    count_ = std::min(kBlockRows, sequence_.length * group - row0_);
    const auto row_of = [&](const Tensor& t, int64_t r) {
      const int64_t query = (row0_ + r) / group, head = kv_head_ * group + (row0_ + r) % group;
      return const_cast<T*>(t.data<T>()) + (sequence_.begin + query) * t.strides()[0] + head * dim;
    };
    for (int64_t r = 0; r < count_; ++r) {
      position_[r] = sequence_.position((row0_ + r) / group);
      dq_[r] = row_of(args_.dq.tensor, r);
    }
    q_.load(count_, [&](int64_t r) { return row_of(args_.q, r); });
    dout_.load(count_, [&](int64_t r) { return row_of(args_.dout, r); });
  }

  void load_tile(KeyTile<T>& to, const Tensor& from) {
    const T* const data = from.data<T>();
    to.load(tile_keys_, [&](int64_t j) { return data + key_offset(from, key0_ + j); });
  }
  // Number of keys of the tile that row r sees.
  int64_t seen(int64_t r) const { return std::clamp<int64_t>(position_[r] - key0_, 0, tile_keys_); }

  // out[r][j] = rows[r] . key j of the tile, for the keys that row r sees, rounded up to kKeyRun.
  void scores(const RowTile<T>& rows, const KeyTile<T>& keys, Tensor& out) {
    MatmulRow<T> matmul_rows[kBlockRows];
    for (int64_t r = 0; r < count_; ++r)
      matmul_rows[r] = {rows.rows[static_cast<size_t>(r)], out.data<T>() + r * out.dim(1), 0,
                        sizes_.head_dim, round_up(seen(r), kKeyRun)};
    chain_matmul<T>({matmul_rows, static_cast<size_t>(count_)}, 1, keys.transposed.data(),
                    Grad::kOverwrite);
  }

  void start_tile(int64_t tile, int64_t keys) {
    key0_ = tile * kStickTile;
    tile_keys_ = std::min(kStickTile, keys - key0_);
    load_tile(keys_, args_.k);
    scores(q_, keys_, a_);
  }

  // First sweep: L of the tile is added to what is later than the previous tile.
  void sum_tile(int64_t tile, int64_t keys) {
    start_tile(tile, keys);
    T* const later = later_.data() + tile * kBlockRows;
    for (int64_t r = 0; r < count_; ++r) {
      later[r] = later[r + kBlockRows];
      if (seen(r) > 0)
        later[r] += exclusive_sums<true>(
            StickTerms<T>(a_.data<T>() + r * a_.dim(1), rule_.exponent, seen(r)).spent);
    }
  }

  // Second sweep.
  void gradients_of(int64_t tile, int64_t keys) {
    start_tile(tile, keys);
    load_tile(values_, args_.v);
    scores(dout_, values_, dz_);
    MatmulRow<T> rows[kBlockRows];
    for (int64_t r = 0; r < count_; ++r) {
      T later = later_[static_cast<size_t>((tile + 1) * kBlockRows + r)];
      if (seen(r) > 0) gradients_of_scores(r, later);
      rows[r] = {dz_.data<T>() + r * dz_.dim(1), dq_[r], 0, seen(r), sizes_.head_dim};
    }
    add_transposed(a_, dout_.rows.data(), args_.dv.tensor);
    add_transposed(dz_, q_.rows.data(), args_.dk.tensor);
    chain_matmul<T>({rows, static_cast<size_t>(count_)}, 1, keys_.rows.data(), Grad::kAccumulate);
  }

  // Turns S in a_ into A, and dA in dz_ into dz, times the scale.
  void gradients_of_scores(int64_t row, T later) {
    T *const a = a_.data<T>() + row * a_.dim(1), *const dz = dz_.data<T>() + row * dz_.dim(1);
    const int64_t end = seen(row);
    StickTerms<T> terms(a, rule_.exponent, end);
    T left[kStickTile], w[kStickTile] = {};  // left: 1 - beta
#pragma omp simd simdlen(kVectorLanes <T>)
    for (int64_t j = 0; j < end; ++j) left[j] = vexp2(-terms.spent[j]);
    terms.weights(a, end, later);
    for (int64_t j = 0; j < end; ++j) dz[j] = w[j] = a[j] * dz[j];
    const T total = exclusive_sums<false>(w), before = earlier_[row];
#pragma omp simd simdlen(kVectorLanes <T>)
    for (int64_t j = 0; j < end; ++j)
      dz[j] = (left[j] * dz[j] - vexp2(terms.log_beta[j]) * (w[j] + before)) * rule_.scale;
    earlier_[row] += total;
  }

  // grad[key j] += sum over the rows that see it of weights[row][j] rows[row]: dV from A and dO, dK
  // from dz and Q.
  void add_transposed(const Tensor& weights, const T* const* rows, Tensor& grad) {
    MatmulRow<T> matmul_rows[kStickTile];
    for (int64_t j = 0; j < tile_keys_; ++j) {
      const int64_t first = std::upper_bound(position_, position_ + count_, key0_ + j) - position_;
      matmul_rows[j] = {weights.data<T>() + j, grad.data<T>() + key_offset(grad, key0_ + j), first,
                        count_, sizes_.head_dim};
    }
    chain_matmul<T>({matmul_rows, static_cast<size_t>(tile_keys_)}, weights.dim(1), rows,
                    Grad::kAccumulate);
  }

  // Offset of key `key` of the sequence in k, v or one of their gradients.
  int64_t key_offset(const Tensor& t, int64_t key) const {
    return sequence_.token(key) * t.strides()[0] + kv_head_ * sizes_.head_dim;
  }

  const StickBreakingBackward& args_;
  const StickRule<T>& rule_;
  const PackedSizes sizes_;
  KeyTile<T> keys_, values_;
  Tensor a_, dz_;  // [kBlockRows, score_stride]
  PackedSequence sequence_;
  int64_t kv_head_ = 0, key0_ = 0, tile_keys_ = 0;
  // The query block. Rows are (token, head of the group).
  int64_t row0_ = 0, count_ = 0;
  RowTile<T> q_, dout_;
  T* dq_[kBlockRows];
  int64_t position_[kBlockRows];
  std::vector<T> later_;   // [tiles + 1, kBlockRows]: sums of L from a tile on
  T earlier_[kBlockRows];  // sums of A dA before the tile
};

template <class T>
void backward(const StickBreakingBackward& args, const PackedSizes& sizes) {
  const StickRule<T> rule(args.desc, sizes.head_dim);
  const PackedSequences sequences(args.cu_seqlens, args.desc);
  std::vector<int64_t> prefix_groups;  // first sequence of each: the prefix of those that follow it
  int64_t cost = 0;
  for (int64_t s = 0; s < sizes.sequences; ++s) {
    cost += 3 * sequences[s].visible_keys() * sizes.heads * sizes.head_dim;
    if (!sequences.has_prefix(s)) prefix_groups.push_back(s);
  }
  const size_t items = prefix_groups.size() * static_cast<size_t>(sizes.kv_heads);
  prefix_groups.push_back(sizes.sequences);
  for (const GradOut* grad : {&args.dq, &args.dk, &args.dv})
    for (int64_t i = 0; i < sizes.tokens && grad->mode == Grad::kOverwrite; ++i) {
      Tensor& t = grad->tensor;
      std::fill_n(t.data<T>() + i * t.strides()[0], t.dim(1) * t.dim(2), T{0});
    }
  parallel_items(items, cost, [&](int64_t first, int64_t last) {
    StickBackward<T> backward(args, rule);
    for (int64_t i = first; i < last; ++i) {
      const auto prefix_group = static_cast<size_t>(i / sizes.kv_heads);
      for (int64_t s = prefix_groups[prefix_group]; s < prefix_groups[prefix_group + 1]; ++s)
        backward.run(sequences[s], i % sizes.kv_heads);
    }
  });
}

}  // namespace

void stick_breaking_backward(const StickBreakingBackward& args) {
  constexpr const char* kOp = "stick_breaking_backward";
  const PackedSizes sizes = packed_sizes(args.q, args.k, args.cu_seqlens);
  check_sequences(args.cu_seqlens, {.prefixes = args.desc.prefixes}, sizes.tokens, kOp);
  dispatch_float(args.q.dtype(), kOp, [&]<class T>() { backward<T>(args, sizes); });
}

}  // namespace cohort::kernels::cpu
