// Ranks that connect over TCP: rendezvous, rejection of unknown peers, and failures of one rank,
// which end all ranks with an error that names it. A hang would exceed the time limit of ctest.
#include "distributed/process_group.h"

#include <sys/socket.h>

#include <atomic>

#include "core/progress.h"
#include "distributed/rendezvous.h"
#include "tests/distributed/process_ranks.h"

namespace cohort {
namespace {

using std::chrono::milliseconds;
using test::expect_no_errors;
using test::local_info;
using test::quick_options;
using test::run_process_ranks;

void sleep_ms(int ms) {
  std::this_thread::sleep_for(milliseconds(ms));
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "expected '" << part << "' in: " << text;
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

// Connects as an unknown peer and sends `bytes`.
Descriptor connect_and_send(int port, const std::string& bytes) {
  std::string why;
  Descriptor socket = connect_to("127.0.0.1", port, milliseconds(1000), why);
  EXPECT_TRUE(socket.is_open()) << why;
  EXPECT_EQ(::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
  return socket;
}

TEST(Rendezvous, RanksExchangeBytesInRankOrder) {
  for (const int size : {2, 4, 7})
    expect_no_errors(run_process_ranks(size, [&](ProcessGroup& group) {
      for (int round = 0; round < 50; ++round) {
        const auto all = group.exchange("numbers", str(round, ":", group.rank()));
        ASSERT_EQ(all.size(), static_cast<size_t>(size));
        for (int r = 0; r < size; ++r) ASSERT_EQ(all[static_cast<size_t>(r)], str(round, ":", r));
      }
      EXPECT_EQ(group.broadcast("text", str("from rank ", group.rank())), "from rank 0");
    }));
}

TEST(Rendezvous, ExchangesLargeData) {
  expect_no_errors(run_process_ranks(3, [](ProcessGroup& group) {
    const auto bytes_of = [](int rank) {
      std::string bytes(size_t{5} << 20, static_cast<char>('a' + rank));
      bytes += '\0';
      return bytes;
    };
    const auto all = group.exchange("megabytes", bytes_of(group.rank()));
    for (int r = 0; r < 3; ++r) EXPECT_TRUE(all[static_cast<size_t>(r)] == bytes_of(r));
  }));
}

TEST(Rendezvous, ALateRankIsWaitedFor) {
  const int port = free_port();
  std::vector<std::jthread> threads;
  for (const int rank : {1, 0, 2})  // rank 1 connects before rank 0 listens
    threads.emplace_back([&, rank] {
      sleep_ms(rank == 0 ? 150 : rank == 2 ? 400 : 0);
      ProcessGroup group(local_info(rank, 3, port), quick_options());
      EXPECT_EQ(group.exchange("ranks", str(rank)), (std::vector<std::string>{"0", "1", "2"}));
    });
}

TEST(Rendezvous, AMissingRankIsNamed) {
  const int port = free_port();
  std::vector<std::string> errors(3);
  {
    std::vector<std::jthread> threads;
    for (const int rank : {0, 2})
      threads.emplace_back([&, rank] {
        errors[static_cast<size_t>(rank)] =
            error_of([&] { rendezvous(local_info(rank, 4, port), milliseconds(600)); });
      });
  }
  expect_contains(errors[0], "ranks 1, 3 of 4 did not connect to 127.0.0.1");
  EXPECT_EQ(errors[2], errors[0]);
}

TEST(Rendezvous, WithoutRankZeroTheOthersReportItsAddress) {
  const int port = free_port();
  const std::string error =
      error_of([&] { rendezvous(local_info(2, 4, port), milliseconds(300)); });
  expect_contains(error, str("rank 2 cannot reach rank 0 at 127.0.0.1:", port, " within 0.3 s"));
  expect_contains(error, "Connection refused");
}

TEST(Rendezvous, AnotherWorldSizeIsAnError) {
  const int port = free_port();
  std::string client;
  {
    std::jthread other([&] {
      client = error_of([&] { rendezvous(local_info(1, 3, port), milliseconds(5000)); });
    });
    EXPECT_THROW_WITH(rendezvous(local_info(0, 2, port), milliseconds(5000)), InputError,
                      "was started as one of 3 ranks, rank 0 as one of 2");
  }
  expect_contains(client, "was started as one of 3 ranks, rank 0 as one of 2");
}

TEST(Rendezvous, TwoProcessesOfOneRankAreAnError) {
  const int port = free_port();
  std::jthread a(
      [&] { error_of([&] { rendezvous(local_info(1, 3, port), milliseconds(5000)); }); });
  std::jthread b(
      [&] { error_of([&] { rendezvous(local_info(1, 3, port), milliseconds(5000)); }); });
  expect_contains(error_of([&] { rendezvous(local_info(0, 3, port), milliseconds(5000)); }),
                  "are rank 1;");
}

// The hello frame of rank `rank` of `size` in a version of the protocol.
std::string hello(uint64_t version, uint64_t size, uint64_t rank) {
  constexpr uint64_t kMagic = 0x54524f484f43;
  const std::string payload = wire::Packer()
                                  .integer(kMagic)
                                  .integer(version)
                                  .integer(size)
                                  .integer(rank)
                                  .text("host")
                                  .text("")
                                  .integer(1)
                                  .bytes();
  std::string frame(5, '\0');
  frame[0] = static_cast<char>(payload.size());
  frame[4] = static_cast<char>(wire::FrameType::kHello);
  return frame + payload;
}

// Both hellos may have arrived before rank 0 reads the first connection.
TEST(Rendezvous, ARestartedRankReplacesItsEarlierConnection) {
  for (int round = 0; round < 20; ++round) {
    const int port = free_port();
    std::string error;
    {
      std::jthread server([&] {
        error = error_of([&] { rendezvous(local_info(0, 3, port), milliseconds(10000)); });
      });
      while (true) {  // until rank 0 listens
        std::string why;
        if (connect_to("127.0.0.1", port, milliseconds(100), why).is_open()) break;
        sleep_ms(1);
      }
      for (int death = 0; death < 5; ++death)
        connect_and_send(port, hello(4, 3, 1));  // closed immediately
      std::jthread again(
          [&] { error_of([&] { rendezvous(local_info(1, 3, port), milliseconds(10000)); }); });
      std::jthread other(
          [&] { error_of([&] { rendezvous(local_info(2, 3, port), milliseconds(10000)); }); });
    }
    ASSERT_EQ(error, "");
  }
}

TEST(Rendezvous, AnotherVersionIsRejectedWithAWarning) {
  const test::ExpectLog warning(
      "it speaks version 5 of the protocol, rank 0 4; hint: run one build");
  const int port = free_port();
  std::jthread server([&] {
    EXPECT_EQ(error_of([&] { rendezvous(local_info(0, 2, port), milliseconds(10000)); }), "");
  });
  std::string why;
  while (!connect_to("127.0.0.1", port, milliseconds(100), why).is_open()) sleep_ms(1);
  const Descriptor old = connect_and_send(port, hello(5, 2, 1));
  char answer[256];
  ssize_t n = -1;
  while ((n = ::recv(old.get(), answer, sizeof answer, 0)) < 0 && errno == EAGAIN) sleep_ms(1);
  expect_contains(std::string(answer, static_cast<size_t>(std::max<ssize_t>(n, 0))),
                  "it speaks version 5");
  std::jthread current([&] { rendezvous(local_info(1, 2, port), milliseconds(10000)); });
}

// The hosts of ranks with these (local_rank, local_size).
TEST(Rendezvous, RanksAgreeOnTheirHosts) {
  using Places = std::vector<std::pair<int, int>>;
  const std::pair<Places, int> cases[] = {
      {{{0, 2}, {1, 2}, {0, 2}, {1, 2}}, 2},
      {{{0, 1}, {0, 1}, {0, 1}}, 3},
      {{{0, 4}, {1, 4}, {2, 4}, {3, 4}}, 1},
      {{{0, 2}, {0, 2}, {1, 2}, {1, 2}}, 1},  // neighbours are on different hosts
      {{{0, 3}, {1, 3}, {2, 3}, {0, 1}}, 1},  // not as many on each
      {{{0, 1}, {1, 1}, {2, 1}, {3, 1}}, 1},  // the launcher does not say how many
      {{{0, 2}, {1, 2}, {0, 1}, {0, 1}}, 1},
  };
  for (const auto& [places, hosts] : cases) {
    const int port = free_port(), size = static_cast<int>(places.size()), expected = hosts;
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < size; ++rank)
      ranks.emplace_back([=, place = places[static_cast<size_t>(rank)]] {
        RankInfo info = local_info(rank, size, port);
        std::tie(info.local_rank, info.local_size) = place;
        const ProcessGroup group(info, quick_options());
        EXPECT_EQ(group.hosts(), expected);
      });
  }
}

TEST(Rendezvous, ARankOfAnotherRunIsRejected) {
  const test::ExpectLog warning("it belongs to run 'b', rank 0 to 'a'; hint: give every run");
  const int port = free_port();
  const auto connect = [&](int rank, const char* run) {
    RankInfo info = local_info(rank, 2, port);
    info.run = run;
    return error_of([&] { rendezvous(info, milliseconds(10000)); });
  };
  std::jthread server([&] { EXPECT_EQ(connect(0, "a"), ""); });
  expect_contains(connect(1, "b"), "it belongs to run 'b', rank 0 to 'a'");
  EXPECT_EQ(connect(1, "a"), "");
}

TEST(Rendezvous, UnknownPeersAreRejected) {
  const test::ExpectLog warning("not a rank of this run: it sent no valid handshake");
  const int port = free_port();
  std::jthread server([&] {
    ProcessGroup group(local_info(0, 2, port), quick_options());
    EXPECT_EQ(group.exchange("x", "0"), (std::vector<std::string>{"0", "1"}));
  });
  std::string hello_of_another_program(5, '\0');
  hello_of_another_program[0] = 16;  // a well-formed frame whose 16 bytes are not a hello
  hello_of_another_program[4] = 1;
  while (true) {  // until rank 0 listens
    std::string why;
    if (connect_to("127.0.0.1", port, milliseconds(100), why).is_open()) break;
    sleep_ms(10);
  }
  const Descriptor silent = connect_and_send(port, "");
  const Descriptor web = connect_and_send(port, "GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  const Descriptor zeros = connect_and_send(port, std::string(1000, '\0'));
  const Descriptor framed = connect_and_send(port, hello_of_another_program + std::string(16, 'x'));
  const Descriptor half = connect_and_send(port, std::string("\x10\0", 2));
  ProcessGroup group(local_info(1, 2, port), quick_options());
  EXPECT_EQ(group.exchange("x", "1"), (std::vector<std::string>{"0", "1"}));
}

TEST(Rendezvous, APortInUseIsAnError) {
  const int port = free_port();
  std::string why;
  const Descriptor taken = listen_on("127.0.0.1", port, why);
  expect_contains(error_of([&] { rendezvous(local_info(0, 2, port), milliseconds(500)); }),
                  str("rank 0 cannot listen on port ", port, ": Address already in use"));
}

TEST(ProcessGroup, AllWaitingRanksNameTheFailure) {
  for (const int culprit : {0, 2}) {
    const auto errors = run_process_ranks(4, [&](ProcessGroup& group) {
      group.exchange("first", "");
      if (group.rank() == culprit) {
        sleep_ms(50);
        throw InputError("data/train.jsonl:7 is not JSON");
      }
      group.exchange("second call", "");
    });
    for (int rank = 0; rank < 4; ++rank) {
      const std::string& error = errors[static_cast<size_t>(rank)];
      if (rank == culprit) {
        EXPECT_EQ(error, "data/train.jsonl:7 is not JSON");
      } else {
        expect_contains(error, str("[second] rank ", culprit, " ("));
        expect_contains(error, ") failed: data/train.jsonl:7 is not JSON");
      }
    }
  }
}

TEST(ProcessGroup, LaterCallsFailToo) {
  expect_no_errors(run_process_ranks(2, [](ProcessGroup& group) {
    if (group.rank() == 1) return group.fail("broken");
    EXPECT_THROW_WITH(group.exchange("a", ""), PeerError, "failed: broken");
    EXPECT_THROW_WITH(group.exchange("a", ""), PeerError, "failed: broken");
    EXPECT_THROW_WITH(group.record_call("b"), PeerError, "[b] rank 1");
    expect_contains(group.failure(), "broken");
  }));
}

// Behaves like a killed process: its connection closes without an exit message.
void die_without_a_message(const RankInfo& info, int after_ms) {
  std::vector<Peer> peers = rendezvous(info, milliseconds(5000));
  sleep_ms(after_ms);
}

TEST(ProcessGroup, ADeadRankIsNamed) {
  const int port = free_port();
  std::vector<std::string> errors(3);
  {
    std::vector<std::jthread> threads;
    threads.emplace_back([&] { die_without_a_message(local_info(1, 3, port), 100); });
    for (const int rank : {0, 2})
      threads.emplace_back([&, rank] {
        ProcessGroup group(local_info(rank, 3, port), quick_options());
        errors[static_cast<size_t>(rank)] = error_of([&] { group.exchange("x", ""); });
      });
  }
  for (const int rank : {0, 2}) {
    expect_contains(errors[static_cast<size_t>(rank)], "[x] rank 1 (");
    expect_contains(errors[static_cast<size_t>(rank)], "ended without a message");
  }
}

TEST(ProcessGroup, ADeadRankZeroIsNamed) {
  const int port = free_port();
  std::jthread server([&] { die_without_a_message(local_info(0, 2, port), 100); });
  ProcessGroup group(local_info(1, 2, port), quick_options());
  expect_contains(error_of([&] { group.exchange("x", ""); }), "ended without a message");
}

TEST(ProcessGroup, ARankWithoutHeartbeatsIsNamed) {
  auto options = quick_options();
  options.heartbeat_timeout = milliseconds(400);
  for (const int silent : {0, 1}) {
    const int port = free_port();
    std::jthread other([&] { die_without_a_message(local_info(silent, 2, port), 1500); });
    ProcessGroup group(local_info(1 - silent, 2, port), options);
    const auto start = std::chrono::steady_clock::now();
    const std::string error = error_of([&] { group.exchange("x", ""); });
    EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(1200));
    expect_contains(error, str("rank ", silent, " ("));
    expect_contains(error, "sent no heartbeat for 0.4 s");
  }
}

TEST(ProcessGroup, HeartbeatsKeepAnIdleRunAlive) {
  auto options = quick_options();
  options.heartbeat_timeout = milliseconds(1000);
  expect_no_errors(run_process_ranks(
      3,
      [](ProcessGroup& group) {
        sleep_ms(3000);
        group.exchange("x", "");
      },
      options));
}

TEST(ProcessGroup, EndingAfterTheLastCallIsNoFailure) {
  for (int i = 0; i < 30; ++i)
    expect_no_errors(run_process_ranks(3, [&](ProcessGroup& group) {
      group.exchange("x", "");
      sleep_ms(10 * ((group.rank() + i) % 3));
      EXPECT_EQ(group.failure(), "");
    }));
}

TEST(ProcessGroup, ARankThatEndsEarlyIsAnErrorForTheOthers) {
  for (const int exiting : {0, 1}) {
    const auto errors = run_process_ranks(3, [&](ProcessGroup& group) {
      group.exchange("first", "");
      if (group.rank() != exiting) group.exchange("second", "");
    });
    for (int rank = 0; rank < 3; ++rank)
      if (rank == exiting)
        EXPECT_EQ(errors[static_cast<size_t>(rank)], "");
      else
        expect_contains(
            errors[static_cast<size_t>(rank)],
            str("rank ", exiting, " has ended and does not take part in this call (second)"));
  }
}

// Calls that are only recorded, such as those of NCCL, may hang; the group detects the mismatch.
TEST(ProcessGroup, DifferentRecordedCallsAreReported) {
  const auto errors = run_process_ranks(3, [](ProcessGroup& group) {
    group.exchange("start", "");
    group.record_call(group.rank() == 2 ? "all_reduce of f32[4]" : "all_reduce of f32[3]");
    const std::string failure = group.wait_for_failure(milliseconds(5000));
    throw Error(failure);
  });
  for (const std::string& error : errors)
    expect_contains(error,
                    "ranks disagree about call 2: rank 0 calls all_reduce of f32[3], rank 2 calls "
                    "all_reduce of f32[4]");
}

// A call that hangs on some ranks only, while another proceeds to the next.
TEST(ProcessGroup, ARankThatIsAheadIsComparedWithTheOthers) {
  const auto errors = run_process_ranks(3, [](ProcessGroup& group) {
    group.record_call(group.rank() == 2 ? "all_reduce of f32[4]" : "all_reduce of f32[3]");
    if (group.rank() == 2) group.exchange("barrier", "");
    throw Error(group.wait_for_failure(milliseconds(5000)));
  });
  for (const std::string& error : errors) expect_contains(error, "ranks disagree about call 1");
}

TEST(ProcessGroup, ARankThatIsACallBehindIsReportedAtTheNextExchange) {
  const auto errors = run_process_ranks(2, [](ProcessGroup& group) {
    group.record_call("all_reduce of f32[3]");
    if (group.rank() == 0) group.record_call("all_reduce of f32[3]");
    group.exchange("loss", "");
  });
  for (const std::string& error : errors)
    expect_contains(error,
                    "ranks disagree about call 2: rank 0 calls all_reduce of f32[3], rank 1 calls "
                    "loss");
}

TEST(ProcessGroup, TheFailureHandlerIsCalledOnce) {
  std::atomic<int> calls{0};
  run_process_ranks(3, [&](ProcessGroup& group) {
    group.set_failure_handler([&] { ++calls; });
    group.exchange("x", "");
    if (group.rank() == 1) throw Error("broken");
    EXPECT_NE(group.wait_for_failure(milliseconds(5000)), "");
    sleep_ms(100);
    group.set_failure_handler({});
  });
  EXPECT_EQ(calls.load(), 3);  // also on the rank that failed
}

TEST(ProcessGroup, AHandlerSetAfterAFailureIsCalledImmediately) {
  expect_no_errors(run_process_ranks(2, [](ProcessGroup& group) {
    group.fail("broken");
    std::atomic<bool> called{false};
    group.set_failure_handler([&] { called = true; });
    for (int i = 0; i < 500 && !called; ++i) sleep_ms(10);
    EXPECT_TRUE(called);
    group.set_failure_handler({});
  }));
}

TEST(ProcessGroup, ARankThatDoesNotEndByItselfIsOverdue) {
  auto options = quick_options();
  options.grace = milliseconds(100);
  std::mutex mutex;
  std::vector<std::string> overdue;
  options.on_overdue = [&](const std::string& failure, ProcessGroup::Origin origin) {
    std::lock_guard lock(mutex);
    overdue.push_back(
        str(origin == ProcessGroup::Origin::kLocal ? "here: " : "elsewhere: ", failure));
  };
  run_process_ranks(
      2,
      [](ProcessGroup& group) {
        group.exchange("x", "");
        if (group.rank() == 1) group.fail("broken");
        sleep_ms(500);  // stuck
      },
      options);
  std::sort(overdue.begin(), overdue.end());
  ASSERT_EQ(overdue.size(), 2u);
  expect_contains(overdue[0], "elsewhere: rank 1 (");
  EXPECT_EQ(overdue[1], "here: rank 1 failed: broken");
}

TEST(ProcessGroup, ABusyRankIsOverdueLater) {
  auto options = quick_options();
  options.grace = milliseconds(100);
  options.long_grace = milliseconds(400);
  std::atomic<bool> is_busy{true};
  std::atomic<int> overdue{0};
  options.is_busy = [&] { return is_busy.load(); };
  options.on_overdue = [&](const std::string&, ProcessGroup::Origin) { ++overdue; };
  for (const bool stays_stuck : {false, true}) {
    is_busy = true;
    overdue = 0;
    run_process_ranks(
        2,
        [&](ProcessGroup& group) {
          group.exchange("x", "");
          group.fail("broken");
          sleep_ms(250);
          EXPECT_EQ(overdue, 0);
          if (!stays_stuck) return;
          sleep_ms(400);
          EXPECT_EQ(overdue, 2);
        },
        options);
    EXPECT_EQ(overdue, stays_stuck ? 2 : 0);
  }
}

// Options with a watchdog that has `limit`.
ProcessGroup::Options watched(milliseconds limit) {
  auto options = quick_options();
  options.watchdog = [limit] { return limit; };
  return options;
}

// Runs `hang` on one rank, between two exchanges, until the run fails. Returns the errors.
std::vector<std::string> run_with_hang(int size, int culprit,
                                       const std::function<void(ProcessGroup&)>& hang) {
  return run_process_ranks(
      size,
      [&](ProcessGroup& group) {
        group.exchange("first", "");
        if (group.rank() == culprit) {
          hang(group);
          EXPECT_NE(group.wait_for_failure(milliseconds(10000)), "");
        }
        group.exchange("second call", "");
      },
      watched(milliseconds(1000)));
}

TEST(ProcessGroupWatch, ARankThatHangsIsNamedWithWhatItDoesAndTheOthersLastCalls) {
  for (const int culprit : {0, 2}) {
    const test::ExpectLog warning("has made no progress for 0.2 s");
    begin_activity("waiting for rewards");
    const auto start = std::chrono::steady_clock::now();
    const auto errors = run_with_hang(3, culprit, [](ProcessGroup&) {});
    EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(2000));
    const char* others = culprit == 0 ? "ranks 1, 2" : "ranks 0, 1";
    for (const std::string& error : errors) {
      expect_contains(error, str("[second] rank ", culprit, " ("));
      expect_contains(error, ", pid ");
      expect_contains(
          error, str(") has made no progress for 1 s: waiting for rewards, after call 1 "
                     "(first); ",
                     others, ": in call 2 (second call); hint: watchdog_minutes is the limit"));
    }
  }
}

// Rank 2's device has not begun a call that the others' devices wait in.
TEST(ProcessGroupWatch, ADeviceThatIsBehindIsNamed) {
  const test::ExpectLog warning("has made no progress for 0.2 s");
  const auto errors = run_process_ranks(
      3,
      [&](ProcessGroup& group) {
        group.exchange("first", "");
        const uint64_t number = group.record_call("all_reduce of f32[3] on cuda");
        EXPECT_EQ(number, 2u);
        group.set_device_call(number, group.rank() != 2);
        throw Error(group.wait_for_failure(milliseconds(10000)));
      },
      watched(milliseconds(1000)));
  for (const std::string& error : errors) {
    expect_contains(error, "rank 2 (");
    expect_contains(error,
                    "has made no progress for 1 s: its GPU has not begun call 2 (all_reduce of "
                    "f32[3] on cuda); ranks 0, 1: in call 2 (all_reduce of f32[3] on cuda)");
  }
}

TEST(ProcessGroupWatch, RanksThatWaitForEachOtherEndTogether) {
  const test::ExpectLog warning("the ranks have waited for each other for 0.2 s");
  const auto errors = run_process_ranks(
      2,
      [&](ProcessGroup& group) {
        group.set_device_call(group.record_call("all_reduce of f32[3] on cuda"), true);
        EXPECT_NE(group.wait_for_failure(milliseconds(10000)), "");
        EXPECT_THROW(group.exchange("x", ""), HangError);  // all are to blame
        throw Error(group.failure());
      },
      watched(milliseconds(1000)));
  for (const std::string& error : errors)
    expect_contains(error,
                    "the ranks have waited for each other for 1 s: ranks 0, 1: in call 1 "
                    "(all_reduce of f32[3] on cuda)");
}

// Long waits of one rank for another are no hang of either, nor are they counted later.
TEST(ProcessGroupWatch, SlowWorkThatProgressesIsNoHang) {
  expect_no_errors(run_process_ranks(
      3,
      [](ProcessGroup& group) {
        for (int round = 0; round < 3; ++round) {
          for (int i = 0; round == group.rank() && i < 60; ++i) {
            note_progress();
            sleep_ms(20);
          }
          group.exchange("x", "");
          sleep_ms(150);
        }
      },
      watched(milliseconds(1000))));
}

TEST(ProcessGroupWatch, OnlyTheRankThatHangsThrowsHangError) {
  const test::ExpectLog warning("has made no progress for 0.2 s");
  std::atomic<int> hung{-1};
  const auto errors = run_with_hang(2, 1, [&](ProcessGroup& group) {
    group.wait_for_failure(milliseconds(10000));
    EXPECT_THROW(group.exchange("x", ""), HangError);
    hung = group.rank();
  });
  EXPECT_EQ(hung, 1);
}

// A run of one process, whose main thread does not return.
TEST(ProcessGroupWatch, ASingleRankThatHangsIsOverdue) {
  const test::ExpectLog warning("the run has made no progress for 0.06 s");
  std::atomic<bool> overdue{false};
  auto options = watched(milliseconds(300));
  options.grace = milliseconds(100);
  options.on_overdue = [&](const std::string& failure, ProcessGroup::Origin origin) {
    EXPECT_EQ(origin, ProcessGroup::Origin::kHang);
    expect_contains(failure, "the run has made no progress for 0.3 s: loading data");
    overdue = true;
  };
  begin_activity("loading data");
  const ProcessGroup group({}, options);
  for (int i = 0; i < 500 && !overdue; ++i) sleep_ms(10);
  EXPECT_TRUE(overdue);
}

TEST(ProcessGroupWatch, RankZeroKnowsTheLastCallsOfAll) {
  std::atomic<bool> is_known = false;
  run_process_ranks(2, [&](ProcessGroup& group) {
    for (int i = 1; i <= 300; ++i) group.record_call(str("all_reduce of f32[", i, "]"));
    group.exchange("barrier", "");
    if (group.rank() == 1) {
      EXPECT_EQ(group.history(), "");
      while (!is_known) sleep_ms(10);  // until rank 0 is done: later it would know of the exit
      return;
    }
    group.record_call("one more");
    const auto knows = [](const std::string& text) {
      return text.find("after call 302 (one more)") != std::string::npos &&  // rank 0
             text.find("after call 301 (barrier)") != std::string::npos;     // rank 1
    };
    std::string history;
    for (int i = 0; i < 1000 && !knows(history); ++i) {
      sleep_ms(10);
      history = group.history();
    }
    is_known = true;
    expect_contains(history, "the last calls:\n  call 47 (all_reduce of f32[47])\n  call 48 (");
    expect_contains(history, "\n  call 301 (barrier)\n  call 302 (one more)\nnow rank");
    EXPECT_TRUE(knows(history)) << history;
  });
}

}  // namespace
}  // namespace cohort
