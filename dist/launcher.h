// Starts the ranks of a run as processes of this machine and looks after them: `cohort train
// --gpus N`.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace cohort {

struct LaunchOptions {
  std::vector<std::string> command;  // the program's path and its arguments
  int count = 1;
  // After a rank has ended with an error the others get this long to end by themselves.
  std::chrono::milliseconds grace{30000};
  // What a rank exits with when another one is to blame.
  int echo_code = -1;
  // The lines that ranks other than 0 write; rank 0 writes to this process's own output.
  std::function<void(int rank, const std::string& line)> on_line;
};

struct LaunchResult {
  int code = 0;         // 0, or that of the first rank to fail: its exit code, 128 + N for signal N
  std::string message;  // what there is to say about ranks that signals ended
};

// Runs `count` copies of the command, with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
// MASTER_ADDR and MASTER_PORT set, until all have ended. When `stop` becomes true they get SIGTERM.
// None outlives this process. Throws Error if they cannot be started.
LaunchResult launch_ranks(const LaunchOptions& options, const std::atomic<bool>& stop);

}  // namespace cohort
