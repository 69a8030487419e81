// Rank r > 0 sends a hello (magic, version, number of ranks, r, host); rank 0 answers with a
// welcome when all have come, or with the reason why the run cannot start.
#include "dist/rendezvous.h"

#include <poll.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include "core/log.h"
#include "dist/communicator.h"

namespace cohort {
namespace {

using std::chrono::milliseconds;
using wire::Clock;
using wire::Connection;
using wire::Frame;
using wire::FrameType;

constexpr uint64_t kMagic = 0x54524f484f43;  // "COHORT"
constexpr uint64_t kVersion = 1;
constexpr size_t kMaxHello = 4096;
constexpr size_t kMaxStrangers = 256;
constexpr milliseconds kHelloLimit{5000};    // for a caller to say who it is
constexpr milliseconds kAnswerMargin{2000};  // rank 0 gives up first and says who is missing

milliseconds left_until(Clock::time_point end) {
  return std::max(milliseconds(0),
                  std::chrono::duration_cast<milliseconds>(end - Clock::now()) + milliseconds(1));
}

// Sends a frame, as far as it goes within a second.
void send(Connection& connection, FrameType type, std::string_view payload) {
  connection.post(type, payload);
  for (int i = 0; i < 100 && connection.is_open() && connection.has_output(); ++i) {
    connection.send();
    if (connection.has_output()) std::this_thread::sleep_for(milliseconds(10));
  }
}

// Rank 0's side.
class Server {
 public:
  Server(const RankInfo& info, milliseconds limit)
      : info_(info),
        limit_(limit),
        end_(Clock::now() + limit),
        listener_(wire::listen_on(info.master_addr, info.master_port)) {}

  std::vector<Peer> wait_for_all() {
    while (peers_.size() + 1 < static_cast<size_t>(info_.size)) {
      if (Clock::now() >= end_) fail(missing());
      wait();
      while (auto caller = wire::accept_from(listener_)) {
        if (callers_.size() >= kMaxStrangers) callers_.erase(callers_.begin());
        callers_.push_back({Connection(std::move(*caller), kMaxHello), Clock::now() + kHelloLimit});
      }
      for (Caller& caller : callers_) listen_to(caller);
      std::erase_if(callers_, [](const Caller& c) { return !c.connection.is_open(); });
      drop_those_who_left();
    }
    std::sort(peers_.begin(), peers_.end(),
              [](const Peer& a, const Peer& b) { return a.rank < b.rank; });
    for (Peer& peer : peers_) {
      send(peer.connection, FrameType::kWelcome, wire::Packer().text(wire::host_name()).bytes());
      peer.connection.set_max_payload(wire::kMaxPayload);
    }
    return std::move(peers_);
  }

 private:
  // Somebody who has connected and not yet said who it is.
  struct Caller {
    Connection connection;
    Clock::time_point end;
  };

  void wait() {
    std::vector<pollfd> fds{{.fd = listener_.get(), .events = POLLIN, .revents = 0}};
    for (const Caller& c : callers_) fds.push_back({c.connection.fd(), POLLIN, 0});
    for (const Peer& p : peers_) fds.push_back({p.connection.fd(), POLLIN, 0});
    ::poll(fds.data(), fds.size(),
           static_cast<int>(std::min(left_until(end_), milliseconds(500)).count()));
  }

  void listen_to(Caller& caller) {
    caller.connection.receive();
    const std::optional<Frame> frame = caller.connection.next();
    if (frame)
      greet(caller.connection, *frame);
    else if (!caller.connection.is_open() && caller.connection.heard() > caller.end - kHelloLimit)
      turn_away(caller.connection, "what it sent is no greeting of a rank");
    else if (Clock::now() > caller.end)
      caller.connection.close();
  }

  // The rendezvous goes on without the caller. One warning says so: who probes a port comes again.
  void turn_away(Connection& connection, const std::string& reason) {
    if (!std::exchange(warned_, true))
      logging::warn("a process that is no rank of this run came to ", info_.master_addr, ":",
                    info_.master_port, " and was sent away: ", reason);
    send(connection, FrameType::kFail, reason);
    connection.close();
  }

  void greet(Connection& connection, const Frame& frame) {
    uint64_t size = 0, rank = 0;
    std::string host;
    try {
      wire::Unpacker in(frame.payload);
      if (frame.type != FrameType::kHello || in.integer() != kMagic)
        return turn_away(connection, "what it sent is no greeting of a rank");
      if (const uint64_t version = in.integer(); version != kVersion)
        return turn_away(connection, str("it speaks version ", version, " of the protocol, rank 0 ",
                                         kVersion, "; hint: run one build of cohort everywhere"));
      size = in.integer();
      rank = in.integer();
      host = in.text();
    } catch (const Error&) {
      return turn_away(connection, "what it sent is no greeting of a rank");
    }
    if (size != static_cast<uint64_t>(info_.size))
      disagree(connection, str("rank ", rank, " on ", host, " was started as one of ", size,
                               " ranks, rank 0 as one of ", info_.size,
                               "; hint: give every process the same WORLD_SIZE"));
    if (rank == 0 || rank >= size)
      return turn_away(connection, str("it calls itself rank ", rank, " of ", size));
    // A rank that died and was started again may call before its end has been seen.
    drop_those_who_left();
    for (const Peer& p : peers_)
      if (p.rank == static_cast<int>(rank))
        disagree(connection,
                 str("two processes, on ", p.host, " and on ", host, ", are rank ", rank,
                     "; hint: give every process a RANK of its own, and every "
                     "run a MASTER_PORT of its own"));
    peers_.push_back({static_cast<int>(rank), host, std::move(connection)});
  }

  // A rank that dies before all have met may be started again.
  void drop_those_who_left() {
    for (Peer& p : peers_) p.connection.receive();
    std::erase_if(peers_, [](const Peer& p) { return !p.connection.is_open(); });
  }

  std::string missing() const {
    std::string names;
    int count = 0;
    for (int r = 1; r < info_.size; ++r) {
      if (std::any_of(peers_.begin(), peers_.end(), [&](const Peer& p) { return p.rank == r; }))
        continue;
      if (++count <= 8) names += str(count > 1 ? ", " : "", r);
    }
    return str(count == 1 ? "rank " : "ranks ", names, count > 8 ? ", ..." : "", " of ", info_.size,
               " did not come to ", info_.master_addr, ":", info_.master_port, " within ",
               static_cast<double>(limit_.count()) / 1000,
               " s; hint: have all processes been started, and do their logs say more? "
               "COHORT_RENDEZVOUS_TIMEOUT=SECONDS waits longer");
  }

  void tell_all(const std::string& reason) {
    for (Peer& p : peers_) send(p.connection, FrameType::kFail, reason);
  }
  [[noreturn]] void fail(const std::string& reason) {
    tell_all(reason);
    throw Error(reason);
  }
  [[noreturn]] void disagree(Connection& with, const std::string& reason) {
    send(with, FrameType::kFail, reason);
    tell_all(reason);
    throw InputError(reason);
  }

  const RankInfo& info_;
  const milliseconds limit_;
  const Clock::time_point end_;
  Descriptor listener_;
  std::vector<Caller> callers_;
  bool warned_ = false;  // of a stranger
  std::vector<Peer> peers_;
};

// Another rank's side.
class Client {
 public:
  Client(const RankInfo& info, milliseconds limit)
      : info_(info), limit_(limit), end_(Clock::now() + limit) {}

  Peer find_server() {
    milliseconds pause{20};
    while (Clock::now() < end_) {
      Descriptor socket = wire::connect_to(info_.master_addr, info_.master_port,
                                           std::min(left_until(end_), milliseconds(3000)), why_);
      if (socket.is_open()) {
        Connection connection(std::move(socket), kMaxHello);
        if (auto host = introduce(connection)) return {0, std::move(*host), std::move(connection)};
      }
      std::this_thread::sleep_for(std::min(pause, left_until(end_)));
      pause = std::min(2 * pause, milliseconds(1000));
    }
    throw Error(str("rank ", info_.rank, " cannot reach rank 0 at ", info_.master_addr, ":",
                    info_.master_port, " within ", static_cast<double>(limit_.count()) / 1000,
                    " s: ", why_,
                    "; hint: is rank 0 running there, and does a firewall let that port through? "
                    "MASTER_ADDR and MASTER_PORT name it"));
  }

 private:
  // The host of the server, or nothing if it hung up and is worth another call.
  std::optional<std::string> introduce(Connection& connection) {
    send(connection, FrameType::kHello,
         wire::Packer()
             .integer(kMagic)
             .integer(kVersion)
             .integer(static_cast<uint64_t>(info_.size))
             .integer(static_cast<uint64_t>(info_.rank))
             .text(wire::host_name())
             .bytes());
    const Clock::time_point end = end_ + kAnswerMargin;
    while (true) {
      connection.receive();
      if (const auto frame = connection.next()) {
        if (frame->type == FrameType::kFail) throw PeerError(frame->payload);
        if (frame->type != FrameType::kWelcome) break;
        connection.set_max_payload(wire::kMaxPayload);
        return wire::Unpacker(frame->payload).text();
      }
      if (!connection.is_open()) {
        why_ = "it was reached and hung up";
        return std::nullopt;
      }
      if (Clock::now() >= end) {
        why_ = "it was reached and did not answer";
        return std::nullopt;
      }
      pollfd ready{.fd = connection.fd(), .events = POLLIN, .revents = 0};
      ::poll(&ready, 1, static_cast<int>(std::min(left_until(end), milliseconds(500)).count()));
    }
    throw Error(str("what answers at ", info_.master_addr, ":", info_.master_port,
                    " is no process of this run; hint: set another MASTER_PORT"));
  }

  const RankInfo& info_;
  const milliseconds limit_;
  const Clock::time_point end_;
  std::string why_ = "no answer";
};

}  // namespace

std::vector<Peer> rendezvous(const RankInfo& info, milliseconds limit) {
  if (info.size == 1) return {};
  if (info.rank == 0) return Server(info, limit).wait_for_all();
  std::vector<Peer> server;
  server.push_back(Client(info, limit).find_server());
  return server;
}

}  // namespace cohort
