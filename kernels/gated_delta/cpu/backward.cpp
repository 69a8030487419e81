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
#include <utility>

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

// Gradients of a prefix's last chunk from the sequences that continue it: of the matrix at the
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

// A row of a chunk, with its gradients.
template <class T>
struct GradientRow {
  DeltaRow<T> in;
  const T *u, *dout;
  int64_t token;
  T decay, gamma, to_end = 0, dg = 0;      // decay: G; to_end: 2^(G_63 - G)
  std::vector<T> du, dr, dq, dk, earlier;  // dk: a, and in the end dk; earlier: b
  std::vector<T> factors, w;               // L_ti and w_ti for the rows i up to this one
};

// The rows of a chunk of a sequence, of which those from `own` on are its own, and the others those
// of its prefix.
template <class T>
class ChunkGradients {
 public:
  ChunkGradients(std::vector<GradientRow<T>> rows, int64_t own, int64_t dim, T scale)
      : rows_(std::move(rows)), own_(static_cast<size_t>(own)), dim_(dim), scale_(scale) {
    for (GradientRow<T>& row : rows_) {
      for (std::vector<T>* x : {&row.du, &row.dr, &row.dq, &row.dk, &row.earlier})
        x->resize(static_cast<size_t>(dim));
      row.to_end = vexp2(rows_.back().decay - row.decay);
      for (const GradientRow<T>& before : rows_) {
        row.factors.push_back(vexp2(row.decay - before.decay));
        row.w.push_back(row.factors.back() * dot(row.in.k, before.in.k, dim));
        if (&before == &row) break;
      }
    }
  }

  const std::vector<GradientRow<T>>& rows() const { return rows_; }
  size_t own() const { return own_; }
  // The sum of dG of its own rows.
  T decay() const {
    T sum = 0;
    for (size_t t = rows_.size(); t-- > own_;) sum += rows_[t].dg;
    return sum;
  }

  // Adds the terms of rows in later chunks, of which next_ds is dS'.
  void add_fold(const T* next_s, const std::vector<T>& next_ds) {
    for (GradientRow<T>& row : rows_) {
      for (int64_t a = 0; a < dim_; ++a) {
        const T* const from = next_ds.data() + a * dim_;
        add_scaled(row.du.data(), row.to_end * row.in.k[a], from, dim_);
        row.earlier[static_cast<size_t>(a)] += row.to_end * dot(from, row.u, dim_);
      }
    }
    rows_.back().dg += dot(next_s, next_ds.data(), dim_ * dim_);
  }
  // Adds those of sequences that continue the last chunk of a prefix.
  void add_fork(const ForkGradients<T>& fork) {
    for (size_t i = 0; i < rows_.size(); ++i) {
      const auto at = static_cast<int64_t>(i) * dim_;
      add_scaled(rows_[i].du.data(), T{1}, fork.du.data() + at, dim_);
      add_scaled(rows_[i].earlier.data(), T{1}, fork.dk.data() + at, dim_);
    }
    rows_.back().dg += fork.decay;
  }
  // Computes dU and dR, and then the others, with the matrix s at the chunk's start.
  void run(const T* s) {
    for (size_t t = own_; t < rows_.size(); ++t)
      for (size_t i = 0; i <= t; ++i)
        add_scaled(rows_[i].du.data(),
                   scale_ * rows_[t].factors[i] * dot(rows_[t].in.q, rows_[i].in.k, dim_),
                   rows_[t].dout, dim_);
    for (size_t t = rows_.size(); t-- > own_;) {
      add_scaled(rows_[t].dr.data(), rows_[t].in.beta, rows_[t].du.data(), dim_);
      for (size_t i = 0; i < t; ++i)
        add_scaled(rows_[i].du.data(), -rows_[t].w[i], rows_[t].dr.data(), dim_);
    }
    for (size_t t = own_; t < rows_.size(); ++t) {
      GradientRow<T>& row = rows_[t];
      for (int64_t a = 0; a < dim_; ++a) {
        row.dq[static_cast<size_t>(a)] += scale_ * row.gamma * dot(s + a * dim_, row.dout, dim_);
        row.dk[static_cast<size_t>(a)] -= row.gamma * dot(s + a * dim_, row.dr.data(), dim_);
      }
      for (size_t i = 0; i < t; ++i) {
        const T y = scale_ * row.factors[i] * dot(row.dout, rows_[i].u, dim_),
                x = -row.factors[i] * dot(row.dr.data(), rows_[i].u, dim_);
        add_scaled(row.dq.data(), y, rows_[i].in.k, dim_);
        add_scaled(row.dk.data(), x, rows_[i].in.k, dim_);
        add_scaled(rows_[i].earlier.data(), y, row.in.q, dim_);
        add_scaled(rows_[i].earlier.data(), x, row.in.k, dim_);
      }
      row.dg += dot(row.in.q, row.dq.data(), dim_) + dot(row.in.k, row.dk.data(), dim_);
    }
    for (size_t t = own_; t < rows_.size(); ++t) {
      GradientRow<T>& row = rows_[t];
      row.dg -= dot(row.in.k, row.earlier.data(), dim_);
      add_scaled(row.dk.data(), T{1}, row.earlier.data(), dim_);
      const T y = scale_ * dot(row.dout, row.u, dim_);  // Y_tt, in which G has no part
      add_scaled(row.dq.data(), y, row.in.k, dim_);
      add_scaled(row.dk.data(), y, row.in.q, dim_);
    }
  }
  // dS without the term of dS'.
  std::vector<T> ds() const {
    std::vector<T> out(static_cast<size_t>(dim_ * dim_));
    for (size_t t = own_; t < rows_.size(); ++t) {
      const GradientRow<T>& row = rows_[t];
      for (int64_t a = 0; a < dim_; ++a) {
        add_scaled(out.data() + a * dim_, scale_ * row.gamma * row.in.q[a], row.dout, dim_);
        add_scaled(out.data() + a * dim_, -row.gamma * row.in.k[a], row.dr.data(), dim_);
      }
    }
    return out;
  }
  T dbeta(size_t t, const T* s) const {
    const GradientRow<T>& row = rows_[t];
    std::vector<T> r(row.in.v, row.in.v + dim_);
    for (int64_t a = 0; a < dim_; ++a)
      add_scaled(r.data(), -row.gamma * row.in.k[a], s + a * dim_, dim_);
    for (size_t i = 0; i < t; ++i) add_scaled(r.data(), -row.w[i], rows_[i].u, dim_);
    return dot(r.data(), row.du.data(), dim_);
  }

 private:
  std::vector<GradientRow<T>> rows_;
  size_t own_;
  int64_t dim_;
  T scale_;
};

// The backward of one value head.
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
  void run(const PackedSequence& sequence, ForkGradients<T>* fork) {
    if (sequence.length == 0) return;
    const bool is_child = sequence.prefix > 0;
    const std::vector<std::vector<T>> states = states_of(sequence, fork != nullptr && !is_child);
    const int64_t first = sequence.prefix / kDeltaChunk,
                  last = (int64_t{sequence.keys()} - 1) / kDeltaChunk;
    std::vector<T> ds;
    // Other sequences may begin where the last chunk, a full one, ends.
    const bool is_forked = fork != nullptr && !is_child;
    const bool forks_at_end = is_forked && int64_t{sequence.keys()} % kDeltaChunk == 0;
    if (forks_at_end) ds = fork->ds;
    for (int64_t chunk = last; chunk >= first; --chunk) {
      const T* const s = states[static_cast<size_t>(chunk)].data();
      ChunkGradients<T> gradients = rows_of(sequence, chunk);
      const bool is_open = is_forked && chunk == last && !forks_at_end;
      if (!ds.empty()) gradients.add_fold(states[static_cast<size_t>(chunk + 1)].data(), ds);
      if (is_open) gradients.add_fork(*fork);
      gradients.run(s);
      write(gradients, s);
      std::vector<T> start = gradients.ds();
      if (!ds.empty())
        add_scaled(start.data(), gradients.rows().back().gamma, ds.data(), dim_ * dim_);
      if (is_open) add_scaled(start.data(), T{1}, fork->ds.data(), dim_ * dim_);
      if (is_child) add_open_rows(*fork, gradients);
      ds = std::move(start);
    }
    if (is_child) add_scaled(fork->ds.data(), T{1}, ds.data(), dim_ * dim_);
  }

 private:
  // The matrices at the start of each chunk; with_next: and that after a full last one.
  std::vector<std::vector<T>> states_of(const PackedSequence& sequence, bool with_next) {
    DeltaChunk<T> chunk(dim_);
    std::vector<T> s(static_cast<size_t>(dim_ * dim_));
    chunk.start(s.data());
    std::vector<std::vector<T>> out{s};
    for (int64_t p = 0; p < int64_t{sequence.keys()}; ++p) {
      if (chunk.size() == kDeltaChunk) {
        chunk.fold();
        out.push_back(s);
      }
      const int64_t t = sequence.token(p);
      const DeltaRow<T> row = in_.row(t, head_);
      chunk.append_by_g(row.k, args_.u.data<T>() + in_.offset(t, head_), row.g);
    }
    if (with_next && chunk.size() == kDeltaChunk) {
      chunk.fold();
      out.push_back(s);
    }
    return out;
  }

  ChunkGradients<T> rows_of(const PackedSequence& sequence, int64_t chunk) const {
    const int64_t begin = chunk * kDeltaChunk,
                  end = std::min(begin + kDeltaChunk, int64_t{sequence.keys()});
    std::vector<GradientRow<T>> rows;
    T decay = 0;
    for (int64_t p = begin; p < end; ++p) {
      const int64_t t = sequence.token(p);
      const DeltaRow<T> row = in_.row(t, head_);
      decay = next_decay(decay, row.g);
      rows.push_back({.in = row,
                      .u = args_.u.data<T>() + in_.offset(t, head_),
                      .dout = args_.dout.data<T>() + in_.offset(t, head_),
                      .token = t,
                      .decay = decay,
                      .gamma = vexp2(decay)});
    }
    return {std::move(rows), std::max<int64_t>(0, sequence.prefix - begin), dim_, scale_};
  }

  // The rows of the prefix in a chunk that its sequence continues.
  void add_open_rows(ForkGradients<T>& fork, const ChunkGradients<T>& gradients) const {
    for (size_t i = 0; i < gradients.own(); ++i) {
      const auto at = static_cast<int64_t>(i) * dim_;
      add_scaled(fork.du.data() + at, T{1}, gradients.rows()[i].du.data(), dim_);
      add_scaled(fork.dk.data() + at, T{1}, gradients.rows()[i].earlier.data(), dim_);
    }
    if (gradients.own() > 0) fork.decay += gradients.decay();  // G begins with that of the last one
  }

  void write(const ChunkGradients<T>& gradients, const T* s) const {
    const auto put = [&](const GradOut& to, int64_t offset, const T* from, int64_t n, bool adds) {
      write_range(to.tensor.data<T>() + offset, 0, n, adds ? Grad::kAccumulate : to.mode,
                  [&](int64_t j) { return from[j]; });
    };
    const bool adds = head_ % in_.group != 0;  // to the gradients of the heads before
    T dg = 0;
    for (size_t t = gradients.rows().size(); t-- > gradients.own();) {
      const GradientRow<T>& row = gradients.rows()[t];
      const T dbeta = gradients.dbeta(t, s);
      dg += row.dg;
      put(args_.dq, in_.key_offset(row.token, head_), row.dq.data(), dim_, adds);
      put(args_.dk, in_.key_offset(row.token, head_), row.dk.data(), dim_, adds);
      put(args_.dv, in_.offset(row.token, head_), row.dr.data(), dim_, false);
      put(args_.dg, row.token * in_.heads + head_, &dg, 1, false);
      put(args_.dbeta, row.token * in_.heads + head_, &dbeta, 1, false);
    }
  }

  const GatedDeltaBackward& args_;
  const PackedDelta<T>& in_;
  const int64_t head_, dim_;
  const T scale_;
};

}  // namespace

void gated_delta_backward(const GatedDeltaBackward& args) {
  dispatch_float(args.in.v.dtype(), "gated_delta_backward", [&]<class T>() {
    const PackedDelta<T> in(args, "gated_delta_backward");
    // Sequences without a prefix, each with those that continue it.
    std::vector<std::pair<int64_t, int64_t>> trees;
    for (int64_t s = 0; s < in.sequences.count; ++s) {
      if (in.sequences[s].prefix == 0) trees.push_back({s, s + 1});
      trees.back().second = s + 1;
    }
    for_rows(static_cast<int64_t>(trees.size()) * in.key_heads, kElementGrain, [&](int64_t task) {
      const auto [root, end] = trees[static_cast<size_t>(task / in.key_heads)];
      const int64_t first = task % in.key_heads * in.group;
      for (int64_t head = first; head < first + in.group; ++head) {
        HeadBackward<T> backward(args, in, head);
        std::optional<ForkGradients<T>> fork;
        for (int64_t s = root + 1; s < end; ++s) {
          if (!fork) fork.emplace(in.dim);
          backward.run(in.sequences[s], &*fork);
        }
        backward.run(in.sequences[root], fork ? &*fork : nullptr);
      }
    });
  });
}

}  // namespace cohort::kernels::cpu
