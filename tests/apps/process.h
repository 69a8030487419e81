// Running the `cohort` binary: to its end, or until it is killed.
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

// Calls of the C library that fail in a process: see tests/support/faults/faults.cpp.
struct Fault {
  std::string call, path;  // of calls for a path that contains `path`
  int error = 0;           // errno; 0: half of a write() is done; -1: the process is killed
  int pass = 0;            // calls that succeed before
  int fail = 1 << 30;      // calls that fail then
};

// A running `cohort` process. Its output goes to files in a folder of its own.
class Process {
 public:
  explicit Process(const std::vector<std::string>& arguments, const std::string& input = "",
                   const Fault& fault = {});
  ~Process();  // kills what still runs
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void signal(int number) const;
  // Waits for the end.
  Output wait();
  bool running();
  // What it has written so far.
  std::string out() const;
  std::string err() const;
  // Whether it has asked for a signal to be ignored.
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
  // Returns as soon as an entry appears whose name starts with `prefix`; false when `process` ends
  // before.
  bool wait_for(const std::string& prefix, Process& process);

 private:
  int fd_;
};

// Waits for a path to exist; false when `process` ends before.
bool wait_for_path(const std::string& path, Process& process);

// Whether a shell's `command`, which looks for a tool that tests can do without, succeeds. Where
// COHORT_REQUIRE has `name`, it is a test failure that it does not.
bool have_tool(const std::string& name, const std::string& command);

// Expects exit code 2, nothing else than one "cohort: ..." line on standard error, and every text
// in it.
void expect_bad_input(const Output& output, const std::vector<std::string>& texts);

}  // namespace cohort::test
