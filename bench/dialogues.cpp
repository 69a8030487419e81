#include "bench/dialogues.h"

#include <deque>
#include <thread>

#include "bench/timing.h"
#include "rl/engine/engine.h"

namespace cohort::bench {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;
constexpr int64_t kPrompts = 64, kCompletions = 8, kPrompt = 128, kSampled = 256, kObserved = 20;

enum class Turns { kOne, kOneOfAll, kRandom, kEqual };

struct Dialogue {
  std::vector<int64_t> lengths;  // sampled tokens of each turn
  size_t turn = 0;
  int64_t tokens = kPrompt;
};

std::vector<int64_t> turn_lengths(Turns turns, Rng& rng) {
  if (turns == Turns::kOne) return {kSampled};
  if (turns == Turns::kOneOfAll) return {kSampled + 2 * kObserved};
  const int64_t first = turns == Turns::kEqual ? 85 : rng.between(43, 127),
                second = turns == Turns::kEqual ? 85 : rng.between(43, 127);
  return {first, second, kSampled - first - second};
}

void roll_out(Engine& engine, Turns turns, double tool_seconds, uint64_t seed) {
  const int64_t vocab = engine.model().config().vocab_size;
  Rng rng(seed, rng_stream(kBenchPurpose, 14));
  std::map<std::pair<int64_t, int64_t>, Dialogue> dialogues;
  for (int64_t p = 0; p < kPrompts; ++p) {
    // Turns of equal lengths for all completions of a prompt, whose first is submitted as a limit.
    const std::vector<int64_t> lengths = turn_lengths(turns, rng);
    EngineRequest request{
        .max_length = kPrompt + lengths[0],
        .session_length = lengths.size() == 1 ? 0 : kPrompt + kSampled + 2 * kObserved};
    for (int64_t i = 0; i < kPrompt; ++i)
      request.prompt.push_back(static_cast<int32_t>(rng.below(vocab)));
    for (int64_t i = 0; i < kCompletions; ++i)
      request.completions.push_back(
          {.seed = seed, .stream = static_cast<uint64_t>(p * kCompletions + i)});
    const int64_t id = engine.submit(std::move(request));
    for (int64_t i = 0; i < kCompletions; ++i) dialogues[{id, i}].lengths = lengths;
  }
  const std::vector<int32_t> observation(kObserved, 1);
  std::deque<std::pair<Clock::time_point, std::pair<int64_t, int64_t>>> calls;
  for (bool more = true; more || !calls.empty();) {
    more = engine.step();
    for (const EngineToken& t : engine.poll()) {
      Dialogue& d = dialogues.at({t.request, t.completion});
      ++d.tokens;
      if (t.end == EngineToken::End::kNone) continue;
      if (++d.turn == d.lengths.size())
        engine.cancel(t.request, t.completion);
      else
        calls.emplace_back(
            Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(tool_seconds)),
            std::pair(t.request, t.completion));
    }
    if (!more && !calls.empty()) std::this_thread::sleep_until(calls.front().first);
    while (!calls.empty() && calls.front().first <= Clock::now()) {
      const auto [request, completion] = calls.front().second;
      calls.pop_front();
      Dialogue& d = dialogues.at({request, completion});
      d.tokens += kObserved;
      engine.extend(request, completion, observation, d.tokens + d.lengths[d.turn]);
      more = true;
    }
  }
}

}  // namespace

Metrics time_dialogues(const Transformer& model, double tool_seconds, int64_t repeats) {
  Engine engine(model, {});
  const std::pair<const char*, Turns> kinds[] = {{"one_turn", Turns::kOne},
                                                 {"one_turn_all_tokens", Turns::kOneOfAll},
                                                 {"random_turns", Turns::kRandom},
                                                 {"equal_turns", Turns::kEqual}};
  std::vector<std::vector<double>> seconds(std::size(kinds));
  for (int64_t round = 0; round <= repeats; ++round)
    for (size_t k = 0; k < std::size(kinds); ++k) {
      Stopwatch clock;
      roll_out(engine, kinds[k].second, tool_seconds, static_cast<uint64_t>(round));
      if (round > 0) seconds[k].push_back(clock.lap());
    }
  Metrics out;
  for (size_t k = 0; k < std::size(kinds); ++k) out.add(kinds[k].first, median(seconds[k]));
  for (const char* kind : {"random", "equal"}) {
    const double time = out.at(str(kind, "_turns"));
    out.add(str(kind, "_ratio"), time / out.at("one_turn"));
    out.add(str(kind, "_ratio_all_tokens"), time / out.at("one_turn_all_tokens"));
  }
  out.add("preemptions", static_cast<double>(engine.stats().preemptions));
  return out;
}

}  // namespace cohort::bench
