// The journal of a run's steps, and their replay in this process.
#include "job/journal.h"

#include <sys/resource.h>
#include <unistd.h>

#include <bit>
#include <filesystem>

#include "core/log.h"
#include "job/replay.h"
#include "sys/files.h"
#include "tests/job/small_runs.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

StepRecord some_record() {
  StepRecord record{.step = 3, .learning_rate = 0.1};
  record.weights_after = 0x8000000000000001u;
  record.plan = "stages:\n";
  record.reward_names = {"task", "format"};
  for (const int64_t index : {2, 5, 9}) {
    RecordedCompletion& c = record.completions.emplace_back();
    c.index = index;
    c.prompt_length = 1;
    c.tokens = {7, 8, static_cast<int32_t>(index)};
    c.loss_mask = {0, 1, 0};
    c.logprobs = {0, -0.25, 0};
    c.rewards = {1, std::nan("")};
    c.total = 1;
  }
  record.completions[1].logprobs[1] = -0.1;  // no f32
  record.completions[1].replies = {
      {.tokens = {9}, .reward = 0.5, .error = "", .messages = Json(Json::Array{1})},
      {.tokens = {}, .done = true, .reward = 0, .error = "lost", .messages = {}}};
  record.advantages = {-0.5, std::nan(""), 0.5};
  return record;
}

TEST(JournalFile, GivesBackEveryBit) {
  const TempDir dir;
  const StepRecord record = some_record();
  write_file(dir.path("file"), encode_record(record));
  const StepRecord read = read_record(dir.path("file"));
  EXPECT_EQ(encode_record(read), encode_record(record));
  EXPECT_EQ(read.weights_after, 0x8000000000000001u);
  EXPECT_EQ(read.plan, record.plan);
  EXPECT_EQ(read.reward_names, record.reward_names);
  ASSERT_EQ(read.completions.size(), 3u);
  const RecordedCompletion* c = read.find(5);
  ASSERT_NE(c, nullptr);
  EXPECT_EQ(read.find(6), nullptr);
  EXPECT_EQ(c->tokens, (std::vector<int32_t>{7, 8, 5}));
  EXPECT_EQ(c->logprobs[1], -0.1);
  EXPECT_TRUE(std::isnan(c->rewards[1]));
  ASSERT_EQ(read.advantages.size(), 3u);
  EXPECT_EQ(read.advantages[2], 0.5);
  ASSERT_EQ(c->replies.size(), 2u);
  EXPECT_EQ(c->replies[1].error, "lost");
  EXPECT_TRUE(c->replies[1].done && !c->replies[0].done);
  EXPECT_EQ(c->replies[0].messages.dump(), "[1]");
  EXPECT_TRUE(c->replies[1].messages.is_null());
}

TEST(JournalFile, EveryFlippedBitAndTruncationIsFound) {
  const TempDir dir;
  const std::string path = dir.path("file"), whole = encode_record(some_record());
  const auto expect_damaged = [&](const std::string& text, const std::string& what) {
    write_file(path, text);
    try {
      read_record(path);
      ADD_FAILURE() << what << " is not found";
    } catch (const InputError& e) {
      EXPECT_NE(std::string(e.what()).find(path), std::string::npos) << e.what();
    }
  };
  for (size_t i = 0; i < whole.size(); ++i)
    for (int bit = 0; bit < 8; ++bit) {
      std::string text = whole;
      text[i] = static_cast<char>(text[i] ^ 1 << bit);
      expect_damaged(text, str("bit ", bit, " of byte ", i));
    }
  for (size_t size = 0; size < whole.size(); ++size)
    expect_damaged(whole.substr(0, size), str("truncation to ", size));
  expect_damaged(whole + "x", "a byte more");
}

// A file with the bytes of a record: in stored blocks of deflate (RFC 1950, RFC 1951).
std::string file_of(const std::string& raw) {
  std::string body = "\x78\x01";
  const auto append = [&](uint32_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) body += static_cast<char>(value >> 8 * i);
  };
  uint32_t a = 1, b = 0;
  for (const char c : raw) {
    a = (a + static_cast<uint8_t>(c)) % 65521;
    b = (b + a) % 65521;
  }
  for (size_t at = 0; at < raw.size(); at += 65535) {
    const std::string block = raw.substr(at, 65535);
    append(at + 65535 >= raw.size(), 1);
    append(static_cast<uint32_t>(block.size()), 2);
    append(~static_cast<uint32_t>(block.size()), 2);
    body += block;
  }
  for (const uint32_t byte : {b >> 8, b, a >> 8, a}) append(byte, 1);
  const std::string start = str("cohort-journal 3 ", raw.size(), " ");
  return str(start, hex(checksum(body, checksum(start))), "\n", body);
}

// A number of elements is believed as far as there are bytes for them.
TEST(JournalFile, WrongCountsTakeNoMemory) {
  const TempDir dir;
  const auto kib = [] {
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
  };
  // 56 bytes of numbers, texts and lists that are empty or 0, and the number of completions.
  constexpr uint64_t kCount = 4 << 20;
  for (const uint64_t count : {kCount, kCount + 1, ~uint64_t{0}, uint64_t{1} << 63}) {
    std::string raw(56, '\0');
    raw.append(reinterpret_cast<const char*>(&count), sizeof count);
    raw.append(kCount, '\0');
    write_file(dir.path("file"), file_of(raw));
    const long before = kib();
    EXPECT_THROW_WITH(read_record(dir.path("file")), InputError,
                      "file: the journal of this step is damaged: ");
    EXPECT_LT(kib() - before, 100 << 10) << count << " of " << sizeof(RecordedCompletion);
  }
}

TEST(JournalFile, RecordsThatNoStepCanHaveAreDamaged) {
  const TempDir dir;
  const std::pair<std::function<void(StepRecord&)>, std::string> cases[] = {
      {[](StepRecord& r) { r.completions[1].loss_mask.pop_back(); },
       "completion 5 has lists of different lengths"},
      {[](StepRecord& r) { r.completions[1].index = 1; }, "its completions are not in order"},
      {[](StepRecord& r) { r.completions[1].replies[0].tokens.clear(); },
       "completion 5 has a reply without tokens"},
  };
  for (const auto& [change, text] : cases) {
    StepRecord record = some_record();
    change(record);
    write_file(dir.path("file"), encode_record(record));
    EXPECT_THROW_WITH(read_record(dir.path("file")), InputError,
                      dir.path("file") + ": the journal of this step is damaged: " + text);
  }
  write_file(dir.path("file"), encode_record(some_record()));
  EXPECT_THROW_WITH(
      read_record(dir.path("file"), [](const StepRecord&) { throw InputError("it is odd"); }),
      InputError, "file: the journal of this step is damaged: it is odd");
}

// Must not be asked.
class Original final : public Environment {
 public:
  std::vector<std::string> stop_strings() const override { return {"!"}; }
  void submit(const Example&, const Trajectory&, int64_t) override { ADD_FAILURE(); }
  std::vector<EnvironmentReply> poll(bool) override { return {}; }
};

// The loss mask has 1 for the turns' tokens.
Trajectory turn(int64_t index, std::vector<int32_t> tokens, std::vector<uint8_t> loss_mask) {
  return {.tokens = std::move(tokens), .loss_mask = std::move(loss_mask), .index = index};
}

TEST(JournalEnvironments, RecordedRepliesAreGivenInOrder) {
  const Original original;
  StepRecord record{.step = 1};
  record.completions.push_back(
      {.index = 4,
       .stop_reason = "stop_string",
       .tokens = {1, 2, 100, 2, 5},
       .replies = {{.tokens = {100, 2}, .reward = 0.25, .error = "", .messages = Json("said")},
                   {.tokens = {}, .done = true, .error = "", .messages = {}}}});
  record.completions.push_back({.index = 6,
                                .stop_reason = "stop_string",
                                .tokens = {1, 3, 100, 3},
                                .replies = record.completions[0].replies});
  ReplayedEnvironment replayed(original, record);
  EXPECT_EQ(replayed.stop_strings(), original.stop_strings());
  replayed.submit({}, turn(4, {1, 2}, {0, 1}), 0);
  const EnvironmentReply first = replayed.poll(true).at(0);
  EXPECT_EQ(first.index, 4);
  EXPECT_EQ(first.tokens, (std::vector<int32_t>{100, 2}));
  EXPECT_FALSE(first.done);
  EXPECT_EQ(first.reward, 0.25);
  EXPECT_EQ(first.messages.as_string(), "said");
  replayed.submit({}, turn(6, {1, 9}, {0, 1}), 0);  // another token than the recorded one
  replayed.submit({}, turn(4, {1, 2, 100, 2, 5}, {0, 1, 0, 0, 1}), 0);
  replayed.submit({}, turn(5, {1}, {1}), 0);  // not recorded
  const std::vector<EnvironmentReply> rest = replayed.poll(true);
  ASSERT_EQ(rest.size(), 3u);
  EXPECT_TRUE(rest[0].done && !rest[0].error.empty());
  EXPECT_TRUE(rest[1].done && rest[1].error.empty());
  EXPECT_TRUE(rest[2].done && !rest[2].error.empty());
}

const std::string kRun = std::string(kSmallModel) + kSmallData + kSmallGrpo;

// Every entry of a folder with its size and time.
std::string listing(const std::string& dir) {
  std::vector<std::string> lines;
  for (const auto& entry : fs::recursive_directory_iterator(dir))
    lines.push_back(str(entry.path().string(), " ",
                        entry.is_regular_file() ? static_cast<int64_t>(entry.file_size()) : -1, " ",
                        entry.last_write_time().time_since_epoch().count()));
  std::sort(lines.begin(), lines.end());
  std::string out;
  for (const std::string& line : lines) out += line + "\n";
  return out;
}

std::string replay_difference(const std::string& run, int64_t step) {
  std::vector<std::string> lines;
  std::string difference;
  try {
    replay_run({.run = run, .step = step}, [&](const std::string& line) { lines.push_back(line); });
  } catch (const ReplayDifference& e) {
    difference = e.what();
  }
  const bool reported = !lines.empty() && lines.back().starts_with(str("step ", step, ": equal: "));
  EXPECT_EQ(reported, difference.empty()) << step;
  return difference;
}

void expect_refused(const std::string& run, int64_t step, const std::string& text) {
  try {
    replay_run({.run = run, .step = step}, [](const std::string&) {});
    ADD_FAILURE() << "step " << step << " is replayed";
  } catch (const InputError& e) {
    EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
  }
}

TEST(Replays, EveryStepIsEqualAndTheRunIsUntouched) {
  const TempDir dir;
  const ExpectLog monitor("step 5: ");  // the tasks are too small to be learned from
  const std::vector<std::vector<std::string>> variants = {
      {"checkpoint.every=2"},
      {"ranks=2", "num_minibatches=2", "dynamic_sampling_rounds=3", "num_iterations=2"},
      {"beta=0.1", "kl_target=0.01", "kl_horizon=24", "ref_sync_every=2", "checkpoint.every=3"},
      {"init_from=" + dir.path("run0"), "lora.rank=2", "beta=0.1", "reference=start"},
      {"dtype=f64", "shuffle_advantages=true", "num_minibatches=3"},
      kSmallDelta,
  };
  for (size_t i = 0; i < variants.size(); ++i) {
    std::vector<std::string> overrides = variants[i];
    overrides.insert(overrides.end(), {"steps=6", "eval.every=2"});
    const std::string run = train_new(small_plan(dir, str("run", i), kRun, overrides));
    logging::set_file({});  // a process of its own has no log.txt
    const std::string before = listing(run);
    for (int64_t step = 1; step <= 6; ++step) EXPECT_EQ(replay_difference(run, step), "") << i;
    EXPECT_TRUE(listing(run) == before) << listing(run);
  }
}

// The order of the problems depends on the recorded rewards of the steps before.
TEST(Replays, AnOnlineCurriculumIsThatOfTheRun) {
  const TempDir dir;
  const ExpectLog random("starts from random weights"), monitor("step 5: ");
  std::string lines;
  for (int i = 0; i < 8; ++i)
    lines += str("{\"prompt\": \"", i, "=\", \"answer\": \"", i < 4 ? "123456789" : "1", "\"}\n");
  write_file(dir.path("data.jsonl"), lines);
  const std::string run = train_new(small_plan(
      dir, "run",
      std::string(kSmallModel) + kSmallGrpo +
          "data: {curriculum: online, jsonl: {path: data.jsonl, held_out_fraction: 0}}\n",
      {"steps=6", "checkpoint.every=4", "dynamic_sampling_rounds=1", "ranks=2",
       "rewards=[{name: format, pattern: '(?s).*'}, {name: contains}]",
       "eval={at_start: false, correct: {reward: contains}}"}));
  for (const int64_t step : {4, 6}) EXPECT_EQ(replay_difference(run, step), "");
}

TEST(Replays, TheLastGrpoStageIsFoundByItsRunAndByItself) {
  const TempDir dir;
  const std::string yaml = std::string(kSmallModel) + kSmallData +
                           "stages:\n- {trainer: sft, steps: 2}\n" +
                           "- {trainer: grpo, steps: 2, prompts_per_step: 2, num_generations: 3, "
                           "rewards: [{name: format, pattern: '.*1.*'}]}\n";
  const std::string run = train_new(small_plan(dir, "run", yaml));
  EXPECT_EQ(replay_difference(run, 2), "");
  EXPECT_EQ(replay_difference(run + "/2-grpo/", 1), "");
  expect_refused(run + "/1-sft", 1, "no stage with trainer: grpo");
  expect_refused(dir.path("none"), 1, "is no run");
}

// Changes the record of a step, and its checksum.
void change_record(const std::string& run, int64_t step,
                   const std::function<void(StepRecord&)>& change) {
  const std::string path = journal_path(run + "/journal", step, 0, 1);
  StepRecord record = read_record(path);
  change(record);
  write_file(path, encode_record(record));
}

void flip_last_bit(double& x) {
  x = std::bit_cast<double>(std::bit_cast<uint64_t>(x) ^ 1);
}

TEST(Replays, TheFirstDifferenceIsFound) {
  const TempDir dir;
  const std::string run =
      train_new(small_plan(dir, "run", kRun, {"steps=4", "checkpoint.every=3"}));
  const std::string journal = read_file(journal_path(run + "/journal", 2, 0, 1));
  const std::pair<std::function<void(StepRecord&)>, std::string> cases[] = {
      {[](StepRecord& r) { flip_last_bit(r.completions[8].logprobs.back()); },
       "step 2: prompt 1, completion 2, token "},
      {[](StepRecord& r) { r.completions[7].tokens.back() ^= 1; },
       "step 2: prompt 1, completion 1, token "},
      {[](StepRecord& r) { flip_last_bit(r.advantages[0]); },
       "step 2: prompt 0, completion 0, advantage "},
      {[](StepRecord& r) { r.completions[3].stop_reason = "turns"; },
       "step 2: prompt 0, completion 3, it ends by "},
      {[](StepRecord& r) { r.weights_before ^= 1; }, "step 2: the hash of the weights before it"},
      {[](StepRecord& r) { r.weights_after ^= 1; }, "step 2: the hash of the weights after it"},
      {[](StepRecord& r) { flip_last_bit(r.learning_rate); }, "step 2: learning rate 0.01 ("},
      {[](StepRecord& r) { r.completions.pop_back(); }, "step 2: prompt 3, completion 5, "},
      {[](StepRecord& r) { r.completions.push_back(r.completions.back()); },
       "step 2: number of completions 24, recorded 25"},
  };
  for (const auto& [change, text] : cases) {
    change_record(run, 2, change);
    for (const int64_t step : {2, 3}) {  // step 3 begins with step 1
      const std::string found = replay_difference(run, step);
      EXPECT_TRUE(found.starts_with(text)) << found << " for " << text;
    }
    EXPECT_EQ(replay_difference(run, 1), "");
    EXPECT_EQ(replay_difference(run, 4), "");  // from the checkpoint of step 3
    write_file(journal_path(run + "/journal", 2, 0, 1), journal);
  }
  EXPECT_EQ(replay_difference(run, 2), "");
}

// The learning rate of the first steps is that of their own schedule.
TEST(Replays, AnExtendedRunHasItsEarlierSteps) {
  const TempDir dir;
  const ExpectLog monitor("step 5: ");
  const std::string run =
      train_new(small_plan(dir, "run", kRun, {"steps=4", "lr_schedule=linear"}));
  train_rest(run, {"steps=6"});
  for (const int64_t step : {3, 6}) EXPECT_EQ(replay_difference(run, step), "");
  fs::remove_all(run + "/checkpoints/step-00000004");
  for (const int64_t step : {4, 5, 6}) EXPECT_EQ(replay_difference(run, step), "");
}

// Trains the last steps of a run with other keys, up to step `until`.
void train_on(const std::string& run, const std::vector<std::string>& overrides, int64_t until) {
  Recorder recorder;
  std::atomic<bool> stop{false};
  recorder.on_step = [&](int64_t step) { stop = step >= until; };
  cohort::Run::resume(run, overrides).execute(recorder, stop);
}

// Each step is made again by the keys of its own start, also from the run's first one on.
TEST(Replays, ARunThatWasResumedWithOtherKeysHasAllItsSteps) {
  const TempDir dir;
  const ExpectLog monitor("step 5: ");
  const std::vector<std::string> changes[] = {
      {"learning_rate=0.03", "temperature=0.7", "stop_tokens=[3]"},
      {"num_generations=4", "num_minibatches=2", "rewards.0.weight=0.5", "beta=0.1", "seed=5"},
      {"prompts_per_step=6", "ranks=2", "loss_type=grpo", "kl_target=0.1"},
      {"rewards=[{name: contains}, {name: format, pattern: '.*2.*'}]", "epsilon=0.1",
       "max_grad_norm=0.1", "num_iterations=2"},
  };
  const std::string run =
      train_interrupted(small_plan(dir, "run", kRun, {"steps=9", "checkpoint.every=1"}), 2);
  int64_t step = 2;
  for (const auto& overrides : changes) train_on(run, overrides, step += 2);
  ASSERT_EQ(load_state(find_checkpoint(run)).step, 9);
  logging::set_file({});
  const std::string before = listing(run);
  for (int64_t s = 1; s <= 9; ++s) EXPECT_EQ(replay_difference(run, s), "");
  EXPECT_TRUE(listing(run) == before);
  for (const auto& entry : fs::directory_iterator(run + "/checkpoints"))
    if (entry.path().filename() != "step-00000009") fs::remove_all(entry.path());
  // Another program's folder among the temporary ones is no obstacle.
  const fs::path planted = fs::temp_directory_path() / "cohort-replay";
  fs::create_directories(planted / "file");
  for (const int64_t s : {2, 3, 6, 8, 9}) EXPECT_EQ(replay_difference(run, s), "");
  fs::remove_all(planted);
  for (const auto& entry : fs::directory_iterator(fs::temp_directory_path()))
    EXPECT_FALSE(entry.path().filename().string().starts_with("cohort-replay")) << entry.path();
  // Nor is the newest configuration needed.
  write_file(run + "/config.yaml", dump_plan(small_plan(dir, "run", kRun)));
  EXPECT_EQ(replay_difference(run, 5), "");
}

TEST(Replays, StagesOfAResumedRunHaveTheKeysOfTheirStart) {
  const TempDir dir;
  const std::string yaml = std::string(kSmallModel) + kSmallData +
                           "stages:\n- {trainer: sft, steps: 2}\n" +
                           "- {trainer: grpo, steps: 4, prompts_per_step: 2, num_generations: 3, "
                           "rewards: [{name: format, pattern: '.*1.*'}]}\n";
  const std::string run = train_interrupted(small_plan(dir, "run", yaml), 2);
  train_on(run, {"stages.1.learning_rate=0.03", "stages.1.prompts_per_step=3"}, 9);
  for (int64_t step = 1; step <= 4; ++step) EXPECT_EQ(replay_difference(run, step), "") << step;
}

// Records that are whole, but of no step: an error that names the file and the place.
TEST(Replays, OfDamagedRecordsAreRefused) {
  const TempDir dir;
  const std::string run = train_new(small_plan(dir, "run", kRun, {"steps=3"}));
  const std::string path = journal_path(run + "/journal", 2, 0, 1), journal = read_file(path);
  const std::pair<std::function<void(StepRecord&)>, std::string> cases[] = {
      {[](StepRecord& r) { r.completions[3].tokens.back() = 1 << 20; },
       "completion 3 has the token 1048576 in a vocabulary of "},
      {[](StepRecord& r) { r.completions[3].tokens[0] = -1; }, "completion 3 has the token -1 in "},
      {[](StepRecord& r) {
         r.completions[4].replies.push_back({.tokens = {-7}, .error = "", .messages = {}});
       },
       "completion 4 has the token -7 in "},
      {[](StepRecord& r) { r.completions[3].total += 1; }, "completion 3 has the total "},
      {[](StepRecord& r) { r.completions[3].rewards[1] += 0.5; }, "completion 3 has the total "},
      {[](StepRecord& r) { r.completions[3].total = std::nan(""); }, "completion 3 has the total "},
      {[](StepRecord& r) { r.completions[3].rewards[0] = r.completions[3].total = HUGE_VAL; },
       "completion 3 has the total "},
      {[](StepRecord& r) { r.completions[3].rewards.pop_back(); }, "completion 3 has the total "},
      {[](StepRecord& r) { std::swap(r.reward_names[0], r.reward_names[1]); },
       "its rewards are task, format, the step's format, task"},
      {[](StepRecord& r) { r.reward_names.pop_back(); }, "its rewards are format, the step's "},
      {[](StepRecord& r) { r.step = 3; }, "it is of step 3"},
  };
  for (const auto& [change, text] : cases) {
    change_record(run, 2, change);
    for (const int64_t step : {2, 3})
      expect_refused(run, step, path + ": the journal of this step is damaged: " + text);
    EXPECT_EQ(replay_difference(run, 1), "");
    write_file(path, journal);
  }
  for (const auto& [plan, text] :
       {std::pair("no plan", "rank-0-of-1"),
        {"stages: [{trainer: pretrain, data: {text: a.txt}}]", "configuration has no such step"},
        {"stages: [{trainer: grpo, steps: 1, data: {task: addition}, rewards: [{name: task}]}]",
         "configuration has no such step"},
        {"stages: [{trainer: grpo, rewards: [{nam: task}]}]", "'stages.0.rewards[0].nam'"}}) {
    change_record(run, 2, [&, plan = plan](StepRecord& r) { r.plan = plan; });
    expect_refused(run, 2, "step-00000002.rank-0-of-1");
    expect_refused(run, 3, text);
    write_file(path, journal);
  }
  EXPECT_EQ(replay_difference(run, 3), "");
}

TEST(Replays, RecordedRewardsDecide) {
  const TempDir dir;
  const std::string run = train_new(small_plan(dir, "run", kRun, {"steps=1"}));
  change_record(run, 1, [](StepRecord& r) {
    r.completions[0].rewards[0] += 1;
    r.completions[0].total += 1;
  });
  const std::string found = replay_difference(run, 1);
  EXPECT_TRUE(found.starts_with("step 1: prompt 0, completion 0, advantage ")) << found;
}

TEST(Replays, WhatCannotBeReplayedIsRefused) {
  const TempDir dir;
  const ExpectLog monitor("step 5: ");
  const std::string run =
      train_new(small_plan(dir, "run", kRun, {"steps=6", "checkpoint.every=4"}));
  expect_refused(run, 0, "these can be replayed: 1 to 6");
  expect_refused(run, 7,
                 "does not have this step and all before it from a checkpoint on; "
                 "these can be replayed: 1 to 6");
  EXPECT_THROW(replay_run({.run = run, .step = 1, .prompt = 4, .completion = 0}, [](auto&) {}),
               InputError);
  fs::remove(journal_path(run + "/journal", 2, 0, 1));
  expect_refused(run, 3, "from a checkpoint on; these can be replayed: 1, 5 to 6");
  EXPECT_EQ(replay_difference(run, 6), "");
  fs::remove_all(run + "/checkpoints/step-00000004");
  expect_refused(run, 6, "these can be replayed: 1");
  write_file(journal_path(run + "/journal", 1, 0, 1), "damage");
  expect_refused(run, 1, "step-00000001.rank-0-of-1: the journal of this step is damaged");
  const std::string without = train_new(small_plan(dir, "without", kRun, {"journal_mb=0"}));
  expect_refused(without, 1, "no step can be replayed");
  EXPECT_FALSE(fs::exists(without + "/journal"));
}

TEST(Journals, OfAResumedRunHaveTheSameBytes) {
  const TempDir dir;
  const ExpectLog monitor("step 5: ");
  const auto plan = [&](const std::string& name) {
    return small_plan(dir, name, kRun, {"steps=6", "checkpoint.every=2", "ranks=2"});
  };
  const std::string whole = train_new(plan("whole"));
  const std::string resumed = train_interrupted(plan("resumed"), 3);
  // The rest of a process that was killed in the fifth step.
  write_file(journal_path(resumed + "/journal", 5, 1, 2), "damage");
  write_file(journal_path(resumed + "/journal", 9, 0, 1), "another run's step");
  train_rest(resumed);
  for (int64_t step = 1; step <= 6; ++step)
    for (const int64_t rank : {0, 1})
      EXPECT_EQ(read_file(journal_path(resumed + "/journal", step, rank, 2)),
                read_file(journal_path(whole + "/journal", step, rank, 2)))
          << step;
  EXPECT_EQ(list_journal(resumed + "/journal"), list_journal(whole + "/journal"));
}

// A step that was made and then abandoned is none of the run's, also if no journal is written now.
TEST(Journals, LoseTheStepsThatWereAbandoned) {
  const TempDir dir;
  const ExpectLog monitor("step 5: ");
  const std::string run =
      train_interrupted(small_plan(dir, "run", kRun, {"steps=6", "checkpoint.every=1"}), 3);
  const std::string step3 = read_file(journal_path(run + "/journal", 3, 0, 1));
  write_file(journal_path(run + "/journal", 5, 0, 1), step3);
  for (const int64_t rank : {0, 1}) write_file(journal_path(run + "/journal", 4, rank, 2), step3);
  train_on(run, {"journal_mb=0"}, 5);
  EXPECT_EQ(list_journal(run + "/journal"), (std::map<int64_t, int64_t>{{1, 1}, {2, 1}, {3, 1}}));
  train_on(run, {"journal_mb=9"}, 9);
  EXPECT_EQ(list_journal(run + "/journal"),
            (std::map<int64_t, int64_t>{{1, 1}, {2, 1}, {3, 1}, {6, 1}}));
  for (const int64_t step : {1, 2, 3, 6}) EXPECT_EQ(replay_difference(run, step), "");
  // A finished run has no later step.
  write_file(journal_path(run + "/journal", 7, 0, 1), step3);
  train_on(run, {}, 9);
  EXPECT_EQ(list_journal(run + "/journal").rbegin()->first, 6);
}

TEST(Journals, LoseTheirOldestSteps) {
  const TempDir dir;
  const ExpectLog monitor("step 5: ");
  const std::string journal = dir.path("journal");
  fs::create_directory(journal);
  for (int64_t step = 1; step <= 4; ++step)
    write_file(journal_path(journal, step, 0, 1), std::string(300 << 10, 'x'));
  const std::string run = train_interrupted(small_plan(dir, "run", kRun, {"steps=9"}), 4);
  fs::remove_all(run + "/journal");
  fs::rename(journal, run + "/journal");
  train_rest(run, {"journal_mb=1"});
  const std::map<int64_t, int64_t> left = list_journal(run + "/journal");
  EXPECT_EQ(left.begin()->first, 2);  // 3 x 300 KiB, and the small files of steps 5 to 9
  EXPECT_EQ(left.size(), 8u);
}

TEST(Journals, ThatCannotBeWrittenAreOneWarning) {
  const TempDir dir;
  std::vector<std::string> warnings;
  logging::set_observer([&](logging::Level level, const std::string& message) {
    if (level == logging::Level::kWarn && message.starts_with("journal: "))
      warnings.push_back(message);
  });
  const std::string run = train_interrupted(small_plan(dir, "run", kRun), 1);
  fs::remove_all(run + "/journal");
  write_file(run + "/journal", "no folder");
  train_rest(run);
  logging::set_observer({});
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find(run + "/journal"), std::string::npos) << warnings[0];
}

}  // namespace
}  // namespace cohort::test
