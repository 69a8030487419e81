// Completions of problems as training data: which are kept, that training on their lines teaches
// what was sampled, and bytes that depend on nothing else.
#include "job/sample_problems.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>

#include "data/dataset.h"
#include "rl/environment.h"
#include "tests/job/small_runs.h"
#include "tests/support/chat_tokenizer.h"
#include "trainers/sampling.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

class SampledProblems : public testing::Test {
 protected:
  // A run with some rewards, of problems as texts or as conversations.
  void train(const std::string& yaml) {
    plan_ = small_plan(dir_, "run", yaml);
    loaded_ = load_model(find_checkpoint(train_new(plan_)), DType::kF32);
  }
  void train_on_texts() {
    train(str(kSmallModel, kSmallData, kSmallGrpo));
    std::string lines;
    for (int i = 0; i < 7; ++i)
      lines += str("{\"prompt\": \"", i, "+1", i, "=\", \"answer\": \"", i + 10 + i, "\"}\n");
    write_file(problems_, lines);
  }
  void train_on_conversations(const std::string& keys = "") {
    for (const auto& [name, text] : chat_files(kShowsTools)) {
      fs::create_directories(dir_.path("tokenizer"));
      write_file(dir_.path("tokenizer/" + name), text);
    }
    std::string lines;
    for (int i = 0; i < 5; ++i)
      lines += str(R"({"prompt": [{"role": "user", "content": "q)", i, R"("}], "answer": "a")",
                   i % 2 == 0 ? R"(, "tools": [{"name": "f"}])" : "", "}\n");
    write_file(problems_, lines);
    const ExpectLog random("starts from random weights");
    train(str("trainer: grpo\nsteps: 1\nprompts_per_step: 2\nnum_generations: 2\nnum_threads: 1\n",
              "max_completion_length: 40\nmodel: {num_layers: 1, d_model: 16, num_heads: 2, "
              "context: 128}\nrewards: [{name: format, pattern: '.*[a-m].*'}]\neval: {every: 0, "
              "at_start: no}\ndata: {tokenizer_path: tokenizer, system: Be kind., jsonl: {path: "
              "problems.jsonl, held_out_fraction: 0}}\n",
              keys));
  }
  struct Sampled {
    Json counts;
    std::string text;
    std::vector<Json> lines;
  };
  // The lines of a new file.
  Sampled sample(SampleRequest request, const std::vector<std::string>& overrides = {}) {
    request.problems = problems_;
    request.output = dir_.path(str("out-", next_++, ".jsonl"));
    RunPlan plan = load_plan(dir_.path("run.yaml"), overrides);
    const auto callback = std::make_shared<const Callback>(callback_);
    for (RewardConfig& reward : plan.stages[0].rewards)
      if (reward.name == "mine") reward.program.callback = callback;
    if (EnvironmentConfig& environment = plan.stages[0].environment; environment.is_set())
      environment.program.callback = callback;
    const Json counts = sample_problems(plan, loaded_, request);
    const std::string text = read_file(request.output);
    return {counts, text, json_lines_of(text)};
  }
  static double sum_of(const Json& line) { return metric(line.at("rewards"), "sum"); }
  // Lines by their prompt.
  static std::map<std::string, std::vector<Json>> by_prompt(const std::vector<Json>& lines) {
    std::map<std::string, std::vector<Json>> out;
    for (const Json& line : lines) out[line.at("prompt").dump()].push_back(line);
    return out;
  }
  static std::string dump(const std::vector<Json>& lines) {
    std::string out;
    for (const Json& line : lines) out += line.dump() + "\n";
    return out;
  }
  // The sequences that training on a file of lines teaches, with their loss masks.
  std::vector<TokenSequence> taught(const std::string& lines, const std::string& keys = "") const {
    write_file(dir_.path("lines.jsonl"), lines);
    write_file(dir_.path("sft.yaml"), str("trainer: sft\ndata: {", keys,
                                          "jsonl: {path: lines.jsonl, held_out_fraction: 0}}\n"));
    const TrainConfig config = load_plan(dir_.path("sft.yaml"), {}).stages[0];
    const Dataset data =
        load_dataset(config, make_tokenizer(loaded_.tokenizer->files(), "tokenizer"));
    std::vector<TokenSequence> out;
    for (int64_t i = 0; i < data.train->size(); ++i)
      out.push_back(supervised_sequence(data.train->get(i), *data.tokenizer, 1000));
    return out;
  }
  // The trajectories of all problems, sampled at once.
  std::vector<Trajectory> trajectories(int64_t num) const {
    const TrainConfig& config = plan_.stages[0];
    write_file(dir_.path("ask.yaml"),
               "trainer: grpo\nsteps: 1\nrewards: [{name: format, pattern: "
               "a}]\ndata: {system: Be kind., jsonl: {path: problems.jsonl, "
               "held_out_fraction: 0}}\n");
    const TrainConfig ask = load_plan(dir_.path("ask.yaml"), {}).stages[0];
    const Dataset data = load_dataset(ask, make_tokenizer(loaded_.tokenizer->files(), ""));
    std::vector<Example> problems;
    for (int64_t i = 0; i < data.train->size(); ++i) problems.push_back(data.train->get(i));
    Engine engine(*loaded_.model, {});
    const Sampler sampler(engine, *loaded_.tokenizer,
                          sampling_for(config.sampling, ask.data, *loaded_.tokenizer));
    return sampler.sample(problems, num, {.seed = 1, .step = -1});
  }
  static constexpr const char* kShowsTools =
      "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|start|>{{ m.role }}\n"
      "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
      "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
      "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}";

  const TempDir dir_;
  const std::string problems_ = dir_.path("problems.jsonl");
  RunPlan plan_;
  LoadedModel loaded_;
  Callback callback_;
  int next_ = 0;
};

TEST_F(SampledProblems, WriteWhatTheOptionsSelect) {
  train_on_texts();
  const Sampled all = sample({.num = 36});
  // Some are truncated, and a problem has lines in one place, in the order of the file.
  const int64_t kept = all.counts.at("kept").as_int();
  EXPECT_EQ(kept, std::ssize(all.lines));
  EXPECT_EQ(all.counts.at("problems").as_int(), 7);
  EXPECT_EQ(all.counts.at("completions").as_int(), 252);
  EXPECT_EQ(all.counts.at("failed").as_int(), 0);
  EXPECT_EQ(kept + all.counts.at("truncated").as_int(), 252);
  EXPECT_GT(kept, 10);
  EXPECT_GT(all.counts.at("truncated").as_int(), 10);
  const auto problems = by_prompt(all.lines);
  std::string in_order, equal, most, distinct, best, pairs;
  int64_t solved = 0;
  for (const auto& [prompt, lines] : problems) {  // prompts are in the order of the alphabet too
    in_order += dump(lines);
    std::vector<Json> right;
    for (const Json& line : lines)
      if (metric(line.at("rewards"), "format") >= 1) right.push_back(line);
    solved += !right.empty();
    equal += dump(right);
    most += dump({right.begin(), right.begin() + std::min<long>(2, std::ssize(right))});
    std::vector<Json> different;
    for (const Json& line : lines)
      if (std::ranges::none_of(different, [&](const Json& other) {
            return other.at("completion").dump() == line.at("completion").dump();
          }))
        different.push_back(line);
    distinct += dump(different);
    const Json* high = &lines[0];
    const Json* low = &lines[0];
    for (const Json& line : lines) {
      if (sum_of(line) > sum_of(*high)) high = &line;
      if (sum_of(line) < sum_of(*low)) low = &line;
    }
    best += high->dump() + "\n";
    if (sum_of(*high) == sum_of(*low)) continue;
    pairs += Json()
                 .set("prompt", high->at("prompt"))
                 .set("chosen", high->at("completion"))
                 .set("chosen_rewards", high->at("rewards"))
                 .set("rejected", low->at("completion"))
                 .set("rejected_rewards", low->at("rewards"))
                 .dump() +
             "\n";
  }
  EXPECT_EQ(in_order, all.text);
  EXPECT_NE(distinct, all.text) << "there are equal completions";
  EXPECT_GT(std::ranges::count(pairs, '\n'), 2);
  const Sampled right = sample({.num = 36, .keep = {"format >= 1"}});
  EXPECT_EQ(right.text, equal);
  EXPECT_EQ(right.counts.at("solved").as_int(), solved);
  EXPECT_EQ(sample({.num = 36, .keep = {"format >= 1"}, .most = 2}).text, most);
  EXPECT_EQ(sample({.num = 36, .distinct = true}).text, distinct);
  EXPECT_EQ(sample({.num = 36, .choice = SampleChoice::kBest}).text, best);
  const Sampled pair = sample({.num = 36, .choice = SampleChoice::kPairs});
  EXPECT_EQ(pair.text, pairs);
  EXPECT_EQ(pair.counts.at("kept").as_int(), std::ranges::count(pairs, '\n'));
}

TEST_F(SampledProblems, KeepByConditionsOnNamesAndOnTheSum) {
  train_on_texts();
  const std::vector<Json> all = sample({.num = 8}).lines;
  const auto expect = [&](const std::vector<std::string>& keep, auto holds) {
    std::vector<Json> wanted;
    for (const Json& line : all)
      if (holds(metric(line.at("rewards"), "format"), sum_of(line))) wanted.push_back(line);
    EXPECT_EQ(sample({.num = 8, .keep = keep}).text, dump(wanted)) << keep[0];
  };
  expect({"format>=1"}, [](double f, double) { return f >= 1; });
  expect({" format < 1 "}, [](double f, double) { return f < 1; });
  expect({"format == 0", "sum <= 0"}, [](double f, double s) { return f == 0 && s <= 0; });
  expect({"sum > 0", "format > 0.5"}, [](double f, double s) { return s > 0 && f > 0.5; });
  expect({"sum > -1e9"}, [](double, double) { return true; });
  for (const auto& [keep, why] :
       {std::pair("formt >= 1",
                  "--keep: no reward is called 'formt'; there are format, task, sum; did you mean "
                  "'format'?"),
        {"format", "--keep: 'format': expected NAME OP NUMBER, such as \"format >= 1\""},
        {"format => 1", "expected NAME OP NUMBER"},
        {"format = 1", "expected NAME OP NUMBER"},
        {"format >= ", "expected NAME OP NUMBER"},
        {"format >= 1x", "expected NAME OP NUMBER"},
        {"format >= nan", "expected NAME OP NUMBER"},
        {"format >= 1,", "expected NAME OP NUMBER"},
        {">= 1", "expected NAME OP NUMBER"},
        {"", "expected NAME OP NUMBER"}})
    EXPECT_THROW_WITH(sample({.num = 8, .keep = {keep}}), InputError, why);
}

TEST_F(SampledProblems, HaveTheSameBytesForAnyConcurrencyAndInterruption) {
  train_on_texts();
  const SampleRequest request{.num = 5};
  const std::string whole = sample(request).text;
  EXPECT_NE(sample(request, {"seed=2"}).text, whole);
  for (const char* key : {"prompts_per_step=1", "prompts_per_step=3", "prompts_per_step=100",
                          "max_concurrent=1", "max_concurrent=4"})
    EXPECT_EQ(sample(request, {key}).text, whole) << key;
  SampleRequest again = request;
  again.problems = problems_;
  again.output = dir_.path("cut.jsonl");
  const RunPlan plan = load_plan(dir_.path("run.yaml"), {});
  const std::string counts = sample_problems(plan, loaded_, again).dump();
  for (size_t bytes = 0; bytes < whole.size(); bytes += 37) {
    write_file(again.output, whole.substr(0, bytes));
    EXPECT_EQ(sample_problems(plan, loaded_, again).dump(), counts) << bytes;
    EXPECT_EQ(read_file(again.output), whole) << bytes;
  }
}

TEST_F(SampledProblems, ContinueOnlyTheSameCommand) {
  train_on_texts();
  SampleRequest request{.num = 5, .keep = {"format >= 0"}};
  request.problems = problems_;
  request.output = dir_.path("out.jsonl");
  const auto run = [&](const SampleRequest& r, const std::vector<std::string>& overrides = {}) {
    sample_problems(load_plan(dir_.path("run.yaml"), overrides), loaded_, r);
  };
  run(request);
  const std::string text = read_file(request.output);
  const auto refuses = [&](const SampleRequest& r, const std::vector<std::string>& overrides,
                           const char* name) {
    EXPECT_THROW_WITH(run(r, overrides), InputError,
                      str("was written with another setting: ", name, " was "));
    EXPECT_EQ(read_file(request.output), text);
  };
  for (const auto& [key, name] :
       {std::pair("seed=2", "seed"),
        {"temperature=0.5", "temperature"},
        {"top_p=0.9", "top_p"},
        {"rewards.0.weight=2", "rewards.0.weight"},
        {"rewards=[{name: format, pattern: '.*2.*'}, {name: task}]", "rewards.0.pattern"}})
    refuses(request, {key}, name);
  SampleRequest other = request;
  other.num = 6;
  refuses(other, {}, "--num");
  other = request;
  other.keep = {"format >= 1"};
  refuses(other, {}, "--keep");
  other = request;
  other.choice = SampleChoice::kBest;
  refuses(other, {}, "choice");
  // Keys that change no byte may differ.
  run(request, {"prompts_per_step=2", "num_threads=2", "max_concurrent=3"});
  const std::string lines = read_file(problems_);
  write_file(problems_, lines + lines.substr(0, lines.find('\n') + 1));
  refuses(request, {}, "problems");
  write_file(problems_, lines);
  Tensor head = loaded_.model->head().weight.value();
  head.fill_(0);
  refuses(request, {}, "model");
}

TEST_F(SampledProblems, TextsTeachExactlyWhatWasSampled) {
  train_on_texts();
  const Sampled sampled = sample({.num = 16});
  const std::vector<TokenSequence> lines = taught(sampled.text);
  size_t next = 0;
  for (const Trajectory& t : trajectories(16)) {
    if (t.truncated()) continue;
    ASSERT_LT(next, lines.size());
    EXPECT_EQ(lines[next].tokens, t.tokens);
    EXPECT_EQ(lines[next++].loss_mask, t.loss_mask);
  }
  EXPECT_EQ(next, lines.size());
  EXPECT_GT(next, 10u);
}

TEST_F(SampledProblems, ConversationsTeachExactlyWhatWasSampled) {
  train_on_conversations();
  const Sampled sampled = sample({.num = 24});
  const std::vector<TokenSequence> lines = taught(sampled.text);
  size_t next = 0;
  int64_t others = 0;  // special tokens inside a turn have no text
  for (const Trajectory& t : trajectories(24)) {
    if (t.truncated()) continue;
    ASSERT_LT(next, lines.size());
    const bool equal = lines[next].tokens == t.tokens;
    others += !equal;
    if (equal) {
      EXPECT_EQ(lines[next].loss_mask, t.loss_mask);
    }
    ++next;
  }
  EXPECT_EQ(next, lines.size());
  EXPECT_GT(static_cast<int64_t>(next) - others, 10);
  // The system message of the run is part of the prompt, and so are the tools of the line.
  const Json& line = sampled.lines[0];
  EXPECT_EQ(line.at("prompt").dump(),
            R"([{"role":"system","content":"Be kind."},{"role":"user","content":"q0"}])");
  EXPECT_EQ(line.at("tools").dump(), R"([{"name":"f"}])");
  EXPECT_EQ(line.at("completion").as_array().at(0).at("role").as_string(), "assistant");
  const Sampled pairs = sample({.num = 24, .choice = SampleChoice::kPairs});
  ASSERT_GT(pairs.lines.size(), 0u);
  for (const Json& pair : pairs.lines) {
    EXPECT_EQ(pair.at("chosen").as_array().at(0).at("role").as_string(), "assistant");
    EXPECT_EQ(pair.at("rejected").as_array().at(0).at("role").as_string(), "assistant");
    EXPECT_GT(metric(pair.at("chosen_rewards"), "sum"), metric(pair.at("rejected_rewards"), "sum"));
  }
}

// A dialogue is the completion of its prompt: all its turns are taught, and the replies are not.
TEST_F(SampledProblems, DialoguesTeachEveryTurn) {
  train_on_conversations();
  callback_ = [&](std::span<const Json> requests) {
    std::vector<Json> out;
    for (const Json& r : requests) {
      if (r.at("index").as_int() % 5 == 0)
        out.push_back(Json().set("error", "no reply"));
      else if (r.at("turn").as_int() == 1)
        out.push_back(Json().set("observation", "more"));
      else
        out.push_back(Json().set("done", true).set("reward", 2));
    }
    return out;
  };
  // The end of a turn is likely, and its beginning, which has no text, impossible.
  const std::vector<std::string> keys = {"environment.name=mine", "rewards=[{name: environment}]",
                                         "logit_bias=[\"97:3\", \"96:-100\"]"};
  const ExpectLog warning(" completions have no score and are not kept; the first: environment: ");
  const Sampled sampled = sample({.num = 30}, keys);
  EXPECT_GT(sampled.counts.at("failed").as_int(), 10);
  ASSERT_GT(sampled.lines.size(), 20u);
  for (const Json& line : sampled.lines) {
    const Json::Array& turns = line.at("completion").as_array();
    ASSERT_EQ(turns.size(), 3u);
    EXPECT_EQ(turns[1].dump(), R"({"role":"user","content":"more"})");
    EXPECT_EQ(sum_of(line), 2);
  }
  for (const TokenSequence& s : taught(sampled.text)) {
    int64_t spans = 0;
    for (size_t i = 1; i < s.tokens.size(); ++i) spans += s.loss_mask[i] > s.loss_mask[i - 1];
    EXPECT_EQ(spans, 2);
  }
}

// A failed reward is no score, also where another reward has one; null is a reward that does not
// apply.
TEST_F(SampledProblems, AFailedRewardIsNoScore) {
  train_on_texts();
  const std::vector<Json> all = sample({.num = 6}).lines;
  callback_ = [&](std::span<const Json> requests) {
    std::vector<Json> out;
    for (const Json& r : requests) {
      const int64_t index = r.at("index").as_int();
      if (index % 3 == 0)
        out.push_back(Json().set("error", str("no answer to ", index)));
      else
        out.push_back(index % 3 == 1 ? Json(0.5) : Json());
    }
    return out;
  };
  const std::vector<std::string> mine = {
      "rewards=[{name: format, pattern: '.*1.*'}, {name: mine}]"};
  const ExpectLog warning(
      "14 of 42 completions have no score and are not kept; the first: reward mine: ");
  const Sampled some = sample({.num = 6}, mine);
  EXPECT_EQ(some.counts.at("failed").as_int(), 14);
  EXPECT_LT(some.lines.size(), all.size());
  size_t applied = 0;
  for (const Json& line : some.lines) {
    const Json& rewards = line.at("rewards");
    const bool applies = !rewards.at("mine").is_null();
    applied += applies;
    EXPECT_EQ(sum_of(line), metric(rewards, "format") + (applies ? 0.5 : 0));
  }
  EXPECT_GT(applied, 0u);
  EXPECT_LT(applied, some.lines.size());
  // A reward that does not apply fulfils no condition.
  EXPECT_EQ(sample({.num = 6, .keep = {"mine > -1"}}, mine).lines.size(), applied);
  EXPECT_EQ(sample({.num = 6, .keep = {"mine < 9"}}, mine).lines.size(), applied);
}

TEST_F(SampledProblems, WithoutAnyScoreTheCommandEndsAndContinuesLater) {
  train_on_texts();
  bool fails = false;
  callback_ = [&](std::span<const Json> requests) {
    std::vector<Json> out;
    for (const Json& r : requests) {
      const bool late = r.at("index").as_int() >= 4 * 3;
      out.push_back(fails && late ? Json().set("error", "gone") : Json(1));
    }
    return out;
  };
  const std::vector<std::string> keys = {"rewards=[{name: mine}]", "prompts_per_step=2"};
  const std::string whole = sample({.num = 3}, keys).text;
  fails = true;
  EXPECT_THROW_WITH(sample({.num = 3}, keys), Error,
                    "the completions of 3 problems in a row, up to problem 7, have no score; the "
                    "first: reward mine: ");
  --next_;
  const size_t before = read_file(dir_.path(str("out-", next_, ".jsonl"))).size();
  EXPECT_GT(before, 0u);
  EXPECT_LT(before, whole.size());
  fails = false;
  EXPECT_EQ(sample({.num = 3}, keys).text, whole);
}

TEST_F(SampledProblems, RefuseWhatTheyCannotSample) {
  train_on_texts();
  const auto greedy = [&](int64_t num) {
    RunPlan plan = plan_;
    plan.stages[0].sampling.temperature = 0;  // as a run of sft may have it
    return sample_problems(plan, loaded_,
                           {.problems = problems_, .output = dir_.path("greedy"), .num = num});
  };
  EXPECT_THROW_WITH(sample({.num = 1, .choice = SampleChoice::kPairs}), InputError,
                    "--pairs: a pair needs two completions");
  EXPECT_THROW_WITH(greedy(2), InputError,
                    "temperature: 0 makes all completions of a problem equal; hint: ");
  EXPECT_EQ(greedy(1).at("problems").as_int(), 7);
  write_file(problems_, "{\"prompt\": \"1+1=\"}\n{\"prompt\": \n");
  EXPECT_THROW_WITH(sample({.num = 2}), InputError, "--problems: ");
  write_file(problems_, "{\"prompt\": \"1+1=\", \"answer\": \"2\"}\n{\"prompt\": \"" +
                            std::string(17, '1') + "\", \"answer\": \"2\"}\n");
  EXPECT_THROW_WITH(sample({.num = 2}), InputError, "problems.jsonl:2: ");
  fs::remove(problems_);
  EXPECT_THROW_WITH(sample({.num = 2}), InputError, "--problems: ");
  for (int i = 0; i < next_; ++i) EXPECT_FALSE(fs::exists(dir_.path(str("out-", i, ".jsonl"))));
}

}  // namespace
}  // namespace cohort::test
