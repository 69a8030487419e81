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
using test::test_cache;

// Feeds sequences to a cache in random portions and records all hidden rows. Between portions
// sequences continue from copies and in other rows, go back by a few tokens, or start again.
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

}  // namespace cohort
