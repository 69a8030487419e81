// Checkpoints of models with adapters: their files, their base model, and adapters from elsewhere.
#include <filesystem>

#include "job/checkpoint.h"
#include "job/config.h"
#include "tests/support/tensor_files.h"
#include "tests/support/test_util.h"
#include "text/tokenizer.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

void write_tokenizer(const Tokenizer& tokenizer, const std::string& dir) {
  for (const auto& [file, content] : tokenizer.files()) write_file(dir + "/" + file, content);
}

// A base model in base/, and a model with adapters on it that has a value in every B.
class AdapterCheckpoints : public testing::Test {
 protected:
  AdapterCheckpoints() {
    config_.num_layers = 2;
    config_.d_model = 8;
    config_.num_heads = 2;
    config_.context = 12;
    config_.vocab_size = tokenizer_->vocab_size();
    config_.resolve();
    write_base(base_, 1);
    wanted_.lora = {.rank = 2, .alpha = 6, .targets = {"q_proj", "up_proj"}};
    start();
  }
  void write_base(const std::string& dir, uint64_t seed) const {
    fs::create_directories(dir);
    const Transformer model(config_, DType::kF32, seed);
    save_weights(model, dir);
    write_file(dir + "/config.json", saved_config(model, tokenizer_.get()).dump(2));
    write_tokenizer(*tokenizer_, dir);
  }
  LoadedModel load_for_training(const std::string& from) const {
    return load_model(from, wanted_, DataConfig{}, DType::kF32);
  }
  // Begins a training on the base.
  void start() {
    LoadedModel loaded = load_for_training(base_);
    model_ = std::move(loaded.model);
    state_.base = loaded.base;
    optimizer_ = std::make_unique<Optimizer>(model_->parameters(), OptimizerConfig{});
  }
  std::string save(int64_t step, const std::vector<Tensor>* reference = nullptr) {
    for (const NamedParameter& p : model_->parameters())
      if (p.trained()) p.grad().fill_(static_cast<double>(step % 3) - 0.5);
    optimizer_->step(1e-2, {});
    model_->update_derived();
    state_.step = step;
    state_.updates = optimizer_->updates();
    save_checkpoint(dir_, {*model_, nullptr, *tokenizer_, *optimizer_, state_, reference}, 2);
    return checkpoint_path(dir_, step);
  }
  // A PEFT folder with the adapter of a checkpoint, without anything of Cohort's.
  std::string peft_folder(const std::string& checkpoint) {
    const std::string dir = temporary_.path("peft");
    fs::create_directories(dir);
    for (const char* file : {"adapter_config.json", "adapter_model.safetensors"})
      fs::copy(checkpoint + "/" + file, dir + "/" + file, fs::copy_options::overwrite_existing);
    return dir;
  }
  static void set_field(const std::string& dir, const char* field, const Json& value) {
    const std::string path = dir + "/adapter_config.json";
    Json json = parse_json(read_file(path), path);
    write_file(path, json.set(field, value).dump(2));
  }
  static Tensor output(const Transformer& model) {
    TokenSequence sequence{.tokens = {1, 5, 2, 7, 3, 4}};
    sequence.loss_mask.assign(sequence.tokens.size(), 1);
    NoGradGuard no_grad;
    return model.forward(pack({&sequence, 1})).value();
  }
  void expect_equal(const LoadedModel& loaded) const {
    EXPECT_TRUE(bit_equal(output(*loaded.model), output(*model_)));
    EXPECT_EQ(loaded.tokenizer->files(), tokenizer_->files());
  }

  TempDir temporary_;
  const std::string base_ = temporary_.path("base");
  std::string dir_ = temporary_.path("checkpoints");
  std::unique_ptr<Tokenizer> tokenizer_ = make_char_tokenizer("0123456789+=");
  ModelConfig config_, wanted_;
  std::unique_ptr<Transformer> model_;
  std::unique_ptr<Optimizer> optimizer_;
  TrainState state_;
};

TEST_F(AdapterCheckpoints, HoldTheAdapterAlone) {
  EXPECT_EQ(state_.base.path, fs::canonical(base_).string());
  EXPECT_EQ(state_.base.fingerprint, base_fingerprint(base_));
  const std::vector<Tensor> reference = model_->adapters();
  const std::string at = save(10, &reference);
  std::set<std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(at))
    if (entry.is_regular_file()) files.insert(fs::relative(entry.path(), at).string());
  EXPECT_EQ(files,
            (std::set<std::string>{"adapter_config.json", "adapter_model.safetensors",
                                   "config.json", "manifest.json", "tokenizer.json",
                                   "tokenizer_config.json", "training/optimizer.safetensors",
                                   "training/reference.safetensors", "training/state.json"}));
  const TrainState state = load_state(at);
  EXPECT_EQ(state.base.path, state_.base.path);
  EXPECT_EQ(state.base.fingerprint, state_.base.fingerprint);
  const std::vector<Tensor> read =
      load_adapter_tensors(*model_, at + "/training/reference.safetensors");
  ASSERT_EQ(read.size(), reference.size());
  for (size_t i = 0; i < read.size(); ++i) EXPECT_TRUE(bit_equal(read[i], reference[i]));

  EXPECT_EQ(find_checkpoint(dir_), at);
  const LoadedModel loaded = load_model(at, DType::kF32);
  expect_equal(loaded);
  EXPECT_EQ(loaded.base.path, state_.base.path);
  // The optimizer's state fits a model that is loaded to train on.
  const LoadedModel again = load_for_training(at);
  expect_equal(again);
  EXPECT_EQ(again.base.fingerprint, state_.base.fingerprint);
  const auto optimizer = std::make_unique<Optimizer>(again.model->parameters(), OptimizerConfig{});
  optimizer->load(safetensors_at(at + "/training/optimizer.safetensors"), state_.updates);
}

TEST_F(AdapterCheckpoints, DamageIsFound) {
  save(10);
  const std::string last = save(20);
  const ExpectLog warning("using the checkpoint before it");
  for (const char* file : {"adapter_model.safetensors", "adapter_config.json"}) {
    const std::string path = last + "/" + file, content = read_file(path);
    fs::remove(path);
    EXPECT_THROW_WITH(verify_checkpoint(last), InputError, file);
    write_file(path, content + " ");
    EXPECT_THROW_WITH(verify_checkpoint(last), InputError, file);
    EXPECT_EQ(newest_checkpoint(dir_), checkpoint_path(dir_, 10));
    write_file(path, content);
    verify_checkpoint(last);
  }
  Json manifest = parse_json(read_file(last + "/manifest.json"), "");
  Json files;
  for (const auto& [name, file] : manifest.at("files").as_object())
    if (name != "adapter_config.json") files.set(name, file);
  write_file(last + "/manifest.json", manifest.set("files", files).dump());
  EXPECT_THROW_WITH(verify_checkpoint(last), InputError, "does not list adapter_config.json");
}

TEST_F(AdapterCheckpoints, NeedTheirBase) {
  const std::string at = save(10), moved = temporary_.path("moved");
  fs::rename(base_, moved);
  EXPECT_THROW_WITH(load_model(at, DType::kF32), InputError, "is no folder here");
  EXPECT_THROW_WITH(load_model(at, DType::kF32), InputError, "--base DIR");
  EXPECT_THROW_WITH(load_for_training(at), InputError, base_);
  const LoadedModel loaded = load_model(at, DType::kF32, {}, moved);
  expect_equal(loaded);
  EXPECT_EQ(loaded.base.path, fs::canonical(moved).string());
  EXPECT_THROW_WITH(load_model(at, DType::kF32, {}, temporary_.path("none")), InputError,
                    "is no folder here");
  write_base(base_, 2);
  for (const char* text : {"is not the one that it was trained on", "--base DIR"}) {
    EXPECT_THROW_WITH(load_model(at, DType::kF32), InputError, text);
    EXPECT_THROW_WITH(load_model(at, DType::kF32, {}, base_), InputError, text);
    EXPECT_THROW_WITH(load_for_training(at), InputError, text);
  }
  // An empty folder, and a file.
  fs::remove_all(base_);
  fs::create_directory(base_);
  EXPECT_THROW_WITH(load_model(at, DType::kF32), InputError, "has no weights");
  fs::remove_all(base_);
  write_file(base_, "");
  EXPECT_THROW_WITH(load_model(at, DType::kF32), InputError, base_);
}

TEST_F(AdapterCheckpoints, MoveWithTheirBaseInARunDirectory) {
  const std::string run = temporary_.path("run"), sft = run + "/1-sft/checkpoints/step-00000005";
  write_base(sft, 3);
  LoadedModel loaded = load_for_training(sft);
  model_ = std::move(loaded.model);
  state_.base = loaded.base;
  optimizer_ = std::make_unique<Optimizer>(model_->parameters(), OptimizerConfig{});
  dir_ = run + "/2-grpo/checkpoints";
  save(7);
  fs::rename(run, temporary_.path("other"));
  const std::string moved = temporary_.path("other/2-grpo/checkpoints/step-00000007");
  expect_equal(load_model(moved, DType::kF32));
  EXPECT_EQ(load_for_training(moved).base.path,
            fs::canonical(temporary_.path("other/1-sft/checkpoints/step-00000005")).string());
  write_base(temporary_.path("other/1-sft/checkpoints/step-00000005"), 4);
  EXPECT_THROW_WITH(load_model(moved, DType::kF32), InputError, "is not the one");
}

TEST_F(AdapterCheckpoints, TheFingerprintIsOfWhatTheBaseComputes) {
  const std::string before = base_fingerprint(base_), path = base_ + "/config.json";
  const Json json = parse_json(read_file(path), path);
  const auto with = [&](const char* field, const Json& value) {
    Json changed = json;
    write_file(path, changed.set(field, value).dump());
    return base_fingerprint(base_);
  };
  EXPECT_EQ(with("transformers_version", "9"), before);
  EXPECT_EQ(with("use_cache", false), before);
  EXPECT_NE(with("rope_theta", 5000), before);
  Json::Object fields = json.as_object();
  std::reverse(fields.begin(), fields.end());
  write_file(path, Json(fields).dump());
  EXPECT_EQ(base_fingerprint(base_), before);
  write_file(path, json.dump());
  write_base(base_, 2);
  EXPECT_NE(base_fingerprint(base_), before);
}

TEST_F(AdapterCheckpoints, ABaseThatIsAnAdapterIsRefused) {
  const std::string at = save(10), peft = peft_folder(at);
  set_field(peft, "base_model_name_or_path", at);
  EXPECT_THROW_WITH(load_model(peft, DType::kF32), InputError, "is an adapter itself");
  EXPECT_THROW_WITH(load_model(peft, DType::kF32), InputError, "cohort export --merged");
  EXPECT_THROW_WITH(load_model(at, DType::kF32, {}, peft), InputError, "is an adapter itself");
  EXPECT_THROW_WITH(load_model(base_, DType::kF32, {}, base_), InputError, "omit it");
  fs::copy(base_ + "/model.safetensors", peft + "/model.safetensors");
  fs::copy(base_ + "/config.json", peft + "/config.json");
  EXPECT_THROW_WITH(load_model(peft, DType::kF32), InputError, "both a whole model and an adapter");
}

TEST_F(AdapterCheckpoints, AdaptersFromElsewhereAreLoaded) {
  const std::string peft = peft_folder(save(10));
  EXPECT_EQ(find_checkpoint(peft), peft);
  expect_equal(load_model(peft, DType::kF32));  // with the base's tokenizer
  const LoadedModel loaded = load_for_training(peft);
  expect_equal(loaded);
  EXPECT_EQ(loaded.base.fingerprint, base_fingerprint(base_));
  set_field(peft, "base_model_name_or_path", "owner/model");
  EXPECT_THROW_WITH(load_model(peft, DType::kF32), InputError, "hf download owner/model");
  EXPECT_THROW_WITH(load_model(peft, DType::kF32), InputError, "--base DIR");
  expect_equal(load_model(peft, DType::kF32, {}, base_));
  set_field(peft, "base_model_name_or_path", "owner/model-bnb-4bit");
  EXPECT_THROW_WITH(load_model(peft, DType::kF32), InputError,
                    "is quantized, which is not supported; hint: --base DIR of the 16-bit model "
                    "(owner/model)");
  expect_equal(load_model(peft, DType::kF32, {}, base_));
  set_field(peft, "base_model_name_or_path", Json());
  EXPECT_THROW_WITH(load_model(peft, DType::kF32), InputError, "is not named");
  // Relative paths count from the current folder.
  const fs::path here = fs::current_path();
  fs::current_path(temporary_.path());
  set_field(peft, "base_model_name_or_path", "base");
  expect_equal(load_model(peft, DType::kF32));
  fs::current_path(here);
  set_field(peft, "base_model_name_or_path", base_);
  // A tokenizer of its own comes before the base's.
  const auto other = make_char_tokenizer("9876543210+=");
  write_tokenizer(*other, peft);
  EXPECT_EQ(load_model(peft, DType::kF32).tokenizer->files(), other->files());
  write_tokenizer(*make_char_tokenizer("0123456789+=abcdefgh"), peft);
  EXPECT_THROW_WITH(load_model(peft, DType::kF32), InputError, "vocabulary");
}

TEST_F(AdapterCheckpoints, MissingTokenizersAreNamed) {
  const std::string peft = peft_folder(save(10));
  fs::remove(base_ + "/tokenizer.json");
  EXPECT_THROW_WITH(load_model(peft, DType::kF32), InputError, "tokenizer");
  write_tokenizer(*tokenizer_, peft);
  expect_equal(load_model(peft, DType::kF32));
}

// A folder of PEFT's has no generation_config.json, which says what ends a text.
TEST_F(AdapterCheckpoints, TheEndsOfATextAreThoseOfTheBase) {
  const std::string peft = peft_folder(save(10));
  Json::Object vocab;
  for (const char c : std::string("+0123456789=")) vocab.emplace_back(str(c), std::ssize(vocab));
  const Json end = Json().set("id", 12).set("content", "<|end|>").set("special", true);
  Json json = Json().set("added_tokens", Json::Array{end});
  json.set("decoder", Json().set("type", "ByteLevel"));
  json.set("model",
           Json().set("type", "BPE").set("vocab", std::move(vocab)).set("merges", Json::Array{}));
  for (const std::string& folder : {base_, peft}) {
    write_file(folder + "/tokenizer.json", json.dump());
    write_file(folder + "/tokenizer_config.json", R"({"eos_token": "<|end|>"})");
  }
  write_file(base_ + "/generation_config.json", R"({"eos_token_id": [12, 3]})");
  EXPECT_EQ(load_model(base_, DType::kF32).tokenizer->stop_ids(), (std::vector<int32_t>{12, 3}));
  EXPECT_EQ(load_model(peft, DType::kF32).tokenizer->stop_ids(), (std::vector<int32_t>{12, 3}));
  write_file(peft + "/generation_config.json", R"({"eos_token_id": [12, 4]})");
  EXPECT_EQ(load_model(peft, DType::kF32).tokenizer->stop_ids(), (std::vector<int32_t>{12, 4}));
}

TEST_F(AdapterCheckpoints, TrainingTakesTheAdapterThatItAskedFor) {
  const std::string at = save(10);
  const LoraConfig lora = wanted_.lora;
  const auto refused = [&](const LoraConfig& other, const std::vector<std::string>& parts) {
    wanted_.lora = other;
    for (const std::string& part : parts)
      EXPECT_THROW_WITH(load_for_training(at), InputError, part);
    wanted_.lora = lora;
  };
  refused({.rank = 4, .alpha = 6, .targets = lora.targets},
          {"lora.rank: 4 was asked for", "hint: lora.rank=2"});
  refused({.rank = 2, .alpha = 8, .targets = lora.targets},
          {"lora.alpha: 8 was asked for", "hint: lora.alpha=6"});
  refused({.rank = 2, .alpha = 6, .targets = lora.targets, .rslora = true},
          {"lora.rslora: true was asked for", "hint: lora.rslora=false"});
  refused({.rank = 2, .alpha = 6},
          {"lora.targets: ", "lora.rank=2 lora.alpha=6 lora.targets=[q_proj,up_proj]"});
  refused({}, {"init_from: " + at + " is an adapter of rank 2",
               "hint: lora.rank=2 lora.alpha=6 lora.targets=[q_proj,up_proj] to train it on",
               "cohort export --merged"});
  // Targets may be in another order, and have longer names.
  wanted_.lora.targets = {"mlp.up_proj", "self_attn.q_proj"};
  expect_equal(load_for_training(at));
  wanted_.lora.targets = {"q_proj", "head"};
  EXPECT_THROW_WITH(load_for_training(base_), InputError, "lora.targets: 'head'");
  wanted_.lora = {};
  EXPECT_TRUE(load_for_training(base_).base.path.empty());
}

TEST_F(AdapterCheckpoints, NewAdaptersChangeNoBitOfTheBase) {
  const LoadedModel loaded = load_for_training(base_);
  EXPECT_EQ(loaded.model->config().lora.rank, 2);
  EXPECT_TRUE(bit_equal(output(*loaded.model), output(*load_model(base_, DType::kF32).model)));
  EXPECT_TRUE(load_model(base_, DType::kF32).base.path.empty());
  const ModelDescription described = describe_model(base_, wanted_, DataConfig{});
  EXPECT_EQ(described.config.lora.rank, 2);
  EXPECT_EQ(described.base.path, fs::canonical(base_).string());
}

}  // namespace
}  // namespace cohort::test
