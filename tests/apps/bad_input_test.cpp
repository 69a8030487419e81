// User errors: exit code 2, one line on standard error with location and hint, and no file created
// or overwritten.
#include <signal.h>

#include <filesystem>

#include "tests/apps/process.h"
#include "tests/job/small_configs.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

const std::string kSft = std::string(kSmallModel) + kSmallData + kSmallSft;

class BadInput : public testing::Test {
 protected:
  std::string path(const std::string& name = "") const { return dir_.path(name); }
  // Arguments that train `yaml` in the folder "run".
  std::vector<std::string> train(const std::string& yaml,
                                 const std::vector<std::string>& more = {}) const {
    write_file(path("run.yaml"), "output_dir: run\n" + yaml);
    std::vector<std::string> arguments{"train", path("run.yaml")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
  // Expects the training to be rejected before a run directory is created.
  void expect_refused(const std::string& yaml, const std::vector<std::string>& texts,
                      const std::vector<std::string>& overrides = {}) const {
    SCOPED_TRACE(yaml);
    expect_bad_input(run_cohort(train(yaml, overrides)), texts);
    EXPECT_FALSE(fs::exists(path("run")));
  }
  // A finished run in the folder `name`, with checkpoints at steps 2, 4 and 6.
  std::string finished_run(const std::string& name = "good") const {
    write_file(path("good.yaml"), kSft);
    const Output output = run_cohort({"train", path("good.yaml"), "output_dir=" + path(name),
                                      "checkpoint.every=2", "checkpoint.keep_last=3"});
    EXPECT_EQ(output.code, 0) << output.err;
    return path(name);
  }
  static void damage(const std::string& checkpoint) {
    std::string bytes = read_file(checkpoint + "/model.safetensors");
    ASSERT_GT(bytes.size(), 100u);
    bytes[bytes.size() - 7] = static_cast<char>(bytes[bytes.size() - 7] ^ 16);
    write_file(checkpoint + "/model.safetensors", bytes);
  }

  TempDir dir_;
};

// ---- The command line --------------------------------------------------------------------------

TEST_F(BadInput, CommandLine) {
  expect_bad_input(run_cohort({}), {"--help"});
  expect_bad_input(run_cohort({"trian"}), {"unknown sub-command 'trian'", "did you mean 'train'?"});
  expect_bad_input(run_cohort({"train"}), {"expected CONFIG.yaml, or --resume RUN_DIR", "hint"});
  expect_bad_input(run_cohort({"check"}), {"config", "cohort check --help"});
  expect_bad_input(run_cohort({"generate"}), {"model", "cohort generate --help"});
  expect_bad_input(run_cohort({"train", "--resume"}), {"--resume", "cohort train --help"});
  expect_bad_input(run_cohort({"train", "x.yaml", "--fast"}), {"--fast", "cohort train --help"});
  expect_bad_input(run_cohort({"generate", "x", "1", "--max_new_tokens", "5"}),
                   {"--max_new_tokens", "did you mean '--max-tokens'?", "generate --help"});
  expect_bad_input(run_cohort({"generate", "x", "--temperature", "hot"}), {"--temperature"});
  expect_bad_input(run_cohort({"generate", "x", "--num", "0"}),
                   {"--num: expected a finite number of at least 1, got '0'"});
  expect_bad_input(run_cohort({"generate", "x", "--seed", "-1"}), {"at least 0, got '-1'"});
  expect_bad_input(run_cohort({"generate", "x", "--top-k", "-2"}), {"at least -1, got '-2'"});
  expect_bad_input(run_cohort({"gradcheck", "none"}), {"unknown op 'none'", "known:", "silu"});
}

TEST_F(BadInput, NumbersThatAreNotFinite) {
  for (const char* value : {"nan", "-nan", "inf", "infinity", "-inf", "1e999"})
    for (const char* option :
         {"--temperature", "--top-p", "--min-p", "--top-k", "--repetition-penalty",
          "--presence-penalty", "--frequency-penalty", "--num", "--seed"})
      expect_bad_input(run_cohort({"generate", "x", "1", str(option, "=", value)}), {option});
  for (const char* command : {"chat", "logprobs"})
    for (const char* value : {"nan", "inf"})
      expect_bad_input(run_cohort({command, "x", str("--temperature=", value)}), {"--temperature"});
  const std::string run = finished_run();
  for (const char* bias : {"1:nan", "1:inf", "1:1e39", "1:1e999"})
    expect_bad_input(run_cohort({"generate", run, "1", str("--logit-bias=", bias)}),
                     {"logit_bias: expected ID:BIAS, got '", bias});
  for (const char* value : {"nan", ".nan", "inf", ".inf", "-.Inf", "1e999"})
    for (const char* key : {"temperature", "learning_rate", "eval.correct.threshold"})
      expect_bad_input(run_cohort({"check", path("good.yaml"), str(key, "=", value)}),
                       {str("command line: ", key, ": expected a number, got '", value, "'")});
}

TEST_F(BadInput, FilesThatAreNotThere) {
  expect_bad_input(run_cohort({"train", path("none.yaml")}), {path("none.yaml"), "check the path"});
  expect_bad_input(run_cohort({"check", path()}), {"cannot read the configuration"});
  expect_bad_input(run_cohort({"generate", path("none"), "1+1="}),
                   {path("none"), "does not exist"});
  expect_bad_input(run_cohort({"logprobs", path(), "1"}), {"no usable checkpoint", "hint"});
  expect_bad_input(run_cohort({"eval", path("none")}), {path("none")});
}

// ---- The configuration -------------------------------------------------------------------------

TEST_F(BadInput, Configuration) {
  expect_refused(kSft + "lerning_rate: 1\n", {path("run.yaml") + ":12: unknown key 'lerning_rate'",
                                              "did you mean 'learning_rate'?"});
  expect_refused("steps: many\n", {"run.yaml:2: steps: expected a whole number, got 'many'"});
  expect_refused("seed: 1\nseed: 2\n", {"run.yaml:3: duplicate key 'seed'", "line 2"});
  expect_refused("model: {dropout: 1.5}\n", {"run.yaml:2: model.dropout", "from 0 to 0.99", "1.5"});
  expect_refused("trainer: sfd\n", {"run.yaml:2: trainer", "did you mean 'sft'?"});
  expect_refused("a: [1\n", {"run.yaml:", "not valid YAML"});
  expect_refused(kSft, {"command line: unknown key 'stepz'; did you mean 'steps'?"}, {"stepz=3"});
  expect_refused(kSft, {"steps"}, {"steps"});  // no value
  expect_refused(kSft, {"model.num_heads: 3 does not divide d_model 16", "hint"},
                 {"model.num_heads=3"});
  expect_refused(kSft, {"device: 'cuda:99' was asked for", "hint: set device: cpu"},
                 {"device=cuda:99"});
  expect_refused(kSft, {"unknown task 'nothing'", "known: addition"}, {"data.task=nothing"});
  expect_refused(kSft, {"task addition: sizes 2 to 40", "hint"}, {"data.task_sizes.max_size=40"});
}

TEST_F(BadInput, LongValuesAreNotRepeatedWhole) {
  for (const std::string& value : {std::string(100000, 'x'), std::string(100000, '\x80')}) {
    train(kSft);
    const Output output = run_cohort({"check", path("run.yaml"), "seed=" + value});
    expect_bad_input(output, {"command line: seed: expected a whole number", "bytes ...]"});
    EXPECT_LT(output.err.size(), 10000u);
  }
}

TEST_F(BadInput, CheckPrintsTheErrorsOfTrain) {
  const std::string yaml = std::string(kSmallModel) + kSmallData + kSmallGrpo;
  for (const char* error :
       {"rewards=[{name: tusk}]", "device=gpu", "model.context=3", "steps=0", "data.task=nothing",
        "stop_tokens=[1, 13]", "max_completion_length=13"}) {
    SCOPED_TRACE(error);
    const Output trained = run_cohort(train(yaml, {error})),
                 checked = run_cohort({"check", path("run.yaml"), error});
    expect_bad_input(trained, {});
    expect_bad_input(checked, {});
    EXPECT_EQ(checked.err, trained.err);
  }
}

TEST_F(BadInput, CheckNamesTheRewardsAndWhatTheyNeed) {
  const std::string yaml = std::string(kSmallModel) + kSmallData + kSmallGrpo;
  train(yaml);
  expect_bad_input(
      run_cohort({"check", path("run.yaml"), "rewards=[{name: tusk}]"}),
      {"rewards[0] 'tusk': unknown reward; known: code, command, contains, cosine, countdown, "
       "distinct, environment, exact_match, format, http, judge, length, math, numeric, overlong, "
       "repetition, "
       "task, think_format; did you mean 'task'?"});
  std::string lines;
  for (int i = 0; i < 20; ++i) lines += str("{\"prompt\": \"", i, "+1=\", \"answer\": \"7\"}\n");
  write_file(path("data.jsonl"), lines);
  expect_bad_input(
      run_cohort({"check", path("run.yaml"), "data.task=", "rewards=[{name: task}]",
                  "data.jsonl.path=" + path("data.jsonl"), "data.jsonl.held_out_fraction=0.3"}),
      {"rewards[0] 'task': needs data from a generated task; hint: exact_match or"});
}

TEST_F(BadInput, RelativePathsThatLeadNowhere) {
  expect_refused(std::string(kSmallModel) + kSmallSft + "data: {jsonl: {path: no.jsonl}}\n",
                 {"data.jsonl.path: " + path("no.jsonl") + ": No such file or directory",
                  "'no.jsonl' was counted from", "the folder of " + path("run.yaml")});
  expect_refused(kSft, {"init_from: ", "'no/run' was counted from", "the current folder"},
                 {"init_from=no/run"});
  const std::string far(5000, 'x');
  expect_refused(kSft, {"no checkpoint at", "does not exist"}, {"init_from=" + far});
  expect_refused(kSft, {"File name too long", "hint"}, {"data.task=", "data.jsonl.path=" + far});
}

// ---- Data --------------------------------------------------------------------------------------

TEST_F(BadInput, TextData) {
  const std::string text = std::string(kSmallModel) + kSmallPretrain;
  expect_refused(text, {path("text.txt"), "No such file", "hint"});
  write_file(path("text.txt"), "");
  expect_refused(text, {path("text.txt"), "is empty", "hint"});
  write_file(path("text.txt"), "0123456789");
  expect_refused(text, {path("text.txt"), "the training part has 8 tokens, a window needs 17"});
  write_file(path("text.txt"), std::string(100, 'a') + "\xff\xfe" + std::string(100, 'b'));
  expect_refused(text, {"UTF-8", "hint"});
}

class BadJsonl : public BadInput {
 protected:
  // A configuration for a file of 20 valid lines and `line`.
  std::string with_line(const std::string& line) const {
    std::string text;
    for (int i = 0; i < 20; ++i) text += str("{\"prompt\": \"", i, "+1=\", \"answer\": \"7\"}\n");
    write_file(path("data.jsonl"), text + line + "\n");
    return "data: {jsonl: {path: data.jsonl, held_out_fraction: 0.3}}\n";
  }
  const std::string sft_ = std::string(kSmallModel) + kSmallSft;
  const std::string grpo_ =
      std::string(kSmallModel) + "trainer: grpo\nrewards: [{name: numeric}]\n";
};

TEST_F(BadJsonl, Lines) {
  const std::string no_file = "data: {jsonl: {path: none.jsonl}}\n";
  expect_refused(sft_ + no_file, {path("none.jsonl"), "No such file"});
  expect_refused(sft_ + with_line("{\"prompt\": \"1+1=\","), {"data.jsonl:21:", "not valid JSON"});
  expect_refused(sft_ + with_line("[1, 2]"), {"data.jsonl:21:", "expected an object"});
  expect_refused(sft_ + with_line("{\"promt\": \"1+1=\", \"answer\": \"2\"}"),
                 {"data.jsonl:21: no field 'prompt'", "did you mean 'promt'?"});
  expect_refused(sft_ + with_line("{\"prompt\": \"1+1=\"}"), {"data.jsonl:21: no field 'answer'"});
  with_line("");
  write_file(path("data.jsonl"), "\n\n");
  expect_refused(sft_ + "data: {jsonl: {path: data.jsonl}}\n", {"holds no example", "hint"});
}

TEST_F(BadJsonl, PromptLongerThanTheContext) {
  const std::string line = "{\"prompt\": \"1111111111111111=\", \"answer\": \"2\"}";
  for (const std::string& trainer : {sft_, grpo_})
    expect_refused(trainer + with_line(line),
                   {"data.jsonl", "'1111111111111111='", "17 tokens", "context is 16",
                    "hint: a larger model.context"},
                   {"eval.size=100"});
}

TEST_F(BadJsonl, NothingToTrainOn) {
  expect_refused(sft_ + with_line(""),
                 {"data.held_out_fraction: 1 holds everything out", "hint: a smaller fraction"},
                 {"data.jsonl.held_out_fraction=1"});
  expect_refused(sft_ + with_line(""), {"data.held_out_fraction: 0.3 of data.jsonl.path"},
                 {"data.jsonl.eval_path=" + path("data.jsonl")});
}

TEST_F(BadJsonl, RewardThatAppliesToNoProblem) {
  std::string text;
  for (int i = 0; i < 20; ++i) text += str("{\"prompt\": \"", i, "+1=\", \"answer\": \"x\"}\n");
  with_line("");
  write_file(path("data.jsonl"), text);
  const Output output = run_cohort(train(
      grpo_ + "data: {jsonl: {path: data.jsonl, held_out_fraction: 0.3}}\n", {"eval.size=1"}));
  EXPECT_EQ(output.code, 2);
  EXPECT_NE(output.err.find("cohort: rewards: none applies to any of the"), std::string::npos)
      << output.err;
  EXPECT_NE(output.err.find("hint: numeric needs a number as the answer"), std::string::npos);
}

TEST_F(BadJsonl, CharacterMissingFromTheStartModel) {
  const std::string start = finished_run();
  expect_refused(sft_ + with_line("{\"prompt\": \"2*2=\", \"answer\": \"4\"}"),
                 {"data.jsonl", "'2*2='", "the character '*'", "hint"},
                 {"init_from=" + start, "eval.size=100"});
}

// ---- Start models and checkpoints --------------------------------------------------------------

TEST_F(BadInput, StartModelOfAnotherKind) {
  const std::string start = "init_from=" + finished_run();
  expect_refused(kSft, {"model.d_model: 32 was asked for", "has d_model: 16", "hint"},
                 {start, "model.d_model=32"});
  expect_refused(kSft, {"model.norm: layer_norm"}, {start, "model.norm=layer_norm"});
  expect_refused(kSft, {"data.tokenizer: byte"}, {start, "data.tokenizer=byte"});
  // The characters of another task.
  expect_refused(kSft, {"reverse: training example 1", "has no token"},
                 {start, "data.task=reverse"});
  expect_refused(kSft, {"no checkpoint at", "does not exist"}, {"init_from=" + path("none")});
  expect_refused(kSft, {"no usable checkpoint"}, {"init_from=" + path()});
}

TEST_F(BadInput, TextMissingFromTheVocabulary) {
  const std::string run = finished_run();
  expect_bad_input(run_cohort({"generate", run, "1*1="}),
                   {"the character '*' (U+002A) at byte 1", "hint"});
  expect_bad_input(run_cohort({"logprobs", run, "1*1="}), {"the character '*' (U+002A) at byte 1"});
  expect_bad_input(run_cohort({"generate", run, ""}), {"prompt 0 is empty"});
  expect_bad_input(run_cohort({"generate", run, std::string(16, '1')}),
                   {"prompt 0 has 16 tokens, the model's context is 16"});
  expect_bad_input(run_cohort({"logprobs", run, std::string(18, '1')}), {"a text of 18 tokens"});
}

TEST_F(BadInput, DamagedCheckpointFallsBackToThePreviousOneWithAWarning) {
  const std::string run = finished_run();
  damage(run + "/checkpoints/step-00000006");
  const std::vector<std::string> generate{"generate", run, "1+1=", "--json"};
  Output output = run_cohort(generate);
  EXPECT_EQ(output.code, 0) << output.err;
  EXPECT_NE(output.err.find("step-00000006/model.safetensors does not match its checksum; using "
                            "the checkpoint before it"),
            std::string::npos)
      << output.err;
  EXPECT_EQ(output.out,
            run_cohort({"generate", run + "/checkpoints/step-00000004", "1+1=", "--json"}).out);
  // A checkpoint given by its own path has no fallback.
  expect_bad_input(run_cohort({"generate", run + "/checkpoints/step-00000006", "1+1="}),
                   {"does not match its checksum"});

  // Resuming continues from step 4, and gives the weights of the undamaged run.
  const std::string other = finished_run("other");
  output = run_cohort({"train", "--resume", run});
  EXPECT_EQ(output.code, 0) << output.err;
  EXPECT_NE(output.err.find("using the checkpoint before it"), std::string::npos);
  EXPECT_TRUE(read_file(run + "/checkpoints/step-00000006/model.safetensors") ==
              read_file(other + "/checkpoints/step-00000006/model.safetensors"));

  for (const char* step : {"2", "4", "6"})
    damage(run + "/checkpoints/step-0000000" + std::string(step));
  for (const auto& arguments :
       {generate, std::vector<std::string>{"train", "--resume", run},
        train(kSft, {"init_from=" + run}), std::vector<std::string>{"eval", run}}) {
    output = run_cohort(arguments);
    EXPECT_EQ(output.code, 2) << arguments[0];
    EXPECT_NE(output.err.find("hint: restore one from a copy, or start a new run"),
              std::string::npos)
        << output.err;
  }
  EXPECT_FALSE(fs::exists(path("run")));
}

// ---- Run directories ---------------------------------------------------------------------------

TEST_F(BadInput, ResumeOfADirectoryWithoutARun) {
  fs::create_directory(path("empty"));
  for (const std::string& dir : {path("none"), path("empty")})
    expect_bad_input(run_cohort({"train", "--resume", dir}),
                     {"nothing to resume: " + dir, "hint: give the run directory"});
  EXPECT_TRUE(fs::is_empty(path("empty")));
  const std::string run = finished_run();
  expect_bad_input(run_cohort({"train", "--resume", run, "stepz=1"}), {"did you mean 'steps'?"});
  expect_bad_input(run_cohort({"train", "--resume", run, "device=cuda:99"}), {"set device: cpu"});
  expect_bad_input(run_cohort({"train", "--resume", run, path("good.yaml")}), {"key=value"});
}

TEST_F(BadInput, ResumeWithAChangedFileOrAnotherLengthOfAnEarlierStage) {
  std::string lines;
  for (int i = 0; i < 20; ++i) lines += str("{\"prompt\": \"", i, "+1=\", \"answer\": \"7\"}\n");
  write_file(path("data.jsonl"), lines);
  const std::string yaml = std::string(kSmallModel) +
                           "data: {jsonl: {path: data.jsonl, held_out_fraction: 0.3}}\n"
                           "stages: [{trainer: sft, steps: 2}, {trainer: sft, steps: 2}]\n";
  Output output = run_cohort(train(yaml, {"eval.size=2"}));
  ASSERT_EQ(output.code, 0) << output.err;
  const std::vector<std::string> resume{"train", "--resume", path("run")};
  const auto with = [&](const std::string& key) {
    std::vector<std::string> out = resume;
    out.push_back(key);
    return out;
  };
  output = run_cohort(with("steps=3"));
  EXPECT_EQ(output.code, 2);
  EXPECT_NE(output.err.find("2-sft has started from its weights; hint: a key such as steps reaches "
                            "every stage; stages.1.steps=3 is for the last one alone"),
            std::string::npos)
      << output.err;
  write_file(path("data.jsonl"), lines + "\n");
  output = run_cohort(with("stages.1.steps=3"));
  EXPECT_EQ(output.code, 2);
  EXPECT_NE(output.err.find("data.jsonl is not the file that was meant"), std::string::npos);
  const size_t hint = output.err.find("data.fingerprint=");
  ASSERT_NE(hint, std::string::npos);
  std::vector<std::string> accepted = with(output.err.substr(hint, 17 + 16));
  accepted.push_back("stages.1.steps=3");
  output = run_cohort(accepted);
  EXPECT_EQ(output.code, 0) << output.err;
}

TEST_F(BadInput, ResumeOfARunInUse) {
  Process first(train(kSft, {"steps=1000000", "eval.every=0"}));
  ASSERT_TRUE(wait_for_path(path("run") + "/metrics.jsonl", first));
  expect_bad_input(run_cohort({"train", "--resume", path("run")}),
                   {"another process is using the run directory " + path("run"), "hint"});
  EXPECT_TRUE(first.running());
  first.signal(SIGKILL);
  first.wait();
  // The lock is released with its process.
  const Output output = run_cohort({"train", "--resume", path("run"), "steps=2"});
  EXPECT_EQ(output.code, 0) << output.err;
}

TEST_F(BadInput, OutputDirectoryThatCannotBeCreated) {
  write_file(path("file"), "precious");
  for (const std::string& dir : {path("file"), path("file/run"), std::string("/proc/run")}) {
    write_file(path("run.yaml"), kSft);
    expect_bad_input(run_cohort({"train", path("run.yaml"), "output_dir=" + dir}),
                     {"cannot create the run directory", dir, "hint: set output_dir"});
  }
  EXPECT_EQ(read_file(path("file")), "precious");
}

TEST_F(BadInput, RunDirectoriesStayBelowRunsAndHaveNoControlCharacters) {
  for (const char* name : {"../../up", "/abs", "..", ".", "a/../../b", "a/./b"})
    expect_refused(kSft, {"name: expected a name for a folder in runs", str("'", name, "'")},
                   {str("name=", name)});
  for (const char* name : {"a\nb", "a\tb", "a\x1b[2J", "a\x7f"})
    for (const std::string key : {"name", "output_dir"}) {
      const std::string value = key == "name" ? name : path(name);
      const Output output = run_cohort(train(kSft, {str(key, "=", value)}));
      EXPECT_EQ(output.code, 2);
      EXPECT_EQ(output.err.rfind(str("cohort: ", key, ": expected no line breaks"), 0), 0u)
          << output.err;
    }
  expect_refused(kSft, {"output_dir: '/' cannot be a run directory"}, {"output_dir=/"});
}

TEST_F(BadInput, SlashesAtTheEndOfARunDirectoryAreIgnored) {
  const auto arguments = train(kSft);
  const auto expect_directory = [&](const std::string& given, const std::string& directory) {
    std::vector<std::string> more = arguments;
    more.insert(more.end(), {"steps=1", "output_dir=" + given});
    const Output output = run_cohort(more);
    EXPECT_EQ(output.code, 0) << output.err;
    EXPECT_NE(output.out.find("run directory: " + directory + "\n"), std::string::npos)
        << output.out;
    EXPECT_TRUE(fs::exists(directory + "/config.yaml"));
  };
  const std::string dir = path("new");
  expect_directory(dir + "/", dir);
  expect_directory(dir + "//", dir + "-2");
  expect_directory(dir + "/.", dir + "-3");
  expect_directory(dir + "/checkpoints/..", dir + "-4");
  EXPECT_FALSE(fs::exists(dir + "/-2"));
}

TEST_F(BadInput, SecondRunGetsItsOwnDirectory) {
  const auto arguments = train(kSft);
  Output output = run_cohort(arguments);
  EXPECT_EQ(output.code, 0) << output.err;
  const auto files = [&] {
    std::string all;
    for (const auto& entry : fs::recursive_directory_iterator(path("run")))
      if (entry.is_regular_file()) all += read_file(entry.path().string());
    return all;
  };
  const std::string before = files();
  output = run_cohort(arguments);
  EXPECT_EQ(output.code, 0) << output.err;
  EXPECT_NE(output.out.find("run directory: " + path("run-2") + "\n"), std::string::npos);
  EXPECT_TRUE(files() == before);
}

}  // namespace
}  // namespace cohort::test
