// A rank among ranks that do not exist: the collectives that it would call.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "distributed/communicator.h"

namespace cohort {

// Records the calls of a rank and moves nothing: tensors keep the elements that they have; those of
// a dry run (core/dry_run.h) have none. Calls are checked as everywhere, and described by the text
// that real ranks compare.
class DryCommunicator : public Communicator {
 public:
  // Throws Error unless 0 <= rank < size.
  DryCommunicator(int rank, int size) : rank_(rank), size_(size) {
    COHORT_CHECK(rank >= 0 && rank < size, "[dry_communicator] expected a rank of ", size, ", got ",
                 rank);
  }
  struct Call {
    std::string text;  // "all_gather of f32[8, 64]"
    int64_t sent = 0;  // bytes from this rank to others; an all_reduce counts as in a ring
  };
  const std::vector<Call>& calls() const { return calls_; }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void all_reduce(Tensor& t, Reduce op) override {
    record(describe_all_reduce(t, op), 2 * t.nbytes());
  }
  void all_to_all(Tensor& received, const Tensor& parts) override {
    record(describe_all_to_all(received, parts, size_), parts.nbytes());
  }
  void all_gather(Tensor& all) override { record(describe_all_gather(all, size_), all.nbytes()); }
  void barrier() override { record("barrier", 0); }

 private:
  void record(std::string text, int64_t bytes) {
    calls_.push_back({std::move(text), bytes / size_ * (size_ - 1)});
  }

  const int rank_, size_;
  std::vector<Call> calls_;
};

}  // namespace cohort
