#include "bench/rollout_exactness.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <functional>
#include <map>
#include <set>

#include "bench/timing.h"
#include "rl/engine/engine.h"
#include "rl/grpo_loss.h"
#include "trainers/grpo_step.h"

namespace cohort::bench {
namespace {

struct Setup {
  EngineConfig engine;
  size_t stride = 1;  // serves every stride-th request
  bool turns = false;
  uint64_t delays = 0;  // seed of the steps between a turn and its observation
};
const Setup kSetups[] = {{.engine = {.max_concurrent = 96, .max_cache_tokens = 40000}},
                         {.engine = {.max_concurrent = 256}},
                         {.engine = {.max_concurrent = 7, .max_cache_tokens = 6000}, .stride = 7}};

std::vector<EngineRequest> odd_requests(const ModelConfig& c) {
  Rng rng(3, rng_stream(kBenchPurpose, 10));
  std::vector<EngineRequest> out;
  for (const int64_t prompt : {1,  2,   100, 128,  129, 2050, 5000, 7,  640, 33, 1000,
                               17, 511, 3,   4090, 255, 8150, 1500, 64, 300, 11})
    for (const int64_t count : {1, 3, 8}) {
      EngineRequest request{.max_length = std::min(c.context, prompt + rng.between(150, 900))};
      for (int64_t i = 0; i < prompt; ++i)
        request.prompt.push_back(static_cast<int32_t>(rng.below(c.vocab_size)));
      for (int64_t i = 0; i < count; ++i)
        request.completions.push_back({.seed = out.size(), .stream = static_cast<uint64_t>(i)});
      out.push_back(std::move(request));
    }
  return out;
}

struct Rollout {
  std::map<size_t, std::vector<Trajectory>> completions;  // by the index of the request
  EngineStats stats;
};

// A dialogue between two turns, whose observation comes before the next step if `delay` is 0.
struct Pause {
  int64_t request = 0, completion = 0, delay = 0;
  std::vector<int32_t> observation;
  int64_t max_length = 0;
};

// The turns of the dialogues: what follows a turn depends on the dialogue and its length alone.
class Turns {
 public:
  Turns(Engine& engine, uint64_t delays)
      : engine_(engine), delays_(delays, rng_stream(kBenchPurpose, 12)) {}

  // A turn has ended, after the tokens of `t`.
  void end(const EngineToken& token, const Trajectory& t, const EngineRequest& request) {
    Rng rng(t.tokens.size(), rng_stream(kBenchPurpose, 13, request.completions[0].seed));
    const int64_t observed = rng.below(20) == 0 ? 700 : rng.between(1, 40);
    Pause pause{token.request, token.completion, delays_.below(30), {}, 0};
    const auto length = static_cast<int64_t>(t.tokens.size()) + observed;
    if (t.num_turns() == 8 || rng.below(6) == 0 || length + 2 > request.session_length)
      return engine_.cancel(token.request, token.completion);
    for (int64_t i = 0; i < observed; ++i)
      pause.observation.push_back(
          static_cast<int32_t>(rng.below(engine_.model().config().vocab_size)));
    pause.max_length = std::min(request.session_length, length + rng.between(1, 300));
    pauses_.push_back(std::move(pause));
  }
  // Continues the dialogues whose observations have come. Returns false if there were none.
  bool resume(const std::function<Trajectory&(const Pause&)>& trajectory_of) {
    const bool any = !pauses_.empty();
    std::erase_if(pauses_, [&](Pause& pause) {
      if (pause.delay-- > 0) return false;
      for (const int32_t token : pause.observation) trajectory_of(pause).append_observed(token);
      engine_.extend(pause.request, pause.completion, pause.observation, pause.max_length);
      return true;
    });
    return any;
  }

 private:
  Engine& engine_;
  Rng delays_;
  std::vector<Pause> pauses_;
};

Rollout roll_out(const Transformer& model, const Setup& setup,
                 std::span<const EngineRequest> requests) {
  Engine engine(model, setup.engine);
  Rollout out;
  std::map<int64_t, size_t> index_of;
  Turns turns(engine, setup.delays);
  for (size_t i = 0; i < requests.size(); i += setup.stride) {
    const EngineRequest& request = requests[i];
    Trajectory start{.tokens = request.prompt,
                     .prompt_length = static_cast<int64_t>(request.prompt.size())};
    start.loss_mask.assign(request.prompt.size(), 0);
    start.logprobs.assign(request.prompt.size(), 0);
    out.completions[i].assign(request.completions.size(), start);
    EngineRequest in = request;
    if (setup.turns) in.session_length = std::min(model.config().context, in.max_length + 2000);
    index_of[engine.submit(in)] = i;
  }
  const auto trajectory_of = [&](const auto& at) -> Trajectory& {
    return out.completions.at(index_of.at(at.request))[static_cast<size_t>(at.completion)];
  };
  for (bool more = true, waits = false; more || waits;) {
    more = engine.step();
    for (const EngineToken& t : engine.poll()) {
      trajectory_of(t).append_sampled(t.token, t.logprob);
      EngineRequest request = requests[index_of.at(t.request)];
      request.session_length = std::min(model.config().context, request.max_length + 2000);
      if (setup.turns && t.end != EngineToken::End::kNone) turns.end(t, trajectory_of(t), request);
    }
    waits = turns.resume(trajectory_of);
  }
  out.stats = engine.stats();
  return out;
}

bool same_bits(double a, double b) {
  return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b);
}

struct Location {
  size_t request, completion, token, prompt_length;  // token: index in the sequence
};
// Called for the first difference of each completion.
void print_difference(const char* message, const Location& at, double a, double b) {
  std::fprintf(stderr,
               "%s: request %zu, completion %zu, token %zu after a prompt of %zu: %.9g, %.9g\n",
               message, at.request, at.completion, at.token, at.prompt_length, a, b);
}

// Number of tokens of `subset` that differ from those of `all` in their id or log-prob.
int64_t count_different(const Rollout& all, const Rollout& subset) {
  int64_t different = 0;
  for (const auto& [index, completions] : subset.completions)
    for (size_t g = 0; g < completions.size(); ++g) {
      const Trajectory &a = all.completions.at(index)[g], &b = completions[g];
      COHORT_CHECK(a.tokens.size() == b.tokens.size(), "[bench] request ", index, ": expected ",
                   a.tokens.size(), " tokens, got ", b.tokens.size());
      int64_t differences = 0;
      for (size_t i = 0; i < a.tokens.size(); ++i) {
        if (a.tokens[i] == b.tokens[i] && same_bits(a.logprobs[i], b.logprobs[i])) continue;
        if (differences++ == 0)
          print_difference("runs differ", {index, g, i, static_cast<size_t>(a.prompt_length)},
                           a.logprobs[i], b.logprobs[i]);
      }
      different += differences;
    }
  return different;
}

// Compares the sampled log-probs with those of training forwards.
void compare_with_training(Metrics& out, const Transformer& model, const Rollout& rollout) {
  NoGradGuard no_grad;
  std::vector<TokenSequence> sequences;
  std::vector<double> sampled;
  std::vector<Location> locations;
  size_t longest = 0;
  for (const auto& [index, completions] : rollout.completions)
    for (const Trajectory& t : completions) {
      const auto completion = static_cast<size_t>(&t - completions.data());
      for (size_t i = 1; i < t.tokens.size(); ++i) {
        if (t.loss_mask[i] == 0) continue;
        locations.push_back({index, completion, i, static_cast<size_t>(t.prompt_length)});
        sampled.push_back(t.logprobs[i]);
      }
      sequences.push_back(policy_sequence(t, 0));
      longest = std::max(longest, t.tokens.size());
    }
  std::vector<double> trained;
  for (const PackedBatch& packed : pack_micro_batches(sequences, 16384)) {
    const auto logprobs =
        policy_log_probs(model, model.to_device(packed), 1).logprob.value().to_vector<double>();
    trained.insert(trained.end(), logprobs.begin(), logprobs.end());
  }
  COHORT_CHECK(trained.size() == sampled.size(), "[bench] expected ", sampled.size(),
               " log-probs of training, got ", trained.size());
  int64_t different = 0;
  std::set<std::pair<size_t, size_t>> printed;
  for (size_t i = 0; i < sampled.size(); ++i) {
    if (same_bits(sampled[i], trained[i])) continue;
    ++different;
    if (printed.insert({locations[i].request, locations[i].completion}).second)
      print_difference("sampled and trained differ", locations[i], sampled[i], trained[i]);
  }
  out.add("log_probs", static_cast<double>(sampled.size()));
  out.add("different", static_cast<double>(different));
  out.add("longest", static_cast<double>(longest));
}

}  // namespace

Metrics compare_exactness(const Transformer& model, int64_t runs, bool turns) {
  const std::vector<EngineRequest> requests = odd_requests(model.config());
  const auto setup_of = [&](int64_t run) {
    Setup setup = kSetups[static_cast<size_t>(run) % std::size(kSetups)];
    setup.turns = turns;
    setup.delays = static_cast<uint64_t>(run);
    return setup;
  };
  const Rollout first = roll_out(model, setup_of(0), requests);
  Metrics out;
  compare_with_training(out, model, first);
  if (turns) {
    int64_t count = 0;
    for (const auto& [index, completions] : first.completions)
      for (const Trajectory& t : completions) count += t.num_turns();
    out.add("turns", static_cast<double>(count));
  }
  int64_t different = 0, preemptions = first.stats.preemptions,
          most_rows = first.stats.most_running;
  for (int64_t run = 1; run < runs; ++run) {
    const Rollout again = roll_out(model, setup_of(run), requests);
    different += count_different(first, again);
    preemptions += again.stats.preemptions;
    most_rows = std::max(most_rows, again.stats.most_running);
  }
  out.add("runs", static_cast<double>(runs));
  out.add("runs_different", static_cast<double>(different));
  out.add("preemptions", static_cast<double>(preemptions));
  out.add("most_rows", static_cast<double>(most_rows));
  return out;
}

}  // namespace cohort::bench
