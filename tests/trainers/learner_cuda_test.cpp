// An update beside another user of the GPU's memory.
#include "trainers/learner.h"

#include "core/allocator.h"
#include "core/cuda.h"
#include "tests/support/test_util.h"

namespace cohort::test {
namespace {

// Takes the device's free memory but for `left` bytes, as another process would.
class Hog : NonCopyable {
 public:
  Hog(Device device, int64_t left) {
    allocator(device).release_cached();
    const auto bytes = static_cast<size_t>(available_memory(device) - left);
    COHORT_CUDA_CHECK(cudaMalloc(&memory_, bytes));
  }
  ~Hog() { cudaFree(memory_); }

 private:
  void* memory_ = nullptr;
};

// 65,536 tokens, whose activations take more than 6 GB.
constexpr int64_t kSequences = 128, kLength = 512;

std::vector<TokenSequence> sequences(const ModelConfig& model) {
  Rng rng(1, rng_stream(kTestPurpose));
  std::vector<TokenSequence> out;
  for (int64_t s = 0; s < kSequences; ++s) {
    TokenSequence& sequence = out.emplace_back();
    sequence.index = s;
    for (int64_t t = 0; t <= kLength; ++t)
      sequence.tokens.push_back(static_cast<int32_t>(rng.below(model.vocab_size)));
    sequence.loss_mask.assign(sequence.tokens.size(), 1);
  }
  return out;
}

struct Trained {
  std::vector<Tensor> weights;
  int64_t micro_batch_tokens = 0;
};

// Two updates; before the second, memory is taken until `left` bytes are free (0: none is taken).
Trained train(Device device, int64_t tokens, int64_t left) {
  ModelConfig config;
  config.num_layers = 8;
  config.d_model = 512;
  config.num_heads = 8;
  config.context = kLength;
  config.vocab_size = 1024;
  config.resolve();
  const auto comm = make_single_communicator();
  Learner learner(std::make_unique<Transformer>(config, DType::kBF16, 1, device), {}, *comm);
  const std::vector<TokenSequence> all = sequences(config);
  std::optional<Hog> hog;
  for (int update = 0; update < 2; ++update) {
    if (update == 1 && left > 0) hog.emplace(device, left);
    std::vector<PackedBatch> batches;
    const auto pack = [&](int64_t size) {
      batches = pack_micro_batches(all, update == 0 ? kLength : size);
      return batches[0].size();
    };
    const auto loss = [&](int64_t i) {
      const PackedBatch batch = learner.model().to_device(batches[static_cast<size_t>(i)]);
      return cross_entropy(learner.model().hidden_at_targets(batch, {.mode = Mode::kTrain}),
                           learner.model().head(), batch.targets,
                           Tensor::full({batch.num_targets()}, 1e-5, DType::kF32, device));
    };
    learner.within_memory(
        tokens, pack, [&] { learner.update(static_cast<int64_t>(batches.size()), loss, 1e-3); });
  }
  Trained out{.micro_batch_tokens = learner.micro_batch_tokens(tokens)};
  for (const NamedParameter& p : learner.model().parameters())
    out.weights.push_back(p.value.contiguous().to(Device{}));
  return out;
}

TEST(CudaLearner, AnUpdateContinuesBesideAHog) {
  COHORT_REQUIRE_GPU(device);
  const Trained beside = train(device, kSequences * kLength, int64_t{2} << 30);
  EXPECT_LT(beside.micro_batch_tokens, kSequences * kLength);
  EXPECT_GE(beside.micro_batch_tokens, 2048);
  const Trained alone = train(device, beside.micro_batch_tokens, 0);
  ASSERT_EQ(beside.weights.size(), alone.weights.size());
  for (size_t i = 0; i < alone.weights.size(); ++i)
    EXPECT_TRUE(bit_equal(beside.weights[i], alone.weights[i])) << i;
}

}  // namespace
}  // namespace cohort::test
