// The rollout engine: samples do not depend on concurrent requests, nor on the size of the cache;
// no request is lost and no block is leaked.
#include "rl/engine/engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "core/allocator.h"
#include "core/log.h"
#include "tests/rl/tiny_policy.h"

namespace cohort {
namespace {

using namespace test;

// The sampled tokens of one completion.
struct Completion {
  std::vector<int32_t> tokens;
  std::vector<double> logprobs, entropies;
  EngineToken::End end = EngineToken::End::kNone;
  bool operator==(const Completion&) const = default;
};
using Completions = std::map<std::pair<int64_t, int64_t>, Completion>;

// Shows no warning on the console; ExpectLog still gets them.
struct QuietConsole {
  QuietConsole() { logging::set_console_level(logging::Level::kError); }
  ~QuietConsole() { logging::set_console_level(logging::Level::kInfo); }
};

ModelConfig engine_model() {
  ModelConfig config = tiny_model();
  config.context = 96;
  return config;
}

// Sequences of up to three chunks of delta layers, of which two have one head of keys for two.
ModelConfig delta_engine_model() {
  ModelConfig config = engine_model();
  config.num_layers = 3;
  config.context = 170;
  config.delta = {.full_every = 2, .key_heads = 1, .value_heads = 2, .key_dim = 4, .value_dim = 4};
  return config;
}

class EngineTest {
 public:
  explicit EngineTest(DType dtype, Device device = {}, const ModelConfig& config = engine_model())
      : model_(config, dtype, 1, device) {}

  const Transformer& model() const { return model_; }

  // Random request i: a prompt of 1 to 50 tokens with 1 to 4 completions, which end by a stop token
  // or by their length.
  EngineRequest request(uint64_t i) const {
    Rng rng(i, rng_stream(kTestPurpose, 31));
    EngineRequest out;
    for (int64_t n = rng.between(1, 50); n > 0; --n)
      out.prompt.push_back(static_cast<int32_t>(rng.below(kVocab)));
    const auto prompt = static_cast<int64_t>(out.prompt.size());
    out.max_length = prompt + rng.between(1, model_.config().context - prompt);
    if (i % 2 == 0) out.stop_tokens = {kEos};
    for (int64_t n = rng.between(1, 4); n > 0; --n)
      out.completions.push_back(
          {.temperature = 1.5, .seed = i, .stream = static_cast<uint64_t>(n)});
    return out;
  }

  static void take(Engine& engine, Completions& out) {
    for (const EngineToken& t : engine.poll()) {
      Completion& c = out[{t.request, t.completion}];
      EXPECT_EQ(c.end, EngineToken::End::kNone);
      c.tokens.push_back(t.token);
      c.logprobs.push_back(t.logprob);
      c.entropies.push_back(t.entropy);
      c.end = t.end;
    }
  }

  static Completions run(Engine& engine, const std::vector<EngineRequest>& requests) {
    Completions out;
    std::map<int64_t, int64_t> number;
    for (size_t i = 0; i < requests.size(); ++i)
      number[engine.submit(requests[i])] = static_cast<int64_t>(i);
    Completions by_id;
    for (bool more = true; more;) {
      more = engine.step();
      take(engine, by_id);
    }
    for (auto& [key, completion] : by_id)
      out[{number.at(key.first), key.second}] = std::move(completion);
    return out;
  }

  std::vector<EngineRequest> requests(uint64_t count) const {
    std::vector<EngineRequest> out;
    for (uint64_t i = 0; i < count; ++i) out.push_back(request(i));
    return out;
  }

  void expect_samples_do_not_depend_on_capacity() const {
    const std::vector<EngineRequest> all = requests(24);
    Engine large(model_, {});
    const Completions expected = run(large, all);
    EXPECT_EQ(large.stats().preemptions, 0);
    EXPECT_EQ(large.stats().used_blocks, 0);
    std::set<EngineToken::End> ends;
    for (const auto& [key, c] : expected) {
      ends.insert(c.end);
      const EngineRequest& in = all[static_cast<size_t>(key.first)];
      const auto length = static_cast<int64_t>(in.prompt.size() + c.tokens.size());
      const bool stopped = !in.stop_tokens.empty() && c.tokens.back() == kEos;
      EXPECT_EQ(c.end == EngineToken::End::kStopToken, stopped);
      if (c.end == EngineToken::End::kLength) {
        EXPECT_EQ(length, in.max_length);
      }
    }
    EXPECT_EQ(ends.size(), 2u);
    for (const EngineConfig config :
         {EngineConfig{.max_cache_tokens = 1}, EngineConfig{.max_cache_tokens = 200},
          EngineConfig{.max_concurrent = 3, .max_cache_tokens = model_.config().context * 5 / 3},
          EngineConfig{.max_concurrent = 1}}) {
      SCOPED_TRACE(str(config.max_concurrent, " at once, ", config.max_cache_tokens, " tokens"));
      Engine small(model_, config);
      EXPECT_EQ(run(small, all), expected);
      EXPECT_EQ(small.stats().used_blocks, 0);
      if (config.max_concurrent == 3) {
        EXPECT_GT(small.stats().preemptions, 0);
      }
    }
    // One request after the other, in an engine that has served others before.
    Completions alone;
    for (size_t i = 0; i < all.size(); ++i)
      for (auto& [key, c] : run(large, {all[i]})) alone[{static_cast<int64_t>(i), key.second}] = c;
    EXPECT_EQ(alone, expected);
  }

  // Requests of few tokens whose rollout needs all that an engine has: prompts of several lengths,
  // forks, stop tokens, logit biases, penalties.
  static std::vector<EngineRequest> short_requests() {
    std::vector<EngineRequest> out(3);
    out[0] = {.prompt = std::vector<int32_t>(37, 3), .max_length = 42, .stop_tokens = {kEos, 1}};
    out[1] = {.prompt = {1, 2, 3}, .max_length = 9, .logit_bias = {{7, 4.0F}, {2, -3.0F}}};
    out[2] = {.prompt = {4}, .max_length = 6, .stop_tokens = {kEos}};
    out[0].completions = {{.seed = 1}, {.seed = 2}, {.temperature = 1.5, .seed = 3}};
    out[1].completions = {{.repetition_penalty = 1.5F, .seed = 4},
                          {.presence_penalty = 2, .frequency_penalty = 0.5F, .seed = 5}};
    out[2].completions = {{.temperature = 0}};
    return out;
  }

  // Lets each `stride`-th request for memory of a rollout fail, and the two that follow it.
  void expect_no_failed_request_for_memory_changes_samples(const EngineConfig& config,
                                                           int64_t stride = 1) const {
    SCOPED_TRACE(str(config.max_concurrent, " at once, ", config.max_cache_tokens, " tokens"));
    const QuietConsole quiet;
    const std::vector<EngineRequest> all = short_requests();
    const Device device = model_.device();
    const auto run_new = [&] {
      Engine engine(model_, config);
      return run(engine, all);
    };
    const Completions expected = run_new();
    const int64_t requests = [&] {
      const AllocationFaults none(device, int64_t{1} << 40);
      EXPECT_EQ(run_new(), expected);
      return none.requests();
    }();
    ASSERT_GT(requests, 50);
    const int64_t live = allocator(device).stats().live_bytes;
    for (int64_t n = 0; n < requests; n += stride)
      for (const int64_t count : {1, 3}) {
        if (n % count != 0) continue;
        SCOPED_TRACE(str("requests ", n, " to ", n + count - 1, " of ", requests));
        {
          const ExpectLog reported("rollouts: out of memory with a cache of ");
          Engine engine(model_, config);
          const AllocationFaults faults(device, n, count);
          ASSERT_EQ(run(engine, all), expected);
          ASSERT_EQ(engine.stats().used_blocks, 0);
          ASSERT_EQ(engine.stats().waiting + engine.stats().running, 0);
        }
        ASSERT_EQ(allocator(device).stats().live_bytes, live);
      }
  }

  // No request for memory succeeds from one on; then all do.
  void expect_use_after_memory_has_run_out(int64_t stride = 1) const {
    const QuietConsole quiet;
    const std::vector<EngineRequest> all = short_requests();
    Engine engine(model_, {});
    const Completions expected = run(engine, all);
    const EngineStats before = engine.stats();
    for (int64_t n = 0; n < 40; n += stride) {
      {
        const ExpectLog reported("rollouts: out of memory with a cache of ");
        Engine fresh(model_, {});
        for (Engine* failing : {&fresh, &engine}) {
          const AllocationFaults faults(model_.device(), n, int64_t{1} << 40);
          EXPECT_THROW_WITH(run(*failing, all), OutOfMemoryError, "rollout.memory_fraction");
          EXPECT_FALSE(failing->step());
          failing->poll();
        }
        EXPECT_EQ(run(fresh, all), expected);
      }
      engine.reset_stats();
      EXPECT_EQ(run(engine, all), expected);
      EXPECT_EQ(engine.stats().blocks, before.blocks);
      EXPECT_EQ(engine.stats().preemptions, 0);
    }
  }

  // A step in which a random request for memory may fail. Returns false if that has ended all.
  static bool step_with_a_fault(Engine& engine, Rng& rng) {
    const AllocationFaults fault(engine.model().device(), rng.below(400));
    try {
      engine.step();
    } catch (const OutOfMemoryError&) {
      return false;
    }
    return true;
  }

  // Submits, cancels and steps in random order, with a cache that is too small for all.
  enum class Faults { kNone, kSome };
  void expect_no_block_is_leaked(int64_t steps, Faults faults = Faults::kNone) const {
    Engine engine(model_,
                  {.max_concurrent = 6, .max_cache_tokens = model_.config().context * 11 / 6});
    Rng rng(7, rng_stream(kTestPurpose, 32));
    std::map<int64_t, uint64_t> open;
    Completions seen;
    uint64_t next = 0;
    for (int64_t i = 0; i < steps; ++i) {
      if (open.size() < 12 && rng.below(3) == 0) open[engine.submit(request(next))] = next, ++next;
      if (!open.empty() && rng.below(12) == 0) {
        const auto it =
            std::next(open.begin(),
                      static_cast<std::ptrdiff_t>(rng.below(static_cast<int64_t>(open.size()))));
        const auto count = static_cast<int64_t>(request(it->second).completions.size());
        const int64_t first = rng.below(count);
        for (int64_t c = first; c < count; ++c) {
          engine.cancel(it->first, c);
          engine.cancel(it->first, c);  // no effect
        }
        if (first == 0) open.erase(it);
      }
      if (faults == Faults::kNone)
        engine.step();
      else if (!step_with_a_fault(engine, rng))
        open.clear();
      take(engine, seen);
      const EngineStats stats = engine.stats();
      ASSERT_LE(stats.used_blocks, stats.blocks);
      ASSERT_LE(stats.running, 6);
      std::erase_if(open, [&](const auto& entry) {
        const auto c = static_cast<int64_t>(request(entry.second).completions.size());
        for (int64_t k = 0; k < c; ++k)
          if (seen[{entry.first, k}].end == EngineToken::End::kNone) return false;
        return true;
      });
    }
    const int64_t blocks = engine.stats().blocks;
    while (engine.step()) take(engine, seen);
    take(engine, seen);
    EXPECT_EQ(engine.stats().used_blocks, 0);
    EXPECT_EQ(engine.stats().waiting + engine.stats().running, 0);
    EXPECT_EQ(engine.stats().blocks, blocks);
    EXPECT_GT(engine.stats().preemptions, 0);
    // Completions that were not cancelled equal those of an engine of their own.
    Engine alone(model_, {});
    int64_t compared = 0;
    for (const auto& [key, c] : seen) {
      if (c.end == EngineToken::End::kNone || key.first % 37 != 0) continue;
      Completions expected = run(alone, {request(static_cast<uint64_t>(key.first))});
      EXPECT_EQ((expected[{0, key.second}]), c);
      ++compared;
    }
    EXPECT_GT(compared, 2);
  }

 private:
  Transformer model_;
};

TEST(Engine, SamplesDoNotDependOnCapacityOrConcurrency) {
  EngineTest(DType::kF64).expect_samples_do_not_depend_on_capacity();
  EngineTest(DType::kF32).expect_samples_do_not_depend_on_capacity();
}

TEST(EngineOfDeltaLayers, SamplesDoNotDependOnCapacityOrConcurrency) {
  ModelConfig alone = delta_engine_model();
  alone.delta.full_every = 9;
  for (const ModelConfig& config : {delta_engine_model(), alone})
    for (const DType dtype : {DType::kF64, DType::kF32})
      EngineTest(dtype, {}, config).expect_samples_do_not_depend_on_capacity();
}

TEST(EngineOfDeltaLayers, LeaksNoBlockInRandomUse) {
  EngineTest(DType::kF32, {}, delta_engine_model()).expect_no_block_is_leaked(3000);
}

TEST(EngineOfDeltaLayers, AFailedRequestForMemoryChangesNoSample) {
  for (const EngineConfig config :
       {EngineConfig{}, EngineConfig{.max_concurrent = 1, .max_cache_tokens = 1}})
    EngineTest(DType::kF32, {}, delta_engine_model())
        .expect_no_failed_request_for_memory_changes_samples(config, 3);
}

TEST(EngineOfDeltaLayers, IsUsableAfterMemoryHasRunOut) {
  EngineTest(DType::kF32, {}, delta_engine_model()).expect_use_after_memory_has_run_out(4);
}

// Two delta layers with one key and two value heads of 4, by hand, for positions 62 to 130: each
// reads three inputs of 16 channels, and rows of k, u and G of the open chunk, to which 64 and 128
// belong; from 65 on, the matrices.
TEST(EngineOfDeltaLayers, DecodeStepsReadOpenRowsAndMatrices) {
  const EngineTest test(DType::kF32, {}, delta_engine_model());
  Engine engine(test.model(), {});
  EngineTest::run(engine, {{.prompt = std::vector<int32_t>(62, 1),
                            .max_length = 132,
                            .session_length = 0,
                            .completions = {{.temperature = 1}},
                            .stop_tokens = {},
                            .logit_bias = {},
                            .adapter = 0}});
  int64_t weights = 0, tokens = 0, rows = 0;
  for (const NamedParameter& p : test.model().parameters())
    if (p.use != ParameterUse::kLookup) weights += p.value.nbytes();
  for (int64_t position = 62; position <= 130; ++position) {
    tokens += position + 1;
    rows += position <= 64 ? position : position <= 128 ? position - 64 : position - 128;
  }
  const int64_t steps = 69, matrices = 66, row = (4 + 2 * 4 + 2) * 4,
                keys_and_values = block_bytes(test.model().config(), DType::kF32) / 16 * tokens,
                states = 2 * (3 * 16 * 4 * steps + row * rows + 2 * 4 * 4 * 4 * matrices);
  EXPECT_EQ(engine.stats().decode_steps, steps);
  EXPECT_EQ(engine.stats().decode_bytes, weights * steps + keys_and_values + states);
}

// States come first where memory is short: the fraction leaves room for those of few sequences.
TEST(EngineOfDeltaLayers, StatesStayWithinTheFractionOfMemory) {
  const EngineTest test(DType::kF32, {}, delta_engine_model());
  const std::vector<EngineRequest> all = test.requests(24);
  Engine large(test.model(), {});
  const Completions expected = EngineTest::run(large, all);
  EXPECT_GT(large.stats().most_running, 20);
  const int64_t state = state_bytes(test.model().config(), DType::kF32),
                budget = 9 * state + 40 * block_bytes(test.model().config(), DType::kF32);
  Engine small(test.model(), {.memory_fraction = static_cast<double>(budget) /
                                                 static_cast<double>(available_memory({}))});
  EXPECT_EQ(EngineTest::run(small, all), expected);
  EXPECT_LE(small.cache_bytes(), budget * 5 / 4);
  EXPECT_GT(small.cache_bytes(), budget / 2);
  EXPECT_LE(small.stats().most_running, 10);
  EXPECT_GT(small.stats().most_running, 2);
}

// More sequences fit while they are short; a rollout of longer ones has fewer states again.
TEST(EngineOfDeltaLayers, StatesOfShortSequencesAreGivenBack) {
  ModelConfig config = delta_engine_model();
  config.num_layers = 8;
  config.delta.key_heads = config.delta.value_heads = 1;
  config.delta.key_dim = config.delta.value_dim = 2;
  const EngineTest test(DType::kF32, {}, config);
  std::vector<EngineRequest> brief = test.requests(24), full = brief;
  for (EngineRequest& request : brief) {
    request.prompt.resize(1);
    request.max_length = 2;
  }
  for (EngineRequest& request : full) request.max_length = config.context;
  const int64_t budget =
      12 * state_bytes(config, DType::kF32) + 60 * block_bytes(config, DType::kF32);
  Engine engine(test.model(), {.memory_fraction = static_cast<double>(budget) /
                                                  static_cast<double>(available_memory({}))});
  EngineTest::run(engine, brief);
  EXPECT_EQ(engine.stats().most_running, 24);
  EngineTest::run(engine, full);
  EXPECT_LE(engine.cache_bytes(), budget * 5 / 4);
}

TEST(Engine, LeaksNoBlockInRandomUse) {
  EngineTest(DType::kF32).expect_no_block_is_leaked(3000);
}

TEST(EngineSlow, LeaksNoBlockInTenThousandSteps) {
  EngineTest(DType::kF32).expect_no_block_is_leaked(10000);
}

// One test per capacity, because the sanitizers take long.
class EngineOfCapacity : public testing::TestWithParam<EngineConfig> {};

TEST_P(EngineOfCapacity, AFailedRequestForMemoryChangesNoSample) {
  EngineTest(DType::kF32).expect_no_failed_request_for_memory_changes_samples(GetParam());
}

INSTANTIATE_TEST_SUITE_P(Engine, EngineOfCapacity,
                         testing::Values(EngineConfig{}, EngineConfig{.max_cache_tokens = 96},
                                         EngineConfig{.max_concurrent = 2},
                                         EngineConfig{.max_concurrent = 1, .max_cache_tokens = 1}),
                         [](const auto& info) {
                           return str("c", info.param.max_concurrent, "_t",
                                      info.param.max_cache_tokens);
                         });

TEST(Engine, IsUsableAfterMemoryHasRunOut) {
  EngineTest(DType::kF32).expect_use_after_memory_has_run_out();
}

TEST(Engine, LeaksNoBlockInRandomUseWithFailedRequestsForMemory) {
  const ExpectLog reported("rollouts: out of memory with a cache of ");
  EngineTest(DType::kF32).expect_no_block_is_leaked(3000, EngineTest::Faults::kSome);
}

TEST(Engine, LowersItsCapacityForGoodWhenMemoryRunsOut) {
  const EngineTest test(DType::kF32);
  const std::vector<EngineRequest> all = test.requests(24);
  Engine engine(test.model(), {});
  const Completions expected = EngineTest::run(engine, all);
  const int64_t blocks = engine.stats().blocks;
  {
    const ExpectLog reported(
        str("rollouts: out of memory with a cache of ", 16 * blocks, " tokens; continuing with "));
    const AllocationFaults faults(Device{}, 1000);
    EXPECT_EQ(EngineTest::run(engine, all), expected);
  }
  EXPECT_LE(engine.stats().blocks, blocks / 2);
  EXPECT_GT(engine.stats().preemptions, 0);
  EXPECT_EQ(EngineTest::run(engine, all), expected);
  EXPECT_EQ(engine.stats().blocks, blocks / 2);
  // The second time it is not reported.
  const AllocationFaults faults(Device{}, 1000);
  EXPECT_EQ(EngineTest::run(engine, all), expected);
  EXPECT_LT(engine.stats().blocks, blocks / 2);
}

TEST(Engine, GivesItsCacheBackBetweenRequests) {
  const EngineTest test(DType::kF32);
  const int64_t live = allocator({}).stats().live_bytes;
  Engine engine(test.model(), {});
  engine.release_cache();
  const Completions expected = EngineTest::run(engine, EngineTest::short_requests());
  EXPECT_GT(allocator({}).stats().live_bytes, live);
  engine.release_cache();
  EXPECT_EQ(allocator({}).stats().live_bytes, live);
  EXPECT_EQ(engine.cache_bytes(), 0);
  engine.submit(EngineTest::short_requests()[0]);
  EXPECT_THROW_WITH(engine.release_cache(), Error, "unfinished requests");
  engine.cancel_all();
  EXPECT_EQ(EngineTest::run(engine, EngineTest::short_requests()), expected);
}

// Each request has the samples that it has with a model of its adapter alone, to the bit.
void expect_adapters_as_if_alone(DType dtype, Device device, kernels::WeightFormat base) {
  ModelConfig config = engine_model();
  config.d_model = 64;
  config.num_heads = config.num_kv_heads = 2;
  config.head_dim = 32;
  config.d_ff = 128;
  config.precision.base = base;
  config.lora.rank = 4;
  const double alphas[] = {8, 4, 12};
  std::vector<std::vector<Tensor>> adapters;
  std::vector<EngineRequest> requests = EngineTest(DType::kF32).requests(12);
  for (size_t i = 0; i < requests.size(); ++i) requests[i].adapter = static_cast<int32_t>(i % 3);
  config.lora.slots = 3;
  config.lora.alpha = alphas[0];
  Transformer several(config, dtype, 1, device);
  for (size_t i = 0; i < 3; ++i) {
    adapters.push_back(several.adapters());
    for (Tensor& t : adapters.back())
      t = random_tensor(t.shape(), DType::kF32, 100 * i + adapters.back().size(), 0.3)
              .to(dtype)
              .to(device);
    if (i == 0)
      several.set_adapters(adapters[0]);
    else
      several.set_adapter_slot(static_cast<int64_t>(i), adapters[i], alphas[i] / 4);
  }
  Engine engine(several, {.max_cache_tokens = 400});
  const Completions all = EngineTest::run(engine, requests);
  config.lora.slots = 1;
  Completions plain;
  for (size_t i = 0; i < 3; ++i) {
    config.lora.alpha = alphas[i];
    Transformer alone(config, dtype, 1, device);
    alone.set_adapters(adapters[i]);
    Engine one(alone, {});
    for (size_t r = i; r < requests.size(); r += 3) {
      EngineRequest request = requests[r];
      request.adapter = 0;
      for (const auto& [key, completion] : EngineTest::run(one, {request}))
        EXPECT_EQ(all.at({static_cast<int64_t>(r), key.second}), completion) << r;
    }
    if (i > 0) continue;
    // A forward without a cache has the first adapter.
    const NoGradGuard no_grad;
    const TokenSequence sequence{.tokens = {1, 2, 3, 4, 5}, .loss_mask = {0, 1, 1, 1, 1}};
    const PackedBatch batch = alone.to_device(pack({&sequence, 1}));
    EXPECT_TRUE(bit_equal(several.forward(batch).value(), alone.forward(batch).value()));
  }
  requests[0].adapter = 3;
  EXPECT_THROW_WITH(engine.submit(requests[0]), Error, "expected an adapter below 3, got 3");
}

TEST(EngineAdapters, HaveTheBitsThatTheyHaveAlone) {
  for (const auto base : {kernels::WeightFormat::kModel, kernels::WeightFormat::kNf4})
    for (const DType dtype : {DType::kF32, DType::kF64})
      expect_adapters_as_if_alone(dtype, {}, base);
}

TEST(CudaEngineAdapters, HaveTheBitsThatTheyHaveAlone) {
  COHORT_REQUIRE_GPU(device);
  for (const auto base : {kernels::WeightFormat::kModel, kernels::WeightFormat::kNf4})
    expect_adapters_as_if_alone(DType::kBF16, device, base);
}

class CudaEngine : public testing::TestWithParam<DType> {};

TEST_P(CudaEngine, SamplesDoNotDependOnCapacityOrConcurrency) {
  COHORT_REQUIRE_GPU(device);
  EngineTest(GetParam(), device).expect_samples_do_not_depend_on_capacity();
}

TEST_P(CudaEngine, LeaksNoBlockInTenThousandSteps) {
  COHORT_REQUIRE_GPU(device);
  const EngineTest test(GetParam(), device);
  test.expect_no_block_is_leaked(1000);
  const int64_t live = allocator(device).stats().live_bytes;
  test.expect_no_block_is_leaked(10000);
  EXPECT_EQ(allocator(device).stats().live_bytes, live);
}

TEST_P(CudaEngine, ReleasesItsCacheBetweenRequests) {
  COHORT_REQUIRE_GPU(device);
  const EngineTest test(GetParam(), device);
  const std::vector<EngineRequest> all = test.requests(200);
  Engine engine(test.model(), {});
  const Completions expected = EngineTest::run(engine, all);
  const int64_t bytes = engine.cache_bytes();
  ASSERT_GT(bytes, int64_t{1} << 20);
  const auto allocate_all = [&] { return Tensor::full({bytes}, 0xff, DType::kU8, device); };
  const AllocatorStats before = allocator(device).stats();
  allocate_all();
  EXPECT_EQ(allocator(device).stats().reserved_bytes, before.reserved_bytes);
  EXPECT_EQ(EngineTest::run(engine, all), expected);
  EXPECT_EQ(allocator(device).stats().live_bytes, before.live_bytes);
  // A tensor that is still alive keeps the released memory, and the engine allocates another cache.
  const Tensor kept = allocate_all();
  const ExpectLog reported("another cache is allocated beside it");
  for (int i = 0; i < 2; ++i) EXPECT_EQ(EngineTest::run(engine, all), expected);
  EXPECT_TRUE(bit_equal(kept, allocate_all()));
}

// Includes requests in the midst of the capture of decode graphs, and those of page-locked memory.
TEST_P(CudaEngine, AFailedRequestForMemoryChangesNoSample) {
  COHORT_REQUIRE_GPU(device);
  const EngineTest test(GetParam(), device);
  test.expect_no_failed_request_for_memory_changes_samples({}, 5);
  test.expect_no_failed_request_for_memory_changes_samples({.max_cache_tokens = 96}, 7);
}

TEST_P(CudaEngine, IsUsableAfterMemoryHasRunOut) {
  COHORT_REQUIRE_GPU(device);
  EngineTest(GetParam(), device).expect_use_after_memory_has_run_out(13);
}

TEST_P(CudaEngine, GivesItsCacheBackBetweenRequests) {
  COHORT_REQUIRE_GPU(device);
  const EngineTest test(GetParam(), device);
  const std::vector<EngineRequest> all = test.requests(200);
  Engine engine(test.model(), {});
  const Completions expected = EngineTest::run(engine, all);
  const int64_t bytes = engine.cache_bytes();
  const int64_t reserved = allocator(device).stats().reserved_bytes;
  engine.release_cache();
  EXPECT_LE(allocator(device).stats().reserved_bytes, reserved - bytes);
  EXPECT_EQ(EngineTest::run(engine, all), expected);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, CudaEngine, testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& info) { return dtype_name(info.param); });

// The completions of a group share the blocks of their prompt, which is computed once.
TEST(Engine, ComputesAPromptOnceForItsCompletions) {
  const EngineTest test(DType::kF32);
  EngineRequest request = test.request(0);
  request.prompt.assign(40, 3);
  request.max_length = 41;
  request.completions.assign(8, {.seed = 1});
  Engine engine(test.model(), {});
  const Completions all = EngineTest::run(engine, {request});
  EXPECT_EQ(all.size(), 8u);
  EXPECT_EQ(engine.stats().prefilled_tokens, 40);
  // Two full blocks and the partial one, and a copy of the latter for each completion but the
  // first.
  EXPECT_EQ(engine.stats().most_blocks, 3 + 7);
}

// Includes completions that find no free row at first.
TEST(Engine, ComputesAPromptOnceForCompletionsThatWait) {
  const EngineTest test(DType::kF32);
  EngineRequest request = test.request(0);
  request.prompt.assign(40, 3);
  request.max_length = 60;
  request.completions.clear();
  for (uint64_t i = 0; i < 8; ++i) request.completions.push_back({.seed = i});
  Engine few(test.model(), {.max_concurrent = 3}), many(test.model(), {});
  EXPECT_EQ(EngineTest::run(few, {request}), EngineTest::run(many, {request}));
  EXPECT_EQ(few.stats().prefilled_tokens, 40);
  EXPECT_EQ(few.stats().most_running, 3);
}

TEST(Engine, CompletionsHaveParametersOfTheirOwn) {
  const EngineTest test(DType::kF64);
  EngineRequest request = test.request(0);
  request.prompt = {1, 2, 3};
  request.max_length = 40;
  request.stop_tokens = {kEos, 5};
  request.logit_bias = {{7, 4.0F}, {2, -3.0F}};
  request.completions = {{.temperature = 0},
                         {.top_k = 2, .seed = 4},
                         {.top_p = 0.5, .seed = 4},
                         {.min_p = 0.3, .seed = 4},
                         {.repetition_penalty = 1.5F, .seed = 4},
                         {.presence_penalty = 2, .frequency_penalty = 0.5F, .seed = 4},
                         {.seed = 5}};
  Engine engine(test.model(), {}),
      small(test.model(), {.max_concurrent = 3, .max_cache_tokens = 100});
  const Completions together = EngineTest::run(engine, {request, test.request(1)});
  EXPECT_EQ(EngineTest::run(small, {request, test.request(1)}), together);
  EXPECT_GT(small.stats().preemptions, 0);
  for (size_t i = 0; i < request.completions.size(); ++i) {
    EngineRequest single = request;
    single.completions = {request.completions[i]};
    EXPECT_EQ((EngineTest::run(engine, {single}).at({0, 0})),
              (together.at({0, static_cast<int64_t>(i)})));
  }
}

TEST(Engine, RequestsThatCannotBeServedAreRefused) {
  const EngineTest test(DType::kF32);
  Engine engine(test.model(), {});
  const auto refused = [&](const char* text, const auto& change) {
    EngineRequest request = test.request(0);
    change(request);
    EXPECT_THROW_WITH(engine.submit(request), Error, text);
  };
  refused("expected a prompt of at least one token", [](auto& r) { r.prompt.clear(); });
  refused("shorter than max_length",
          [](auto& r) { r.max_length = static_cast<int64_t>(r.prompt.size()); });
  refused("max_length of at most 96", [](auto& r) { r.max_length = 97; });
  refused("outside the vocabulary", [](auto& r) { r.prompt[0] = kVocab; });
  refused("expected biases", [](auto& r) { r.logit_bias = {{kVocab, 1.0F}}; });
  refused("expected biases", [](auto& r) { r.logit_bias = {{0, NAN}}; });
  refused("top_p in (0, 1]", [](auto& r) { r.completions[0].top_p = 0; });
  EXPECT_FALSE(engine.step());
}

TEST(Engine, ContinuesAfterNonFiniteLogits) {
  const EngineTest test(DType::kF32);
  Transformer model(engine_model(), DType::kF32, 1);
  Engine engine(model, {});
  const Completions expected = EngineTest::run(engine, {test.request(3)});
  Tensor head = model.head().weight.value();
  const Tensor saved = head.clone();
  head.fill_(NAN);
  engine.submit(test.request(3));
  engine.submit(test.request(4));
  EXPECT_THROW_WITH(engine.step(), NonFiniteError, "the logits hold NaN or infinity");
  EXPECT_FALSE(engine.step());
  EXPECT_EQ(engine.stats().used_blocks, 0);
  head.copy_(saved);
  engine.poll();
  EXPECT_EQ(EngineTest::run(engine, {test.request(3)}), expected);
}

}  // namespace
}  // namespace cohort
