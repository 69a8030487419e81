// The makers of environments, for the table in rl/environment.cpp.
#pragma once

#include "rl/environment.h"

namespace cohort {

// Tools that the policy calls in the format of its chat template. `format` is not kAuto.
std::unique_ptr<Environment> make_tools_environment(const EnvironmentConfig& config,
                                                    EnvironmentContext context, ToolFormat format);
// A program or a function that answers turns. `format`: of the tool calls that are parsed for it;
// nullopt: none.
std::unique_ptr<Environment> make_command_environment(const EnvironmentConfig& config,
                                                      EnvironmentContext context,
                                                      std::optional<ToolFormat> format);
// JSON schemas of the built-in tools that the configuration names.
Json tools_environment_schemas(const EnvironmentConfig& config);

}  // namespace cohort
