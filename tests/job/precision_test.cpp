// Runs whose keys and values are rounded to e4m3 (precision.cache: fp8).
#include <filesystem>

#include "sys/files.h"
#include "tests/job/small_runs.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

class Precision : public testing::Test {
 protected:
  RunPlan plan(const std::string& name, const std::string& trainer,
               std::vector<std::string> overrides = {}) {
    overrides.insert(overrides.begin(), "precision.cache=fp8");
    return small_plan(dir_, name, kSmallCommon + trainer, overrides);
  }
  TempDir dir_;
};

TEST_F(Precision, TheRatioIsExactlyOne) {
  for (const std::string precision : {"precision.cache=fp8", "precision.attention=fp8"})
    for (const std::string lora : {"lora.rank=0", "lora.rank=3"}) {
      std::vector<std::string> overrides{precision, lora, "beta=0.1"};
      const std::string name = precision + lora;
      if (lora == "lora.rank=3")
        overrides.push_back("init_from=" + train_new(plan("base" + name, kSmallSft, {precision})));
      const std::string run = train_new(plan(name, kSmallGrpo, overrides));
      size_t steps = 0;
      for (const Json& line : json_lines(run + "/metrics.jsonl")) {
        if (line.find("ratio_deviation") == nullptr) continue;
        EXPECT_EQ(metric(line, "ratio_deviation"), 0) << name;
        ++steps;
      }
      EXPECT_EQ(steps, 4u) << name;
    }
}

// `attention` says `cache` too, and the other way round it does not.
TEST_F(Precision, AttentionIsPartOfAModel) {
  const std::string fp8 = "precision.attention=fp8";
  const std::string whole = train_new(plan("whole", kSmallSft, {"precision.cache=bf16", fp8})),
                    cached = train_new(plan("cached", kSmallSft)),
                    rest = train_interrupted(plan("rest", kSmallSft, {fp8}), 2);
  EXPECT_NE(checkpoint_bytes(cached), checkpoint_bytes(whole));
  EXPECT_THROW_WITH(train_rest(rest, {"precision.attention=bf16"}), InputError,
                    "precision.attention: the run has bf16, but the model of");
  train_rest(rest, {"precision.cache=bf16"});
  EXPECT_EQ(checkpoint_bytes(rest), checkpoint_bytes(whole));
  EXPECT_EQ(read_file(find_checkpoint(whole) + "/precision.json"),
            "{\"cache\": \"fp8\", \"attention\": \"fp8\"}\n");
  const LoadedModel loaded = load_model(find_checkpoint(whole), DType::kF32);
  EXPECT_TRUE(loaded.model->config().precision.rounds_queries());
  EXPECT_THROW_WITH(train_new(plan("dropped", kSmallSft, {fp8, "model.dropout=0.1"})), InputError,
                    "precision.attention: fp8 needs dropout: 0, got 0.1; hint: remove the key "
                    "precision.attention");
  {
    const ExpectLog lost("was trained with fp8; hint: precision.attention=fp8");
    train_new(plan("lost", kSmallSft, {"init_from=" + whole}));
  }
  train_new(plan("gained", kSmallSft, {fp8, "init_from=" + cached}));  // without a warning
  EXPECT_THROW_WITH(loaded.model->config().check_device(Device::cuda(), DType::kF32), InputError,
                    "precision.attention: fp8 on a GPU needs dtype: bf16, got f32");
  EXPECT_NO_THROW(loaded.model->config().check_gpu(Device{}, DType::kBF16));
  EXPECT_NO_THROW(loaded.model->config().check_gpu(90, DType::kBF16));
  EXPECT_THROW_WITH(loaded.model->config().check_gpu(89, DType::kBF16), InputError,
                    "needs a GPU of compute capability 9.0 (H100, H200), got 8.9; hint");
}

// The weights differ from those of keys that are not rounded, and resuming does not change them.
TEST_F(Precision, ARunResumesWithTheSameBits) {
  for (const char* trainer : {kSmallSft, kSmallGrpo}) {
    const std::string name = trainer == kSmallSft ? "sft" : "grpo";
    const std::string whole = train_new(plan(name, trainer)),
                      rest = train_interrupted(plan(name + "-rest", trainer), 2),
                      plain = train_new(plan(name + "-plain", trainer, {"precision.cache=bf16"}));
    train_rest(rest);
    EXPECT_EQ(checkpoint_bytes(rest), checkpoint_bytes(whole)) << name;
    EXPECT_NE(checkpoint_bytes(plain), checkpoint_bytes(whole)) << name;
    EXPECT_FALSE(fs::exists(find_checkpoint(plain) + "/precision.json"));
  }
}

TEST_F(Precision, AResumeWithAnotherIsRefused) {
  const std::string run = train_interrupted(plan("run", kSmallSft), 2);
  EXPECT_THROW_WITH(train_rest(run, {"precision.cache=bf16"}), InputError,
                    "hint: leave it out, or start a new run");
  train_rest(run);
  const std::string plain = train_interrupted(plan("f32", kSmallSft, {"precision.cache=bf16"}), 2);
  EXPECT_THROW_WITH(train_rest(plain, {"precision.cache=fp8"}), InputError,
                    "trained without rounded keys; hint: leave it out");
}

// A checkpoint's model computes as it was trained.
TEST_F(Precision, ModelsRememberIt) {
  const std::string run = train_new(plan("run", kSmallSft)), at = find_checkpoint(run);
  const LoadedModel loaded = load_model(at, DType::kF32);
  const Transformer& model = *loaded.model;
  EXPECT_TRUE(model.config().precision.rounds_keys());
  EXPECT_EQ(model.cache_dtype(), DType::kF32);
  EXPECT_EQ(cache_dtype(model.config(), DType::kBF16), DType::kE4M3);
  write_file(at + "/precision.json", "{\"cache\": \"fp4\"}");
  EXPECT_THROW_WITH(load_model(at, DType::kF32), InputError, "fp4");
  write_file(at + "/precision.json", "{\"cache\": \"fp8\", \"values\": 1}");
  EXPECT_THROW_WITH(load_model(at, DType::kF32), InputError, "values");
}

// A file that says nothing is damaged: a model with the defaults has none.
TEST_F(Precision, AFileThatDoesNotSayIsRefused) {
  const std::string file = dir_.path("precision.json");
  EXPECT_FALSE(load_precision(dir_.path("")).rounds_keys());
  for (const std::string& text : {std::string(), std::string("null"), std::string("\xff\xfe\0", 3),
                                  std::string("{\"cache\": null}"), std::string("{}")}) {
    write_file(file, text);
    EXPECT_THROW_WITH(load_precision(dir_.path("")), InputError, "precision.json: ");
  }
  fs::remove(file);
  fs::create_symlink(dir_.path("nothing"), file);
  EXPECT_THROW_WITH(load_precision(dir_.path("")), InputError, "precision.json");
}

TEST_F(Precision, AStartFromAModelWithAnotherIsNoted) {
  const std::string rounded = train_new(plan("rounded", kSmallSft)),
                    plain = train_new(plan("plain", kSmallSft, {"precision.cache=bf16"}));
  const auto log_of = [&](const std::string& name, const std::string& from,
                          const std::string& cache) {
    return read_file(train_new(plan(name, kSmallSft, {"init_from=" + from, cache})) + "/log.txt");
  };
  {
    const ExpectLog lost("precision.cache: the run has bf16, but the model of " +
                         find_checkpoint(rounded) +
                         " was trained with fp8; hint: precision.cache=fp8");
    log_of("lost", rounded, "precision.cache=bf16");
  }
  const std::string gained = log_of("gained", plain, "precision.cache=fp8");
  EXPECT_NE(gained.find("was trained without rounded keys"), gained.npos) << gained;
  for (const auto& [name, from, cache] :
       {std::tuple{"fp8", rounded, "precision.cache=fp8"}, {"bf16", plain, "precision.cache=bf16"}})
    EXPECT_EQ(log_of(name, from, cache).find("precision.cache: "), std::string::npos) << name;
}

// Before there is a run directory, and by the file where that one says it.
TEST_F(Precision, ARefusalLeavesNoRunAndNamesItsOrigin) {
  const std::string branch = "model.norm_place=branch",
                    expected = "precision.cache: fp8 needs a norm before keys and values";
  EXPECT_THROW_WITH(train_new(plan("new", kSmallSft, {branch})), InputError, expected);
  const std::string run = train_new(plan("plain", kSmallSft, {"precision.cache=bf16", branch}));
  EXPECT_THROW_WITH(train_new(plan("next", kSmallSft, {"init_from=" + run})), InputError, expected);
  for (const char* name : {"new", "next"}) EXPECT_FALSE(fs::exists(dir_.path(name)));
  const std::string at = find_checkpoint(run);
  write_file(at + "/precision.json", "{\"cache\": \"fp8\"}");
  EXPECT_THROW_WITH(load_model(at, DType::kF32), InputError,
                    at + "/precision.json: cache: fp8 needs a norm before keys");
  EXPECT_THROW_WITH(load_model(at, DType::kF32), InputError, "; hint: remove the file to compute");
}

TEST_F(Precision, ModelsWithoutABoundAreRefused) {
  ModelConfig config{.num_layers = 1, .d_model = 192, .num_heads = 2, .vocab_size = 9};
  config.precision.cache = CachePrecision::kFp8;
  config.resolve();
  check_precision(config, DType::kF32);
  EXPECT_THROW_WITH(check_precision(config, DType::kBF16), InputError, "in bf16, got 96");
  config.norm_place = NormPlace::kBranch;
  EXPECT_THROW_WITH(check_precision(config, DType::kF32), InputError,
                    "hint: remove the key precision.cache");
  config.norm_place = NormPlace::kBefore;
  config.rotary_fraction = 0.5;
  EXPECT_THROW_WITH(check_precision(config, DType::kF32), InputError,
                    "precision.cache: fp8 does not support gates of attention");
  config.rotary_fraction = 1;
  config.attention_gate = true;
  EXPECT_THROW_WITH(check_precision(config, DType::kF32), InputError, "model.attention_gate");
  config.mask = MaskType::kFull;
  EXPECT_THROW_WITH(check_precision(config, DType::kF32), InputError, "is an encoder");
}

}  // namespace
}  // namespace cohort::test
