// The scheduler alone, without a model: a device of the test keeps tokens in place of keys and
// values, and follows each plan as the engine does.
#include "rl/engine/scheduler.h"

#include <gtest/gtest.h>

#include <deque>
#include <set>
#include <tuple>

#include "core/rng.h"
#include "kernels/delta_inputs.h"
#include "kernels/gated_delta/gated_delta.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

using namespace test;

constexpr int32_t kStop = 0;

// Token at a position of a completion, as an engine would sample it: by address alone.
int32_t sampled_token(int64_t request, int64_t completion, int64_t position) {
  Rng rng(static_cast<uint64_t>(request * 64 + completion), rng_stream(kTestPurpose, 41));
  int32_t token = 0;
  for (int64_t i = 0; i <= position; ++i) token = static_cast<int32_t>(rng.below(40));
  return token;
}

// A state of the gated delta rule, with tokens in place of rows: it only knows what the kernels
// know (kernels/gated_delta, kernels/delta_inputs.h).
struct FakeState {
  std::vector<int32_t> folded;  // into the matrix
  std::array<int32_t, kernels::kDeltaChunk> rows = {};
  std::array<int32_t, kernels::kDeltaRing> ring = {};

  void advance(int64_t position, int32_t token) {
    constexpr int64_t kChunk = kernels::kDeltaChunk;
    if (position == 0) folded.clear();
    if (position > 0 && position % kChunk == 0)
      folded.insert(folded.end(), rows.begin(), rows.end());
    rows[static_cast<size_t>(position % kChunk)] = token;
    ring[static_cast<size_t>(position % kernels::kDeltaRing)] = token;
  }
  // Checks that these tokens have been advanced.
  void expect(const std::vector<int32_t>& tokens) const {
    const auto length = std::ssize(tokens);
    const int64_t begin = (length - 1) / kernels::kDeltaChunk * kernels::kDeltaChunk;
    ASSERT_EQ(std::ssize(folded), begin);
    for (int64_t i = 0; i < length; ++i) {
      const int32_t token = tokens[static_cast<size_t>(i)];
      ASSERT_EQ(i < begin ? folded[static_cast<size_t>(i)] : rows[static_cast<size_t>(i - begin)],
                token);
      if (i + 3 < length) continue;
      ASSERT_EQ(ring[static_cast<size_t>(i % kernels::kDeltaRing)], token);
    }
  }
};

// Cached tokens, the block table, states and the slots of a device. Every write and read checks
// that a row has the tokens of its sequence.
class FakeDevice {
 public:
  explicit FakeDevice(const KVCacheConfig& config)
      : config_(config),
        table_(static_cast<size_t>(config.num_sequences * config.blocks_per_row()), -1),
        tokens_(static_cast<size_t>(config.count_blocks() * config.block_tokens), -1),
        row_states_(static_cast<size_t>(config.num_sequences), -1),
        states_(static_cast<size_t>(config.count_states())),
        slots_(static_cast<size_t>(config.num_sequences)) {}

  void upload(BlockTable& table) {
    const BlockTable::Changes changes = table.take_changes();
    for (size_t i = 0; i < changes.at.size(); ++i)
      table_.at(static_cast<size_t>(changes.at[i])) = changes.values[i];
    const auto block = [&](int32_t number) {
      return tokens_.begin() + number * config_.block_tokens;
    };
    for (size_t i = 0; i < changes.from_to.size(); i += 2) {
      const int32_t to = changes.from_to[i + 1];
      std::copy_n(block(changes.from_to[i]), config_.block_tokens, block(to));
      // A copy belongs to one row.
      EXPECT_EQ(std::count(table_.begin(), table_.end(), to), 1);
    }
    for (size_t i = 0; i < changes.rows.size(); ++i)
      row_states_.at(static_cast<size_t>(changes.rows[i])) = changes.states[i];
    std::set<int32_t> seen;  // no state is shared by two rows
    for (const int32_t state : row_states_) EXPECT_TRUE(state < 0 || seen.insert(state).second);
    for (const std::vector<int32_t>& batch : changes.state_batches) {
      const std::vector<FakeState> before = states_;
      std::set<int32_t> from, to;
      for (size_t i = 0; i < batch.size(); i += 2) {
        states_.at(static_cast<size_t>(batch[i + 1])) = before.at(static_cast<size_t>(batch[i]));
        from.insert(batch[i]);
        EXPECT_TRUE(to.insert(batch[i + 1]).second);
      }
      for (const int32_t state : to) EXPECT_FALSE(from.contains(state));
    }
  }

  void prefill(const Scheduler::Chunk& chunk) {
    const Scheduler::Sequence& s = *chunk.sequence;
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < chunk.begin; ++i) tokens.push_back(s.token(i));
    for (int64_t i = chunk.begin; i < chunk.end; ++i) {
      cached(s.slot, i) = s.token(i);
      advance(s.slot, tokens, s.token(i));
      tokens.push_back(s.token(i));
    }
    for (int64_t i = 0; i < chunk.end; ++i) ASSERT_EQ(cached(s.slot, i), s.token(i));
  }

  void start(const Scheduler::Sequence& s) {
    Slot& slot = slots_.at(static_cast<size_t>(s.slot));
    slot = {.tokens = s.request->in.prompt, .active = true};
    slot.tokens.insert(slot.tokens.end(), s.output.begin(), s.output.end());
  }
  void stop(int32_t slot) { slots_.at(static_cast<size_t>(slot)).active = false; }

  // Samples a token after those of the slot; -1: the slot is idle.
  int32_t sample(const Scheduler::Sequence& s) {
    Slot& slot = slots_.at(static_cast<size_t>(s.slot));
    if (!slot.active) return -1;
    const EngineRequest& in = s.request->in;
    const auto position = static_cast<int64_t>(slot.tokens.size() - in.prompt.size());
    slot.tokens.push_back(sampled_token(s.request->id, s.completion, position));
    const bool stopped = !in.stop_tokens.empty() && slot.tokens.back() == kStop;
    slot.active = !stopped && static_cast<int64_t>(slot.tokens.size()) < s.max_length;
    return slot.tokens.back();
  }

  int32_t decode(const Scheduler::Sequence& s) {
    const Slot& slot = slots_.at(static_cast<size_t>(s.slot));
    if (slot.active) {
      const size_t last = slot.tokens.size() - 1;
      cached(s.slot, static_cast<int64_t>(last)) = slot.tokens[last];
      advance(s.slot, {slot.tokens.begin(), slot.tokens.end() - 1}, slot.tokens[last]);
      for (size_t i = 0; i <= last; ++i)
        EXPECT_EQ(cached(s.slot, static_cast<int64_t>(i)), slot.tokens[i]);
    }
    return sample(s);
  }

 private:
  struct Slot {
    std::vector<int32_t> tokens;
    bool active = false;
  };
  // Advances a row's state, which has the tokens `before`.
  void advance(int32_t row, const std::vector<int32_t>& before, int32_t token) {
    const int32_t number = row_states_.at(static_cast<size_t>(row));
    EXPECT_EQ(number >= 0, config_.state.layers > 0);
    if (number < 0) return;
    FakeState& state = states_.at(static_cast<size_t>(number));
    if (!before.empty()) state.expect(before);
    state.advance(std::ssize(before), token);
  }
  int32_t& cached(int32_t row, int64_t position) {
    const int32_t block = table_.at(
        static_cast<size_t>(row * config_.blocks_per_row() + position / config_.block_tokens));
    EXPECT_GE(block, 0);
    return tokens_.at(
        static_cast<size_t>(block * config_.block_tokens + position % config_.block_tokens));
  }

  KVCacheConfig config_;
  std::vector<int32_t> table_, tokens_, row_states_;
  std::vector<FakeState> states_;
  std::vector<Slot> slots_;
};

// Runs a scheduler step by step, with up to `max_pending` sampling steps unread, and checks each
// plan.
class SchedulerRun {
 public:
  using End = EngineToken::End;
  struct Output {
    std::vector<int32_t> tokens;
    End end = End::kNone;
  };

  SchedulerRun(const KVCacheConfig& config, size_t max_pending) : max_pending_(max_pending) {
    set_capacity(config, {});
  }

  void set_capacity(const KVCacheConfig& config, const SlotLimits& limits) {
    auto table = std::make_unique<BlockTable>(config);
    scheduler_.set_capacity(table.get(), limits);
    table_ = std::move(table);
    device_ = std::make_unique<FakeDevice>(config);
  }
  Scheduler& scheduler() { return scheduler_; }
  BlockTable& table() { return *table_; }
  std::map<std::pair<int64_t, int64_t>, Output>& outputs() { return outputs_; }

  int64_t submit(int64_t prompt, int64_t max_length, size_t completions, bool stops,
                 int64_t session_length = 0) {
    EngineRequest in{.max_length = max_length, .session_length = session_length};
    for (int64_t i = 0; i < prompt; ++i) in.prompt.push_back(static_cast<int32_t>(100 + i));
    in.completions.resize(completions);
    if (stops) in.stop_tokens = {kStop};
    return scheduler_.submit(std::move(in));
  }

  void cancel_all() {
    pending_.clear();
    scheduler_.cancel_all();
  }

  // A step that runs out of memory, of which the device has lost all; a new device has `config`.
  void run_out_of_memory(const KVCacheConfig& config) {
    pending_.clear();
    scheduler_.preempt_all();
    EXPECT_TRUE(scheduler_.is_idle());
    EXPECT_EQ(scheduler_.stats().running, 0);
    EXPECT_EQ(table_->free_blocks(), table_->num_blocks());
    EXPECT_EQ(table_->free_rows(), table_->config().num_sequences);
    EXPECT_EQ(table_->free_states(), table_->config().count_states());
    set_capacity(config, {});
    EXPECT_TRUE(scheduler_.take_stopped_slots().empty());
  }

  // Number of tokens that the step prefills.
  int64_t step() {
    if (!scheduler_.has_work()) return 0;
    auto [prefilled, progress] = admit();
    read(max_pending_);
    progress = decode() || progress;
    if (!progress && pending_.empty()) {
      scheduler_.evict_all();
      std::tie(prefilled, progress) = admit();
    }
    EXPECT_TRUE(progress || !pending_.empty());
    read(progress ? max_pending_ : 0);
    return prefilled;
  }

  // Steps until all requests have ended.
  void finish() {
    for (int i = 0; i < 10000 && !scheduler_.requests().empty(); ++i) step();
    expect_all_is_free();
  }

  void expect_all_is_free() {
    const SchedulerStats stats = scheduler_.stats();
    EXPECT_EQ(stats.running + stats.waiting, 0);
    EXPECT_EQ(table_->free_blocks(), table_->num_blocks());
    EXPECT_EQ(table_->free_rows(), table_->config().num_sequences);
    EXPECT_EQ(table_->free_states(), table_->config().count_states());
  }

 private:
  struct Pending {
    Scheduler::Sequences sequences;
    std::vector<int32_t> tokens;
  };

  std::pair<int64_t, bool> admit() {
    const std::vector<Scheduler::Chunk> chunks = scheduler_.schedule_prefill();
    device_->upload(*table_);
    int64_t tokens = 0;
    for (const Scheduler::Chunk& chunk : chunks) {
      // Requests are admitted in the order in which they were submitted.
      const int64_t request = chunk.sequence->request->id;
      if (request > newest_) newest_ = request;
      EXPECT_TRUE(seen_.contains(request) || request == newest_);
      seen_.insert(request);
      tokens += chunk.end - chunk.begin;
      device_->prefill(chunk);
    }
    EXPECT_LE(tokens, kPrefillTokens);
    const Scheduler::Sequences starts = scheduler_.schedule_starts(chunks);
    device_->upload(*table_);
    for (const int32_t slot : scheduler_.take_stopped_slots()) device_->stop(slot);
    Pending first;
    for (const Scheduler::SequencePtr& s : starts) {
      device_->start(*s);
      if (!s->output.empty()) continue;
      first.sequences.push_back(s);
      first.tokens.push_back(device_->sample(*s));
    }
    if (!first.sequences.empty()) pending_.push_back(std::move(first));
    return {tokens, !chunks.empty() || !starts.empty()};
  }

  bool decode() {
    for (;;) {
      const Scheduler::SequencePtr oldest =
          scheduler_.running().empty() ? nullptr : scheduler_.running().front();
      const Scheduler::Decode decode = scheduler_.schedule_decode(pending_.size());
      // The oldest sequence is never preempted.
      if (oldest != nullptr) {
        EXPECT_EQ(scheduler_.running().front(), oldest);
      }
      if (decode == Scheduler::Decode::kIdle) return false;
      if (decode == Scheduler::Decode::kReady) break;
      EXPECT_FALSE(pending_.empty());
      read(0);
    }
    device_->upload(*table_);
    for (const int32_t slot : scheduler_.take_stopped_slots()) device_->stop(slot);
    Pending step{.sequences = scheduler_.running(), .tokens = {}};
    for (const Scheduler::SequencePtr& s : step.sequences)
      step.tokens.push_back(device_->decode(*s));
    pending_.push_back(std::move(step));
    return true;
  }

  void read(size_t max_pending) {
    while (pending_.size() > max_pending) {
      const Pending step = std::move(pending_.front());
      pending_.pop_front();
      for (size_t i = 0; i < step.sequences.size(); ++i) {
        const Scheduler::SequencePtr& s = step.sequences[i];
        if (s->done) continue;
        ASSERT_GE(step.tokens[i], 0);  // the device has ended no sequence that the host continues
        Output& out = outputs_[{s->request->id, s->completion}];
        out.tokens.push_back(step.tokens[i]);
        out.end = scheduler_.append(s, step.tokens[i]);
        EXPECT_EQ(s->done, out.end != End::kNone);
      }
    }
  }

  std::unique_ptr<BlockTable> table_;
  std::unique_ptr<FakeDevice> device_;
  const size_t max_pending_;
  Scheduler scheduler_{EngineConfig{}};
  std::deque<Pending> pending_;
  std::map<std::pair<int64_t, int64_t>, Output> outputs_;
  std::set<int64_t> seen_;
  int64_t newest_ = -1;
};

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

// The same sequences with states of 8 blocks, 9 for each row. A row has 19 / 16 blocks for half of
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

// Of 9 states, four are those of running completions, one that of their prompt, and one is kept
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
