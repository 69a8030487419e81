// Handshake: rank r > 0 sends a hello (magic, version, number of ranks, r, process, run, hosts);
// rank 0 answers with a welcome (process, hosts) once all ranks are connected, or with the reason
// why the run cannot start.
#include "distributed/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include "core/log.h"
#include "distributed/communicator.h"
#include "sys/sockets.h"

namespace cohort {
namespace {

using std::chrono::milliseconds;
using wire::Connection;
using wire::Frame;
using wire::FrameType;

constexpr uint64_t kMagic = 0x54524f484f43;  // "COHORT"
constexpr uint64_t kVersion = 4;
constexpr size_t kMaxHello = 4096;
constexpr const char* kNoHandshake = "it sent no valid handshake";
constexpr size_t kMaxUnknownPeers = 256;
constexpr milliseconds kPoll{500};           // between checks of time limits
constexpr milliseconds kHelloLimit{5000};    // for a new connection to send its hello
constexpr milliseconds kConnectLimit{3000};  // for one attempt to connect
constexpr milliseconds kMaxPause{1000};      // between two attempts
constexpr milliseconds kAnswerMargin{2000};  // rank 0 times out first and names the missing ranks

// Sends a frame, for at most a second.
void send(Connection& connection, FrameType type, std::string_view payload) {
  connection.post(type, payload);
  const Clock::time_point end = Clock::now() + milliseconds(1000);
  do connection.send();
  while (connection.is_open() && connection.has_output() &&
         poll_until(end, {{connection.fd(), POLLOUT, 0}}));
}

Descriptor listen_for_ranks(const RankInfo& info) {
  std::string why;
  Descriptor listener = listen_on(info.master_addr, info.master_port, why);
  if (!listener.is_open())
    throw Error(str("rank 0 cannot listen on port ", info.master_port, ": ", why,
                    "; hint: set MASTER_PORT to a port that is free on ", info.master_addr));
  return listener;
}

// Rank 0.
class Server {
 public:
  Server(const RankInfo& info, milliseconds limit)
      : info_(info), limit_(limit), end_(Clock::now() + limit), listener_(listen_for_ranks(info)) {}

  std::vector<Peer> wait_for_all() {
    while (peers_.size() + 1 < static_cast<size_t>(info_.size)) {
      if (Clock::now() >= end_) fail<Error>(missing());
      wait();
      while (auto pending = accept_from(listener_)) {
        if (pending_.size() >= kMaxUnknownPeers) pending_.erase(pending_.begin());
        pending_.push_back(
            {Connection(std::move(*pending), kMaxHello), Clock::now() + kHelloLimit});
      }
      for (PendingPeer& pending : pending_) read_handshake(pending);
      std::erase_if(pending_, [](const PendingPeer& c) { return !c.connection.is_open(); });
      remove_disconnected();
    }
    std::sort(peers_.begin(), peers_.end(),
              [](const Peer& a, const Peer& b) { return a.rank < b.rank; });
    const bool agree = std::all_of(peers_.begin(), peers_.end(),
                                   [&](const Peer& p) { return p.hosts == info_.hosts(); });
    for (Peer& peer : peers_) {
      peer.hosts = agree ? info_.hosts() : 1;
      send(peer.connection, FrameType::kWelcome,
           wire::Packer().text(process_name()).integer(static_cast<uint64_t>(peer.hosts)).bytes());
      peer.connection.set_max_payload(wire::kMaxPayload);
    }
    return std::move(peers_);
  }

 private:
  // A connection without a hello so far.
  struct PendingPeer {
    Connection connection;
    Clock::time_point end;
  };

  void wait() {
    std::vector<pollfd> fds{{listener_.get(), POLLIN, 0}};
    for (const PendingPeer& c : pending_) fds.push_back({c.connection.fd(), POLLIN, 0});
    for (const Peer& p : peers_) fds.push_back({p.connection.fd(), POLLIN, 0});
    poll_until(std::min(end_, Clock::now() + kPoll), std::move(fds));
  }

  void read_handshake(PendingPeer& pending) {
    pending.connection.receive();
    const std::optional<Frame> frame = pending.connection.next();
    if (frame)
      handle_handshake(pending.connection, *frame);
    else if (!pending.connection.is_open() &&
             pending.connection.heard() > pending.end - kHelloLimit)
      reject(pending.connection, kNoHandshake);
    else if (Clock::now() > pending.end)
      pending.connection.close();
  }

  // Closes the connection; the rendezvous continues. Warns only once, since port scans recur.
  void reject(Connection& connection, const std::string& reason) {
    if (!std::exchange(warned_, true))
      logging::warn("rejected a connection to ", info_.master_addr, ":", info_.master_port,
                    " from a process that is not a rank of this run: ", reason);
    send(connection, FrameType::kFail, reason);
    connection.close();
  }

  void handle_handshake(Connection& connection, const Frame& frame) {
    uint64_t size = 0, rank = 0, hosts = 1;
    std::string host;
    try {
      wire::Unpacker in(frame.payload);
      if (frame.type != FrameType::kHello || in.integer() != kMagic)
        return reject(connection, kNoHandshake);
      if (const uint64_t version = in.integer(); version != kVersion)
        return reject(connection, str("it speaks version ", version, " of the protocol, rank 0 ",
                                      kVersion, "; hint: run one build of cohort everywhere"));
      size = in.integer();
      rank = in.integer();
      host = in.text();
      if (const std::string run = in.text(); run != info_.run)
        return reject(connection, str("it belongs to run '", run, "', rank 0 to '", info_.run,
                                      "'; hint: give every run a MASTER_PORT of its own"));
      hosts = in.integer();
    } catch (const Error&) {
      return reject(connection, kNoHandshake);
    }
    if (size != static_cast<uint64_t>(info_.size))
      disagree(connection, str("rank ", rank, " on ", host, " was started as one of ", size,
                               " ranks, rank 0 as one of ", info_.size,
                               "; hint: give every process the same WORLD_SIZE"));
    if (rank == 0 || rank >= size)
      return reject(connection, str("it claims to be rank ", rank, " of ", size));
    // A restarted rank may connect before the end of its earlier connection has been noticed.
    remove_disconnected();
    for (const Peer& p : peers_)
      if (p.rank == static_cast<int>(rank))
        disagree(connection,
                 str("two processes, on ", p.host, " and on ", host, ", are rank ", rank,
                     "; hint: give every process a RANK of its own, and every "
                     "run a MASTER_PORT of its own"));
    peers_.push_back(
        {static_cast<int>(rank), host, static_cast<int>(hosts), std::move(connection)});
  }

  // A rank that dies before the rendezvous is complete may be restarted.
  void remove_disconnected() {
    for (Peer& p : peers_) p.connection.receive();
    std::erase_if(peers_, [](const Peer& p) { return !p.connection.is_open(); });
  }

  std::string missing() const {
    std::string names;
    int count = 0;
    for (int r = 1; r < info_.size; ++r)
      if (std::none_of(peers_.begin(), peers_.end(), [&](const Peer& p) { return p.rank == r; }) &&
          ++count <= 8)
        names += str(count > 1 ? ", " : "", r);
    return str(count == 1 ? "rank " : "ranks ", names, count > 8 ? ", ..." : "", " of ", info_.size,
               " did not connect to ", info_.master_addr, ":", info_.master_port, " within ",
               static_cast<double>(limit_.count()) / 1000,
               " s; hint: check that all processes have started, and their logs; "
               "COHORT_RENDEZVOUS_TIMEOUT=SECONDS extends the limit");
  }

  template <class E>
  [[noreturn]] void fail(const std::string& reason) {
    for (Peer& p : peers_) send(p.connection, FrameType::kFail, reason);
    throw E(reason);
  }
  [[noreturn]] void disagree(Connection& with, const std::string& reason) {
    send(with, FrameType::kFail, reason);
    fail<InputError>(reason);
  }

  const RankInfo& info_;
  const milliseconds limit_;
  const Clock::time_point end_;
  Descriptor listener_;
  std::vector<PendingPeer> pending_;
  bool warned_ = false;
  std::vector<Peer> peers_;
};

// Rank > 0: sends the hello and waits until `end` for the welcome, which describes rank 0. Returns
// false with `why` if the connection should be retried.
bool shake_hands(const RankInfo& info, Peer& rank_0, Clock::time_point end, std::string& why) {
  Connection& connection = rank_0.connection;
  send(connection, FrameType::kHello,
       wire::Packer()
           .integer(kMagic)
           .integer(kVersion)
           .integer(static_cast<uint64_t>(info.size))
           .integer(static_cast<uint64_t>(info.rank))
           .text(process_name())
           .text(info.run)
           .integer(static_cast<uint64_t>(info.hosts()))
           .bytes());
  while (true) {
    connection.receive();
    if (const auto frame = connection.next()) {
      if (frame->type == FrameType::kFail) throw PeerError(frame->payload);
      if (frame->type != FrameType::kWelcome) break;
      connection.set_max_payload(wire::kMaxPayload);
      wire::Unpacker in(frame->payload);
      rank_0.host = in.text();
      rank_0.hosts = static_cast<int>(in.integer());
      return true;
    }
    why = connection.is_open() ? "it accepted the connection but did not answer"
                               : "it closed the connection";
    if (!connection.is_open() || Clock::now() >= end) return false;
    poll_until(end, {{connection.fd(), POLLIN, 0}});
  }
  throw Error(str("the process that answers at ", info.master_addr, ":", info.master_port,
                  " is not part of this run; hint: set another MASTER_PORT"));
}

Peer find_server(const RankInfo& info, milliseconds limit) {
  const Clock::time_point end = Clock::now() + limit;
  std::string why = "no answer";
  for (milliseconds pause{20}; Clock::now() < end; pause = std::min(2 * pause, kMaxPause)) {
    const auto left = std::chrono::ceil<milliseconds>(end - Clock::now());
    Descriptor socket =
        connect_to(info.master_addr, info.master_port, std::min(left, kConnectLimit), why);
    if (socket.is_open()) {
      Peer rank_0{0, "", 1, Connection(std::move(socket), kMaxHello)};
      if (shake_hands(info, rank_0, end + kAnswerMargin, why)) return rank_0;
    }
    std::this_thread::sleep_until(std::min(Clock::now() + pause, end));
  }
  throw Error(str("rank ", info.rank, " cannot reach rank 0 at ", info.master_addr, ":",
                  info.master_port, " within ", static_cast<double>(limit.count()) / 1000,
                  " s: ", why,
                  "; hint: is rank 0 running there, and does a firewall let that port through? "
                  "MASTER_ADDR and MASTER_PORT name it"));
}

}  // namespace

std::string process_name() {
  return str(host_name(), ", pid ", getpid());
}

std::vector<Peer> rendezvous(const RankInfo& info, milliseconds limit) {
  if (info.size == 1) return {};
  if (info.rank == 0) return Server(info, limit).wait_for_all();
  std::vector<Peer> server;
  server.push_back(find_server(info, limit));
  return server;
}

}  // namespace cohort
