// What the ranks of a run share out, and what they put together again. Every rank makes the same
// calls.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dist/communicator.h"

namespace cohort {

// Sum (or maximum) of each number over the ranks.
std::vector<double> reduce_over_ranks(Communicator& comm, const std::vector<double>& values,
                                      Reduce op = Reduce::kSum);
// The same for numbers where they stand, each by its name.
void reduce_in_place(Communicator& comm, const std::vector<double*>& numbers,
                     Reduce op = Reduce::kSum);

// Joins texts of which each rank has some: texts[i] on the one rank that has it, "" on the others.
// All of them, on every rank.
std::vector<std::string> gather_texts(Communicator& comm, const std::vector<std::string>& texts);

// Items [begin, end) of `count` that belong to a rank of `size`: neighbours, in the order of the
// ranks. What does not divide goes to other ranks each turn, so that over the turns all ranks get
// the same number of items.
struct RankShare {
  int64_t begin = 0, end = 0;
};
RankShare share_of(int64_t count, int rank, int size, int64_t turn = 0);

}  // namespace cohort
