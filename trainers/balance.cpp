#include "trainers/balance.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <type_traits>

#include "trainers/across_ranks.h"

namespace cohort {
namespace {

constexpr double kLeastGain = 0.02;

// Calls each() with the lists of a sequence, whose numbers a double holds exactly.
template <class Sequence, class Each>
void each_list(Sequence& s, const Each& each) {
  each(s.tokens);
  each(s.loss_mask);
  each(s.labels);
  each(s.types);
  if constexpr (std::is_same_v<std::remove_const_t<Sequence>, PolicySequence>) {
    each(s.old_logprob);
    each(s.advantage);
    each(s.ref_logprob);
    each(s.sampling_logprob);
    each(s.surrogate_mask);
    each(s.old_distance_coef);
    each(s.reference_prompt);
  }
}

template <class Sequence>
std::vector<double> to_numbers(const Sequence& s) {
  std::vector<double> out{static_cast<double>(s.index), static_cast<double>(s.group),
                          static_cast<double>(s.prefix)};
  each_list(s, [&](const auto& list) {
    out.push_back(static_cast<double>(list.size()));
    out.insert(out.end(), list.begin(), list.end());
  });
  return out;
}

template <class Sequence>
Sequence from_numbers(const std::vector<double>& numbers) {
  Sequence s;
  s.index = static_cast<int64_t>(numbers[0]);
  s.group = static_cast<int64_t>(numbers[1]);
  s.prefix = static_cast<int64_t>(numbers[2]);
  auto next = numbers.begin() + 3;
  each_list(s, [&](auto& list) {
    const auto begin = next + 1, end = begin + static_cast<ptrdiff_t>(*next);
    list.assign(begin, end);
    next = end;
  });
  return s;
}

template <class Sequence>
RankLoad balance_sequences(Communicator& comm, const Transformer& model,
                           std::vector<Sequence>& sequences, int64_t count, int64_t lanes) {
  const ModelConfig& config = model.config();
  if ((comm.size() == 1 && lanes == 0) || config.has_images()) return {};
  const auto unit_of = [](const Sequence& s) {
    return static_cast<size_t>(s.group >= 0 ? s.group : s.index);
  };
  // The operations of a token grow linearly with the length.
  const double length = static_cast<double>(config.context),
               base = train_flops_per_token(config, 0),
               slope = (train_flops_per_token(config, length) - base) / length;
  const auto cost_of = [&](int64_t rows, int64_t inputs) {
    return static_cast<double>(rows) * (base + slope * static_cast<double>(inputs));
  };
  // Costs and ranks of the groups, and of sequences without one.
  std::vector<double> units(2 * static_cast<size_t>(count));
  const auto costs = std::span(units).first(static_cast<size_t>(count)),
             owners = std::span(units).last(static_cast<size_t>(count));
  for (const Sequence& s : sequences) {
    double& cost = costs[unit_of(s)];
    if (cost == 0) cost = cost_of(s.prefix, s.prefix);
    cost += cost_of(s.num_inputs() - s.prefix, s.num_inputs());
    owners[unit_of(s)] = comm.rank();
  }
  units = reduce_over_ranks(comm, units);
  const std::vector<int> before(units.begin() + count, units.end());
  const std::span<const double> all(units.data(), static_cast<size_t>(count));
  std::vector<int> after = lanes > 0 ? assign_ranks(all, {}, static_cast<int>(lanes))
                                     : assign_ranks(all, before, comm.size());
  const std::vector<int> lane_of = lanes > 0 ? after : std::vector<int>(after.size());
  for (int& rank : after)
    if (lanes > 0) rank /= static_cast<int>(lanes) / comm.size();
  if (after != before) {
    std::vector<std::vector<double>> moved(static_cast<size_t>(count));
    for (const Sequence& s : sequences)
      if (after[unit_of(s)] != comm.rank()) moved[static_cast<size_t>(s.index)] = to_numbers(s);
    std::erase_if(sequences, [&](const Sequence& s) { return after[unit_of(s)] != comm.rank(); });
    for (const std::vector<double>& numbers : gather_numbers(comm, moved, model.device())) {
      if (numbers.empty()) continue;
      Sequence s = from_numbers<Sequence>(numbers);
      if (after[unit_of(s)] == comm.rank()) sequences.push_back(std::move(s));
    }
  }
  for (Sequence& s : sequences) s.lane = lane_of[unit_of(s)];
  std::ranges::sort(sequences, {}, [](const Sequence& s) { return std::pair(s.lane, s.index); });
  return lanes > 0 ? load_of(all, lane_of, static_cast<int>(lanes))
                   : load_of(all, after, comm.size());
}

}  // namespace

std::vector<int> assign_ranks(std::span<const double> costs, std::vector<int> present,
                              int num_ranks) {
  std::vector<size_t> order(costs.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater(), [&](size_t i) { return costs[i]; });
  std::vector<double> loads(static_cast<size_t>(num_ranks));
  std::vector<int> out(costs.size());
  for (const size_t i : order) {
    const auto least = std::ranges::min_element(loads);
    *least += costs[i];
    out[i] = static_cast<int>(least - loads.begin());
  }
  if (present.empty()) return out;
  const double largest = load_of(costs, present, num_ranks).largest;
  return load_of(costs, out, num_ranks).largest <= (1 - kLeastGain) * largest ? out : present;
}

RankLoad load_of(std::span<const double> costs, std::span<const int> ranks, int num_ranks) {
  std::vector<double> loads(static_cast<size_t>(num_ranks));
  for (size_t i = 0; i < costs.size(); ++i) loads[static_cast<size_t>(ranks[i])] += costs[i];
  return {std::reduce(loads.begin(), loads.end()) / num_ranks, std::ranges::max(loads)};
}

RankLoad balance(Communicator& comm, const Transformer& model,
                 std::vector<TokenSequence>& sequences, int64_t count, int64_t lanes) {
  return balance_sequences(comm, model, sequences, count, lanes);
}
RankLoad balance(Communicator& comm, const Transformer& model,
                 std::vector<PolicySequence>& sequences, int64_t count, int64_t lanes) {
  return balance_sequences(comm, model, sequences, count, lanes);
}

}  // namespace cohort
