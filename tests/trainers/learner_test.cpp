// One optimiser update: its sums, its errors, and its memory.
#include "trainers/learner.h"

#include <cmath>
#include <limits>

#include "core/allocator.h"
#include "nn/memory.h"
#include "tests/support/loss_node.h"
#include "tests/support/tensor_files.h"
#include "tests/support/test_util.h"

namespace cohort::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

ModelConfig small_model() {
  ModelConfig c;
  c.num_layers = 1;
  c.d_model = 16;
  c.num_heads = 2;
  c.context = 12;
  c.init_std = 0.2;
  c.vocab_size = 9;
  c.resolve();
  return c;
}

TokenSequence sequence(int64_t length, int64_t vocab, uint64_t seed = 1) {
  Rng rng(seed, rng_stream(kTestPurpose));
  TokenSequence out;
  for (int64_t i = 0; i < length; ++i) out.tokens.push_back(static_cast<int32_t>(rng.below(vocab)));
  out.loss_mask.assign(out.tokens.size(), 1);
  return out;
}

// The mean loss of one sequence, times `scale`.
HeadLoss small_loss(const Transformer& model, uint64_t seed, double scale = 1) {
  const TokenSequence s = sequence(9, model.config().vocab_size, seed);
  const PackedBatch batch = pack({&s, 1});
  return cross_entropy(model.forward(batch), model.head(), batch.targets,
                       Tensor::full({batch.size()}, scale / 8, model.dtype()));
}

std::vector<Tensor> copies(const NamedTensors& tensors) {
  std::vector<Tensor> out;
  for (const auto& [name, tensor] : tensors) out.push_back(tensor.clone());
  return out;
}
std::vector<Tensor> copies(const Transformer& model) {
  std::vector<Tensor> out;
  for (const NamedParameter& p : model.parameters()) out.push_back(p.value.clone());
  return out;
}

void expect_bit_equal(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(bit_equal(a[i], b[i])) << i;
}

class LearnerTest : public testing::Test {
 protected:
  LearnerTest()
      : comm_(make_single_communicator()),
        learner_(std::make_unique<Transformer>(small_model(), DType::kF32, 1), {}, *comm_) {
    // One good update, so that the moments are not zero.
    learner_.update(
        1, [&](int64_t) { return small_loss(learner_.model(), 1); }, 1e-3);
  }

  // Expects the update to throw NonFiniteError with `text`, and to change nothing.
  void expect_refused(int64_t micro_batches, const std::function<HeadLoss(int64_t)>& loss,
                      const std::string& text) {
    const auto weights = copies(learner_.model()),
               moments = copies(tensors_of(learner_.optimizer().state_sources()));
    EXPECT_THROW_WITH(learner_.update(micro_batches, loss, 1e-3), NonFiniteError, text);
    expect_bit_equal(copies(learner_.model()), weights);
    expect_bit_equal(copies(tensors_of(learner_.optimizer().state_sources())), moments);
    EXPECT_EQ(learner_.optimizer().updates(), 1);
  }

  // A finite loss whose gradient at the model's last parameter is `value`.
  HeadLoss bad_gradient(double value) {
    const Variable p = learner_.model().parameters().back().leaf;
    return on_tape(make_node(
        "bad", Tensor::full({1}, 0.5, DType::kF32), {p},
        [value](const Tensor&, Gradients& gradients) { gradients.slot(0).tensor.fill_(value); }));
  }

  std::unique_ptr<Communicator> comm_;
  Learner learner_;
};

TEST_F(LearnerTest, LossThatIsNotANumberStopsBeforeTheUpdateAndNamesTheMicroBatch) {
  expect_refused(
      3, [&](int64_t i) { return small_loss(learner_.model(), 2, i == 1 ? kNaN : 1.0); },
      "the loss of micro batch 2 of 3 is nan; nothing was updated; hint: a lower learning_rate, or "
      "a lower max_grad_norm above 0");
}

TEST_F(LearnerTest, InfiniteLossStopsBeforeTheUpdate) {
  expect_refused(
      1, [&](int64_t) { return small_loss(learner_.model(), 2, kInf); },
      "the loss of micro batch 1 of 1 is inf");
}

TEST_F(LearnerTest, InfiniteGradientStopsBeforeTheUpdateAndNamesTheParameter) {
  expect_refused(
      1, [&](int64_t) { return bad_gradient(kInf); },
      "the gradient of " + learner_.model().parameters().back().name + " has a value of inf");
}

TEST_F(LearnerTest, GradientThatIsNotANumberStopsBeforeTheUpdateAndNamesTheParameter) {
  expect_refused(
      1, [&](int64_t) { return bad_gradient(kNaN); },
      "the gradient of " + learner_.model().parameters().back().name + " has a value of nan");
}

TEST_F(LearnerTest, ARefusedUpdateHasNoEffectOnLaterOnes) {
  EXPECT_THROW(learner_.update(
                   1, [&](int64_t) { return bad_gradient(kNaN); }, 1e-3),
               NonFiniteError);
  // An update that is interrupted after the head's gradient has been written.
  const auto interrupted = [&](int64_t) -> HeadLoss {
    small_loss(learner_.model(), 3);
    throw InputError("interrupted");
  };
  EXPECT_THROW(learner_.update(1, interrupted, 1e-3), InputError);
  learner_.update(
      1, [&](int64_t) { return small_loss(learner_.model(), 2); }, 1e-3);

  Learner other(std::make_unique<Transformer>(small_model(), DType::kF32, 1), {}, *comm_);
  for (const uint64_t seed : {1, 2})
    other.update(
        1, [&](int64_t) { return small_loss(other.model(), seed); }, 1e-3);
  expect_bit_equal(copies(learner_.model()), copies(other.model()));
}

// A step of this size overflows f32.
constexpr double kHugeRate = 1e38;

// Momentum and decay would move the weights.
TEST_F(LearnerTest, AnUpdateWhoseGradientIsExactlyZeroIsNotMade) {
  const auto weights = copies(learner_.model()),
             moments = copies(tensors_of(learner_.optimizer().state_sources()));
  const auto zero = [&](int64_t) { return small_loss(learner_.model(), 2, 0); };
  for (const int64_t micro_batches : {0, 1, 3}) {
    const Learner::Update update = learner_.update(micro_batches, zero, 1e-3);
    EXPECT_FALSE(update.made);
    EXPECT_FALSE(update.refused);
    EXPECT_EQ(update.grad_norm, 0);
  }
  expect_bit_equal(copies(learner_.model()), weights);
  expect_bit_equal(copies(tensors_of(learner_.optimizer().state_sources())), moments);
  EXPECT_EQ(learner_.optimizer().updates(), 1);
  const auto some = [&](int64_t) { return small_loss(learner_.model(), 2, 1e-20); };
  EXPECT_TRUE(learner_.update(1, some, 1e-3).made);
}

// The ranks decide collectively: one without a gradient makes the same update as the others.
// Gradients and workspace exist during an update only, whether it is made or not.
TEST_F(LearnerTest, GradientsAreGoneAfterAnUpdate) {
  const Allocator& memory = allocator(Device{});
  const int64_t before = memory.stats().live_bytes;
  expect_refused(
      1, [&](int64_t) { return bad_gradient(kNaN); }, "the gradient of");
  EXPECT_EQ(memory.stats().live_bytes, before);
  EXPECT_THROW(learner_.update(
                   1, [](int64_t) -> HeadLoss { throw InputError("no data"); }, 1e-3),
               InputError);
  // A backward of the caller's own is none of the learner's.
  HeadLoss own = small_loss(learner_.model(), 1);
  backward(std::move(own));
  own = {};
  learner_.model().parameters().free_gradients();
  EXPECT_EQ(memory.stats().live_bytes, before);
  allocator(Device{}).reset_peak();
  learner_.update(
      1, [&](int64_t) { return small_loss(learner_.model(), 1); }, 1e-3);
  EXPECT_EQ(memory.stats().live_bytes, before);
  EXPECT_GT(memory.stats().peak_bytes,
            before + 4 * model_size(learner_.model().config()).parameters);
}

// Whichever request for memory fails, nothing is updated, and the next update is as if it had never
// been tried.
TEST_F(LearnerTest, AnUpdateWithoutMemoryChangesNothing) {
  const auto loss = [&](int64_t) { return small_loss(learner_.model(), 2); };
  const auto weights = copies(learner_.model()),
             moments = copies(tensors_of(learner_.optimizer().state_sources()));
  int64_t requests = 0;
  {
    Learner other(std::make_unique<Transformer>(small_model(), DType::kF32, 1), {}, *comm_);
    const AllocationFaults none(Device{}, int64_t{1} << 40);
    other.update(
        1, [&](int64_t) { return small_loss(other.model(), 2); }, 1e-3);
    requests = none.requests();
  }
  EXPECT_GT(requests, 50);
  for (int64_t n = 0; n < requests; ++n) {
    const AllocationFaults fault(Device{}, n);
    EXPECT_THROW(learner_.update(1, loss, 1e-3), OutOfMemoryError) << n;
  }
  expect_bit_equal(copies(learner_.model()), weights);
  expect_bit_equal(copies(tensors_of(learner_.optimizer().state_sources())), moments);
  EXPECT_EQ(learner_.optimizer().updates(), 1);
  Learner other(std::make_unique<Transformer>(small_model(), DType::kF32, 1), {}, *comm_);
  other.update(
      1, [&](int64_t) { return small_loss(other.model(), 1); }, 1e-3);
  for (Learner* learner : {&learner_, &other})
    learner->update(
        1, [&](int64_t) { return small_loss(learner->model(), 2); }, 1e-3);
  expect_bit_equal(copies(learner_.model()), copies(other.model()));
}

// Micro batches are halved until they fit; two failures of what cannot be divided are an error.
TEST_F(LearnerTest, MicroBatchesShrinkUntilTheyFit) {
  std::vector<int64_t> tried;
  std::vector<std::pair<int64_t, int64_t>> reported;
  int released = 0;
  learner_.set_memory_callbacks(
      {.release = [&] { ++released; },
       .shrunk = [&](int64_t before, int64_t now,
                     const std::string&) { reported.emplace_back(before, now); }});
  const auto run = [&](int64_t tokens, int64_t longest, int64_t fits) {
    int64_t largest = 0;
    learner_.within_memory(
        tokens,
        [&](int64_t size) {
          tried.push_back(size);
          return largest = std::max(longest, std::min<int64_t>(size, 700));
        },
        [&] {
          if (largest > fits) throw OutOfMemoryError("full");
        });
  };
  run(8192, 100, 200);  // the largest has 700 tokens
  EXPECT_EQ(tried, (std::vector<int64_t>{8192, 350, 175}));
  EXPECT_EQ(reported, (std::vector<std::pair<int64_t, int64_t>>{{8192, 350}, {350, 175}}));
  EXPECT_EQ(released, 2);
  EXPECT_EQ(learner_.micro_batch_tokens(8192), 175);
  EXPECT_EQ(learner_.micro_batch_tokens(100), 100);
  tried.clear();
  run(8192, 100, 200);  // for good
  EXPECT_EQ(tried, (std::vector<int64_t>{175}));
  EXPECT_THROW_WITH(run(8192, 600, 200), OutOfMemoryError,
                    "full; this was with micro batches of at most 600 tokens");
}

// All ranks pack anew if one is out of memory, and make the update of smaller micro batches.
TEST(LearnerRanks, StartAgainTogetherWhenOneIsOutOfMemory) {
  std::vector<std::vector<Tensor>> ends(4);
  for (const bool fails : {false, true})
    run_local_ranks(2, [&](Communicator& comm) {
      Learner learner(std::make_unique<Transformer>(small_model(), DType::kF32, 1), {}, comm);
      bool full = fails && comm.rank() == 1;
      int64_t count = 0;
      Learner::Update update;
      learner.within_memory(
          fails ? 64 : 32,
          [&](int64_t tokens) {
            count = 64 / tokens;
            return tokens;
          },
          [&] {
            const auto loss = [&](int64_t i) {
              if (std::exchange(full, false)) throw OutOfMemoryError("full");
              return small_loss(learner.model(), static_cast<uint64_t>(2 * comm.rank() + i + 1));
            };
            update = learner.update(count, loss, 1e-3);
          });
      EXPECT_TRUE(update.made);
      EXPECT_EQ(learner.micro_batch_tokens(64), fails ? 32 : 64);
      ends[static_cast<size_t>(2 * fails + comm.rank())] = copies(learner.model());
    });
  for (const auto& end : ends) expect_bit_equal(end, ends[0]);
}

TEST(LearnerRanks, MakeAnUpdateIfAnyHasAGradient) {
  run_local_ranks(2, [&](Communicator& comm) {
    Learner learner(std::make_unique<Transformer>(small_model(), DType::kF32, 1), {}, comm);
    const auto loss = [&](double scale) {
      return [&, scale](int64_t) { return small_loss(learner.model(), 2, scale); };
    };
    EXPECT_FALSE(learner.update(1, loss(0), 1e-3).made);
    EXPECT_TRUE(learner.update(1, loss(comm.rank()), 1e-3).made);
  });
}

double norm_of(const std::vector<double>& values) {
  double squares = 0;
  for (const double v : values) squares += v * v;
  return std::sqrt(squares);
}
double distance(std::vector<double> a, const std::vector<double>& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] -= b[i];
  return norm_of(a);
}

// Small tensors are sampled whole, and the elements of large ones stand for all of theirs.
TEST(SampleOfWeights, HasTheNormsOfTheWeightsAndOfTheirChange) {
  const auto comm = make_single_communicator();
  for (const int64_t d_model : {16, 128}) {
    ModelConfig config = small_model();
    config.d_model = d_model;
    config.d_ff = 4 * d_model;
    Learner learner(std::make_unique<Transformer>(config, DType::kF32, 1), {}, *comm);
    const auto weights = [&] {
      std::vector<double> out;
      for (const NamedParameter& p : learner.model().parameters())
        for (const double value : p.value.to_vector<double>()) out.push_back(value);
      return out;
    };
    const auto before = weights(), sample = learner.optimizer().sample_weights();
    learner.update(
        1, [&](int64_t) { return small_loss(learner.model(), 2); }, 1e-3);
    const auto after = weights(), sample_after = learner.optimizer().sample_weights();
    const double tolerance = d_model == 16 ? 1e-12 : 0.05;
    EXPECT_EQ(sample.size() == before.size(), d_model == 16);
    EXPECT_NEAR(norm_of(sample) / norm_of(before), 1, tolerance);
    EXPECT_NEAR(distance(sample_after, sample) / distance(after, before), 1, tolerance);
  }
}

TEST_F(LearnerTest, NonFiniteUpdateIsDetected) {
  learner_.check_weights();
  learner_.update(
      1, [&](int64_t) { return small_loss(learner_.model(), 2); }, kHugeRate);
  EXPECT_THROW_WITH(learner_.check_weights(), NonFiniteError,
                    "the last update made weights or moments that are not finite");
}

TEST_F(LearnerTest, NoUpdateFollowsANonFiniteOne) {
  learner_.update(
      1, [&](int64_t) { return small_loss(learner_.model(), 2); }, kHugeRate);
  // Also if the loss does not depend on the weights.
  for (const bool shows : {true, false}) {
    const auto weights = copies(learner_.model()),
               moments = copies(tensors_of(learner_.optimizer().state_sources()));
    const auto loss = [&](int64_t) {
      return shows ? small_loss(learner_.model(), 3) : bad_gradient(0.5);
    };
    EXPECT_THROW_WITH(learner_.update(1, loss, 1e-3), NonFiniteError,
                      "the last update made weights or moments that are not finite");
    expect_bit_equal(copies(learner_.model()), weights);
    expect_bit_equal(copies(tensors_of(learner_.optimizer().state_sources())), moments);
    EXPECT_EQ(learner_.optimizer().updates(), 2);
  }
}

TEST(LearnerRanks, BadLossOnOneRankStopsAllOfThem) {
  std::vector<std::vector<Tensor>> before(2), after(2);
  EXPECT_THROW_WITH(
      run_local_ranks(2,
                      [&](Communicator& comm) {
                        const auto r = static_cast<size_t>(comm.rank());
                        Learner learner(
                            std::make_unique<Transformer>(small_model(), DType::kF32, 1), {}, comm);
                        before[r] = copies(learner.model());
                        const auto loss = [&](int64_t) {
                          return small_loss(learner.model(), r, r == 1 ? kNaN : 1.0);
                        };
                        try {
                          learner.update(1, loss, 1e-3);
                        } catch (...) {
                          after[r] = copies(learner.model());
                          throw;
                        }
                      }),
      NonFiniteError, "the loss of micro batch 1 of 1 is nan");
  for (const size_t r : {0, 1}) expect_bit_equal(after[r], before[r]);
}

// All ranks throw the same error and can continue together.
TEST(LearnerRanks, AgreeOnABadLossAndContinue) {
  run_local_ranks(3, [&](Communicator& comm) {
    Learner learner(std::make_unique<Transformer>(small_model(), DType::kF32, 1), {}, comm);
    const auto loss = [&](double scale) {
      return [&learner, scale](int64_t i) {
        return small_loss(learner.model(), 1, i == 1 ? scale : 1.0);
      };
    };
    EXPECT_THROW_WITH(learner.update(2, loss(comm.rank() == 1 ? kNaN : 1.0), 1e-3), NonFiniteError,
                      "rank 1: the loss of micro batch 2 of 2 is nan; nothing was updated");
    EXPECT_THROW_WITH(learner.update(2,
                                     loss(comm.rank() == 1   ? kInf
                                          : comm.rank() == 2 ? -kInf
                                                             : 1.0),
                                     1e-3),
                      NonFiniteError, "rank 1: the loss of micro batch 2 of 2 is inf");
    EXPECT_EQ(learner.optimizer().updates(), 0);
    learner.update(2, loss(1), 1e-3);
    EXPECT_EQ(learner.optimizer().updates(), 1);
  });
}

TEST(Learner, LossIsTheSumOverMicroBatchesAndRanks) {
  const auto comm = make_single_communicator();
  double expected = 0;
  for (const uint64_t seed : {0, 1, 2, 3})
    expected += small_loss(Transformer(small_model(), DType::kF64, 1), seed).loss.item();
  Learner alone(std::make_unique<Transformer>(small_model(), DType::kF64, 1), {}, *comm);
  const double one =
      alone
          .update(
              4, [&](int64_t i) { return small_loss(alone.model(), static_cast<uint64_t>(i)); },
              1e-3)
          .loss;
  EXPECT_NEAR(one, expected, 1e-12);
  run_local_ranks(2, [&](Communicator& two) {
    Learner learner(std::make_unique<Transformer>(small_model(), DType::kF64, 1), {}, two);
    const auto loss = [&](int64_t i) {
      return small_loss(learner.model(), static_cast<uint64_t>(2 * i + two.rank()));
    };
    EXPECT_NEAR(learner.update(2, loss, 1e-3).loss, expected, 1e-12);
  });
}

// The estimate counts the tensors kept by the tape; the rest is small if tensors are large. It is
// compared with the allocator's peak during a learner's second update, when moments and gradients
// exist.
struct MemoryCase {
  const char* name;
  ModelConfig model;
  int64_t sequences;
};

void PrintTo(const MemoryCase& test, std::ostream* out) {
  *out << test.name;
}

class MemoryEstimateTest : public testing::TestWithParam<MemoryCase> {};

TEST_P(MemoryEstimateTest, IsWithinThreePercentOfTheMeasuredPeak) {
  const MemoryCase& test = GetParam();
  Allocator& memory = allocator(Device{});
  const int64_t before = memory.stats().live_bytes;
  ModelConfig config = test.model;
  config.vocab_size = 100;
  config.resolve();
  const auto comm = make_single_communicator();
  Learner learner(std::make_unique<Transformer>(config, DType::kF32, 1), {}, *comm);
  std::vector<TokenSequence> sequences;
  for (int64_t i = 0; i < test.sequences; ++i)
    sequences.push_back(sequence(config.context + 1, config.vocab_size, static_cast<uint64_t>(i)));
  const PackedBatch batch = pack(sequences);
  const auto loss = [&](int64_t) {
    return cross_entropy(learner.model().forward(batch, {.mode = Mode::kTrain}),
                         learner.model().head(), batch.targets,
                         Tensor::full({batch.size()}, 1e-3, DType::kF32));
  };
  learner.update(1, loss, 1e-3);
  memory.reset_peak();
  learner.update(1, loss, 1e-3);
  const auto measured = static_cast<double>(memory.stats().peak_bytes - before);
  const auto estimated = static_cast<double>(
      estimate_memory(config, DType::kF32,
                      {.micro_batch_tokens = batch.size(),
                       .optimizer = optimizer_bytes({}, config, DType::kF32, {}).memory})
          .peak());
  EXPECT_NEAR(estimated / measured, 1, 0.03) << estimated << " estimated, " << measured;
}

ModelConfig memory_model(const std::function<void(ModelConfig&)>& change) {
  ModelConfig c;
  c.num_layers = 3;
  c.d_model = 64;
  c.num_heads = 4;
  c.context = 64;
  change(c);
  return c;
}

INSTANTIATE_TEST_SUITE_P(Pretraining, MemoryEstimateTest,
                         testing::Values(MemoryCase{"llama", memory_model([](ModelConfig&) {}), 16},
                                         MemoryCase{"weights", memory_model([](ModelConfig& c) {
                                                      c.d_model = 520;  // tensors a little larger
                                                      c.d_ff = 1040;    // than powers of two
                                                      c.context = 8;
                                                    }),
                                                    1},
                                         MemoryCase{"gpt2", memory_model([](ModelConfig& c) {
                                                      c.norm = NormType::kLayer;
                                                      c.position = PositionType::kLearned;
                                                      c.mlp = MlpType::kGeluTanh;
                                                      c.bias = c.tie_embeddings = true;
                                                    }),
                                                    12},
                                         MemoryCase{"grouped", memory_model([](ModelConfig& c) {
                                                      c.num_kv_heads = 2;
                                                      c.qk_norm = true;
                                                      c.context = 128;
                                                    }),
                                                    8},
                                         MemoryCase{"t5", memory_model([](ModelConfig& c) {
                                                      c.position = PositionType::kT5;
                                                      c.attention_sinks = true;
                                                    }),
                                                    16},
                                         MemoryCase{"recompute", memory_model([](ModelConfig& c) {
                                                      c.num_layers = 6;
                                                      c.recompute = Recompute::kBlock;
                                                    }),
                                                    16},
                                         MemoryCase{"cheap", memory_model([](ModelConfig& c) {
                                                      c.num_layers = 6;
                                                      c.recompute = Recompute::kCheap;
                                                    }),
                                                    16},
                                         // Parameters, gradients and moments are nearly all of it.
                                         MemoryCase{"wide", memory_model([](ModelConfig& c) {
                                                      c.d_model = 256;
                                                      c.num_layers = 2;
                                                    }),
                                                    1}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace cohort::test
