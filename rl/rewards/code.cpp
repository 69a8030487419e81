// code: runs the program in the last fenced block of the completion on the tests of the line, by
// scripts/cohort_sandbox.py, which is a program as those of `command` are. To {"index": 3, "code":
// "..."} that answers {"index": 3, "output": "...", "outcome": "..."}, for the tool `python`.
#include <dlfcn.h>

#include <filesystem>

#include "core/log.h"
#include "core/parallel.h"
#include "rl/rewards/rewards.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;
constexpr const char* kScript = "cohort_sandbox.py";
constexpr double kStartOfSandbox = 5;  // seconds that an answer may take beyond the timeout

// The script beside the Python package's library, in an installed Cohort's share/cohort, or in the
// source tree that this was built from.
std::string script_path() {
  std::vector<std::string> places;
  Dl_info library;
  // The path of a program, unlike that of a library, is what its caller says it is.
  if (::dladdr(reinterpret_cast<const void*>(&script_path), &library) != 0)
    if (const fs::path file = library.dli_fname; file.is_absolute() && file.extension() == ".so")
      places.push_back(file.parent_path() / kScript);
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  if (!error) places.push_back(program.parent_path().parent_path() / "share" / "cohort" / kScript);
  places.push_back(fs::path(COHORT_SCRIPTS) / kScript);
  for (const std::string& place : places)
    if (fs::is_regular_file(place, error)) return place;
  throw InputError(str("the sandbox is missing: there is no ", join(places, ", no "),
                       "; hint: install Cohort again"));
}

// A word of a command line, as split_command() reads it.
std::string word(const std::string& key, const std::string& text) {
  const char* quote = text.find('\'') == std::string::npos ? "'" : "\"";
  if (*quote == '"' && text.find('"') != std::string::npos)
    throw InputError(str(key, ": has both kinds of quotes"));
  return str(" ", quote, text, quote);
}

}  // namespace

ProgramConfig code_program(const ProgramConfig& config, const CodeConfig& code) {
  ProgramConfig program = config;
  const double timeout = program.timeout.value_or(10);
  program.run =
      str("python3", word("the sandbox", script_path()), " --sandbox ", code.sandbox, " --fence ",
          code.fence, " --credit ", code.credit, " --inside ", code.inside ? "yes" : "no",
          " --timeout ", timeout, " --memory ", program.memory > 0 ? program.memory : 512,
          " --prefix", word("prefix", code.prefix), " --run", word("run", config.run));
  program.memory = 0;  // the limit of the solutions
  program.timeout = timeout + kStartOfSandbox;
  if (!program.workers) program.workers = num_threads();
  return program;
}

void log_sandbox(const std::string& name, const CodeConfig& code, const std::string& sandbox) {
  if (code.sandbox == "rlimits")
    logging::warn(name, ": the code can read and write this user's files, since sandbox: rlimits ",
                  "limits resources only");
  else
    logging::info(name, ": sandbox ", sandbox);
}

}  // namespace cohort
