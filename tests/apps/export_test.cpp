// `cohort export`: a model alone, as a folder that vLLM, SGLang and transformers load.
#include <algorithm>
#include <csignal>
#include <filesystem>
#include <set>

#include "data/safetensors.h"
#include "tests/apps/process.h"
#include "tests/apps/tiny_tokenizer.h"
#include "tests/runs/small_configs.h"

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

// The dtype of a model from elsewhere is kept over runs in another one.
TEST_F(Export, TheDefaultIsTheDTypeInWhichTheModelCame) {
  ASSERT_EQ(write(model_, {"--dtype=f16"}).code, 0);
  const std::string half = dir_.path("half");
  fs::rename(out_, half);
  train("first", half);
  train("second", dir_.path("first"));
  for (const char* run : {"first", "second"}) {
    const Json config = json_of(saved(run) + "/config.json");
    EXPECT_EQ(config.at("source_dtype").as_string(), "float16");
    EXPECT_EQ(config.at("dtype").as_string(), "float32");
    ASSERT_EQ(write(dir_.path(run)).code, 0);
    EXPECT_EQ(written_type(), "F16 float16");
    ASSERT_EQ(write(dir_.path(run), {"--dtype=f32"}).code, 0);
    EXPECT_EQ(read_file(out_ + "/model.safetensors"), read_file(saved(run) + "/model.safetensors"));
  }
  ASSERT_EQ(write(half).code, 0);
  EXPECT_EQ(written_type(), "F16 float16");
  EXPECT_EQ(read_file(out_ + "/model.safetensors"), read_file(half + "/model.safetensors"));
  // Exported in f32, it has come in f32.
  train("third", model_);
  EXPECT_EQ(json_of(saved("third") + "/config.json").find("source_dtype"), nullptr);
  Json config = json_of(model_ + "/config.json");
  write_file(model_ + "/config.json", config.set("source_dtype", "int8").dump());
  expect_bad_input(write(model_), {"config.json: source_dtype: 'int8' is not known"});
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
