// Against PyTorch: logits, loss, every gradient, ten losses of AdamW training and the GRPO loss of
// two tiny models in float64, as scripts/make_reference.py wrote them.
//
// Both sides compute in f64 and differ in the order of sums: 1e-9 per tensor, relative to its norm,
// is far above rounding and far below any difference in a formula. In f32 the tolerance is 1e-5.
#include <cmath>
#include <cstring>
#include <filesystem>

#include "data/safetensors.h"
#include "kernels/matmul.h"
#include "kernels/optimizer.h"
#include "tests/nn/models.h"

namespace cohort {
namespace {

using test::norm;

// A fixture file and the model that it describes.
struct Reference {
  const SafetensorsFile file;
  const DType dtype;
  const Json adamw, grpo;  // hyperparameters
  const Transformer model;
  PackedBatch batch;

  Reference(const std::string& name, DType type, Device device)
      : file(path(name)),
        dtype(type),
        adamw(metadata(name, "adamw")),
        grpo(metadata(name, "grpo")),
        model(ModelConfig::from_json(metadata(name, "config")), type, 1, device) {
    for (const NamedParameter& p : model.parameters()) {
      Tensor value = p.value;
      value.copy_(file.read("param." + p.name));
    }
    batch.tokens = file.read("batch.tokens");
    batch.positions = file.read("batch.positions");
    batch.sequences = file.read("batch.sequences");
    batch.cu_seqlens = file.read("batch.cu_seqlens");
    // In the file every token has a target, which is -1 if the token is not in the loss.
    const auto next = file.read("batch.targets").to_vector<int32_t>();
    std::vector<int32_t> target_positions, targets;
    for (size_t t = 0; t < next.size(); ++t) {
      if (next[t] < 0) continue;
      target_positions.push_back(static_cast<int32_t>(t));
      targets.push_back(next[t]);
    }
    batch.target_positions = Tensor::from(target_positions);
    batch.targets = Tensor::from(targets);
    batch = model.to_device(batch);
  }

  static std::string path(const std::string& name) {
    const auto tests = std::filesystem::path(__FILE__).parent_path().parent_path();
    return (tests / "reference" / (name + ".safetensors")).string();
  }
  // Metadata that make_reference.py wrote into the file's header; Cohort itself does not read it.
  static Json metadata(const std::string& name, const char* key) {
    const std::string text = test::read_file(path(name));
    uint64_t length;
    std::memcpy(&length, text.data(), sizeof length);
    const Json header = parse_json(text.substr(sizeof length, length), name);
    return parse_json(header.at("__metadata__").at(key).as_string(), key);
  }
  double tolerance() const { return dtype == DType::kF64 ? 1e-9 : 1e-5; }
  // The per-token values called `name` at the target positions.
  Tensor constant(const std::string& name) const {
    const auto all = file.read(name).to_vector<double>();
    std::vector<double> values;
    for (const int32_t t : batch.target_positions.to_vector<int32_t>())
      values.push_back(all[static_cast<size_t>(t)]);
    return Tensor::from(values).to(dtype).to(model.device());
  }

  // Compares every gradient of the model with the tensor called prefix + name. A gradient that is
  // zero by symmetry (key bias: softmax is invariant to a shift of all keys) is rounding noise on
  // both sides and is compared with the norm of all gradients instead.
  void expect_gradients(const std::string& prefix) const {
    double all = 0;
    for (const NamedParameter& p : model.parameters())
      all = std::hypot(all, norm(file.read(prefix + p.name)));
    for (const NamedParameter& p : model.parameters()) {
      const Tensor expected = file.read(prefix + p.name);
      if (norm(expected) < 1e-12 * all)
        EXPECT_LT(norm(p.grad()), tolerance() * all) << prefix << p.name;
      else
        EXPECT_LT(test::relative_error(p.grad(), expected), tolerance()) << prefix << p.name;
      p.grad().zero_();
    }
  }
};

// Runs check(reference) for both models in all precisions that the device computes exactly.
void for_each_reference(Device device, void (*check)(const Reference&)) {
  const test::Threads one(1);
  for (const char* name : {"llama", "gpt2"})
    for (const DType dtype : {DType::kF64, DType::kF32}) {
      if (device.is_cuda() && dtype == DType::kF64) continue;
      SCOPED_TRACE(str(name, " in ", dtype_name(dtype)));
      check(Reference(name, dtype, device));
    }
}

void check_logits(const Reference& ref) {
  size_t parameters = 0;
  for (const std::string& name : ref.file.names()) parameters += name.starts_with("param.");
  EXPECT_EQ(ref.model.parameters().size(), parameters);
  const Tensor hidden = ref.model.forward(ref.batch).value();
  Tensor logits = Tensor::empty({hidden.dim(0), ref.model.config().vocab_size}, hidden.dtype(),
                                hidden.device());
  kernels::linear_forward(
      {.y = logits, .x = hidden, .w = ref.model.head().weight.value(), .bias = {}});
  EXPECT_LT(test::relative_error(logits, ref.file.read("logits")), ref.tolerance());
}

void check_gradients(const Reference& ref) {
  const Variable loss = test::mean_loss(ref.model, ref.batch);
  EXPECT_LT(test::relative_error(loss.value(), ref.file.read("loss")), ref.tolerance());
  backward(loss);
  ref.expect_gradients("grad.");
}

void check_adamw(const Reference& ref) {
  std::vector<kernels::AdamWTensor> states;
  for (const NamedParameter& p : ref.model.parameters()) {
    const Tensor& value = p.value;
    const auto zeros = [&] { return Tensor::zeros(value.shape(), value.dtype(), value.device()); };
    states.push_back(
        {value, p.grad(), zeros(), zeros(),
         p.use != ParameterUse::kVector ? ref.adamw.at("weight_decay").as_double() : 0});
  }
  const auto expected = ref.file.read("adamw.losses").to_vector<double>();
  ASSERT_EQ(expected.size(), 10u);
  for (size_t i = 0; i < expected.size(); ++i) {
    for (const NamedParameter& p : ref.model.parameters()) p.grad().zero_();
    const Variable loss = test::mean_loss(ref.model, ref.batch);
    EXPECT_NEAR(loss.value().item() / expected[i], 1, ref.tolerance()) << "step " << i;
    backward(loss);
    kernels::adamw_step(states, {.learning_rate = ref.adamw.at("lr").as_double(),
                                 .beta1 = ref.adamw.at("beta1").as_double(),
                                 .beta2 = ref.adamw.at("beta2").as_double(),
                                 .eps = ref.adamw.at("eps").as_double(),
                                 .step = static_cast<int64_t>(i) + 1});
  }
}

void check_grpo(const Reference& ref) {
  const kernels::PolicyLossDesc desc{.epsilon_low = ref.grpo.at("epsilon_low").as_double(),
                                     .epsilon_high = ref.grpo.at("epsilon_high").as_double(),
                                     .beta = ref.grpo.at("beta").as_double()};
  for (const std::string kind : {"grpo.dapo.", "grpo.grpo."}) {
    const HeadLoss made =
        policy_loss(ref.model.hidden_at_targets(ref.batch), ref.model.head(), ref.batch.targets,
                    {{.old_logprob = ref.constant("grpo.old_logprob"),
                      .ref_logprob = ref.constant("grpo.ref_logprob"),
                      .advantage = ref.constant("grpo.advantage"),
                      .weight = ref.constant(kind + "weight")}},
                    desc, {.temperature = ref.grpo.at("temperature").as_double()});
    const auto stats = kernels::PolicyLossStats::from(made.stats);
    EXPECT_LT(test::relative_error(made.loss, ref.file.read(kind + "loss")), ref.tolerance());
    EXPECT_EQ(stats.tokens, static_cast<double>(ref.batch.num_targets()));
    EXPECT_GT(stats.clipped_low, 0);
    EXPECT_GT(stats.clipped_high, 0);
    backward(made);
    ref.expect_gradients(kind + "grad.");
  }
}

}  // namespace

TEST(Reference, LogitsAreTorchs) {
  for_each_reference({}, check_logits);
}
TEST(CudaReference, LogitsAreTorchs) {
  COHORT_REQUIRE_GPU(device);
  for_each_reference(device, check_logits);
}

TEST(Reference, LossAndEveryGradientAreTorchs) {
  for_each_reference({}, check_gradients);
}
TEST(CudaReference, LossAndEveryGradientAreTorchs) {
  COHORT_REQUIRE_GPU(device);
  for_each_reference(device, check_gradients);
}

TEST(Reference, TenAdamWLossesAreTorchs) {
  for_each_reference({}, check_adamw);
}
TEST(CudaReference, TenAdamWLossesAreTorchs) {
  COHORT_REQUIRE_GPU(device);
  for_each_reference(device, check_adamw);
}

TEST(Reference, GrpoLossAndEveryGradientAreTorchs) {
  for_each_reference({}, check_grpo);
}
TEST(CudaReference, GrpoLossAndEveryGradientAreTorchs) {
  COHORT_REQUIRE_GPU(device);
  for_each_reference(device, check_grpo);
}

}  // namespace cohort
