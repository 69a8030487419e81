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
template <class T>
class Backward {
 public:
  explicit Backward(const AttentionBackward& args);
  void run(const KeyTokens& tokens, int64_t length, int64_t kv_head);

 private:
  void load_block(int64_t row0, int64_t key0);
  void block_step(int64_t row0, int64_t key0);
  void scores(const RowTile<T>& rows, const KeyTile<T>& keys, Tensor& out);
  void probabilities(int64_t row, int64_t key0);
  void add_transposed(const Tensor& weights, const T* const* rows, Tensor& grad, int64_t row0,
                      int64_t key0);

  // Offset of key `key` of the sequence in k, v or one of their gradients.
  int64_t key_offset(const Tensor& t, int64_t key) const {
    return tokens_(key) * t.strides()[0] + kv_head_ * sizes_.head_dim;
  }

  const AttentionBackward& args_;
  const PackedSizes sizes_;
  const T scale_;
  const ProbabilityDropout dropout_;
  KeyTile<T> keys_, values_;
  Tensor p_, ds_;   // [kBlockRows, score_stride]
  Tensor factors_;  // [score_stride]
  KeyTokens tokens_;
  int64_t length_ = 0, kv_head_ = 0;  // length_: without the prefix
  // The query block. Rows are (token, head of the group); row r sees keys [first, last) of the
  // tile.
  int64_t count_ = 0;
  RowTile<T> q_, dout_;
  T* dq_[kBlockRows];
  T delta_[kBlockRows], lse_log2_[kBlockRows];
  int64_t token_[kBlockRows], head_[kBlockRows], first_[kBlockRows], last_[kBlockRows];
};

template <class T>
Backward<T>::Backward(const AttentionBackward& args)
    : args_(args),
      sizes_(packed_sizes(args.q, args.k, args.cu_seqlens)),
      scale_(static_cast<T>(softmax_scale(args.desc, sizes_.head_dim))),
      dropout_{args.desc.dropout},
      keys_(sizes_.head_dim),
      values_(sizes_.head_dim),
      q_(sizes_.head_dim, kBlockRows),
      dout_(sizes_.head_dim, kBlockRows) {
  const int64_t stride = score_stride(sizes_.head_dim);
  for (Tensor* t : {&p_, &ds_}) *t = Tensor::empty({kBlockRows, stride}, dtype_of<T>);
  factors_ = Tensor::empty({stride}, dtype_of<T>);
}

template <class T>
void Backward<T>::run(const KeyTokens& tokens, int64_t length, int64_t kv_head) {
  const int64_t tile = attention_tile(sizes_.head_dim), group = sizes_.group();
  tokens_ = tokens;
  length_ = length;
  kv_head_ = kv_head;
  const bool causal = args_.desc.mask == Mask::kCausal;
  const int64_t prefix = tokens.prefix, all = length > 0 ? prefix + length : 0;
  for (int64_t key0 = 0; key0 < all; key0 += tile) {
    const int64_t count = std::min(tile, all - key0);
    const T *const k = args_.k.data<T>(), *const v = args_.v.data<T>();
    keys_.load(count, [&](int64_t j) { return k + key_offset(args_.k, key0 + j); });
    values_.load(count, [&](int64_t j) { return v + key_offset(args_.v, key0 + j); });
    // Causal queries before the first key of the tile see none of it, nor do queries a window or
    // more after its last key.
    const int64_t first = causal ? std::max<int64_t>(0, key0 - prefix) : 0;
    const int64_t last = args_.desc.window > 0
                             ? std::min(length_, key0 + count - 1 + args_.desc.window - prefix)
                             : length_;
    for (int64_t row0 = first * group / kBlockRows * kBlockRows; row0 < last * group;
         row0 += kBlockRows)
      block_step(row0, key0);
  }
}

template <class T>
void Backward<T>::load_block(int64_t row0, int64_t key0) {
  const int64_t group = sizes_.group(), dim = sizes_.head_dim;
  const T *const q = args_.q.data<T>(), *const dout = args_.dout.data<T>();
  const T *const o = args_.o.data<T>(), *const lse = args_.lse.data<T>();
  const int64_t q_stride = args_.q.strides()[0], dq_stride = args_.dq.tensor.strides()[0];
  T* const dq = args_.dq.tensor.data<T>();
  int64_t offsets[kBlockRows];  // into o and dout
  count_ = std::min(kBlockRows, length_ * group - row0);
  int64_t query = row0 / group, in_group = row0 % group;
  for (int64_t r = 0; r < count_; ++r) {
    token_[r] = tokens_.begin + query;
    head_[r] = kv_head_ * group + in_group;
    const int64_t offset = offsets[r] = (token_[r] * sizes_.heads + head_[r]) * dim;
    dq_[r] = dq + token_[r] * dq_stride + head_[r] * dim;
    delta_[r] = lane_sum<T>(dim, [&](int64_t d) { return dout[offset + d] * o[offset + d]; });
    lse_log2_[r] = lse[head_[r] * sizes_.tokens + token_[r]] * static_cast<T>(kLog2e);
    const VisibleKeys visible = visible_keys(args_.desc, tokens_.prefix + query, length_);
    first_[r] = std::clamp<int64_t>(visible.first - key0, 0, keys_.count);
    last_[r] = std::clamp<int64_t>(visible.last - key0, 0, keys_.count);
    if (++in_group == group) {
      in_group = 0;
      ++query;
    }
  }
  q_.load(count_, [&](int64_t r) { return q + token_[r] * q_stride + head_[r] * dim; });
  dout_.load(count_, [&](int64_t r) { return dout + offsets[r]; });
}

template <class T>
void Backward<T>::block_step(int64_t row0, int64_t key0) {
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
template <class T>
void Backward<T>::scores(const RowTile<T>& rows, const KeyTile<T>& keys, Tensor& out) {
  MatmulRow<T> matmul_rows[kBlockRows];
  for (int64_t r = 0; r < count_; ++r)
    matmul_rows[r] = {rows.rows[static_cast<size_t>(r)], out.data<T>() + r * out.dim(1), 0,
                      sizes_.head_dim, first_[r] < last_[r] ? round_up(last_[r], kKeyRun) : 0};
  chain_matmul<T>({matmul_rows, static_cast<size_t>(count_)}, 1, keys.transposed.data(),
                  Grad::kOverwrite);
}

// Turns S in p_ into P after dropout, and dO V^T in ds_ into dS.
template <class T>
void Backward<T>::probabilities(int64_t row, int64_t key0) {
  T *const p = p_.data<T>() + row * p_.dim(1), *const ds = ds_.data<T>() + row * p_.dim(1);
  const T c = static_cast<T>(softmax_scale(args_.desc, sizes_.head_dim) * kLog2e);
  const T minus = -lse_log2_[row], delta = delta_[row], scale = scale_;
  const int64_t end = round_up(last_[row], kKeyRun);
#pragma omp simd simdlen(kVectorLanes <T>)
  for (int64_t j = 0; j < end; ++j) p[j] = vexp2(std::fma(p[j], c, minus));
  if (dropout_.spec.p == 0) {
#pragma omp simd simdlen(kVectorLanes <T>)
    for (int64_t j = 0; j < end; ++j) ds[j] = p[j] * (ds[j] - delta) * scale;
    return;
  }
  T* const factors = factors_.data<T>();
  dropout_.fill(factors, token_[row], head_[row], key0, last_[row]);
  for (int64_t j = first_[row]; j < last_[row]; ++j) {
    ds[j] = p[j] * (ds[j] * factors[j] - delta) * scale;
    p[j] *= factors[j];
  }
}

// grad[key j] += sum over the rows that see it of weights[row][j] rows[row]: dV from P and dO, dK
// from dS and Q.
template <class T>
void Backward<T>::add_transposed(const Tensor& weights, const T* const* rows, Tensor& grad,
                                 int64_t row0, int64_t key0) {
  const int64_t group = sizes_.group();
  const bool causal = args_.desc.mask == Mask::kCausal;
  const T* const columns = weights.data<T>();
  T* const grads = grad.data<T>();
  MatmulRow<T> matmul_rows[128];
  for (int64_t j = 0; j < keys_.count; ++j) {
    const int64_t key = key0 + j, window = args_.desc.window;
    const int64_t query = key - tokens_.prefix;  // at this position; negative within the prefix
    const int64_t first = causal ? std::clamp<int64_t>(query * group - row0, 0, count_) : 0;
    const int64_t last =
        window > 0 ? std::clamp<int64_t>((query + window) * group - row0, 0, count_) : count_;
    matmul_rows[j] = {columns + j, grads + key_offset(grad, key), first, last, sizes_.head_dim};
  }
  chain_matmul<T>({matmul_rows, static_cast<size_t>(keys_.count)}, weights.dim(1), rows,
                  Grad::kAccumulate);
}

template <class T>
void backward(const AttentionBackward& args, const PackedSizes& sizes) {
  const int32_t* const cu = args.cu_seqlens.data<int32_t>();
  const std::vector<KeyTokens> keys =
      key_tokens(args.cu_seqlens, args.desc.prefixes, "attention_backward");
  std::vector<int64_t> prefix_groups;  // first sequence of each: the prefix of those that follow it
  int64_t cost = 0;
  for (int64_t s = 0; s < sizes.sequences; ++s) {
    const KeyTokens& tokens = keys[static_cast<size_t>(s)];
    const int64_t length = cu[s + 1] - cu[s];
    cost += 5 * length * (2 * tokens.prefix + length) * sizes.heads * sizes.head_dim / 2;
    if (tokens.prefix == 0) prefix_groups.push_back(s);
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
    Backward<T> backward(args);
    for (int64_t i = first; i < last; ++i) {
      const auto prefix_group = static_cast<size_t>(i / sizes.kv_heads);
      for (int64_t s = prefix_groups[prefix_group]; s < prefix_groups[prefix_group + 1]; ++s)
        backward.run(keys[static_cast<size_t>(s)], cu[s + 1] - cu[s], i % sizes.kv_heads);
    }
  });
}

}  // namespace

void attention_backward(const AttentionBackward& args) {
  const PackedSizes sizes = packed_sizes(args.q, args.k, args.cu_seqlens);
  check_cu_seqlens(args.cu_seqlens, sizes.tokens, "attention_backward");
  dispatch_float(args.q.dtype(), "attention_backward",
                 [&]<class T>() { backward<T>(args, sizes); });
}

}  // namespace cohort::kernels::cpu
