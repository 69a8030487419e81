#include "kernels/attention/attention.h"

#include "core/sizes.h"
#include "core/with_cuda.h"
#include "kernels/attention/sizes.h"
#include "kernels/rope.h"

namespace cohort::kernels {
namespace {

void check_tile_mask(const Tensor& tiles, const char* op, Device device) {
  COHORT_CHECK(tiles.rank() == 2 && tiles.dim(1) == ceil_div(tiles.dim(0), 32), "[", op,
               "] expected tiles of make_tile_mask(), got ", tiles.str());
  check_tensor(tiles, tiles.shape(), DType::kI32, op, "tiles", device);
}

// Checks the masks and modifications of a call with this many heads and sequences; `device` and
// `dtype`: of the tensors.
void check_desc(const AttentionDesc& desc, int64_t heads, int64_t sequences, DType dtype,
                Device device, const char* op) {
  const bool causal = desc.mask == Mask::kCausal;
  COHORT_CHECK(desc.scale >= 0 && std::isfinite(desc.scale), "[", op,
               "] expected a scale of at least 0, got ", desc.scale);
  COHORT_CHECK(desc.window >= 0, "[", op, "] expected a window of at least 1, or 0, got ",
               desc.window);
  COHORT_CHECK(desc.window_right >= -1 && (desc.window_right == -1 || !causal), "[", op,
               "] expected a right window of at least 0 with a full mask, or -1, got ",
               desc.window_right);
  COHORT_CHECK(desc.soft_cap >= 0 && std::isfinite(desc.soft_cap), "[", op,
               "] expected a soft cap above 0, or 0, got ", desc.soft_cap);
  const auto [floor, rate] = desc.distance;
  COHORT_CHECK(floor >= 0 && floor <= 1 && rate >= 0 && std::isfinite(rate), "[", op,
               "] expected a distance factor with a floor in [0, 1] and a rate of at least 0, got ",
               floor, " and ", rate);
  const DType statistics = accumulate_dtype(dtype);
  const auto check = [&](const Tensor& t, const Shape& shape, DType type, const char* name) {
    if (t.defined()) check_tensor(t, shape, type, op, name, device);
  };
  check(desc.slopes, {heads}, statistics, "slopes");
  check(desc.sinks, {heads}, statistics, "sinks");
  if (desc.bias.defined()) {
    COHORT_CHECK(desc.bias.rank() == 2 && desc.bias.dim(1) % 2 == 1, "[", op,
                 "] expected a relative bias [H, 2 R + 1], got ", desc.bias.str());
    check(desc.bias, {heads, desc.bias.dim(1)}, statistics, "bias");
  }
  if (desc.prefix_lm.defined()) {
    check(desc.prefix_lm, {sequences}, DType::kI32, "prefix_lm");
    COHORT_CHECK(causal && desc.window == 0 && !desc.prefixes.defined() && !desc.tiles.defined(),
                 "[", op,
                 "] expected a causal mask, no window, shared prefixes or tiles with prefix_lm");
  }
  if (desc.tiles.defined()) {
    check_tile_mask(desc.tiles, op, device);
    COHORT_CHECK(!desc.prefixes.defined(), "[", op, "] expected no shared prefixes with tiles");
  }
}

void check_head_dim(const Tensor& t, const char* op) {
  COHORT_CHECK(t.dim(-1) >= 1, "[", op, "] expected a head dim of at least 1, got ", t.str());
  COHORT_CHECK(t.device().is_cpu() || t.dim(-1) <= kMaxCudaHeadDim, "[", op,
               "] expected a head dim of at most ", kMaxCudaHeadDim, " on a CUDA device, got ",
               t.str());
}

void check_dropout(const DropoutSpec& dropout, int64_t tokens, Device device, const char* op) {
  // Random numbers are compared in f32, where a p just below 1 would be 1.
  COHORT_CHECK(dropout.p >= 0 && static_cast<float>(dropout.p) < 1, "[", op,
               "] expected dropout p in [0, 1), got ", dropout.p);
  if (dropout.p == 0) return;
  check_tensor(dropout.sequences, {tokens}, DType::kI64, op, "dropout.sequences", device);
  check_tensor(dropout.positions, {tokens}, DType::kI32, op, "dropout.positions", device);
}

// Checks queries, keys and values of packed sequences.
PackedSizes check_qkv(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens,
                      const char* op) {
  COHORT_CHECK(q.rank() == 3 && k.rank() == 3, "[", op,
               "] expected q [T, H, D] and k [T, Hkv, D], got ", q.str(), " and ", k.str());
  const PackedSizes sizes = packed_sizes(q, k, cu_seqlens);
  check_head_dim(q, op);
  COHORT_CHECK(sizes.kv_heads >= 1 && sizes.heads >= 1 && sizes.heads % sizes.kv_heads == 0, "[",
               op, "] expected query heads to be a multiple of key heads, got ", sizes.heads,
               " and ", sizes.kv_heads);
  const Device device = q.device();
  const Shape keys = {sizes.tokens, sizes.kv_heads, sizes.head_dim};
  check_columns(q, q.shape(), q.dtype(), op, "q", device);
  check_columns(k, keys, q.dtype(), op, "k", device);
  check_columns(v, keys, q.dtype(), op, "v", device);
  COHORT_CHECK(sizes.sequences >= (sizes.tokens > 0 ? 1 : 0), "[", op,
               "] expected cu_seqlens [S + 1] with a sequence for ", sizes.tokens, " tokens, got ",
               cu_seqlens.str());
  check_tensor(cu_seqlens, {sizes.sequences + 1}, DType::kI32, op, "cu_seqlens", device);
  return sizes;
}

// Checks common to the forward and the backward on packed sequences.
template <class Args>
void check_packed(const Args& args, const char* op) {
  const Tensor& q = args.q;
  const PackedSizes sizes = check_qkv(q, args.k, args.v, args.cu_seqlens, op);
  const Device device = q.device();
  check_columns(args.o, q.shape(), q.dtype(), op, "o", device);
  check_tensor(args.lse, {sizes.heads, sizes.tokens}, accumulate_dtype(q.dtype()), op, "lse",
               device);
  check_desc(args.desc, sizes.heads, sizes.sequences, q.dtype(), device, op);
  check_dropout(args.desc.dropout, sizes.tokens, device, op);
  if (args.desc.prefixes.defined()) {
    check_tensor(args.desc.prefixes, {sizes.sequences, 2}, DType::kI32, op, "prefixes", device);
    COHORT_CHECK(args.desc.mask == Mask::kCausal && args.desc.dropout.p == 0, "[", op,
                 "] expected a causal mask and no dropout with prefixes");
  }
}

CacheSizes check_cache(const PagedKV& cache, const char* op) {
  COHORT_CHECK(cache.k.rank() == 4 && cache.block_table.rank() == 2, "[", op,
               "] expected a cache [blocks, block_tokens, Hkv, D] and a block table [S, "
               "max_blocks], got ",
               cache.k.str(), " and ", cache.block_table.str());
  const CacheSizes sizes = cache_sizes(cache);
  COHORT_CHECK(sizes.block_tokens >= 1 && sizes.kv_heads >= 1, "[", op,
               "] expected a cache with at least one token per block and head, got ",
               cache.k.str());
  check_head_dim(cache.k, op);
  const Device device = cache.k.device();
  check_tensor(cache.k, cache.k.shape(), cache.k.dtype(), op, "cache.k", device);
  check_tensor(cache.v, cache.k.shape(), cache.k.dtype(), op, "cache.v", device);
  check_tensor(cache.block_table, cache.block_table.shape(), DType::kI32, op, "cache.block_table",
               device);
  return sizes;
}

void check_write(const RopeKvWrite& args, const char* op) {
  const CacheSizes sizes = check_cache(args.cache, op);
  const Tensor &qkv = args.qkv, &table = args.table;
  const int64_t tokens = args.sequences.numel(), dim = sizes.head_dim;
  COHORT_CHECK(qkv.rank() == 3 && qkv.dim(1) > 2 * sizes.kv_heads, "[", op,
               "] expected qkv [T, H + 2 Hkv, D] with ", sizes.kv_heads, " key heads, got ",
               qkv.str());
  const DType dtype = args.cache.k.dtype();
  const Device device = args.cache.k.device();
  check_tensor(qkv, {tokens, qkv.dim(1), dim}, dtype, op, "qkv", device);
  check_tensor(args.sequences, {tokens}, DType::kI32, op, "sequences", device);
  check_tensor(args.positions, {tokens}, DType::kI32, op, "positions", device);
  if (table.defined()) check_rope_table(table, dim, accumulate_dtype(dtype), op, device);
}

void check_paged(const AttentionPaged& args, const char* op) {
  COHORT_CHECK(
      args.desc.mask == Mask::kCausal && args.desc.dropout.p == 0 && !args.desc.prefix_lm.defined(),
      "[", op, "] expected a causal mask, no prefix_lm and no dropout");
  const CacheSizes sizes = check_cache(args.cache, op);
  const Tensor& q = args.q;
  COHORT_CHECK(q.rank() == 3 && q.dim(1) >= 1 && q.dim(1) % sizes.kv_heads == 0, "[", op,
               "] expected q [T, H, D] with H a multiple of ", sizes.kv_heads, ", got ", q.str());
  const int64_t tokens = q.dim(0);
  const Device device = args.cache.k.device();
  check_rows(q, {tokens, q.dim(1), sizes.head_dim}, args.cache.k.dtype(), op, "q", device);
  check_rows(args.o, q.shape(), q.dtype(), op, "o", device);
  check_tensor(args.sequences, {tokens}, DType::kI32, op, "sequences", device);
  check_tensor(args.positions, {tokens}, DType::kI32, op, "positions", device);
  check_desc(args.desc, q.dim(1), sizes.sequences, q.dtype(), device, op);
}

}  // namespace

Tensor make_tile_mask(std::span<const std::pair<int64_t, int64_t>> visible, int64_t tiles,
                      Device device) {
  const int64_t words = ceil_div(tiles, 32);
  Tensor mask = Tensor::zeros({tiles, words}, DType::kI32);
  for (const auto& [query, key] : visible) {
    COHORT_CHECK(query >= 0 && query < tiles && key >= 0 && key < tiles,
                 "[make_tile_mask] expected tiles from 0 to ", tiles - 1, ", got ", query, " and ",
                 key);
    int32_t& word = mask.data<int32_t>()[query * words + key / 32];
    word = static_cast<int32_t>(static_cast<uint32_t>(word) | 1u << key % 32);
  }
  return mask.to(device);
}

void transpose_tile_mask(const TileMaskTranspose& args) {
  constexpr const char* kOp = "transpose_tile_mask";
  const Device device = args.from.device();
  check_tile_mask(args.from, kOp, device);
  check_tensor(args.to, args.from.shape(), DType::kI32, kOp, "to", device);
  on_device<cpu::transpose_tile_mask, cuda::transpose_tile_mask>(device, args);
}

void attention_forward(const AttentionForward& args) {
  check_packed(args, "attention_forward");
  const Device device = args.q.device();
  if (device.is_cuda() && args.k.strides()[0] != args.v.strides()[0]) {
    // The CUDA kernels use one token stride for keys and values.
    const Tensor k = args.k.contiguous(), v = args.v.contiguous();
    return attention_forward({args.o, args.lse, args.q, k, v, args.cu_seqlens, args.desc});
  }
  on_device<cpu::attention_forward, cuda::attention_forward>(device, args);
}

void attention_backward(const AttentionBackward& args) {
  constexpr const char* kOp = "attention_backward";
  check_packed(args, kOp);
  const Tensor& q = args.q;
  const Device device = q.device();
  check_columns(args.dq.tensor, q.shape(), q.dtype(), kOp, "dq", device);
  check_columns(args.dk.tensor, args.k.shape(), q.dtype(), kOp, "dk", device);
  check_columns(args.dv.tensor, args.k.shape(), q.dtype(), kOp, "dv", device);
  check_columns(args.dout, q.shape(), q.dtype(), kOp, "dout", device);
  const auto check_term = [&](const std::optional<GradOut>& grad, const Tensor& term,
                              const char* name) {
    if (!grad) return;
    COHORT_CHECK(term.defined(), "[", kOp, "] expected no ", name, " of a call without the term");
    check_tensor(grad->tensor, term.shape(), term.dtype(), kOp, name, device);
  };
  check_term(args.dbias, args.desc.bias, "dbias");
  check_term(args.dsinks, args.desc.sinks, "dsinks");
  AttentionBackward call = args;
  if (const Tensor& tiles = args.desc.tiles; tiles.defined()) {
    call.desc.tiles_by_key = Tensor::empty_like(tiles);
    transpose_tile_mask({.to = call.desc.tiles_by_key, .from = tiles});
  }
  on_device<cpu::attention_backward, cuda::attention_backward>(device, call);
}

void rope_kv_write(const RopeKvWrite& args) {
  check_write(args, "rope_kv_write");
  on_device<cpu::rope_kv_write, cuda::rope_kv_write>(args.cache.k.device(), args);
}

void attention_paged(const AttentionPaged& args) {
  check_paged(args, "attention_paged");
  on_device<cpu::attention_paged, cuda::attention_paged>(args.cache.k.device(), args);
}

void attention_decode(const AttentionDecode& args) {
  constexpr const char* kOp = "attention_decode";
  const Device device = args.cache.k.device();
  const RopeKvWrite write{.cache = args.cache,
                          .qkv = args.qkv,
                          .sequences = args.sequences,
                          .positions = args.positions,
                          .table = args.table};
  check_write(write, kOp);
  const int64_t heads = args.qkv.dim(1) - 2 * args.cache.k.dim(2);
  const Tensor q = args.qkv.narrow(1, 0, heads);
  const AttentionPaged paged{.o = args.o,
                             .q = q,
                             .cache = args.cache,
                             .sequences = args.sequences,
                             .positions = args.positions,
                             .desc = args.desc};
  check_paged(paged, kOp);
  if constexpr (kWithCuda)
    if (device.is_cuda() && !is_dry_run() && cuda::attention_decode(args)) return;
  on_device<cpu::rope_kv_write, cuda::rope_kv_write>(device, write);
  on_device<cpu::attention_paged, cuda::attention_paged>(device, paged);
}

}  // namespace cohort::kernels
