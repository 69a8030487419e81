// The scheduler without a model: a device that keeps tokens in place of keys, values and states,
// and follows each plan as the engine does.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <set>
#include <tuple>

#include "core/rng.h"
#include "kernels/delta_inputs.h"
#include "kernels/gated_delta/gated_delta.h"
#include "rl/engine/scheduler.h"
#include "tests/support/test_util.h"

namespace cohort::test {

inline constexpr int32_t kStop = 0;

// Token at a position of a completion, as an engine would sample it: by address alone.
inline int32_t sampled_token(int64_t request, int64_t completion, int64_t position) {
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

}  // namespace cohort::test
