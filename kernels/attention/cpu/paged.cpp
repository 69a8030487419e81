// The paged key/value cache on the CPU: writing it, and attention over it. Work items are runs of
// tokens of one sequence, per key head; each row goes through the same routine as in training.
#include "kernels/attention/cpu/attend.h"

namespace cohort::kernels::cpu {

namespace {

using namespace attention;

// Throws unless token t's sequence and position are inside the block table.
void check_address(const CacheSizes& sizes, int64_t t, int64_t sequence, int64_t position,
                   const char* op) {
  COHORT_CHECK(sequence >= 0 && sequence < sizes.sequences, "[", op, "] token ", t,
               ": expected a sequence from 0 to ", sizes.sequences - 1, ", got ", sequence);
  COHORT_CHECK(position >= 0 && position < sizes.max_blocks * sizes.block_tokens, "[", op,
               "] token ", t, ": position ", position, " of sequence ", sequence,
               " is beyond its block table: ", sizes.max_blocks, " blocks of ", sizes.block_tokens,
               " tokens");
}

void check_block(const CacheSizes& sizes, int64_t sequence, int64_t index, int32_t block,
                 const char* op) {
  COHORT_CHECK(block >= 0 && block < sizes.blocks, "[", op, "] block_table[", sequence, ", ", index,
               "]: expected a block from 0 to ", sizes.blocks - 1, " for position ",
               index * sizes.block_tokens, ", got ", block);
}

// Tokens [begin, end), all of one sequence, with one key head: at most kQueryRows rows, or one
// token.
struct PagedItem {
  int64_t begin, end, kv_head;
};

template <class T>
void paged(const AttentionPaged& args, const CacheSizes& sizes) {
  const int64_t tokens = args.q.dim(0), heads = args.q.dim(1), dim = sizes.head_dim;
  const int64_t group = heads / sizes.kv_heads, most = std::max<int64_t>(kQueryRows / group, 1);
  const int32_t *const sequences = args.sequences.data<int32_t>(),
                       *const positions = args.positions.data<int32_t>(),
                       *const table = args.cache.block_table.data<int32_t>();
  const T* const q = args.q.data<T>();
  T* const o = args.o.data<T>();
  std::vector<PagedItem> items;
  int64_t cost = 0;
  for (int64_t begin = 0, end = 0; begin < tokens; begin = end) {
    for (end = begin; end < tokens && end - begin < most && sequences[end] == sequences[begin];)
      ++end;
    // Gathering a key costs about as much as four rows' work on it.
    cost += 2 * positions[end - 1] * ((end - begin) * heads + 4 * sizes.kv_heads) * dim;
    for (int64_t h = 0; h < sizes.kv_heads; ++h) items.push_back({begin, end, h});
  }
  parallel_items(items.size(), cost, [&](int64_t first, int64_t last) {
    Attend<T> attend(dim, args.desc);
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
      for (int64_t t = begin; t < end; ++t)
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
          const int64_t offset = (t * heads + head) * dim;
          rows.push_back({.q = q + offset,
                          .o = o + offset,
                          .lse = nullptr,
                          .visible = visible_keys(args.desc, positions[t], 0),
                          .token = t,
                          .head = head});
        }
      const std::span<const QueryRow<T>> all = rows;
      for (size_t r = 0; r < all.size(); r += kQueryRows)
        attend.run(all.subspan(r, std::min<size_t>(kQueryRows, all.size() - r)), keys, values);
    }
  });
}

}  // namespace

void paged_kv_write(const PagedKvWrite& args) {
  const CacheSizes sizes = cache_sizes(args.cache);
  const int64_t tokens = args.sequences.numel();
  const int32_t *const sequence = args.sequences.data<int32_t>(),
                       *const position = args.positions.data<int32_t>(),
                       *const table = args.cache.block_table.data<int32_t>();
  const auto block = [&](int64_t t) {
    return sequence[t] * sizes.max_blocks + position[t] / sizes.block_tokens;
  };
  for (int64_t t = 0; t < tokens; ++t) {
    check_address(sizes, t, sequence[t], position[t], "paged_kv_write");
    check_block(sizes, sequence[t], position[t] / sizes.block_tokens, table[block(t)],
                "paged_kv_write");
  }
  const size_t bytes =
      static_cast<size_t>(sizes.kv_heads * sizes.head_dim) * dtype_size(args.cache.k.dtype());
  const auto write = [&](Tensor& cache, const Tensor& rows) {
    char* const to = static_cast<char*>(cache.raw());
    const char* const from = static_cast<const char*>(rows.raw());
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t slot = table[block(t)] * sizes.block_tokens + position[t] % sizes.block_tokens;
      std::memcpy(to + static_cast<size_t>(slot) * bytes, from + static_cast<size_t>(t) * bytes,
                  bytes);
    }
  };
  write(args.cache.k, args.k);
  write(args.cache.v, args.v);
}

void attention_paged(const AttentionPaged& args) {
  constexpr const char* kOp = "attention_paged";
  const CacheSizes sizes = cache_sizes(args.cache);
  const int32_t *const sequence = args.sequences.data<int32_t>(),
                       *const position = args.positions.data<int32_t>(),
                       *const table = args.cache.block_table.data<int32_t>();
  // Blocks of a sequence below this are known to be good.
  int64_t checked = 0;
  for (int64_t t = 0; t < args.q.dim(0); ++t) {
    check_address(sizes, t, sequence[t], position[t], kOp);
    if (t > 0 && sequence[t] != sequence[t - 1]) checked = 0;
    for (; checked <= position[t] / sizes.block_tokens; ++checked)
      check_block(sizes, sequence[t], checked, table[sequence[t] * sizes.max_blocks + checked],
                  kOp);
  }
  dispatch_float(args.q.dtype(), kOp, [&]<class T>() { paged<T>(args, sizes); });
}

}  // namespace cohort::kernels::cpu
