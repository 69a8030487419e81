// Encoders against transformers: outputs, losses and every gradient of the folders in
// ../shared/data/encoder/encoders.
#include <algorithm>
#include <filesystem>
#include <map>

#include "data/safetensors.h"
#include "kernels/matmul.h"
#include "kernels/patches.h"
#include "nn/families/family.h"
#include "nn/model_folder.h"
#include "nn/positions.h"
#include "tests/nn/models.h"
#include "tests/support/loss_node.h"
#include "tests/support/tensor_files.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;
using test::norm;
using test::relative_error;

// A folder of the fixture, its model, and its golden.safetensors.
struct EncoderCase {
  std::string dir;
  SafetensorsFile golden;
  ModelConfig config;
  Transformer model;
  double tolerance;

  EncoderCase(const std::string& folder, DType dtype, Device device)
      : dir(folder),
        golden(folder + "/golden.safetensors"),
        config(load_config(folder)),
        model(config, dtype, std::nullopt, device),
        tolerance(dtype == DType::kF64 ? 1e-6 : 2e-5) {
    load_weights(model, folder);
  }

  std::vector<int32_t> ints(const char* name) const {
    return golden.read(name).to_vector<int32_t>();
  }
  Tensor weights_of(const char* name) const {
    return golden.read(name).to(model.dtype()).to(model.device());
  }

  // The packed texts; a label of classes or of a pooler is at position 0.
  PackedBatch text_batch() const {
    const std::vector<int32_t> ids = ints("ids"), ends = ints("cu_seqlens");
    std::vector<int32_t> labels(ids.size(), -1), types;
    if (golden.contains("types")) types = ints("types");
    if (config.head == HeadType::kMaskedToken) {
      const auto at = ints("target_positions"), targets = ints("targets");
      for (size_t i = 0; i < at.size(); ++i) labels[static_cast<size_t>(at[i])] = targets[i];
    } else {
      const bool classes = config.head == HeadType::kClasses;
      const auto values = classes ? ints("labels") : std::vector<int32_t>(ends.size() - 1, 0);
      for (size_t i = 0; i < values.size(); ++i) labels[static_cast<size_t>(ends[i])] = values[i];
    }
    std::vector<TokenSequence> sequences;
    for (size_t i = 0; i + 1 < ends.size(); ++i) {
      const auto part = [&](const std::vector<int32_t>& v) {
        return v.empty() ? v : std::vector<int32_t>(v.begin() + ends[i], v.begin() + ends[i + 1]);
      };
      sequences.push_back({.tokens = part(ids),
                           .index = static_cast<int64_t>(i),
                           .labels = part(labels),
                           .types = part(types)});
    }
    return pack(sequences);
  }
  // Image i. Its pixels are the indices of its values, at most 256 of each channel.
  PackedBatch image_batch(int64_t i) const {
    const Tensor all = golden.read("pixel_values");
    const int64_t channels = all.dim(1), side = all.dim(2), n = config.context;
    const auto values = all.to_vector<float>();
    PackedBatch batch;
    std::vector<uint8_t> pixels(static_cast<size_t>(side * side * channels));
    std::vector<float> table(static_cast<size_t>(channels * 256));
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t p = 0; p < side * side; ++p) {
        table[static_cast<size_t>(c * 256 + p)] =
            values[static_cast<size_t>((i * channels + c) * side * side + p)];
        pixels[static_cast<size_t>(p * channels + c)] = static_cast<uint8_t>(p);
      }
    batch.pixels = Tensor::from(pixels, {1, side * side * channels});
    batch.pixel_values = Tensor::from(table, {channels, 256});
    std::vector<int32_t> positions(static_cast<size_t>(n));
    for (size_t t = 0; t < positions.size(); ++t) positions[t] = static_cast<int32_t>(t);
    batch.positions = Tensor::from(positions);
    batch.sequences = Tensor::from(std::vector<int64_t>(static_cast<size_t>(n), i));
    batch.cu_seqlens = Tensor::from(std::vector<int32_t>{0, static_cast<int32_t>(n)});
    batch.target_positions = batch.segments = Tensor::from(std::vector<int32_t>{0});
    batch.target_sequences = Tensor::from(std::vector<int64_t>{i});
    batch.targets = config.head == HeadType::kClasses
                        ? Tensor::from(std::vector<int32_t>{ints("labels")[static_cast<size_t>(i)]})
                        : Tensor::from(std::vector<int32_t>{0});
    return batch;
  }

  void expect_near(const Tensor& value, const Tensor& expected, const std::string& what) const {
    EXPECT_LT(relative_error(value, expected.reshape(value.shape())), tolerance) << what;
  }

  // Logits at all positions of a masked language model, else at the targets; and the loss.
  Variable check_logits(const PackedBatch& batch, const Tensor& expected, double weight) const {
    PackedBatch all = batch;
    if (config.head == HeadType::kMaskedToken) {
      std::vector<int32_t> every(static_cast<size_t>(batch.size()));
      for (size_t t = 0; t < every.size(); ++t) every[t] = static_cast<int32_t>(t);
      all.target_positions = Tensor::from(every).to(model.device());
    }
    const Tensor rows = model.hidden_at_targets(all).value();
    const HeadWeights& head = model.head();
    Tensor logits = Tensor::empty({rows.dim(0), config.num_logits()}, rows.dtype(), rows.device());
    kernels::linear_forward(
        {.y = logits, .x = rows, .w = head.weight.value(), .bias = head.bias.value()});
    expect_near(logits, expected, "logits");
    return test::cross_entropy_node(model.hidden_at_targets(batch), head, batch.targets,
                                    Tensor::full({batch.num_targets()}, weight,
                                                 accumulate_dtype(model.dtype()), model.device()));
  }
  // Hidden states and the pooler's output of sequence `i`, -1: of all; and the loss.
  Variable check_hidden(const PackedBatch& batch, int64_t i) const {
    const auto part = [&](const char* name, const Shape& shape) {
      const Tensor t = weights_of(name);
      return (i < 0 ? t : t.narrow(0, i, 1).clone()).reshape(shape);
    };
    const Variable hidden = model.forward(batch), pooled = model.hidden_at_targets(batch);
    expect_near(hidden.value(), part("hidden", hidden.shape()), "hidden");
    expect_near(pooled.value(), part("pooled", pooled.shape()), "pooled");
    return add(weighted_sum(hidden, part("hidden_weight", hidden.shape())),
               weighted_sum(pooled, part("pooled_weight", pooled.shape())));
  }

  void check() const {
    double loss = 0;
    const auto run = [&](const PackedBatch& host, int64_t image, int64_t images) {
      const PackedBatch batch = model.to_device(host);
      const double weight = 1.0 / static_cast<double>(batch.num_targets() * images);
      Variable part;
      if (config.head == HeadType::kPooler) {
        part = check_hidden(batch, image);
      } else {
        const Tensor logits = golden.read("logits");
        part = check_logits(batch, image < 0 ? logits : logits.narrow(0, image, 1).clone(), weight);
      }
      loss += part.value().item();
      backward(part);
    };
    if (config.has_images())
      for (int64_t i = 0; i < 3; ++i) run(image_batch(i), i, 3);
    else
      run(text_batch(), -1, 1);
    EXPECT_NEAR(loss, golden.read("loss").to_vector<double>()[0],
                tolerance * std::max(1.0, std::abs(loss)));
    check_gradients();
  }

  // By the names of the parameters in the file. Gradients that are zero by symmetry are rounding
  // noise, and are compared with the norm of all.
  void check_gradients() const {
    double all = 0;
    for (const Tensor& g : model.parameters().gradients()) all = std::hypot(all, norm(g));
    size_t checked = 0;
    std::map<std::string, std::string> stored;
    for (const TensorRule& rule : tensor_rules(config))
      for (int64_t i = 0; i < config.num_layers; ++i)
        stored[layer_name(rule.parameters[0], i)] = layer_name(rule.stored, i);
    for (const NamedParameter& p : model.parameters()) {
      ASSERT_TRUE(stored.contains(p.name)) << p.name;
      const Tensor expected = golden.read("grad." + stored[p.name]).reshape(p.value.shape());
      if (norm(expected) < 1e-6 * all)
        EXPECT_LT(norm(p.grad()), tolerance * all) << p.name;
      else
        EXPECT_LT(relative_error(p.grad(), expected), tolerance) << p.name;
      ++checked;
    }
    size_t gradients = 0;
    for (const std::string& name : golden.names()) gradients += name.starts_with("grad.");
    EXPECT_EQ(checked, gradients);
  }
};

void check_encoders(Device device) {
  COHORT_REQUIRE_DATA(data);
  const std::string root = data + "/encoder/encoders";
  size_t folders = 0;
  for (const auto& entry : fs::directory_iterator(root)) {
    if (!entry.is_directory()) continue;
    ++folders;
    for (const DType dtype : {DType::kF64, DType::kF32}) {
      if (device.is_cuda() && dtype == DType::kF64) continue;
      SCOPED_TRACE(str(entry.path().filename().string(), " in ", dtype_name(dtype)));
      EncoderCase(entry.path().string(), dtype, device).check();
    }
  }
  EXPECT_GE(folders, 9u);
}

TEST(Encoders, EqualThoseOfTransformers) {
  check_encoders({});
}

TEST(EncodersSlow, EveryGradientMatchesDifferences) {
  for (const auto& [name, config] : test::encoder_cases()) {
    if (config.head == HeadType::kPooler) continue;  // has no loss
    SCOPED_TRACE(name);
    ModelConfig small = config;
    small.dropout = 0.2;
    const Transformer model(small, DType::kF64, 1);
    test::expect_gradients_of_differences(model, test::encoder_batch(small, {5, 1, 4}, 2),
                                          {.elements = 6});
  }
}

// The bits of a sequence alone, and among others in any order, with any dropout.
TEST(Encoders, RowsDoNotDependOnTheOtherSequences) {
  for (const auto& [name, config] : test::encoder_cases()) {
    SCOPED_TRACE(name);
    ModelConfig dropped = config;
    dropped.dropout = 0.3;
    const Transformer model(dropped, DType::kF32, 1);
    const ForwardOptions options{.mode = Mode::kTrain, .seed = 4, .step = 2};
    const std::vector<int64_t> lengths = {9, 1, 30, 4};
    const PackedBatch all = test::encoder_batch(config, lengths, 7);
    const Tensor hidden = model.forward(all, options).value(),
                 rows = model.hidden_at_targets(all, options).value();
    int64_t begin = 0, target = 0;
    for (size_t i = 0; i < lengths.size(); ++i) {
      const PackedBatch alone =
          test::encoder_batch(config, {lengths[i]}, 7, static_cast<int64_t>(i));
      const int64_t n = alone.size(), targets = alone.num_targets();
      EXPECT_TRUE(
          test::bit_equal(model.forward(alone, options).value(), test::rows_of(hidden, begin, n)));
      EXPECT_TRUE(test::bit_equal(model.hidden_at_targets(alone, options).value(),
                                  test::rows_of(rows, target, targets)));
      begin += n;
      target += targets;
    }
  }
}

TEST(Encoders, TokensSeeThoseAfterThem) {
  ModelConfig config = test::encoder_cases()[0].config;
  const Transformer model(config, DType::kF32, 1);
  PackedBatch batch = test::encoder_batch(config, {6}, 1), other = batch;
  other.tokens = batch.tokens.clone();
  other.tokens.data<int32_t>()[5] ^= 1;
  EXPECT_FALSE(test::bit_equal(test::rows_of(model.forward(batch).value(), 0, 1),
                               test::rows_of(model.forward(other).value(), 0, 1)));
}

TEST(Encoders, RecomputedBlocksGiveTheSameBits) {
  for (const auto& [name, config] : test::encoder_cases()) {
    if (config.head == HeadType::kPooler) continue;
    SCOPED_TRACE(name);
    std::vector<std::vector<Tensor>> gradients;
    for (const Recompute recompute : {Recompute::kNone, Recompute::kCheap, Recompute::kBlock}) {
      ModelConfig c = config;
      c.dropout = 0.1;
      c.recompute = recompute;
      const Transformer model(c, DType::kF32, 1);
      backward(test::mean_loss(model, test::encoder_batch(c, {9, 3}, 3), {.mode = Mode::kTrain}));
      gradients.push_back(model.parameters().gradients());
    }
    for (size_t i = 0; i < gradients[0].size(); ++i)
      for (const size_t other : {1, 2})
        EXPECT_TRUE(test::bit_equal(gradients[0][i], gradients[other][i])) << i;
  }
}

TEST(Encoders, AreSavedAndLoadedWithTheirHeads) {
  for (const auto& [name, config] : test::encoder_cases()) {
    SCOPED_TRACE(name);
    const Transformer model(config, DType::kF32, 7);
    const test::TempDir folder;
    save_weights(model, folder.path());
    test::write_file(folder.path("config.json"), saved_config(model).dump(2));
    const ModelConfig read = load_config(folder.path());
    EXPECT_EQ(read.head, config.head);
    EXPECT_EQ(read.labels, config.labels);
    Transformer loaded(read, DType::kF32, std::nullopt);
    load_weights(loaded, folder.path());
    const PackedBatch batch = test::encoder_batch(config, {4, 7}, 1);
    EXPECT_TRUE(test::bit_equal(loaded.forward(batch).value(), model.forward(batch).value()));
    EXPECT_TRUE(test::bit_equal(loaded.hidden_at_targets(batch).value(),
                                model.hidden_at_targets(batch).value()));
    const std::string type = saved_config(model).at("model_type").as_string();
    EXPECT_EQ(type, name.starts_with("bert") ? "bert" : name.starts_with("vit") ? "vit" : "cohort");
  }
}

TEST(Encoders, ConfigurationsThatAreNotSupportedNameTheField) {
  const Json base = saved_config(Transformer(test::encoder_cases()[1].config, DType::kF32, 1));
  const auto refused = [&](const char* field, const Json& value, const std::string& message) {
    Json json = base;
    EXPECT_THROW_WITH(ModelConfig::from_json(json.set(field, value)), InputError, message);
  };
  EXPECT_EQ(ModelConfig::from_json(base).labels.size(), 3u);
  refused("architectures", Json::Array{"BertForTokenClassification"}, "known: BertModel");
  refused("is_decoder", true, "is_decoder");
  refused("position_embedding_type", "relative_key", "position_embedding_type");
  refused("problem_type", "regression", "problem_type");
  refused("hidden_act", "relu", "hidden_act");
  refused("id2label", Json::Object{{"0", "a"}}, "fewer than two labels");
  refused("id2label", Json::Object{{"0", "a"}, {"2", "b"}}, "id2label");
  refused("id2label", Json::Object{{"0", "a"}, {"1", "a"}}, "id2label");
  refused("id2label", Json::Object{{"0", "a"}, {"1", 1.5}},
          "the label 1.5 is a number; hint: write it as a text: \"1.5\"");
  Json unnamed = base;  // one class has no name
  unnamed.set("id2label", Json::Object{{"1", ""}, {"0", "a"}});
  EXPECT_EQ(ModelConfig::from_json(unnamed).labels, (std::vector<std::string>{"a", ""}));
  refused("id2label", Json::Object{{"0", ""}, {"1", ""}}, "found '1'");
  Json roberta = base;
  roberta.set("model_type", "roberta").set("architectures", Json::Array{"RobertaModel"});
  EXPECT_EQ(ModelConfig::from_json(roberta).family.first_position, 2);
  EXPECT_THROW_WITH(ModelConfig::from_json(roberta.set("pad_token_id", -5)), InputError,
                    "pad_token_id");
}

// Older folders have the names of TensorFlow, tied duplicates, position_ids and other heads.
TEST(Encoders, FoldersOfOtherVersionsAreRead) {
  const ModelConfig config = test::encoder_cases()[0].config;
  const Transformer model(config, DType::kF32, 7);
  const test::TempDir folder;
  const std::string path = folder.path("model.safetensors");
  save_weights(model, folder.path());
  test::write_file(folder.path("config.json"), saved_config(model).dump());
  std::vector<std::pair<std::string, Tensor>> tensors;
  Tensor table, bias;
  {
    const SafetensorsFile file(path);
    for (std::string name : file.names()) {
      const Tensor value = file.read(name);
      if (name.ends_with("word_embeddings.weight")) table = value;
      if (name == "cls.predictions.bias") bias = value;
      if (name.ends_with("LayerNorm.weight")) name.replace(name.size() - 6, 6, "gamma");
      if (name.ends_with("LayerNorm.bias")) name.replace(name.size() - 4, 4, "beta");
      tensors.emplace_back(name, value);
    }
  }
  tensors.emplace_back("bert.embeddings.position_ids", Tensor::zeros({1, 160}, DType::kI64));
  tensors.emplace_back("cls.predictions.decoder.bias", bias.clone());
  tensors.emplace_back("cls.predictions.decoder.weight", table.clone());
  tensors.emplace_back("cls.seq_relationship.weight", Tensor::zeros({2, 24}, DType::kF32));
  write_safetensors(path, tensors);
  Transformer loaded(load_config(folder.path()), DType::kF32, std::nullopt);
  load_weights(loaded, folder.path());
  const PackedBatch batch = test::encoder_batch(config, {4, 7}, 1);
  EXPECT_TRUE(test::bit_equal(loaded.hidden_at_targets(batch).value(),
                              model.hidden_at_targets(batch).value()));
  for (const size_t back : {2, 3}) {
    auto& [name, value] = tensors[tensors.size() - back];
    value.data<float>()[3] += 1;
    write_safetensors(path, tensors);
    EXPECT_THROW_WITH(load_weights(loaded, folder.path()), InputError, name + " differs from ");
    value.data<float>()[3] -= 1;
  }
}

TEST(CudaEncoders, EqualThoseOfTransformers) {
  COHORT_REQUIRE_GPU(device);
  check_encoders(device);
}

// bf16 on the device: near the f32 model on the CPU, and the bits of each row alone.
TEST(CudaEncoders, HaveExactRowsInBf16) {
  COHORT_REQUIRE_GPU(device);
  for (const auto& [name, config] : test::encoder_cases()) {
    SCOPED_TRACE(name);
    const Transformer exact(config, DType::kF32, 1), model(config, DType::kBF16, 1, device);
    const std::vector<int64_t> lengths = {9, 1, 130, 64};
    const PackedBatch host = test::encoder_batch(config, lengths, 7), all = model.to_device(host);
    const Tensor rows = model.hidden_at_targets(all).value();
    EXPECT_LT(relative_error(rows, exact.hidden_at_targets(host).value()), 0.05);
    int64_t target = 0;
    for (size_t i = 0; i < lengths.size(); ++i) {
      const PackedBatch alone =
          model.to_device(test::encoder_batch(config, {lengths[i]}, 7, static_cast<int64_t>(i)));
      const int64_t n = alone.num_targets();
      EXPECT_TRUE(
          test::bit_equal(model.hidden_at_targets(alone).value(), test::rows_of(rows, target, n)))
          << i;
      target += n;
    }
    if (config.head == HeadType::kPooler) continue;
    // The most likely labels are those of the logits.
    Tensor logits = Tensor::empty({rows.dim(0), config.num_logits()}, DType::kF32);
    const HeadWeights& head = model.head();
    const auto on_host = [](const Variable& v) {
      return v.value().defined() ? v.value().to(DType::kF32).to(Device{}) : Tensor();
    };
    kernels::linear_forward(
        {.y = logits,
         .x = rows.to(DType::kF32).to(Device{}),
         .w = on_host(head.weight).contiguous(),
         .bias = on_host(head.bias).defined() ? on_host(head.bias).contiguous() : Tensor()});
    const auto likely = most_likely(rows, head).to_vector<int64_t>();
    for (int64_t r = 0; r < rows.dim(0); ++r) {
      const float* z = logits.data<float>() + r * logits.dim(1);
      const int64_t best = std::max_element(z, z + logits.dim(1)) - z;
      EXPECT_LE(z[best] - z[likely[static_cast<size_t>(r)]], 1e-4) << r;
    }
  }
}

// Two images of 2 x 3 patches of 2 x 2 pixels with 3 channels.
void check_patches(Device device, DType dtype) {
  const int64_t images = 2, height = 4, width = 6, channels = 3, p = 2;
  std::vector<uint8_t> pixels;
  for (int64_t i = 0; i < images * height * width * channels; ++i)
    pixels.push_back(static_cast<uint8_t>(i * 37 % 256));
  std::vector<float> values;
  for (int64_t i = 0; i < 256 * channels; ++i) values.push_back(static_cast<float>(i) / 7);
  const int64_t per_image = height / p * (width / p);
  Tensor y = Tensor::empty({images * per_image, channels * p * p}, dtype, device);
  kernels::patches(
      {.y = y,
       .pixels = Tensor::from(pixels, {images, height, width, channels}).to(device),
       .values = Tensor::from(values, {channels, 256}).to(accumulate_dtype(dtype)).to(device),
       .size = p});
  const auto got = y.to_vector<double>();
  size_t at = 0;
  for (int64_t i = 0; i < images; ++i)
    for (int64_t r = 0; r < height / p; ++r)
      for (int64_t s = 0; s < width / p; ++s)
        for (int64_t k = 0; k < channels; ++k)
          for (int64_t u = 0; u < p; ++u)
            for (int64_t v = 0; v < p; ++v, ++at) {
              const auto pixel = pixels[static_cast<size_t>(
                  ((i * height + r * p + u) * width + s * p + v) * channels + k)];
              const float value = values[static_cast<size_t>(k * 256 + pixel)];
              EXPECT_EQ(got[at], dtype == DType::kBF16 ? static_cast<float>(bf16(value)) : value);
            }
}

TEST(Patches, HaveTheOrderOfAConvolution) {
  for (const DType dtype : {DType::kF64, DType::kF32}) check_patches({}, dtype);
}

TEST(CudaPatches, HaveTheOrderOfAConvolution) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : {DType::kF32, DType::kBF16}) check_patches(device, dtype);
}

TEST(T5, BucketsForBothSidesAreThoseOfTransformers) {
  COHORT_REQUIRE_DATA(data);
  const SafetensorsFile file(data + "/encoder/encoders/t5_bidirectional.safetensors");
  const auto distances = file.read("distance").to_vector<int64_t>();
  for (const auto& [buckets, largest] : {std::pair(32, 128), {16, 64}, {8, 20}}) {
    const auto expected = file.read(str("buckets_", buckets, "_", largest)).to_vector<int64_t>();
    const auto got = t5_buckets(buckets, largest, MaskType::kFull).to_vector<int64_t>();
    ASSERT_EQ(got.size(), static_cast<size_t>(2 * largest + 1));
    for (size_t i = 0; i < distances.size(); ++i) {
      const int64_t at = std::clamp<int64_t>(distances[i], -largest, largest) + largest;
      EXPECT_EQ(got[static_cast<size_t>(at)], expected[i]) << distances[i];
    }
  }
}

}  // namespace
}  // namespace cohort
