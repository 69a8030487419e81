// The cached forward gives the bits of the packed one, however a sequence is split into prefill and
// decode steps and whatever else is in the batch. Sampled log-probs equal the trainer's for this
// reason.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "core/rng.h"
#include "kernels/elementwise.h"
#include "nn/merge.h"
#include "tests/nn/models.h"

namespace cohort {
namespace {

using test::bit_equal;
using test::rows_of;

KVCacheConfig test_cache(const ModelConfig& c, int64_t sequences, int64_t block_tokens) {
  KVCacheConfig out = cache_config(c, sequences, 0);
  out.block_tokens = block_tokens;
  return out;
}

// Feeds sequences to a cache in random portions and records all hidden rows. Between portions
// sequences go on from copies and in other rows, go back by a few tokens, or start again.
class RandomServer {
 public:
  RandomServer(const Transformer& model, const std::vector<TokenSequence>& sequences,
               int64_t block_tokens, uint64_t seed)
      : model_(model),
        cache_(test_cache(model.config(), static_cast<int64_t>(sequences.size()) + 2, block_tokens),
               model.cache_dtype(), model.device()),
        rng_(seed, rng_stream(kTestPurpose, 30)) {
    // Start from used rows, whose blocks are out of order and full of old keys.
    std::vector<int32_t> rows;
    for (size_t i = 0; i < sequences.size(); ++i) rows.push_back(cache_.acquire());
    for (const int32_t row : rows)
      EXPECT_TRUE(cache_.reserve(row, rng_.between(1, model.config().context)));
    while (!rows.empty()) {
      const auto pick = static_cast<size_t>(rng_.below(static_cast<int64_t>(rows.size())));
      cache_.release(rows[pick]);
      rows.erase(rows.begin() + static_cast<std::ptrdiff_t>(pick));
    }
    for (const TokenSequence& s : sequences)
      users_.push_back(
          {&s, cache_.acquire(), 0,
           Tensor::empty({static_cast<int64_t>(s.tokens.size()) - 1, model.config().d_model},
                         model.dtype(), model.device())});
  }

  // Portions that run() has computed, and the events between them.
  int64_t portions() const { return portions_; }
  const std::array<int64_t, 5>& events() const { return events_; }

  // Hidden rows of each sequence.
  std::vector<Tensor> run() {
    while (step()) {
    }
    std::vector<Tensor> out;
    for (const User& user : users_) out.push_back(user.hidden);
    return out;
  }

 private:
  struct User {
    const TokenSequence* sequence;
    int32_t row;
    int64_t done;
    Tensor hidden;
    KVCache::Held held = {};  // a copy of the first `held_length` tokens
    int64_t held_length = 0;
    int64_t left() const { return hidden.dim(0) - done; }
  };

  void disturb(User& user) {
    if (user.done == 0 || rng_.below(4) != 0) return;
    const auto event = static_cast<size_t>(rng_.below(std::ssize(events_)));
    const auto start_again = [&](KVCache::Held& held, int64_t length) {
      user.row = cache_.acquire();
      EXPECT_TRUE(cache_.start_with(user.row, held, length));
      user.done = length;
      cache_.shorten(held, 0);
    };
    KVCache::Held now = cache_.hold(user.row, user.done);
    const int32_t row = user.row;
    const int64_t back = user.done - rng_.between(1, std::min<int64_t>(5, user.done));
    if (event == 0) {  // a fork
      start_again(now, user.done);
      cache_.release(row);
    } else if (event == 1) {  // a turn's end
      cache_.release(row);
      user.row = cache_.acquire();
      cache_.resume(user.row, std::move(now));
    } else if (event == 2 && cache_.state_serves(user.done, back)) {
      cache_.shorten(now, 0);
      user.done = back;
    } else if (event == 3 && rng_.below(4) == 0) {  // a preemption
      cache_.shorten(now, 0);
      cache_.release(row);
      user.row = cache_.acquire();
      user.done = 0;
    } else if (event == 4 && user.held.empty() && cache_.own_state(now)) {  // a prompt
      user.held = std::move(now);
      user.held_length = user.done;
    } else if (event == 4 && !user.held.empty()) {  // a completion of it
      cache_.shorten(now, 0);
      cache_.release(row);
      start_again(user.held, user.held_length);
    } else {
      cache_.shorten(now, 0);
      return;
    }
    ++events_[event];
  }

  // One call on some of the sequences in random order, with the next tokens of each: often one
  // (decode), sometimes many (prefill).
  bool step() {
    std::vector<User*> order;
    for (User& user : users_)
      if (user.left() > 0) order.push_back(&user);
    if (order.empty()) return false;
    for (size_t i = order.size(); i > 1; --i)
      std::swap(order[i - 1], order[static_cast<size_t>(rng_.below(static_cast<int64_t>(i)))]);
    order.resize(static_cast<size_t>(rng_.between(1, static_cast<int64_t>(order.size()))));
    std::vector<int32_t> tokens, rows, positions;
    std::vector<std::pair<User*, int64_t>> owners;
    for (User* user : order) {
      disturb(*user);
      if (user->left() == 0) continue;
      const int64_t n =
          rng_.below(3) == 0 ? rng_.between(1, user->left()) : std::min<int64_t>(2, user->left());
      EXPECT_TRUE(cache_.reserve(user->row, user->done + n));
      for (int64_t i = 0; i < n; ++i, ++user->done) {
        tokens.push_back(user->sequence->tokens[static_cast<size_t>(user->done)]);
        rows.push_back(user->row);
        positions.push_back(static_cast<int32_t>(user->done));
        owners.emplace_back(user, user->done);
      }
    }
    cache_.upload();
    portions_ += std::ssize(order);
    const auto to_device = [&](const auto& values) {
      return Tensor::from(values).to(model_.device());
    };
    const Tensor hidden =
        model_.forward_cached(to_device(tokens), to_device(rows), to_device(positions), cache_);
    for (size_t i = 0; i < owners.size(); ++i) {
      Tensor row = owners[i].first->hidden.select(0, owners[i].second);
      row.copy_(hidden.select(0, static_cast<int64_t>(i)));
    }
    return true;
  }

  const Transformer& model_;
  KVCache cache_;
  Rng rng_;
  std::vector<User> users_;
  int64_t portions_ = 0;
  std::array<int64_t, 5> events_ = {};
};

}  // namespace

struct Serving {
  int cpu_threads;
  int64_t block_tokens;
  uint64_t order_seed;
};

// Returns the number of portions.
int64_t expect_packed_bits(const test::ModelCase& model_case, DType dtype, Device device,
                           const std::vector<Serving>& servings) {
  const auto& [name, config] = model_case;
  Transformer model(config, dtype, 1, device);
  test::set_adapters(model);
  const auto sequences = test::random_sequences({1, 7, 131, 20, 64, 3}, config.vocab_size, 2);
  const NoGradGuard no_grad;
  const Tensor packed = model.forward(model.to_device(pack(sequences))).value();
  int64_t portions = 0;
  std::array<int64_t, 5> events = {};
  for (const auto& [threads, block_tokens, seed] : servings) {
    const test::Threads guard(threads);
    RandomServer server(model, sequences, block_tokens, seed);
    const auto cached = server.run();
    portions += server.portions();
    for (size_t i = 0; i < events.size(); ++i) events[i] += server.events()[i];
    int64_t begin = 0;
    for (const Tensor& hidden : cached) {
      EXPECT_TRUE(bit_equal(hidden, rows_of(packed, begin, hidden.dim(0))))
          << name << ", " << dtype_name(dtype) << ", blocks of " << block_tokens << ", " << threads
          << " threads, length " << hidden.dim(0);
      begin += hidden.dim(0);
    }
  }
  if (servings.size() > 3) {
    EXPECT_GT(*std::ranges::min_element(events), 0) << name;
  }
  return portions;
}

// The models, and each with adapters.
std::vector<test::ModelCase> with_adapters(std::vector<test::ModelCase> models) {
  const size_t count = models.size();
  for (size_t i = 0; i < count; ++i)
    models.push_back({models[i].name + " with adapters", test::with_lora(models[i].config, 3)});
  return models;
}

// Keeps the models whose keys and values may be rounded, and rounds them; with `attention`, also
// queries and P.
std::vector<test::ModelCase> with_rounded_keys(const std::vector<test::ModelCase>& models,
                                               DType dtype, bool attention = false) {
  std::vector<test::ModelCase> out;
  for (test::ModelCase model : models) {
    model.config.precision.cache = CachePrecision::kFp8;
    if (attention) model.config.precision.attention = AttentionPrecision::kFp8;
    try {
      check_precision(model.config, dtype);
    } catch (const InputError&) {
      continue;
    }
    model.name += attention ? " with attention in FP8" : " with rounded keys";
    out.push_back(std::move(model));
  }
  EXPECT_FALSE(out.empty());
  return out;
}

TEST(ForwardCached, RoundedKeysGiveThePackedForwardsBits) {
  for (const DType dtype : {DType::kF32, DType::kF64})
    for (const test::ModelCase& model :
         with_rounded_keys(with_adapters(test::model_cases()), dtype)) {
      expect_packed_bits(model, dtype, {}, {{1, 1, 2}, {2, 16, 4}});
      // They differ from keys that are not rounded.
      ModelConfig plain = model.config;
      plain.precision = {};
      const PackedBatch batch = pack(test::random_sequences({9, 30}, plain.vocab_size, 2));
      EXPECT_FALSE(bit_equal(Transformer(model.config, dtype, 1).forward(batch).value(),
                             Transformer(plain, dtype, 1).forward(batch).value()))
          << model.name;
    }
}

TEST(ForwardCached, AttentionInFp8GivesThePackedForwardsBits) {
  for (const DType dtype : {DType::kF32, DType::kF64})
    for (const test::ModelCase& model :
         with_rounded_keys(with_adapters(test::model_cases()), dtype, true)) {
      expect_packed_bits(model, dtype, {}, {{1, 1, 2}, {2, 16, 4}});
      // They differ from queries and P that are not rounded.
      ModelConfig cached = model.config;
      cached.precision.attention = AttentionPrecision::kModel;
      const PackedBatch batch = pack(test::random_sequences({9, 30}, cached.vocab_size, 2));
      EXPECT_FALSE(bit_equal(Transformer(model.config, dtype, 1).forward(batch).value(),
                             Transformer(cached, dtype, 1).forward(batch).value()))
          << model.name;
    }
}

// The scales of rounded weights are those of a model that has been given these weights. Rounding
// takes the first row of each head's values beyond the bound of their scale, which doubles; the
// other rows are so small that their values are subnormal numbers of e4m3.
TEST(RoundWeights, WritesTheScalesAgain) {
  ModelConfig config = test::model_config("llama");
  config.precision.cache = CachePrecision::kFp8;
  Transformer model(config, DType::kF32, 1);
  const double limit = 448 / (1.07 * static_cast<double>(config.d_model));  // 17.445
  for (const NamedParameter& p : model.parameters()) {
    if (p.name.find("v_proj.weight") == p.name.npos) continue;
    for (int64_t row = 0; row < p.value.dim(0); ++row) {
      Tensor weights = p.value.narrow(0, row, 1);
      if (row % config.head_dim == 0)
        weights.fill_(limit * 0.9999);
      else
        kernels::scale({.y = weights, .x = weights.contiguous(), .factor = 1e-2});
    }
  }
  model.update_derived();
  round_weights(model, "BF16");
  Transformer again(config, DType::kF32, 2);
  again.copy_from(model);
  const PackedBatch batch = pack(test::random_sequences({9, 30}, config.vocab_size, 2));
  EXPECT_TRUE(bit_equal(model.forward(batch).value(), again.forward(batch).value()));
}

TEST(ForwardCached, GivesThePackedForwardsBits) {
  for (const test::ModelCase& model : with_adapters(test::model_cases()))
    for (const DType dtype : {DType::kF32, DType::kF64})
      expect_packed_bits(model, dtype, {}, {{1, 1, 2}, {2, 5, 3}, {3, 16, 4}, {1, 64, 5}});
}

TEST(ForwardCached, DeltaLayersGiveThePackedForwardsBits) {
  std::vector<Serving> servings;
  for (uint64_t seed = 0; seed < 60; ++seed)
    servings.push_back({static_cast<int>(seed % 3) + 1, std::array{1, 5, 16, 64}[seed % 4], seed});
  int64_t portions = 0;
  for (const test::ModelCase& model : test::delta_cases())
    for (const DType dtype : {DType::kF32, DType::kF64})
      portions += expect_packed_bits(model, dtype, {}, servings);
  EXPECT_GT(portions, 10000);
}

// Idle rows pad a decode step to a fixed size.
void expect_idle_rows_change_nothing(DType dtype, Device device,
                                     const std::vector<test::ModelCase>& models) {
  for (const auto& [name, config] : models) {
    const Transformer model(config, dtype, 1, device);
    KVCache alone(test_cache(config, 2, 16), dtype, device),
        filled(test_cache(config, 2, 16), dtype, device);
    const auto to_device = [&](const std::vector<int32_t>& v) {
      return Tensor::from(v).to(device);
    };
    for (KVCache* cache : {&alone, &filled}) {
      for (const int64_t length : {4, 3}) EXPECT_TRUE(cache->reserve(cache->acquire(), length));
      cache->upload();
      model.forward_cached(to_device({1, 2, 3, 4, 5}), to_device({0, 0, 0, 1, 1}),
                           to_device({0, 1, 2, 0, 1}), *cache);
    }
    const Tensor expected =
        model.forward_cached(to_device({5, 6}), to_device({0, 1}), to_device({3, 2}), alone);
    const Tensor got =
        model.forward_cached(to_device({0, 5, 0, 6, 0}), to_device({-1, 0, -1, 1, -1}),
                             to_device({0, 3, 0, 2, 0}), filled);
    EXPECT_TRUE(bit_equal(rows_of(got, 1, 1), rows_of(expected, 0, 1))) << name;
    EXPECT_TRUE(bit_equal(rows_of(got, 3, 1), rows_of(expected, 1, 1))) << name;
    for (const double x : got.to_vector<double>()) EXPECT_TRUE(std::isfinite(x)) << name;
  }
}

TEST(ForwardCached, IdleRowsChangeNothing) {
  expect_idle_rows_change_nothing(DType::kF32, {}, test::model_cases());
  expect_idle_rows_change_nothing(DType::kF32, {}, test::delta_cases());
}

TEST(CudaForwardCached, IdleRowsChangeNothing) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : {DType::kF32, DType::kBF16})
    expect_idle_rows_change_nothing(dtype, device, test::model_cases());
}

// A model of the sizes that GPU kernels are made for.
ModelConfig wide_config(int64_t head_dim) {
  ModelConfig wide = test::model_config("llama");
  wide.d_model = 512;
  wide.num_heads = 8;
  wide.num_kv_heads = 2;
  wide.d_ff = 1408;
  wide.head_dim = head_dim;
  wide.init_std = 0.05;
  wide.resolve();
  return wide;
}

TEST(CudaForwardCached, GivesThePackedForwardsBits) {
  COHORT_REQUIRE_GPU(device);
  std::vector<test::ModelCase> models = test::model_cases();
  for (const int64_t head_dim : {64, 128})
    models.push_back({str("wide, heads of ", head_dim), wide_config(head_dim)});
  for (const test::ModelCase& model : with_adapters(models))
    for (const DType dtype : {DType::kF32, DType::kBF16})
      expect_packed_bits(model, dtype, device, {{1, 1, 2}, {1, 5, 3}, {1, 16, 4}, {1, 64, 5}});
}

TEST(CudaForwardCached, RoundedKeysGiveThePackedForwardsBits) {
  COHORT_REQUIRE_GPU(device);
  std::vector<test::ModelCase> models = test::model_cases();
  for (const int64_t head_dim : {64, 128, 256})
    models.push_back({str("wide, heads of ", head_dim), wide_config(head_dim)});
  for (const DType dtype : {DType::kF32, DType::kBF16})
    for (const test::ModelCase& model : with_rounded_keys(with_adapters(models), dtype))
      expect_packed_bits(model, dtype, device, {{1, 16, 4}, {1, 64, 5}});
}

// Skinny GEMMs prefetch their weights, and attention its cache, block table and positions, while
// the grids before them run (Stream::may_prefetch). All of these are written right before a step,
// in random order, by kernels that let the next one start early.
TEST(CudaForwardCached, AStepReadsWhatWasWrittenRightBeforeIt) {
  COHORT_REQUIRE_GPU(device);
  const ModelConfig config = wide_config(64);
  constexpr int kRows = 4, kSteps = 1000;
  const NoGradGuard no_grad;
  Transformer model(config, DType::kBF16, 1, device);
  KVCache cache(test_cache(config, 2 * kRows, 16), DType::kBF16, device);
  for (int i = 0; i < 2 * kRows; ++i) ASSERT_TRUE(cache.reserve(cache.acquire(), config.context));
  cache.upload();

  // An input of a step, and its two versions: a weight, keys or values.
  struct Input {
    Tensor tensor;
    std::array<Tensor, 2> versions;
  };
  std::vector<Input> inputs;
  Rng rng(5, rng_stream(kTestPurpose, 31));
  const auto add = [&](const Tensor& tensor, double scale) {
    Input input{.tensor = tensor};
    for (Tensor& version : input.versions) {
      version = test::random_tensor(tensor.shape(), DType::kBF16,
                                    static_cast<uint64_t>(rng.below(1 << 20)))
                    .to(device);
      kernels::scale({.y = version, .x = version, .factor = scale});
    }
    inputs.push_back(input);
  };
  for (const NamedParameter& p : model.parameters())
    if (p.value.rank() == 2) add(p.value, 0.05);
  for (int layer = 0; layer < config.num_layers; ++layer) {
    add(cache.layer(layer).k, 1);
    add(cache.layer(layer).v, 1);
  }
  std::array<Tensor, 2> rows, positions;
  for (int version = 0; version < 2; ++version) {
    std::vector<int32_t> row, position;
    for (int i = 0; i < kRows; ++i) {
      row.push_back(version * kRows + i);
      position.push_back(static_cast<int32_t>(rng.below(config.context)));
    }
    rows[static_cast<size_t>(version)] = Tensor::from(row).to(device);
    positions[static_cast<size_t>(version)] = Tensor::from(position).to(device);
  }
  // The blocks of a version in the other order.
  Tensor table = cache.layer(0).block_table;
  std::array<Tensor, 2> tables{table.clone(), {}};
  std::vector<int32_t> blocks = tables[0].to_vector<int32_t>();
  const int32_t last = *std::max_element(blocks.begin(), blocks.end());
  for (int32_t& block : blocks)
    if (block >= 0) block = last - block;
  tables[1] = Tensor::from(blocks, table.shape()).to(device);
  Tensor row = rows[0].clone(), position = positions[0].clone();
  const Tensor tokens = Tensor::from(std::vector<int32_t>{1, 2, 3, 4}).to(device);
  std::vector<size_t> order(inputs.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto step = [&](size_t version) {
    row.copy_(rows[version]);
    position.copy_(positions[version]);
    table.copy_(tables[version]);
    for (size_t i = order.size(); i > 1; --i)
      std::swap(order[i - 1], order[static_cast<size_t>(rng.below(static_cast<int64_t>(i)))]);
    for (const size_t i : order)
      kernels::scale({.y = inputs[i].tensor, .x = inputs[i].versions[version], .factor = 1});
    return model.forward_cached(tokens, row, position, cache, CachedStep::kDecode);
  };
  std::array<Tensor, 2> expected;
  for (size_t version = 0; version < 2; ++version) {
    synchronize(device);
    expected[version] = step(version).to(Device{});
  }
  EXPECT_FALSE(bit_equal(expected[0], expected[1]));
  std::vector<std::pair<size_t, Tensor>> results;
  for (int i = 0; i < kSteps; ++i) {
    const auto version = static_cast<size_t>(rng.below(2));
    results.emplace_back(version, step(version));
  }
  int wrong = 0;
  for (const auto& [version, result] : results)
    wrong += bit_equal(result.to(Device{}), expected[version]) ? 0 : 1;
  EXPECT_EQ(wrong, 0) << "of " << kSteps;
}

void expect_trained_logprobs(DType dtype, Device device) {
  const ModelConfig config = test::model_config("llama");
  const Transformer model(config, dtype, 1, device);
  auto sequences = test::random_sequences({13, 40, 6}, config.vocab_size, 2);
  for (TokenSequence& s : sequences) s.loss_mask.assign(s.tokens.size(), 1);
  const PackedBatch batch = model.to_device(pack(sequences));
  const kernels::HeadDesc head{.temperature = 0.8};
  const Tensor trained =
      token_log_probs(model.forward(batch), model.head(), batch.targets, head).logprob.value();
  const auto cached = RandomServer(model, sequences, 16, 3).run();
  int64_t t = 0;
  for (const Tensor& hidden : cached)
    for (int64_t i = 0; i < hidden.dim(0); ++i, ++t) {
      const NoGradGuard no_grad;
      const Tensor sampled = token_log_probs(Variable(rows_of(hidden, i, 1)), model.head(),
                                             rows_of(batch.targets, t, 1), head)
                                 .logprob.value();
      EXPECT_TRUE(bit_equal(sampled, rows_of(trained, t, 1))) << t;
    }
}

TEST(ForwardCached, LogProbsOfCachedRowsEqualTheTrainers) {
  expect_trained_logprobs(DType::kF32, {});
}
TEST(CudaForwardCached, LogProbsOfCachedRowsEqualTheTrainers) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : {DType::kF32, DType::kBF16}) expect_trained_logprobs(dtype, device);
}

TEST(ForwardCached, LeavesNoTape) {
  const ModelConfig config = test::model_config("llama");
  const Transformer model(config, DType::kF32, 1);
  KVCache cache(test_cache(config, 1, 16), DType::kF32);
  const int32_t row = cache.acquire();
  ASSERT_TRUE(cache.reserve(row, 1));
  cache.upload();
  model.forward_cached(Tensor::from(std::vector<int32_t>{3}),
                       Tensor::from(std::vector<int32_t>{row}),
                       Tensor::from(std::vector<int32_t>{0}), cache);
  EXPECT_TRUE(grad_enabled());
}

void expect_bad_inputs_throw(const ModelConfig& config) {
  const Transformer model(config, DType::kF32, 1);
  KVCache cache(test_cache(config, 2, 16), DType::kF32);
  const int32_t row = cache.acquire();
  ASSERT_TRUE(cache.reserve(row, 16));
  cache.upload();
  const auto call = [&](int32_t token, int32_t sequence, int32_t position) {
    const auto one = [](int32_t v) { return Tensor::from(std::vector<int32_t>{v}); };
    return model.forward_cached(one(token), one(sequence), one(position), cache);
  };
  EXPECT_NO_THROW(call(0, row, 15));
  EXPECT_THROW(call(31, row, 0), Error);  // vocabulary
  EXPECT_THROW(call(-1, row, 0), Error);
  EXPECT_THROW(call(0, 2, 0), Error);        // no such row
  EXPECT_THROW(call(0, row, 16), Error);     // not reserved
  EXPECT_THROW(call(0, row, 160), Error);    // context
  EXPECT_THROW(call(0, 1 - row, 0), Error);  // a row without blocks
}

TEST(ForwardCached, BadTokensRowsAndPositionsThrow) {
  expect_bad_inputs_throw(test::model_config("gpt2"));
  expect_bad_inputs_throw(test::delta_cases()[0].config);
}

TEST(KVCache, RowsAndBlocksAreReused) {
  KVCache cache({.num_layers = 1,
                 .num_kv_heads = 1,
                 .head_dim = 2,
                 .num_sequences = 3,
                 .max_length = 10,
                 .block_tokens = 4},
                DType::kF32);
  const auto blocks_of = [&](int32_t row) {
    cache.upload();
    return cache.layer(0).block_table.select(0, row).to_vector<int32_t>();
  };
  EXPECT_EQ(cache.free_rows(), 3);
  const int32_t a = cache.acquire(), b = cache.acquire(), c = cache.acquire();
  EXPECT_EQ((std::vector<int32_t>{a, b, c}), (std::vector<int32_t>{0, 1, 2}));
  EXPECT_THROW_WITH(cache.acquire(), Error, "all 3 sequences are in use");
  ASSERT_TRUE(cache.reserve(a, 1));
  ASSERT_TRUE(cache.reserve(b, 5));
  ASSERT_TRUE(cache.reserve(a, 4));  // fits the block it has
  ASSERT_TRUE(cache.reserve(a, 10));
  EXPECT_EQ(blocks_of(a), (std::vector<int32_t>{0, 3, 4}));
  EXPECT_EQ(blocks_of(b), (std::vector<int32_t>{1, 2, -1}));
  ASSERT_TRUE(cache.reserve(a, 2));  // never shrinks
  EXPECT_EQ(blocks_of(a), (std::vector<int32_t>{0, 3, 4}));
  EXPECT_THROW_WITH((void)cache.reserve(c, 11), Error,
                    "11 tokens exceeds the maximum length of 10");
  cache.release(a);
  EXPECT_EQ(blocks_of(a), (std::vector<int32_t>{-1, -1, -1}));
  EXPECT_EQ(cache.free_rows(), 1);
  // Every row can still be filled to the end.
  EXPECT_EQ(cache.acquire(), a);
  for (const int32_t row : {a, b, c}) EXPECT_TRUE(cache.reserve(row, 10));
  std::vector<int32_t> all;
  for (const int32_t row : {a, b, c})
    for (const int32_t block : blocks_of(row)) all.push_back(block);
  std::sort(all.begin(), all.end());
  EXPECT_EQ(all, (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8}));
}

TEST(KVCache, RowsShareHeldBlocksAndCopyThePartialOne) {
  KVCache cache({.num_layers = 2,
                 .num_kv_heads = 1,
                 .head_dim = 1,
                 .num_sequences = 3,
                 .max_length = 12,
                 .num_blocks = 6,
                 .block_tokens = 4},
                DType::kF32);
  const auto blocks_of = [&](int32_t row) {
    cache.upload();
    return cache.layer(0).block_table.select(0, row).to_vector<int32_t>();
  };
  const auto fill = [&](int32_t block, double value) {
    for (int layer = 0; layer < 2; ++layer)
      for (Tensor* pages : {&cache.layer(layer).k, &cache.layer(layer).v})
        pages->select(0, block).fill_(value);
  };
  const auto sum_of = [&](int32_t block) {
    double sum = 0;
    for (int layer = 0; layer < 2; ++layer)
      for (const Tensor* pages : {&cache.layer(layer).k, &cache.layer(layer).v})
        for (const double x : pages->select(0, block).to_vector<double>()) sum += x;
    return sum;
  };
  const int32_t a = cache.acquire(), b = cache.acquire(), c = cache.acquire();
  EXPECT_TRUE(cache.reserve(a, 6));
  for (const int32_t block : {0, 1}) fill(block, block + 1);
  for (const int32_t block : {2, 3, 4, 5}) fill(block, 0);
  KVCache::Held prompt = cache.hold(a, 6);
  EXPECT_EQ(prompt.blocks, (KVCache::Blocks{0, 1}));
  EXPECT_TRUE(cache.start_with(b, prompt, 6));
  EXPECT_EQ(blocks_of(b), (std::vector<int32_t>{0, 2, -1}));
  EXPECT_EQ(sum_of(2), sum_of(1));
  EXPECT_EQ(sum_of(2), 4 * 4 * 2);
  EXPECT_EQ(cache.free_blocks(), 3);
  // A block is freed by its last holder.
  cache.release(a);
  EXPECT_EQ(cache.free_blocks(), 3);
  cache.release(b);
  EXPECT_EQ(cache.free_blocks(), 4);
  // Whole blocks need no copy.
  const KVCache::Held whole{{prompt.blocks[0]}};
  EXPECT_TRUE(cache.start_with(c, whole, 4));
  EXPECT_EQ(cache.free_blocks(), 4);
  cache.shorten(prompt, 0);
  EXPECT_EQ(cache.free_blocks(), 5);
  EXPECT_EQ(blocks_of(c), (std::vector<int32_t>{0, -1, -1}));
  // Without a free block nothing changes; the copy of a released row is cancelled.
  const KVCache::Held held = cache.hold(c, 3);
  const int32_t d = cache.acquire(), e = cache.acquire();
  EXPECT_TRUE(cache.start_with(d, held, 3));
  cache.release(d);
  EXPECT_TRUE(cache.reserve(e, 12));
  const int32_t f = cache.acquire();
  EXPECT_TRUE(cache.reserve(f, 8));
  EXPECT_FALSE(cache.reserve(f, 9));
  EXPECT_EQ(cache.free_blocks(), 0);
  for (const int32_t block : blocks_of(e)) EXPECT_EQ(sum_of(block) == sum_of(0), false);
}

// A pool of 9 states for 8 rows.
TEST(KVCache, StatesAreCopiedMovedAndNeverShared) {
  ModelConfig model = test::delta_cases()[0].config;
  KVCache cache(test_cache(model, 8, 16), DType::kF32);
  const auto states = [&] {
    cache.upload();
    return cache.row_states().to_vector<int32_t>();
  };
  // A mark in each tensor of a state, or their sum.
  const auto tensors = [&](int32_t state) {
    std::vector<Tensor> out;
    for (int layer = 0; layer < 3; ++layer) {
      auto& [s, ring] = cache.delta_layer(layer);
      for (const Tensor& t : {s.s, s.k, s.u, s.decay, ring}) out.push_back(t.select(0, state));
    }
    return out;
  };
  const auto sum = [&](int32_t state) {
    double total = 0;
    for (const Tensor& t : tensors(state))
      for (const double x : t.to_vector<double>()) total += x;
    return total;
  };
  const auto fill = [&](int32_t state, double value) {
    for (Tensor& t : tensors(state)) t.fill_(value);
    return sum(state);
  };
  const int32_t a = cache.acquire();
  EXPECT_EQ(cache.free_states(), 9);  // a row without tokens has none
  ASSERT_TRUE(cache.reserve(a, 70));
  const int32_t state = states()[static_cast<size_t>(a)];
  EXPECT_EQ(cache.free_states(), 8);
  const double marked = fill(state, 1);
  for (int32_t other = 0; other < 9; ++other)
    if (other != state) fill(other, 0);
  KVCache::Held prompt = cache.hold(a, 70);
  EXPECT_EQ(prompt.state, state);
  std::vector<int32_t> rows{a};
  for (int i = 0; i < 7; ++i) {
    rows.push_back(cache.acquire());
    ASSERT_TRUE(cache.start_with(rows.back(), prompt, 70));
  }
  ASSERT_TRUE(cache.own_state(prompt));
  EXPECT_EQ(cache.free_states(), 0);
  std::vector<int32_t> all = states();
  all.push_back(prompt.state);
  for (const int32_t s : all) EXPECT_EQ(sum(s), marked);
  std::ranges::sort(all);
  EXPECT_EQ(all, (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8}));
  // The spare one is given back, then there is none for a second prompt, as a row may need it.
  KVCache::Held second = cache.hold(a, 70);
  EXPECT_FALSE(cache.own_state(second));
  cache.shorten(second, 0);
  cache.release(rows[7]);
  second = cache.hold(a, 70);
  EXPECT_FALSE(cache.own_state(second));
  cache.shorten(second, 0);
  EXPECT_EQ(cache.free_states(), 1);
  // A turn's end moves the state; the next one has it in another row. A fork then finds none.
  const int32_t kept_state = states()[static_cast<size_t>(rows[3])];
  KVCache::Held kept = cache.hold(rows[3], 70);
  cache.release(rows[3]);
  const int32_t b = cache.acquire(), c = cache.acquire();
  ASSERT_TRUE(cache.reserve(b, 1));
  EXPECT_FALSE(cache.reserve(c, 1));
  EXPECT_FALSE(cache.start_with(c, prompt, 70));
  cache.resume(c, std::move(kept));
  EXPECT_EQ(states()[static_cast<size_t>(c)], kept_state);
  // A state that is given back before it is copied, and then becomes a copy itself.
  fill(prompt.state, 5);
  cache.release(b);
  cache.release(rows[4]);
  const int32_t d = cache.acquire(), reused = prompt.state;
  ASSERT_TRUE(cache.start_with(d, prompt, 70));
  cache.shorten(prompt, 0);
  const KVCache::Held other = cache.hold(a, 70);
  const int32_t e = cache.acquire();
  ASSERT_TRUE(cache.start_with(e, other, 70));
  const std::vector<int32_t> now = states();
  EXPECT_EQ(now[static_cast<size_t>(e)], reused);
  EXPECT_EQ(sum(now[static_cast<size_t>(d)]), 5 * marked);
  EXPECT_EQ(sum(now[static_cast<size_t>(e)]), marked);
}

// The chunk of the last token, and five inputs.
TEST(KVCache, AStateServesForTheFewTokensBefore) {
  const KVCache cache(test_cache(test::delta_cases()[0].config, 1, 16), DType::kF32);
  for (const auto& [tokens, length, serves] :
       std::vector<std::tuple<int64_t, int64_t, bool>>{{70, 70, true},
                                                       {70, 65, true},
                                                       {70, 64, false},
                                                       {69, 65, true},
                                                       {80, 75, true},
                                                       {80, 74, false},
                                                       {65, 64, false},
                                                       {64, 63, true},
                                                       {3, 1, true},
                                                       {3, 0, false}})
    EXPECT_EQ(cache.state_serves(tokens, length), serves) << tokens << " " << length;
  const KVCache plain(test_cache(test::model_config("llama"), 1, 16), DType::kF32);
  EXPECT_TRUE(plain.state_serves(100, 3));
}

TEST(KVCache, BytesCountKeysAndValuesOfAllLayers) {
  const KVCacheConfig config{.num_layers = 2,
                             .num_kv_heads = 3,
                             .head_dim = 5,
                             .num_sequences = 4,
                             .max_length = 10,
                             .block_tokens = 4};
  const int64_t expected = 2 * 2 * (4 * 3 * 4) * 3 * 5 * 8;
  EXPECT_EQ(KVCache::bytes(config, DType::kF64), expected);
  KVCache cache(config, DType::kF64);
  EXPECT_EQ(2 * (cache.layer(0).k.nbytes() + cache.layer(1).v.nbytes()), expected);
}

// Qwen3.5 4B and 9B, by hand: 24 delta layers with 32 value and 16 key heads of 128.
TEST(KVCache, BytesCountStates) {
  ModelConfig c;
  c.num_layers = 32;
  c.num_kv_heads = 4;
  c.head_dim = 256;
  c.delta = {.full_every = 4};
  EXPECT_EQ(block_bytes(c, DType::kBF16), 16 * (32 << 10));
  const int64_t matrices = 32 * 128 * 128 * 4, rows = 64 * (16 + 32) * 128 * 2,
                decays = 64 * 32 * 4, ring = 8 * (2 * 16 + 32) * 128 * 2;
  EXPECT_EQ(state_bytes(c, DType::kBF16), 24 * (matrices + rows + decays + ring));
  EXPECT_NEAR(static_cast<double>(state_bytes(c, DType::kBF16)) / (1 << 20), 70, 1);
  EXPECT_EQ(cache_config(c, 16, 5).count_states(), 18);
}

}  // namespace cohort
