// Evens out the work of the ranks of an update, which all wait for the one that has the most.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "distributed/communicator.h"
#include "nn/transformer.h"
#include "rl/policy_batch.h"

namespace cohort {

// The costs of the ranks, in floating point operations.
struct RankLoad {
  double mean = 0, largest = 0;
  void add(const RankLoad& other) {
    mean += other.mean;
    largest += other.largest;
  }
};

// The rank of each piece of work: the costliest first, each to the rank that has the least so far,
// of equal ones to the lowest (LPT: Graham, Bounds on Multiprocessing Timing Anomalies, 1969).
// `present`: the ranks that have them. They keep them unless the largest load gets at least 2 %
// smaller. Empty: no rank has them yet.
std::vector<int> assign_ranks(std::span<const double> costs, std::vector<int> present,
                              int num_ranks);
RankLoad load_of(std::span<const double> costs, std::span<const int> ranks, int num_ranks);

// Moves sequences to the ranks that assign_ranks() gives them to, those of a group together. With
// lanes they are divided in this way among these, by nothing but their costs. On return `sequences`
// are this rank's, by lane and index, with the same values. Indices and groups of all ranks are
// unique, and less than `count`. Returns the load, over the lanes if there are any; {0, 0} with one
// rank and no lanes, and with images, which stay where they are.
RankLoad balance(Communicator& comm, const Transformer& model,
                 std::vector<TokenSequence>& sequences, int64_t count, int64_t lanes = 0);
RankLoad balance(Communicator& comm, const Transformer& model,
                 std::vector<PolicySequence>& sequences, int64_t count, int64_t lanes = 0);

}  // namespace cohort
