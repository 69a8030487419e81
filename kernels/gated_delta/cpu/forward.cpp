// The gated delta rule of packed sequences, and of states, on the CPU.
#include "kernels/cpu/state_runs.h"
#include "kernels/gated_delta/cpu/chunk.h"
#include "kernels/gated_delta/cpu/packed.h"

namespace cohort::kernels::cpu {

namespace {

// The tokens of a run, for the value heads that read one key head.
template <class T>
void advance(const GatedDeltaCached& args, const DeltaInputRows<T>& in, const StateRun& run,
             int64_t key_head) {
  const int64_t dim = in.dim, first = key_head * in.group;
  if (run.is_idle()) {
    T* const o = args.o.data<T>() + in.offset(run.first, first);
    std::fill(o, o + in.group * dim, T{0});
    return;
  }
  const auto scale = static_cast<T>(delta_scale({.scale = args.scale}, dim));
  // The rows before are those of the chunk of the token before.
  const int64_t open = run.position == 0 ? 0 : (run.position - 1) % kDeltaChunk + 1;
  const auto row_of = [&](Tensor& rows, int64_t i, int64_t head) {
    const int64_t columns = rows.rank() == 4 ? dim : 1;
    return rows.data<T>() + ((run.state * kDeltaChunk + i) * rows.dim(2) + head) * columns;
  };
  DeltaState& state = args.state;
  DeltaChunk<T> chunk(dim);
  for (int64_t head = first; head < first + in.group; ++head) {
    T* const s = state.s.data<T>() + (run.state * in.heads + head) * dim * dim;
    if (run.position == 0) std::fill(s, s + dim * dim, T{0});
    chunk.start(s);
    for (int64_t i = 0; i < open; ++i)
      chunk.append(row_of(state.k, i, key_head), row_of(state.u, i, head),
                   *row_of(state.decay, i, head));
    for (int64_t t = run.first; t < run.first + run.count; ++t) {
      const int64_t row = (run.position + t - run.first) % kDeltaChunk;
      chunk.step(in.row(t, head), scale, row_of(state.u, row, head),
                 args.o.data<T>() + in.offset(t, head));
      *row_of(state.decay, row, head) = chunk.decay(row);
    }
  }
  // After the last head that has read the rows before.
  for (int64_t i = std::max<int64_t>(0, chunk.size() - run.count); i < chunk.size(); ++i)
    std::copy(chunk.k(i), chunk.k(i) + dim, row_of(state.k, i, key_head));
}

}  // namespace

void gated_delta(const GatedDelta& args) {
  dispatch_float(args.in.v.dtype(), "gated_delta", [&]<class T>() {
    const PackedDelta<T> in(args, "gated_delta");
    const auto scale = static_cast<T>(delta_scale(args.desc, in.dim));
    // Sequences that continue a prefix read what has been stored for it.
    for (const bool continues : {false, true})
      in.for_heads([&](const PackedSequence& sequence, int64_t head) {
        if (continues != (sequence.prefix > 0)) return;
        DeltaChunk<T> chunk(in.dim);
        std::vector<T> s(static_cast<size_t>(in.dim * in.dim));
        chunk.start(s.data());
        for (int64_t p = 0; p < int64_t{sequence.keys()}; ++p) {
          const int64_t t = sequence.token(p);
          const DeltaRow<T> row = in.row(t, head);
          T* const u = args.u.data<T>() + in.offset(t, head);
          if (p < sequence.prefix)
            chunk.append_by_g(row.k, u, row.g);
          else
            chunk.step(row, scale, u, args.o.data<T>() + in.offset(t, head));
        }
      });
  });
}

void gated_delta_cached(const GatedDeltaCached& args) {
  const int64_t slots = args.state.s.dim(0);
  const std::vector<StateRun> runs =
      state_runs(args.states, args.positions, slots, "gated_delta_cached");
  dispatch_float(args.in.v.dtype(), "gated_delta_cached", [&]<class T>() {
    const DeltaInputRows<T> in(args.in);
    for_rows(static_cast<int64_t>(runs.size()) * in.key_heads, in.dim * in.dim, [&](int64_t task) {
      advance(args, in, runs[static_cast<size_t>(task / in.key_heads)], task % in.key_heads);
    });
  });
}

}  // namespace cohort::kernels::cpu
