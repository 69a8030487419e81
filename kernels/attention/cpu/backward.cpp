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

  void run(const PackedSequence& sequence, int64_t kv_head) {
    const int64_t tile = attention_tile(sizes_.head_dim), group = sizes_.group();
    sequence_ = sequence;
    kv_head_ = kv_head;
    const int64_t all = sequence.length > 0 ? sequence.keys() : 0;
    for (int64_t key0 = 0; key0 < all; key0 += tile) {
      const int64_t count = std::min(tile, all - key0);
      const T *const k = args_.k.data<T>(), *const v = args_.v.data<T>();
      keys_.load(count, [&](int64_t j) { return k + key_offset(args_.k, key0 + j); });
      values_.load(count, [&](int64_t j) { return v + key_offset(args_.v, key0 + j); });
      const auto queries = sequence.rows(rule_.positions_of({key0, key0 + count}, all));
      for (int64_t row0 = queries.first * group / kBlockRows * kBlockRows;
           row0 < queries.end * group; row0 += kBlockRows)
        block_step(row0, key0);
    }
  }

 private:
  void load_block(int64_t row0, int64_t key0) {
    const int64_t group = sizes_.group(), dim = sizes_.head_dim;
    const T *const q = args_.q.data<T>(), *const dout = args_.dout.data<T>();
    const T *const o = args_.o.data<T>(), *const lse = args_.lse.data<T>();
    const int64_t q_stride = args_.q.strides()[0], dq_stride = args_.dq.tensor.strides()[0];
    const int64_t o_stride = args_.o.strides()[0];
    T* const dq = args_.dq.tensor.data<T>();
    int64_t offsets[kBlockRows];  // into dout
    count_ = std::min(kBlockRows, sequence_.length * group - row0);
    for (int64_t r = 0; r < count_; ++r) {
      const int64_t query = (row0 + r) / group, in_group = (row0 + r) % group;
      token_[r] = sequence_.begin + query;
      head_[r] = kv_head_ * group + in_group;
      const int64_t offset = offsets[r] = (token_[r] * sizes_.heads + head_[r]) * dim;
      dq_[r] = dq + token_[r] * dq_stride + head_[r] * dim;
      const T* const o_row = o + token_[r] * o_stride + head_[r] * dim;
      delta_[r] = lane_sum<T>(dim, [&](int64_t d) { return dout[offset + d] * o_row[d]; });
      lse_log2_[r] = lse[head_[r] * sizes_.tokens + token_[r]] * static_cast<T>(kLog2e);
      const int64_t position = sequence_.position(query);
      const auto visible = rule_.keys_of({position, position + 1}, int64_t{sequence_.keys()});
      first_[r] = std::clamp<int64_t>(visible.first - key0, 0, keys_.count);
      last_[r] = std::clamp<int64_t>(visible.end - key0, 0, keys_.count);
    }
    q_.load(count_, [&](int64_t r) { return q + token_[r] * q_stride + head_[r] * dim; });
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
    const T c = rule_.exponent, scale = rule_.scale;
    const T minus = -lse_log2_[row], delta = delta_[row];
    if (!rule_.drops()) {
      const int64_t end = round_up(last_[row], kKeyRun);
#pragma omp simd simdlen(kVectorLanes <T>)
      for (int64_t j = 0; j < end; ++j) {
        const T score = rule_.apply(p[j]);
        p[j] = vexp2(std::fma(score, c, minus));
        ds[j] = p[j] * (ds[j] - delta) * scale * rule_.derivative(score);
      }
      return;
    }
    T* const factors = factors_.data<T>();
    rule_.fill_factors(factors, token_[row], head_[row], key0, last_[row]);
#pragma omp simd simdlen(kVectorLanes <T>)
    for (int64_t j = first_[row]; j < last_[row]; ++j) {
      const T score = rule_.apply(p[j]), undropped = vexp2(std::fma(score, c, minus));
      ds[j] = undropped * (ds[j] * factors[j] - delta) * scale * rule_.derivative(score);
      p[j] = undropped * factors[j];
    }
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
          sequence_.rows(rule_.positions_of({key, key + 1}, int64_t{sequence_.keys()}));
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
    return sequence_.token(key) * t.strides()[0] + kv_head_ * sizes_.head_dim;
  }

  const AttentionBackward& args_;
  const Rule& rule_;
  const PackedSizes sizes_;
  KeyTile<T> keys_, values_;
  Tensor p_, ds_;   // [kBlockRows, score_stride]
  Tensor factors_;  // [score_stride]
  PackedSequence sequence_;
  int64_t kv_head_ = 0;
  // The query block. Rows are (token, head of the group); row r sees keys [first, last) of the
  // tile.
  int64_t count_ = 0;
  RowTile<T> q_, dout_;
  T* dq_[kBlockRows];
  T delta_[kBlockRows], lse_log2_[kBlockRows];
  int64_t token_[kBlockRows], head_[kBlockRows], first_[kBlockRows], last_[kBlockRows];
};

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
      std::fill_n(t.data<T>() + i * t.strides()[0], t.dim(1) * t.dim(2), T{0});
  }

  parallel_items(items, cost, [&](int64_t first, int64_t last) {
    Backward<Rule> backward(args, rule);
    for (int64_t i = first; i < last; ++i) {
      const auto prefix_group = static_cast<size_t>(i / sizes.kv_heads);
      for (int64_t s = prefix_groups[prefix_group]; s < prefix_groups[prefix_group + 1]; ++s)
        backward.run(sequences[s], i % sizes.kv_heads);
    }
  });
}

}  // namespace

void attention_backward(const AttentionBackward& args) {
  constexpr const char* kOp = "attention_backward";
  const PackedSizes sizes = packed_sizes(args.q, args.k, args.cu_seqlens);
  check_sequences(args.cu_seqlens, args.desc, sizes.tokens, kOp);
  dispatch_float(args.q.dtype(), kOp, [&]<class T>() {
    with_rule<AnyRule<T>>(args, args.desc, sizes.head_dim,
                          [&](const auto& call) { backward(args, sizes, call.rule); });
  });
}

}  // namespace cohort::kernels::cpu
