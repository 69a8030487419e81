// The scheduler alone, without a model.
#include "tests/rl/engine/scheduler_run.h"

namespace cohort {
namespace {

using namespace test;

// Requests, cancellations and steps in random order, with a cache that is too small for all.
void expect_random_work_is_done(const KVCacheConfig& config, size_t max_pending) {
  SCOPED_TRACE(str(config.num_sequences, " rows, ", config.num_blocks, " blocks, ", max_pending,
                   " unread steps"));
  constexpr size_t kOpen = 12, kCompletions = 4;
  SchedulerRun run(config, max_pending);
  Scheduler& scheduler = run.scheduler();
  Rng rng(static_cast<uint64_t>(config.num_blocks) + max_pending, rng_stream(kTestPurpose, 42));
  struct Request {
    int64_t prompt, max_length, submitted;
    bool stops;
    std::set<int64_t> cancelled;
  };
  std::map<int64_t, Request> requests;
  // No request takes longer than all open completions one after the other, each admitted as late as
  // allowed: the oldest sequence of the cache always continues.
  const int64_t longest = static_cast<int64_t>(kOpen * kCompletions) *
                          (config.max_length + Scheduler::kMaxPostponedSteps);
  constexpr int64_t kSteps = 6000;
  for (int64_t i = 0; i < kSteps || !scheduler.requests().empty(); ++i) {
    ASSERT_LT(i, kSteps + longest);
    while (i < kSteps && scheduler.requests().size() < kOpen && rng.below(3) == 0) {
      Request r{.prompt = rng.between(1, 30), .submitted = i, .stops = rng.below(2) == 0};
      r.max_length = r.prompt + rng.between(1, config.max_length - r.prompt);
      const auto completions = static_cast<size_t>(rng.between(1, kCompletions));
      requests[run.submit(r.prompt, r.max_length, completions, r.stops)] = r;
    }
    if (!scheduler.requests().empty() && rng.below(10) == 0) {
      const auto& [id, request] = *std::next(
          scheduler.requests().begin(), static_cast<std::ptrdiff_t>(rng.below(
                                            static_cast<int64_t>(scheduler.requests().size()))));
      const int64_t first = rng.below(static_cast<int64_t>(request.completions.size()));
      requests.at(id).cancelled.insert(first);
      scheduler.cancel(id, first);
    }
    if (rng.below(500) == 0) {
      for (const auto& [id, request] : scheduler.requests())
        for (const Scheduler::SequencePtr& s : request.completions)
          if (!s->done) requests.at(id).cancelled.insert(s->completion);
      run.cancel_all();
      run.expect_all_is_free();
    }
    run.step();
    const SchedulerStats stats = scheduler.stats();
    ASSERT_LE(stats.used_blocks, stats.blocks);
    ASSERT_LE(stats.running, config.num_sequences);
    if (!scheduler.requests().empty()) {
      ASSERT_LT(i - requests.at(scheduler.requests().begin()->first).submitted, longest);
    }
    if (testing::Test::HasFailure()) return;
  }
  run.expect_all_is_free();
  EXPECT_GT(scheduler.stats().preemptions, 0);
  // Every completion that was not cancelled has all of its tokens, once and in order.
  int64_t ended = 0;
  for (const auto& [key, out] : run.outputs()) {
    const Request& r = requests.at(key.first);
    for (size_t i = 0; i < out.tokens.size(); ++i)
      ASSERT_EQ(out.tokens[i], sampled_token(key.first, key.second, static_cast<int64_t>(i)));
    const bool stopped = r.stops && out.tokens.back() == kStop;
    const bool full = r.prompt + static_cast<int64_t>(out.tokens.size()) == r.max_length;
    EXPECT_EQ(std::count(out.tokens.begin(), out.tokens.end() - 1, kStop) > 0 && r.stops, false);
    if (out.end == EngineToken::End::kNone) {
      EXPECT_TRUE(r.cancelled.contains(key.second));
      continue;
    }
    EXPECT_EQ(out.end, stopped ? EngineToken::End::kStopToken : EngineToken::End::kLength);
    EXPECT_TRUE(stopped || full);
    ++ended;
  }
  EXPECT_GT(ended, 100);
}

TEST(Scheduler, RandomWorkEndsInOrderAndLosesNoBlock) {
  for (const size_t max_pending : {0, 1, 2})
    for (const KVCacheConfig& config :
         {KVCacheConfig{.num_sequences = 6, .max_length = 48, .num_blocks = 14, .block_tokens = 4},
          KVCacheConfig{.num_sequences = 12, .max_length = 48, .num_blocks = 40, .block_tokens = 4},
          KVCacheConfig{
              .num_sequences = 20, .max_length = 40, .num_blocks = 60, .block_tokens = 3}})
      expect_random_work_is_done(config, max_pending);
}

// Sequences of up to three chunks; pools of states without and with spare ones.
TEST(Scheduler, RandomWorkLosesAndSharesNoState) {
  for (const size_t max_pending : {0, 1, 2})
    for (const auto& [rows, blocks] : {std::pair(6, 45), {9, 70}, {20, 120}})
      expect_random_work_is_done({.num_sequences = rows,
                                  .max_length = 150,
                                  .num_blocks = blocks,
                                  .block_tokens = 4,
                                  .state = {.layers = 1}},
                                 max_pending);
}

// Sessions: turns that end by themselves or by the host, observations of random length at random
// times, steps that run out of memory, with a cache that is too small for all.
void expect_random_sessions_are_continued(const KVCacheConfig& config, size_t max_pending) {
  SCOPED_TRACE(str(config.num_blocks, " blocks, ", max_pending, " unread steps"));
  SchedulerRun run(config, max_pending);
  Scheduler& scheduler = run.scheduler();
  Rng rng(static_cast<uint64_t>(config.num_blocks) + max_pending, rng_stream(kTestPurpose, 44));
  std::map<std::pair<int64_t, int64_t>, std::set<int64_t>> observed;  // positions after the prompt
  int64_t turns = 0, ended = 0;
  const auto end = [&](const Scheduler::Sequence& s) {
    const std::set<int64_t>& seen = observed[{s.request->id, s.completion}];
    for (int64_t i = 0; i < std::ssize(s.output); ++i) {
      const int32_t token = s.output[static_cast<size_t>(i)];
      EXPECT_EQ(token, seen.contains(i) ? 77 : sampled_token(s.request->id, s.completion, i));
    }
    ++ended;
    scheduler.cancel(s.request->id, s.completion);
  };
  const int64_t steps = 4000 * config.max_length / 48;
  for (int64_t i = 0; i < steps || !scheduler.requests().empty(); ++i) {
    ASSERT_LT(i, 2 * steps);
    if (i < steps && scheduler.requests().size() < 6 && rng.below(3) == 0) {
      const int64_t prompt = rng.between(1, 12);
      run.submit(prompt, prompt + rng.between(1, 10), static_cast<size_t>(rng.between(1, 4)),
                 rng.below(2) == 0, config.max_length);
    }
    std::vector<Scheduler::SequencePtr> all;
    for (const auto& [id, request] : scheduler.requests())
      all.insert(all.end(), request.completions.begin(), request.completions.end());
    for (const Scheduler::SequencePtr& s : all) {
      if (s->closed) continue;
      const int64_t length = s->length() - s->in_flight, left = config.max_length - length;
      // The host ends some turns, perhaps before tokens that it has got, and again.
      const std::set<int64_t>& seen = observed[{s->request->id, s->completion}];
      const auto has_own = [&](int64_t count) {
        const int64_t first = std::ssize(s->output) - count;
        return first >= 0 && (seen.empty() || *seen.rbegin() < first);
      };
      if (!s->done) {
        if (has_own(2) && rng.below(40) == 0)
          scheduler.end_turn(s->request->id, s->completion, length - rng.below(2));
      } else if (has_own(2) && rng.below(3) == 0) {
        scheduler.end_turn(s->request->id, s->completion, length - 1);
      } else if (left < 8) {
        end(*s);
      } else if (rng.below(4) == 0) {
        const std::vector<int32_t> tokens(static_cast<size_t>(rng.between(1, 5)), 77);
        for (size_t t = 0; t < tokens.size(); ++t)
          observed[{s->request->id, s->completion}].insert(std::ssize(s->output) +
                                                           static_cast<int64_t>(t));
        const int64_t now = length + std::ssize(tokens);
        scheduler.extend(s->request->id, s->completion, tokens,
                         std::min(config.max_length, now + rng.between(1, 10)));
        ++turns;
      }
    }
    run.step();
    if (rng.below(200) == 0) run.run_out_of_memory(config);
    if (testing::Test::HasFailure()) return;
  }
  run.expect_all_is_free();
  EXPECT_GT(scheduler.stats().preemptions, 0);
  EXPECT_GT(ended, 100);
  EXPECT_GT(turns, 3 * ended / 2);
}

TEST(Scheduler, RandomSessionsContinueAndLoseNoBlock) {
  for (const size_t max_pending : {0, 1, 2})
    for (const int64_t blocks : {14, 40, 200})
      expect_random_sessions_are_continued(
          {.num_sequences = 8, .max_length = 48, .num_blocks = blocks, .block_tokens = 4},
          max_pending);
}

TEST(Scheduler, RandomSessionsLoseAndShareNoState) {
  for (const size_t max_pending : {0, 1, 2})
    for (const int64_t blocks : {40, 70, 400})
      expect_random_sessions_are_continued({.num_sequences = 8,
                                            .max_length = 150,
                                            .num_blocks = blocks,
                                            .block_tokens = 4,
                                            .state = {.layers = 1}},
                                           max_pending);
}

KVCacheConfig large_cache() {
  return {.num_sequences = 64, .max_length = 10000, .num_blocks = 4000};
}

// Completions lose only the tokens in flight, which are sampled again, whatever the step was.
TEST(Scheduler, ContinuesAfterStepsThatRanOutOfMemory) {
  const KVCacheConfig config{
      .num_sequences = 6, .max_length = 48, .num_blocks = 30, .block_tokens = 4};
  for (const size_t max_pending : {0, 1, 2}) {
    SchedulerRun run(config, max_pending);
    Rng rng(max_pending, rng_stream(kTestPurpose, 43));
    for (int i = 0; i < 40; ++i) {
      const int64_t prompt = rng.between(1, 30);
      run.submit(prompt, prompt + rng.between(1, 18), static_cast<size_t>(rng.between(1, 4)),
                 rng.below(2) == 0);
    }
    for (int i = 0; i < 10000 && !run.scheduler().requests().empty(); ++i) {
      run.step();
      if (rng.below(8) == 0) run.run_out_of_memory(config);
    }
    run.finish();
    EXPECT_GT(run.scheduler().stats().preemptions, 40);
    EXPECT_GE(run.outputs().size(), 40U);
    for (const auto& [key, out] : run.outputs()) {
      EXPECT_NE(out.end, EngineToken::End::kNone);
      for (size_t i = 0; i < out.tokens.size(); ++i)
        ASSERT_EQ(out.tokens[i], sampled_token(key.first, key.second, static_cast<int64_t>(i)));
    }
  }
}

TEST(Scheduler, PreemptsAllWithinAStep) {
  SchedulerRun run(large_cache(), 0);
  Scheduler& scheduler = run.scheduler();
  run.submit(40, 60, 3, false);
  run.step();
  run.submit(9000, 9010, 2, false);  // its prefill takes two steps
  const std::vector<Scheduler::Chunk> chunks = scheduler.schedule_prefill();
  ASSERT_EQ(chunks.size(), 1U);
  run.run_out_of_memory(large_cache());
  EXPECT_EQ(scheduler.stats().waiting, 5);
  EXPECT_EQ(scheduler.stats().preemptions, 4);
  run.finish();
  for (const auto& [key, out] : run.outputs())
    EXPECT_EQ(out.tokens.size(), key.first == 0 ? 20U : 10U);
}

TEST(Scheduler, CompletionsForkFromThePromptInTheStepOfItsPrefill) {
  SchedulerRun run(large_cache(), 0);
  run.submit(40, 60, 8, false);
  Scheduler& scheduler = run.scheduler();
  const std::vector<Scheduler::Chunk> chunks = scheduler.schedule_prefill();
  ASSERT_EQ(chunks.size(), 1U);
  EXPECT_TRUE(chunks[0].completes_prompt());
  EXPECT_EQ(chunks[0].end, 40);
  // The partial last block is copied for all but the first, after the prefill has filled it.
  EXPECT_TRUE(run.table().take_changes().from_to.empty());
  EXPECT_EQ(scheduler.schedule_starts(chunks).size(), 8U);
  EXPECT_EQ(run.table().take_changes().from_to.size(), 2U * 7);
  EXPECT_EQ(scheduler.stats().used_blocks, 3 + 7);
}

TEST(Scheduler, APrefillIsSplitAtTheLimitOfAForward) {
  SchedulerRun run(large_cache(), 0);
  run.submit(5000, 5010, 1, false);
  run.submit(9000, 9010, 2, false);
  EXPECT_EQ(run.step(), kPrefillTokens);
  EXPECT_EQ(run.scheduler().running().size(), 1U);
  EXPECT_EQ(run.step(), 14000 - kPrefillTokens);
  EXPECT_EQ(run.scheduler().running().size(), 3U);
}

TEST(Scheduler, ASmallPrefillIsPostponedForAFewSteps) {
  SchedulerRun run(large_cache(), 0);
  run.submit(10, 500, 1, false);
  run.step();
  // Twice, because a count must start again.
  for (int i = 0; i < 2; ++i) {
    run.submit(20, 500, 1, false);
    for (int64_t step = 1; step < Scheduler::kMaxPostponedSteps; ++step) EXPECT_EQ(run.step(), 0);
    EXPECT_EQ(run.step(), 20);
  }
  run.submit(Scheduler::kMinPrefillTokens, 2000, 1, false);
  EXPECT_EQ(run.step(), Scheduler::kMinPrefillTokens);
}

// Three of four completions run, with a block of the prompt and two of their own each.
TEST(Scheduler, ThePreemptedSequenceIsTheYoungestAndIsNotOvertaken) {
  SchedulerRun run({.num_sequences = 3, .max_length = 128, .num_blocks = 7, .block_tokens = 32}, 0);
  Scheduler& scheduler = run.scheduler();
  run.submit(32, 128, 4, false);
  run.step();
  ASSERT_EQ(scheduler.running().size(), 3U);
  const Scheduler::SequencePtr youngest = scheduler.running().back();
  for (int i = 0; i < 100 && scheduler.stats().preemptions == 0; ++i) run.step();
  EXPECT_EQ(youngest->length(), 97);
  EXPECT_EQ(youngest->slot, -1);
  EXPECT_EQ(scheduler.running().size(), 2U);
  // There is a row for the fourth completion, which would need no block to start.
  ASSERT_EQ(run.table().free_rows(), 1);
  ASSERT_EQ(scheduler.stats().waiting, 2);
  for (int i = 0; i < 100 && scheduler.stats().waiting == 2; ++i) run.step();
  EXPECT_GE(youngest->slot, 0);
  run.finish();
  EXPECT_EQ(scheduler.stats().preemptions, 1);
}

TEST(Scheduler, ARequestOverTheCapacityWaitsForALargerOne) {
  const KVCacheConfig small{.num_sequences = 4, .max_length = 64, .num_blocks = 4},
      large{.num_sequences = 4, .max_length = 64, .num_blocks = 5};
  SchedulerRun run(small, 0);
  Scheduler& scheduler = run.scheduler();
  const auto expect_waits = [&](const SlotLimits& limits) {
    EXPECT_EQ(run.step(), 8);
    EXPECT_EQ(scheduler.stats().waiting, 1);
    EXPECT_THROW_WITH(run.set_capacity(large, limits), Error, "cannot be replaced");
    for (int i = 0; i < 100 && !scheduler.is_idle(); ++i) run.step();
    EXPECT_EQ(scheduler.stats().waiting, 1);
    run.set_capacity(large, limits);
    EXPECT_EQ(run.step(), 9);
    run.finish();
  };
  run.submit(8, 14, 1, false);
  run.submit(9, 64, 1, false);  // needs a spare block
  expect_waits({});
  run.submit(8, 14, 1, false);
  EngineRequest penalised{.max_length = 12, .completions = {{.presence_penalty = 1}}};
  penalised.prompt.assign(9, 1);
  scheduler.submit(penalised);
  expect_waits({.penalties = true});
}

// Computed by hand: of 4 blocks each, 8 completions share 2; one block more for the partial last
// block of the prompt. Rounded to eight sizes per power of two: 19 blocks become 20.
TEST(Scheduler, CapacityFollowsTheWaitingSequences) {
  const auto wanted = [](const EngineConfig& config, int64_t allowed_blocks) {
    Scheduler scheduler(config);
    EngineRequest in{.max_length = 60, .stop_tokens = {1, 2}, .logit_bias = {{3, 1.0F}}};
    in.prompt.assign(40, 0);
    in.completions.resize(8);
    scheduler.submit(in);
    const Scheduler::Capacity out = scheduler.wanted_capacity(allowed_blocks);
    EXPECT_EQ(out.limits.stop_tokens, 2);
    EXPECT_EQ(out.limits.biases, 1);
    EXPECT_FALSE(out.limits.penalties);
    return std::pair(out.num_sequences, out.num_blocks);
  };
  using Sizes = std::pair<int64_t, int64_t>;
  EXPECT_EQ(wanted({}, 1000), Sizes(8, 20));
  EXPECT_EQ(wanted({}, 10), Sizes(8, 10));
  EXPECT_EQ(wanted({}, 1), Sizes(4, 5));  // the longest sequence fits, with a spare block
  EXPECT_EQ(wanted({.max_concurrent = 2}, 1000), Sizes(2, 10));
  EXPECT_EQ(wanted({.max_concurrent = 2}, 1), Sizes(2, 5));
}

// Sequences as above with states of 8 blocks, 9 for each row. A row has 19 / 16 blocks for half of
// what its sequence may need: 60 blocks are 5 rows, whose states leave 15.
TEST(Scheduler, StatesTakeTheMemoryOfBlocks) {
  const auto wanted = [](const EngineConfig& config, int64_t allowed_blocks) {
    Scheduler scheduler(config, 8);
    EngineRequest in{.max_length = 60};
    in.prompt.assign(40, 0);
    in.completions.resize(8);
    scheduler.submit(in);
    const Scheduler::Capacity out = scheduler.wanted_capacity(allowed_blocks);
    if (allowed_blocks == 1000) {  // halved with the blocks, as they are the larger part
      EXPECT_TRUE(scheduler.shrink(out));
      const Scheduler::Capacity half = scheduler.wanted_capacity(1000);
      EXPECT_EQ(half.num_sequences, out.num_sequences / 2);
      EXPECT_EQ(half.num_blocks, 10);
    }
    return std::pair(out.num_sequences, out.num_blocks);
  };
  using Sizes = std::pair<int64_t, int64_t>;
  EXPECT_EQ(wanted({}, 1000), Sizes(8, 20));
  EXPECT_EQ(wanted({}, 60), Sizes(5, 15));
  EXPECT_EQ(wanted({.max_concurrent = 7}, 60), Sizes(5, 15));
  EXPECT_EQ(wanted({.max_concurrent = 4}, 60), Sizes(4, 20));
  EXPECT_EQ(wanted({}, 1), Sizes(1, 5));
  // max_cache_tokens counts keys and values alone.
  EXPECT_EQ(wanted({.max_cache_tokens = 160}, 10), Sizes(8, 10));
  EXPECT_EQ(wanted({.max_concurrent = 7, .max_cache_tokens = 160}, 10), Sizes(7, 10));
}

// Four of 9 states are those of running completions, one is that of their prompt, and one is kept
// between turns. Four more completions need the prompt's.
TEST(Scheduler, APromptThatNoCompletionWaitsForGivesItsStateFirst) {
  KVCacheConfig config = large_cache();
  config.num_sequences = 8;
  config.state.layers = 1;
  SchedulerRun run(config, 0);
  Scheduler& scheduler = run.scheduler();
  const auto& requests = scheduler.requests();
  const int64_t first = run.submit(70, 600, 4, false);
  run.step();
  EXPECT_TRUE(requests.at(first).is_computed());
  const int64_t session = run.submit(9, 10, 1, false, 100);
  const Scheduler::SequencePtr between = requests.at(session).completions[0];
  while (!between->done) run.step();
  EXPECT_FALSE(between->kept.empty());
  EXPECT_FALSE(requests.at(session).is_computed());
  EXPECT_EQ(run.table().free_states(), 3);
  run.submit(80, 600, 4, false);
  while (scheduler.running().size() < 8) run.step();
  EXPECT_FALSE(requests.at(first).is_computed());
  EXPECT_FALSE(between->kept.empty());
  EXPECT_EQ(run.table().free_states(), 0);
  run.submit(20, 21, 1, false);
  scheduler.cancel(first, 0);
  while (scheduler.stats().waiting > 0) run.step();
  EXPECT_FALSE(between->kept.empty());
  scheduler.cancel(session, 0);
  run.finish();
}

// A running completion and two dialogues have the three states. The next turns of these wait behind
// that of a dialogue whose state has been evicted.
TEST(Scheduler, LaterTurnsPassASequenceThatWaitsForAState) {
  for (const bool at_once : {false, true}) {
    KVCacheConfig config = large_cache();
    config.num_sequences = 3;
    config.state.layers = 1;
    SchedulerRun run(config, 0);
    Scheduler& scheduler = run.scheduler();
    const auto turn = [&](int64_t id) { return scheduler.requests().at(id).completions[0]; };
    const auto extend = [&](int64_t id) {
      scheduler.extend(id, 0, std::vector<int32_t>(5, 77), turn(id)->length() + 15);
    };
    const auto step_until = [&](auto&& is_true) {
      int64_t prefilled = 0;
      for (int i = 0; i < 200 && !is_true(); ++i) prefilled += run.step();
      EXPECT_TRUE(is_true());
      return prefilled;
    };
    const int64_t longest = run.submit(30, 900, 1, false);
    std::vector<int64_t> sessions;
    for (const int64_t prompt : {40, 300, 50}) {
      sessions.push_back(run.submit(prompt, prompt + 4, 1, false, 400));
      step_until([&] { return turn(sessions.back())->done; });
    }
    const int64_t first = sessions[0], evicted = sessions[1], last = sessions[2];
    for (const int64_t id : {first, last, evicted}) extend(id);
    EXPECT_TRUE(turn(evicted)->kept.empty());
    EXPECT_EQ(run.table().free_states(), 0);
    const int64_t prefilled =
        step_until([&] { return turn(first)->slot >= 0 && turn(last)->slot >= 0; });
    EXPECT_EQ(prefilled, 2 * 5);  // nothing is computed again
    EXPECT_GE(turn(longest)->slot, 0);
    // It starts when a turn has ended, or a dialogue whose turns are extended at once.
    int extended = 0;
    const int64_t waited = step_until([&] {
      for (const int64_t id : {first, last})
        if (at_once && scheduler.requests().contains(id) && turn(id)->done) {
          if (extended < 6) {
            extend(id);
            ++extended;
          } else {
            scheduler.cancel(id, 0);
          }
        }
      return turn(evicted)->slot >= 0;
    });
    EXPECT_EQ(extended, at_once ? 6 : 0);
    EXPECT_EQ(waited, 5 * extended + 300);
    EXPECT_EQ(scheduler.stats().preemptions, 0);
    scheduler.cancel_all();
  }
}

// The sizes of the test above without states: the cache is halved first, then sequences and
// prefills are.
TEST(Scheduler, ShrinksToTheLeastCapacityOfTheLongestSequence) {
  Scheduler scheduler{EngineConfig{}};
  const auto submit = [&] {
    EngineRequest in{.max_length = 60};
    in.prompt.assign(40, 0);
    in.completions.resize(8);
    scheduler.submit(in);
  };
  submit();
  const auto wanted = [&] {
    const Scheduler::Capacity out = scheduler.wanted_capacity(1000);
    return std::pair(out.num_sequences, out.num_blocks);
  };
  using Sizes = std::pair<int64_t, int64_t>;
  const auto prefilled = [&] {
    BlockTable table({.num_sequences = 8, .max_length = 64, .num_blocks = 20});
    scheduler.set_capacity(&table, {});
    int64_t tokens = 0;
    for (const Scheduler::Chunk& chunk : scheduler.schedule_prefill())
      tokens += chunk.end - chunk.begin;
    scheduler.preempt_all();
    scheduler.set_capacity(nullptr, {});
    return tokens;
  };
  const auto shrink = [&] { return scheduler.shrink(scheduler.wanted_capacity(1000)); };
  ASSERT_EQ(wanted(), Sizes(8, 20));
  EXPECT_TRUE(shrink());
  EXPECT_EQ(wanted(), Sizes(8, 10));
  EXPECT_TRUE(shrink());
  EXPECT_EQ(wanted(), Sizes(4, 5));
  EXPECT_EQ(prefilled(), 40);
  EXPECT_TRUE(shrink());
  EXPECT_EQ(wanted(), Sizes(2, 5));
  EXPECT_EQ(prefilled(), 40);  // half of the cache's 80 tokens
  EXPECT_TRUE(shrink());
  EXPECT_EQ(wanted(), Sizes(1, 5));
  EXPECT_EQ(prefilled(), 20);
  EXPECT_TRUE(shrink());
  EXPECT_EQ(prefilled(), 16);
  EXPECT_TRUE(shrink());  // the least capacity once more: memory has been freed
  EXPECT_EQ(wanted(), Sizes(1, 5));
  EXPECT_FALSE(shrink());
  EXPECT_EQ(wanted(), Sizes(8, 20));
}

}  // namespace
}  // namespace cohort
