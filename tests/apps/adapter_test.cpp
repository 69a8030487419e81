// Commands with adapters: those that PEFT made (tests/reference/lora) and those of a run here.
#include <cmath>
#include <filesystem>

#include "data/safetensors.h"
#include "job/checkpoint.h"
#include "tests/apps/process.h"
#include "tests/apps/tiny_tokenizer.h"
#include "tests/job/small_configs.h"
#include "tests/support/tensor_files.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

const fs::path kReference = fs::path(__FILE__).parent_path().parent_path() / "reference";

class Adapters : public testing::Test {
 protected:
  Adapters() {
    fs::create_directory(base_);
    for (const char* file : {"config.json", "model.safetensors"})
      fs::copy(kReference / "families/llama" / file, base_ + "/" + file);
    write_file(base_ + "/tokenizer.json", kTokenizer);
    write_file(base_ + "/tokenizer_config.json", R"({"eos_token": "</s>"})");
    write_file(base_ + "/chat_template.jinja", "{{ messages[0].content }}");
    fs::copy(kReference / "lora/llama", adapter_);
    set_base(base_);
    write_file(dir_.path("lines.jsonl"),
               "{\"prompt\": \"ab\", \"answer\": \"c\"}\n{\"prompt\": \"cab\", \"answer\": "
               "\"b\"}\n");
    write_file(dir_.path("run.yaml"),
               "trainer: sft\nsteps: 2\nbatch_size: 2\nlearning_rate: 1e-2\noutput_dir: run\n"
               "max_completion_length: 4\nrewards: [{name: exact_match}]\n"
               "data: {jsonl: {path: lines.jsonl, held_out_fraction: 0}}\n");
  }
  void set_base(const std::string& base) const {
    const std::string path = adapter_ + "/adapter_config.json";
    Json json = json_of(path);
    write_file(path, json.set("base_model_name_or_path", base).dump());
  }
  // The directory of a run that has trained an adapter on `from`.
  std::string train(const std::string& from, const std::vector<std::string>& keys) const {
    std::vector<std::string> arguments{"train", dir_.path("run.yaml"),
                                       "output_dir=" + dir_.path("run"), "init_from=" + from};
    arguments.insert(arguments.end(), keys.begin(), keys.end());
    const Output output = run_cohort(arguments);
    EXPECT_EQ(output.code, 0) << output.err;
    return dir_.path("run");
  }
  static Output run(const std::vector<std::string>& arguments) {
    Output output = run_cohort(arguments);
    EXPECT_EQ(output.code, 0) << output.err;
    return output;
  }
  static std::vector<double> log_probs(const std::string& model,
                                       const std::vector<std::string>& options = {}) {
    std::vector<std::string> arguments{"logprobs", model, "abcabccba"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    std::vector<double> out;
    const Json line = parse_json(run(arguments).out, "");
    for (const Json& value : line.at("logprobs").as_array())
      if (!value.is_null()) out.push_back(value.as_double());
    return out;
  }
  static void expect_near(const std::vector<double>& a, const std::vector<double>& b) {
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-5);
  }

  const TempDir dir_;
  const std::string base_ = dir_.path("base"), adapter_ = dir_.path("adapter"),
                    out_ = dir_.path("out");
};

// The state of the output has the fingerprint of the base, too.
TEST_F(Adapters, AreSampledFromAndDistinguishedByTheirBase) {
  const auto sample = [&](const std::string& model) {
    return std::vector<std::string>{
        "sample", model, "--rewards", dir_.path("run.yaml"), "--problems", dir_.path("lines.jsonl"),
        "--num",  "4",   "--output",  dir_.path("out.jsonl")};
  };
  const Json counts = parse_json(run(sample(adapter_)).out, "");
  EXPECT_EQ(counts.at("completions").as_int(), 8);
  ASSERT_GT(counts.at("kept").as_int(), 0);
  expect_bad_input(run_cohort(sample(base_)), {"was written with another setting: model was "});
  const std::string config = adapter_ + "/adapter_config.json", before = read_file(config);
  Json json = json_of(config);
  write_file(config, json.set("lora_alpha", 5).dump());
  expect_bad_input(run_cohort(sample(adapter_)), {"was written with another setting: model was "});
  write_file(config, before);
  run(sample(adapter_));
  const std::string weights = base_ + "/model.safetensors";
  std::string bytes = read_file(weights);
  bytes[bytes.size() - 3] = static_cast<char>(bytes[bytes.size() - 3] ^ 1);  // a bit of a weight
  write_file(weights, bytes);
  expect_bad_input(run_cohort(sample(adapter_)), {"was written with another setting: model was "});
}

TEST_F(Adapters, AreModelsOfTheCommands) {
  const std::vector<double> adapted = log_probs(adapter_);
  EXPECT_NE(adapted, log_probs(base_));
  run({"generate", adapter_, "ab", "--max-tokens", "3"});
  const Output described = run({"inspect", adapter_});
  for (const char* text : {"rank                         3, output scaled by 2.33333 (alpha 7)",
                           "all linear layers of the blocks", "trainable parameters         1392"})
    EXPECT_NE(described.out.find(text), std::string::npos) << described.out;
  EXPECT_NE(described.out.find(base_), std::string::npos);
  // The base moves.
  const std::string moved = dir_.path("moved");
  fs::rename(base_, moved);
  for (const char* command : {"generate", "chat", "inspect", "logprobs"})
    expect_bad_input(run_cohort({command, adapter_}), {base_, "is no folder here", "--base DIR"});
  EXPECT_EQ(log_probs(adapter_, {"--base", moved}), adapted);
  run({"inspect", adapter_, "--base", moved});
  expect_bad_input(run_cohort({"generate", moved, "a", "--base", moved}), {"omit it"});
  for (const char* name : {"owner/model-bnb-4bit", "owner/model-GPTQ-Int4", "owner/model-AWQ"}) {
    set_base(name);
    expect_bad_input(run_cohort({"generate", adapter_, "a"}),
                     {name, "is quantized", "--base DIR of the 16-bit model (owner/model)"});
  }
  EXPECT_EQ(log_probs(adapter_, {"--base", moved}), adapted);
}

TEST_F(Adapters, AreExportedAloneOrMerged) {
  const std::vector<double> adapted = log_probs(adapter_);
  EXPECT_NE(run({"export", adapter_, out_}).out.find("an adapter of rank 3 of " + base_),
            std::string::npos);
  std::set<std::string> files;
  for (const auto& entry : fs::directory_iterator(out_)) files.insert(entry.path().filename());
  EXPECT_EQ(files, (std::set<std::string>{"adapter_config.json", "adapter_model.safetensors"}));
  EXPECT_EQ(log_probs(out_), adapted);
  fs::remove_all(out_);
  run({"export", adapter_, out_, "--dtype", "f16"});
  const SafetensorsFile halves(out_ + "/adapter_model.safetensors");
  for (const std::string& name : halves.names()) EXPECT_STREQ(halves.stored_dtype(name), "F16");
  fs::remove_all(out_);
  const Output merged = run({"export", adapter_, out_, "--merged"});
  EXPECT_NE(merged.out.find("merged: 3840 of the 3840 weights with adapters moved (100 %)"),
            std::string::npos)
      << merged.out;
  EXPECT_EQ(merged.out.find("KL"), std::string::npos);
  EXPECT_FALSE(path_exists(out_ + "/adapter_config.json"));
  expect_near(log_probs(out_), adapted);
  expect_bad_input(run_cohort({"export", out_, dir_.path("again"), "--merged"}),
                   {"is a whole model already; hint: omit --merged"});
  for (const std::string type : {"bf16", "f16"}) {
    fs::remove_all(out_);
    run({"export", adapter_, out_, "--merged", "--dtype", type});
    const SafetensorsFile file(out_ + "/model.safetensors");
    for (const std::string& name : file.names())
      EXPECT_STREQ(file.stored_dtype(name), type == "f16" ? "F16" : "BF16");
  }
  EXPECT_FALSE(path_exists(dir_.path("again")));
}

// Several adapters at once give what each gives alone.
TEST_F(Adapters, SeveralCompleteEachPrompt) {
  const int64_t rank = load_adapter_config(adapter_).lora.rank;
  const std::string other = dir_.path("other");
  fs::rename(train(base_, {str("lora.rank=", rank + 1)}), other);
  const std::string trained =
      train(base_, {str("lora.rank=", rank), "lora.alpha=9", "learning_rate=3e-2"});
  const auto generate = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"generate"});
    arguments.insert(arguments.end(), {"ab", "cab", "--max-tokens", "6"});
    return run_cohort(arguments);
  };
  const auto lines = [&](std::vector<std::string> arguments) {
    arguments.emplace_back("--json");
    const Output output = generate(arguments);
    EXPECT_EQ(output.code, 0) << output.err;
    std::vector<std::string> out;
    std::istringstream in(output.out);
    for (std::string line; std::getline(in, line);) out.push_back(line);
    return out;
  };
  // With ids and log-probs; the adapter's name is the last field.
  const auto named = [](std::string line, const std::string& name) {
    line.pop_back();
    return line + ",\"adapter\":\"" + name + "\"}";
  };
  const std::vector<std::string> one = lines({adapter_}), two = lines({trained});
  ASSERT_EQ(one.size(), 2u);
  EXPECT_NE(one, two);
  EXPECT_EQ(lines({base_, "--adapter", "one=" + adapter_, "--adapter", "two=" + trained}),
            (std::vector<std::string>{named(one[0], "one"), named(two[0], "two"),
                                      named(one[1], "one"), named(two[1], "two")}));
  const Output text = generate({base_, "--adapter", "x=" + adapter_, "--adapter", "y=" + trained});
  EXPECT_NE(text.out.find("--- prompt 2, y, sample 1 of 1"), std::string::npos) << text.out;
  expect_bad_input(generate({base_, "--adapter", "a=" + adapter_, "--adapter", "b=" + other}),
                   {other, "has another rank, or other modules"});
  expect_bad_input(generate({base_, "--adapter", adapter_}), {"expected NAME=DIR"});
  expect_bad_input(generate({base_, "--adapter", "a=" + base_}), {base_, "is no adapter"});
  write_file(adapter_ + "/precision.json", "{\"cache\": \"fp8\"}");
  expect_bad_input(generate({base_, "--adapter", "a=" + adapter_}), {"precision.cache: fp8"});
  write_file(adapter_ + "/precision.json", "{\"base\": \"int8\"}");
  expect_bad_input(generate({base_, "--adapter", "a=" + trained, "--adapter", "b=" + adapter_}),
                   {adapter_, "has a base in another format"});
  fs::remove(adapter_ + "/precision.json");
  expect_bad_input(generate({base_, "--adapter", "a=" + adapter_, "--adapter", "a=" + adapter_}),
                   {"the name a is given twice"});
  expect_bad_input(generate({adapter_, "--adapter", "a=" + adapter_}), {"is an adapter; hint"});
  std::vector<std::string> nine{base_};
  for (int i = 0; i < 9; ++i) nine.insert(nine.end(), {"--adapter", str(i, "=", adapter_)});
  expect_bad_input(generate(nine), {"expected at most 8 adapters, got 9"});
}

// An adapter that was trained with rounded keys and values computes with them.
TEST_F(Adapters, KeepTheirPrecision) {
  const std::vector<double> plain = log_probs(adapter_);
  write_file(adapter_ + "/precision.json", "{\"cache\": \"fp8\"}");
  const std::vector<double> rounded = log_probs(adapter_);
  EXPECT_NE(rounded, plain);
  run({"export", adapter_, out_});
  EXPECT_EQ(log_probs(out_), rounded);
  const std::string described = run({"inspect", out_}).out;
  EXPECT_NE(described.find("\n  cache  "), described.npos) << described;
  const std::string run_dir = train(base_, {"lora.rank=2", "precision.cache=fp8"});
  for (const char* merged : {"", "--merged"}) {
    fs::remove_all(out_);
    std::vector<std::string> arguments{"export", run_dir, out_};
    if (*merged != 0) arguments.push_back(merged);
    run(arguments);
    EXPECT_EQ(read_file(out_ + "/precision.json"), "{\"cache\": \"fp8\"}\n");
    if (*merged == 0) {
      EXPECT_EQ(log_probs(out_), log_probs(run_dir));
    }
  }
}

TEST_F(Adapters, AreMergedInTheDTypeThatWasTrained) {
  const std::string wide = dir_.path("wide");
  fs::rename(base_, wide);
  run({"export", wide, base_, "--dtype", "bf16"});
  run({"export", adapter_, out_, "--merged"});
  EXPECT_EQ(json_of(out_ + "/config.json").at("dtype").as_string(), "float32");
  EXPECT_STREQ(SafetensorsFile(out_ + "/model.safetensors").stored_dtype("lm_head.weight"), "F32");
  expect_near(log_probs(out_), log_probs(adapter_));
  const std::string half = dir_.path("half");
  run({"export", adapter_, half, "--dtype", "bf16"});
  run({"export", half, dir_.path("merged"), "--merged"});
  EXPECT_EQ(json_of(dir_.path("merged/config.json")).at("dtype").as_string(), "bfloat16");
}

TEST_F(Adapters, MergedNumbersThatAreNotFiniteAreRefused) {
  const std::string path = adapter_ + "/adapter_model.safetensors";
  NamedTensors tensors;
  {
    const SafetensorsFile file(path);
    for (const std::string& name : file.names()) tensors.emplace_back(name, file.read(name));
  }
  const auto expect_refused = [&](double a, double b, const std::vector<std::string>& dtypes) {
    for (auto& [name, value] : tensors) value.fill_(name.ends_with("lora_A.weight") ? a : b);
    write_safetensors(path, tensors);
    for (const std::string& dtype : dtypes) {
      expect_bad_input(run_cohort({"export", adapter_, out_, "--merged", "--dtype", dtype}),
                       {"the tensor 'model.layers.0."});
      EXPECT_FALSE(path_exists(out_));
    }
  };
  expect_refused(1e30, 1e30, {"f32", "bf16", "f16"});
  expect_refused(1.82e19, 2.6687e18, {"bf16", "f16"});  // about 3.4e38, beyond the largest of bf16
  expect_refused(1e3, 1e3, {"f16"});
  // A base that is not finite itself, where no adapter is.
  NamedTensors weights;
  {
    const SafetensorsFile file(base_ + "/model.safetensors");
    for (const std::string& name : file.names()) weights.emplace_back(name, file.read(name));
  }
  for (auto& [name, value] : weights)
    if (name == "model.norm.weight") value.fill_(NAN);
  write_safetensors(base_ + "/model.safetensors", weights);
  for (auto& [name, value] : tensors) value.fill_(0.5);
  write_safetensors(path, tensors);
  for (const char* dtype : {"f32", "bf16", "f16"})
    expect_bad_input(run_cohort({"export", adapter_, out_, "--merged", "--dtype", dtype}),
                     {"the tensor 'model.norm.weight' holds nan"});
}

TEST_F(Adapters, OfARunAreComparedWithTheMergedModelOnItsPrompts) {
  const std::string run_dir = train(base_, {"lora.rank=2", "lora.targets=[q_proj,down_proj]"});
  const std::vector<double> adapted = log_probs(run_dir);
  const Output merged = run({"export", run_dir, out_, "--merged"});
  for (const std::string& text :
       {std::string("weights with adapters moved ("), std::string("KL(unmerged || merged): "),
        "tokens of 2 training prompts of " + run_dir + "/config.yaml"})
    EXPECT_NE(merged.out.find(text), std::string::npos) << merged.out;
  expect_near(log_probs(out_), adapted);
  // Without the base the adapter alone can still be exported, but not merged.
  const std::string moved = dir_.path("moved");
  fs::rename(base_, moved);
  fs::remove_all(out_);
  run({"export", run_dir, out_});
  EXPECT_TRUE(path_exists(out_ + "/chat_template.jinja"));
  expect_bad_input(run_cohort({"export", run_dir, dir_.path("m"), "--merged"}), {"--base DIR"});
  EXPECT_EQ(log_probs(out_, {"--base", moved}), adapted);
  EXPECT_EQ(log_probs(run_dir, {"--base", moved}), adapted);
  run({"export", run_dir, dir_.path("m"), "--merged", "--base", moved});
  // Prompts that cannot be read are named, and the model is written.
  fs::remove(dir_.path("lines.jsonl"));
  const Output without = run({"export", run_dir, dir_.path("n"), "--merged", "--base", moved});
  EXPECT_NE(without.out.find("is not compared with the unmerged one: "), std::string::npos);
  EXPECT_NE(without.out.find("lines.jsonl"), std::string::npos);
  EXPECT_TRUE(path_exists(dir_.path("n/model.safetensors")));
}

TEST_F(Adapters, AreTrainedOn) {
  const std::string run_dir = train(adapter_, {"lora.rank=3", "lora.alpha=7"});
  EXPECT_NE(log_probs(run_dir), log_probs(adapter_));
  EXPECT_EQ(load_state(find_checkpoint(run_dir)).base.path, fs::canonical(base_).string());
  for (const std::vector<std::string>& parts :
       {std::vector<std::string>{"lora.rank=3", "lora.alpha: 32 was asked for"},
        std::vector<std::string>{"seed=1", "is an adapter of rank 3; hint: lora.rank=3"}})
    expect_bad_input(run_cohort({"train", dir_.path("run.yaml"), "init_from=" + adapter_,
                                 "output_dir=" + dir_.path("no"), parts[0]}),
                     {parts[1]});
  // A run resumes on its own base, and on no other.
  run({"train", "--resume", run_dir, "steps=3"});
  Json config = json_of(base_ + "/config.json");
  write_file(base_ + "/config.json", config.set("rms_norm_eps", 0.25).dump());
  const Output refused = run_cohort({"train", "--resume", run_dir, "steps=4"});
  EXPECT_EQ(refused.code, 2);
  EXPECT_NE(refused.err.find("is not the one that it was trained on"), std::string::npos);
}

}  // namespace
}  // namespace cohort::test
