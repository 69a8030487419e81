// Rendezvous of the processes of a run: rank 0 listens, the others connect to it, and all verify
// that they belong to the same run. Unknown peers are rejected, with one warning. A rank that
// restarts before the rendezvous is complete replaces its earlier connection.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "distributed/rank_info.h"
#include "distributed/wire.h"

namespace cohort {

// A rank at the other end of a connection.
struct Peer {
  int rank = 0;
  std::string host;  // its process_name(); empty: a thread of this process
  int hosts = 1;     // see ProcessGroup
  wire::Connection connection;
};

// Host and process id of this process: "node7, pid 4242".
std::string process_name();

// Returns once all ranks are connected: on rank 0 the other ranks in rank order, elsewhere rank 0.
// Throws Error after `limit`, naming the missing ranks; InputError on rank 0 if the ranks disagree
// about the run, and PeerError with the reason on the ranks that rank 0 rejects.
std::vector<Peer> rendezvous(const RankInfo& info, std::chrono::milliseconds limit);

}  // namespace cohort
