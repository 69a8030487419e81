// Starts the ranks of a run as processes of this machine and supervises them: `cohort train
// --gpus N`.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace cohort {

struct LaunchResult {
  int code = 0;         // exit code of the first failed rank, or 128 + N for signal N; else 0
  std::string message;  // about ranks that were terminated by signals
};

struct LaunchOptions {
  std::vector<std::string> command;  // the program's path and its arguments
  int count = 1;
  // Time for the other ranks to end by themselves after one has failed.
  std::chrono::milliseconds grace{30000};
  // Exit code of a rank that ends because a peer has failed.
  int exit_code_of_peer = -1;
  // All ranks are started again up to `restarts` times, unless `stop` is true or the exit code is
  // one of final_codes. on_restart is called before each, with the failure.
  int restarts = 0;
  std::vector<int> final_codes;
  std::function<void(const LaunchResult& failed)> on_restart;
  // Receives the output lines of ranks other than 0; rank 0 writes to the output of this process.
  std::function<void(int rank, const std::string& line)> on_line;
};

// Runs `count` copies of the command, with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
// MASTER_ADDR, MASTER_PORT and TORCHELASTIC_RUN_ID (a random name) set, until all have ended. They
// receive SIGTERM when `stop` becomes true. No rank outlives this process. Returns the result of
// the last start. Throws Error if they cannot be started.
LaunchResult launch_ranks(const LaunchOptions& options, const std::atomic<bool>& stop);

}  // namespace cohort
