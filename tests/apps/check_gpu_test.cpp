// `cohort check --gpu` on a machine without the GPU.
#include "tests/apps/process.h"
#include "tests/job/small_configs.h"

namespace cohort::test {
namespace {

class CheckGpu : public testing::Test {
 protected:
  void SetUp() override {
    write_file(dir_.path("run.yaml"), "output_dir: run\n" + std::string(kSmallModel) + kSmallData +
                                          kSmallSft + "device: cpu\n");
  }
  Output check(const std::string& gpu, std::vector<std::string> more = {}) const {
    more.insert(more.begin(), {"check", dir_.path("run.yaml"), "--gpu", gpu});
    return run_cohort(more);
  }
  // 24 layers of width 1,600: 738M parameters.
  static std::vector<std::string> big(std::vector<std::string> more = {}) {
    more.insert(more.begin(), {"model.num_layers=24", "model.d_model=1600", "model.num_heads=25",
                               "model.context=512", "batch_size=64"});
    return more;
  }

  TempDir dir_;
};

void expect_part(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), text.npos) << part << "\n" << text;
}

TEST_F(CheckGpu, SaysThatATinyModelRuns) {
  for (const char* gpu : {"rtx3060", "rtx4090", "l4", "h200", "GiB=24,sm=89"}) {
    const Output output = check(gpu);
    EXPECT_EQ(output.code, 0) << output.err;
    expect_part(output.out, "assumed                      device: cuda, dtype: bf16\n");
    expect_part(output.out, str("runs on ", gpu));
    expect_part(output.out,
                " yes: micro_batch_tokens: 8192, model.recompute: none, moments: f32; ");
    expect_part(output.out, str("inference on ", gpu));
    expect_part(output.out, "memory: host ");
    expect_part(output.out, "disk: checkpoints of the run ");
    expect_part(output.out, ": ok; a run would go to ");
  }
}

TEST_F(CheckGpu, TakesTheDtypeThatIsGiven) {
  const Output output = check("h100", {"dtype=f32"});
  EXPECT_EQ(output.code, 0) << output.err;
  expect_part(output.out, "assumed                      device: cuda\n");
  expect_bad_input(check("h100", {"dtype=f64"}), {"dtype: f64 is for device: cpu"});
  write_file(dir_.path("run.yaml"),
             read_file(dir_.path("run.yaml")) + "stages: [{trainer: sft, dtype: f32}]\n");
  expect_part(check("h100").out, "assumed                      device: cuda\n");
}

TEST_F(CheckGpu, NamesTheKeysWithWhichAModelFits) {
  const std::vector<std::string> given =
      big({"micro_batch_tokens=32768", "optimizer.place=device"});
  EXPECT_EQ(check("h200", given).code, 0);
  // By default what does not fit is on the host.
  const Output on_host = check("rtx3060", big());
  EXPECT_EQ(on_host.code, 0) << on_host.err;
  expect_part(on_host.out, ", place: host; ");
  expect_part(on_host.out, "optimizer.place: host");
  expect_part(on_host.out, " MiB of page-locked memory, locked in about ");
  const Output output = check("rtx3060", given);
  EXPECT_EQ(output.code, 2);
  expect_part(output.out, " not as configured; with micro_batch_tokens=");
  expect_part(output.err, "cohort: memory: sft needs ");
  expect_part(output.err, " as configured, and rtx3060 has ");
  const size_t hint = output.err.find("; hint: ") + 8;
  std::vector<std::string> changed = big({"optimizer.place=device"});
  std::istringstream words(output.err.substr(hint));
  for (std::string word; words >> word;) changed.push_back(word);
  const Output again = check("rtx3060", changed);
  EXPECT_EQ(again.code, 0) << again.err;
  expect_part(again.out, " yes: micro_batch_tokens: ");
}

TEST_F(CheckGpu, SuggestsAdaptersWhereTheWholeModelDoesNotFit) {
  const std::vector<std::string> given = big({"model.d_model=4800", "model.num_heads=75"});
  const Output output = check("rtx4090", given);
  EXPECT_EQ(output.code, 2);
  expect_part(output.out, "not as configured; with lora.rank=16");
  expect_part(output.err, "; hint: lora.rank=16");
  std::vector<std::string> adapters = given;
  adapters.emplace_back("lora.rank=16");
  const Output again = check("rtx4090", adapters);
  EXPECT_EQ(again.code, 0) << again.err;
  // The cache is that of the model as configured.
  const auto inference = [](const std::string& text) {
    const size_t begin = text.find("inference on rtx4090");
    return text.substr(begin, text.find('\n', begin) - begin);
  };
  expect_part(inference(output.out), "yes: weights ");
  EXPECT_NE(inference(output.out), inference(again.out));
}

TEST_F(CheckGpu, SuggestsABaseInFewerBitsWhereAdaptersAloneDoNotHelp) {
  std::vector<std::string> given = big({"model.d_model=6400", "model.num_heads=50"});
  const Output output = check("rtx4090", given);
  EXPECT_EQ(output.code, 2);
  expect_part(output.out, "not as configured; with precision.base=int8 lora.rank=16");
  given.insert(given.end(), {"lora.rank=16", "precision.base=int8"});
  EXPECT_EQ(check("rtx4090", given).code, 0);
}

TEST_F(CheckGpu, SaysThatABigModelDoesNotFit) {
  const Output output = check("rtx4090", big({"model.d_model=16384", "model.num_heads=128"}));
  EXPECT_EQ(output.code, 2);
  expect_part(output.out, "runs on rtx4090              no\n");
  expect_part(output.out, "inference on rtx4090         no: the weights take ");
  expect_part(output.err, "cohort: memory: sft needs at least ");
  expect_part(output.err, " too much: the weights, gradients and AdamW's state alone take ");
  expect_part(output.err, "; hint: a smaller model, or a GPU with more memory");
  EXPECT_EQ(output.err.find("this machine"), std::string::npos) << output.err;
}

TEST_F(CheckGpu, NeitherThisMachinesMemoryNorItsDiskCount) {
  const Output output =
      run_cohort_with({.call = "statvfs", .path = "/", .error = 0},
                      {"check", dir_.path("run.yaml"), "--gpu", "h200", "model.num_layers=24",
                       "model.d_model=2560", "model.num_heads=20", "model.context=512"});
  EXPECT_EQ(output.code, 0) << output.err;
  EXPECT_EQ(output.out.find("free:"), std::string::npos) << output.out;
}

TEST_F(CheckGpu, WarnsOfSizesThatAreSlow) {
  const Output output = check("l4", {"model.d_ff=2730"});
  EXPECT_EQ(output.code, 0);
  expect_part(output.err, "model.d_ff: 2730 is no multiple of 8");
  expect_part(output.out, "vocabulary: rows are padded to 64 in memory");
  EXPECT_EQ(run_cohort({"check", dir_.path("run.yaml"), "model.d_ff=2730"}).err.find("multiple"),
            std::string::npos);
}

TEST_F(CheckGpu, ForecastsAStep) {
  const Output one = check("h200");
  expect_part(one.out, "forecast: step               0.0");
  expect_part(one.out, " s: rollout 0.000, forward and backward 0.0");
  expect_part(one.out, ", communication 0.000; balance 1.00\n");
  expect_part(one.out, " tokens/s, 1.00 times one GPU's with enough memory; 0.");
  expect_part(one.out, " days without rewards and evaluations, 0.");
  EXPECT_EQ(one.out.find("sent in an update"), std::string::npos) << one.out;
  const Output eight = check("h200", big({"--gpus", "8"}));
  expect_part(eight.out, "sent in an update            gradients 2");
  expect_part(eight.out, " MiB by each rank\n");
  EXPECT_EQ(eight.out.find(", communication 0.000;"), std::string::npos) << eight.out;
  const Output two = check("h200", big({"--gpus", "8", "--hosts", "2"}));
  expect_part(two.out, " MiB by each rank; of the gradients ");
  expect_part(two.out, " % to other hosts\n");
  EXPECT_EQ(check("rtx4090").out.find("forecast"), std::string::npos);
  expect_bad_input(check("h200", {"--gpus", "8", "--hosts", "3"}),
                   {"--hosts: 8 GPUs are not the same number on each of 3 hosts; hint: --gpus 9"});
}

TEST_F(CheckGpu, RefusesRanksThatAreThreads) {
  expect_bad_input(check("h200", {"ranks=2"}),
                   {"ranks: 2 threads of this process compute on the CPU, got device: cuda; hint"});
}

TEST_F(CheckGpu, KnowsWhichGpusHaveAttentionInFp8) {
  const std::vector<std::string> fp8 = {"precision.attention=fp8", "model.head_dim=64"};
  EXPECT_EQ(check("h200", fp8).code, 0) << check("h200", fp8).err;
  expect_bad_input(check("rtx4090", fp8),
                   {"precision.attention: fp8 needs a GPU of compute capability 9.0"});
}

TEST_F(CheckGpu, RefusesUnknownGpus) {
  expect_bad_input(check("rtx4900"), {"--gpu: no GPU is known as 'rtx4900'; did you mean"});
  expect_bad_input(check(""), {"--gpu: no GPU is known as ''"});
  expect_bad_input(check("GiB=-1,sm=89"), {"expected GiB from 1 to 1024"});
  expect_bad_input(check("GiB=16,sm=75"), {"too old"});
  expect_bad_input(check("GiB=128,sm=121"), {"aarch64"});
}

}  // namespace
}  // namespace cohort::test
