// The ranks form a star around rank 0. One thread per rank, the watch, does all reading and
// writing: it sends heartbeats, notices silence and broken connections, compares what the ranks
// say they call, completes exchanges (rank 0) and spreads the news of a failure. Other threads only
// leave messages for it. A second thread calls the failure handler, which may block, so that the
// watch stays awake to end a process that cannot end by itself.
#include "dist/process_group.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>

#include "dist/communicator.h"
#include "dist/rendezvous.h"

namespace cohort {
namespace {

using std::chrono::milliseconds;
using wire::Clock;
using wire::Frame;
using wire::FrameType;

constexpr milliseconds kFlushLimit{2000};  // for last words

std::string name(int rank, const std::string& host) {
  return host.empty() ? str("rank ", rank) : str("rank ", rank, " (", host, ")");
}

// A rank as the watch knows it.
struct Known {
  uint64_t calls = 0;                        // that it has made
  std::deque<std::string> calls_to_compare;  // the last of them, on rank 0
  std::deque<std::string> given;  // to exchanges that have not taken place yet, on rank 0
  bool left = false;              // ended in good order
};

}  // namespace

class ProcessGroup::Watch {
 public:
  Watch(const RankInfo& info, const Options& options, std::vector<Peer> peers)
      : info_(info),
        options_(options),
        peers_(std::move(peers)),
        known_(static_cast<size_t>(info.size)),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    COHORT_CHECK(wake_.is_open(), "[process_group] no event descriptor to be had");
    const Clock::time_point now = Clock::now();
    for (Peer& peer : peers_) peer.connection.set_heard(now);
    watcher_ = std::thread([this] { watch(); });
  }

  ~Watch() {
    {
      std::unique_lock lock(mutex_);
      leaving_ = true;
      if (failure_.empty()) post(FrameType::kLeft, "");
      flush(lock);
      // Whoever hears the goodbye hangs up. Closing first could lose it on its way.
      changed_.wait_for(lock, kFlushLimit, [&] { return !failure_.empty() || !has_open(); });
      helper_stops_ = true;
      changed_.notify_all();
    }
    if (helper_.joinable()) helper_.join();
    {
      std::lock_guard lock(mutex_);
      watch_stops_ = true;
    }
    wake();
    watcher_.join();
  }

  void note_call(std::string_view call) {
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
    origin_ = Origin::kHere;
    set_failure(str("rank ", info_.rank, " failed: ", reason));
    const std::string host = info_.master_addr.empty() ? "" : wire::host_name();
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
    changed_.wait(lock, [&] { return !handler_runs_; });
    handler_ = std::move(handler);
    if (!helper_.joinable()) helper_ = std::thread([this] { help(); });
    changed_.notify_all();
  }

 private:
  // --- Called with the lock held ---

  [[noreturn]] void throw_failure(std::string_view call) const {
    throw PeerError(str("[", call.substr(0, call.find(' ')), "] ", failure_));
  }

  // Leaves a message for the watch. All but a failure bring the calls made since the last one.
  void post(FrameType type, std::string_view bytes) {
    wire::Packer out;
    if (type != FrameType::kFail) {
      out.integer(calls_ += new_calls_.size()).integer(new_calls_.size());
      for (const std::string& call : new_calls_) out.text(call);
      new_calls_.clear();
    }
    outbox_.push_back({type, out.bytes() + std::string(bytes)});
    wake();
  }

  // Waits until the watch has sent all messages.
  void flush(std::unique_lock<std::mutex>& lock) {
    changed_.wait_for(lock, kFlushLimit, [&] { return outbox_.empty() && !sending_; });
  }

  void set_failure(const std::string& reason) {
    if (!failure_.empty()) return;
    failure_ = reason;
    failed_at_ = Clock::now();
    changed_.notify_all();
  }

  // --- The helper ---

  void help() {
    std::unique_lock lock(mutex_);
    while (true) {
      const auto is_wanted = [&] { return !failure_.empty() && handler_ != nullptr; };
      changed_.wait(lock, [&] { return helper_stops_ || is_wanted(); });
      if (!is_wanted()) return;
      const std::function<void()> handler = std::exchange(handler_, nullptr);
      handler_runs_ = true;
      lock.unlock();
      handler();
      lock.lock();
      handler_runs_ = false;
      changed_.notify_all();
    }
  }

  // --- The watch ---

  bool is_leader() const { return info_.rank == 0; }
  void wake() const {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &one, sizeof one);
  }

  void watch() {
    Clock::time_point beat = Clock::now(), before = beat;
    while (true) {
      wait(beat + options_.heartbeat);
      const Clock::time_point now = Clock::now();
      // This process itself was stopped for a while: what the others sent meanwhile is still to be
      // read.
      if (now - before > options_.silence / 2)
        for (Peer& peer : peers_) peer.connection.set_heard(now);
      before = now;
      std::unique_lock lock(mutex_);
      if (now >= beat + options_.heartbeat) {
        post(FrameType::kBeat, "");
        beat = now;
      }
      take_messages();
      for (Peer& peer : peers_) attend(peer);
      compare_calls();
      if (is_leader()) complete_exchanges();
      for (Peer& peer : peers_) peer.connection.send();
      sending_ = has_output();
      if ((outbox_.empty() && !sending_) || leaving_) changed_.notify_all();
      if (watch_stops_) return;
      if (!failure_.empty() && is_overdue(now) && options_.on_overdue) {
        const std::string failure = failure_;
        lock.unlock();
        options_.on_overdue(failure, origin_);
        return;
      }
    }
  }

  bool is_overdue(Clock::time_point now) const {
    const bool is_busy = options_.is_busy && options_.is_busy();
    return now - failed_at_ > (is_busy ? options_.long_grace : options_.grace);
  }

  void wait(Clock::time_point until) {
    std::vector<pollfd> fds{{.fd = wake_.get(), .events = POLLIN, .revents = 0}};
    for (const Peer& p : peers_)
      if (p.connection.is_open())
        fds.push_back({p.connection.fd(),
                       static_cast<short>(p.connection.has_output() ? POLLIN | POLLOUT : POLLIN),
                       0});
    const auto left = std::chrono::duration_cast<milliseconds>(until - Clock::now());
    ::poll(fds.data(), fds.size(), static_cast<int>(std::max<int64_t>(left.count() + 1, 0)));
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t n = ::read(wake_.get(), &count, sizeof count);
  }

  void send_to_all(FrameType type, const std::string& payload) {
    for (Peer& peer : peers_) peer.connection.post(type, payload);
  }

  bool has_output() const {
    for (const Peer& peer : peers_)
      if (peer.connection.is_open() && peer.connection.has_output()) return true;
    return false;
  }

  bool has_open() const {
    for (const Peer& peer : peers_)
      if (peer.connection.is_open()) return true;
    return false;
  }

  // What the threads have left. The leader's own part in calls and exchanges goes to itself.
  void take_messages() {
    for (const Frame& message : outbox_) {
      if (message.type != FrameType::kFail) handle(info_.rank, message);
      if (!is_leader() || message.type != FrameType::kData)
        send_to_all(message.type, message.payload);
    }
    outbox_.clear();
  }

  void attend(Peer& peer) {
    if (known_[static_cast<size_t>(peer.rank)].left) return;
    peer.connection.receive();
    try {
      while (const auto frame = peer.connection.next()) handle(peer.rank, *frame);
    } catch (const Error& e) {
      lose(peer, e.what());
    }
    if (known_[static_cast<size_t>(peer.rank)].left) return peer.connection.close();
    if (leaving_) return;
    if (!peer.connection.is_open())
      lose(peer, "ended without a word; was it killed?");
    else if (Clock::now() - peer.connection.heard() > options_.silence)
      lose(peer, str("has been silent for ", options_.silence.count() / 1000.0,
                     " s; is its host down, or the network?"));
  }

  void lose(Peer& peer, const std::string& why) {
    peer.connection.close();
    announce(str(name(peer.rank, peer.host), " ", why));
  }

  // A failure that this rank has found or heard of: the leader tells the others.
  void announce(const std::string& reason) {
    if (!failure_.empty()) return;
    set_failure(reason);
    if (is_leader()) send_to_all(FrameType::kFail, reason);
  }

  void handle(int rank, const Frame& frame) {
    Known& known = known_[static_cast<size_t>(rank)];
    if (frame.type == FrameType::kFail) return announce(frame.payload);
    wire::Unpacker in(frame.payload);
    if (frame.type == FrameType::kResult) {
      std::vector<std::string> parts(static_cast<size_t>(info_.size));
      for (std::string& part : parts) part = in.text();
      return give(std::move(parts));
    }
    known.calls = in.integer();
    for (uint64_t n = in.integer(); n > 0; --n) {
      std::string call = in.text();
      if (is_leader())
        known.calls_to_compare.push_back(std::move(call));
      else if (rank == info_.rank)
        last_call_ = std::move(call);
    }
    known.left = frame.type == FrameType::kLeft;
    if (is_leader() && frame.type == FrameType::kData) known.given.push_back(in.rest());
  }

  // The result of an exchange, to this rank's own thread.
  void give(std::vector<std::string> parts) {
    result_ = std::move(parts);
    changed_.notify_all();
  }

  // On rank 0: once every rank has brought its part, all of them go to everyone.
  void complete_exchanges() {
    if (!failure_.empty()) return;
    for (const Known& rank : known_)
      if (rank.given.empty()) return;
    wire::Packer out;
    std::vector<std::string> parts;
    for (Known& rank : known_) {
      parts.push_back(std::move(rank.given.front()));
      rank.given.pop_front();
      out.text(parts.back());
    }
    send_to_all(FrameType::kResult, out.bytes());
    give(std::move(parts));
  }

  // Rank 0 compares the calls of all ranks, some of which are ahead of others. A rank that has left
  // is missed where another has made more.
  void compare_calls() {
    if (!failure_.empty()) return;
    if (!is_leader()) {
      if (known_[0].left && known_[static_cast<size_t>(info_.rank)].calls > known_[0].calls)
        announce_absence(0, last_call_);
      return;
    }
    const auto has_call = [](const Known& rank) { return !rank.calls_to_compare.empty(); };
    for (; std::all_of(known_.begin(), known_.end(), has_call); ++compared_)
      for (size_t r = 0; r < known_.size(); ++r) {
        const std::string call = std::move(known_[r].calls_to_compare.front());
        known_[r].calls_to_compare.pop_front();
        if (r == 0) reference_ = call;
        if (call != reference_)
          return announce(str("ranks disagree about call ", compared_ + 1, ": rank 0 calls ",
                              reference_, ", rank ", r, " calls ", call));
      }
    const auto ahead = std::find_if(known_.begin(), known_.end(), has_call);
    if (ahead == known_.end()) return;
    for (size_t r = 0; r < known_.size(); ++r)
      if (known_[r].left && !has_call(known_[r]))
        return announce_absence(r, ahead->calls_to_compare.front());
  }

  void announce_absence(size_t rank, const std::string& call) {
    announce(str("rank ", rank, " has ended and takes no part in this call (", call, ")"));
  }

  const RankInfo& info_;
  const Options options_;
  std::vector<Peer> peers_;  // the watch's alone, as is known_
  std::vector<Known> known_;
  uint64_t compared_ = 0;  // calls
  std::string reference_, last_call_;
  Descriptor wake_;

  std::mutex mutex_;  // of all that follows
  std::condition_variable changed_;
  uint64_t calls_ = 0;                  // that this rank has told the others of
  std::vector<std::string> new_calls_;  // and those that it has not
  std::vector<Frame> outbox_;
  bool sending_ = false;
  std::optional<std::vector<std::string>> result_;
  std::string failure_;
  Origin origin_ = Origin::kElsewhere;
  Clock::time_point failed_at_;
  std::function<void()> handler_;
  bool handler_runs_ = false, helper_stops_ = false, watch_stops_ = false, leaving_ = false;

  std::thread watcher_, helper_;
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
      watch_(std::make_unique<Watch>(info_, options, std::move(peers))) {}
ProcessGroup::~ProcessGroup() = default;

std::vector<std::unique_ptr<ProcessGroup>> ProcessGroup::of_threads(int size) {
  std::vector<std::unique_ptr<ProcessGroup>> groups;
  std::vector<std::vector<Peer>> peers(static_cast<size_t>(size));
  const auto connect = [&](int from, int to, Descriptor socket) {
    peers[static_cast<size_t>(from)].push_back(
        {to, "", wire::Connection(std::move(socket), wire::kMaxPayload)});
  };
  for (int rank = 1; rank < size; ++rank) {
    auto [a, b] = wire::socket_pair();
    connect(0, rank, std::move(a));
    connect(rank, 0, std::move(b));
  }
  Options options;
  options.silence = std::chrono::hours(24);  // a thread does not vanish
  for (int rank = 0; rank < size; ++rank)
    groups.emplace_back(new ProcessGroup({.rank = rank, .size = size}, options,
                                         std::move(peers[static_cast<size_t>(rank)])));
  return groups;
}

void ProcessGroup::note_call(std::string_view call) {
  watch_->note_call(call);
}
std::vector<std::string> ProcessGroup::exchange(std::string_view call, std::string_view bytes) {
  COHORT_CHECK(bytes.size() <= max_part(), "[", call, "] a rank may bring ", max_part(),
               " bytes to an exchange, got ", bytes.size());
  return watch_->exchange(call, bytes);
}
std::string ProcessGroup::broadcast(std::string_view call, std::string_view text) {
  return exchange(call, rank() == 0 ? text : std::string_view())[0];
}
void ProcessGroup::fail(const std::string& reason) {
  watch_->fail(reason);
}
std::string ProcessGroup::failure() const {
  return watch_->wait_for_failure(milliseconds(0));
}
std::string ProcessGroup::wait_for_failure(milliseconds limit) const {
  return watch_->wait_for_failure(limit);
}
void ProcessGroup::set_failure_handler(std::function<void()> handler) {
  watch_->set_failure_handler(std::move(handler));
}

}  // namespace cohort
