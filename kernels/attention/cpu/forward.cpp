// attention_forward on the CPU: (sequence, key head, up to kQueryRows rows) per work item.
#include "kernels/attention/cpu/attend.h"

namespace cohort::kernels::cpu {

namespace {

using namespace attention;

// Rows are (token, head of the group), token first, so that neighbours see nearly the same keys.
struct ForwardItem {
  int64_t begin, end;  // the sequence's tokens
  int64_t kv_head;
  int64_t row0, rows;  // of (end - begin) * group
  int64_t cost;
};

std::vector<ForwardItem> forward_items(const PackedSizes& sizes, const int32_t* cu, Mask mask) {
  std::vector<ForwardItem> items;
  items.reserve(static_cast<size_t>(sizes.kv_heads *
                                    (sizes.sequences + sizes.tokens * sizes.group() / kQueryRows)));
  for (int64_t s = 0; s < sizes.sequences; ++s) {
    const int64_t rows = (cu[s + 1] - cu[s]) * sizes.group();
    const int64_t blocks = (rows + kQueryRows - 1) / kQueryRows;
    for (int64_t h = 0; h < sizes.kv_heads; ++h)
      for (int64_t b = blocks - 1; b >= 0; --b) {  // the most work first
        const int64_t row0 = b * kQueryRows, n = std::min(kQueryRows, rows - row0);
        const int64_t keys =
            mask == Mask::kCausal ? (row0 + n / 2) / sizes.group() + 1 : cu[s + 1] - cu[s];
        items.push_back({cu[s], cu[s + 1], h, row0, n, 2 * n * keys * sizes.head_dim});
      }
  }
  return items;
}

template <class T>
void forward(const AttentionForward& args, const PackedSizes& sizes) {
  const int32_t* cu = args.cu_seqlens.data<int32_t>();
  const Mask mask = args.desc.mask;
  const ProbabilityDropout dropout(args.desc.dropout);
  const double scale = softmax_scale(args.desc, sizes.head_dim);
  const auto items = forward_items(sizes, cu, mask);
  const int64_t heads = sizes.heads, group = sizes.group(), dim = sizes.head_dim;
  const int64_t kv_stride = sizes.kv_heads * dim;
  T *const o_data = args.o.data<T>(), *const lse_data = args.lse.data<T>();
  const T *const q_data = args.q.data<T>(), *const k_data = args.k.data<T>(),
                 *const v_data = args.v.data<T>();
  parallel_items(items, [&](int64_t first, int64_t last) {
    Attend<T> attend(dim, scale, dropout);
    QueryRow<T> rows[kQueryRows];
    for (int64_t i = first; i < last; ++i) {
      const ForwardItem& item = items[static_cast<size_t>(i)];
      int64_t at = item.row0 / group, in_group = item.row0 % group;
      for (int64_t r = 0; r < item.rows; ++r) {
        const int64_t token = item.begin + at, head = item.kv_head * group + in_group;
        const int64_t offset = (token * heads + head) * dim;
        rows[r] = {.q = q_data + offset,
                   .o = o_data + offset,
                   .lse = lse_data + head * sizes.tokens + token,
                   .visible = mask == Mask::kCausal ? at + 1 : item.end - item.begin,
                   .token = token,
                   .head = head};
        if (++in_group == group) {
          in_group = 0;
          ++at;
        }
      }
      const int64_t start = item.begin * kv_stride + item.kv_head * dim;
      attend.run({rows, static_cast<size_t>(item.rows)},
                 KeyRows<T>{.data = k_data + start, .stride = kv_stride},
                 KeyRows<T>{.data = v_data + start, .stride = kv_stride});
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
