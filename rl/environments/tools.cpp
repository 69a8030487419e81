#include "rl/environments/environments.h"

namespace cohort {

std::unique_ptr<Environment> make_tools_environment(const EnvironmentConfig&, EnvironmentContext,
                                                    ToolFormat) {
  throw Error("not there yet");
}

Json tools_environment_schemas(const EnvironmentConfig&) {
  throw Error("not there yet");
}

}  // namespace cohort
