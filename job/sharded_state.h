// The optimizer's state in files of several writers: each unit of the model is written whole, by
// one rank, so that any number of ranks can read them.
#pragma once

#include <string>
#include <vector>

#include "trainers/optimizer.h"

namespace cohort {

struct WrittenFile {
  std::string name;  // in the folder
  int64_t bytes = 0;
  std::string checksum;  // file_checksum()
};

// The rank that writes each unit, of these bytes: the one with the least to write, of which rank 0
// has `first_bytes` already.
std::vector<int> writers_of(const std::vector<int64_t>& unit_bytes, int ranks, int64_t first_bytes);

// Writes the state of an optimizer that is sharded over `comm` into `folder`, which rank 0 has
// made, with an index: optimizer.safetensors.index.json. Every rank calls it, and none returns
// before all files are on disk. Returns the files, on every rank. A rank holds one unit on its host
// at a time. Throws Error on every rank if one cannot write.
std::vector<WrittenFile> write_sharded_state(Optimizer& optimizer, const ParameterSet& set,
                                             Communicator& comm, const std::string& folder);

}  // namespace cohort
