// Rollouts by the engine and whole GRPO steps, on a model of random weights: a table, and with
// --json FILE the same as JSON. Tokens per second are drawn tokens over wall time, prompts
// included; a decode step's share of the roofline is the time that reading weights and cache would
// take at the device's bandwidth, over the measured. "exactness" compares sampled log-probs with
// those of training, bit for bit.
//
//   cohort_bench_grpo bench/configs/qwen2_0_5b.yaml --vocab 151936
//   cohort_bench_grpo bench/configs/qwen2_0_5b.yaml --vocab 151936 --only decode/1 --only grpo
#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <iostream>

#include "bench/timing.h"
#include "core/allocator.h"
#include "core/parallel.h"
#include "data/json.h"
#include "data/tokenizer.h"
#include "trainers/files.h"
#include "trainers/grpo_step.h"

namespace {

using namespace cohort;

// A prompt and how many tokens follow it, in each of so many completions.
struct Work {
  int64_t prompt = 0, completion = 0, completions = 1;
};

struct Workload {
  std::string name;
  std::vector<Work> work;
  int64_t max_concurrent = 0;
  int repeats = 5;
};

std::vector<Work> equal(int64_t count, const Work& work) {
  return std::vector<Work>(static_cast<size_t>(count), work);
}

// Lengths that users send: in and out each uniform in 100 to 1,024 (nano-vllm's benchmark).
std::vector<Work> mixed(Rng& rng, int64_t count) {
  std::vector<Work> out;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t in = rng.between(100, 1024);
    out.push_back({.prompt = in, .completion = 1124 - in});
  }
  return out;
}

// Few long ones among many short ones; prompt and completion together are equally long.
std::vector<Work> long_tailed(Rng& rng, int64_t count) {
  std::vector<Work> out;
  for (int64_t i = 0; i < count; ++i) {
    const double uniform = (static_cast<double>(rng.below(1 << 24)) + 0.5) / (1 << 24);
    const auto length = static_cast<int64_t>(-200 * std::log(uniform));
    const int64_t completion = std::clamp<int64_t>(length, 16, 2048);
    out.push_back({.prompt = 2176 - completion, .completion = completion});
  }
  return out;
}

std::vector<Workload> workloads() {
  Rng rng(0, rng_stream(kBenchPurpose, 7));
  std::vector<Workload> out;
  for (const int64_t rows : {1, 8, 64, 256, 512})
    out.push_back({str("decode/", rows), equal(rows, {.prompt = 128, .completion = 512}), rows});
  const Work group{.prompt = 128, .completion = 256, .completions = 8};
  out.push_back({"groups", equal(64, group)});
  out.push_back({"groups/256_rows", equal(64, group), 256});
  out.push_back({"groups/128_rows", equal(64, group), 128});
  out.push_back({"mixed", mixed(rng, 256), 256});
  out.push_back({"long_tailed", long_tailed(rng, 1024), 128, 3});
  return out;
}

int64_t tokens_of(const std::vector<Work>& work) {
  int64_t sum = 0;
  for (const Work& w : work) sum += w.completion * w.completions;
  return sum;
}

// Runs the work to its end.
void roll_out(Engine& engine, const std::vector<Work>& work, uint64_t seed) {
  const int64_t vocab = engine.model().config().vocab_size;
  Rng rng(seed, rng_stream(kBenchPurpose, 8));
  uint64_t stream = 0;
  for (const Work& w : work) {
    EngineRequest request{.max_length = w.prompt + w.completion};
    for (int64_t i = 0; i < w.prompt; ++i)
      request.prompt.push_back(static_cast<int32_t>(rng.below(vocab)));
    for (int64_t i = 0; i < w.completions; ++i)
      request.completions.push_back({.seed = seed, .stream = stream++});
    engine.submit(std::move(request));
  }
  int64_t drawn = 0;
  for (bool more = true; more;) {
    more = engine.step();
    drawn += static_cast<int64_t>(engine.poll().size());
  }
  COHORT_CHECK(drawn == tokens_of(work), "[bench] expected ", tokens_of(work), " tokens, got ",
               drawn);
}

struct Result {
  std::string name;
  Metrics metrics;
};

Result run_workload(const Transformer& model, const Workload& load) {
  Engine engine(model, {.max_concurrent = load.max_concurrent});
  uint64_t seed = 0;
  const auto run = [&] { roll_out(engine, load.work, seed++); };
  const double seconds = bench::median_seconds(run, load.repeats, 0);
  const EngineStats stats = engine.stats();
  const auto runs = static_cast<double>(seed);
  const double steps = static_cast<double>(stats.decode_steps) / runs;
  Result out{load.name, {}};
  out.metrics.add("seconds", seconds);
  out.metrics.add("tokens_per_second", static_cast<double>(tokens_of(load.work)) / seconds);
  out.metrics.add("ms_per_step", 1e3 * seconds / steps);
  if (const double bandwidth = memory_bandwidth(model.device()); bandwidth > 0)
    out.metrics.add("roofline",
                    static_cast<double>(stats.decode_bytes) / bandwidth / runs / seconds);
  out.metrics.add("rows", static_cast<double>(stats.most_running));
  out.metrics.add("cache_mib", static_cast<double>(engine.cache_bytes()) / (1 << 20));
  out.metrics.add("preemptions", static_cast<double>(stats.preemptions) / runs);
  return out;
}

// Draws with shared prompts, in a cache that is too small for all, and compares log-probs with
// those of packed training forwards, bit for bit.
Result run_exactness(const Transformer& model) {
  const ModelConfig& c = model.config();
  Engine engine(model, {.max_concurrent = 96, .max_cache_tokens = 40000});
  Rng rng(3, rng_stream(kBenchPurpose, 10));
  std::map<int64_t, std::vector<Trajectory>> all;
  for (const int64_t prompt : {1,    2,  100, 128, 129,  2050, 5000, 7,    640, 33,
                               1000, 17, 511, 3,   4090, 255,  64,   1500, 300, 11})
    for (const int64_t count : {1, 3, 8}) {
      EngineRequest request{.max_length = std::min(c.context, prompt + rng.between(150, 900))};
      for (int64_t i = 0; i < prompt; ++i)
        request.prompt.push_back(static_cast<int32_t>(rng.below(c.vocab_size)));
      const auto id = static_cast<uint64_t>(all.size());
      for (int64_t i = 0; i < count; ++i)
        request.completions.push_back({.seed = id, .stream = static_cast<uint64_t>(i)});
      const std::vector<int32_t> tokens = request.prompt;
      Trajectory start{.tokens = tokens, .prompt_length = prompt};
      start.loss_mask.assign(tokens.size(), 0);
      start.logprobs.assign(tokens.size(), 0);
      all[engine.submit(std::move(request))].assign(static_cast<size_t>(count), start);
    }
  for (bool more = true; more;) {
    more = engine.step();
    for (const EngineToken& t : engine.poll())
      all.at(t.request)[static_cast<size_t>(t.completion)].append_drawn(t.token, t.logprob);
  }
  NoGradGuard no_grad;
  std::vector<TokenSequence> sequences;
  std::vector<double> drawn;
  for (const auto& [id, group] : all)
    for (const Trajectory& t : group) {
      sequences.push_back(policy_sequence(t, 0));
      drawn.insert(drawn.end(), t.logprobs.begin() + 1, t.logprobs.end());
    }
  std::vector<double> trained;
  for (const PackedBatch& packed : pack_micro_batches(sequences, 16384)) {
    const auto some =
        policy_log_probs(model, model.place(packed), 1).logprob.value().to_vector<double>();
    trained.insert(trained.end(), some.begin(), some.end());
  }
  double compared = 0, different = 0;
  for (size_t i = 0; i < drawn.size(); ++i) {
    if (drawn[i] == 0) continue;  // of a prompt
    ++compared;
    different += drawn[i] != trained[i] ? 1 : 0;
  }
  Result out{"exactness", {}};
  out.metrics.add("log_probs", compared);
  out.metrics.add("different", different);
  out.metrics.add("preemptions", static_cast<double>(engine.stats().preemptions));
  out.metrics.add("most_rows", static_cast<double>(engine.stats().most_running));
  return out;
}

// Steps of 64 prompts of 128 tokens with 8 completions of 256 each and random rewards, on a model
// that is trained: rollout, packing, update.
Result run_grpo(const ModelConfig& model, TrainConfig config) {
  config.trainer = TrainerType::kGrpo;
  config.prompts_per_step = 64;
  config.num_generations = 8;
  config.sampling.max_completion_length = 256;
  const Device device = parse_device(config.device, "device");
  const auto comm = make_single_communicator();
  Learner learner(std::make_unique<Transformer>(model, config.dtype, 1, device), config.optimizer,
                  *comm);
  const auto tokenizer = make_byte_tokenizer();
  Engine engine(learner.model(), config.rollout);
  const Sampler sampler(engine, *tokenizer, config.sampling);
  Rng rng(0, rng_stream(kBenchPurpose, 9));
  std::vector<Example> prompts;
  for (int64_t i = 0; i < config.prompts_per_step; ++i) {
    prompts.emplace_back();
    for (int k = 0; k < 128; ++k) prompts.back().prompt += static_cast<char>('a' + rng.below(26));
  }
  allocator(device).reset_peak();
  constexpr int kSteps = 6;
  std::vector<double> rollout, packing, update;
  double tokens = 0;
  for (int64_t step = 0; step < kSteps; ++step) {
    const PromptShare share = share_prompts(*comm, config, step);
    Stopwatch clock;
    ScoredRollouts rollouts;
    rollouts.trajectories =
        sampler.sample(prompts, config.num_generations, {.seed = 1, .step = step});
    rollout.push_back(clock.lap());
    for (const Trajectory& t : rollouts.trajectories) {
      rollouts.scores.total.push_back(0);
      rollouts.advantages.push_back(static_cast<double>(rng.below(1000)) / 500 - 1);
      if (step == 0) tokens += static_cast<double>(t.tokens.size());
    }
    std::vector<Minibatch> minibatches =
        pack_minibatches(*comm, learner.model(), rollouts, rollouts.advantages, share, config);
    packing.push_back(clock.lap());
    update_policy(*comm, learner, minibatches, config, 1e-6);
    learner.check_weights();  // waits for the device
    update.push_back(clock.lap());
  }
  const auto median = [](std::vector<double> values) {
    values.erase(values.begin());  // the first step warms up
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  };
  const double seconds = median(rollout) + median(packing) + median(update);
  Result out{"grpo", {}};
  out.metrics.add("seconds", seconds);
  out.metrics.add("rollout", median(rollout));
  out.metrics.add("packing", median(packing));
  out.metrics.add("update", median(update));
  out.metrics.add("tokens_per_second", tokens / seconds);
  out.metrics.add("update_tokens_per_second", tokens / median(update));
  out.metrics.add("cache_mib", static_cast<double>(engine.cache_bytes()) / (1 << 20));
  out.metrics.add("peak_mib",
                  static_cast<double>(allocator(device).stats().peak_bytes) / (1 << 20));
  return out;
}

void print(const Result& result) {
  std::printf("%-18s", result.name.c_str());
  for (const auto& [name, value] : result.metrics) std::printf(" %s %.4g", name.c_str(), value);
  std::printf("\n");
  std::fflush(stdout);
}

int run(int argc, char** argv) {
  CLI::App app{"rollout and GRPO benchmark"};
  std::string path, json;
  std::vector<std::string> overrides, only;
  int64_t vocab = 66;
  app.add_option("config", path, "CONFIG.yaml: the model")->required();
  app.add_option("overrides", overrides, "key=value ...");
  app.add_option("--vocab", vocab, "vocabulary size")->capture_default_str();
  app.add_option("--only", only, "names of workloads, or their beginnings");
  app.add_option("--json", json, "file for the table as JSON");
  CLI11_PARSE(app, argc, argv);
  const TrainConfig config = load_plan(path, overrides).stages.back();
  if (config.num_threads > 0) set_num_threads(static_cast<int>(config.num_threads));
  ModelConfig model_config = config.model;
  model_config.vocab_size = vocab;
  model_config.context = std::max<int64_t>(model_config.context, 8192);
  model_config.resolve();
  const auto wanted = [&](const std::string& name) {
    return only.empty() || std::any_of(only.begin(), only.end(), [&](const std::string& prefix) {
             return name.starts_with(prefix);
           });
  };
  std::vector<Result> results;
  const auto take = [&](Result result) {
    print(result);
    results.push_back(std::move(result));
  };
  {
    const Transformer model(model_config, config.dtype, 1, parse_device(config.device, "device"));
    for (const Workload& load : workloads())
      if (wanted(load.name)) take(run_workload(model, load));
    if (wanted("exactness")) take(run_exactness(model));
  }
  if (wanted("grpo")) take(run_grpo(model_config, config));
  Json all = Json(Json::Object{});
  for (const Result& result : results) {
    Json one = Json(Json::Object{});
    for (const auto& [name, value] : result.metrics) one.set(name, value);
    all.set(result.name, std::move(one));
  }
  if (!json.empty()) replace_file(json, all.dump() + "\n");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& e) {
    std::cerr << "cohort_bench_grpo: " << e.what() << '\n';
    return 2;
  }
}
