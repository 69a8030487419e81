#include "job/sharded_state.h"

#include <algorithm>
#include <optional>

#include "data/safetensors.h"
#include "sys/files.h"
#include "trainers/across_ranks.h"

namespace cohort {
namespace {

constexpr const char* kStem = "optimizer";

// Runs `work` on every rank. If it throws Error on one, all throw Error with its message.
template <class F>
void together(Communicator& comm, const F& work) {
  std::string error;
  try {
    work();
  } catch (const Error& e) {
    error = e.what();
  }
  error = first_text(comm, error);
  if (!error.empty()) throw Error(error);
}

}  // namespace

std::vector<int> writers_of(const std::vector<int64_t>& unit_bytes, int ranks,
                            int64_t first_bytes) {
  std::vector<int64_t> load(static_cast<size_t>(ranks));
  load[0] = first_bytes;
  std::vector<int> out;
  for (const int64_t bytes : unit_bytes) {
    const auto least = std::ranges::min_element(load);
    *least += bytes;
    out.push_back(static_cast<int>(least - load.begin()));
  }
  return out;
}

std::vector<WrittenFile> write_sharded_state(Optimizer& optimizer, const ParameterSet& set,
                                             Communicator& comm, const std::string& folder) {
  const auto ranks = static_cast<size_t>(comm.size()), own = static_cast<size_t>(comm.rank());
  const size_t units = set.units().size();
  int64_t weights = 0;  // rank 0 writes them
  for (const NamedParameter& p : set) weights += p.trained() ? p.value.nbytes() : 0;
  std::vector<int64_t> bytes(units);
  std::vector<std::vector<TensorSource>> tensors(ranks);
  std::vector<std::vector<size_t>> units_of(ranks);
  for (size_t unit = 0; unit < units; ++unit)
    for (const TensorSource& source : optimizer.state_sources(unit)) bytes[unit] += source.bytes();
  const std::vector<int> writers = writers_of(bytes, comm.size(), weights);
  for (size_t unit = 0; unit < units; ++unit) {
    const auto writer = static_cast<size_t>(writers[unit]);
    if (bytes[unit] == 0) continue;
    units_of[writer].push_back(unit);
    for (TensorSource& source : optimizer.state_sources(unit))
      tensors[writer].push_back(std::move(source));
  }
  // Ranks without a unit write no file.
  std::vector<std::pair<std::string, std::vector<TensorSource>>> files;
  std::vector<std::string> written(ranks);
  const auto count = static_cast<int64_t>(
      std::ranges::count_if(units_of, [](const auto& list) { return !list.empty(); }));
  std::string own_file;
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (units_of[rank].empty()) continue;
    files.emplace_back(shard_name(kStem, std::ssize(files) + 1, count), tensors[rank]);
    if (rank == own) own_file = files.back().first;
  }
  std::optional<SafetensorsWriter> writer;
  comm.barrier();  // rank 0 has made the folder
  together(comm, [&] {
    if (!own_file.empty()) writer.emplace(folder + "/" + own_file, tensors[own]);
  });
  size_t rounds = 0;
  for (const auto& list : units_of) rounds = std::max(rounds, list.size());
  for (size_t round = 0; round < rounds; ++round) {
    for (size_t rank = 0; rank < ranks; ++rank)
      if (round < units_of[rank].size())
        optimizer.gather_state(comm, units_of[rank][round], static_cast<int>(rank));
    together(comm, [&] {
      if (round >= units_of[own].size()) return;
      for (const TensorSource& source : optimizer.state_sources(units_of[own][round]))
        writer->append(source);
    });
    optimizer.free_gathered();
  }
  together(comm, [&] {
    if (own_file.empty()) return;
    writer->finish();
    const std::string path = folder + "/" + own_file;
    written[own] = str(readable_size(path), " ", file_checksum(path));
  });
  together(comm, [&] {
    if (own == 0 && count > 1) write_index(folder, kStem, files);
  });
  written = gather_texts(comm, written);
  std::vector<WrittenFile> out;
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (written[rank].empty()) continue;
    const size_t space = written[rank].find(' ');
    out.push_back({.name = files[out.size()].first,
                   .bytes = std::stoll(written[rank]),
                   .checksum = written[rank].substr(space + 1)});
  }
  return out;
}

}  // namespace cohort
