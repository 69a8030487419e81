// The gated delta rule of packed sequences, and of states, on the CPU.
#include "kernels/gated_delta/cpu/chunk.h"
#include "kernels/gated_delta/cpu/packed.h"

namespace cohort::kernels::cpu {

void gated_delta(const GatedDelta& args) {
  dispatch_float(args.v.dtype(), "gated_delta", [&]<class T>() {
    const PackedDelta<T> in(args);
    const auto scale = static_cast<T>(delta_scale(args.desc, in.dim));
    // Those that continue a prefix read what has been stored for it.
    for (const bool continues : {false, true})
      in.for_heads([&](const PackedSegment& segment, int64_t head) {
        if (continues != (segment.prefix > 0)) return;
        DeltaChunk<T> chunk(in.dim);
        for (int64_t p = 0; p < segment.end(); ++p) {
          const int64_t t = segment.token(p);
          const DeltaRow<T> row = in.row(t, head);
          T* const u = args.u.data<T>() + in.offset(t, head);
          if (p < segment.prefix)
            chunk.append_by_g(row.k, u, row.g);
          else
            chunk.step(row, scale, u, args.o.data<T>() + in.offset(t, head));
        }
      });
  });
}

void gated_delta_cached(const GatedDeltaCached& args) {
  const auto states = args.states.to_vector<int32_t>(),
             positions = args.positions.to_vector<int32_t>();
  const auto tokens = static_cast<int64_t>(states.size());
  const int64_t slots = args.state.s.dim(0);
  const auto is_idle = [&](int64_t t) {
    return states[static_cast<size_t>(t)] < 0 || positions[static_cast<size_t>(t)] < 0;
  };
  // A run of adjacent tokens of a state begins at each of these.
  std::vector<int64_t> first;
  std::vector<bool> seen(static_cast<size_t>(slots));
  for (int64_t t = 0; t < tokens; ++t) {
    const auto i = static_cast<size_t>(t);
    if (!is_idle(t) && t > 0 && states[i] == states[i - 1] && positions[i] == positions[i - 1] + 1)
      continue;
    first.push_back(t);
    if (is_idle(t)) continue;
    COHORT_CHECK(states[i] < slots, "[gated_delta_cached] state ", states[i], " of ", slots);
    COHORT_CHECK(!seen[static_cast<size_t>(states[i])],
                 "[gated_delta_cached] expected adjacent tokens at ascending positions for state ",
                 states[i]);
    seen[static_cast<size_t>(states[i])] = true;
  }
  first.push_back(tokens);
  dispatch_float(args.v.dtype(), "gated_delta_cached", [&]<class T>() {
    const DeltaInputRows<T> in(args.q, args.k, args.v, args.g, args.beta);
    const auto scale = static_cast<T>(delta_scale({.scale = args.scale}, in.dim));
    const int64_t heads = in.heads, dim = in.dim, key_heads = in.key_heads;
    for_rows(static_cast<int64_t>(first.size() - 1) * key_heads, dim * dim, [&](int64_t task) {
      const int64_t key_head = task % key_heads;
      const int64_t begin = first[static_cast<size_t>(task / key_heads)],
                    end = first[static_cast<size_t>(task / key_heads + 1)];
      const int64_t first_head = key_head * in.group, last_head = first_head + in.group;
      if (is_idle(begin)) {
        T* const o = args.o.data<T>() + in.offset(begin, first_head);
        std::fill(o, o + in.group * dim, T{0});
        return;
      }
      const int64_t slot = states[static_cast<size_t>(begin)],
                    position = positions[static_cast<size_t>(begin)],
                    last = position + end - begin - 1;
      // The rows before are those of the chunk of the token before.
      const int64_t open = position == 0 ? 0 : (position - 1) % kDeltaChunk + 1;
      const auto row_of = [&](Tensor& rows, int64_t i, int64_t head) {
        return rows.data<T>() + ((slot * kDeltaChunk + i) * rows.dim(2) + head) * rows.numel() /
                                    (slots * kDeltaChunk * rows.dim(2));
      };
      DeltaChunk<T> chunk(dim);
      std::vector<T> u(static_cast<size_t>(dim));
      for (int64_t head = first_head; head < last_head; ++head) {
        T* const s = args.state.s.data<T>() + (slot * heads + head) * dim * dim;
        chunk.clear();
        if (position > kDeltaChunk) std::copy(s, s + dim * dim, chunk.s());
        for (int64_t i = 0; i < open; ++i)
          chunk.append(row_of(args.state.k, i, key_head), row_of(args.state.u, i, head),
                       *row_of(args.state.decay, i, head));
        for (int64_t t = begin; t < end; ++t)
          chunk.step(in.row(t, head), scale, u.data(), args.o.data<T>() + in.offset(t, head));
        if (last >= kDeltaChunk) std::copy(chunk.s(), chunk.s() + dim * dim, s);
        for (int64_t i = 0; i < chunk.size(); ++i) {
          std::copy(chunk.u(i), chunk.u(i) + dim, row_of(args.state.u, i, head));
          *row_of(args.state.decay, i, head) = chunk.decay(i);
        }
      }
      for (int64_t i = 0; i < chunk.size(); ++i)
        std::copy(chunk.k(i), chunk.k(i) + dim, row_of(args.state.k, i, key_head));
    });
  });
}

}  // namespace cohort::kernels::cpu
