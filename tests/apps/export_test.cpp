// `cohort export`: a model alone, as a folder that vLLM, SGLang and transformers load.
#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <set>

#include "data/safetensors.h"
#include "tests/apps/process.h"
#include "tests/apps/tiny_tokenizer.h"
#include "tests/job/small_configs.h"
#include "tests/support/tensor_files.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

const fs::path kFamilyFolders =
    fs::path(__FILE__).parent_path().parent_path() / "reference/families";

std::set<std::string> names_in(const std::string& folder) {
  std::set<std::string> out;
  for (const auto& entry : fs::directory_iterator(folder)) out.insert(entry.path().filename());
  return out;
}

class Export : public testing::Test {
 protected:
  Export() { make_model("qwen2"); }
  void make_model(const char* family) {
    fs::remove_all(model_);
    fs::create_directory(model_);
    for (const char* file : {"config.json", "generation_config.json", "model.safetensors"})
      fs::copy(kFamilyFolders / family / file, model_ + "/" + file);
    write_file(model_ + "/tokenizer.json", kTokenizer);
    write_file(model_ + "/tokenizer_config.json", R"({"eos_token": "</s>"})");
    write_file(model_ + "/chat_template.jinja", "{{ messages[0].content }}");
    write_file(dir_.path("lines.jsonl"), "{\"prompt\": \"ab\", \"answer\": \"c\"}\n");
    write_file(dir_.path("run.yaml"),
               "trainer: sft\nsteps: 2\nbatch_size: 1\nlearning_rate: 1e-2\noutput_dir: run\n"
               "max_completion_length: 4\nrewards: [{name: exact_match}]\n"
               "data: {jsonl: {path: lines.jsonl, held_out_fraction: 0}}\n");
  }
  void train(const std::string& run, const std::string& from) const {
    const Output output = run_cohort(
        {"train", dir_.path("run.yaml"), "output_dir=" + dir_.path(run), "init_from=" + from});
    ASSERT_EQ(output.code, 0) << output.err;
  }
  std::string saved(const std::string& run) const {
    return dir_.path(run) + "/checkpoints/step-00000002";
  }
  // Exports to `out_`, which it replaces.
  Output write(const std::string& model, const std::vector<std::string>& options = {}) const {
    fs::remove_all(out_);
    std::vector<std::string> arguments{"export", model, out_};
    arguments.insert(arguments.end(), options.begin(), options.end());
    return run_cohort(arguments);
  }
  // The types of the exported tensors, and what config.json says.
  std::string written_type() const {
    const SafetensorsFile file(out_ + "/model.safetensors");
    std::set<std::string> types;
    for (const std::string& name : file.names()) types.insert(file.stored_dtype(name));
    const Json config = json_of(out_ + "/config.json");
    EXPECT_EQ(types.size(), 1u);
    EXPECT_EQ(config.find("source_dtype"), nullptr);
    const Json* dtype = config.find("dtype");
    return *types.begin() + " " +
           (dtype != nullptr ? *dtype : config.at("torch_dtype")).as_string();
  }

  TempDir dir_;
  const std::string model_ = dir_.path("model"), out_ = dir_.path("out");
};

TEST_F(Export, OfARunIsTheModelAloneForServers) {
  for (const char* family : {"qwen2", "gpt2", "phi3", "llama_biases_tied"}) {
    SCOPED_TRACE(family);
    make_model(family);
    fs::remove_all(dir_.path("run"));
    train("run", model_);
    const Output output = write(dir_.path("run"));
    ASSERT_EQ(output.code, 0) << output.err;
    EXPECT_EQ(output.out.rfind(out_ + ": ", 0), 0u) << output.out;
    EXPECT_EQ(
        names_in(out_),
        (std::set<std::string>{"config.json", "generation_config.json", "model.safetensors",
                               "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}));
    std::vector<std::string> names = SafetensorsFile(model_ + "/model.safetensors").names();
    std::sort(names.begin(), names.end());
    EXPECT_EQ(served_tensors(out_), names);
    EXPECT_EQ(served_tensors(saved("run")), names);
    for (const char* file : {"model.safetensors", "config.json", "chat_template.jinja"})
      EXPECT_EQ(read_file(out_ + "/" + file), read_file(saved("run") + "/" + file)) << file;
    EXPECT_EQ(run_cohort({"logprobs", out_, "abc"}).out,
              run_cohort({"logprobs", dir_.path("run"), "abc"}).out);
    // A checkpoint and the folder that a model came from are exported alike.
    EXPECT_EQ(write(saved("run")).code, 0);
    EXPECT_EQ(write(model_).code, 0);
    EXPECT_EQ(served_tensors(out_), names);
  }
}

TEST_F(Export, OfANewModelIsServedToo) {
  write_file(dir_.path("new.yaml"),
             std::string(kSmallModel) + kSmallData + kSmallSft + "output_dir: new\n");
  ASSERT_EQ(run_cohort({"train", dir_.path("new.yaml")}).code, 0);
  const Output output = write(dir_.path("new"));
  ASSERT_EQ(output.code, 0) << output.err;
  EXPECT_EQ(written_type(), "F32 float32");
  EXPECT_EQ(served_tensors(out_), served_tensors(find_checkpoint(dir_.path("new"))));
  EXPECT_EQ(run_cohort({"generate", out_, "1+1=", "--temperature=0"}).out,
            run_cohort({"generate", dir_.path("new"), "1+1=", "--temperature=0"}).out);
}

TEST_F(Export, EachDTypeHoldsTheRoundedNumbers) {
  const SafetensorsFile before(model_ + "/model.safetensors");
  for (const auto& [option, type, bits] : {std::tuple{"bf16", "BF16 bfloat16", 8},
                                           {"f16", "F16 float16", 11},
                                           {"f32", "F32 float32", 24}}) {
    SCOPED_TRACE(option);
    const Output output = write(model_, {std::string("--dtype=") + option});
    ASSERT_EQ(output.code, 0) << output.err;
    EXPECT_EQ(written_type(), type);
    const SafetensorsFile after(out_ + "/model.safetensors");
    double largest = 0;
    for (const std::string& name : before.names()) {
      const auto x = before.read(name).to_vector<double>(),
                 y = after.read(name).to_vector<double>();
      ASSERT_EQ(x.size(), y.size());
      for (size_t i = 0; i < x.size(); ++i) {
        // Half a unit in the last of `bits` binary digits; the step of subnormal halves is 2^-24.
        const double half_unit = x[i] == 0 ? 0 : std::ldexp(1.0, std::ilogb(x[i]) - bits);
        ASSERT_LE(std::abs(x[i] - y[i]), std::max(half_unit, std::ldexp(1.0, -25))) << name;
        largest = std::max(largest, std::abs(x[i] - y[i]));
      }
    }
    EXPECT_EQ(largest > 0, bits < 24);
    EXPECT_EQ(run_cohort({"logprobs", out_, "abc"}).code, 0);
  }
}

// A run in f32 of a model that came in 16 bits is not rounded.
TEST_F(Export, TheDefaultIsTheDTypeThatWasTrained) {
  for (const auto& [option, type] : {std::pair("f16", "F16 float16"), {"bf16", "BF16 bfloat16"}}) {
    SCOPED_TRACE(option);
    make_model("qwen2");
    for (const char* folder : {"came", "first", "second"}) fs::remove_all(dir_.path(folder));
    ASSERT_EQ(write(model_, {std::string("--dtype=") + option}).code, 0);
    const std::string came = dir_.path("came");
    fs::rename(out_, came);
    // Both names of the dtype, of which the older one is left in files.
    Json config = json_of(came + "/config.json");
    write_file(came + "/config.json", config.set("torch_dtype", config.at("dtype")).dump());
    train("first", came);
    train("second", dir_.path("first"));
    for (const char* run : {"first", "second"}) {
      for (const std::string& folder : {saved(run), out_}) {
        if (folder == out_) {
          const Output output = write(dir_.path(run));
          ASSERT_EQ(output.code, 0) << output.err;
          EXPECT_EQ(output.out, str(out_, ": 5008 parameters in float32\n"));
          EXPECT_EQ(written_type(), "F32 float32");
        }
        const Json saved_config = json_of(folder + "/config.json");
        EXPECT_EQ(saved_config.at("dtype").as_string(), "float32");
        EXPECT_EQ(saved_config.at("torch_dtype").as_string(), "float32");
      }
      EXPECT_EQ(read_file(out_ + "/model.safetensors"),
                read_file(saved(run) + "/model.safetensors"));
    }
    ASSERT_EQ(write(came).code, 0);
    EXPECT_EQ(written_type(), type);
    EXPECT_EQ(read_file(out_ + "/model.safetensors"), read_file(came + "/model.safetensors"));
  }
}

// The number before `text` in an output.
double number_before(const std::string& out, const std::string& text) {
  const size_t end = out.find(text);
  if (end == out.npos) return NAN;
  const size_t begin = out.find_last_of(" (", end - 1) + 1;
  return std::stod(out.substr(begin, end - begin));
}

TEST_F(Export, RoundingSaysWhatItKeepsOfTheChangesAndHowFarTheModelMoves) {
  ASSERT_EQ(write(model_, {"--dtype=bf16"}).code, 0);
  const std::string came = dir_.path("came");
  fs::rename(out_, came);
  const Output trained = run_cohort({"train", dir_.path("run.yaml"), "learning_rate=1e-5",
                                     "output_dir=" + dir_.path("run"), "init_from=" + came});
  ASSERT_EQ(trained.code, 0) << trained.err;
  const SafetensorsFile before(came + "/model.safetensors"),
      after(saved("run") + "/model.safetensors");
  for (const auto& [option, type] : {std::pair("bf16", DType::kBF16), {"f16", DType::kF16}}) {
    SCOPED_TRACE(option);
    int64_t changed = 0, kept = 0;
    for (const std::string& name : after.names()) {
      const auto values = [&](const Tensor& t) { return t.to(DType::kF32).to_vector<double>(); };
      const Tensor a = before.read(name), b = after.read(name);
      const auto x = values(a), y = values(b), rx = values(a.to(DType::kF32).to(type)),
                 ry = values(b.to(type));
      for (size_t i = 0; i < x.size(); ++i) {
        changed += x[i] != y[i] ? 1 : 0;
        kept += rx[i] != ry[i] ? 1 : 0;
      }
    }
    const Output output = write(dir_.path("run"), {std::string("--dtype=") + option});
    ASSERT_EQ(output.code, 0) << output.err;
    EXPECT_LT(kept, changed / 2);
    EXPECT_NE(output.out.find(str("rounded: ", kept, " of the ", changed,
                                  " weights that training "
                                  "has changed differ in ")),
              output.out.npos)
        << output.out;
    EXPECT_NEAR(number_before(output.out, " %)") / 100,
                static_cast<double>(kept) / static_cast<double>(changed), 1e-4);
    EXPECT_NE(output.out.find("KL(trained || exported): "), output.out.npos) << output.out;
    EXPECT_NE(output.out.find("tokens of 1 training prompts of "), output.out.npos);
    // A checkpoint alone has no run to compare with; neither has a folder.
    const Output folder = write(model_, {std::string("--dtype=") + option});
    EXPECT_EQ(folder.out, str(out_, ": 5008 parameters in ",
                              option == std::string("f16") ? "float16" : "bfloat16", "\n"));
  }
  // The start of the run is damaged, or gone: the model is written, and the reason is said.
  write_file(came + "/model.safetensors", "damaged");
  for (int i = 0; i < 2; ++i) {
    const Output without = write(dir_.path("run"), {"--dtype=bf16"});
    EXPECT_EQ(without.code, 0) << without.err;
    EXPECT_NE(without.out.find("the changes that rounding keeps are not counted: "),
              without.out.npos)
        << without.out;
    EXPECT_NE(without.out.find(came), without.out.npos) << without.out;
    fs::remove_all(came);
  }
}

TEST_F(Export, WeightsThatAreNotFiniteAreRefused) {
  const auto fill = [&](double value) {
    NamedTensors tensors;
    {
      const SafetensorsFile file(model_ + "/model.safetensors");
      for (const std::string& name : file.names()) tensors.emplace_back(name, file.read(name));
    }
    tensors.back().second.fill_(value);
    write_safetensors(model_ + "/model.safetensors", tensors);
  };
  const auto before = names_in(dir_.path(""));
  for (const double value : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    fill(value);
    for (const char* dtype : {"f32", "bf16", "f16"})
      expect_bad_input(write(model_, {std::string("--dtype=") + dtype}), {"the tensor '"});
    const Output output = run_cohort({"logprobs", model_, "abc"});
    EXPECT_EQ(output.code, 1);
    EXPECT_EQ(output.out, "");
    EXPECT_NE(output.err.find("the log-prob of token 1 is "), output.err.npos) << output.err;
  }
  fill(3.4e38);
  expect_bad_input(write(model_, {"--dtype=bf16"}), {"' holds inf as BF16; hint: --dtype f32"});
  EXPECT_EQ(names_in(dir_.path("")), before);
}

// A server stops at the end of a turn, which the tokenizer's end of sequence is not.
TEST_F(Export, ModelsTrainedOnConversationsNameTheEndOfATurn) {
  for (const char* const base :
       {R"({"eos_token_id": 2, "top_k": 7, "pad_token_id": 0})", R"({"eos_token_id": [0, 3]})", ""})
    for (const char* trainer : {"sft", "grpo"}) {
      SCOPED_TRACE(str(base, " ", trainer));
      fs::remove_all(dir_.path("run"));
      fs::remove(model_ + "/generation_config.json");
      if (*base != 0) write_file(model_ + "/generation_config.json", base);
      // c (3) ends a turn, as a token of its own.
      Json tokenizer = parse_json(kTokenizer, "");
      Json::Array added = tokenizer.at("added_tokens").as_array();
      added.push_back(Json(added[0]).set("id", 3).set("content", "c"));
      write_file(model_ + "/tokenizer.json", tokenizer.set("added_tokens", added).dump());
      write_file(model_ + "/chat_template.jinja",
                 "{% for m in messages %}{{ m.content }}c{% endfor %}");
      const Output trained = run_cohort(
          {"train", dir_.path("run.yaml"), std::string("trainer=") + trainer, "data.chat=true",
           "num_generations=2", "output_dir=" + dir_.path("run"), "init_from=" + model_});
      ASSERT_EQ(trained.code, 0) << trained.err;
      ASSERT_EQ(write(dir_.path("run")).code, 0);
      for (const std::string& folder : {saved("run"), out_}) {
        const Json json = json_of(folder + "/generation_config.json");
        // Without the file, the ids are those of config.json.
        const std::string expected =
            std::string(base).starts_with("{\"eos_token_id\": [") ? "[0,3]" : "[0,2,3]";
        EXPECT_EQ(json.find("top_k") != nullptr, std::strstr(base, "top_k") != nullptr);
        EXPECT_EQ(json.find("pad_token_id") != nullptr, std::strstr(base, "pad") != nullptr);
        EXPECT_EQ(json.at("eos_token_id").dump(), expected);
        EXPECT_EQ(load_tokenizer(folder)->stop_ids().size(), expected.size() / 2);
        EXPECT_EQ(load_tokenizer(folder)->eos_id(), 0);
      }
      // Runs resume, also with the tokenizer named, and other data leaves the file as it is.
      for (const char* key : {"steps=3", "data.tokenizer_path="}) {
        const Output resumed = run_cohort({"train", "--resume", dir_.path("run"), "steps=3",
                                           key == std::string("steps=3") ? key : key + model_});
        EXPECT_EQ(resumed.code, 0) << resumed.err;
      }
    }
  train("plain", model_);
  EXPECT_FALSE(fs::exists(saved("plain") + "/generation_config.json"));
}

TEST_F(Export, RefusesFoldersThatAreNotEmptyAndFiles) {
  write_file(dir_.path("file"), "kept");
  fs::create_directory(dir_.path("full"));
  write_file(dir_.path("full/notes.txt"), "kept");
  const auto before = names_in(dir_.path(""));
  for (const auto& [name, text] :
       {std::pair<std::string, const char*>{dir_.path("full"), "the folder is not empty; hint"},
        {dir_.path("full/"), "the folder is not empty"},
        {model_, "the folder is not empty"},
        {dir_.path("file"), "it is no folder; hint"},
        {"", "cannot be a new folder"}}) {
    expect_bad_input(run_cohort({"export", model_, name}), {text});
    EXPECT_EQ(names_in(dir_.path("")), before);
  }
  EXPECT_EQ(run_cohort({"export", model_, dir_.path("file/new")}).code, 1);
  EXPECT_EQ(run_cohort({"export", dir_.path("none"), out_}).code, 2);
  EXPECT_EQ(run_cohort({"export", model_, out_, "--dtype=f8"}).code, 2);
  EXPECT_EQ(names_in(dir_.path("")), before);
  EXPECT_EQ(read_file(dir_.path("full/notes.txt")), "kept");
  EXPECT_EQ(read_file(dir_.path("file")), "kept");
}

TEST_F(Export, EmptyAndMissingFoldersAreFilled) {
  for (const char* name : {"empty", "empty/", "link", "new/", "a/b/c"}) {
    SCOPED_TRACE(name);
    for (const char* folder : {"empty", "a", "new"}) fs::remove_all(dir_.path(folder));
    fs::create_directory(dir_.path("empty"));
    if (!fs::is_symlink(dir_.path("link"))) fs::create_symlink("empty", dir_.path("link"));
    const Output output = run_cohort({"export", model_, dir_.path(name)});
    EXPECT_EQ(output.code, 0) << output.err;
    EXPECT_EQ(names_in(dir_.path(name)).size(), 6u);
    EXPECT_TRUE(fs::is_symlink(dir_.path("link")));
  }
}

TEST_F(Export, NumbersBeyondF16NameTheirTensorAndLeaveNothing) {
  const SafetensorsFile file(model_ + "/model.safetensors");
  NamedTensors tensors;
  for (const std::string& name : file.names()) tensors.emplace_back(name, file.read(name));
  tensors.back().second.fill_(70000);
  write_safetensors(dir_.path("model/changed"), tensors);
  fs::rename(model_ + "/changed", model_ + "/model.safetensors");
  const auto before = names_in(dir_.path(""));
  expect_bad_input(write(model_, {"--dtype=f16"}),
                   {"the tensor '" + tensors.back().first + "' holds 70000, beyond 65504"});
  EXPECT_EQ(names_in(dir_.path("")), before);
  EXPECT_EQ(write(model_, {"--dtype=bf16"}).code, 0);
}

// A disk that gets full at any call: the folder appears whole or not at all.
TEST_F(Export, AFullDiskLeavesNothing) {
  const std::string target = dir_.path("a/b/out");
  const auto before = names_in(dir_.path(""));
  int failures = 0;
  for (const char* call : {"mkdir", "open", "write", "fsync", "close", "rename"})
    for (int pass = 0;; ++pass) {
      SCOPED_TRACE(str(call, " ", pass));
      ASSERT_LT(pass, 100);
      const Output output = run_cohort_with(
          {.call = call, .path = "a.tmp-", .error = ENOSPC, .pass = pass, .fail = 1},
          {"export", model_, target});
      if (output.code == 0) {
        EXPECT_EQ(names_in(target).size(), 6u);
        fs::remove_all(dir_.path("a"));
        if (call != std::string("close") || pass > 20) break;
        continue;
      }
      ++failures;
      EXPECT_EQ(output.code, 1);
      EXPECT_NE(output.err.find("No space left on device"), output.err.npos) << output.err;
      EXPECT_EQ(names_in(dir_.path("")), before);
    }
  EXPECT_GT(failures, 20);
}

TEST_F(Export, AnInterruptLeavesNothingAndAKillWhatTheNextExportRemoves) {
  const auto before = names_in(dir_.path(""));
  for (int i = 0; i < 5; ++i) {
    FolderWatch watch(dir_.path(""));
    Process process({"export", model_, out_});
    ASSERT_TRUE(watch.wait_for("out.tmp-", process));
    process.signal(SIGINT);
    const Output output = process.wait();
    auto after = names_in(dir_.path(""));
    if (output.code == 0)  // it had been written
      EXPECT_EQ(after.erase("out"), 1u);
    else
      EXPECT_EQ(output.code, 130) << output.err;
    EXPECT_EQ(after, before);
    fs::remove_all(out_);
  }
  const std::string other = dir_.path("out.tmp-not");
  fs::create_directory(other);
  EXPECT_EQ(run_cohort_with({.call = "rename", .path = out_ + ".tmp-", .error = -1, .pass = 2},
                            {"export", model_, out_})
                .code,
            128 + 9);
  EXPECT_FALSE(fs::exists(out_));
  EXPECT_EQ(names_in(dir_.path("")).size(), before.size() + 2);
  EXPECT_EQ(write(model_).code, 0);
  EXPECT_EQ(names_in(dir_.path("")).size(), before.size() + 2);
  EXPECT_TRUE(fs::exists(other));
}

}  // namespace
}  // namespace cohort::test
