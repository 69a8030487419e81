#include "distributed/reduce_scatter.h"

#include <bit>

#include "kernels/sum_parts.h"

namespace cohort {

void reduce_scatter(Communicator& comm, const Tensor& parts, const Tensor& memory,
                    const kernels::GradOut& y) {
  const int64_t n = parts.dim(1);
  const auto rows = [&](int64_t first, int64_t count) {
    return memory.narrow(0, first * n, count * n).reshape({count, n});
  };
  const auto sum = [&](const kernels::GradOut& out, const Tensor& sent, const RankSets& among) {
    Tensor received = rows(0, among.count);
    comm.all_to_all(received, sent, among);
    kernels::sum_parts({.y = out, .parts = received});
  };
  const int ranks = comm.size(), hosts = comm.hosts(), local = ranks / hosts;
  if (hosts == 1 || local == 1 || !std::has_single_bit(static_cast<unsigned>(local)))
    return sum(y, parts, {1, ranks});
  // The host's sums for all ranks with this one's place, behind what is received.
  const Tensor sums = rows(ranks - hosts, hosts);
  for (int host = 0; host < hosts; ++host) {
    Tensor row = sums.select(0, host);
    sum({row, kernels::Grad::kOverwrite}, parts.narrow(0, host * local, local), {1, local});
  }
  sum(y, sums, {local, hosts});
}

}  // namespace cohort
