// Rollouts by the engine and whole GRPO steps, on a model of random weights: a table, and with
// --json FILE the same as JSON. Tokens per second are sampled tokens over wall time, including that
// of prompts; queue_tokens_per_second is the rate while requests are waiting, if there are more
// sequences than rows. The roofline of a decode step is the time of reading weights and cache at
// the device's bandwidth, over the measured time. rollout_exactness.h explains "exactness". GRPO
// steps on a given number of rows ("grpo/128", "grpo/256", "grpo/512") run only if --only names
// them.
//
//   cohort_bench_grpo bench/configs/qwen2_0_5b.yaml --vocab 151936
//   cohort_bench_grpo bench/configs/qwen2_0_5b.yaml --vocab 151936 --only decode/1 --only grpo
//   cohort_bench_grpo bench/configs/qwen2_0_5b.yaml --vocab 151936 --only grpo beta=1
//     kl_estimator=reverse --teacher bench/configs/qwen2_1_5b.yaml
#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <optional>

#include "bench/dialogues.h"
#include "bench/op_times.h"
#include "bench/rollout_exactness.h"
#include "bench/rollout_workloads.h"
#include "bench/timing.h"
#include "core/allocator.h"
#include "core/parallel.h"
#include "job/config.h"
#include "sys/files.h"
#include "text/json.h"
#include "text/tokenizer.h"
#include "trainers/grpo_step.h"

namespace {

using namespace cohort;
using bench::Workload;

// Gives adapters values, as training does: with B = 0 their part of an output would be 0.
void set_adapters(Transformer& model) {
  Rng rng(0, rng_stream(kBenchPurpose, 10));
  for (const NamedParameter& p : model.parameters()) {
    if (p.role != ParameterRole::kAdapter) continue;
    std::vector<float> values(static_cast<size_t>(p.value.numel()));
    for (float& value : values) value = static_cast<float>(0.02 * rng.normal());
    Tensor(p.value).copy_(Tensor::from(values, p.value.shape()).to(p.value.dtype()));
  }
  model.update_derived();
}

// Time during which requests waited for a row, and the tokens sampled in it.
struct QueueStats {
  double seconds = 0, tokens = 0;
};

// Runs all requests of a workload.
QueueStats roll_out(Engine& engine, const Workload& load, uint64_t seed) {
  const int64_t vocab = engine.model().config().vocab_size;
  Rng rng(seed, rng_stream(kBenchPurpose, 8));
  QueueStats queue;
  Stopwatch clock;
  uint64_t stream = 0;
  for (const bench::RequestSize& size : load.requests) {
    EngineRequest request{.max_length = size.prompt + size.completion};
    for (int64_t i = 0; i < size.prompt; ++i)
      request.prompt.push_back(static_cast<int32_t>(rng.below(vocab)));
    for (int64_t i = 0; i < size.completions; ++i)
      request.completions.push_back({.seed = seed, .stream = stream++});
    engine.submit(std::move(request));
  }
  int64_t sampled = 0;
  double seconds = 0;
  for (bool more = true; more;) {
    more = engine.step();
    sampled += static_cast<int64_t>(engine.poll().size());
    seconds += clock.lap();
    if (engine.stats().waiting > 0) queue = {seconds, static_cast<double>(sampled)};
  }
  COHORT_CHECK(sampled == load.sampled_tokens(), "[bench] expected ", load.sampled_tokens(),
               " tokens, got ", sampled);
  return queue;
}

struct Result {
  std::string name;
  Metrics metrics;
};

Result run_workload(const Transformer& model, const Workload& load) {
  Engine engine(model, {.max_concurrent = load.max_concurrent});
  uint64_t seed = 0;
  std::vector<double> queue_rates;
  const auto run = [&] {
    const QueueStats queue = roll_out(engine, load, seed++);
    if (seed > 1) queue_rates.push_back(queue.tokens / queue.seconds);  // the first warms up
  };
  const double seconds = bench::median_seconds(run, load.repeats, 0);
  const EngineStats stats = engine.stats();
  const auto runs = static_cast<double>(seed);
  const double steps = static_cast<double>(stats.decode_steps) / runs;
  Result out{load.name, {}};
  out.metrics.add("seconds", seconds);
  out.metrics.add("tokens_per_second", static_cast<double>(load.sampled_tokens()) / seconds);
  if (stats.most_running < load.sequences())
    out.metrics.add("queue_tokens_per_second", bench::median(queue_rates));
  out.metrics.add("ms_per_step", 1e3 * seconds / steps);
  if (const double bandwidth = memory_bandwidth(model.device()); bandwidth > 0)
    out.metrics.add("roofline",
                    static_cast<double>(stats.decode_bytes) / bandwidth / runs / seconds);
  out.metrics.add("rows", static_cast<double>(stats.most_running));
  out.metrics.add("cache_mib", static_cast<double>(engine.cache_bytes()) / (1 << 20));
  out.metrics.add("preemptions", static_cast<double>(stats.preemptions) / runs);
  out.metrics.add("tokens_in", static_cast<double>(load.prompt_tokens()));
  out.metrics.add("tokens_out", static_cast<double>(load.sampled_tokens()));
  return out;
}

// Seconds of AdamW alone, with the state's way through the device if it is on the host.
double optimizer_seconds(Learner& learner) {
  const ParameterSet& parameters = learner.model().parameters();
  const auto step = [&] {
    learner.optimizer().step(0, {});
    learner.optimizer().free_workspace();
    synchronize(learner.model().device());
  };
  for (size_t unit = 0; unit < parameters.units().size(); ++unit)
    parameters.allocate_gradients(unit);
  const double seconds = bench::median_seconds(step, 3, 0);
  parameters.free_gradients();
  return seconds;
}

struct GrpoOptions {
  int64_t completion = 256;  // tokens
  int64_t steps = 6;         // at least two: the first warms up
  bool ops = false;          // prints the time of each op
  // The teacher of config.grpo, a model of random weights; nullopt: none.
  std::optional<ModelConfig> teacher = {};
};

// GRPO steps (rollout, packing, update) of 64 prompts of 128 tokens with 8 completions each and
// random rewards.
Result run_grpo(std::string name, const ModelConfig& model, TrainConfig config,
                const GrpoOptions& options) {
  config.batch.trainer = TrainerType::kGrpo;
  config.batch.prompts_per_step = 64;
  config.batch.num_generations = 8;
  config.sampling.max_completion_length = options.completion;
  const Device device = parse_device(config.device, "device");
  const auto comm = make_single_communicator();
  Learner learner(std::make_unique<Transformer>(model, config.dtype, 1, device), config.optimizer,
                  *comm);
  std::optional<Transformer> teacher;
  if (options.teacher) teacher.emplace(*options.teacher, config.dtype, 2, device);
  const ReferencePolicy reference{.model = teacher ? &*teacher : nullptr};
  const auto tokenizer = make_byte_tokenizer();
  Engine engine(learner.model(), config.rollout);
  const Sampler sampler(engine, *tokenizer, config.sampling);
  Rng rng(0, rng_stream(kBenchPurpose, 9));
  std::vector<Example> prompts;
  for (int64_t i = 0; i < config.batch.prompts_per_step; ++i) {
    prompts.emplace_back();
    for (int k = 0; k < 128; ++k) prompts.back().prompt += static_cast<char>('a' + rng.below(26));
  }
  std::vector<double> rollout, packing, update;
  double tokens = 0;
  int64_t step = 0;
  // The highest live memory since the last call.
  const auto take_peak = [memory = &allocator(device)](int64_t& peak) {
    peak = std::max(peak, memory->stats().peak_bytes);
    memory->reset_peak();
  };
  int64_t rollout_peak = 0, update_peak = 0;
  allocator(device).reset_peak();
  const auto make_step = [&] {
    Stopwatch clock;
    std::vector<Group> groups = group_completions(
        prompts, sampler.sample(prompts, config.batch.num_generations, {.seed = 1, .step = step}));
    rollout.push_back(clock.lap());
    std::vector<double> advantages;
    for (Group& group : groups)
      for (ScoredCompletion& c : group.completions) {
        c.reward = 0;
        advantages.push_back(static_cast<double>(rng.below(1000)) / 500 - 1);
        if (step == 0) tokens += static_cast<double>(c.tokens.size());
      }
    std::vector<PolicyUpdate> minibatches =
        pack_minibatches(*comm, learner, groups, advantages, config);
    take_peak(rollout_peak);
    packing.push_back(clock.lap());
    update_policy(*comm, learner, minibatches, config, 1e-6, {step, reference});
    learner.check_weights();  // waits for the device
    take_peak(update_peak);
    update.push_back(clock.lap());
    ++step;
  };
  int64_t reserved = 0;  // by the allocator after two steps
  while (step < options.steps) {
    make_step();
    if (step == 2) reserved = allocator(device).stats().reserved_bytes;
  }
  const auto median = [](const std::vector<double>& values) {
    return bench::median({values.begin() + 1, values.end()});  // the first step warms up
  };
  const double seconds = median(rollout) + median(packing) + median(update);
  Result out{std::move(name), {}};
  out.metrics.add("seconds", seconds);
  out.metrics.add("rollout", median(rollout));
  out.metrics.add("packing", median(packing));
  out.metrics.add("update", median(update));
  out.metrics.add("tokens_per_second", tokens / seconds);
  out.metrics.add("update_tokens_per_second", tokens / median(update));
  out.metrics.add("cache_mib", static_cast<double>(engine.cache_bytes()) / (1 << 20));
  out.metrics.add("peak_mib", static_cast<double>(std::max(rollout_peak, update_peak)) / (1 << 20));
  out.metrics.add("update_peak_mib", static_cast<double>(update_peak) / (1 << 20));
  const int64_t more = allocator(device).stats().reserved_bytes - reserved;
  out.metrics.add("held_since_step_2_mib", static_cast<double>(more) / (1 << 20));
  out.metrics.add("preemptions", static_cast<double>(engine.stats().preemptions));
  out.metrics.add("optimizer", optimizer_seconds(learner));
  if (options.ops) bench::print_op_times(device, make_step, seconds, {});
  return out;
}

void print(const Result& result) {
  std::printf("%-18s", result.name.c_str());
  for (const auto& [name, value] : result.metrics)
    std::printf(value == std::trunc(value) ? " %s %.0f" : " %s %.6g", name.c_str(), value);
  std::printf("\n");
  std::fflush(stdout);
}

int run(int argc, char** argv) {
  CLI::App app{"rollout and GRPO benchmark"};
  std::string path, json, teacher;
  std::vector<std::string> overrides, only;
  int64_t vocab = 66, runs = 3;
  GrpoOptions grpo;
  app.add_option("config", path, "CONFIG.yaml: the model")->required();
  app.add_option("overrides", overrides, "key=value ...");
  app.add_option("--vocab", vocab, "vocabulary size")->capture_default_str();
  app.add_option("--only", only, "names or prefixes of workloads");
  app.add_option("--runs", runs, "runs of exactness")->capture_default_str();
  app.add_option("--completion", grpo.completion, "tokens of a completion of GRPO steps")
      ->capture_default_str();
  app.add_option("--steps", grpo.steps, "GRPO steps, of which the first warms up")
      ->check(CLI::Range(2, 1000))
      ->capture_default_str();
  app.add_flag("--ops", grpo.ops, "print the time of each op in GRPO steps");
  app.add_option("--teacher", teacher, "CONFIG.yaml: the teacher of GRPO steps with beta above 0");
  app.add_option("--json", json, "write the table to this file as JSON");
  CLI11_PARSE(app, argc, argv);
  const auto model_of = [&](const TrainConfig& of) {
    ModelConfig out = of.model;
    out.vocab_size = vocab;
    out.context = std::max<int64_t>(out.context, 9216);
    out.resolve();
    return out;
  };
  const TrainConfig config = load_plan(path, overrides).stages.back();
  if (config.num_threads > 0) set_num_threads(static_cast<int>(config.num_threads));
  const ModelConfig model_config = model_of(config);
  if (config.grpo.distills() == teacher.empty())
    throw InputError("--teacher goes with beta=1 and kl_estimator=reverse, forward or jsd");
  if (!teacher.empty()) grpo.teacher = model_of(load_plan(teacher, {}).stages.back());
  const auto named = [&](const std::string& name) {
    return std::any_of(only.begin(), only.end(),
                       [&](const std::string& prefix) { return name.starts_with(prefix); });
  };
  const auto wanted = [&](const std::string& name) { return only.empty() || named(name); };
  std::vector<Result> results;
  const auto add = [&](Result result) {
    print(result);
    results.push_back(std::move(result));
  };
  if (only.empty() || std::any_of(only.begin(), only.end(), [](const std::string& name) {
        return !name.starts_with("grpo");
      })) {
    Transformer model(model_config, config.dtype, 1, parse_device(config.device, "device"));
    set_adapters(model);
    for (const Workload& load : bench::rollout_workloads())
      if (wanted(load.name)) add(run_workload(model, load));
    if (wanted("exactness")) add({"exactness", bench::compare_exactness(model, runs)});
    if (wanted("turns")) add({"turns", bench::compare_exactness(model, runs, true)});
    if (wanted("dialogues")) add({"dialogues", bench::time_dialogues(model, 0.05, 5)});
  }
  if (wanted("grpo")) add(run_grpo("grpo", model_config, config, grpo));
  for (const int64_t rows : {128, 256, 512}) {
    const std::string name = str("grpo/", rows);
    TrainConfig with_rows = config;
    with_rows.rollout.max_concurrent = rows;
    if (named(name)) add(run_grpo(name, model_config, with_rows, grpo));
  }
  Json all = Json(Json::Object{});
  for (const Result& result : results) {
    Json metrics = Json(Json::Object{});
    for (const auto& [name, value] : result.metrics) metrics.set(name, value);
    all.set(result.name, std::move(metrics));
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
