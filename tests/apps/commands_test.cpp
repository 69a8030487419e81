// The sub-commands on valid input, in particular the exactness of log-probs.
#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>

#include "tests/apps/process.h"
#include "tests/job/small_configs.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

class Commands : public testing::Test {
 protected:
  Output cohort(const std::vector<std::string>& arguments, const std::string& input = "") const {
    Output output = run_cohort(arguments, input);
    EXPECT_EQ(output.code, 0) << output.err;
    return output;
  }
  // Trains `yaml` in the folder "run".
  Output train(const std::string& yaml, std::vector<std::string> more = {}) const {
    write_file(dir_.path("text.txt"), small_text());
    write_file(dir_.path("run.yaml"), "output_dir: run\n" + yaml);
    more.insert(more.begin(), {"train", dir_.path("run.yaml")});
    return cohort(more);
  }
  // Runs `cohort` in a shell; `arguments` may redirect.
  Output shell(const std::string& arguments) const {
    const std::string err = dir_.path("shell.err");
    const int status = std::system(str(COHORT_BINARY, " ", arguments, " 2> '", err, "'").c_str());
    return {.code = WEXITSTATUS(status), .out = "", .err = read_file(err)};
  }
  const std::string sft_ = std::string(kSmallModel) + kSmallData + kSmallSft;
  TempDir dir_;
  const std::string run_ = dir_.path("run");
};

// The log-prob of a token at sampling equals that of an independent forward pass over the whole
// text, also after a round trip through decimal text.
TEST_F(Commands, LogprobsOfGeneratedTextsAreThoseOfGeneratingToTheBit) {
  train(sft_);
  for (const char* temperature : {"1", "0.7"}) {
    const auto samples =
        json_lines_of(cohort({"generate", run_, "12+3=", "7", "1+2+3+4+5=", "--json", "--num", "7",
                              "--seed", "5", "--max-tokens", "9", "--temperature", temperature})
                          .out);
    ASSERT_EQ(samples.size(), 21u);
    std::vector<std::string> stopped{"logprobs", run_, "--eos", "--temperature", temperature},
        truncated{"logprobs", run_, "--temperature", temperature};
    std::vector<const Json*> order_stopped, order_truncated;
    for (const Json& sample : samples) {
      const bool is_truncated = sample.at("truncated").as_bool();
      (is_truncated ? truncated : stopped)
          .push_back(sample.at("prompt").as_string() + sample.at("completion").as_string());
      (is_truncated ? order_truncated : order_stopped).push_back(&sample);
    }
    EXPECT_GE(order_stopped.size(), 3u);
    EXPECT_GE(order_truncated.size(), 3u);
    for (const auto& [arguments, order] :
         {std::pair{stopped, order_stopped}, std::pair{truncated, order_truncated}}) {
      const auto scored = json_lines_of(cohort(arguments).out);
      ASSERT_EQ(scored.size(), order.size());
      for (size_t i = 0; i < order.size(); ++i) {
        EXPECT_EQ(scored[i].at("ids").dump(), order[i]->at("ids").dump());
        const auto& all = scored[i].at("logprobs").as_array();
        const auto& sampled = order[i]->at("logprobs").as_array();
        const auto prompt = static_cast<size_t>(order[i]->at("prompt_length").as_int());
        ASSERT_EQ(all.size(), prompt + sampled.size());
        EXPECT_TRUE(all[0].is_null());  // nothing comes before the first token
        for (size_t t = 0; t < sampled.size(); ++t) {
          EXPECT_EQ(all[prompt + t].as_double(), sampled[t].as_double());
          // An f32 value: the decimal text is exact.
          EXPECT_EQ(static_cast<double>(static_cast<float>(sampled[t].as_double())),
                    sampled[t].as_double());
        }
      }
    }
  }
}

TEST_F(Commands, GenerateReadsPromptsFromStandardInputToo) {
  train(sft_);
  const std::string json = cohort({"generate", run_, "1+1=", "2+2=", "--json"}).out;
  EXPECT_EQ(cohort({"generate", run_, "--json"}, "1+1=\n2+2=\n").out, json);
  const auto lines = json_lines_of(json);
  ASSERT_EQ(lines.size(), 2u);
  const std::string text = cohort({"generate", run_, "1+1=", "2+2="}).out;
  EXPECT_EQ(text, "1+1=" + lines[0].at("completion").as_string() +
                      "\n2+2=" + lines[1].at("completion").as_string() + "\n");
  EXPECT_NE(cohort({"generate", run_, "1+1=", "2+2=", "--json", "--seed", "2"}).out, json);
  EXPECT_EQ(cohort({"generate", run_, "1+1=", "2+2=", "--json", "--top-k", "-1"}).out, json);
  // Greedy completions need no seed.
  const std::string greedy = cohort({"generate", run_, "1+1=", "--temperature", "0"}).out;
  EXPECT_EQ(cohort({"generate", run_, "1+1=", "--temperature", "0", "--seed", "9"}).out, greedy);
}

TEST_F(Commands, GeneratePrintsTheStopReason) {
  train(sft_);
  const auto generate = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments{"generate", run_, "1+2+3+4+5=", "--num", "20"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return cohort(arguments);
  };
  std::map<std::string, int64_t> ends;
  const Output output = generate({"--json"});
  EXPECT_EQ(output.err, "");
  for (const Json& line : json_lines_of(output.out)) {
    const std::string end = line.at("stopped").as_string();
    ++ends[end];
    EXPECT_EQ(end == "eos", !line.at("truncated").as_bool());
    // The model's context is 16.
    if (end == "context") {
      EXPECT_EQ(line.at("ids").as_array().size(), 16u);
    }
  }
  EXPECT_EQ(ends.size(), 2u);
  EXPECT_GT(ends["context"], 0);
  EXPECT_GT(ends["eos"], 0);
  const std::string notices = generate({}).err;
  EXPECT_EQ(std::count(notices.begin(), notices.end(), '\n'), ends["context"]) << notices;
  EXPECT_NE(notices.find(" of 20 ended (context full): the model's context is 16 tokens"),
            notices.npos)
      << notices;
  for (const Json& line : json_lines_of(generate({"--json", "--max-tokens", "2"}).out))
    EXPECT_NE(line.at("stopped").as_string(), "context");
  EXPECT_EQ(generate({"--max-tokens", "2"}).err, "");
}

TEST_F(Commands, GenerateStopsAtTextsAndChoosesTheBest) {
  train(sft_);
  const std::vector<std::string> base{"generate",      run_, "1+1=", "2+2=", "--json",
                                      "--temperature", "1.5"};
  const auto lines = [&](std::vector<std::string> more) {
    more.insert(more.begin(), base.begin(), base.end());
    const Output output = run_cohort(more);
    EXPECT_EQ(output.code, 0) << output.err;
    return json_lines_of(output.out);
  };
  int stopped = 0;
  for (const Json& line : lines({"--num", "8", "--stop", "1", "--stop", "2"})) {
    const std::string text = line.at("completion").as_string();
    EXPECT_EQ(text.find_first_of("12") == std::string::npos,
              line.at("stopped").as_string() != "stop");
    if (text.find_first_of("12") != std::string::npos) {
      EXPECT_EQ(text.find_first_of("12"), text.size() - 1);
      ++stopped;
    }
  }
  EXPECT_GT(stopped, 0);
  // The best of 8 are those of 8 with the largest mean log-prob.
  const auto mean = [](const Json& line) {
    double sum = 0;
    for (const Json& value : line.at("logprobs").as_array()) sum += value.as_double();
    return sum / static_cast<double>(line.at("logprobs").as_array().size());
  };
  const auto all = lines({"--num", "8"}), best = lines({"--num", "2", "--best-of", "8"});
  ASSERT_EQ(best.size(), 4u);
  for (size_t prompt = 0; prompt < 2; ++prompt) {
    std::vector<double> means;
    for (size_t i = 0; i < 8; ++i) means.push_back(mean(all[prompt * 8 + i]));
    std::sort(means.rbegin(), means.rend());
    for (size_t i = 0; i < 2; ++i) EXPECT_EQ(mean(best[prompt * 2 + i]), means[i]);
  }
  const Output refused = run_cohort({"generate", run_, "1", "--num", "3", "--best-of", "2"});
  EXPECT_EQ(refused.code, 2);
  EXPECT_NE(refused.err.find("--best-of: expected at least --num 3, got 2"), std::string::npos);
}

TEST_F(Commands, GenerateSeparatesSamples) {
  train(sft_);
  const auto lines = json_lines_of(
      cohort({"generate", run_, "1+1=", "2+2=", "--num", "2", "--max-tokens", "3", "--json"}).out);
  ASSERT_EQ(lines.size(), 4u);
  std::string expected;
  for (size_t i = 0; i < 4; ++i)
    expected += str("--- prompt ", i / 2 + 1, ", sample ", i % 2 + 1, " of 2\n",
                    lines[i].at("prompt").as_string(), lines[i].at("completion").as_string(), "\n");
  EXPECT_EQ(cohort({"generate", run_, "1+1=", "2+2=", "--num", "2", "--max-tokens", "3"}).out,
            expected);
}

TEST_F(Commands, GenerateTakesPromptsOfSeveralLinesAsJson) {
  std::string lines;
  for (int i = 0; i < 30; ++i) lines += str("{\"q\": \"", i, "+\\n1\", \"answer\": \"7\"}\n");
  write_file(dir_.path("sums.jsonl"), lines);
  train(std::string(kSmallModel) + kSmallSft +
            "data: {jsonl: {path: sums.jsonl, prompt: \"{q}\\n=\"}}\nrewards: [{name: numeric}]\n",
        {"eval.size=1"});
  const auto prompts = [](const Output& output) {
    std::vector<std::string> out;
    for (const Json& line : json_lines_of(output.out)) out.push_back(line.at("prompt").as_string());
    return out;
  };
  const std::vector<std::string> expected{"1+\n2\n=", "3+\n4\n="};
  const Output text = cohort({"generate", run_, expected[0], expected[1], "--json"});
  EXPECT_EQ(prompts(text), expected);
  const Output strings =
      cohort({"generate", run_, "--json-input", "--json"}, "\"1+\\n2\\n=\"\n\"3+\\n4\\n=\"\n");
  EXPECT_EQ(strings.out, text.out);
  const Output fields = cohort({"generate", run_, "--template", "--json"},
                               "{\"q\": \"1+\\n2\"}\n{\"q\": \"3+\\n4\", \"more\": 1}\n");
  // By the run's max_completion_length.
  EXPECT_EQ(
      fields.out,
      cohort({"generate", run_, expected[0], expected[1], "--json", "--max-tokens", "4"}).out);

  const auto refused = [&](const char* option, const std::string& input) {
    return run_cohort({"generate", run_, option}, input);
  };
  expect_bad_input(refused("--json-input", "\"1\"\n1+1=\n"), {"prompt 2: not valid JSON"});
  expect_bad_input(refused("--json-input", "7\n"), {"prompt 1: expected a JSON string", "hint: "});
  expect_bad_input(refused("--template", "\"1\"\n"), {"prompt 1: expected an object"});
  expect_bad_input(refused("--template", "{\"qq\": 1}\n"),
                   {"prompt 1: no field 'q'", "did you mean 'qq'?"});
  expect_bad_input(run_cohort({"generate", run_, "--template", "--json-input", "1"}),
                   {"--template", "--json-input"});
}

TEST_F(Commands, GenerateByATemplateNeedsARunThatHasOne) {
  train(sft_);
  expect_bad_input(run_cohort({"generate", run_, "--template", "{\"q\": 1}"}),
                   {"--template: ", "config.yaml has no data.jsonl", "hint: "});
}

// --template samples as the run does, unless the command says otherwise.
TEST_F(Commands, GenerateByATemplateSamplesAsTheRunDoes) {
  std::string lines;
  for (int i = 0; i < 30; ++i)
    lines += str("{\"prompt\": \"", i, "=\", \"answer\": \"", i % 2, "\"}\n");
  write_file(dir_.path("sums.jsonl"), lines);
  train(std::string(kSmallModel) + kSmallSft + "data: {jsonl: {path: sums.jsonl}}\n",
        {"temperature=20", "stop_strings=[\"1\", \"0\"]"});
  const auto completions = [&](std::vector<std::string> more) {
    more.insert(more.begin(),
                {"generate", run_, "--template", "{\"prompt\": \"7=\"}", "--json", "--num", "12"});
    std::vector<std::string> out;
    for (const Json& line : json_lines_of(cohort(more).out))
      out.push_back(line.at("completion").as_string() + "|" + line.at("stopped").as_string());
    return out;
  };
  const auto random = completions({"--stop", "7"});
  EXPECT_GT(std::set<std::string>(random.begin(), random.end()).size(), 5u);
  int stopped = 0;
  for (const std::string& each : random) {
    EXPECT_EQ(each.find_first_of("017") == each.npos, each.find("|stop") == each.npos) << each;
    stopped += each.find("|stop") != each.npos;
  }
  EXPECT_GT(stopped, 2);
  const auto greedy = completions({"--temperature", "0"});
  EXPECT_EQ(greedy, std::vector<std::string>(12, greedy[0]));
}

// Pass rates of a test file would make its problems training data.
TEST_F(Commands, EvalWritesNoPassRatesOfATestFileUnlessItIsForced) {
  write_file(dir_.path("sums.jsonl"),
             "{\"prompt\": \"1=\", \"answer\": \"1\"}\n"
             "{\"prompt\": \"2=\", \"answer\": \"2\"}\n");
  write_file(dir_.path("test.jsonl"), "{\"prompt\": \"1=2\", \"answer\": \"1\"}\n");
  train(std::string(kSmallModel) + kSmallSft +
        "data: {jsonl: {path: sums.jsonl, eval_path: test.jsonl}}\n");
  const std::string rated = dir_.path("rated.jsonl");
  expect_bad_input(
      run_cohort({"eval", run_, "--pass-rates", rated}),
      {"--pass-rates: the problems of data.jsonl.eval_path (", "test.jsonl", "hint: "});
  EXPECT_FALSE(fs::exists(rated));
  cohort({"eval", run_, "--pass-rates", rated, "--force"});
  EXPECT_EQ(json_lines(rated).size(), 1u);
  cohort({"eval", run_, "--pass-rates", rated, "data.jsonl.eval_path=[]",
          "data.jsonl.held_out_fraction=1"});
  EXPECT_EQ(json_lines(rated).size(), 2u);
}

TEST_F(Commands, EvalPrintsTheScoresOfTheRun) {
  train(sft_, {"eval.num_samples=4", "eval.k=[1, 4]"});
  const Json last = json_lines(run_ + "/metrics.jsonl").back();
  const Json scores = json_lines_of(cohort({"eval", run_}).out).at(0);
  EXPECT_EQ(metric(scores, "pass@1"), metric(last, "pass@1"));
  EXPECT_EQ(metric(scores, "val_loss"), metric(last, "val_loss"));
  EXPECT_EQ(scores.at("correct").as_string(), "task >= 1");
  EXPECT_EQ(scores.at("problems").as_int(), 8);
  EXPECT_NE(scores.find("sampled_pass@4"), nullptr);
  EXPECT_EQ(json_lines_of(cohort({"eval", run_, "eval.size=5"}).out)[0].at("problems").as_int(), 5);
  // Another file's data.
  write_file(dir_.path("other.yaml"), std::string(kSmallModel) + kSmallSft +
                                          "data: {task: addition, task_sizes: {max_size: 3}}\n");
  cohort({"eval", run_, "--config", dir_.path("other.yaml")});
}

TEST_F(Commands, EvalOfTextPrintsTheValidationLossOfTheRun) {
  train(std::string(kSmallModel) + kSmallPretrain);
  const Json last = json_lines(run_ + "/metrics.jsonl").back();
  EXPECT_EQ(metric(json_lines_of(cohort({"eval", run_}).out).at(0), "val_loss"),
            metric(last, "val_loss"));
}

TEST_F(Commands, EvalOfItsOwnFileDoesNotReadTheTrainingData) {
  const auto scores = [&] {
    Json line = json_lines_of(cohort({"eval", run_}).out).at(0);
    return str(line.at("val_loss").dump(), " ", line.get_or_null("held_out").dump());
  };
  const std::string lines =
      "{\"prompt\": \"1=\", \"answer\": \"1\"}\n{\"prompt\": \"2=\", \"answer\": \"2\"}\n";
  write_file(dir_.path("train.jsonl"), lines);
  write_file(dir_.path("test.jsonl"), "{\"prompt\": \"1=2\", \"answer\": \"1\"}\n");
  train(std::string(kSmallModel) + kSmallSft +
        "data: {jsonl: {path: train.jsonl, eval_path: test.jsonl}}\n");
  const std::string problems = scores();
  for (const std::string& broken : {lines + "{", std::string()}) {
    write_file(dir_.path("train.jsonl"), broken);
    EXPECT_EQ(scores(), problems);
  }
  fs::remove(dir_.path("train.jsonl"));
  EXPECT_EQ(scores(), problems);
  // Several entries of text end with the end of sequence, and so does the held-out text.
  write_file(dir_.path("a.txt"), small_text());
  write_file(dir_.path("b.txt"), small_text());
  write_file(dir_.path("test.txt"), small_text());
  fs::remove_all(run_);
  train(std::string(kSmallModel) + "trainer: pretrain\nsteps: 2\nbatch_size: 4\n" +
        "data: {text: [a.txt, b.txt], eval_text: test.txt}\n");
  const std::string text = scores();
  fs::remove(dir_.path("a.txt"));
  EXPECT_EQ(scores(), text);
}

TEST_F(Commands, EvalTakesAWholeFile) {
  std::string lines;
  for (int i = 0; i < 40; ++i) lines += str("{\"prompt\": \"", i, "=\", \"answer\": \"7\"}\n");
  write_file(dir_.path("sums.jsonl"), lines);
  train(std::string(kSmallModel) + kSmallSft + "data: {jsonl: {path: sums.jsonl}}\n",
        {"eval.size=1"});
  const auto eval = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments{"eval", run_};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return cohort(arguments);
  };
  const std::string file = dir_.path("test.jsonl"), eval_path = "data.jsonl.eval_path=" + file;
  write_file(file, lines + "{\"prompt\": \"77777777777777777=\", \"answer\": \"7\"}\n");
  expect_bad_input(run_cohort({"eval", run_, eval_path, "eval.size=0"}),
                   {"test.jsonl:41: ", "1 of 41 held-out problems are too long",
                    "; the model has no larger context"});
  expect_bad_input(run_cohort({"generate", run_, std::string(17, '7')}),
                   {"prompt 0 has 17 tokens, the model's context is 16",
                    "; hint: shorter prompts; the model has no larger context"});
  const Output all = eval({eval_path, "eval.size=0", "data.too_long=skip"});
  EXPECT_NE(all.err.find("data.too_long: skipped 1 of 41 held-out problems"), all.err.npos)
      << all.err;
  const Json scores = json_lines_of(all.out).at(0);
  EXPECT_EQ(scores.at("problems").as_int(), 40);
  EXPECT_EQ(scores.at("held_out").as_int(), 41);
  EXPECT_GT(metric(scores, "val_loss"), 0);
  const Output some = eval({eval_path, "eval.size=5"});
  EXPECT_EQ(json_lines_of(some.out).at(0).at("problems").as_int(), 5);
  EXPECT_NE(
      some.err.find("eval.size: 5 of 41 held-out problems, those with the smallest hashes; hint: "),
      some.err.npos)
      << some.err;
  // This file has the same problems, and is held out completely.
  const Output whole = eval({"data.jsonl.held_out_fraction=1", "eval.size=0"});
  EXPECT_EQ(metric(json_lines_of(whole.out).at(0), "val_loss"), metric(scores, "val_loss"));
  expect_bad_input(run_cohort({"eval", run_, "data.jsonl.held_out_fraction=0"}),
                   {"nothing is held out to evaluate on; hint: data.jsonl.eval_path=FILE"});
}

TEST_F(Commands, EvalWritesPassRatesThatACurriculumTakes) {
  std::string lines;
  for (int i = 0; i < 30; ++i)
    lines += str("{\"prompt\": \"", i, "=\", \"answer\": \"", i % 2, "\"}\n");
  write_file(dir_.path("sums.jsonl"), lines);
  const std::string config =
      std::string(kSmallModel) + kSmallSft + "data: {jsonl: {path: sums.jsonl}}\n";
  train(config);
  const Json scores = json_lines_of(cohort({"eval", run_, "data.jsonl.held_out_fraction=1",
                                            "eval.size=0", "eval.num_samples=4", "eval.k=[1]",
                                            "--pass-rates", dir_.path("rated.jsonl")})
                                        .out)
                          .at(0);
  const std::vector<Json> rated = json_lines(dir_.path("rated.jsonl"));
  ASSERT_EQ(rated.size(), 30u);
  double sum = 0;
  for (const Json& problem : rated) sum += metric(problem, "pass_rate");
  EXPECT_NEAR(sum / 30, metric(scores, "sampled_pass@1"), 1e-12);
  EXPECT_EQ(rated[29].at("prompt").as_string(), "29=");
  train(config, {"data.jsonl.path=" + dir_.path("rated.jsonl"), "data.curriculum=pass_rate"});
  expect_bad_input(run_cohort({"train", dir_.path("run.yaml"), "data.curriculum=pass_rate"}),
                   {"sums.jsonl:1: ", "expected the field 'pass_rate'"});
}

TEST_F(Commands, EvalTakesAWholeText) {
  train(std::string(kSmallModel) + kSmallPretrain);
  const Json part = json_lines_of(cohort({"eval", run_}).out).at(0),
             whole = json_lines_of(cohort({"eval", run_, "data.held_out_fraction=1"}).out).at(0);
  EXPECT_NE(metric(whole, "val_loss"), metric(part, "val_loss"));
  EXPECT_NEAR(metric(whole, "val_loss"), metric(part, "val_loss"), 0.2);
}

TEST_F(Commands, TrainWithoutHeldOutProblemsSaysSo) {
  std::string lines;
  for (int i = 0; i < 20; ++i) lines += str("{\"prompt\": \"", i, "=\", \"answer\": \"7\"}\n");
  write_file(dir_.path("sums.jsonl"), lines);
  const Output output =
      train(std::string(kSmallModel) + kSmallSft + "data: {jsonl: {path: sums.jsonl}}\n",
            {"data.jsonl.held_out_fraction=0"});
  EXPECT_NE(
      output.err.find("held_out_fraction: 0; nothing of the data is held out for evaluations"),
      std::string::npos)
      << output.err;
  EXPECT_NE(output.out.find("run: done, with no held-out problems to score, in "),
            std::string::npos)
      << output.out;
}

// A run of an older version, which chose by weight: now the user selects the reward.
TEST_F(Commands, EvalOfSeveralRewardsNeedsACorrectnessRule) {
  std::string lines;
  for (int i = 0; i < 20; ++i) lines += str("{\"prompt\": \"", i, "=\", \"answer\": \"7\"}\n");
  write_file(dir_.path("sums.jsonl"), lines);
  train(std::string(kSmallModel) + kSmallSft +
            "data: {jsonl: {path: sums.jsonl, held_out_fraction: 0.3}}\n"
            "rewards: [{name: numeric}, {name: format, pattern: '.'}]\n",
        {"eval.correct.reward=numeric", "eval.size=2"});
  std::string config = read_file(run_ + "/config.yaml");
  const size_t at = config.find("reward: numeric");
  ASSERT_NE(at, std::string::npos);
  write_file(run_ + "/config.yaml", config.replace(at, 15, "reward: \"\""));
  expect_bad_input(run_cohort({"eval", run_}),
                   {"there are 2 rewards (numeric, format)", "hint: eval.correct.reward=numeric"});
  const Json scores = json_lines_of(cohort({"eval", run_, "eval.correct.reward=format"}).out).at(0);
  EXPECT_EQ(scores.at("correct").as_string(), "format >= 1");
}

TEST_F(Commands, TrainWithoutHeldOutTextSaysSo) {
  const Output output =
      train(std::string(kSmallModel) + kSmallPretrain, {"data.held_out_fraction=0"});
  EXPECT_EQ(output.out.find("validation loss"), std::string::npos) << output.out;
  EXPECT_NE(output.out.find("run: done, with no held-out text to score, in "), std::string::npos)
      << output.out;
  EXPECT_TRUE(json_lines_of(cohort({"eval", run_}).out).at(0).at("val_loss").is_null());
}

TEST_F(Commands, TrainPrintsDirectoryScoreAndSteps) {
  const Output output = train(sft_);
  EXPECT_EQ(output.out.find("run directory: " + run_ + "\n"), 0u) << output.out;
  EXPECT_NE(output.out.find("run: pass@1 (task) 0.00 -> "), std::string::npos) << output.out;
  EXPECT_NE(output.out.find(", validation loss "), std::string::npos) << output.out;
  EXPECT_NE(output.out.find("step 6: pass@1 (task) 0.0000, val_loss "), std::string::npos)
      << output.out;
  EXPECT_NE(output.err.find("sft 6/6"), std::string::npos) << output.err;
  for (const char* file : {"config.yaml", "log.txt", "metrics.jsonl", "completions.jsonl"})
    EXPECT_TRUE(fs::exists(run_ + "/" + file)) << file;
}

TEST_F(Commands, CheckPrintsSizesAndTrainsNothing) {
  write_file(dir_.path("run.yaml"), "output_dir: run\n" + std::string(kSmallModel) + kSmallData +
                                        "stages:\n  - {trainer: sft}\n  - {trainer: grpo, beta: "
                                        "0.1, rewards: [{name: task}]}\n");
  const Output output = cohort({"check", dir_.path("run.yaml"), "batch_size=5"});
  // vocabulary 13, width 16, MLP 48: 2 * 13 * 16 + 4 * 16 * 16 + 3 * 16 * 48 + 3 * 16.
  for (const char* text :
       {"sft\n", "grpo\n", "parameters                   3792\n",
        "vocabulary                   13\n", "completions per step", "32 prompts x 8 = 256",
        "memory: reference", "memory: peak per rank", "ok; a run would go to "})
    EXPECT_NE(output.out.find(text), std::string::npos) << text << "\n" << output.out;
  EXPECT_FALSE(fs::exists(run_));
}

TEST_F(Commands, CheckPrintsPromptsAndTheRewardsOfTheirAnswers) {
  std::string lines;
  for (int i = 0; i < 20; ++i)
    lines += str("{\"prompt\": \"", i, "+\\n1\", \"answer\": \"", i + 1, "\"}\n");
  write_file(dir_.path("sums.jsonl"), lines +
                                          "{\"prompt\": \"11111111111111111111\", "
                                          "\"answer\": \"1\"}\n");
  write_file(dir_.path("run.yaml"),
             "output_dir: run\n" + std::string(kSmallModel) +
                 "data: {too_long: skip, jsonl: {path: sums.jsonl, eval_path: sums.jsonl, answer: "
                 "'{answer}', prompt: '{prompt}=', solution: '#{answer}'}}\n"
                 "stages:\n  - {trainer: sft}\n  - {trainer: grpo, rewards: [{name: numeric, "
                 "pattern: '#(.*)'}]}\n");
  Output output = cohort({"check", dir_.path("run.yaml"), "max_completion_length=11"});
  const std::string example =
      "  example 2: prompt            '1+\\n1='\n"
      "             answer            '2'\n"
      "             solution          '#2'\n";
  for (const std::string& text :
       {example + "  example 3: prompt ", example + "             its rewards       numeric 1; ",
        std::string("  held-out                     8 of 21 problems\n"),
        std::string("  data.too_long                skipped 1 of 21 training and 1 of 9 held-out"),
        std::string("  completion capacity          10 of 11 tokens after the longest prompt\n")})
    EXPECT_NE(output.out.find(text), std::string::npos) << text << "\n" << output.out;
  EXPECT_NE(
      output.err.find("data: 20 of the 21 held-out problems are also trained on, the first: "),
      std::string::npos)
      << output.err;
  EXPECT_EQ(output.err.find("rewards: "), std::string::npos) << output.err;
  output = cohort({"check", dir_.path("run.yaml"), "rewards=[{name: numeric}]"});
  EXPECT_NE(output.out.find("numeric 0; total 0\n"), std::string::npos) << output.out;
  EXPECT_NE(output.err.find("rewards: 20 of 20 gold answers get less than the rewards can give; "
                            "the first: '#1' after '0+\\n1=' gets numeric 0; total 0; hint: "),
            std::string::npos)
      << output.err;
}

// The question is printed, however long the text before it.
TEST_F(Commands, CheckPrintsTheQuestionOfLongPrompts) {
  std::string lines;
  for (int i = 0; i < 4; ++i)
    lines += str("{\"q\": \"", std::string(900, 'x'), " what is ", i, "+1?\", \"answer\": \"",
                 i + 1, "\"}\n");
  write_file(dir_.path("sums.jsonl"), lines);
  write_file(dir_.path("run.yaml"),
             "output_dir: run\ntrainer: sft\nmodel: {num_layers: 1, d_model: "
             "16, num_heads: 2, context: 2000}\neval: {size: 8}\n"
             "data: {jsonl: {path: sums.jsonl, prompt: '{q}', "
             "held_out_fraction: 0}}\n");
  const std::string some = cohort({"check", dir_.path("run.yaml")}).out,
                    all = cohort({"check", dir_.path("run.yaml"), "--full"}).out;
  for (int i = 0; i < 3; ++i) {
    EXPECT_NE(some.find(str("x what is ", i, "+1?'\n")), some.npos) << some;
    EXPECT_NE(all.find(str("'", std::string(900, 'x'), " what is ", i, "+1?'\n")), all.npos);
  }
  EXPECT_EQ(some.find(std::string(700, 'x')), some.npos);
  EXPECT_NE(some.find("x...x"), some.npos);
}

TEST_F(Commands, CheckOfATrainingOnGpusNeedsNone) {
  write_file(dir_.path("run.yaml"), "output_dir: run\ndevice: cuda\n" + std::string(kSmallModel) +
                                        kSmallData + kSmallGrpo);
  const auto check = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments{"check", dir_.path("run.yaml"), "prompts_per_step=3001",
                                       "max_concurrent=100000"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_cohort(arguments);
  };
  const auto rollouts = [](const Output& output) {
    const std::string name = "memory: rollouts";
    return std::stod(output.out.substr(output.out.find(name) + name.size()));
  };
  const Output one = check({}), two = check({"--gpus", "2"});
  ASSERT_EQ(one.code, 0) << one.err;
  ASSERT_EQ(two.code, 0) << two.err;
  EXPECT_EQ(one.out.find("not on this machine") == std::string::npos, cuda_device_count() > 0)
      << one.out;
  EXPECT_NE(two.out.find("cuda, 2 ranks"), std::string::npos) << two.out;
  // The prompts of a rank are 1501 of 3001.
  EXPECT_NEAR(rollouts(two) / rollouts(one), 0.5, 0.1) << two.out;
  EXPECT_FALSE(fs::exists(run_));
  expect_bad_input(check({"--gpus", "8", "device=cpu"}), {"--gpus: expected device: cuda"});
}

TEST_F(Commands, HelpListsOptionsAndKeysListsConfigurationKeys) {
  const std::string help = cohort({"--help"}).out;
  for (const char* command : {"train", "check", "generate", "logprobs", "eval", "gradcheck"}) {
    EXPECT_NE(help.find(command), std::string::npos) << command;
    EXPECT_NE(cohort({command, "--help"}).out.find("Usage"), std::string::npos) << command;
  }
  for (const std::string command : {"train", "check", "eval"}) {
    const Output keys = cohort({command, "--keys"});
    const std::string options = cohort({command, "--help"}).out;
    EXPECT_EQ(keys.code, 0) << keys.err;
    EXPECT_NE(options.find("--keys"), std::string::npos) << command;
    for (const char* key : {"learning_rate", "num_generations", "d_model", "held_out_fraction",
                            "scale_rewards", "keep_last", "stages:", "parity", "exact_match"}) {
      EXPECT_NE(keys.out.find(key), std::string::npos) << command << " " << key;
      EXPECT_EQ(options.find(key) != std::string::npos, command == "train") << command << key;
    }
  }
  EXPECT_NE(cohort({"generate", "--help"}).out.find("--top-p"), std::string::npos);
  EXPECT_NE(cohort({"logprobs", "--help"}).out.find("--eos"), std::string::npos);
}

TEST_F(Commands, VersionSaysWhetherCudaIsInTheBuild) {
  const std::string out = cohort({"--version"}).out;
  EXPECT_EQ(out.rfind("cohort 0.", 0), 0u) << out;
  EXPECT_NE(out.find(" CUDA)\n"), std::string::npos) << out;
}

// Lost output is an error.
TEST_F(Commands, OutputThatCannotBeWrittenIsAnError) {
  train(sft_);
  const std::string model = " '" + run_ + "' ", yaml = " '" + dir_.path("run.yaml") + "' ";
  for (const std::string& arguments :
       {"generate" + model + "1+1= --num 2",
        "logprobs" + model + "1+1=", "eval" + model + "eval.size=2", "check" + yaml,
        std::string("gradcheck silu"), std::string("--help"), std::string("--version")}) {
    SCOPED_TRACE(arguments);
    const Output output = shell(arguments + " > /dev/full");
    EXPECT_EQ(output.code, 1);
    EXPECT_EQ(output.err.rfind("cohort: cannot write to standard output: No space left", 0), 0u)
        << output.err;
  }
}

TEST_F(Commands, InputThatCannotBeReadIsNotEmpty) {
  train(sft_);
  for (const char* command : {"generate", "logprobs"}) {
    const Output output = shell(str(command, " '", run_, "' < /"));
    EXPECT_EQ(output.code, 2);
    EXPECT_NE(output.err.find("cohort: cannot read standard input: Is a directory; hint: "),
              std::string::npos)
        << output.err;
    EXPECT_EQ(cohort({command, run_}, "").out, "");
  }
}

TEST_F(Commands, GradcheckPrintsTheCasesOfAnOp) {
  const Output output = cohort({"gradcheck", "silu"});
  EXPECT_NE(output.out.find("silu"), std::string::npos);
  EXPECT_NE(output.out.find(" 0 failed"), std::string::npos) << output.out;
  EXPECT_EQ(output.out.find("linear"), std::string::npos);
}

TEST_F(Commands, OutOfMemoryComesWithTheMemoryPlan) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizers need more than any limit";
#endif
  write_file(dir_.path("run.yaml"), "output_dir: run\n" + sft_);
  rlimit before{};
  getrlimit(RLIMIT_AS, &before);
  rlimit limit = before;
  limit.rlim_cur = rlim_t{3} << 29;  // the first projection takes 2 GiB
  ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
  Process process({"train", dir_.path("run.yaml"), "model.d_model=16384"});
  setrlimit(RLIMIT_AS, &before);
  const Output output = process.wait();
  EXPECT_EQ(output.code, 1);
  for (const char* text : {"[allocator] out of memory", "memory plan of sft: parameters"})
    EXPECT_NE(output.err.find(text), std::string::npos) << output.err;
}

}  // namespace
}  // namespace cohort::test
