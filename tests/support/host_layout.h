// Ranks of one process as if they were on several hosts.
#pragma once

#include <string>
#include <vector>

#include "distributed/communicator.h"

namespace cohort::test {

// Passes all calls on, and keeps the texts of those that exchange rows.
class HostLayout : public Communicator {
 public:
  HostLayout(Communicator& comm, int hosts) : comm_(comm), hosts_(hosts) {}
  int rank() const override { return comm_.rank(); }
  int size() const override { return comm_.size(); }
  int hosts() const override { return hosts_; }
  void all_reduce(Tensor& t, Reduce op) override { comm_.all_reduce(t, op); }
  void all_to_all(Tensor& received, const Tensor& parts, const RankSets& among) override {
    calls.push_back(describe_all_to_all(received, parts, among));
    comm_.all_to_all(received, parts, among);
  }
  void all_gather(Tensor& all) override { comm_.all_gather(all); }
  void barrier() override { comm_.barrier(); }
  std::vector<std::string> calls;

 private:
  Communicator& comm_;
  const int hosts_;
};

}  // namespace cohort::test
