#include "runs/run_directory.h"

#include <filesystem>

namespace cohort {

std::string create_run_directory(const std::string& wanted) {
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(wanted).parent_path(), error);
  for (int i = 1; i < 100000 && !error; ++i) {
    const std::string path = i == 1 ? wanted : str(wanted, "-", i);
    if (std::filesystem::create_directory(path, error)) return path;
  }
  throw InputError(str("cannot create the run directory ", wanted, ": ", error.message(),
                       "; hint: set output_dir to a folder you may write to"));
}

RunLock::RunLock(const std::string& run_dir) : lock_(run_dir + "/.lock") {
  if (!lock_.is_open()) throw_errno<InputError>("cannot create ", run_dir, "/.lock");
  if (!lock_.try_lock())
    throw InputError(
        str("another process is using the run directory ", run_dir,
            "; hint: wait for it to end, or start a run of your own without --resume"));
}

}  // namespace cohort
