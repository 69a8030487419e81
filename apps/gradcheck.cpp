// `cohort gradcheck`: the table of differentiable ops with the error of each gradient.
#include <cstdio>
#include <set>

#include "apps/commands.h"
#include "core/text.h"
#include "tests/support/op_cases.h"

namespace cohort::apps {

int gradcheck(const std::string& op) {
  std::set<std::string> known;
  int failed = 0, num_cases = 0;
  for (const OpCase& test : op_cases()) {
    known.insert(test.op);
    if (!op.empty() && test.op != op) continue;
    if (num_cases++ == 0)
      std::printf("%-18s %-36s %8s %18s\n", "op", "case", "checks", "error / tolerance");
    const GradcheckResult result = run_op_case(test);
    failed += !result.ok;
    std::printf("%-18s %-36s %8lld %18.2e%s\n", std::string(test.op).c_str(), test.variant.c_str(),
                static_cast<long long>(result.checks), result.worst,
                result.ok ? "" : str("  FAILED: ", result.message).c_str());
  }
  if (num_cases == 0)
    throw InputError(
        str("gradcheck: unknown op '", op, "'; known: ", join({known.begin(), known.end()}, ", ")));
  std::printf("%d cases, %d failed (tolerance: 1e-6 relative + 1e-9 of the largest gradient)\n",
              num_cases, failed);
  return failed == 0 ? kOk : kFailed;
}

}  // namespace cohort::apps
