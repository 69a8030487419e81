#include "job/sharded_state.h"

#include <algorithm>
#include <optional>

#include "core/on_exit.h"
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

namespace {

// The files of a save: which rank writes which units.
struct Layout {
  std::vector<std::vector<size_t>> units;  // by rank
  std::vector<std::string> file_of;        // by rank; empty: it writes none
  std::vector<std::pair<std::string, std::vector<TensorSource>>> files;
};

Layout layout_of(Optimizer& optimizer, const ParameterSet& set, int ranks) {
  int64_t weights = 0;  // rank 0 writes them
  for (const NamedParameter& p : set) weights += p.trained() ? p.value.nbytes() : 0;
  std::vector<int64_t> bytes(set.units().size());
  for (size_t unit = 0; unit < bytes.size(); ++unit)
    for (const TensorSource& source : optimizer.state_sources(unit)) bytes[unit] += source.bytes();
  const std::vector<int> writers = writers_of(bytes, ranks, weights);
  Layout out;
  out.units.resize(static_cast<size_t>(ranks));
  out.file_of.resize(out.units.size());
  for (size_t unit = 0; unit < bytes.size(); ++unit)
    if (bytes[unit] > 0) out.units[static_cast<size_t>(writers[unit])].push_back(unit);
  const auto count = std::ranges::count_if(out.units, [](const auto& u) { return !u.empty(); });
  for (size_t rank = 0; rank < out.units.size(); ++rank) {
    if (out.units[rank].empty()) continue;
    std::vector<TensorSource> tensors;
    for (const size_t unit : out.units[rank])
      for (TensorSource& source : optimizer.state_sources(unit))
        tensors.push_back(std::move(source));
    out.file_of[rank] = shard_name(kStem, std::ssize(out.files) + 1, count);
    out.files.emplace_back(out.file_of[rank], std::move(tensors));
  }
  return out;
}

}  // namespace

std::vector<WrittenFile> write_sharded_state(Optimizer& optimizer, const ParameterSet& set,
                                             Communicator& comm, const std::string& folder) {
  const auto own = static_cast<size_t>(comm.rank());
  const OnExit free_gathered([&] { optimizer.free_gathered(); });
  const Layout layout = layout_of(optimizer, set, comm.size());
  const std::string &file = layout.file_of[own], path = folder + "/" + file;
  std::optional<SafetensorsWriter> writer;
  comm.barrier();  // rank 0 has made the folder
  together(comm, [&] {
    for (const auto& [name, tensors] : layout.files)
      if (name == file) writer.emplace(path, tensors);
  });
  size_t rounds = 0;
  for (const auto& units : layout.units) rounds = std::max(rounds, units.size());
  const std::vector<size_t>& mine = layout.units[own];
  for (size_t round = 0; round < rounds; ++round) {
    const bool writes = round < mine.size();
    together(comm, [&] {
      optimizer.allocate_gathered(writes ? std::optional(mine[round]) : std::nullopt);
    });
    for (size_t rank = 0; rank < layout.units.size(); ++rank)
      if (round < layout.units[rank].size())
        optimizer.gather_state(comm, layout.units[rank][round], static_cast<int>(rank));
    together(comm, [&] {
      if (!writes) return;
      for (const TensorSource& source : optimizer.state_sources(mine[round]))
        writer->append(source);
    });
  }
  std::vector<std::string> written(layout.units.size());
  together(comm, [&] {
    if (writer) {
      writer->finish();
      written[own] = str(readable_size(path), " ", file_checksum(path));
    }
    if (own == 0 && layout.files.size() > 1) write_index(folder, kStem, layout.files);
  });
  written = gather_texts(comm, written);
  std::vector<WrittenFile> out;
  for (size_t rank = 0; rank < written.size(); ++rank)
    if (!written[rank].empty())
      out.push_back({.name = layout.file_of[rank],
                     .bytes = std::stoll(written[rank]),
                     .checksum = written[rank].substr(written[rank].find(' ') + 1)});
  return out;
}

}  // namespace cohort
