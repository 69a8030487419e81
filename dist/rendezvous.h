// How the processes of a run find each other: rank 0 listens, the others connect to it, and all
// check that they mean the same run. Strangers that connect to the port do no harm: they are sent
// away, with one warning. A rank that died and came again before all have met takes its own place.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "dist/rank_info.h"
#include "dist/wire.h"

namespace cohort {

// A rank at the other end of a connection.
struct Peer {
  int rank = 0;
  std::string host;  // empty: a thread of this process
  wire::Connection connection;
};

// Returns when all ranks have met: to rank 0 the others in order of rank, to each of them rank 0.
// Throws Error after `limit`, naming who is missing, InputError on rank 0 where the ranks disagree
// about the run, and PeerError with the reason on those that rank 0 then sends away.
std::vector<Peer> rendezvous(const RankInfo& info, std::chrono::milliseconds limit);

}  // namespace cohort
