// A rank and its connections to the other ranks of the run, over which they exchange small data and
// monitor each other. A rank that dies, hangs or makes different calls ends the run with an error
// that names it, where NCCL alone would wait forever.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/non_copyable.h"
#include "distributed/rank_info.h"

namespace cohort {

struct Peer;

class ProcessGroup : NonCopyable {
 public:
  // The rank that failed first: this one or a peer. kHang: this one, as it has made no progress.
  enum class Origin { kLocal, kRemote, kHang };
  struct Options {
    std::chrono::milliseconds rendezvous{60000};         // for all ranks to connect
    std::chrono::milliseconds heartbeat{1000};           // interval
    std::chrono::milliseconds heartbeat_timeout{20000};  // until a rank counts as dead
    std::chrono::milliseconds grace{5000};               // for this rank to end after a failure
    std::chrono::milliseconds long_grace{20000};         // instead of `grace` while is_busy()
    std::function<bool()> is_busy;                       // called on another thread
    // Limit for a rank that makes no progress (core/progress.h) and does not wait for others: then
    // the run fails. 0 or no function: without limit. Rank 0's is called, on another thread.
    std::function<std::chrono::milliseconds()> watchdog;
    // Bytes of a rank's part of an exchange, and of the result that every rank receives.
    size_t max_exchange = size_t{1} << 26;
    // Called on another thread when the grace period has expired.
    std::function<void(const std::string& failure, Origin origin)> on_overdue;
  };
  // Reads `rendezvous` from COHORT_RENDEZVOUS_TIMEOUT (seconds). Throws InputError if it is
  // invalid.
  static Options default_options();

  // Connects this process to the others. Throws as rendezvous() does.
  ProcessGroup(const RankInfo& info, const Options& options);
  // Groups of `size` ranks that are threads of this process.
  static std::vector<std::unique_ptr<ProcessGroup>> of_threads(int size);
  // Reports a clean exit to the other ranks unless there has been a failure.
  ~ProcessGroup();

  const RankInfo& info() const { return info_; }
  int rank() const { return info_.rank; }
  int size() const { return info_.size; }
  // RankInfo::hosts() if all ranks say the same, else 1.
  int hosts() const { return hosts_; }
  // True if the ranks are threads of one process.
  bool is_one_process() const { return info_.master_addr.empty(); }

  // Reports a collective call of this rank that may hang: `call` must be equal on every rank.
  // Returns its number, from 1. Throws PeerError if there has been a failure.
  uint64_t record_call(std::string_view call);
  // Reports the first recorded call that this rank's device has not completed (0: none), and
  // whether the device has begun it, so that it waits for the other ranks.
  void set_device_call(uint64_t number, bool begun);
  // Returns this rank's text of deal(the bytes of every rank in rank order), which rank 0 calls:
  // one for each rank, or one for all. Each rank contributes at most max_exchange() bytes. Throws
  // PeerError if another rank fails or makes a different call.
  using Deal = std::function<std::vector<std::string>(std::vector<std::string> parts)>;
  std::string deal(std::string_view call, std::string_view bytes, const Deal& deal);
  // Likewise with one text for all.
  using Combine = std::function<std::string(std::vector<std::string> parts)>;
  std::string combine(std::string_view call, std::string_view bytes, const Combine& combine);
  size_t max_exchange() const { return max_exchange_; }
  // Returns rank 0's text on every rank, once all have called it.
  std::string broadcast(std::string_view call, std::string_view text);
  // All-gather: returns the bytes of every rank in rank order. Rank 0 sends them all to every rank:
  // for a few bytes. Each rank contributes at most max_exchange() / size() bytes.
  std::vector<std::string> exchange(std::string_view call, std::string_view bytes);

  // Reports to the other ranks that this rank fails, with the reason. All ranks report the first
  // failure of a run; later ones are ignored.
  void fail(const std::string& reason);
  // "rank 3 (host) failed: ...", or "" without a failure.
  std::string failure() const { return wait_for_failure({}); }
  // Waits up to `limit` for a failure; returns the same as failure().
  std::string wait_for_failure(std::chrono::milliseconds limit) const;
  // The last 256 calls, one per line with its number, and what every rank does, as far as rank 0
  // knows; "" on the other ranks.
  std::string history() const;
  // `handler` is called once on another thread when a failure occurs (immediately if one already
  // has), to abort pending calls. An empty function removes it and waits for a running handler.
  void set_failure_handler(std::function<void()> handler);

 private:
  class Monitor;
  ProcessGroup(const RankInfo& info, const Options& options, std::vector<Peer> peers);
  const RankInfo info_;
  const int hosts_;
  const size_t max_exchange_;
  std::unique_ptr<Monitor> monitor_;
};

}  // namespace cohort
