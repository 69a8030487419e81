#include "kernels/attention/attention.h"

#include "core/sizes.h"
#include "core/with_cuda.h"
#include "kernels/arguments.h"
#include "kernels/attention/score_rule.h"
#include "kernels/rope.h"

namespace cohort::kernels {
namespace {

void check_tile_mask(ArgumentCheck& check, const Tensor& tiles) {
  check("i32 [tiles, words] tiles", tiles);
  check.require(check["words"] == ceil_div(check["tiles"], 32),
                "expected tiles of make_tile_mask(), got ", tiles);
}

// Checks the masks and modifications of a call of H heads and S sequences.
void check_desc(ArgumentCheck& check, const AttentionDesc& desc, bool is_int8) {
  const bool causal = desc.mask == Mask::kCausal;
  check.require(desc.scale >= 0 && std::isfinite(desc.scale),
                "expected a scale of at least 0, got ", desc.scale);
  check.require(desc.window >= 0, "expected a window of at least 1, or 0, got ", desc.window);
  check.require(desc.window_right >= -1 && (desc.window_right == -1 || !causal),
                "expected a right window of at least 0 with a full mask, or -1, got ",
                desc.window_right);
  check.require(desc.soft_cap >= 0 && std::isfinite(desc.soft_cap),
                "expected a soft cap above 0, or 0, got ", desc.soft_cap);
  const auto [floor, rate] = desc.distance;
  check.require(floor >= 0 && floor <= 1 && rate >= 0 && std::isfinite(rate),
                "expected a distance factor with a floor in [0, 1] and a rate of at least 0, got ",
                floor, " and ", rate);
  check("accumulate [H] slopes?, sinks?; accumulate [H, 2 R + 1] bias?; i32 [S] prefix_lm?",
        desc.slopes, desc.sinks, desc.bias, desc.prefix_lm);
  check("f32 [heads] fp8_scales?", desc.fp8_scales);
  check.require(!desc.fp8_scales.defined() ||
                    (check["heads"] == check["H"] + 2 * check["Hkv"] && desc.dropout.p == 0),
                "expected fp8_scales [H + 2 Hkv] and no dropout, got ", desc.fp8_scales);
  check("f32 [T, H] q_scales?; f32 [T, Hkv] k_scales?", desc.q_scales, desc.k_scales);
  check.require(desc.q_scales.defined() == is_int8 && desc.k_scales.defined() == is_int8,
                "expected q_scales and k_scales with q and k in i8, and only then");
  check.require(
      !is_int8 || (PlainRule<float>::applies(desc, INT64_MAX) && !desc.fp8_scales.defined()),
      "int8 attention has a causal or full mask only: no window, dropout, prefixes, "
      "prefix_lm, tiles, soft cap, distance factor, slopes, bias, sinks or fp8_scales");
  if (desc.prefix_lm.defined())
    check.require(causal && desc.window == 0 && !desc.prefixes.defined() && !desc.tiles.defined(),
                  "expected a causal mask, no window, shared prefixes or tiles with prefix_lm");
  if (const Tensor& tiles = desc.tiles; tiles.defined()) {
    check_tile_mask(check, tiles);
    check.require(!desc.prefixes.defined(), "expected no shared prefixes with tiles");
  }
}

void check_head_dim(const ArgumentCheck& check, const Tensor& t) {
  check.require(t.dim(-1) >= 1, "expected a head dim of at least 1, got ", t);
  check.require(t.device().is_cpu() || t.dim(-1) <= kMaxCudaHeadDim,
                "expected a head dim of at most ", kMaxCudaHeadDim, " on a CUDA device, got ", t);
}

// Checks common to the forward and the backward on packed sequences.
template <class Args>
ArgumentCheck check_packed(ArgumentCheck check, const Args& args) {
  if (args.q.dtype() == DType::kI8)
    check("i8 view [T, H, D] q; i8 view [T, Hkv, D] k", args.q, args.k);
  else
    check("view [T, H, D] q; view [T, Hkv, D] k", args.q, args.k);
  check("view [T, Hkv, D] v; i32 [S + 1] cu_seqlens", args.v, args.cu_seqlens);
  check_head_dim(check, args.q);
  check.require(check["Hkv"] >= 1 && check["H"] >= 1 && check["H"] % check["Hkv"] == 0,
                "expected query heads to be a multiple of key heads, got ", check["H"], " and ",
                check["Hkv"]);
  check.require(check["S"] >= 1 || check["T"] == 0,
                "expected cu_seqlens [S + 1] with a sequence for ", check["T"], " tokens, got ",
                args.cu_seqlens);
  check("view [T, H, D] o; accumulate [H, T] lse; i32 [S, 2] prefixes?", args.o, args.lse,
        args.desc.prefixes);
  check_desc(check, args.desc, args.q.dtype() == DType::kI8);
  check_dropout(check, args.desc.dropout);
  if (args.desc.prefixes.defined())
    check.require(args.desc.mask == Mask::kCausal && args.desc.dropout.p == 0,
                  "expected a causal mask and no dropout with prefixes");
  return check;
}

// tokens: queries, or all of qkv.
void check_cache(ArgumentCheck& check, const PagedKV& cache, const Tensor& tokens) {
  if (cache.k.dtype() == DType::kE4M3) {
    check("e4m3 [blocks, block_tokens, Hkv, D] cache.k, cache.v", cache.k, cache.v);
    check.require(cache.scales.defined() && check["block_tokens"] % 16 == 0 &&
                      (check["D"] == 64 || check["D"] == 128 || check["D"] == 256),
                  "expected a cache in e4m3 to have scales, blocks of a multiple of 16 tokens, and "
                  "heads of 64, 128 or 256, got ",
                  cache.k);
    check.require(tokens.dtype() == DType::kBF16, "expected bf16 with a cache in e4m3, got ",
                  tokens);
  } else {
    check("[blocks, block_tokens, Hkv, D] cache.k, cache.v", cache.k, cache.v);
    check.require(!cache.scales.defined() || cache.k.dtype() != DType::kBF16,
                  "expected no scales of a cache in bf16, whose rounded keys are in e4m3");
  }
  check("i32 [S, max_blocks] cache.block_table; f32 [N] cache.scales?", cache.block_table,
        cache.scales);
  check.require(check["block_tokens"] >= 1 && check["Hkv"] >= 1,
                "expected a cache with at least one token per block and head, got ", cache.k);
  check_head_dim(check, cache.k);
}

void check_write(ArgumentCheck check, const RopeKvWrite& args) {
  check_cache(check, args.cache, args.qkv);
  check("i32 [T] sequences, positions; [T, heads, D] qkv", args.sequences, args.positions,
        args.qkv);
  check.require(check["heads"] > 2 * check["Hkv"], "expected qkv [T, H + 2 Hkv, D] with ",
                check["Hkv"], " key heads, got ", args.qkv);
  check.require(!args.cache.scales.defined() || check["N"] == 2 * check["Hkv"] ||
                    check["N"] == check["heads"],
                "expected scales of the heads of keys and values, or of all, got ",
                args.cache.scales);
  if (args.table.defined()) check_rope_table(check, args.table);
}

void check_paged(ArgumentCheck check, const AttentionPaged& args) {
  check.require(
      args.desc.mask == Mask::kCausal && args.desc.dropout.p == 0 && !args.desc.prefix_lm.defined(),
      "expected a causal mask, no prefix_lm and no dropout");
  check_cache(check, args.cache, args.q);
  check("strided [T, H, D] q, o; i32 [T] sequences, positions", args.q, args.o, args.sequences,
        args.positions);
  check.require(check["H"] >= 1 && check["H"] % check["Hkv"] == 0,
                "expected q [T, H, D] with H a multiple of ", check["Hkv"], ", got ", args.q);
  check_desc(check, args.desc, args.q.dtype() == DType::kI8);
  const int64_t scales = args.cache.scales.numel(), kv_heads = 2 * check["Hkv"];
  check.require(args.desc.fp8_scales.defined() ? scales == check["H"] + kv_heads
                                               : scales == 0 || scales == kv_heads,
                "expected cache.scales of all heads with fp8_scales, and else of keys and values, "
                "got ",
                args.cache.scales);
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
  ArgumentCheck check("transpose_tile_mask");
  check_tile_mask(check, args.from);
  check("i32 [tiles, words] to", args.to);
  on_device<cpu::transpose_tile_mask, cuda::transpose_tile_mask>(args.from.device(), args);
}

void attention_forward(const AttentionForward& args) {
  check_packed(ArgumentCheck("attention_forward"), args);
  const Device device = args.q.device();
  if (device.is_cuda() && args.k.strides()[0] != args.v.strides()[0]) {
    // The CUDA kernels use one token stride for keys and values.
    const Tensor k = args.k.contiguous(), v = args.v.contiguous();
    return attention_forward({args.o, args.lse, args.q, k, v, args.cu_seqlens, args.desc});
  }
  on_device<cpu::attention_forward, cuda::attention_forward>(device, args);
}

void attention_backward(const AttentionBackward& args) {
  ArgumentCheck check = check_packed(ArgumentCheck("attention_backward"), args);
  check("view [T, H, D] dq, dout; view [T, Hkv, D] dk, dv", args.dq, args.dout, args.dk, args.dv);
  check.require(
      (!args.dbias || args.desc.bias.defined()) && (!args.dsinks || args.desc.sinks.defined()),
      "expected no dbias or dsinks of a call without the term");
  if (args.dbias) check("accumulate [H, 2 R + 1] dbias", *args.dbias);
  if (args.dsinks) check("accumulate [H] dsinks", *args.dsinks);
  AttentionBackward call = args;
  if (const Tensor& tiles = args.desc.tiles; tiles.defined()) {
    call.desc.tiles_by_key = Tensor::empty_like(tiles);
    transpose_tile_mask({.to = call.desc.tiles_by_key, .from = tiles});
  }
  on_device<cpu::attention_backward, cuda::attention_backward>(args.q.device(), call);
}

void rope_kv_write(const RopeKvWrite& args) {
  check_write(ArgumentCheck("rope_kv_write"), args);
  on_device<cpu::rope_kv_write, cuda::rope_kv_write>(args.cache.k.device(), args);
}

void attention_paged(const AttentionPaged& args) {
  check_paged(ArgumentCheck("attention_paged"), args);
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
  check_write(ArgumentCheck(kOp), write);
  const int64_t heads = args.qkv.dim(1) - 2 * args.cache.k.dim(2);
  const Tensor q = args.qkv.narrow(1, 0, heads);
  const AttentionPaged paged{.o = args.o,
                             .q = q,
                             .cache = args.cache,
                             .sequences = args.sequences,
                             .positions = args.positions,
                             .desc = args.desc};
  check_paged(ArgumentCheck(kOp), paged);
  if constexpr (kWithCuda)
    if (device.is_cuda() && !is_dry_run() && cuda::attention_decode(args)) return;
  on_device<cpu::rope_kv_write, cuda::rope_kv_write>(device, write);
  on_device<cpu::attention_paged, cuda::attention_paged>(device, paged);
}

}  // namespace cohort::kernels
