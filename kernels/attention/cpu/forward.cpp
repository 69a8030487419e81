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
  const DropoutRule<T> rule(args.desc, sizes.head_dim);
  const int64_t heads = sizes.heads, group = sizes.group(), dim = sizes.head_dim;
  // Integers are exact in T.
  const Tensor queries = args.q.to(dtype_of<T>), keys = args.k.to(dtype_of<T>);
  const auto *q_scales = pointer<float>(args.desc.q_scales),
             *k_scales = pointer<float>(args.desc.k_scales);
  const Shape &q_strides = queries.strides(), &o_strides = args.o.strides();
  const T* const q = queries.data<T>();
  T *const o = args.o.data<T>(), *const lse = args.lse.data<T>();
  const PackedSequences sequences(args.cu_seqlens, args.desc);
  std::vector<ForwardItem> items;
  int64_t cost = 0;
  for (int64_t s = 0; s < sizes.sequences; ++s) {
    const PackedSequence sequence = sequences[s];
    cost += sequence.visible_keys() * heads * dim;
    for (int64_t h = 0; h < sizes.kv_heads; ++h)
      for (int64_t row0 = 0; row0 < sequence.length * group; row0 += kQueryRows)
        items.push_back({s, h, row0});
  }
  parallel_items(items.size(), cost, [&](int64_t first, int64_t last) {
    FlashAttention<DropoutRule<T>> attention(dim, rule, args.desc.fp8_scales.defined());
    QueryRow<T> rows[kQueryRows];
    for (int64_t i = first; i < last; ++i) {
      const auto [s, kv_head, row0] = items[static_cast<size_t>(i)];
      const PackedSequence sequence = sequences[s];
      const int64_t count = std::min(kQueryRows, sequence.length * group - row0);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t query = (row0 + r) / group, head = kv_head * group + (row0 + r) % group;
        const int64_t token = sequence.begin + query, position = sequence.position(query);
        rows[r] = {
            .q = q + token * q_strides[0] + head * q_strides[1],
            .o = o + token * o_strides[0] + head * o_strides[1],
            .lse = lse + head * sizes.tokens + token,
            .visible =
                rule.bind(static_cast<int>(s), static_cast<int>(head), sequence.keys())
                    .keys_of(IndexRange<int64_t>{position, position + 1}, int64_t{sequence.keys()}),
            .token = token,
            .position = position,
            .head = head,
            .sequence = static_cast<int>(s)};
        if (q_scales != nullptr) rows[r].scale = static_cast<T>(q_scales[token * heads + head]);
      }
      const auto rows_of = [&](const Tensor& t, const float* scales) {
        return KeyRows<T>{.data = t.data<T>() + kv_head * t.strides()[1],
                          .stride = t.strides()[0],
                          .packed = sequence,
                          .scales = scales == nullptr ? nullptr : scales + kv_head,
                          .scale_stride = sizes.kv_heads};
      };
      attention.run({rows, static_cast<size_t>(count)}, rows_of(keys, k_scales),
                    rows_of(args.v, nullptr));
    }
  });
}

}  // namespace

void attention_forward(const AttentionForward& args) {
  constexpr const char* kOp = "attention_forward";
  const PackedSizes sizes = packed_sizes(args.q, args.k, args.cu_seqlens);
  check_sequences(args.cu_seqlens, args.desc, sizes.tokens, kOp);
  dispatch_float(args.v.dtype(), kOp, [&]<class T>() { forward<T>(args, sizes); });
}

}  // namespace cohort::kernels::cpu
