// A rank and the other ranks of its run. Their connections stay open: over them ranks exchange
// small data, and each watches that the others are alive and make the same calls. So a rank that
// dies, hangs or goes another way ends the run with a message that names it, where NCCL alone would
// wait for ever.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "dist/rank_info.h"

namespace cohort {

struct Peer;

class ProcessGroup {
 public:
  enum class Origin { kHere, kElsewhere };  // of a failure
  struct Options {
    std::chrono::milliseconds rendezvous{60000};  // for all ranks to come
    std::chrono::milliseconds heartbeat{1000};    // between signs of life
    std::chrono::milliseconds silence{20000};     // without one a rank counts as dead
    std::chrono::milliseconds grace{5000};        // for this rank to end after a failure
    std::chrono::milliseconds long_grace{20000};  // the same, while is_busy() says so
    std::function<bool()> is_busy;                // called on another thread
    // That all ranks together may bring to one exchange.
    size_t max_exchange = size_t{1} << 26;
    // Called on another thread when the grace is over.
    std::function<void(const std::string& failure, Origin origin)> on_overdue;
  };
  // COHORT_RENDEZVOUS_TIMEOUT (seconds) for `rendezvous`. Throws InputError if it is no number.
  static Options default_options();

  // One process among others: see rendezvous() for what it throws.
  ProcessGroup(const RankInfo& info, const Options& options);
  // The groups of `size` ranks that are threads of this process.
  static std::vector<std::unique_ptr<ProcessGroup>> of_threads(int size);
  // Tells the others that this rank has ended in good order, unless something has failed.
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  const RankInfo& info() const { return info_; }
  int rank() const { return info_.rank; }
  int size() const { return info_.size; }
  // The ranks are threads.
  bool is_one_process() const { return info_.master_addr.empty(); }

  // Notes that this rank makes a collective call that may not come back: `call` must read the same
  // on every rank. Throws PeerError if there has been a failure.
  void note_call(std::string_view call);
  // The bytes of every rank, in rank order: a collective call of its own. Throws PeerError when it
  // cannot take place. No rank brings more than max_part().
  std::vector<std::string> exchange(std::string_view call, std::string_view bytes);
  size_t max_part() const { return max_exchange_ / static_cast<size_t>(info_.size); }
  // Rank 0's text on every rank.
  std::string broadcast(std::string_view call, std::string_view text);

  // Tells the others that, and why, this rank ends. The first failure of a run is the one all ranks
  // report; nothing happens if there has been one.
  void fail(const std::string& reason);
  // "rank 3 (host) failed: ...", or "" while all is well.
  std::string failure() const;
  // Waits up to `limit` for one.
  std::string wait_for_failure(std::chrono::milliseconds limit) const;
  // `handler` is called once when there is a failure, on another thread, to end what this rank
  // waits for in vain; at once if there has been one. An empty one takes it away, and returns when
  // it no longer runs.
  void set_failure_handler(std::function<void()> handler);

 private:
  class Watch;
  ProcessGroup(const RankInfo& info, const Options& options, std::vector<Peer> peers);
  const RankInfo info_;
  const size_t max_exchange_;
  std::unique_ptr<Watch> watch_;
};

}  // namespace cohort
