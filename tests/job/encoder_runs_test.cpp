// Training of encoders: masked language models and classes of texts, on any ranks and micro
// batches, killed and resumed, from models with other heads.
#include <filesystem>
#include <iterator>
#include <sstream>

#include "job/evaluation.h"
#include "job/memory_plan.h"
#include "job/preview.h"
#include "nn/model_folder.h"
#include "sys/files.h"
#include "tests/job/small_runs.h"
#include "tests/support/png_file.h"
#include "text/tokenizers/bpe_trainer.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

constexpr const char* kEncoder =
    "model: {num_layers: 1, d_model: 16, num_heads: 2, context: 12, init_std: 0.1, mask: full,\n"
    "  norm_place: after, embedding_norm: yes, norm: layer_norm, position: learned, mlp: gelu,\n"
    "  bias: yes, tie_embeddings: yes, token_types: 2, dropout: 0.1}\n"
    "num_threads: 1\nlearning_rate: 1e-2\nwarmup_steps: 1\nsteps: 6\nbatch_size: 7\n";
const std::string kMlmRun =
    std::string(kEncoder) +
    "trainer: mlm\nmlm: {probability: 0.3}\n"
    "data: {text: text.txt, tokenizer_path: words, held_out_fraction: 0.2}\n";
const std::string kImageRun =
    "model: {num_layers: 1, d_model: 16, num_heads: 2, init_std: 0.1, mask: full, norm: "
    "layer_norm,\n"
    "  position: learned, mlp: gelu, bias: yes, image_size: 8, patch_size: 4, channels: 3}\n"
    "num_threads: 1\nlearning_rate: 1e-2\nwarmup_steps: 1\nsteps: 6\nbatch_size: 7\n"
    "trainer: classify\ndata: {images: {path: images, augment: crop_flip}, held_out_fraction: "
    "0.25}\n";
const std::string kClassRun =
    std::string(kEncoder) +
    "trainer: classify\ndata: {jsonl: {path: texts.jsonl, pair: '{pair}'}, tokenizer_path: words,\n"
    "  held_out_fraction: 0.25}\n";

// A tokenizer of the words of small_text() as BERT's, and pairs of texts whose label is the one
// that both begin with.
class EncoderRuns : public testing::Test {
 protected:
  EncoderRuns() {
    fs::create_directory(dir_.path("words"));
    std::string vocabulary = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n";
    for (const char* word : kWords) vocabulary += std::string(word) + "\n##" + word + "\n";
    write_file(dir_.path("words/vocab.txt"), vocabulary);
    Rng rng(3, rng_stream(kTestPurpose));
    const auto some = [&](int64_t n) {
      std::string out;
      for (int64_t i = 0; i < n; ++i)
        out += str(rng.below(4) == 0 ? "" : " ", kWords[rng.below(6)]);
      return out;
    };
    std::string lines;
    for (int i = 0; i < 80; ++i) {
      const std::string label = kWords[rng.below(3)];
      lines += Json(Json::Object{{"prompt", label + some(1 + rng.below(4))},
                                 {"pair", label + some(rng.below(5))},
                                 {"answer", "is " + label}})
                   .dump() +
               "\n";
    }
    write_file(dir_.path("texts.jsonl"), lines);
    // Images that are darker above or below, of another size than the model's.
    for (int i = 0; i < 60; ++i) {
      const bool top = i % 2 == 0;
      const std::string folder = dir_.path(top ? "images/top" : "images/under");
      fs::create_directories(folder);
      std::vector<std::string> rows(10);
      for (int y = 0; y < 10; ++y)
        for (int x = 0; x < 12 * 3; ++x)
          rows[static_cast<size_t>(y)] +=
              static_cast<char>((y < 5) == top ? rng.below(100) : 150 + rng.below(100));
      write_file(str(folder, "/", i, ".png"), PngFile{.height = 10, .width = 12}.bytes(rows));
    }
  }
  // With init_from the model and its tokenizer are those of another run.
  std::string train(const std::string& name, const std::string& yaml,
                    std::vector<std::string> overrides = {}) {
    if (!overrides.empty() && overrides[0].starts_with("init_from="))
      overrides.insert(overrides.end(), {"data.tokenizer_path=", "model={dropout: 0.1}"});
    return train_new(small_plan(dir_, name, yaml, overrides));
  }
  Json last_evaluation(const std::string& run) {
    Json last;
    for (Json& line : json_lines(run + "/metrics.jsonl"))
      if (line.find("eval") != nullptr) last = std::move(line);
    return last;
  }

  static constexpr const char* kWords[] = {"one", "two", "three", "four", "five", "and"};
  TempDir dir_;
};

TEST_F(EncoderRuns, AnUpdateDependsOnRanksAndMicroBatchesByRoundingOnly) {
  for (const std::string& yaml : {kMlmRun, kClassRun, kImageRun}) {
    SCOPED_TRACE(yaml);
    const std::vector<std::string> common{"adam_eps=1e-3", "dtype=f64"};
    const auto weights = [&](const std::string& variant) {
      std::vector<std::string> overrides = common;
      overrides.push_back(variant);
      return final_weights(train("run", yaml, overrides));
    };
    const Tensor one = weights("ranks=1");
    for (const char* variant : {"ranks=2", "ranks=3", "micro_batch_tokens=20"})
      EXPECT_LT(relative_error(weights(variant), one), 1e-12) << variant;
  }
}

TEST_F(EncoderRuns, AnInterruptedRunEndsWithTheBytesOfAnUninterruptedOne) {
  for (const std::string& yaml : {kMlmRun, kClassRun, kImageRun}) {
    const std::string whole = train("whole", yaml, {"eval.every=2"});
    const std::string run = train_interrupted(small_plan(dir_, "run", yaml, {"eval.every=2"}), 3);
    train_rest(run);
    for (const char* file : {"model.safetensors", "training/optimizer.safetensors", "config.json"})
      EXPECT_TRUE(checkpoint_bytes(run, file) == checkpoint_bytes(whole, file)) << file;
    for (const char* name : {"accuracy", "val_loss"})
      EXPECT_EQ(metric(last_evaluation(run), name), metric(last_evaluation(whole), name)) << name;
  }
}

TEST_F(EncoderRuns, LearnWhatTheyAreTaught) {
  const std::string run =
      train("classes", kClassRun, {"steps=150", "model.dropout=0", "eval.every=50", "seed=2"});
  const Json last = last_evaluation(run);
  EXPECT_GT(metric(last, "accuracy"), 0.9) << last.dump();
  EXPECT_LT(metric(last, "val_loss"), 0.5);
  EXPECT_GT(metric(last, "accuracy_stderr"), 0);
  const ModelConfig config = load_config(find_checkpoint(run));
  EXPECT_EQ(config.head, HeadType::kClasses);
  EXPECT_EQ(config.labels, (std::vector<std::string>{"is one", "is three", "is two"}));
  // The best checkpoint goes by accuracy, and eval.stop_at ends a run by it.
  const std::string stopped =
      train("stopped", kClassRun,
            {"steps=150", "model.dropout=0", "eval.every=5", "eval.stop_at=0.6", "seed=2"});
  EXPECT_LT(load_state(find_checkpoint(stopped)).step, 150);
  EXPECT_GE(metric(last_evaluation(stopped), "accuracy"), 0.6);
  // The evaluation of the saved model has the bits of that in the run.
  RunPlan plan = load_plan(run + "/config.yaml", {});
  const ModelScores scores = evaluate_model(plan, load_model(find_checkpoint(run), DType::kF32));
  EXPECT_EQ(scores.metrics.at("accuracy").as_double(), metric(last, "accuracy"));
  EXPECT_EQ(scores.metrics.at("val_loss").as_double(), metric(last, "val_loss"));
}

TEST_F(EncoderRuns, ClassesOfImagesAreLearned) {
  const std::string run =
      train("images", kImageRun, {"steps=60", "data.images.augment=none", "eval.every=60"});
  EXPECT_GT(metric(last_evaluation(run), "accuracy"), 0.9) << last_evaluation(run).dump();
  const std::string saved = find_checkpoint(run);
  const ModelConfig config = load_config(saved);
  EXPECT_EQ(config.labels, (std::vector<std::string>{"top", "under"}));
  EXPECT_EQ(parse_json(read_file(saved + "/config.json"), "").at("model_type").as_string(), "vit");
  const Json processor = parse_json(read_file(saved + "/preprocessor_config.json"), "");
  EXPECT_EQ(processor.at("size").at("height").as_int(), 8);
  const ModelScores scores =
      evaluate_model(load_plan(run + "/config.yaml", {}), load_model(saved, DType::kF32));
  EXPECT_EQ(scores.metrics.at("accuracy").as_double(), metric(last_evaluation(run), "accuracy"));
  // An image that cannot be read ends the run with its name.
  write_file(dir_.path("images/top/0.png"), "GIF89a");
  EXPECT_THROW_WITH(train("bad", kImageRun, {"steps=20"}), InputError, "images/top/0.png");
}

TEST_F(EncoderRuns, MaskedModelsLearnAndBecomeClassifiers) {
  const std::string mlm = train("mlm", kMlmRun, {"steps=30", "eval.every=10"});
  const auto losses = [&] {
    std::vector<double> out;
    for (const Json& line : json_lines(mlm + "/metrics.jsonl"))
      if (line.find("eval") != nullptr) out.push_back(metric(line, "val_loss"));
    return out;
  }();
  EXPECT_LT(losses.back(), losses.front() - 0.3);
  // [CLS] and [SEP] around a window of 10 tokens are no part of the text.
  std::istringstream text(small_text());
  const auto words = std::distance(std::istream_iterator<std::string>(text), {});
  const Json last = [&] {
    std::vector<Json> lines = json_lines(mlm + "/metrics.jsonl");
    std::erase_if(lines, [](const Json& line) { return line.find("eval") != nullptr; });
    return lines.back();
  }();
  EXPECT_NEAR(metric(last, "epoch"), 30 * 7 * 10 / (0.8 * static_cast<double>(words)), 0.1);
  EXPECT_EQ(load_config(find_checkpoint(mlm)).head, HeadType::kMaskedToken);
  // The blocks are those of the masked model, the head is new.
  const std::string classes =
      train("classes", kClassRun, {"init_from=" + mlm, "steps=1", "learning_rate=0"});
  const SafetensorsFile before(find_checkpoint(mlm) + "/model.safetensors"),
      after(find_checkpoint(classes) + "/model.safetensors");
  const char* kTable = "bert.embeddings.word_embeddings.weight";
  EXPECT_TRUE(bit_equal(before.read(kTable), after.read(kTable)));
  EXPECT_FALSE(before.contains("classifier.weight"));
  EXPECT_GT(norm(after.read("classifier.weight")), 0);
  EXPECT_NE(read_file(classes + "/log.txt").find("the head is new"), std::string::npos);
  // A model with classes keeps them for data with some of their labels.
  std::string lines;
  for (const std::string label : {"is three", "is one"})
    for (int i = 0; i < 5; ++i)
      lines += Json(Json::Object{{"prompt", str("one ", i)}, {"pair", "two"}, {"answer", label}})
                   .dump() +
               "\n";
  write_file(dir_.path("texts.jsonl"), lines);
  const std::string again =
      train("again", kClassRun,
            {"init_from=" + classes, "steps=1", "learning_rate=0", "data.held_out_fraction=0"});
  EXPECT_EQ(load_config(find_checkpoint(again)).labels.size(), 3u);
  EXPECT_TRUE(checkpoint_bytes(again) == checkpoint_bytes(classes));
  // Labels that are close to the model's are an error, others give a new head.
  write_file(dir_.path("texts.jsonl"),
             lines + "{\"prompt\": \"a\", \"pair\": \"b\", \"answer\": \"is onE\"}\n");
  EXPECT_THROW_WITH(train("typo", kClassRun, {"init_from=" + classes, "data.held_out_fraction=0"}),
                    InputError, "the label 'is onE' is none of the model's");
  write_file(dir_.path("texts.jsonl"),
             "{\"prompt\": \"a\", \"pair\": \"b\", \"answer\": 0}\n{\"prompt\": \"b\", \"pair\": "
             "\"\", \"answer\": 1}\n");
  const std::string other =
      train("other", kClassRun, {"init_from=" + classes, "steps=1", "data.held_out_fraction=0"});
  EXPECT_EQ(load_config(find_checkpoint(other)).labels, (std::vector<std::string>{"0", "1"}));
}

TEST_F(EncoderRuns, RefuseWhatDoesNotFit) {
  const auto expect = [&](const std::string& yaml, const std::vector<std::string>& overrides,
                          const std::string& message) {
    EXPECT_THROW_WITH(train("refused", yaml, overrides), InputError, message);
  };
  expect(kMlmRun, {"model.mask=causal"}, "model.mask: trainer mlm needs an encoder");
  expect(kMlmRun, {"trainer=pretrain"}, "model.mask: trainer pretrain needs a causal mask");
  expect(kMlmRun, {"model.window=4"}, "model.window: a full mask has none");
  expect(kMlmRun, {"mlm.mask=0.95"}, "mlm: mask + random is 1.05");
  expect(kMlmRun, {"data.tokenizer_path="}, "mask token");
  expect(kMlmRun, {"model.context=2"}, "model.context: 2 leaves 0 tokens of a text");
  expect(kMlmRun, {"model.context=1048579", "model.position=none"},
         "model.context: 1048579 leaves 1048577 tokens of a text beside 2 special ones; hint: ");
  expect(kClassRun, {"data.chat=yes"}, "data.");
  expect(kClassRun, {"data.jsonl.prompt="}, "data.jsonl: trainer classify needs texts");
  expect(kClassRun, {"model.token_types=1"}, ": the tokenizer gives a second text the type 1");
  expect(kImageRun, {"model.image_size=0", "model.patch_size=0"}, "model.image_size");
  expect(kImageRun, {"data.images.eval_path=images"}, "data.held_out_fraction");
  expect(kClassRun, {"data.jsonl.answer=always none"}, "only the label 'always none'");
  write_file(dir_.path("several.jsonl"),
             "{\"text\": \"a\", \"label\": \"x\"}\n{\"text\": \"b\", \"label\": [\"x\", \"y\"]}\n"
             "{\"text\": \"c\", \"label\": \"y\"}\n");
  expect(kClassRun,
         {"data.jsonl.path=" + dir_.path("several.jsonl"), "data.jsonl.prompt={text}",
          "data.jsonl.answer={label}", "data.jsonl.pair=", "data.held_out_fraction=0"},
         "several.jsonl:2: has several labels");
  for (const char* context : {"model.context=2", "model.context=3"})
    EXPECT_THROW_WITH(preview_plan(small_plan(dir_, "refused", kClassRun, {context})), InputError,
                      "special ones; hint: a larger model.context");
  const std::string mlm = train("mlm", kMlmRun, {"steps=1"});
  expect(kClassRun, {"init_from=" + mlm, "lora.rank=2"}, "gets a new head, which adapters do not");
  const std::string decoder =
      train_new(small_plan(dir_, "decoder", kSmallCommon + std::string(kSmallSft), {"steps=2"}));
  expect(kMlmRun, {"init_from=" + decoder}, "has a causal mask");
  expect(kSmallCommon + std::string(kSmallSft), {"init_from=" + mlm}, "is an encoder");
}

// A model that no family has, and one whose head is not tied to the table, get other heads.
TEST_F(EncoderRuns, ModelsOfOurOwnFormatGetOtherHeads) {
  const std::string own = train("own", kMlmRun, {"steps=1", "model.position=rope"});
  EXPECT_EQ(
      parse_json(read_file(find_checkpoint(own) + "/config.json"), "").at("model_type").as_string(),
      "cohort");
  const std::string classes = train("own2", kClassRun, {"init_from=" + own, "steps=1"});
  EXPECT_EQ(load_config(find_checkpoint(classes)).labels.size(), 3u);
  const std::string untied =
      train("untied", kClassRun, {"steps=1", "model.tie_embeddings=no", "model.num_layers=2"});
  const std::string masked = train("masked", kMlmRun, {"init_from=" + untied, "steps=1"});
  EXPECT_TRUE(load_model(find_checkpoint(masked), DType::kF32).model->config().is_tied());
}

TEST_F(EncoderRuns, ResumedRunsKeepTheirLabels) {
  const std::string run = train_interrupted(small_plan(dir_, "run", kClassRun), 2);
  std::string lines = read_file(dir_.path("texts.jsonl"));
  for (size_t at = 0; (at = lines.find("is ", at)) != lines.npos; at += 3) lines[at + 1] = 'S';
  write_file(dir_.path("texts.jsonl"), lines);
  EXPECT_THROW_WITH(train_rest(run), InputError, "the labels of the data are not those");
}

TEST_F(EncoderRuns, AllOfAFileMayBeEvaluated) {
  const std::string run = train("run", kClassRun, {"steps=1"});
  const std::vector<std::string> all{"data.held_out_fraction=1"};
  const ModelScores scores = evaluate_model(load_plan(run + "/config.yaml", all),
                                            load_model(find_checkpoint(run), DType::kF32));
  EXPECT_GT(scores.metrics.at("accuracy_stderr").as_double(), 0);
}

TEST_F(EncoderRuns, AdaptersTrainAnEncoderWithItsHead) {
  const std::string whole = train("whole", kClassRun, {"steps=4"});
  const std::string run =
      train("lora", kClassRun, {"init_from=" + whole, "lora.rank=2", "steps=4"});
  EXPECT_TRUE(path_exists(find_checkpoint(run) + "/adapter_config.json"));
}

TEST_F(EncoderRuns, EvaluationsOfATextHaveEqualMasks) {
  const std::string run = train("run", kMlmRun, {"learning_rate=0", "eval.every=2", "seed=4"});
  std::vector<double> losses;
  for (const Json& line : json_lines(run + "/metrics.jsonl"))
    if (line.find("eval") != nullptr) losses.push_back(metric(line, "val_loss"));
  ASSERT_EQ(losses.size(), 4u);
  for (const double loss : losses) EXPECT_EQ(loss, losses[0]);
}

TEST_F(EncoderRuns, PlansCountTheTargetsOfAStep) {
  const auto step = [&](const std::string& yaml) {
    RunPlan plan = small_plan(dir_, "plan", yaml);
    const StagePreview stage = std::move(preview_plan(plan)[0]);
    return step_size(plan.stages[0], stage, 1);
  };
  EXPECT_EQ(step(kMlmRun).memory.targets, 0.3);
  // One of each of the 7 sequences.
  for (const std::string& yaml : {kClassRun, kImageRun}) {
    const StepSize size = step(yaml);
    EXPECT_NEAR(size.memory.targets * static_cast<double>(size.tokens), 7, 0.2) << yaml;
  }
}

// Lines of a file of real data whose field `split` is `part`.
std::string part_of(const std::string& path, const std::string& part) {
  std::string out;
  for (const Json& line : json_lines(path))
    if (line.at("split").as_string() == part) out += line.dump() + "\n";
  return out;
}

// PyTorch, three seeds: 0.914, 0.897, 0.928.
TEST(EncodersSlow, LearnDigits) {
  COHORT_REQUIRE_DATA(data);
  const TempDir dir;
  const std::string digits = data + "/encoder/digits.jsonl";
  write_file(dir.path("train.jsonl"), part_of(digits, "train"));
  write_file(dir.path("test.jsonl"), part_of(digits, "test"));
  const std::string run = train_new(small_plan(
      dir, "digits",
      "trainer: classify\nsteps: 300\nbatch_size: 128\nlearning_rate: 1e-3\nwarmup_steps: 60\n"
      "weight_decay: 0.05\nnum_threads: 2\n"
      "model: {mask: full, norm: layer_norm, position: learned, mlp: gelu, bias: yes,\n"
      "  num_layers: 4, d_model: 64, num_heads: 4, image_size: 8, patch_size: 2, channels: 1}\n"
      "data: {images: {path: train.jsonl, eval_path: test.jsonl}}\n"
      "eval: {at_start: no}\n"));
  const std::vector<Json> lines = json_lines(run + "/metrics.jsonl");
  EXPECT_GE(metric(lines.back(), "accuracy"), 0.88) << lines.back().dump();
}

// Unigrams: 6.04; this run: 5.60.
TEST(EncodersSlow, LearnMaskedWordsOfShakespeare) {
  COHORT_REQUIRE_DATA(data);
  const TempDir dir;
  const std::string text = data + "/tinyshakespeare/input.txt";
  BpeTrainer trainer({.vocab_size = 1024, .special = {"<|endoftext|>", "<mask>"}});
  trainer.add_text(read_file(text));
  const NamedFiles files = trainer.train();
  fs::create_directory(dir.path("bpe"));
  for (const auto& [name, content] : files) write_file(dir.path("bpe/" + name), content);
  const std::string run = train_new(
      small_plan(dir, "mlm",
                 "trainer: mlm\nsteps: 600\nbatch_size: 16\nlearning_rate: 2e-3\nwarmup_steps: 60\n"
                 "weight_decay: 0.01\nadam_beta2: 0.98\nnum_threads: 2\n"
                 "model: {mask: full, norm_place: after, embedding_norm: yes, norm: layer_norm,\n"
                 "  position: learned, mlp: gelu, bias: yes, tie_embeddings: yes, num_layers: 2,\n"
                 "  d_model: 128, num_heads: 4, context: 128}\n"
                 "data: {tokenizer_path: bpe, text: " +
                     text + "}\neval: {at_start: no}\n"));
  EXPECT_LE(metric(json_lines(run + "/metrics.jsonl").back(), "val_loss"), 5.75);
}

}  // namespace
}  // namespace cohort::test
