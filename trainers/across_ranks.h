// Sharding of work over the ranks of a run, and reduction of their results. Every rank makes the
// same calls.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "distributed/communicator.h"

namespace cohort {

// Sum (or maximum) of each number over the ranks.
std::vector<double> reduce_over_ranks(Communicator& comm, std::vector<double> values,
                                      Reduce op = Reduce::kSum);
// Reduces each number in place.
void reduce_in_place(Communicator& comm, const std::vector<double*>& numbers,
                     Reduce op = Reduce::kSum);

// Gathers lists of numbers of which each rank has some: lists[i] on the one rank that has it, empty
// on the others. Returns all of them on every rank. They are reduced on `device`.
std::vector<std::vector<double>> gather_numbers(Communicator& comm,
                                                const std::vector<std::vector<double>>& lists,
                                                Device device = {});
// Gathers texts of which each rank has some: texts[i] on the one rank that has it, "" on the
// others. Returns all of them on every rank.
std::vector<std::string> gather_texts(Communicator& comm, const std::vector<std::string>& texts);
// The text of the first rank whose `text` is not empty, on every rank; "" if all are empty.
std::string first_text(Communicator& comm, const std::string& text);

// Runs `work`, which makes no collective call, on every rank. If it throws NonFiniteError or
// OutOfMemoryError on one of them, all throw that kind of error; a rank where it did not says that
// another rank did.
void on_all_ranks(Communicator& comm, const std::function<void()>& work);

// Items [begin, end) of `count` that belong to a rank of `size`: contiguous, in rank order. The
// remainder goes to other ranks in each rotation, so that over `size` rotations all ranks get the
// same number of items.
struct RankShard {
  int64_t begin = 0, end = 0;
};
RankShard shard_of(int64_t count, int rank, int size, int64_t rotation = 0);

}  // namespace cohort
