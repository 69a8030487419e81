// Memory that the system grants this process.
#pragma once

#include <cstdint>
#include <string>

namespace cohort {

// Bytes that the control groups of this process (containers, batch systems) leave it: the smallest
// of limit - use over a group and its parents, page cache that can be dropped not counted as use.
// INT64_MAX without a limit. `self` lists the groups (cgroups(7)), whose files are below `root`.
int64_t free_memory_of_groups(const std::string& root = "/sys/fs/cgroup",
                              const std::string& self = "/proc/self/cgroup");

}  // namespace cohort
