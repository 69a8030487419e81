#include "nn/mixing.h"

namespace cohort {

Variable PackedMixing::attention(AttentionCall call) const {
  Variable& qkv = call.qkv;
  call.desc.prefixes = batch_.prefixes;
  if (call.rope_table.defined() || call.kv_scales.defined())
    qkv =
        rope(std::move(qkv), batch_.positions, call.rope_table, call.num_kv_heads, call.kv_scales);
  return cohort::attention(qkv, call.num_kv_heads, batch_.cu_seqlens, call.desc, call.padding,
                           call.terms);
}

Variable PackedMixing::gated_delta(const DeltaCall& call) const {
  return cohort::gated_delta(call.in, call.dims, batch_.cu_seqlens, {.prefixes = batch_.prefixes});
}

Variable CachedMixing::attention(AttentionCall call) const {
  kernels::PagedKV pages = cache_.layer(call.layer);
  pages.scales = call.kv_scales;
  const kernels::AttentionDesc desc = call.terms.added_to(call.desc);
  Tensor& qkv = call.qkv.value();
  const Tensor q = qkv.narrow(1, 0, qkv.dim(1) - 2 * call.num_kv_heads);
  const Tensor rows = empty_rows(q.select(1, 0), q.dim(1) * q.dim(2), call.padding);
  Tensor o = rows.reshape(q.shape());
  const Tensor& table = call.rope_table;
  if (step_ == CachedStep::kDecode) {
    kernels::attention_decode({o, pages, qkv, sequences_, positions_, table, desc});
  } else {
    kernels::rope_kv_write({pages, qkv, sequences_, positions_, table});
    kernels::attention_paged({o, q, pages, sequences_, positions_, desc});
  }
  return Variable(rows);
}

Variable CachedMixing::gated_delta(const DeltaCall& /*call*/) const {
  throw Error("[mixing] there is no cache of delta layers");
}

}  // namespace cohort
