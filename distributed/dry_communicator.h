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
  // Throws Error unless 0 <= rank < size. `hosts` divides size.
  DryCommunicator(int rank, int size, int hosts = 1) : rank_(rank), size_(size), hosts_(hosts) {
    COHORT_CHECK(rank >= 0 && rank < size, "[dry_communicator] expected a rank of ", size, ", got ",
                 rank);
  }
  struct Call {
    std::string text;  // "all_gather of f32[8, 64]"
    int64_t sent = 0;  // bytes from this rank to others; all but all_to_all count as in a ring
    int64_t far = 0;   // the part of `sent` that goes to other hosts
  };
  const std::vector<Call>& calls() const { return calls_; }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int hosts() const override { return hosts_; }
  void all_reduce(Tensor& t, Reduce op) override {
    record_ring(describe_all_reduce(t, op), 2 * t.nbytes());
  }
  void all_to_all(Tensor& received, const Tensor& parts, const RankSets& among) override {
    const int local = size_ / hosts_;
    Call call{describe_all_to_all(received, parts, among)};
    for (int i = 0; i < among.count; ++i) {
      const int to = among.member(rank_, i);
      if (to != rank_) call.sent += parts.nbytes() / among.count;
      if (to / local != rank_ / local) call.far += parts.nbytes() / among.count;
    }
    calls_.push_back(std::move(call));
  }
  void all_gather(Tensor& all) override {
    record_ring(describe_all_gather(all, size_), all.nbytes());
  }
  void barrier() override { record_ring("barrier", 0); }

 private:
  // A ring passes from host to host through the cards of all ranks.
  void record_ring(std::string text, int64_t bytes) {
    const int64_t sent = bytes / size_ * (size_ - 1);
    calls_.push_back({std::move(text), sent, hosts_ > 1 ? sent / size_ * hosts_ : 0});
  }

  const int rank_, size_, hosts_;
  std::vector<Call> calls_;
};

}  // namespace cohort
