// The paged key/value cache on the CPU: writing it, and attention over it. Work items are runs of
// tokens of one sequence, per key head; each row goes through the same routine as in training.
#include "kernels/attention/attend_cpu.h"
#include "kernels/cuda_dispatch.h"

namespace cohort::kernels {

COHORT_DECLARE_CUDA(paged_kv_write);
COHORT_DECLARE_CUDA(attention_paged);

namespace {

using namespace attention;

struct CacheSizes {
  int64_t blocks, block_tokens, kv_heads, head_dim, sequences, max_blocks;
};

CacheSizes check_cache(const PagedKV& cache, const char* op) {
  COHORT_CHECK(cache.k.rank() == 4 && cache.block_table.rank() == 2, "[", op,
               "] expected a cache [blocks, block_tokens, Hkv, D] and a block table [S, "
               "max_blocks], got ",
               cache.k.str(), " and ", cache.block_table.str());
  const CacheSizes sizes{cache.k.dim(0), cache.k.dim(1),           cache.k.dim(2),
                         cache.k.dim(3), cache.block_table.dim(0), cache.block_table.dim(1)};
  COHORT_CHECK(sizes.block_tokens >= 1 && sizes.kv_heads >= 1 && sizes.head_dim >= 1, "[", op,
               "] expected a cache with at least one token per block, head and dim, got ",
               cache.k.str());
  const Device device = cache.k.device();
  COHORT_CHECK(device.is_cpu() || sizes.head_dim <= kMaxCudaHeadDim, "[", op,
               "] expected a head dim of at most ", kMaxCudaHeadDim, " on a CUDA device, got ",
               cache.k.str());
  check_tensor(cache.k, cache.k.shape(), cache.k.dtype(), op, "cache.k", device);
  check_tensor(cache.v, cache.k.shape(), cache.k.dtype(), op, "cache.v", device);
  check_tensor(cache.block_table, cache.block_table.shape(), DType::kI32, op, "cache.block_table",
               device);
  return sizes;
}

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

// Tokens [begin, end) are of one sequence.
struct PagedItem {
  int64_t begin, end, kv_head, cost;
};

std::vector<PagedItem> paged_items(const CacheSizes& sizes, int64_t tokens, int64_t group,
                                   const int32_t* sequences, const int32_t* positions) {
  const int64_t most = std::max<int64_t>(kQueryRows / group, 1);
  std::vector<PagedItem> items;
  for (int64_t begin = 0, end = 0; begin < tokens; begin = end) {
    int64_t keys = 0;
    for (end = begin; end < tokens && end - begin < most && sequences[end] == sequences[begin];
         ++end)
      keys = std::max<int64_t>(keys, positions[end] + 1);
    // Gathering a key costs about as much as four rows' work on it.
    const int64_t cost = 2 * keys * ((end - begin) * group + 4) * sizes.head_dim;
    for (int64_t h = 0; h < sizes.kv_heads; ++h) items.push_back({begin, end, h, cost});
  }
  return items;
}

template <class T>
void paged(Tensor& o, const Tensor& q, const PagedKV& cache, const int32_t* sequences,
           const int32_t* positions, const CacheSizes& sizes, double scale) {
  const int64_t heads = q.dim(1), group = heads / sizes.kv_heads, dim = sizes.head_dim;
  const auto items = paged_items(sizes, q.dim(0), group, sequences, positions);
  T* const o_data = o.data<T>();
  const T *const q_data = q.data<T>(), *const k_data = cache.k.data<T>();
  const T* const v_data = cache.v.data<T>();
  const int32_t* const table = cache.block_table.data<int32_t>();
  parallel_items(items, [&](int64_t first, int64_t last) {
    Attend<T> attend(dim, scale, {});
    for (int64_t i = first; i < last; ++i) {
      const PagedItem& item = items[static_cast<size_t>(i)];
      KeyRows<T> keys{.data = k_data + item.kv_head * dim,
                      .stride = sizes.kv_heads * dim,
                      .blocks = table + sequences[item.begin] * sizes.max_blocks,
                      .block_tokens = sizes.block_tokens};
      KeyRows<T> values = keys;
      values.data = v_data + item.kv_head * dim;
      QueryRow<T> rows[kQueryRows];
      int64_t count = 0;
      const auto flush = [&] {
        attend.run({rows, static_cast<size_t>(count)}, keys, values);
        count = 0;
      };
      for (int64_t t = item.begin; t < item.end; ++t)
        for (int64_t head = item.kv_head * group; head < (item.kv_head + 1) * group; ++head) {
          const int64_t offset = (t * heads + head) * dim;
          rows[count++] = {.q = q_data + offset,
                           .o = o_data + offset,
                           .lse = nullptr,
                           .visible = positions[t] + 1,
                           .token = t,
                           .head = head};
          if (count == kQueryRows) flush();
        }
      if (count > 0) flush();
    }
  });
}

}  // namespace

void paged_kv_write(PagedKV& cache, const Tensor& k, const Tensor& v, const Tensor& sequences,
                    const Tensor& positions) {
  const char* op = "paged_kv_write";
  const CacheSizes sizes = check_cache(cache, op);
  const int64_t tokens = sequences.numel();
  const Device device = cache.k.device();
  check_tensor(k, {tokens, sizes.kv_heads, sizes.head_dim}, cache.k.dtype(), op, "k", device);
  check_tensor(v, {tokens, sizes.kv_heads, sizes.head_dim}, cache.k.dtype(), op, "v", device);
  check_tensor(sequences, {tokens}, DType::kI32, op, "sequences", device);
  check_tensor(positions, {tokens}, DType::kI32, op, "positions", device);
  COHORT_FORWARD_TO_CUDA(k, paged_kv_write(cache, k, v, sequences, positions));
  const int32_t *const sequence = sequences.data<int32_t>(),
                       *const position = positions.data<int32_t>(),
                       *const table = cache.block_table.data<int32_t>();
  const auto block = [&](int64_t t) {
    return sequence[t] * sizes.max_blocks + position[t] / sizes.block_tokens;
  };
  for (int64_t t = 0; t < tokens; ++t) {
    check_address(sizes, t, sequence[t], position[t], op);
    check_block(sizes, sequence[t], position[t] / sizes.block_tokens, table[block(t)], op);
  }
  const size_t bytes =
      static_cast<size_t>(sizes.kv_heads * sizes.head_dim) * dtype_size(cache.k.dtype());
  char *const k_to = static_cast<char*>(cache.k.raw()), *const v_to =
                                                            static_cast<char*>(cache.v.raw());
  const char *const k_from = static_cast<const char*>(k.raw()), *const v_from =
                                                                    static_cast<const char*>(
                                                                        v.raw());
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t slot = table[block(t)] * sizes.block_tokens + position[t] % sizes.block_tokens;
    const size_t to = static_cast<size_t>(slot) * bytes, from = static_cast<size_t>(t) * bytes;
    std::memcpy(k_to + to, k_from + from, bytes);
    std::memcpy(v_to + to, v_from + from, bytes);
  }
}

void attention_paged(Tensor& o, const Tensor& q, const PagedKV& cache, const Tensor& sequences,
                     const Tensor& positions, const AttentionDesc& desc) {
  const char* op = "attention_paged";
  const CacheSizes sizes = check_cache(cache, op);
  COHORT_CHECK(desc.mask == Mask::kCausal && desc.dropout.p == 0, "[", op,
               "] expected a causal mask and no dropout");
  COHORT_CHECK(q.rank() == 3 && q.dim(1) >= 1 && q.dim(1) % sizes.kv_heads == 0, "[", op,
               "] expected q [T, H, D] with H a multiple of ", sizes.kv_heads, ", got ", q.str());
  const int64_t tokens = q.dim(0);
  const Device device = cache.k.device();
  check_tensor(q, {tokens, q.dim(1), sizes.head_dim}, cache.k.dtype(), op, "q", device);
  check_tensor(o, q.shape(), q.dtype(), op, "o", device);
  check_tensor(sequences, {tokens}, DType::kI32, op, "sequences", device);
  check_tensor(positions, {tokens}, DType::kI32, op, "positions", device);
  check_scale(desc, op);
  COHORT_FORWARD_TO_CUDA(q, attention_paged(o, q, cache, sequences, positions, desc));
  const int32_t *const sequence = sequences.data<int32_t>(),
                       *const position = positions.data<int32_t>(),
                       *const table = cache.block_table.data<int32_t>();
  // Blocks of a sequence below this are known to be good.
  int64_t checked = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    check_address(sizes, t, sequence[t], position[t], op);
    if (t > 0 && sequence[t] != sequence[t - 1]) checked = 0;
    for (; checked <= position[t] / sizes.block_tokens; ++checked)
      check_block(sizes, sequence[t], checked, table[sequence[t] * sizes.max_blocks + checked], op);
  }
  const double scale = softmax_scale(desc, sizes.head_dim);
  dispatch_float(q.dtype(), op,
                 [&]<class T>() { paged<T>(o, q, cache, sequence, position, sizes, scale); });
}

}  // namespace cohort::kernels
