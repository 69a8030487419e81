// Paged key/value cache on the CPU: writes, and attention over it. Work items are runs of tokens of
// one sequence, per key head; each row runs through the same routine as in training.
#include "kernels/attention/cpu/flash_attention.h"
#include "kernels/cpu/reduce.h"
#include "kernels/cpu/rotate.h"

namespace cohort::kernels::cpu {

namespace {

using namespace attention;

struct CacheSizes {
  int64_t blocks, block_tokens, kv_heads, head_dim, sequences, max_blocks;

  explicit CacheSizes(const PagedKV& cache)
      : blocks(cache.k.dim(0)),
        block_tokens(cache.k.dim(1)),
        kv_heads(cache.k.dim(2)),
        head_dim(cache.k.dim(3)),
        sequences(cache.block_table.dim(0)),
        max_blocks(cache.block_table.dim(1)) {}
};

bool is_idle(int32_t sequence, int32_t position) {
  return sequence < 0 || position < 0;
}

// Throws unless sequence and position of the non-idle token t are inside the block table.
void check_address(const CacheSizes& sizes, int64_t t, int64_t sequence, int64_t position,
                   const char* op) {
  COHORT_CHECK(sequence < sizes.sequences, "[", op, "] token ", t,
               ": expected a sequence from 0 to ", sizes.sequences - 1, ", got ", sequence);
  COHORT_CHECK(position < sizes.max_blocks * sizes.block_tokens, "[", op, "] token ", t,
               ": position ", position, " of sequence ", sequence,
               " is beyond its block table: ", sizes.max_blocks, " blocks of ", sizes.block_tokens,
               " tokens");
}

void check_block(const CacheSizes& sizes, int64_t sequence, int64_t index, int32_t block,
                 const char* op) {
  COHORT_CHECK(block >= 0 && block < sizes.blocks, "[", op, "] block_table[", sequence, ", ", index,
               "]: expected a block from 0 to ", sizes.blocks - 1, " for position ",
               index * sizes.block_tokens, ", got ", block);
}

// Throws if a query token or one of its keys is not in the block table.
void check_reads(const AttentionPaged& args, const CacheSizes& sizes, const char* op) {
  const auto* const sequence = args.sequences.data<int32_t>();
  const auto* const position = args.positions.data<int32_t>();
  const auto* const table = args.cache.block_table.data<int32_t>();
  // Block table entries of the sequence below this index have been checked.
  int64_t checked = 0;
  for (int64_t t = 0; t < args.q.dim(0); ++t) {
    if (is_idle(sequence[t], position[t])) continue;
    check_address(sizes, t, sequence[t], position[t], op);
    if (t > 0 && sequence[t] != sequence[t - 1]) checked = 0;
    for (; checked <= position[t] / sizes.block_tokens; ++checked)
      check_block(sizes, sequence[t], checked, table[sequence[t] * sizes.max_blocks + checked], op);
  }
}

// Tokens [begin, end) of one sequence, with one key head: at most kQueryRows rows, or one
// token.
struct PagedItem {
  int64_t begin, end, kv_head;
};

template <class T>
void paged(const AttentionPaged& args, const CacheSizes& sizes) {
  const DropoutRule<T> rule(args.desc, sizes.head_dim);
  const int64_t tokens = args.q.dim(0), heads = args.q.dim(1), dim = sizes.head_dim;
  const int64_t q_stride = args.q.strides()[0], o_stride = args.o.strides()[0];
  const int64_t group = heads / sizes.kv_heads,
                max_tokens = std::max<int64_t>(kQueryRows / group, 1);
  const int32_t *const sequences = args.sequences.data<int32_t>(),
                       *const positions = args.positions.data<int32_t>(),
                       *const table = args.cache.block_table.data<int32_t>();
  const T* const q = args.q.data<T>();
  T* const o = args.o.data<T>();
  std::vector<PagedItem> items;
  int64_t cost = 0;
  for (int64_t begin = 0, end = 0; begin < tokens; begin = end) {
    end = begin + 1;
    if (is_idle(sequences[begin], positions[begin])) {
      std::fill_n(o + begin * o_stride, heads * dim, T{0});
      continue;
    }
    while (end < tokens && end - begin < max_tokens && sequences[end] == sequences[begin] &&
           positions[end] >= 0)
      ++end;
    // Gathering a key costs about as much as processing it for four rows.
    cost += 2 * positions[end - 1] * ((end - begin) * heads + 4 * sizes.kv_heads) * dim;
    for (int64_t h = 0; h < sizes.kv_heads; ++h) items.push_back({begin, end, h});
  }
  parallel_items(items.size(), cost, [&](int64_t first, int64_t last) {
    FlashAttention<DropoutRule<T>> attention(dim, rule, args.desc.fp8_scales.defined());
    std::vector<QueryRow<T>> rows;
    for (int64_t i = first; i < last; ++i) {
      const auto [begin, end, kv_head] = items[static_cast<size_t>(i)];
      KeyRows<T> keys{.data = args.cache.k.data<T>() + kv_head * dim,
                      .stride = sizes.kv_heads * dim,
                      .blocks = table + sequences[begin] * sizes.max_blocks,
                      .block_tokens = sizes.block_tokens};
      KeyRows<T> values = keys;
      values.data = args.cache.v.data<T>() + kv_head * dim;
      rows.clear();
      for (int64_t t = begin; t < end; ++t) {
        const int64_t position = positions[t];
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
          rows.push_back({.q = q + t * q_stride + head * dim,
                          .o = o + t * o_stride + head * dim,
                          .lse = nullptr,
                          .visible = rule.keys_of({position, position + 1}, position + 1),
                          .token = t,
                          .position = position,
                          .head = head,
                          .sequence = sequences[t]});
        }
      }
      const std::span<const QueryRow<T>> all = rows;
      for (size_t r = 0; r < all.size(); r += kQueryRows)
        attention.run(all.subspan(r, std::min<size_t>(kQueryRows, all.size() - r)), keys, values);
    }
  });
}

// Throws if a token has no cache slot or no rotary angles.
void check_writes(const RopeKvWrite& args, const CacheSizes& sizes) {
  constexpr const char* kOp = "rope_kv_write";
  const int32_t *const sequence = args.sequences.data<int32_t>(),
                       *const position = args.positions.data<int32_t>(),
                       *const table = args.cache.block_table.data<int32_t>();
  for (int64_t t = 0; t < args.sequences.numel(); ++t) {
    if (is_idle(sequence[t], position[t])) continue;
    check_address(sizes, t, sequence[t], position[t], kOp);
    const int64_t index = position[t] / sizes.block_tokens;
    check_block(sizes, sequence[t], index, table[sequence[t] * sizes.max_blocks + index], kOp);
    COHORT_CHECK(!args.table.defined() || position[t] < args.table.dim(0), "[", kOp, "] position ",
                 position[t], " of token ", t, " is outside the table of ", args.table.dim(0),
                 " positions");
  }
}

template <class T>
void rope_and_write(const RopeKvWrite& args, const CacheSizes& sizes) {
  const int64_t dim = sizes.head_dim, kv_heads = sizes.kv_heads, all_heads = args.qkv.dim(1);
  const int64_t heads = all_heads - 2 * kv_heads;
  const int32_t *const sequence = args.sequences.data<int32_t>(),
                       *const position = args.positions.data<int32_t>(),
                       *const blocks = args.cache.block_table.data<int32_t>();
  T *const qkv = args.qkv.data<T>(), *const keys = args.cache.k.data<T>(),
           *const values = args.cache.v.data<T>();
  const auto rotate_head = [&](T* to, const T* from, int64_t at) {
    rotate(to, from, dim, Rotation<T>(args.table, at, dim));
  };
  for_rows(args.qkv.dim(0), all_heads * dim, [&](int64_t t) {
    if (is_idle(sequence[t], position[t])) return;
    const int64_t block = blocks[sequence[t] * sizes.max_blocks + position[t] / sizes.block_tokens];
    const int64_t slot = block * sizes.block_tokens + position[t] % sizes.block_tokens;
    T *const q = qkv + t * all_heads * dim, *const k = q + heads * dim,
             *const v = k + kv_heads * dim, *const to = keys + slot * kv_heads * dim;
    if (args.table.defined()) {
      for (int64_t h = 0; h < heads; ++h) rotate_head(q + h * dim, q + h * dim, position[t]);
      for (int64_t h = 0; h < kv_heads; ++h) rotate_head(to + h * dim, k + h * dim, position[t]);
    } else {
      std::copy_n(k, kv_heads * dim, to);
    }
    T* const value = values + slot * kv_heads * dim;
    std::copy_n(v, kv_heads * dim, value);
    if (const Tensor& scales = args.cache.scales; scales.defined()) {
      const int64_t queries = scales.numel() - 2 * kv_heads;
      round_heads(q, scales.narrow(0, 0, queries), dim);
      round_heads(to, scales.narrow(0, queries, kv_heads), dim);
      round_heads(value, scales.narrow(0, queries + kv_heads, kv_heads), dim);
    }
  });
}

}  // namespace

void rope_kv_write(const RopeKvWrite& args) {
  const CacheSizes sizes(args.cache);
  check_writes(args, sizes);
  dispatch_float(args.qkv.dtype(), "rope_kv_write",
                 [&]<class T>() { rope_and_write<T>(args, sizes); });
}

void attention_paged(const AttentionPaged& args) {
  constexpr const char* kOp = "attention_paged";
  const CacheSizes sizes(args.cache);
  check_reads(args, sizes, kOp);
  dispatch_float(args.q.dtype(), kOp, [&]<class T>() { paged<T>(args, sizes); });
}

}  // namespace cohort::kernels::cpu
