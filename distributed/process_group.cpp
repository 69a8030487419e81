// The ranks form a star around rank 0. One thread per rank, the monitor, does all I/O: it sends
// heartbeats, detects heartbeat timeouts and broken connections, compares the calls that ranks
// report, completes exchanges (rank 0) and propagates failures. Other threads only queue messages
// for it. The failure handler runs on a thread of its own, since it may block while the monitor has
// to end a process that does not end by itself.
#include "distributed/process_group.h"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <future>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>

#include "distributed/communicator.h"
#include "distributed/rendezvous.h"
#include "sys/sockets.h"

namespace cohort {
namespace {

using std::chrono::milliseconds;
using wire::Frame;
using wire::FrameType;

constexpr milliseconds kFlushLimit{2000};  // for the last messages

std::string name(int rank, const std::string& host) {
  return host.empty() ? str("rank ", rank) : str("rank ", rank, " (", host, ")");
}

// State of a rank as seen by the monitor.
struct PeerState {
  uint64_t calls = 0;  // collective calls so far
  // On rank 0: the latest calls, not yet compared, and the data for exchanges not yet complete.
  std::deque<std::string> calls_to_compare, contributions;
  bool has_exited = false;  // cleanly
};

}  // namespace

class ProcessGroup::Monitor {
 public:
  Monitor(const RankInfo& info, const Options& options, std::vector<Peer> peers)
      : info_(info),
        options_(options),
        peers_(std::move(peers)),
        states_(static_cast<size_t>(info.size)) {
    const Clock::time_point now = Clock::now();
    for (Peer& peer : peers_) peer.connection.set_heard(now);
    thread_ = std::thread([this] { run(); });
  }

  ~Monitor() {
    set_failure_handler({});
    {
      std::lock_guard lock(mutex_);
      close_by_ = Clock::now() + (failure_.empty() ? 2 : 1) * kFlushLimit;
      if (failure_.empty()) post(FrameType::kExit, "");
      wake_.signal();
    }
    thread_.join();
  }

  void record_call(std::string_view call) {
    std::lock_guard lock(mutex_);
    if (!failure_.empty()) throw_failure(call);
    new_calls_.emplace_back(call);
  }

  std::vector<std::string> exchange(std::string_view call, std::string_view bytes) {
    std::unique_lock lock(mutex_);
    if (!failure_.empty()) throw_failure(call);
    new_calls_.emplace_back(call);
    post(FrameType::kData, bytes);
    changed_.wait(lock, [&] { return result_ || !failure_.empty(); });
    if (!result_) throw_failure(call);
    std::vector<std::string> out = std::move(*result_);
    result_.reset();
    return out;
  }

  void fail(const std::string& reason) {
    std::unique_lock lock(mutex_);
    if (!failure_.empty()) return;
    failure_origin_ = Origin::kLocal;
    set_failure(str("rank ", info_.rank, " failed: ", reason));
    const std::string host = info_.master_addr.empty() ? "" : host_name();
    post(FrameType::kFail, str(name(info_.rank, host), " failed: ", reason));
    flush(lock);
  }

  std::string wait_for_failure(milliseconds limit) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, limit, [&] { return !failure_.empty(); });
    return failure_;
  }

  void set_failure_handler(std::function<void()> handler) {
    std::unique_lock lock(mutex_);
    handler_ = nullptr;
    const std::future<void> running = std::move(handler_run_);
    lock.unlock();
    if (running.valid()) running.wait();
    lock.lock();
    handler_ = std::move(handler);
    if (!failure_.empty()) start_handler();
  }

 private:
  // --- Called with the lock held ---

  [[noreturn]] void throw_failure(std::string_view call) const {
    throw PeerError(str("[", call.substr(0, call.find(' ')), "] ", failure_));
  }

  // Queues a message for the monitor. All but failures include the calls since the previous
  // message.
  void post(FrameType type, std::string_view bytes) {
    wire::Packer out;
    if (type != FrameType::kFail) {
      out.integer(calls_ += new_calls_.size()).integer(new_calls_.size());
      for (const std::string& call : new_calls_) out.text(call);
      new_calls_.clear();
    }
    outbox_.push_back({type, out.bytes() + std::string(bytes)});
    wake_.signal();
  }

  // Waits until the monitor has sent all messages.
  void flush(std::unique_lock<std::mutex>& lock) {
    changed_.wait_for(lock, kFlushLimit, [&] { return is_flushed(); });
  }
  bool is_flushed() const {
    return outbox_.empty() && std::none_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
             return peer.connection.is_open() && peer.connection.has_output();
           });
  }

  void set_failure(const std::string& reason) {
    if (!failure_.empty()) return;
    failure_ = reason;
    failed_at_ = Clock::now();
    changed_.notify_all();
    start_handler();
  }

  // If the system has no thread for the handler, the process ends when it is overdue.
  void start_handler() {
    try {
      if (handler_ != nullptr)
        handler_run_ = std::async(std::launch::async, std::exchange(handler_, nullptr));
    } catch (const std::system_error&) {
    }
  }

  // Peers close the connection when they receive the exit of this rank. Closing it here first could
  // lose the message.
  bool has_closed() const {
    const auto is_closed = [](const Peer& peer) { return !peer.connection.is_open(); };
    return close_by_ && (Clock::now() >= *close_by_ || (is_flushed() && !failure_.empty()) ||
                         std::all_of(peers_.begin(), peers_.end(), is_closed));
  }

  // --- Monitor thread ---

  bool is_leader() const { return info_.rank == 0; }

  void run() {
    Clock::time_point beat = Clock::now(), before = beat, until = beat;
    while (true) {
      wait(until);
      const Clock::time_point now = Clock::now();
      // This process was suspended: messages that peers sent meanwhile are still unread.
      if (now - before > options_.heartbeat_timeout / 2)
        for (Peer& peer : peers_) peer.connection.set_heard(now);
      before = now;
      std::unique_lock lock(mutex_);
      if (now >= beat + options_.heartbeat) {
        post(FrameType::kHeartbeat, "");
        beat = now;
      }
      process_outbox();
      for (Peer& peer : peers_) service(peer);
      compare_calls();
      if (is_leader()) complete_exchanges();
      for (Peer& peer : peers_) peer.connection.send();
      if (is_flushed()) changed_.notify_all();
      if (has_closed()) return;
      if (!failure_.empty() && is_overdue(now) && options_.on_overdue) {
        const std::string failure = failure_;
        lock.unlock();
        options_.on_overdue(failure, failure_origin_);
        return;
      }
      until = std::min(beat + options_.heartbeat, close_by_.value_or(Clock::time_point::max()));
    }
  }

  bool is_overdue(Clock::time_point now) const {
    const bool is_busy = options_.is_busy && options_.is_busy();
    return now - failed_at_ > (is_busy ? options_.long_grace : options_.grace);
  }

  void wait(Clock::time_point until) {
    std::vector<pollfd> fds{{wake_.fd(), POLLIN, 0}};
    for (const Peer& p : peers_)
      fds.push_back({p.connection.fd(),
                     static_cast<short>(p.connection.has_output() ? POLLIN | POLLOUT : POLLIN), 0});
    poll_until(until, std::move(fds));
    wake_.clear();
  }

  void send_to_all(FrameType type, const std::string& payload) {
    for (Peer& peer : peers_) peer.connection.post(type, payload);
  }

  // Sends the queued messages. The leader handles its own calls and exchange data locally.
  void process_outbox() {
    for (const Frame& message : outbox_) {
      if (message.type != FrameType::kFail) handle(info_.rank, message);
      if (!is_leader() || message.type != FrameType::kData)
        send_to_all(message.type, message.payload);
    }
    outbox_.clear();
  }

  void service(Peer& peer) {
    if (states_[static_cast<size_t>(peer.rank)].has_exited) return;
    peer.connection.receive();
    try {
      while (const auto frame = peer.connection.next()) handle(peer.rank, *frame);
    } catch (const Error& e) {
      handle_lost_peer(peer, e.what());
    }
    if (states_[static_cast<size_t>(peer.rank)].has_exited) return peer.connection.close();
    if (close_by_) return;
    if (!peer.connection.is_open())
      handle_lost_peer(peer, "ended without a message; was it killed?");
    else if (Clock::now() - peer.connection.heard() > options_.heartbeat_timeout)
      handle_lost_peer(peer,
                       str("sent no heartbeat for ", options_.heartbeat_timeout.count() / 1000.0,
                           " s; is its host or the network down?"));
  }

  void handle_lost_peer(Peer& peer, const std::string& why) {
    peer.connection.close();
    announce(str(name(peer.rank, peer.host), " ", why));
  }

  // Records a failure that this rank has detected or received; the leader forwards it to all.
  void announce(const std::string& reason) {
    if (!failure_.empty()) return;
    set_failure(reason);
    if (is_leader()) send_to_all(FrameType::kFail, reason);
  }

  void handle(int rank, const Frame& frame) {
    PeerState& state = states_[static_cast<size_t>(rank)];
    if (frame.type == FrameType::kFail) return announce(frame.payload);
    wire::Unpacker in(frame.payload);
    if (frame.type == FrameType::kResult) {
      std::vector<std::string> parts(static_cast<size_t>(info_.size));
      for (std::string& part : parts) part = in.text();
      return deliver_result(std::move(parts));
    }
    state.calls = in.integer();
    for (uint64_t n = in.integer(); n > 0; --n) {
      std::string call = in.text();
      if (is_leader())
        state.calls_to_compare.push_back(std::move(call));
      else if (rank == info_.rank)
        last_call_ = std::move(call);
    }
    state.has_exited |= frame.type == FrameType::kExit;  // a heartbeat may follow the exit
    if (is_leader() && frame.type == FrameType::kData) state.contributions.push_back(in.rest());
  }

  // Passes the result of an exchange to the waiting thread.
  void deliver_result(std::vector<std::string> parts) {
    result_ = std::move(parts);
    changed_.notify_all();
  }

  // On rank 0: once every rank has contributed its part, sends all parts to all ranks.
  void complete_exchanges() {
    if (!failure_.empty()) return;
    for (const PeerState& rank : states_)
      if (rank.contributions.empty()) return;
    wire::Packer out;
    std::vector<std::string> parts;
    for (PeerState& rank : states_) {
      parts.push_back(std::move(rank.contributions.front()));
      rank.contributions.pop_front();
      out.text(parts.back());
    }
    send_to_all(FrameType::kResult, out.bytes());
    deliver_result(std::move(parts));
  }

  // Rank 0 compares the calls of all ranks, some of which may be ahead. It is a failure if a rank
  // has exited and another has made more calls.
  void compare_calls() {
    if (!failure_.empty()) return;
    if (!is_leader()) {
      if (states_[0].has_exited &&
          states_[static_cast<size_t>(info_.rank)].calls > states_[0].calls)
        announce_absence(0, last_call_);
      return;
    }
    const auto has_call = [](const PeerState& rank) { return !rank.calls_to_compare.empty(); };
    for (; std::all_of(states_.begin(), states_.end(), has_call); ++compared_)
      for (size_t r = 0; r < states_.size(); ++r) {
        const std::string call = std::move(states_[r].calls_to_compare.front());
        states_[r].calls_to_compare.pop_front();
        if (r == 0) reference_ = call;
        if (call != reference_)
          return announce(str("ranks disagree about call ", compared_ + 1, ": rank 0 calls ",
                              reference_, ", rank ", r, " calls ", call));
      }
    const auto ahead = std::find_if(states_.begin(), states_.end(), has_call);
    if (ahead == states_.end()) return;
    for (size_t r = 0; r < states_.size(); ++r)
      if (states_[r].has_exited && !has_call(states_[r]))
        return announce_absence(r, ahead->calls_to_compare.front());
  }

  void announce_absence(size_t rank, const std::string& call) {
    announce(str("rank ", rank, " has ended and does not take part in this call (", call, ")"));
  }

  const RankInfo& info_;
  const Options options_;
  std::vector<Peer> peers_;  // used by the monitor only, as states_ and compared_
  std::vector<PeerState> states_;
  uint64_t compared_ = 0;  // number of calls
  std::string reference_, last_call_;
  WakeEvent wake_;

  std::mutex mutex_;  // protects the members below
  std::condition_variable changed_;
  uint64_t calls_ = 0;                  // calls already reported to the other ranks
  std::vector<std::string> new_calls_;  // calls not yet reported
  std::vector<Frame> outbox_;
  std::optional<std::vector<std::string>> result_;
  std::string failure_;
  Origin failure_origin_ = Origin::kRemote;
  Clock::time_point failed_at_;
  std::function<void()> handler_;
  std::future<void> handler_run_;              // the started handler
  std::optional<Clock::time_point> close_by_;  // set on destruction; later losses are no failures
  std::thread thread_;
};

ProcessGroup::Options ProcessGroup::default_options() {
  Options options;
  if (const char* text = std::getenv("COHORT_RENDEZVOUS_TIMEOUT")) {
    char* end = nullptr;
    const double seconds = std::strtod(text, &end);
    if (end == text || *end != '\0' || !(seconds > 0 && seconds < 1e6))
      throw InputError(str("COHORT_RENDEZVOUS_TIMEOUT: expected seconds, got '", text, "'"));
    options.rendezvous = milliseconds(static_cast<int64_t>(seconds * 1000));
  }
  return options;
}

ProcessGroup::ProcessGroup(const RankInfo& info, const Options& options)
    : ProcessGroup(info, options, cohort::rendezvous(info, options.rendezvous)) {}
ProcessGroup::ProcessGroup(const RankInfo& info, const Options& options, std::vector<Peer> peers)
    : info_(info),
      max_exchange_(options.max_exchange),
      monitor_(std::make_unique<Monitor>(info_, options, std::move(peers))) {}
ProcessGroup::~ProcessGroup() = default;

std::vector<std::unique_ptr<ProcessGroup>> ProcessGroup::of_threads(int size) {
  std::vector<std::unique_ptr<ProcessGroup>> groups;
  std::vector<std::vector<Peer>> peers(static_cast<size_t>(size));
  const auto connect = [&](int from, int to, Descriptor socket) {
    peers[static_cast<size_t>(from)].push_back(
        {to, "", wire::Connection(std::move(socket), wire::kMaxPayload)});
  };
  for (int rank = 1; rank < size; ++rank) {
    auto [a, b] = socket_pair(SOCK_STREAM | SOCK_NONBLOCK, "cannot connect two ranks");
    connect(0, rank, std::move(a));
    connect(rank, 0, std::move(b));
  }
  Options options;
  options.heartbeat_timeout = std::chrono::hours(24);  // a thread cannot disappear
  for (int rank = 0; rank < size; ++rank)
    groups.emplace_back(new ProcessGroup({.rank = rank, .size = size}, options,
                                         std::move(peers[static_cast<size_t>(rank)])));
  return groups;
}

void ProcessGroup::record_call(std::string_view call) {
  monitor_->record_call(call);
}
std::vector<std::string> ProcessGroup::exchange(std::string_view call, std::string_view bytes) {
  COHORT_CHECK(bytes.size() <= max_part(), "[", call, "] a rank may contribute at most ",
               max_part(), " bytes to an exchange, got ", bytes.size());
  return monitor_->exchange(call, bytes);
}
std::string ProcessGroup::broadcast(std::string_view call, std::string_view text) {
  return exchange(call, rank() == 0 ? text : std::string_view())[0];
}
void ProcessGroup::fail(const std::string& reason) {
  monitor_->fail(reason);
}
std::string ProcessGroup::wait_for_failure(milliseconds limit) const {
  return monitor_->wait_for_failure(limit);
}
void ProcessGroup::set_failure_handler(std::function<void()> handler) {
  monitor_->set_failure_handler(std::move(handler));
}

}  // namespace cohort
