// Ranks that connect over TCP, each on a thread of this process.
#pragma once

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "distributed/communicator.h"
#include "distributed/process_group.h"
#include "sys/sockets.h"
#include "tests/support/test_util.h"

namespace cohort::test {

inline RankInfo local_info(int rank, int size, int port) {
  return {.rank = rank,
          .size = size,
          .local_rank = rank,
          .local_size = size,
          .master_addr = "127.0.0.1",
          .master_port = port,
          .source = "test"};
}

// Short time limits, for fast detection of failures.
inline ProcessGroup::Options quick_options() {
  using std::chrono::milliseconds;
  return {.rendezvous = milliseconds(10000),
          .heartbeat = milliseconds(20),
          .heartbeat_timeout = milliseconds(5000),
          .grace = milliseconds(60000),
          .on_overdue = {}};
}

// Runs body(group) on `size` ranks and returns the error of each ("" without one). A rank that
// throws reports its failure to the others.
inline std::vector<std::string> run_process_ranks(int size,
                                                  const std::function<void(ProcessGroup&)>& body,
                                                  ProcessGroup::Options options = quick_options()) {
  const int port = free_port();
  std::vector<std::string> errors(static_cast<size_t>(size));
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < size; ++rank)
      threads.emplace_back([&, rank] {
        try {
          ProcessGroup group(local_info(rank, size, port), options);
          try {
            body(group);
          } catch (const std::exception& e) {
            group.fail(e.what());
            throw;
          }
        } catch (const std::exception& e) {
          errors[static_cast<size_t>(rank)] = e.what();
        }
      });
  }
  return errors;
}

inline void expect_no_errors(const std::vector<std::string>& errors) {
  for (size_t rank = 0; rank < errors.size(); ++rank)
    EXPECT_EQ(errors[rank], "") << "rank " << rank;
}

}  // namespace cohort::test
