// Runs the `cohort` binary to its end, or until it is killed.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/support/test_util.h"

namespace cohort::test {

struct Output {
  int code = -1;  // exit code; 128 + N if signal N ended it
  std::string out, err;
};

// Injects failures of C library calls into a process: see tests/support/faults/faults.cpp.
struct Fault {
  std::string call, path;  // the function, and a substring of the path of its calls
  int error = 0;           // errno, or a number of tests/support/faults/faults.cpp
  int pass = 0;            // calls that succeed before the failures
  int fail = 1 << 30;      // calls that fail
};

// A running `cohort` process. Its output is written to files in its own folder.
class Process {
 public:
  explicit Process(const std::vector<std::string>& arguments, const std::string& input = "",
                   const Fault& fault = {});
  ~Process();  // kills the process if it is running
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void signal(int number) const;
  // Waits until the process ends.
  Output wait();
  bool running();
  // The output so far.
  std::string out() const;
  std::string err() const;
  // True if the process ignores the signal.
  bool ignores(int number) const;

 private:
  TempDir dir_;
  pid_t pid_ = -1;
  int status_ = 0;
  bool ended_ = false;
};

Output run_cohort(const std::vector<std::string>& arguments, const std::string& input = "");
Output run_cohort_with(const Fault& fault, const std::vector<std::string>& arguments);

// Watches one folder for new entries (inotify): events between construction and wait_for() are not
// lost.
class FolderWatch {
 public:
  explicit FolderWatch(const std::string& folder);
  ~FolderWatch();
  FolderWatch(const FolderWatch&) = delete;
  FolderWatch& operator=(const FolderWatch&) = delete;
  // Returns true once an entry whose name starts with `prefix` appears, or false if `process` ends
  // first.
  bool wait_for(const std::string& prefix, Process& process);

 private:
  int fd_;
};

// Waits until a path exists; returns false if `process` ends first.
bool wait_for_path(const std::string& path, Process& process);

// True if the shell command `command`, which checks for an optional tool, succeeds. A failure is a
// test failure if COHORT_REQUIRE contains `name`.
bool have_tool(const std::string& name, const std::string& command);

// Expects exit code 2, and only one "cohort: ..." line on standard error, which contains every
// text.
void expect_bad_input(const Output& output, const std::vector<std::string>& texts);

}  // namespace cohort::test
