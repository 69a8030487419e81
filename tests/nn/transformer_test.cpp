// The transformer: initial values, gradients of all parameters, independence of rows, dropout by
// address, recomputation with equal bits.
#include <map>
#include <set>

#include "autograd/gradcheck.h"
#include "core/allocator.h"
#include "core/rng.h"
#include "tests/nn/models.h"

namespace cohort {
namespace {

using test::bit_equal;
using test::ModelCase;
using test::rows_of;

std::vector<Tensor> gradients(const Transformer& model) {
  std::vector<Tensor> out;
  for (const NamedParameter& p : model.parameters()) out.push_back(p.grad().clone());
  return out;
}

void check_all_gradients(ModelConfig config, double dropout, GradcheckOptions options = {}) {
  config.d_model = config.num_heads * 4;
  config.head_dim = config.position == PositionType::kLearned ? 3 : 4;
  config.d_ff = 7;
  config.vocab_size = 11;
  config.context = 8;
  config.dropout = dropout;
  const Transformer model(config, DType::kF64, 1);
  test::expect_gradients_of_differences(
      model, pack(test::random_sequences({5, 1, 4}, config.vocab_size, 2)), options);
}

}  // namespace

TEST(TransformerGradients, LlamaLikeMatchesDifferences) {
  ModelConfig config = test::model_config("llama");
  config.qk_norm = true;
  check_all_gradients(config, 0);
}

TEST(TransformerGradients, Gpt2LikeMatchesDifferences) {
  check_all_gradients(test::model_config("gpt2"), 0);
}

TEST(TransformerGradientsSlow, EverySchemeAndRuleMatchesDifferences) {
  for (const auto& [name, config] : test::rule_cases()) {
    SCOPED_TRACE(name);
    check_all_gradients(config, 0, {.step = 1e-3});
  }
  check_all_gradients(test::model_config("all_rules"), 0.2, {.elements = 8});
}

TEST(TransformerGradients, DropoutMatchesDifferences) {
  check_all_gradients(test::model_config("gpt2"), 0.2, {.elements = 8});
}

TEST(TransformerInit, HasItsStatistics) {
  ModelConfig c = test::model_config("gpt2");
  c.d_model = 60;
  c.head_dim = 20;
  c.d_ff = 120;
  c.init_std = 0.02;
  const Transformer model(c, DType::kF64, 7);
  for (const NamedParameter& p : model.parameters()) {
    const std::string& name = p.name;
    const auto values = p.value.to_vector<double>();
    if (p.value.rank() == 1) {
      const double expected = name.ends_with("norm.weight") ? 1 : 0;
      EXPECT_EQ(values, std::vector<double>(values.size(), expected)) << name;
      continue;
    }
    const bool output =
        name.find("o_proj") != std::string::npos || name.find("down_proj") != std::string::npos;
    const double std = output ? 0.02 / std::sqrt(2.0 * 2) : 0.02;
    const auto n = static_cast<double>(values.size());
    double mean = 0, square = 0;
    for (const double v : values) {
      mean += v / n;
      square += v * v / n;
    }
    // Five standard deviations of the two estimates.
    EXPECT_NEAR(mean / std, 0, 5 / std::sqrt(n)) << name;
    EXPECT_NEAR(square / (std * std), 1, 5 * std::sqrt(2 / n)) << name;
  }
}

TEST(TransformerInit, DependsOnTheSeedOnly) {
  for (const auto& [name, config] : test::model_cases()) {
    const Transformer a(config, DType::kF64, 7), b(config, DType::kF64, 7),
        single(config, DType::kF32, 7), other(config, DType::kF64, 8);
    for (size_t i = 0; i < a.parameters().size(); ++i) {
      const Tensor& value = a.parameters()[i].value;
      EXPECT_TRUE(bit_equal(value, b.parameters()[i].value)) << name;
      EXPECT_TRUE(bit_equal(value.to(DType::kF32), single.parameters()[i].value));
      const bool same = bit_equal(value, other.parameters()[i].value);
      EXPECT_EQ(same, value.rank() == 1) << name;
    }
    EXPECT_NE(a.parameters()[0].value.to_vector<double>()[0],
              a.parameters()[2].value.to_vector<double>()[0]);
  }
}

TEST(Transformer, NamesAreUniqueAndTheHeadIsTiedWhereAsked) {
  for (const auto& [name, config] : test::model_cases()) {
    const Transformer model(config, DType::kF32, 1);
    std::vector<std::string> names;
    for (const NamedParameter& p : model.parameters()) names.push_back(p.name);
    std::sort(names.begin(), names.end());
    EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end()) << name;
    const bool tied = model.head().weight.value().raw() == model.parameters()[0].value.raw();
    EXPECT_EQ(tied, config.tie_embeddings) << name;
    EXPECT_EQ(std::count(names.begin(), names.end(), "lm_head.weight"), tied ? 0 : 1) << name;
  }
}

// One matmul gives queries, keys and values, and one gate and up: its weight and the gradient are
// one tensor each, whose consecutive rows are the parameters.
TEST(Transformer, ParametersOfOneMatmulAreRowsOfOneLeaf) {
  for (const auto& [name, config] : test::model_cases()) {
    const Transformer model(config, DType::kF32, 1);
    std::map<std::string, const NamedParameter*> by_name;
    for (const NamedParameter& p : model.parameters()) by_name[p.name] = &p;
    std::set<const void*> leaves;
    for (const NamedParameter& p : model.parameters()) leaves.insert(p.leaf.value().raw());
    EXPECT_EQ(leaves.size(), model.parameters().trained().size()) << name;
    const std::string block = "model.layers.1.";
    std::vector<std::vector<std::string>> groups;
    for (const char* kind : {".weight", ".bias"}) {
      groups.push_back({});
      for (const char* part : {"q_proj", "k_proj", "v_proj"})
        groups.back().push_back(block + "self_attn." + part + kind);
      groups.push_back({block + "mlp.gate_proj" + kind, block + "mlp.up_proj" + kind});
    }
    for (const auto& group : groups) {
      if (!by_name.contains(group[0])) continue;
      const Variable& leaf = by_name[group[0]]->leaf;
      int64_t row = 0;
      for (const std::string& part : group) {
        const NamedParameter& p = *by_name[part];
        const int64_t rows = p.value.dim(0);
        EXPECT_EQ(p.leaf.value().raw(), leaf.value().raw()) << name << " " << part;
        EXPECT_EQ(p.value.raw(), leaf.value().narrow(0, row, rows).raw()) << name << " " << part;
        EXPECT_EQ(p.grad().raw(), leaf.grad().narrow(0, row, rows).raw()) << name << " " << part;
        row += rows;
      }
      EXPECT_EQ(row, leaf.value().dim(0)) << name << " " << group[0];
    }
  }
}

TEST(Transformer, CopyFromCopiesValues) {
  const ModelConfig config = test::model_config("llama");
  const Transformer source(config, DType::kF32, 1);
  Transformer target(config, DType::kF32, 2);
  target.copy_from(source);
  for (size_t i = 0; i < source.parameters().size(); ++i) {
    const Tensor &a = source.parameters()[i].value, &b = target.parameters()[i].value;
    EXPECT_TRUE(bit_equal(a, b));
    EXPECT_NE(a.raw(), b.raw());
  }
  EXPECT_THROW_WITH(target.copy_from(Transformer(test::model_config("gpt2"), DType::kF32, 1)),
                    Error, "[copy_from]");
}

TEST(Transformer, RowsDoNotDependOnTheOtherRows) {
  for (const auto& [name, config] : test::model_cases())
    for (const DType dtype : {DType::kF32, DType::kF64}) {
      const Transformer model(config, dtype, 1);
      const auto sequences = test::random_sequences({3, 1, 140, 17, 64}, config.vocab_size, 2);
      const NoGradGuard no_grad;
      const test::Threads one(1);
      const Tensor packed = model.forward(pack(sequences)).value();
      for (const int threads : {2, 3}) {
        const test::Threads guard(threads);
        EXPECT_TRUE(bit_equal(model.forward(pack(sequences)).value(), packed)) << name;
      }
      const std::vector<TokenSequence> reversed(sequences.rbegin(), sequences.rend());
      const Tensor backwards = model.forward(pack(reversed)).value();
      int64_t begin = 0;
      for (const TokenSequence& s : sequences) {
        const auto length = static_cast<int64_t>(s.tokens.size()) - 1;
        const Tensor expected = rows_of(packed, begin, length);
        EXPECT_TRUE(bit_equal(model.forward(pack({&s, 1})).value(), expected))
            << name << " " << length;
        EXPECT_TRUE(bit_equal(rows_of(backwards, packed.dim(0) - begin - length, length), expected))
            << name << " " << length;
        begin += length;
      }
    }
}

TEST(Transformer, LaterTokensDoNotReachEarlierRows) {
  const ModelConfig config = test::model_config("llama");
  const Transformer model(config, DType::kF32, 1);
  auto sequences = test::random_sequences({20}, config.vocab_size, 2);
  const Tensor before = model.forward(pack(sequences)).value();
  sequences[0].tokens[12] = (sequences[0].tokens[12] + 1) % 31;
  const Tensor after = model.forward(pack(sequences)).value();
  EXPECT_TRUE(bit_equal(rows_of(before, 0, 12), rows_of(after, 0, 12)));
  for (int64_t t = 12; t < 20; ++t)
    EXPECT_FALSE(bit_equal(rows_of(before, t, 1), rows_of(after, t, 1))) << t;
}

TEST(TransformerDropout, BitsFollowTheSequenceNotThePacking) {
  for (const char* name : {"llama", "gpt2"}) {
    ModelConfig config = test::model_config(name);
    config.dropout = 0.3;
    const Transformer model(config, DType::kF32, 1);
    const auto sequences = test::random_sequences({9, 30, 4}, config.vocab_size, 2, 11);
    const ForwardOptions train{.mode = Mode::kTrain, .seed = 5, .step = 6};
    const Tensor packed = model.forward(pack(sequences), train).value();
    int64_t begin = 0;
    for (const TokenSequence& s : sequences) {
      const auto length = static_cast<int64_t>(s.tokens.size()) - 1;
      EXPECT_TRUE(
          bit_equal(model.forward(pack({&s, 1}), train).value(), rows_of(packed, begin, length)));
      begin += length;
    }
    for (const int threads : {2, 3}) {
      const test::Threads guard(threads);
      EXPECT_TRUE(bit_equal(model.forward(pack(sequences), train).value(), packed));
    }
    auto reindexed = sequences;
    for (TokenSequence& s : reindexed) s.index += 3;
    EXPECT_FALSE(bit_equal(model.forward(pack(reindexed), train).value(), packed));
    for (const ForwardOptions& other : {ForwardOptions{.mode = Mode::kTrain, .seed = 6, .step = 6},
                                        ForwardOptions{.mode = Mode::kTrain, .seed = 5, .step = 7}})
      EXPECT_FALSE(bit_equal(model.forward(pack(sequences), other).value(), packed));
  }
}

// If all matrices are 0 and the last biases of two branches 1, the residual stream is the sum of
// their masks: equal masks give two distinct values per row, different masks three.
TEST(TransformerDropout, LayersAndBranchesDrawTheirOwnBits) {
  ModelConfig config = test::model_config("gpt2");
  config.dropout = 0.5;
  const PackedBatch batch = pack(test::random_sequences({20}, config.vocab_size, 2));
  const char *const down = "mlp.down_proj.bias", *const out = "self_attn.o_proj.bias";
  for (const auto& [first, second] : {std::pair{str("layers.0.", down), str("layers.1.", down)},
                                      std::pair{str("layers.0.", out), str("layers.1.", out)},
                                      std::pair{str("layers.1.", out), str("layers.1.", down)}}) {
    const Transformer model(config, DType::kF64, 1);
    for (const NamedParameter& p : model.parameters()) {
      Tensor value = p.value;
      if (value.rank() == 2) value.zero_();
      if (p.name.ends_with(first) || p.name.ends_with(second)) value.fill_(1);
    }
    const Tensor hidden = model.forward(batch, {.mode = Mode::kTrain, .seed = 5}).value();
    int64_t rows_of_three = 0;
    for (int64_t t = 0; t < hidden.dim(0); ++t) {
      const auto row = hidden.select(0, t).to_vector<double>();
      rows_of_three += std::set<double>(row.begin(), row.end()).size() == 3;
    }
    // A row of 21 dims misses a value with probability 0.75^21 at most.
    EXPECT_GT(rows_of_three, 15) << first << " and " << second;
  }
}

TEST(TransformerDropout, IsOffInEval) {
  ModelConfig config = test::model_config("llama");
  const Transformer without(config, DType::kF32, 1);
  config.dropout = 0.3;
  const Transformer with(config, DType::kF32, 1);
  const PackedBatch batch = pack(test::random_sequences({9, 30}, config.vocab_size, 2));
  EXPECT_TRUE(bit_equal(with.forward(batch, {.seed = 5}).value(), without.forward(batch).value()));
  const ForwardOptions train{.mode = Mode::kTrain};
  EXPECT_FALSE(bit_equal(with.forward(batch, train).value(), without.forward(batch).value()));
  EXPECT_TRUE(bit_equal(without.forward(batch, train).value(), without.forward(batch).value()));
}

// The mean of n values that are 1 / (1 - p) with probability 1 - p has standard deviation
// sqrt(p / (1 - p) / n). The tolerance is five of them, for each site and layer separately.
TEST(TransformerDropout, PreservesTheMeanAtEachSite) {
  const int64_t tokens = 64, width = 200;
  const double p = 0.3, n = static_cast<double>(tokens * width);
  std::vector<int32_t> positions;
  for (int32_t t = 0; t < tokens; ++t) positions.push_back(t);
  const Variable ones(Tensor::full({tokens, width}, 1, DType::kF64));
  std::vector<Tensor> seen;
  for (const auto site :
       {DropoutSite::kEmbedding, DropoutSite::kAttentionOut, DropoutSite::kMlpOut})
    for (const int layer : {0, 1}) {
      const Tensor y = dropout(ones, {.p = p,
                                      .seed = 1,
                                      .stream = dropout_stream(2, layer, site),
                                      .sequences = Tensor::zeros({tokens}, DType::kI64),
                                      .positions = Tensor::from(positions)})
                           .value();
      double mean = 0;
      for (const double v : y.to_vector<double>()) mean += v / n;
      EXPECT_NEAR(mean, 1, 5 * std::sqrt(p / (1 - p) / n));
      for (const Tensor& other : seen) EXPECT_FALSE(bit_equal(y, other));
      seen.push_back(y);
    }
}

TEST(TransformerDropout, StreamsOfStepsLayersAndSitesDiffer) {
  std::set<uint64_t> streams;
  for (int64_t step = -2; step < 10; ++step)
    for (int64_t layer = 0; layer < 10; ++layer)
      for (const auto site : {DropoutSite::kEmbedding, DropoutSite::kAttention,
                              DropoutSite::kAttentionOut, DropoutSite::kMlpOut})
        streams.insert(dropout_stream(step, layer, site));
  EXPECT_EQ(streams.size(), 480u);
}

// Compares loss and gradients of six blocks; returns the peak bytes of none, cheap and block.
std::vector<int64_t> expect_same_bits(const char* name, DType dtype, Device device) {
  ModelConfig config = test::model_config(name);
  config.num_layers = 6;
  config.dropout = 0.1;
  const PackedBatch batch = pack(test::random_sequences({40, 3, 60}, config.vocab_size, 2));
  const ForwardOptions train{.mode = Mode::kTrain, .seed = 5, .step = 6};
  std::vector<Tensor> losses;
  std::vector<std::vector<Tensor>> all;
  std::vector<int64_t> peaks;
  for (const Recompute recompute : {Recompute::kNone, Recompute::kCheap, Recompute::kBlock}) {
    config.recompute = recompute;
    const Transformer model(config, dtype, 1, device);
    for (const NamedParameter& p : model.parameters()) p.grad().zero_();
    Allocator& memory = allocator(device);
    memory.reset_peak();
    const int64_t start = memory.stats().live_bytes;
    const Variable loss = test::mean_loss(model, batch, train);
    backward(loss);
    peaks.push_back(memory.stats().peak_bytes - start);
    losses.push_back(loss.value());
    all.push_back(gradients(model));
  }
  for (const size_t k : {1, 2}) {
    EXPECT_TRUE(bit_equal(losses[0], losses[k])) << name << " in " << dtype_name(dtype);
    for (size_t i = 0; i < all[0].size(); ++i)
      EXPECT_TRUE(bit_equal(all[0][i], all[k][i]))
          << name << " in " << dtype_name(dtype) << ", recompute " << k << ", parameter " << i;
  }
  return peaks;
}

const char* const kRecomputed[] = {"llama", "qwen", "gpt2", "t5", "exposb", "all_rules"};

TEST(TransformerRecompute, BlockGivesTheSameBitsWithLessMemory) {
  const test::Threads one(1);
  for (const char* name : kRecomputed)
    for (const DType dtype : {DType::kF32, DType::kF64}) {
      const auto peaks = expect_same_bits(name, dtype, {});
      EXPECT_LT(peaks[1], peaks[0] * 9 / 10) << name;
      EXPECT_LT(peaks[2], peaks[0] * 2 / 3) << name;
    }
}

// In bf16 a gradient held temporarily in f32 would round differently.
TEST(CudaTransformerRecompute, GivesTheSameBits) {
  COHORT_REQUIRE_GPU(device);
  for (const char* name : kRecomputed)
    for (const DType dtype : {DType::kF32, DType::kBF16}) expect_same_bits(name, dtype, device);
}

TEST(TransformerRecompute, HooksFireOncePerParameter) {
  for (const char* name : kRecomputed) {
    ModelConfig config = test::model_config(name);
    config.recompute = Recompute::kBlock;
    const Transformer model(config, DType::kF32, 1);
    std::vector<int> fired(model.parameters().size(), 0);
    std::vector<Tensor> at_hook(fired.size());
    for (size_t i = 0; i < fired.size(); ++i)
      model.parameters()[i].leaf.on_gradient([&, i] {
        ++fired[i];
        at_hook[i] = model.parameters()[i].grad().clone();
      });
    backward(test::mean_loss(model, pack(test::random_sequences({7, 5}, config.vocab_size, 2))));
    for (size_t i = 0; i < fired.size(); ++i) {
      const NamedParameter& p = model.parameters()[i];
      ASSERT_EQ(fired[i], 1) << p.name;
      EXPECT_TRUE(bit_equal(at_hook[i], p.grad())) << p.name;
    }
  }
}

TEST(Transformer, LossAndGradientsDoNotDependOnThreads) {
  for (const char* name : {"qwen", "exposb", "all_rules"}) {
    const ModelConfig config = test::model_config(name);
    const PackedBatch batch = pack(test::random_sequences({40, 3, 150}, config.vocab_size, 2));
    std::vector<std::vector<Tensor>> results;
    for (const int threads : {1, 2, 3}) {
      const test::Threads guard(threads);
      const Transformer model(config, DType::kF32, 1);
      const Variable loss = test::mean_loss(model, batch);
      backward(loss);
      results.push_back(gradients(model));
      results.back().push_back(loss.value());
    }
    for (size_t k = 1; k < results.size(); ++k)
      for (size_t i = 0; i < results[0].size(); ++i)
        EXPECT_TRUE(bit_equal(results[0][i], results[k][i])) << name << " " << i;
  }
}

// `message`: expected error text after the bad id.
void expect_bad_batches_throw(Device device, const std::string& message) {
  for (const char* name : {"llama", "gpt2"}) {
    ModelConfig config = test::model_config(name);
    config.context = 16;
    const Transformer model(config, DType::kF32, 1, device);
    const auto forward = [&](const std::vector<TokenSequence>& sequences) {
      model.forward(model.to_device(pack(sequences)));
    };
    for (const int32_t bad : {31, -1, 1 << 30}) {
      auto sequences = test::random_sequences({5, 6}, config.vocab_size, 2);
      sequences[1].tokens[2] = bad;
      sequences[1].loss_mask[2] = 0;
      EXPECT_THROW_WITH(forward(sequences), Error, str(bad, message));
    }
    EXPECT_NO_THROW(forward(test::random_sequences({16}, config.vocab_size, 2)));
    EXPECT_THROW_WITH(forward(test::random_sequences({3, 17}, config.vocab_size, 2)), Error, "16");
  }
}

TEST(CudaTransformer, BadBatchesThrow) {
  COHORT_REQUIRE_GPU(device);
  expect_bad_batches_throw(device, " at index 7 of the batch, expected 0 to 30");
}

TEST(Transformer, BadBatchesThrow) {
  expect_bad_batches_throw({}, "");
  ModelConfig unresolved;
  unresolved.vocab_size = 5;
  EXPECT_THROW_WITH(Transformer(unresolved, DType::kF32, 1), Error, "resolved");
}

// A run that uses only the first learned positions trains as with all of them.
TEST(Transformer, LearnedPositionsThatARunDoesNotUseAreKept) {
  ModelConfig all = test::model_config("gpt2"), few = all;
  few.context = 8;
  few.position_rows = all.context;
  const Transformer whole(all, DType::kF32, 1), shorter(few, DType::kF32, 1);
  const PackedBatch batch = pack(test::random_sequences({8, 3}, all.vocab_size, 2));
  for (const Transformer* model : {&whole, &shorter}) backward(test::mean_loss(*model, batch));
  ASSERT_EQ(whole.parameters().size(), shorter.parameters().size());
  for (size_t i = 0; i < whole.parameters().size(); ++i) {
    const NamedParameter &a = whole.parameters()[i], &b = shorter.parameters()[i];
    EXPECT_TRUE(bit_equal(a.value, b.value)) << a.name;
    EXPECT_TRUE(bit_equal(a.grad(), b.grad())) << a.name;
  }
}

}  // namespace cohort
