// Checkpoint directories: contents, retention and detection of damage.
#include "job/checkpoint.h"

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <thread>

#include "job/config.h"
#include "job/run_directory.h"
#include "sys/files.h"
#include "tests/job/small_configs.h"
#include "tests/support/tensor_files.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

class Checkpoints : public testing::Test {
 protected:
  Checkpoints() : tokenizer_(make_char_tokenizer("0123456789+=")) {
    ModelConfig c;
    c.num_layers = 1;
    c.d_model = 8;
    c.num_heads = 2;
    c.context = 12;
    c.vocab_size = tokenizer_->vocab_size();
    c.resolve();
    model_ = std::make_unique<Transformer>(c, DType::kF32, 1);
    optimizer_ = std::make_unique<Optimizer>(model_->parameters(), OptimizerConfig{});
    dir_ = temporary_.path("checkpoints");
  }

  // Saves a checkpoint of weights that differ from step to step.
  std::string save(int64_t step, int64_t best_step = -1, int64_t keep_last = 2,
                   const Transformer* reference = nullptr) {
    for (const NamedParameter& p : model_->parameters()) {
      Tensor grad = p.grad();
      grad.fill_(static_cast<double>(step % 3) - 0.5);
    }
    optimizer_->step(1e-2, {});
    state_.step = step;
    state_.updates = optimizer_->updates();
    state_.best_step = best_step;
    save_checkpoint(dir_, {*model_, reference, *tokenizer_, *optimizer_, state_}, keep_last);
    return checkpoint_path(dir_, state_.step);
  }

  std::set<std::string> names() const {
    std::set<std::string> out;
    for (const auto& entry : fs::directory_iterator(dir_))
      out.insert(entry.path().filename().string());
    return out;
  }
  std::string path(int64_t step, const std::string& file = "") const {
    char text[32];
    std::snprintf(text, sizeof text, "/step-%08lld/", static_cast<long long>(step));
    return dir_ + text + file;
  }
  std::string best() const { return fs::read_symlink(dir_ + "/best").string(); }

  TempDir temporary_;
  std::string dir_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<Transformer> model_;
  std::unique_ptr<Optimizer> optimizer_;
  TrainState state_;
};

using Names = std::set<std::string>;

void flip_bit(const std::string& file, size_t at) {
  std::string bytes = read_file(file);
  ASSERT_GT(bytes.size(), at);
  bytes[at] = static_cast<char>(bytes[at] ^ 1);
  write_file(file, bytes);
}

TEST_F(Checkpoints, RestoreModelOptimizerTokenizerAndState) {
  state_.data_position = 77;
  state_.total_tokens = 1e12 + 1;
  state_.seconds = 0.1;  // no binary fraction: must be restored exactly
  state_.best = -1.0 / 3;
  state_.report.set("curve", Json(Json::Array{0.5, 1e-300}));
  const std::string at = save(5, 3);

  const LoadedModel loaded = load_model(at, DType::kF32);
  ASSERT_EQ(loaded.model->parameters().size(), model_->parameters().size());
  for (size_t i = 0; i < model_->parameters().size(); ++i)
    EXPECT_TRUE(bit_equal(loaded.model->parameters()[i].value, model_->parameters()[i].value));
  EXPECT_EQ(loaded.tokenizer->files(), tokenizer_->files());
  EXPECT_EQ(dump_config(loaded.model->config()), dump_config(model_->config()));

  const auto other = std::make_unique<Optimizer>(loaded.model->parameters(), OptimizerConfig{});
  const TrainState state = load_state(at);
  other->load(safetensors_at(training_folder(at) + "/optimizer.safetensors"), state.updates);
  EXPECT_EQ(other->updates(), 1);
  const NamedTensors saved = tensors_of(optimizer_->state_sources()),
                     restored = tensors_of(other->state_sources());
  for (size_t i = 0; i < saved.size(); ++i)
    EXPECT_TRUE(bit_equal(restored[i].second, saved[i].second));
  EXPECT_EQ(state.to_json().dump(), state_.to_json().dump());
}

TEST_F(Checkpoints, HoldTheReferencePolicyIfThereIsOne) {
  EXPECT_FALSE(fs::exists(save(1) + "/training/reference.safetensors"));
  const Transformer reference(model_->config(), DType::kF32, 9);
  Transformer loaded(model_->config(), DType::kF32, 0);
  load_weights(loaded, training_folder(save(2, -1, 2, &reference)), "reference");
  for (size_t i = 0; i < loaded.parameters().size(); ++i)
    EXPECT_TRUE(bit_equal(loaded.parameters()[i].value, reference.parameters()[i].value));
}

TEST_F(Checkpoints, HoldTheModelOnceAndNothingElseForServers) {
  const Transformer reference(model_->config(), DType::kF32, 9);
  std::vector<std::string> expected;
  for (const NamedParameter& p : model_->parameters()) expected.push_back(p.name);
  std::sort(expected.begin(), expected.end());
  const std::string at = save(1, -1, 2, &reference);
  EXPECT_EQ(served_tensors(at), expected);
  to_format_1(at);
  EXPECT_GT(served_tensors(at).size(), 3 * expected.size()) << "format 1 served everything";
}

TEST_F(Checkpoints, OfFormat1AreReadAndVerified) {
  const Transformer reference(model_->config(), DType::kF32, 9);
  const std::string at = save(10, -1, 2, &reference);
  to_format_1(at);
  // Files that the manifest of format 1 cannot list are not used.
  fs::create_directory(at + "/training");
  write_file(at + "/training/state.json", "{");
  EXPECT_EQ(find_checkpoint(dir_), at);
  EXPECT_EQ(training_folder(at), at);
  EXPECT_EQ(load_state(at).to_json().dump(), state_.to_json().dump());
  const auto other = std::make_unique<Optimizer>(model_->parameters(), OptimizerConfig{});
  other->load(safetensors_at(training_folder(at) + "/optimizer.safetensors"), 1);
  const std::string manifest = path(10, "manifest.json"), good = read_file(manifest);
  Json listed = parse_json(good, manifest), files = listed.at("files");
  files.set("training/state.json", files.at("state.json"));
  write_file(manifest, listed.set("files", files).dump());
  EXPECT_THROW_WITH(verify_checkpoint(at), InputError, "'training/state.json' is not a file name");
  write_file(manifest, good);
  flip_bit(path(10, "optimizer.safetensors"), 9);
  EXPECT_THROW_WITH(verify_checkpoint(at), InputError, "does not match its checksum");
  // The folder is still no model of Hugging Face's.
  fs::remove(manifest);
  EXPECT_THROW_WITH(find_checkpoint(at), InputError, "no usable checkpoint");
}

TEST_F(Checkpoints, WithoutTheirManifestAreNotTakenForModels) {
  const std::string at = save(10);
  fs::remove(path(10, "manifest.json"));
  EXPECT_THROW_WITH(find_checkpoint(at), InputError, "no usable checkpoint");
  fs::remove_all(path(10, "training"));
  EXPECT_EQ(find_checkpoint(at), at);
}

TEST_F(Checkpoints, KeepTheLastAndTheBest) {
  save(10, 10);
  EXPECT_EQ(best(), "step-00000010");
  save(20, 20);
  EXPECT_EQ(best(), "step-00000020");
  save(30, 20);
  save(40, 20);
  EXPECT_EQ(names(), (Names{"best", "step-00000020", "step-00000030", "step-00000040"}));
  save(50, 20);
  EXPECT_EQ(names(), (Names{"best", "step-00000020", "step-00000040", "step-00000050"}));
  EXPECT_EQ(best(), "step-00000020");
  save(60, 60, 1);
  EXPECT_EQ(names(), (Names{"best", "step-00000060"}));
  EXPECT_EQ(find_checkpoint(dir_ + "/best"), dir_ + "/best");
}

TEST_F(Checkpoints, BestStepThatWasNeverSavedGetsNoLink) {
  save(10, 0);
  EXPECT_EQ(names(), (Names{"step-00000010"}));
}

// A process killed between the rename of a checkpoint and that of the link.
TEST_F(Checkpoints, BestLinkIsRepairedByTheNextSave) {
  save(10, 10);
  save(20, 20);
  fs::remove(dir_ + "/best");
  fs::create_directory_symlink("step-00000010", dir_ + "/best");
  save(30, 20);
  EXPECT_EQ(best(), "step-00000020");
}

TEST_F(Checkpoints, LeaveNothingTemporaryAndCleanUpAfterAKilledProcess) {
  save(10);
  EXPECT_EQ(names(), (Names{"step-00000010"}));
  for (const char* left : {"/.tmp-step-00000015", "/.old-step-00000010"}) {
    fs::create_directory(dir_ + left);
    write_file(dir_ + left + "/model.safetensors", "half");
  }
  save(20);
  EXPECT_EQ(names(), (Names{"step-00000010", "step-00000020"}));
}

TEST_F(Checkpoints, LeftoversOfAnyKindDoNotBlock) {
  save(10);
  write_file(dir_ + "/.tmp-step-00000020", "a file");
  fs::create_symlink("nowhere", dir_ + "/.old-step-00000020");
  fs::create_directories(dir_ + "/.best.tmp/deep");
  fs::create_directories(dir_ + "/.old-step-00000010/deep");
  save(20, 20);
  EXPECT_EQ(names(), (Names{"best", "step-00000010", "step-00000020"}));
  fs::create_directories(dir_ + "/.old-step-00000020/deep");
  save(20, 20);
  EXPECT_EQ(names(), (Names{"best", "step-00000010", "step-00000020"}));
  // A copy of the run may have a directory where the link was.
  fs::remove(dir_ + "/best");
  fs::create_directories(dir_ + "/best/deep");
  const ExpectLog warning("cannot link " + dir_ + "/best to step-00000030");
  save(30, 30);
  verify_checkpoint(path(30));
}

TEST_F(Checkpoints, OtherNamesAreLeftAlone) {
  for (const int64_t step : {6, 7}) save(step);
  const Names others{"step-00000007.bak", "step-000000009", "step-9", "step-x",
                     ".old-step-9",       ".tmp-other"};
  for (const std::string& name : others) fs::copy(path(7), dir_ + "/" + name);
  fs::create_directory_symlink("step-00000007", dir_ + "/step-00000099");
  EXPECT_EQ(newest_checkpoint(dir_), checkpoint_path(dir_, 7));
  for (const int64_t step : {8, 9, 10}) save(step);
  Names expected = others;
  expected.insert({"step-00000009", "step-00000010", "step-00000099"});
  EXPECT_EQ(names(), expected);
}

TEST_F(Checkpoints, StepsOfManyDigitsAreInOrder) {
  save(99999999);
  save(100000000);
  EXPECT_EQ(newest_checkpoint(dir_), dir_ + "/step-100000000");
  save(100000001);
  EXPECT_EQ(names(), (Names{"step-100000000", "step-100000001"}));
}

TEST_F(Checkpoints, RemovedByARunDuringLoadingAreNotDamaged) {
  save(10, -1, 9);
  save(20, -1, 9);
  std::vector<std::string> tried;
  const std::string loaded = load_found(dir_, [&](const std::string& checkpoint) {
    tried.push_back(checkpoint);
    if (tried.size() == 1) {
      save(30, -1, 1);
      verify_checkpoint(checkpoint);
    }
    return checkpoint;
  });
  EXPECT_EQ(tried, (std::vector<std::string>{checkpoint_path(dir_, 20), loaded}));
  EXPECT_EQ(loaded, checkpoint_path(dir_, 30));
  // Other errors, and errors of a checkpoint that was given by name, are not retried.
  EXPECT_THROW_WITH(load_found(dir_, [](const auto&) -> int { throw InputError("test"); }),
                    InputError, "test");
  EXPECT_THROW_WITH(load_found(loaded,
                               [](const std::string& checkpoint) -> int {
                                 fs::remove_all(checkpoint);
                                 throw InputError("test");
                               }),
                    InputError, "it does not exist");
}

TEST_F(Checkpoints, IncompleteOnesAreNoCheckpoints) {
  fs::create_directories(dir_ + "/.tmp-step-00000015");
  EXPECT_FALSE(newest_checkpoint(dir_).has_value());
  EXPECT_FALSE(newest_checkpoint(dir_ + "/nowhere").has_value());
  EXPECT_THROW_WITH(find_checkpoint(dir_), InputError, "no usable checkpoint");
}

TEST_F(Checkpoints, EveryKindOfDamageIsFound) {
  const char* const files[] = {"model.safetensors", "training/optimizer.safetensors", "config.json",
                               "tokenizer.json", "training/state.json"};
  for (const char* file : files) {
    SCOPED_TRACE(file);
    const std::string at = save(10);
    verify_checkpoint(at);
    flip_bit(path(10, file), 9);
    EXPECT_THROW_WITH(verify_checkpoint(at), InputError,
                      std::string(file) + " does not match its checksum");
    save(10);
    fs::resize_file(path(10, file), fs::file_size(path(10, file)) - 1);
    EXPECT_THROW_WITH(verify_checkpoint(at), InputError, "bytes, expected");
    save(10);
    write_file(path(10, file), "");
    EXPECT_THROW_WITH(verify_checkpoint(at), InputError, "has 0 bytes, expected");
    save(10);
    fs::remove(path(10, file));
    EXPECT_THROW_WITH(verify_checkpoint(at), InputError, std::string(file) + " is missing");
  }
}

TEST_F(Checkpoints, ManifestsNameNoFilesOutsideTheCheckpoint) {
  const std::string at = save(10), manifest = path(10, "manifest.json");
  write_file(dir_ + "/outside", "");
  const Json good = parse_json(read_file(manifest), manifest);
  for (const std::string name :
       {"../outside", "/etc/passwd", "..", "a/b", "", "training/../outside", "training/..",
        "training/", "training//etc", "training/training/state.json", "training"}) {
    Json bad = good, files = good.at("files");
    bad.set("files", files.set(name, Json().set("bytes", 0).set("xxh3", "2d06800538d394c2")));
    write_file(manifest, bad.dump());
    const std::string reason =
        name == "training" ? str(name, ": is a folder") : str("'", name, "' is not a file name");
    EXPECT_THROW_WITH(verify_checkpoint(at), InputError, reason);
  }
}

TEST_F(Checkpoints, FilesOfOtherTypesAreDamage) {
  const std::string at = save(10);
  for (const char* file : {"training/state.json", "model.safetensors", "manifest.json"}) {
    fs::remove(path(10, file));
    ASSERT_EQ(::mkfifo(path(10, file).c_str(), 0600), 0);
    EXPECT_THROW_WITH(verify_checkpoint(at), InputError,
                      std::string(file) + ": is not a regular file but a FIFO");
  }
}

TEST_F(Checkpoints, DamagedManifestsAreFound) {
  const std::string at = save(10), manifest = path(10, "manifest.json");
  const std::string good = read_file(manifest);
  for (const auto& [bad, message] :
       {std::pair<std::string, const char*>{good.substr(0, good.size() / 2), "not valid JSON"},
        {"", "not valid JSON"},
        {"{\"format\": 3, \"files\": {}}", "checkpoint format 3, this version reads 1 and 2"},
        {"{\"format\": 2, \"files\": {}}", "manifest.json does not list model.safetensors"},
        {"{\"format\": 1}", "files"},
        {"{\"format\": 1, \"files\": {}}", "manifest.json does not list model.safetensors"},
        {"{\"format\": 1, \"files\": []}", "does not list model.safetensors"},
        {"[]", "format"}}) {
    SCOPED_TRACE(bad);
    write_file(manifest, bad);
    EXPECT_THROW_WITH(verify_checkpoint(at), InputError, message);
  }
  fs::remove(manifest);
  EXPECT_THROW_WITH(verify_checkpoint(at), InputError, "manifest.json is missing");
}

TEST_F(Checkpoints, DamagedNewestOneIsSkippedWithAWarning) {
  save(10);
  save(20);
  save(30, -1, 3);
  flip_bit(path(30, "model.safetensors"), 200);
  {
    const ExpectLog warning(
        "step-00000030/model.safetensors does not match its checksum; "
        "using the checkpoint before it");
    EXPECT_EQ(newest_checkpoint(dir_), path(20).substr(0, path(20).size() - 1));
  }
  fs::remove(path(20, "manifest.json"));
  const ExpectLog first("step-00000030"), second("step-00000020");
  EXPECT_EQ(newest_checkpoint(dir_), path(10).substr(0, path(10).size() - 1));
}

TEST_F(Checkpoints, AllDamagedIsAnErrorWithAHint) {
  save(10);
  save(20);
  for (const int64_t step : {10, 20}) flip_bit(path(step, "model.safetensors"), 200);
  const ExpectLog warning("using the checkpoint before it");
  EXPECT_THROW_WITH(newest_checkpoint(dir_), InputError, "hint: restore one from a copy");
}

// After resuming from step 10 because step 30 is damaged, new checkpoints must not be removed in
// its favor.
TEST_F(Checkpoints, DamagedLaterOneDoesNotCountAsKept) {
  save(10, -1, 1);
  fs::rename(path(10), path(30));
  flip_bit(path(30, "model.safetensors"), 200);
  save(20, -1, 1);
  const ExpectLog warning("using the checkpoint before it");
  EXPECT_EQ(newest_checkpoint(dir_), path(20).substr(0, path(20).size() - 1));
}

// Scores that were not measured.
TEST_F(Checkpoints, StatesWithoutAScoreAreRead) {
  state_.best = std::nan("");
  state_.evaluated_step = 4;
  state_.data_fingerprint = "0123";
  const TrainState state = load_state(save(5));
  EXPECT_TRUE(std::isnan(state.best));
  EXPECT_EQ(state.to_json().dump(), state_.to_json().dump());
}

TEST_F(Checkpoints, BeforeAGivenOneAreFoundToo) {
  for (const int64_t step : {10, 20, 30}) save(step, -1, 9);
  const std::string at = path(20).substr(0, path(20).size() - 1);
  EXPECT_EQ(newest_checkpoint(dir_, path(30).substr(0, path(30).size() - 1)), at);
  fs::rename(path(10), dir_ + "/.old-step-00000010");
  EXPECT_EQ(newest_checkpoint(dir_, at), dir_ + "/.old-step-00000010");
  EXPECT_FALSE(newest_checkpoint(dir_, dir_ + "/.old-step-00000010").has_value());
}

// A run that fell back to an earlier checkpoint and ended early: later ones are discarded.
TEST_F(Checkpoints, FinishedOnesAreTheNewest) {
  save(10);
  save(30);
  state_.finished = true;
  EXPECT_EQ(newest_checkpoint(dir_), path(30).substr(0, path(30).size() - 1));
  save(20);
  EXPECT_EQ(names(), (Names{"step-00000010", "step-00000020"}));
}

TEST_F(Checkpoints, SavingAStepAgainReplacesIt) {
  save(10);
  const std::string first = read_file(path(10, "model.safetensors"));
  save(10);
  EXPECT_NE(read_file(path(10, "model.safetensors")), first);
  verify_checkpoint(path(10));
  EXPECT_EQ(names(), (Names{"step-00000010"}));
}

// A process killed between the two renames of a replacement.
TEST_F(Checkpoints, OneThatIsBeingReplacedIsStillFound) {
  save(10);
  fs::rename(path(10), dir_ + "/.old-step-00000010");
  EXPECT_EQ(newest_checkpoint(dir_), dir_ + "/.old-step-00000010");
}

TEST_F(Checkpoints, AreFoundFromARunAStageOrADirectoryOfThem) {
  const std::string run = temporary_.path("run");
  for (const char* stage : {"1-sft", "2-grpo", "10-sft"}) {
    dir_ = run + "/" + stage + "/checkpoints";
    save(10);
    save(20);
  }
  const std::string last = run + "/10-sft/checkpoints/step-00000020";
  EXPECT_EQ(find_checkpoint(run), last);  // 10 comes after 2
  EXPECT_EQ(find_checkpoint(run + "/10-sft"), last);
  EXPECT_EQ(find_checkpoint(run + "/10-sft/checkpoints"), last);
  EXPECT_EQ(find_checkpoint(last), last);
  EXPECT_EQ(find_checkpoint(run + "/2-grpo"), run + "/2-grpo/checkpoints/step-00000020");
  // A stage that has not saved yet: the previous stage has the run's current weights.
  fs::remove_all(run + "/10-sft/checkpoints");
  fs::create_directory(run + "/10-sft/checkpoints");
  EXPECT_EQ(find_checkpoint(run), run + "/2-grpo/checkpoints/step-00000020");
  EXPECT_THROW_WITH(find_checkpoint(temporary_.path("none")), InputError, "does not exist");
}

TEST_F(Checkpoints, WeightsOfAnotherShapeAreRefused) {
  const std::string at = save(10);
  ModelConfig wider = model_->config();
  wider.d_ff += 16;
  Transformer other(wider, DType::kF32, 1);
  EXPECT_THROW_WITH(load_weights(other, at), InputError, "expected shape");
  const auto optimizer = std::make_unique<Optimizer>(other.parameters(), OptimizerConfig{});
  EXPECT_THROW_WITH(optimizer->load(safetensors_at(at + "/training/optimizer.safetensors"), 1),
                    InputError, "optimizer state");
}

TEST_F(Checkpoints, ManifestsWithoutAFileAreFound) {
  const std::string at = save(10), manifest = path(10, "manifest.json");
  const std::string good = read_file(manifest);
  for (const char* file : {"model.safetensors", "training/optimizer.safetensors", "config.json",
                           "tokenizer.json", "training/state.json"}) {
    std::string bad = good;
    bad[bad.find(file)] = '_';
    write_file(manifest, bad);
    EXPECT_THROW_WITH(verify_checkpoint(at), InputError, std::string("does not list ") + file);
  }
}

TEST_F(Checkpoints, ExtraWeightsAreRefused) {
  NamedTensors tensors;
  for (const NamedParameter& p : model_->parameters()) tensors.emplace_back(p.name, p.value);
  tensors.emplace_back("model.layers.9.extra", Tensor::zeros({2}, DType::kF32));
  write_safetensors(temporary_.path("more.safetensors"), tensors);
  EXPECT_THROW_WITH(load_weights(*model_, temporary_.path(""), "more"), InputError,
                    "the model has no tensor 'model.layers.9.extra'");
}

TEST_F(Checkpoints, MomentsThatAreNotFiniteAreRefused) {
  auto [name, moment] = tensors_of(optimizer_->state_sources())[3];
  moment.narrow(0, 0, 1).fill_(NAN);
  save(1);
  const auto other = std::make_unique<Optimizer>(model_->parameters(), OptimizerConfig{});
  EXPECT_THROW_WITH(other->load(safetensors_at(path(1, "training/optimizer.safetensors")), 1),
                    InputError, name + "' holds a number that is not finite");
}

TEST_F(Checkpoints, TokenizerOfAnotherVocabularyIsRefused) {
  const std::string at = save(10);
  write_file(at + "/tokenizer.json", make_byte_tokenizer()->files()[0].second);
  EXPECT_THROW_WITH(load_model(at, DType::kF32), InputError,
                    "config.json has a vocabulary of 13, tokenizer.json one of 257");
}

// Its end of sequence is the last row of the vocabulary, which a smaller tokenizer does not have.
TEST_F(Checkpoints, ATokenizerOfFewerCharactersIsRefused) {
  const std::string at = save(10);
  write_file(at + "/tokenizer.json", make_char_tokenizer("0123456789")->files()[0].second);
  EXPECT_THROW_WITH(load_model(at, DType::kF32), InputError,
                    "config.json has a vocabulary of 13, tokenizer.json one of 11");
}

TEST_F(Checkpoints, OfModelsMadeHereAreFoldersOfTheirFamily) {
  const std::string at = save(10);
  const Json config = parse_json(read_file(at + "/config.json"), "config.json");
  EXPECT_EQ(config.at("model_type").as_string(), "llama");
  EXPECT_EQ(config.at("architectures").dump(), R"(["LlamaForCausalLM"])");
  EXPECT_EQ(config.at("eos_token_id").as_int(), tokenizer_->eos_id());
  EXPECT_TRUE(config.at("bos_token_id").is_null());
  EXPECT_EQ(config.at("torch_dtype").as_string(), "float32");
  const Json tokens = parse_json(read_file(at + "/tokenizer.json"), "tokenizer.json");
  EXPECT_EQ(tokens.at("model").at("type").as_string(), "WordLevel");
  EXPECT_NE(read_file(at + "/tokenizer_config.json").find("<|endoftext|>"), std::string::npos);
  // A loaded model is saved alike.
  model_ = load_model(at, DType::kF32).model;
  optimizer_ = std::make_unique<Optimizer>(model_->parameters(), OptimizerConfig{});
  EXPECT_EQ(read_file(save(20) + "/config.json"), read_file(at + "/config.json"));
}

TEST_F(Checkpoints, OfEarlierVersionsAreReadAndSavedAsTheirFamily) {
  const std::string old = temporary_.path("old");
  fs::create_directory(old);
  write_file(old + "/config.json", R"({"model_type": "cohort", "hidden_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4,
    "intermediate_size": 32, "max_position_embeddings": 12, "vocab_size": 13,
    "norm_type": "layer_norm", "rms_norm_eps": 1e-05, "position_type": "learned",
    "rope_theta": 10000.0, "hidden_act": "gelu_tanh", "attention_bias": true,
    "tie_word_embeddings": true, "qk_norm": false, "dropout": 0.1, "initializer_range": 0.02})");
  write_file(old + "/tokenizer.json", R"({"type": "char", "characters": "+0123456789="})");
  const Transformer model(load_config(old), DType::kF32, 3);
  NamedTensors tensors;
  for (const NamedParameter& p : model.parameters()) tensors.emplace_back(p.name, p.value);
  write_safetensors(old + "/model.safetensors", tensors);

  const auto expect_loaded = [&](const std::string& from) {
    const LoadedModel loaded = load_model(from, DType::kF32);
    EXPECT_EQ(loaded.tokenizer->files(), tokenizer_->files());
    for (size_t i = 0; i < tensors.size(); ++i)
      EXPECT_TRUE(bit_equal(loaded.model->parameters()[i].value, tensors[i].second));
  };
  expect_loaded(old);
  const auto optimizer = std::make_unique<Optimizer>(model.parameters(), OptimizerConfig{});
  save_checkpoint(dir_, {model, nullptr, *tokenizer_, *optimizer, state_}, 1);
  const std::string saved = checkpoint_path(dir_, state_.step);
  EXPECT_EQ(load_config(saved).file.at("model_type").as_string(), "gpt2");
  EXPECT_EQ(load_config(saved).file.at("eos_token_id").as_int(), 12);
  expect_loaded(saved);
}

TEST_F(Checkpoints, AShorterContextOfARunLeavesThatOfTheFiles) {
  ModelConfig learned = model_->config();
  learned.position = PositionType::kLearned;
  learned.norm = NormType::kLayer;
  learned.bias = true;
  learned.mlp = MlpType::kGeluTanh;
  for (const ModelConfig& config : {model_->config(), learned}) {
    model_ = std::make_unique<Transformer>(config, DType::kF32, 1);
    optimizer_ = std::make_unique<Optimizer>(model_->parameters(), OptimizerConfig{});
    ModelConfig wanted;
    wanted.context = 5;
    model_ = load_model(save(10), wanted, DataConfig{}, DType::kF32).model;
    EXPECT_EQ(model_->config().context, 5);
    optimizer_ = std::make_unique<Optimizer>(model_->parameters(), OptimizerConfig{});
    EXPECT_EQ(load_config(save(20)).context, 12);
    wanted.context = 13;
    EXPECT_THROW_WITH(load_model(path(20), wanted, DataConfig{}, DType::kF32), InputError,
                      "model.context: 13 was asked for");
    if (config.position == PositionType::kLearned) continue;
    const ExpectLog warning("13 is more than the 12 positions");
    EXPECT_EQ(load_model(path(20), DType::kF32, {}, "", 13).model->config().context, 13);
  }
  using enum PositionType;
  for (const PositionType position : {kSinusoidal, kAlibi, kT5, kExposb, kNone}) {
    ModelConfig config = learned, wanted;
    config.position = position;
    model_ = std::make_unique<Transformer>(config, DType::kF32, 1);
    optimizer_ = std::make_unique<Optimizer>(model_->parameters(), OptimizerConfig{});
    wanted.context = 13;
    model_ = load_model(save(30), wanted, DataConfig{}, DType::kF32).model;
    EXPECT_EQ(model_->config().context, 13);
    optimizer_ = std::make_unique<Optimizer>(model_->parameters(), OptimizerConfig{});
    EXPECT_EQ(load_config(save(40)).context, 13);
    EXPECT_EQ(load_config(path(40)).position, position);
  }
}

TEST_F(Checkpoints, AConfigurationThatCannotBeUsedIsNamedWithItsPath) {
  const std::string at = save(10), file = at + "/config.json", good = read_file(file);
  for (const auto& [key, value, message] :
       {std::tuple<const char*, Json, const char*>{"hidden_act", "relu6", "hidden_act is"},
        {"num_attention_heads", int64_t{0}, "num_heads: expected a number"},
        {"head_dim", int64_t{3}, "rotary positions need an even number"}}) {
    Json bad = parse_json(good, file);
    bad.set(key, value);
    write_file(file, bad.dump());
    EXPECT_THROW_WITH(load_model(at, DType::kF32), InputError, file + ": ");
    EXPECT_THROW_WITH(load_model(at, DType::kF32), InputError, message);
  }
}

TEST_F(Checkpoints, TrainingTakesDropoutAndRecomputeFromItsConfigurationAndRefusesTheRest) {
  const std::string at = save(10);
  TrainConfig config;
  config.model.dropout = 0.25;
  config.model.recompute = Recompute::kBlock;
  config.model.init_std = 0.5;
  config.model.d_model = 8;  // unchanged
  const ModelConfig loaded =
      load_model(at, config.model, config.data, config.dtype).model->config();
  EXPECT_EQ(loaded.dropout, 0.25);
  EXPECT_EQ(loaded.recompute, Recompute::kBlock);
  EXPECT_EQ(loaded.context, 12);  // the default of 256 is not compared

  config.model.d_model = 16;
  EXPECT_THROW_WITH(load_model(at, config.model, config.data, config.dtype), InputError,
                    "model.d_model: 16 was asked for, but the model of " + at + " has d_model: 8");
  config.model.d_model = 8;
  config.model.norm = NormType::kLayer;
  EXPECT_THROW_WITH(load_model(at, config.model, config.data, config.dtype), InputError,
                    "model.norm: layer_norm");
  config.model.norm = NormType::kRms;
  config.data.tokenizer = TokenizerType::kByte;
  EXPECT_THROW_WITH(load_model(at, config.model, config.data, config.dtype), InputError,
                    "data.tokenizer: byte");
}

// ---- Files and run directories -----------------------------------------------------------------

TEST(Files, ReplacingIsAllOrNothing) {
  const TempDir dir;
  const std::string path = dir.path("file");
  write_file(path, "old");
  replace_file(path, "new text");
  EXPECT_EQ(read_text_file(path), "new text");
  EXPECT_EQ(list_directory(dir.path()).size(), 1u);
  EXPECT_THROW_WITH(replace_file(dir.path("none/file"), "x"), Error, "none/file");
  EXPECT_THROW_WITH(read_text_file(dir.path("none")), InputError, dir.path("none"));
  EXPECT_THROW_WITH(read_text_file(dir.path()), InputError, "is a folder");
}

TEST(Files, ChecksumIsXxh3) {
  const TempDir dir;
  // XXH3-64 of no bytes, from its specification's test vectors (seed 0).
  write_file(dir.path("empty"), "");
  EXPECT_EQ(file_checksum(dir.path("empty")), "2d06800538d394c2");
  // More than one buffer of the reader: a change in the last byte must show.
  std::string large((1 << 20) + 5, 'a');
  write_file(dir.path("a"), large);
  large.back() = 'b';
  write_file(dir.path("b"), large);
  EXPECT_NE(file_checksum(dir.path("a")), file_checksum(dir.path("b")));
}

TEST(Files, ChecksumOfBytesContinuesThePreviousOne) {
  EXPECT_EQ(checksum(""), 0x2d06800538d394c2u);
  EXPECT_NE(checksum("b", checksum("a")), checksum("a", checksum("b")));
  EXPECT_NE(checksum("b", checksum("a")), checksum("b"));
}

TEST(Files, RunDirectoriesAreNeverShared) {
  const TempDir dir;
  const std::string wanted = dir.path("deep/er/run");
  EXPECT_EQ(create_run_directory(wanted), wanted);
  EXPECT_EQ(create_run_directory(wanted), wanted + "-2");
  EXPECT_EQ(create_run_directory(wanted), wanted + "-3");
  write_file(dir.path("file"), "");
  EXPECT_THROW_WITH(create_run_directory(dir.path("file/run")), InputError, "hint: set output_dir");
  EXPECT_THROW_WITH(create_run_directory(dir.path("file")), InputError, "hint: set output_dir");
}

TEST(Files, LockedRunDirectoryIsRefusedUntilItIsFree) {
  const TempDir dir;
  {
    const FileLock lock = lock_run_directory(dir.path());
    EXPECT_THROW_WITH(lock_run_directory(dir.path()), InputError, "another process is using");
  }
  const FileLock again = lock_run_directory(dir.path());
}

TEST(Files, ARunDirectoryWhoseProcessIsEndingIsWaitedFor) {
  using std::chrono::milliseconds;
  const TempDir dir;
  const auto waits = [&](milliseconds limit) {
    const auto start = std::chrono::steady_clock::now();
    wait_for_run_directory(dir.path(), limit);
    return std::chrono::steady_clock::now() - start;
  };
  EXPECT_LT(waits(milliseconds(20000)), milliseconds(5000));  // no process has it
  std::optional<FileLock> lock = lock_run_directory(dir.path());
  EXPECT_GE(waits(milliseconds(200)), milliseconds(200));
  std::thread other([&] {
    std::this_thread::sleep_for(milliseconds(300));
    lock.reset();
  });
  const auto waited = waits(milliseconds(20000));
  other.join();
  EXPECT_GE(waited, milliseconds(200));
  EXPECT_LT(waited, milliseconds(10000));
  EXPECT_NO_THROW(lock_run_directory(dir.path()));
}

}  // namespace
}  // namespace cohort::test
