// attention_backward on the CPU. Per (block of query rows, tile of keys), with S recomputed:
//
//   P = exp(S - lse),  dP = keep / (1 - p) (dO V^T),  dS = P (dP - delta) scale,  delta = dO . O
//   dV += dropout(P)^T dO,  dK += dS^T Q,  dQ += dS K
//
// A work item is a key head of a sequence and of those that share it as a prefix: it loops over the
// tiles of keys, and for each over the query blocks that see some of it. Every element of dq, dk
// and dv is one fma chain, started from the old value when accumulating: dq over ascending keys, dk
// and dv over ascending (token, head of the group).
#include "kernels/attention/cpu/tile.h"
#include "kernels/cpu/reduce.h"
#include "kernels/vector_math.h"

namespace cohort::kernels::cpu {
namespace {

using namespace attention;

constexpr int64_t kBlockRows = 64;

// Computes the gradients of one sequence and key head per run(), sequences ascending.
template <class Rule>
class Backward {
 public:
  using T = typename Rule::Value;
  Backward(const AttentionBackward& args, const Rule& rule)
      : args_(args),
        rule_(rule),
        sizes_(packed_sizes(args.q, args.k, args.cu_seqlens)),
        keys_(sizes_.head_dim),
        values_(sizes_.head_dim),
        q_(sizes_.head_dim, kBlockRows),
        dout_(sizes_.head_dim, kBlockRows) {
    const int64_t stride = score_stride(sizes_.head_dim);
    for (Tensor* t : {&p_, &ds_}) *t = Tensor::empty({kBlockRows, stride}, dtype_of<T>);
    factors_ = Tensor::empty({stride}, dtype_of<T>);
  }

  // dbias: of all heads, to be added to; null if not wanted.
  void run(const PackedSequence& sequence, int index, int64_t kv_head, T* dbias) {
    const int64_t tile = attention_tile(sizes_.head_dim), group = sizes_.group();
    sequence_ = sequence;
    index_ = index;
    kv_head_ = kv_head;
    dbias_ = dbias;
    bound_ = rule_.bind(index, static_cast<int>(kv_head * group), sequence.keys());
    const int64_t all = sequence.length > 0 ? sequence.keys() : 0;
    for (int64_t key0 = 0; key0 < all; key0 += tile) {
      const int64_t count = std::min(tile, all - key0);
      const T *const k = args_.k.data<T>(), *const v = args_.v.data<T>();
      keys_.load(count, [&](int64_t j) { return k + key_offset(args_.k, key0 + j); });
      values_.load(count, [&](int64_t j) { return v + key_offset(args_.v, key0 + j); });
      const auto queries = sequence.rows(bound_.positions_of({key0, key0 + count}, all));
      const IndexRange<int> keys{static_cast<int>(key0), static_cast<int>(key0 + count)};
      for (int64_t row0 = queries.first * group / kBlockRows * kBlockRows;
           row0 < queries.end * group; row0 += kBlockRows) {
        const auto first = static_cast<int>(sequence.position(row0 / group)),
                   end = static_cast<int>(sequence.position((row0 + kBlockRows - 1) / group + 1));
        if (rule_.next_query(keys, first, end) < end) block_step(row0, key0);
      }
    }
  }

 private:
  void load_block(int64_t row0, int64_t key0) {
    const int64_t group = sizes_.group(), dim = sizes_.head_dim;
    const T *const q = args_.q.data<T>(), *const dout = args_.dout.data<T>();
    const T *const o = args_.o.data<T>(), *const lse = args_.lse.data<T>();
    T* const dq = args_.dq.tensor.data<T>();
    int64_t offsets[kBlockRows];  // into dout
    count_ = std::min(kBlockRows, sequence_.length * group - row0);
    for (int64_t r = 0; r < count_; ++r) {
      const int64_t query = (row0 + r) / group, in_group = (row0 + r) % group;
      token_[r] = sequence_.begin + query;
      head_[r] = kv_head_ * group + in_group;
      const int64_t offset = offsets[r] = row_offset(args_.dout, r);
      dq_[r] = dq + row_offset(args_.dq.tensor, r);
      const T* const o_row = o + row_offset(args_.o, r);
      delta_[r] = lane_sum<T>(dim, [&](int64_t d) { return dout[offset + d] * o_row[d]; });
      lse_log2_[r] = lse[head_[r] * sizes_.tokens + token_[r]] * static_cast<T>(kLog2e);
      const int64_t position = sequence_.position(query);
      const auto visible = bound_.keys_of({position, position + 1}, int64_t{sequence_.keys()});
      const bool sees = rule_.sees_tile(static_cast<int>(position), static_cast<int>(key0));
      first_[r] = std::clamp<int64_t>(visible.first - key0, 0, keys_.count);
      last_[r] = sees ? std::clamp<int64_t>(visible.end - key0, first_[r], keys_.count) : first_[r];
      distance_[r] = static_cast<int>(key0 - position);
    }
    q_.load(count_, [&](int64_t r) { return q + row_offset(args_.q, r); });
    dout_.load(count_, [&](int64_t r) { return dout + offsets[r]; });
  }

  void block_step(int64_t row0, int64_t key0) {
    load_block(row0, key0);
    scores(q_, keys_, p_);
    scores(dout_, values_, ds_);
    for (int64_t r = 0; r < count_; ++r) probabilities(r, key0);
    add_transposed(p_, dout_.rows.data(), args_.dv.tensor, row0, key0);
    add_transposed(ds_, q_.rows.data(), args_.dk.tensor, row0, key0);
    MatmulRow<T> rows[kBlockRows];
    for (int64_t r = 0; r < count_; ++r)
      rows[r] = {ds_.data<T>() + r * ds_.dim(1), dq_[r], first_[r], last_[r], sizes_.head_dim};
    chain_matmul<T>({rows, static_cast<size_t>(count_)}, 1, keys_.rows.data(), Grad::kAccumulate);
  }

  // out[r][j] = rows[r] . key j of the tile, for the keys that row r sees, rounded up to kKeyRun.
  void scores(const RowTile<T>& rows, const KeyTile<T>& keys, Tensor& out) {
    MatmulRow<T> matmul_rows[kBlockRows];
    for (int64_t r = 0; r < count_; ++r)
      matmul_rows[r] = {rows.rows[static_cast<size_t>(r)], out.data<T>() + r * out.dim(1), 0,
                        sizes_.head_dim, first_[r] < last_[r] ? round_up(last_[r], kKeyRun) : 0};
    chain_matmul<T>({matmul_rows, static_cast<size_t>(count_)}, 1, keys.transposed.data(),
                    Grad::kOverwrite);
  }

  // Turns S in p_ into P, dropped, and dO V^T in ds_ into dS.
  void probabilities(int64_t row, int64_t key0) {
    T *const p = p_.data<T>() + row * p_.dim(1), *const ds = ds_.data<T>() + row * p_.dim(1);
    const int64_t first = first_[row], last = last_[row], end = round_up(last, kKeyRun);
    const T c = rule_.exponent, minus = -lse_log2_[row], delta = delta_[row];
    if (first == last) {  // the row is in an invisible tile, or sees no key of this one
      std::fill_n(p, keys_.count, T{0});
      std::fill_n(ds, keys_.count, T{0});
      return;
    }
    const Rule bound = rule_.bind(index_, static_cast<int>(head_[row]), sequence_.keys());
    const auto distance = [&](int64_t j) {
      return KeyDistance<T>(distance_[row] + static_cast<int>(j));
    };
    bound.modify([&](auto&& stage) {
      for (int64_t j = first; j < last; ++j) p[j] = stage(p[j], distance(j));
    });
    T* const factors = factors_.data<T>();
    if (rule_.drops()) rule_.fill_factors(factors, token_[row], head_[row], key0, last);
#pragma omp simd simdlen(kVectorLanes <T>)
    for (int64_t j = 0; j < end; ++j) p[j] = vexp2(std::fma(p[j], c, minus));
    if (rule_.drops())
      for (int64_t j = first; j < last; ++j) ds[j] *= factors[j];
#pragma omp simd simdlen(kVectorLanes <T>)
    for (int64_t j = 0; j < end; ++j) ds[j] = p[j] * (ds[j] - delta);
    if (dbias_ != nullptr) {
      const int radius = rule_.radius;
      T* const sums = dbias_ + head_[row] * (2 * radius + 1) + radius;
      for (int64_t j = first; j < last; ++j)
        sums[std::clamp(distance(j).whole, -radius, radius)] += ds[j];
    }
    bound.differentiate([&](auto&& derivative) {
      for (int64_t j = first; j < last; ++j) ds[j] *= derivative(p[j], lse_log2_[row], distance(j));
    });
#pragma omp simd simdlen(kVectorLanes <T>)
    for (int64_t j = 0; j < end; ++j) ds[j] *= rule_.scale;
    if (rule_.drops())
      for (int64_t j = first; j < last; ++j) p[j] *= factors[j];
  }

  // grad[key j] += sum over the rows that see it of weights[row][j] rows[row]: dV from P and dO, dK
  // from dS and Q.
  void add_transposed(const Tensor& weights, const T* const* rows, Tensor& grad, int64_t row0,
                      int64_t key0) {
    const int64_t group = sizes_.group();
    const T* const columns = weights.data<T>();
    T* const grads = grad.data<T>();
    MatmulRow<T> matmul_rows[128];
    for (int64_t j = 0; j < keys_.count; ++j) {
      const int64_t key = key0 + j;
      const auto queries =
          sequence_.rows(bound_.positions_of({key, key + 1}, int64_t{sequence_.keys()}));
      matmul_rows[j] = {columns + j, grads + key_offset(grad, key),
                        std::clamp<int64_t>(queries.first * group - row0, 0, count_),
                        std::clamp<int64_t>(queries.end * group - row0, 0, count_),
                        sizes_.head_dim};
    }
    chain_matmul<T>({matmul_rows, static_cast<size_t>(keys_.count)}, weights.dim(1), rows,
                    Grad::kAccumulate);
  }

  // Offset of key `key` of the sequence in k, v or one of their gradients.
  int64_t key_offset(const Tensor& t, int64_t key) const {
    return sequence_.token(key) * t.strides()[0] + kv_head_ * t.strides()[1];
  }
  // Offset of row r of the query block.
  int64_t row_offset(const Tensor& t, int64_t r) const {
    return token_[r] * t.strides()[0] + head_[r] * t.strides()[1];
  }

  const AttentionBackward& args_;
  const Rule& rule_;
  const PackedSizes sizes_;
  KeyTile<T> keys_, values_;
  Tensor p_, ds_;   // [kBlockRows, score_stride]
  Tensor factors_;  // [score_stride]
  PackedSequence sequence_;
  int index_ = 0;  // number of the sequence
  int64_t kv_head_ = 0;
  T* dbias_ = nullptr;
  Rule bound_ = rule_;  // to the sequence
  // The query block. Rows are (token, head of the group); row r sees keys [first, last) of the
  // tile.
  int64_t count_ = 0;
  RowTile<T> q_, dout_;
  T* dq_[kBlockRows];
  T delta_[kBlockRows], lse_log2_[kBlockRows];
  int64_t token_[kBlockRows], head_[kBlockRows], first_[kBlockRows], last_[kBlockRows];
  int distance_[kBlockRows];  // from the query to the first key of the tile
};

// out (+)= the sum over dimension 0 of `parts`, ascending.
template <class T>
void add_parts(const GradOut& out, const Tensor& parts) {
  T* const to = out.tensor.data<T>();
  const int64_t width = out.tensor.numel(), count = parts.dim(0);
  if (out.mode == Grad::kOverwrite) std::fill_n(to, width, T{0});
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < width; ++j) to[j] += parts.data<T>()[i * width + j];
}

// The gradient of a sink: its probability in a row times its dS, 0 - delta, over all rows.
template <class Rule>
void sink_gradients(const AttentionBackward& args, const PackedSizes& sizes, const Rule& rule) {
  using T = typename Rule::Value;
  const int64_t tokens = sizes.tokens, dim = sizes.head_dim;
  Tensor sums = Tensor::zeros({1, sizes.heads}, dtype_of<T>);
  parallel_items(
      static_cast<size_t>(sizes.heads), tokens * sizes.heads * dim,
      [&](int64_t begin, int64_t end) {
        for (int64_t h = begin; h < end; ++h)
          for (int64_t t = 0; t < tokens; ++t) {
            const auto row = [&](const Tensor& of) {
              return of.data<T>() + t * of.strides()[0] + h * of.strides()[1];
            };
            const T *const dout = row(args.dout), *const o = row(args.o);
            const T delta = lane_sum<T>(dim, [&](int64_t d) { return dout[d] * o[d]; });
            const T lse_log2 = args.lse.data<T>()[h * tokens + t] * static_cast<T>(kLog2e);
            sums.data<T>()[h] -= vexp2(rule.sink_log2(static_cast<int>(h)) - lse_log2) * delta;
          }
      });
  add_parts<T>(*args.dsinks, sums);
}

template <class Rule>
void backward(const AttentionBackward& args, const PackedSizes& sizes, const Rule& rule) {
  using T = typename Rule::Value;
  const PackedSequences sequences(args.cu_seqlens, args.desc);
  std::vector<int64_t> prefix_groups;  // first sequence of each: the prefix of those that follow it
  int64_t cost = 0;
  for (int64_t s = 0; s < sizes.sequences; ++s) {
    cost += 5 * sequences[s].visible_keys() * sizes.heads * sizes.head_dim / 2;
    if (!sequences.has_prefix(s)) prefix_groups.push_back(s);
  }

  const size_t items = prefix_groups.size() * static_cast<size_t>(sizes.kv_heads);
  prefix_groups.push_back(sizes.sequences);
  for (const GradOut* grad : {&args.dq, &args.dk, &args.dv}) {
    if (grad->mode == Grad::kAccumulate) continue;
    Tensor& t = grad->tensor;
    for (int64_t i = 0; i < sizes.tokens; ++i)
      for (int64_t h = 0; h < t.dim(1); ++h)
        std::fill_n(t.data<T>() + i * t.strides()[0] + h * t.strides()[1], t.dim(2), T{0});
  }

  Tensor dbias;  // one per prefix group
  if (args.dbias)
    dbias = Tensor::zeros(
        {static_cast<int64_t>(prefix_groups.size()) - 1, sizes.heads, args.desc.bias.dim(1)},
        dtype_of<T>);
  parallel_items(items, cost, [&](int64_t first, int64_t last) {
    Backward<Rule> backward(args, rule);
    for (int64_t i = first; i < last; ++i) {
      const int64_t group = i / sizes.kv_heads;
      T* const bias = args.dbias ? dbias.data<T>() + group * args.dbias->tensor.numel() : nullptr;
      for (int64_t s = prefix_groups[static_cast<size_t>(group)];
           s < prefix_groups[static_cast<size_t>(group) + 1]; ++s)
        backward.run(sequences[s], static_cast<int>(s), i % sizes.kv_heads, bias);
    }
  });
  if (args.dbias) add_parts<T>(*args.dbias, dbias);
  if (args.dsinks) sink_gradients(args, sizes, rule);
}

}  // namespace

void transpose_tile_mask(const TileMaskTranspose& args) {
  const auto tiles = static_cast<int>(args.from.dim(0)), words = static_cast<int>(args.from.dim(1));
  const auto* const from = static_cast<const uint32_t*>(args.from.raw());
  for (int i = 0; i < tiles * words; ++i)
    static_cast<uint32_t*>(args.to.raw())[i] = transposed_word(from, tiles, i / words, i % words);
}

void attention_backward(const AttentionBackward& args) {
  constexpr const char* kOp = "attention_backward";
  const PackedSizes sizes = packed_sizes(args.q, args.k, args.cu_seqlens);
  check_sequences(args.cu_seqlens, args.desc, sizes.tokens, kOp);
  dispatch_float(args.q.dtype(), kOp, [&]<class T>() {
    backward(args, sizes, DropoutRule<T>(args.desc, sizes.head_dim));
  });
}

}  // namespace cohort::kernels::cpu
