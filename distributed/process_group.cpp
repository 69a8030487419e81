// The ranks form a star around rank 0. One thread per rank, the monitor, does all I/O: it sends
// heartbeats, detects heartbeat timeouts and broken connections, compares the calls that ranks
// report, completes exchanges and judges who hangs (rank 0), and propagates failures. Other threads
// only queue messages for it. The failure handler runs on a thread of its own, since it may block
// while the monitor has to end a process that does not end by itself.
#include "distributed/process_group.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>

#include "core/log.h"
#include "core/progress.h"
#include "distributed/communicator.h"
#include "distributed/rendezvous.h"
#include "sys/sockets.h"

namespace cohort {
namespace {

using std::chrono::milliseconds;
using wire::Frame;
using wire::FrameType;

constexpr milliseconds kFlushLimit{2000};  // for the last messages
constexpr size_t kHistory = 256;           // calls
constexpr int kWarnings = 5;               // a warning after this fraction of the watchdog's limit
constexpr uint64_t kAllRanks = UINT64_MAX;

std::string duration_text(milliseconds time) {
  const double seconds = static_cast<double>(time.count()) / 1000;
  return seconds < 60 ? str(seconds, " s") : str(seconds / 60, " min");
}

// The part of a rank's heartbeat by which a hang is found.
struct Status {
  milliseconds stalled{0};   // time without progress
  bool in_exchange = false;  // its last call, which waits for other ranks
  uint64_t device_call = 0;  // see ProcessGroup::set_device_call()
  bool has_begun = false;    // the device, that call
  std::string activity = "starting";
};

// State of a rank as seen by the monitor.
struct PeerState {
  uint64_t calls = 0;  // collective calls so far
  // On rank 0: the latest calls, not yet compared, and the data for exchanges not yet complete.
  std::deque<std::string> calls_to_compare, contributions;
  bool has_exited = false;  // cleanly
  Status status;

  // Position in the sequence of calls: 2 n in call n, where the rank waits for others, and 2 n - 1
  // on its way there.
  uint64_t position() const {
    if (status.device_call > 0) return 2 * status.device_call - !status.has_begun;
    return 2 * calls + !status.in_exchange;
  }
  bool waits() const { return position() % 2 == 0; }
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

  uint64_t record_call(std::string_view call) {
    std::lock_guard lock(mutex_);
    if (!failure_.empty()) throw_failure(call);
    new_calls_.emplace_back(call);
    return calls_ + new_calls_.size();
  }

  void set_device_call(uint64_t number, bool begun) {
    std::lock_guard lock(mutex_);
    own_.device_call = number;
    own_.has_begun = begun;
  }

  std::string deal(std::string_view call, std::string_view bytes, const Deal& deal) {
    std::unique_lock lock(mutex_);
    if (!failure_.empty()) throw_failure(call);
    new_calls_.emplace_back(call);
    post(FrameType::kData, bytes);
    own_.in_exchange = true;
    changed_.wait(lock, [&] { return result_ || !failure_.empty(); });
    own_.in_exchange = false;
    if (!result_) throw_failure(call);
    std::vector<std::string> parts = std::move(*result_);
    result_.reset();
    if (!is_leader()) return std::move(parts[0]);
    lock.unlock();  // heartbeats continue
    std::vector<std::string> results = deal(std::move(parts));
    std::string own = results[0];
    lock.lock();
    if (!failure_.empty()) throw_failure(call);
    results_ = std::move(results);
    wake_.signal();
    return own;
  }

  void fail(const std::string& reason) {
    std::unique_lock lock(mutex_);
    if (!failure_.empty()) return;
    failure_origin_ = Origin::kLocal;
    set_failure(str("rank ", info_.rank, " failed: ", reason));
    post(FrameType::kFail, str(name(info_.rank), " failed: ", reason));
    flush(lock);
  }

  std::string wait_for_failure(milliseconds limit) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, limit, [&] { return !failure_.empty(); });
    return failure_;
  }

  std::string history() {
    std::lock_guard lock(mutex_);
    if (!is_leader()) return "";
    std::string out = "the last calls:";
    const auto all = std::max_element(states_.begin(), states_.end(),
                                      [](auto& a, auto& b) { return a.calls < b.calls; });
    for (uint64_t n = std::max(all->calls, uint64_t{kHistory}) - kHistory; n < all->calls;)
      out += "\n  " + call_text(*all, ++n);
    return str(out, "\nnow ", states_text());
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
    const std::string message = str("[", call.substr(0, call.find(' ')), "] ", failure_);
    if (failure_origin_ == Origin::kHang) throw HangError(message);
    throw PeerError(message);
  }

  // The status for a heartbeat, `interval` after the last one. An interval in which this process
  // was suspended counts little.
  std::string status(Clock::duration interval) {
    const Progress now = progress();
    const std::array<uint64_t, 5> seen{now.count, calls_ + new_calls_.size(), own_.in_exchange,
                                       own_.device_call, own_.has_begun};
    own_.stalled +=
        std::min(std::chrono::duration_cast<milliseconds>(interval), 2 * options_.heartbeat);
    if (std::exchange(seen_, seen) != seen) own_.stalled = milliseconds(0);
    return wire::Packer()
        .integer(static_cast<uint64_t>(own_.stalled.count()))
        .integer(own_.in_exchange)
        .integer(own_.device_call)
        .integer(own_.has_begun)
        .text(now.activity)
        .bytes();
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
    return outbox_.empty() && results_.empty() &&
           std::none_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
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
        post(FrameType::kHeartbeat, status(now - beat));
        beat = now;
      }
      process_outbox();
      for (Peer& peer : peers_) service(peer);
      compare_calls();
      if (is_leader()) complete_exchanges();
      if (is_leader()) check_progress();
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
    if (!results_.empty())  // those of a call before any message that is queued
      for (Peer& peer : peers_)
        peer.connection.post(FrameType::kResult,
                             results_[results_.size() > 1 ? static_cast<size_t>(peer.rank) : 0]);
    results_.clear();
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
    announce(str(name(peer.rank), " ", why));
  }

  // Records a failure that this rank has detected or received; the leader forwards it to all.
  void announce(const std::string& reason) {
    if (!failure_.empty()) return;
    set_failure(reason);
    if (is_leader()) send_to_all(FrameType::kFail, reason);
  }

  // Records that a rank hangs, or kAllRanks together.
  void announce_hang(uint64_t rank, const std::string& reason) {
    if (!failure_.empty()) return;
    if (rank == kAllRanks || rank == static_cast<uint64_t>(info_.rank))
      failure_origin_ = Origin::kHang;
    set_failure(reason);
    if (is_leader()) send_to_all(FrameType::kHang, wire::Packer().integer(rank).bytes() + reason);
  }

  void handle(int rank, const Frame& frame) {
    PeerState& state = states_[static_cast<size_t>(rank)];
    if (frame.type == FrameType::kFail) return announce(frame.payload);
    if (frame.type == FrameType::kResult) return deliver_result({frame.payload});
    wire::Unpacker in(frame.payload);
    if (frame.type == FrameType::kHang) {
      const uint64_t who = in.integer();
      return announce_hang(who, in.rest());
    }
    state.calls = in.integer();
    for (uint64_t n = in.integer(); n > 0; --n) {
      std::string call = in.text();
      if (is_leader())
        state.calls_to_compare.push_back(std::move(call));
      else if (rank == info_.rank)
        last_call_ = std::move(call);
    }
    if (frame.type == FrameType::kHeartbeat) {
      state.status.stalled = milliseconds(in.integer());
      state.status.in_exchange = in.integer() != 0;
      state.status.device_call = in.integer();
      state.status.has_begun = in.integer() != 0;
      state.status.activity = in.text();
    }
    state.has_exited |= frame.type == FrameType::kExit;  // a heartbeat may follow the exit
    if (is_leader() && frame.type == FrameType::kData) state.contributions.push_back(in.rest());
  }

  // Passes the result of an exchange, or on rank 0 its parts, to the waiting thread.
  void deliver_result(std::vector<std::string> parts) {
    result_ = std::move(parts);
    changed_.notify_all();
  }

  // On rank 0: delivers the parts of an exchange once every rank has contributed its own.
  void complete_exchanges() {
    if (!failure_.empty()) return;
    for (const PeerState& rank : states_)
      if (rank.contributions.empty()) return;
    std::vector<std::string> parts;
    for (PeerState& rank : states_) {
      parts.push_back(std::move(rank.contributions.front()));
      rank.contributions.pop_front();
    }
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
        if (r > 0) continue;
        history_.push_back(reference_);
        if (history_.size() > kHistory) history_.pop_front();
      }
    const auto ahead = std::find_if(states_.begin(), states_.end(), has_call);
    if (ahead == states_.end()) return;
    for (size_t r = 0; r < states_.size(); ++r)
      if (states_[r].has_exited && !has_call(states_[r]))
        return announce_absence(r, ahead->calls_to_compare.front());
  }

  // On rank 0: the rank to blame for no progress in `time`: of those that do not wait for others
  // the one furthest behind; kAllRanks if all wait.
  std::optional<uint64_t> find_hang(milliseconds time) const {
    std::optional<uint64_t> out;
    bool all_wait = true;
    for (size_t r = 0; r < states_.size(); ++r) {
      const PeerState& rank = states_[r];
      const bool stalls = !rank.has_exited && rank.status.stalled >= time;
      all_wait = all_wait && stalls && rank.waits();
      if (stalls && !rank.waits() && (!out || rank.position() < states_[*out].position())) out = r;
    }
    return all_wait ? kAllRanks : out;
  }

  // On rank 0: warns of a rank that makes no progress, and ends the run at the watchdog's limit.
  void check_progress() {
    const milliseconds limit = options_.watchdog ? options_.watchdog() : milliseconds(0);
    if (!failure_.empty() || close_by_ || limit.count() == 0) return;
    const auto message = [&](uint64_t rank, milliseconds time) {
      if (rank == kAllRanks)
        return str("the ranks have waited for each other for ", duration_text(time), ": ",
                   states_text());
      const std::string others = states_text(static_cast<int>(rank));
      return str(info_.size == 1 ? "the run" : name(static_cast<int>(rank)),
                 " has made no progress for ", duration_text(time), ": ", state_text(states_[rank]),
                 others.empty() ? "" : "; ", others);
    };
    if (const auto rank = find_hang(limit))
      return announce_hang(*rank, message(*rank, limit) + "; hint: watchdog_minutes is the limit");
    const auto rank = find_hang(limit / kWarnings);
    if (rank && !warned_)
      warn(message(*rank, limit / kWarnings) + "; the run ends after " + duration_text(limit));
    warned_ = rank.has_value();
  }

  // Logs a warning on a thread of its own: a write to a hanging disk must not stop heartbeats.
  static void warn(std::string message) {
    try {
      std::thread([message = std::move(message)] { logging::warn(message); }).detach();
    } catch (const std::system_error&) {  // no thread is left
    }
  }

  std::string name(int rank) const {
    if (info_.master_addr.empty()) return str("rank ", rank);
    std::string process = process_name();
    for (const Peer& peer : peers_)
      if (peer.rank == rank) process = peer.host;
    return str("rank ", rank, " (", process, ")");
  }

  // "call 812 (barrier)": call `number` of a rank, which rank 0 knows if it is one of the last.
  std::string call_text(const PeerState& rank, uint64_t number) const {
    const uint64_t first = compared_ - history_.size();
    const std::string* call = nullptr;
    if (number > compared_ && number - compared_ <= rank.calls_to_compare.size())
      call = &rank.calls_to_compare[number - compared_ - 1];
    else if (number > first && number <= compared_)
      call = &history_[number - first - 1];
    return call == nullptr ? str("call ", number) : str("call ", number, " (", *call, ")");
  }

  std::string state_text(const PeerState& rank) const {
    const Status& status = rank.status;
    if (rank.has_exited) return "has ended";
    if (status.device_call > 0)
      return str(status.has_begun ? "in " : "its GPU has not begun ",
                 call_text(rank, status.device_call));
    if (status.in_exchange) return "in " + call_text(rank, rank.calls);
    return status.activity + (rank.calls > 0 ? ", after " + call_text(rank, rank.calls) : "");
  }

  // "ranks 0, 2: in call 813 (barrier); rank 3: ...", without one rank.
  std::string states_text(int without = -1) const {
    constexpr size_t kMost = 8;  // ranks that are listed
    std::map<std::string, std::vector<size_t>> ranks;
    for (size_t r = 0; r < states_.size(); ++r)
      if (static_cast<int>(r) != without) ranks[state_text(states_[r])].push_back(r);
    std::string out;
    for (const auto& [state, list] : ranks) {
      out += str(out.empty() ? "" : "; ", list.size() > 1 ? "ranks " : "rank ", list[0]);
      for (size_t i = 1; i < std::min(kMost, list.size()); ++i) out += str(", ", list[i]);
      if (list.size() > kMost) out += str(" and ", list.size() - kMost, " more");
      out += ": " + state;
    }
    return out;
  }

  void announce_absence(size_t rank, const std::string& call) {
    announce(str("rank ", rank, " has ended and does not take part in this call (", call, ")"));
  }

  const RankInfo& info_;
  const Options options_;
  std::vector<Peer> peers_;        // used by the monitor only
  std::vector<PeerState> states_;  // changed by the monitor, with the lock, as compared_ to warned_
  uint64_t compared_ = 0;          // number of calls
  std::string reference_, last_call_;
  std::deque<std::string> history_;  // on rank 0: the last calls that were compared
  bool warned_ = false;              // a rank makes no progress
  WakeEvent wake_;

  std::mutex mutex_;  // protects the members below
  std::condition_variable changed_;
  uint64_t calls_ = 0;                  // calls already reported to the other ranks
  std::vector<std::string> new_calls_;  // calls not yet reported
  Status own_;
  std::array<uint64_t, 5> seen_{};  // by which progress is noticed
  std::vector<Frame> outbox_;
  std::vector<std::string> results_;  // not yet sent: one for each rank, or one for all
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
      hosts_(peers.empty() ? 1 : peers[0].hosts),
      max_exchange_(options.max_exchange),
      monitor_(std::make_unique<Monitor>(info_, options, std::move(peers))) {}
ProcessGroup::~ProcessGroup() = default;

std::vector<std::unique_ptr<ProcessGroup>> ProcessGroup::of_threads(int size) {
  std::vector<std::unique_ptr<ProcessGroup>> groups;
  std::vector<std::vector<Peer>> peers(static_cast<size_t>(size));
  const auto connect = [&](int from, int to, Descriptor socket) {
    peers[static_cast<size_t>(from)].push_back(
        {to, "", 1, wire::Connection(std::move(socket), wire::kMaxPayload)});
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

uint64_t ProcessGroup::record_call(std::string_view call) {
  return monitor_->record_call(call);
}
void ProcessGroup::set_device_call(uint64_t number, bool begun) {
  monitor_->set_device_call(number, begun);
}
std::string ProcessGroup::deal(std::string_view call, std::string_view bytes, const Deal& deal) {
  COHORT_CHECK(bytes.size() <= max_exchange_, "[", call, "] a rank may contribute at most ",
               max_exchange_, " bytes to an exchange, got ", bytes.size());
  return monitor_->deal(call, bytes, deal);
}
std::string ProcessGroup::combine(std::string_view call, std::string_view bytes,
                                  const Combine& combine) {
  return deal(call, bytes, [&](std::vector<std::string> parts) {
    return std::vector<std::string>{combine(std::move(parts))};
  });
}
std::string ProcessGroup::broadcast(std::string_view call, std::string_view text) {
  return combine(call, rank() == 0 ? text : std::string_view(),
                 [](std::vector<std::string> parts) { return std::move(parts[0]); });
}
std::vector<std::string> ProcessGroup::exchange(std::string_view call, std::string_view bytes) {
  const size_t limit = max_exchange_ / static_cast<size_t>(size());
  COHORT_CHECK(bytes.size() <= limit, "[", call, "] a rank may contribute at most ", limit,
               " bytes to this exchange, got ", bytes.size());
  const std::string all = combine(call, bytes, [](const std::vector<std::string>& parts) {
    wire::Packer out;
    for (const std::string& part : parts) out.text(part);
    return out.bytes();
  });
  wire::Unpacker in(all);
  std::vector<std::string> out(static_cast<size_t>(size()));
  for (std::string& part : out) part = in.text();
  return out;
}
void ProcessGroup::fail(const std::string& reason) {
  monitor_->fail(reason);
}
std::string ProcessGroup::wait_for_failure(milliseconds limit) const {
  return monitor_->wait_for_failure(limit);
}
std::string ProcessGroup::history() const {
  return monitor_->history();
}
void ProcessGroup::set_failure_handler(std::function<void()> handler) {
  monitor_->set_failure_handler(std::move(handler));
}

}  // namespace cohort
