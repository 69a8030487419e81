// A run that is killed at any time, also while writing a checkpoint, or stopped by a signal resumes
// to the weights of an uninterrupted run, bit for bit.
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <map>
#include <thread>

#include "core/rng.h"
#include "tests/apps/process.h"
#include "tests/job/small_configs.h"
#include "tests/support/png_file.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

// On a slow machine the process may end before the signal arrives, so tests retry.
constexpr int kAttempts = 10;

struct Setting {
  std::string name;
  std::string yaml;
};

void PrintTo(const Setting& setting, std::ostream* out) {
  *out << setting.name;
}

// Ten steps of some milliseconds each, so that a kill arrives in time.
std::vector<Setting> settings() {
  const std::string common =
      "num_threads: 1\nsteps: 10\nlearning_rate: 1e-2\nmax_completion_length: 4\n"
      "eval: {every: 3, size: 8}\ncheckpoint: {every: 2, keep_last: 10}\n";
  return {{"pretrain", common + "trainer: pretrain\nbatch_size: 32\n"
                                "data: {text: text.txt, held_out_fraction: 0.2}\n"
                                "model: {num_layers: 1, d_model: 32, num_heads: 2, context: 32, "
                                "dropout: 0.2}\n"},
          {"sft", common + kSmallData +
                      "trainer: sft\nbatch_size: 100\n"
                      "model: {num_layers: 1, d_model: 32, num_heads: 2, context: 16}\n"},
          {"grpo", common + kSmallData +
                       "trainer: grpo\nprompts_per_step: 4\nnum_generations: 16\nbeta: 0.1\n"
                       "num_iterations: 2\nnum_minibatches: 2\n"
                       "rewards: [{name: format, pattern: '.*1.*'}]\n"
                       "model: {num_layers: 1, d_model: 32, num_heads: 2, context: 16}\n"},
          {"hybrid", common + kSmallData +
                         "trainer: grpo\nprompts_per_step: 4\nnum_generations: 16\n"
                         "rewards: [{name: format, pattern: '.*1.*'}]\n"
                         "model: {num_layers: 2, d_model: 32, num_heads: 2, context: 16, delta: "
                         "{full_every: 2, key_heads: 1, value_heads: 2, key_dim: 64, value_dim: "
                         "64}}\n"},
          {"fp8", common + kSmallData +
                      "trainer: grpo\nprompts_per_step: 4\nnum_generations: 16\n"
                      "precision: {cache: fp8}\nrewards: [{name: format, pattern: '.*1.*'}]\n"
                      "model: {num_layers: 1, d_model: 32, num_heads: 2, head_dim: 64, context: "
                      "16}\n"},
          {"dpo", common + "trainer: dpo\nbatch_size: 64\n" + kSmallPairs +
                      "model: {num_layers: 1, d_model: 32, num_heads: 2, context: 16}\n"},
          {"dpo_ranks", common + "trainer: dpo\nbatch_size: 64\nranks: 2\nsharding: optimizer\n" +
                            kSmallPairs +
                            "preference: {loss: ipo, sft_weight: 0.1}\n"
                            "model: {num_layers: 1, d_model: 32, num_heads: 2, context: 16}\n"},
          {"mlm", common + "trainer: mlm\nbatch_size: 32\nmlm: {probability: 0.3}\n"
                           "data: {text: text.txt, tokenizer_path: words, "
                           "held_out_fraction: 0.2}\n"
                           "model: {num_layers: 1, d_model: 32, num_heads: 2, context: 32, "
                           "mask: full,\n  norm_place: after, embedding_norm: yes, norm: "
                           "layer_norm, position: learned, bias: yes,\n  mlp: gelu, "
                           "tie_embeddings: yes, dropout: 0.2}\n"},
          {"images", common + "trainer: classify\nbatch_size: 64\n"
                              "data: {images: {path: images, augment: crop_flip}, "
                              "held_out_fraction: 0.2}\n"
                              "model: {num_layers: 1, d_model: 32, num_heads: 2, mask: full, "
                              "norm: layer_norm,\n  position: learned, mlp: gelu, bias: yes, "
                              "image_size: 16, patch_size: 4, channels: 3, dropout: 0.2}\n"}};
}

// The data of these settings: a text, the vocabulary of its words, and images of two classes.
void write_data(const TempDir& dir) {
  write_file(dir.path("text.txt"), small_text());
  write_file(dir.path("pairs.jsonl"), small_pairs());
  fs::create_directory(dir.path("words"));
  write_file(dir.path("words/vocab.txt"),
             "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\none\ntwo\nthree\nfour\nfive\nand\n");
  Rng rng(3, rng_stream(kTestPurpose));
  for (const char* name : {"dark", "light"}) {
    fs::create_directories(dir.path("images") + "/" + name);
    for (int i = 0; i < 30; ++i) {
      std::vector<std::string> rows(24, std::string(20 * 3, '\0'));
      for (std::string& row : rows)
        for (char& byte : row)
          byte = static_cast<char>((name[0] == 'd' ? 0 : 100) + rng.below(150));
      write_file(str(dir.path("images"), "/", name, "/", i, ".png"),
                 PngFile{.height = 24, .width = 20}.bytes(rows));
    }
  }
}

class Kill : public testing::TestWithParam<Setting> {
 protected:
  void SetUp() override {
    write_data(dir_);
    write_file(dir_.path("run.yaml"), GetParam().yaml);
    whole_ = dir_.path("whole");
    const auto begin = std::chrono::steady_clock::now();
    const Output output = run_cohort({"train", dir_.path("run.yaml"), "output_dir=" + whole_});
    EXPECT_EQ(output.code, 0) << output.err;
    duration_ = std::chrono::duration_cast<std::chrono::microseconds>(
        std::chrono::steady_clock::now() - begin);
  }

  // A run directory of attempt `i` and its process.
  std::string attempt_dir(int i) const { return dir_.path("attempt" + std::to_string(i)); }
  std::unique_ptr<Process> start(int i) const {
    return std::make_unique<Process>(
        std::vector<std::string>{"train", dir_.path("run.yaml"), "output_dir=" + attempt_dir(i)});
  }

  static std::string final_bytes(const std::string& run, const std::string& file) {
    return read_file(run + "/checkpoints/step-00000010/" + file);
  }
  // The lines in metrics.jsonl per training step and evaluation, without times and speeds.
  static std::map<std::string, std::vector<std::string>> logged(const std::string& run) {
    std::map<std::string, std::vector<std::string>> out;
    for (const Json& line : json_lines(run + "/metrics.jsonl")) {
      std::string values;
      for (const auto& [key, value] : line.as_object())
        if (key.find("time") == key.npos && key.find("per_second") == key.npos &&
            key != "rollout/roofline")
          values += str(key, " ", value.dump(), " ");
      out[str(line.at("step").as_int(), line.find("eval") != nullptr ? " eval" : "")].push_back(
          values);
    }
    return out;
  }

  void expect_resumes_to_the_same_weights(const std::string& run) const {
    const Output output = run_cohort({"train", "--resume", run});
    EXPECT_EQ(output.code, 0) << output.err;
    std::vector<std::string> files{"model.safetensors"};
    for (const auto& entry : fs::directory_iterator(whole_ + "/checkpoints/step-00000010/training"))
      if (entry.path().extension() == ".safetensors")
        files.push_back("training/" + entry.path().filename().string());
    EXPECT_GE(files.size(), 2u);
    for (const std::string& file : files) {
      const std::string expected = final_bytes(whole_, file);
      EXPECT_GT(expected.size(), 1000u);
      EXPECT_TRUE(final_bytes(run, file) == expected) << file;
    }
    EXPECT_EQ(logged(run), logged(whole_));
    for (const auto& [step, lines] : logged(run)) EXPECT_EQ(lines.size(), 1u) << "step " << step;
    for (const auto& entry : fs::directory_iterator(run + "/checkpoints"))
      EXPECT_NE(entry.path().filename().string()[0], '.') << entry.path();
  }

  void kill_halfway() const;

  TempDir dir_;
  std::string whole_;
  std::chrono::microseconds duration_{};  // a run without a kill
};

INSTANTIATE_TEST_SUITE_P(Trainers, Kill, testing::ValuesIn(settings()),
                         [](const auto& info) { return info.param.name; });

TEST_P(Kill, HalfWayThroughResumesToTheSameWeights) {
  kill_halfway();
}

// The settings on a GPU, in both dtypes; ranks that are threads compute on the CPU.
std::vector<Setting> cuda_settings() {
  std::vector<Setting> out;
  for (const auto& [name, yaml] : settings()) {
    if (yaml.find("ranks:") != yaml.npos) continue;
    out.push_back({name + std::string("_f32"), "device: cuda\n" + yaml});
    out.push_back({name + std::string("_bf16"), "device: cuda\ndtype: bf16\n" + yaml});
    out.push_back({name + std::string("_host"), "device: cuda\ndtype: bf16\n" + yaml +
                                                    "optimizer: {place: host, moments: bf16}\n"});
  }
  return out;
}
class CudaKill : public Kill {
  void SetUp() override {
    COHORT_REQUIRE_GPU(device);
    Kill::SetUp();
  }
};
INSTANTIATE_TEST_SUITE_P(Trainers, CudaKill, testing::ValuesIn(cuda_settings()),
                         [](const auto& info) { return info.param.name; });

TEST_P(CudaKill, HalfWayThroughResumesToTheSameWeights) {
  kill_halfway();
}

void Kill::kill_halfway() const {
  for (int i = 0; i < kAttempts; ++i) {
    const auto process = start(i);
    const std::string run = attempt_dir(i);
    ASSERT_TRUE(wait_for_path(run + "/checkpoints/step-00000004", *process));
    process->signal(SIGKILL);
    if (process->wait().code != 128 + SIGKILL) continue;
    if (fs::exists(run + "/checkpoints/step-00000010")) continue;  // too late
    expect_resumes_to_the_same_weights(run);
    return;
  }
  FAIL() << "the process always ended before it was killed";
}

TEST_P(Kill, WhileACheckpointIsWrittenResumesToTheSameWeights) {
  for (int i = 0; i < kAttempts; ++i) {
    const auto process = start(i);
    const std::string run = attempt_dir(i), checkpoints = run + "/checkpoints";
    ASSERT_TRUE(wait_for_path(checkpoints, *process));
    FolderWatch watch(checkpoints);
    if (!watch.wait_for(".tmp-step-", *process)) continue;
    process->signal(SIGKILL);
    if (process->wait().code != 128 + SIGKILL) continue;
    // Verifies that the kill interrupted the writing.
    bool half_written = false;
    for (const auto& entry : fs::directory_iterator(checkpoints))
      half_written = half_written || entry.path().filename().string().rfind(".tmp-", 0) == 0;
    if (!half_written) continue;
    expect_resumes_to_the_same_weights(run);
    return;
  }
  FAIL() << "no kill interrupted the writing of a checkpoint";
}

TEST_P(Kill, TwiceResumesToTheSameWeights) {
  for (int i = 0; i < kAttempts; ++i) {
    const std::string run = attempt_dir(i);
    {
      const auto first = start(i);
      ASSERT_TRUE(wait_for_path(run + "/checkpoints/step-00000002", *first));
      first->signal(SIGKILL);
      if (first->wait().code != 128 + SIGKILL) continue;
    }
    Process second({"train", "--resume", run});
    ASSERT_TRUE(wait_for_path(run + "/checkpoints/step-00000006", second));
    second.signal(SIGKILL);
    if (second.wait().code != 128 + SIGKILL) continue;
    expect_resumes_to_the_same_weights(run);
    return;
  }
  FAIL() << "the process always ended before it was killed";
}

TEST_P(Kill, AtRandomMomentsResumesToTheSameWeights) {
  Rng rng(11, rng_stream(kTestPurpose));
  int kills = 0, attempt = 0;
  std::string run = attempt_dir(attempt);
  while (kills < 4 || !fs::exists(run + "/checkpoints")) {
    const bool begun = fs::exists(run + "/checkpoints");
    if (!begun) fs::remove_all(run);
    const auto process =
        begun ? std::make_unique<Process>(std::vector<std::string>{"train", "--resume", run})
              : start(attempt);
    std::this_thread::sleep_for(std::chrono::microseconds(rng.below(duration_.count())));
    process->signal(SIGKILL);
    if (process->wait().code == 128 + SIGKILL)
      ++kills;
    else
      run = attempt_dir(++attempt);  // it had ended
  }
  expect_resumes_to_the_same_weights(run);
}

TEST_P(Kill, TerminationSignalsSavePrintHowToResumeAndResumeToTheSameWeights) {
  int attempt = 0;
  for (const int signal : {SIGINT, SIGTERM}) {
    bool done = false;
    for (int i = 0; i < kAttempts && !done; ++i) {
      const std::string run = attempt_dir(++attempt);
      const auto process = start(attempt);
      ASSERT_TRUE(wait_for_path(run + "/checkpoints/step-00000002", *process));
      process->signal(signal);
      const Output output = process->wait();
      if (output.code == 0) continue;
      EXPECT_EQ(output.code, 130) << output.err;
      EXPECT_NE(output.out.find("cohort train --resume " + run), std::string::npos) << output.out;
      expect_resumes_to_the_same_weights(run);
      done = true;
    }
    EXPECT_TRUE(done) << "the process always ended before the signal";
  }
}

}  // namespace
}  // namespace cohort::test
