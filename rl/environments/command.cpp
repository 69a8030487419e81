#include "rl/environments/environments.h"

namespace cohort {

std::unique_ptr<Environment> make_command_environment(const EnvironmentConfig&, EnvironmentContext,
                                                      std::optional<ToolFormat>) {
  throw Error("not there yet");
}

}  // namespace cohort
