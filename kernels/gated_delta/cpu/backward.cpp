// Gradients of the gated delta rule on the CPU. A chunk has, with rows 0 to n - 1, s the scale,
// gamma_t = 2^G_t, L_ti = 2^(G_t - G_i), w_ti = L_ti (k_t k_i), r_t = u_t / beta_t, and dS' the
// gradient of the matrix that it becomes (0 if it is not folded):
//
//   dU_i = s sum_(t>=i) L_ti (q_t k_i) dO_t + 2^(G_63 - G_i) k_i dS'
//   from the last row up:  dR_t = beta_t dU_t,  dU_i -= w_ti dR_t for i < t
//   dV = dR,  dbeta_t = r_t dU_t
//   Y_ti = s L_ti (dO_t u_i) for i <= t,  X_ti = -L_ti (dR_t u_i) for i < t
//   dq_t = s gamma_t S dO_t + sum_i Y_ti k_i
//   dk_t = a_t + b_t:  as the row itself, a_t = -gamma_t S dR_t + sum_i X_ti k_i,
//     and as an earlier one, b_i = sum_t Y_ti q_t + sum_t X_ti k_t + 2^(G_63 - G_i) dS' u_i
//   dS = 2^G_63 dS' + sum_t gamma_t (s q_t dO_t^T - k_t dR_t^T)
//   dG_t = q_t dq_t + k_t (a_t - b_t) without Y_tt,  dG_63 += <S', dS'>,  dg_t = sum_(i>=t) dG_i
//
// (dG is that of G ln 2.) The first rows of a sequence's first chunk may belong to its prefix: the
// terms of these are added to the gradients of the prefix's last chunk.
#include <algorithm>
#include <optional>

#include "kernels/gated_delta/cpu/packed.h"

namespace cohort::kernels::cpu {
namespace {

template <class T>
void add_scaled(T* to, T factor, const T* row, int64_t n) {
  COHORT_VECTORIZE
  for (int64_t j = 0; j < n; ++j) to[j] += factor * row[j];
}
template <class T>
T dot(const T* a, const T* b, int64_t n) {
  return lane_sum<T>(n, [&](int64_t j) { return a[j] * b[j]; });
}

// What the sequences behind a prefix add to the gradients of its last chunk: of the matrix at the
// start of the chunk that they continue; dU and b of its open rows; and the sum of their dG.
template <class T>
struct ForkGradients {
  std::vector<T> ds, du, dk;
  T decay = 0;

  explicit ForkGradients(int64_t dim)
      : ds(static_cast<size_t>(dim * dim)),
        du(static_cast<size_t>(kDeltaChunk * dim)),
        dk(static_cast<size_t>(kDeltaChunk * dim)) {}
};

// The backward of one head of v.
template <class T>
class HeadBackward {
 public:
  HeadBackward(const GatedDeltaBackward& args, const PackedDelta<T>& in, int64_t head)
      : args_(args),
        in_(in),
        head_(head),
        dim_(in.dim),
        scale_(static_cast<T>(delta_scale(args.desc, in.dim))) {}

  // The gradients of a sequence's own tokens. `fork`: of a sequence with a prefix, to which the
  // gradients of that are added; else what has been added, or nothing.
  void run(const PackedSegment& segment, ForkGradients<T>* fork) {
    if (segment.length == 0) return;
    const std::vector<std::vector<T>> states = states_of(segment, fork);
    const int64_t first = segment.prefix / kDeltaChunk, last = (segment.end() - 1) / kDeltaChunk;
    std::vector<T> ds(static_cast<size_t>(dim_ * dim_));
    // Other sequences may begin where the last chunk, a full one, ends.
    const bool forks_at_end =
        fork != nullptr && segment.prefix == 0 && segment.end() % kDeltaChunk == 0;
    if (forks_at_end) ds = fork->ds;
    for (int64_t chunk = last; chunk >= first; --chunk) {
      const bool is_folded = chunk < last || forks_at_end;
      const auto at = [&](int64_t c) { return states[static_cast<size_t>(c)].data(); };
      const bool is_open = fork != nullptr && segment.prefix == 0 && chunk == last && !forks_at_end;
      ds = chunk_gradients(segment, chunk, at(chunk), is_folded ? at(chunk + 1) : nullptr, ds,
                           is_open || segment.prefix > 0 ? fork : nullptr);
      if (is_open) add_scaled(ds.data(), T{1}, fork->ds.data(), dim_ * dim_);
    }
    if (segment.prefix > 0) add_scaled(fork->ds.data(), T{1}, ds.data(), dim_ * dim_);
  }

 private:
  // The matrices at the start of each chunk, and of the one behind a last chunk that is full.
  std::vector<std::vector<T>> states_of(const PackedSegment& segment, const ForkGradients<T>* fork) {
    DeltaChunk<T> chunk(dim_);
    std::vector<std::vector<T>> out;
    const auto keep = [&] { out.emplace_back(chunk.s(), chunk.s() + dim_ * dim_); };
    keep();
    for (int64_t p = 0; p < segment.end(); ++p) {
      if (chunk.size() == kDeltaChunk) {
        chunk.fold();
        keep();
      }
      const int64_t t = segment.token(p);
      const DeltaRow<T> row = in_.row(t, head_);
      chunk.append_by_g(row.k, args_.u.data<T>() + in_.offset(t, head_), row.g);
    }
    if (fork != nullptr && chunk.size() == kDeltaChunk) {
      chunk.fold();
      keep();
    }
    return out;
  }

  // Writes the gradients of the sequence's own rows of a chunk, and returns dS.
  std::vector<T> chunk_gradients(const PackedSegment& segment, int64_t chunk, const T* s,
                                 const T* next_s, const std::vector<T>& next_ds,
                                 ForkGradients<T>* fork) {
    const int64_t begin = chunk * kDeltaChunk,
                  n = std::min(kDeltaChunk, segment.end() - begin),
                  own = std::max<int64_t>(0, segment.prefix - begin), d = dim_;
    const bool is_child = segment.prefix > 0;
    const auto size = static_cast<size_t>(n * d);
    std::vector<DeltaRow<T>> rows;
    std::vector<const T*> u, dout;
    std::vector<T> decay, gamma, to_end;  // to_end: 2^(G_63 - G_i)
    for (int64_t i = 0; i < n; ++i) {
      const int64_t t = segment.token(begin + i);
      rows.push_back(in_.row(t, head_));
      u.push_back(args_.u.data<T>() + in_.offset(t, head_));
      dout.push_back(args_.dout.data<T>() + in_.offset(t, head_));
      const T base2 = rows.back().g * static_cast<T>(1.4426950408889634074);
      decay.push_back((i == 0 ? T{0} : decay.back()) + base2);
      gamma.push_back(std::exp2(decay.back()));
    }
    for (const T g : decay) to_end.push_back(std::exp2(decay.back() - g));
    const auto row_of = [&](std::vector<T>& m, int64_t i) { return m.data() + i * d; };
    // y = x m and y = m x, with x [D] and m [D, D].
    const auto times = [&](T* y, const T* x, const T* m, T factor) {
      for (int64_t a = 0; a < d; ++a) add_scaled(y, factor * x[a], m + a * d, d);
    };
    const auto applied = [&](T* y, const T* m, const T* x, T factor) {
      for (int64_t a = 0; a < d; ++a) y[a] += factor * dot(m + a * d, x, d);
    };
    const auto index = [&](int64_t t, int64_t i) { return static_cast<size_t>(t * n + i); };
    std::vector<T> factors(static_cast<size_t>(n * n)), w(factors), q_k(factors);
    for (int64_t t = own; t < n; ++t)
      for (int64_t i = 0; i <= t; ++i) {
        const T factor = std::exp2(decay[static_cast<size_t>(t)] - decay[static_cast<size_t>(i)]);
        const auto at = [&](int64_t r) -> const DeltaRow<T>& { return rows[static_cast<size_t>(r)]; };
        factors[index(t, i)] = factor;
        w[index(t, i)] = factor * dot(at(t).k, at(i).k, d);
        q_k[index(t, i)] = factor * dot(at(t).q, at(i).k, d);
      }
    std::vector<T> du(size), dr(size), dq(size), dk(size), earlier(size);  // earlier: b
    std::vector<T> dg(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) {
      const auto r = static_cast<size_t>(i);
      for (int64_t t = std::max(i, own); t < n; ++t)
        add_scaled(row_of(du, i), scale_ * q_k[index(t, i)], dout[static_cast<size_t>(t)], d);
      if (next_s != nullptr) {
        times(row_of(du, i), rows[r].k, next_ds.data(), to_end[r]);
        applied(row_of(earlier, i), next_ds.data(), u[r], to_end[r]);
      }
      if (fork != nullptr && !is_child) {
        add_scaled(row_of(du, i), T{1}, row_of(fork->du, i), d);
        add_scaled(row_of(earlier, i), T{1}, row_of(fork->dk, i), d);
      }
    }
    for (int64_t t = n - 1; t >= own; --t) {
      add_scaled(row_of(dr, t), rows[static_cast<size_t>(t)].beta, row_of(du, t), d);
      for (int64_t i = 0; i < t; ++i)
        add_scaled(row_of(du, i), -w[index(t, i)], row_of(dr, t), d);
    }
    std::vector<T> ds(static_cast<size_t>(d * d));
    if (next_s != nullptr) add_scaled(ds.data(), gamma.back(), next_ds.data(), d * d);
    for (int64_t t = own; t < n; ++t) {
      const auto r = static_cast<size_t>(t);
      const DeltaRow<T>& row = rows[r];
      applied(row_of(dq, t), s, dout[r], scale_ * gamma[r]);
      applied(row_of(dk, t), s, row_of(dr, t), -gamma[r]);
      for (int64_t i = 0; i < t; ++i) {
        const auto e = static_cast<size_t>(i);
        const T y = scale_ * factors[index(t, i)] * dot(dout[r], u[e], d);
        add_scaled(row_of(dq, t), y, rows[e].k, d);
        add_scaled(row_of(earlier, i), y, row.q, d);
        const T x = -factors[index(t, i)] * dot(row_of(dr, t), u[e], d);
        add_scaled(row_of(dk, t), x, rows[e].k, d);
        add_scaled(row_of(earlier, i), x, row.k, d);
      }
      for (int64_t a = 0; a < d; ++a) {
        add_scaled(ds.data() + a * d, scale_ * gamma[r] * row.q[a], dout[r], d);
        add_scaled(ds.data() + a * d, -gamma[r] * row.k[a], row_of(dr, t), d);
      }
      dg[r] += dot(row.q, row_of(dq, t), d) + dot(row.k, row_of(dk, t), d);
    }
    for (int64_t i = 0; i < n; ++i)
      dg[static_cast<size_t>(i)] -= dot(rows[static_cast<size_t>(i)].k, row_of(earlier, i), d);
    if (next_s != nullptr) dg.back() += dot(next_s, next_ds.data(), d * d);
    T sum = fork != nullptr && !is_child ? fork->decay : T{0};
    for (int64_t t = n - 1; t >= own; --t) {
      sum += dg[static_cast<size_t>(t)];
      std::vector<T> r(rows[static_cast<size_t>(t)].v, rows[static_cast<size_t>(t)].v + d);
      times(r.data(), rows[static_cast<size_t>(t)].k, s, -gamma[static_cast<size_t>(t)]);
      for (int64_t i = 0; i < t; ++i)
        add_scaled(r.data(), -w[index(t, i)], u[static_cast<size_t>(i)], d);
      add_scaled(row_of(dk, t), T{1}, row_of(earlier, t), d);
      // Y_tt, in which G has no part.
      const T y = scale_ * dot(dout[static_cast<size_t>(t)], u[static_cast<size_t>(t)], d);
      add_scaled(row_of(dq, t), y, rows[static_cast<size_t>(t)].k, d);
      add_scaled(row_of(dk, t), y, rows[static_cast<size_t>(t)].q, d);
      write(segment.token(begin + t), row_of(dq, t), row_of(dk, t), row_of(dr, t), sum,
            dot(r.data(), row_of(du, t), d));
    }
    if (is_child && own > 0) {
      for (int64_t i = 0; i < own; ++i) {
        add_scaled(row_of(fork->du, i), T{1}, row_of(du, i), d);
        add_scaled(row_of(fork->dk, i), T{1}, row_of(earlier, i), d);
      }
      fork->decay += sum;  // their G begin with that of the last open row
    }
    return ds;
  }

  void write(int64_t t, const T* dq, const T* dk, const T* dv, T dg, T dbeta) const {
    const auto put = [&](const GradOut& to, int64_t offset, const T* from, int64_t n, bool adds) {
      write_range(to.tensor.data<T>() + offset, 0, n,
                  adds ? Grad::kAccumulate : to.mode, [&](int64_t j) { return from[j]; });
    };
    const bool adds = head_ % in_.group != 0;  // to the gradients of the heads before
    put(args_.dq, in_.key_offset(t, head_), dq, dim_, adds);
    put(args_.dk, in_.key_offset(t, head_), dk, dim_, adds);
    put(args_.dv, in_.offset(t, head_), dv, dim_, false);
    put(args_.dg, t * in_.heads + head_, &dg, 1, false);
    put(args_.dbeta, t * in_.heads + head_, &dbeta, 1, false);
  }

  const GatedDeltaBackward& args_;
  const PackedDelta<T>& in_;
  const int64_t head_, dim_;
  const T scale_;
};

}  // namespace

void gated_delta_backward(const GatedDeltaBackward& args) {
  dispatch_float(args.v.dtype(), "gated_delta_backward", [&]<class T>() {
    const PackedDelta<T> in(args);
    // Sequences without a prefix, each with those that continue it.
    std::vector<std::pair<size_t, size_t>> trees;
    for (size_t s = 0; s < in.segments.size(); ++s) {
      if (in.segments[s].prefix == 0) trees.push_back({s, s + 1});
      trees.back().second = s + 1;
    }
    for_rows(static_cast<int64_t>(trees.size()) * in.key_heads, kElementGrain, [&](int64_t task) {
      const auto [root, end] = trees[static_cast<size_t>(task / in.key_heads)];
      const int64_t first = task % in.key_heads * in.group;
      for (int64_t head = first; head < first + in.group; ++head) {
        HeadBackward<T> backward(args, in, head);
        std::optional<ForkGradients<T>> fork;
        for (size_t s = root + 1; s < end; ++s) {
          if (!fork) fork.emplace(in.dim);
          backward.run(in.segments[s], &*fork);
        }
        backward.run(in.segments[root], fork ? &*fork : nullptr);
      }
    });
  });
}

}  // namespace cohort::kernels::cpu
