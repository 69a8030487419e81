// attention_forward on the CPU: (sequence, key head, up to kQueryRows rows) per work item.
#include "kernels/attention/cpu/flash_attention.h"

namespace cohort::kernels::cpu {

namespace {

using namespace attention;

// Run of at most kQueryRows rows of one sequence and key head. Rows are (token, head of the group),
// token major, so that neighbours see nearly the same keys.
struct ForwardItem {
  int64_t sequence, kv_head, row0;
};

template <class T>
void forward(const AttentionForward& args, const PackedSizes& sizes) {
  const int32_t* const cu = args.cu_seqlens.data<int32_t>();
  const int64_t heads = sizes.heads, group = sizes.group(), dim = sizes.head_dim;
  const int64_t q_stride = args.q.strides()[0], kv_stride = args.k.strides()[0];
  const T* const q = args.q.data<T>();
  T *const o = args.o.data<T>(), *const lse = args.lse.data<T>();
  const std::vector<KeyTokens> keys =
      key_tokens(args.cu_seqlens, args.desc.prefixes, "attention_forward");
  std::vector<ForwardItem> items;
  int64_t cost = 0;
  for (int64_t s = 0; s < sizes.sequences; ++s) {
    const int64_t length = cu[s + 1] - cu[s];
    cost += length * (2 * keys[static_cast<size_t>(s)].prefix + length) * heads * dim;
    for (int64_t h = 0; h < sizes.kv_heads; ++h)
      for (int64_t row0 = 0; row0 < length * group; row0 += kQueryRows)
        items.push_back({s, h, row0});
  }
  parallel_items(items.size(), cost, [&](int64_t first, int64_t last) {
    FlashAttention<T> flash(dim, args.desc);
    QueryRow<T> rows[kQueryRows];
    for (int64_t i = first; i < last; ++i) {
      const auto [s, kv_head, row0] = items[static_cast<size_t>(i)];
      const KeyTokens& tokens = keys[static_cast<size_t>(s)];
      const int64_t length = cu[s + 1] - cu[s];
      const int64_t count = std::min(kQueryRows, length * group - row0);
      int64_t query = row0 / group, in_group = row0 % group;
      for (int64_t r = 0; r < count; ++r) {
        const int64_t token = cu[s] + query, head = kv_head * group + in_group;
        rows[r] = {.q = q + token * q_stride + head * dim,
                   .o = o + (token * heads + head) * dim,
                   .lse = lse + head * sizes.tokens + token,
                   .visible = visible_keys(args.desc, tokens.prefix + query, length),
                   .token = token,
                   .head = head};
        if (++in_group == group) {
          in_group = 0;
          ++query;
        }
      }
      flash.run({rows, static_cast<size_t>(count)},
                {.data = args.k.data<T>() + kv_head * dim, .stride = kv_stride, .tokens = tokens},
                {.data = args.v.data<T>() + kv_head * dim, .stride = kv_stride, .tokens = tokens});
    }
  });
}

}  // namespace

void attention_forward(const AttentionForward& args) {
  const PackedSizes sizes = packed_sizes(args.q, args.k, args.cu_seqlens);
  check_cu_seqlens(args.cu_seqlens, sizes.tokens, "attention_forward");
  dispatch_float(args.q.dtype(), "attention_forward", [&]<class T>() { forward<T>(args, sizes); });
}

}  // namespace cohort::kernels::cpu
