// References that are teachers: a model in a folder, the policy with another prompt.
#include <filesystem>

#include "job/replay.h"
#include "tests/job/small_runs.h"

namespace cohort::test {
namespace {

// Runs of a small model whose reference is a folder, and steps that save.
class Teacher : public testing::Test {
 protected:
  std::string new_teacher(const std::string& name, std::vector<std::string> keys) {
    keys.emplace_back("dtype=f64");
    return train_new(small_plan(dir_, name, kSmallCommon + kSmallSft, keys));
  }
  // GRPO from the student, or what `keys` say, in f64 with all checkpoints.
  RunPlan plan(const std::string& name, std::vector<std::string> keys) {
    if (student_.empty()) student_ = new_teacher("student", {});
    keys.insert(keys.begin(), {"init_from=" + student_, "dtype=f64", "checkpoint.every=1",
                               "checkpoint.keep_last=9"});
    return small_plan(dir_, name, kSmallCommon + kSmallGrpo, keys);
  }
  // Learning from a teacher alone.
  RunPlan opd(const std::string& name, const std::string& teacher,
              std::vector<std::string> keys = {}) {
    keys.insert(keys.begin(), {"preset=opd", "rewards=[]", "prompts_per_step=8",
                               "num_generations=1", "reference=" + teacher});
    return plan(name, keys);
  }
  static std::vector<double> metrics(const std::string& run, const std::string& name) {
    std::vector<double> out;
    for (const Json& line : json_lines(run + "/metrics.jsonl"))
      if (line.find("eval") == nullptr && line.find(name) != nullptr)
        out.push_back(metric(line, name));
    return out;
  }
  static void expect_same_model(const std::string& a, const std::string& b) {
    EXPECT_TRUE(checkpoint_bytes(a, "model.safetensors") ==
                checkpoint_bytes(b, "model.safetensors"));
  }

  TempDir dir_;
  std::string student_;
};

// The student's own folder: no divergence, and no update, to the bit.
TEST_F(Teacher, ThatIsTheStudentTeachesNothing) {
  for (const char* dtype : {"f64", "f32"})
    for (const char* estimator : {"reverse", "forward", "jsd"}) {
      const std::string run =
          train_new(opd(str("own-", dtype, estimator), plan("none", {}).stages[0].init_from,
                        {str("dtype=", dtype), str("kl_estimator=", estimator), "kl_top_k=3"}));
      EXPECT_EQ(metrics(run, "kl"), std::vector<double>(4, 0)) << estimator;
      EXPECT_EQ(metrics(run, "num_updates"), std::vector<double>(4, 0)) << estimator;
    }
}

// A wider teacher, which was trained longer, is approached; its folder is what the student reads.
TEST_F(Teacher, OfAnotherWidthIsApproached) {
  const std::string teacher = new_teacher("teacher", {"model.d_model=32", "steps=60"});
  for (const char* estimator : {"reverse", "forward", "jsd", "k2"}) {
    const std::string run = train_new(
        opd(str("learns-", estimator), teacher,
            {str("kl_estimator=", estimator), "num_minibatches=8", "prompts_per_step=48"}));
    const std::vector<double> kl = metrics(run, "kl");
    EXPECT_LT(kl.back(), 0.7 * kl.front()) << estimator;
    EXPECT_EQ(metrics(run, "ratio_deviation"), std::vector<double>(4, 0));
    EXPECT_FALSE(path_exists(find_checkpoint(run) + "/training/reference.safetensors"));
  }
}

TEST_F(Teacher, RunsContinueWithTheSameBitsAndRefuseAnotherTeacher) {
  // A folder as others write it.
  const std::string teacher = dir_.path() + "/folder";
  std::filesystem::copy(find_checkpoint(new_teacher("teacher", {"model.d_model=32"})), teacher);
  std::filesystem::remove(teacher + "/manifest.json");
  const std::string whole = train_new(opd("whole", teacher));
  const std::string cut = train_interrupted(opd("cut", teacher), 2);
  const std::string other = train_interrupted(opd("other", teacher), 2);
  train_rest(cut);
  expect_same_model(cut, whole);
  const std::string file = teacher + "/model.safetensors";
  std::string bytes = read_input_file(file);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_file(file, bytes);
  EXPECT_THROW_WITH(train_rest(other), InputError, " is not the model that the stage has learned");
}

TEST_F(Teacher, IsTheSameOnTwoRanksAndInSmallMicroBatches) {
  const std::string teacher = new_teacher("teacher", {"model.d_model=32"});
  const auto weights = [&](const std::string& name, std::vector<std::string> keys) {
    // Groups share their prompts, and are divided by micro batches of 16 tokens.
    keys.insert(keys.end(), {"adam_eps=1e-3", "num_generations=6"});
    const std::string run = train_new(opd(name, teacher, keys));
    return SafetensorsFile(find_checkpoint(run) + "/model.safetensors");
  };
  const SafetensorsFile one = weights("one", {"reference_prompt={prompt}{answer}="});
  for (const SafetensorsFile& other :
       {weights("two", {"ranks=2", "reference_prompt={prompt}{answer}="}),
        weights("small", {"micro_batch_tokens=16", "reference_prompt={prompt}{answer}="})})
    for (const std::string& name : one.names())
      EXPECT_LT(relative_error(other.read(name), one.read(name)), 1e-12) << name;
}

// A prompt that is the policy's changes no bit, whether the KL is an estimate or a divergence.
TEST_F(Teacher, ReadsThePolicysPromptIfTheTemplateSaysSo) {
  for (const char* estimator : {"k3", "reverse"}) {
    const std::vector<std::string> keys{"beta=0.3", str("kl_estimator=", estimator)};
    std::vector<std::string> same = keys;
    same.emplace_back("reference_prompt={prompt}");
    expect_same_model(train_new(plan(str("plain-", estimator), keys)),
                      train_new(plan(str("same-", estimator), same)));
  }
}

// The policy with the answer in its prompt: a divergence from the first step on, and updates.
TEST_F(Teacher, MayBeThePolicyWithAnotherPrompt) {
  const std::string run = train_new(plan("self", {"preset=opd", "rewards=[]", "reference=policy",
                                                  "reference_prompt={answer}+{prompt}"}));
  for (const double kl : metrics(run, "kl")) EXPECT_GT(kl, 1e-6);
  EXPECT_EQ(metrics(run, "num_updates"), std::vector<double>(4, 1));
}

// New adapters change nothing, so the base is at no distance before the first update.
TEST_F(Teacher, MayBeTheBaseOfAdapters) {
  for (const char* reference : {"base", "start"}) {
    const std::string run =
        train_new(plan(str("lora-", reference), {"lora.rank=3", "beta=0.5", "kl_estimator=jsd",
                                                 str("reference=", reference)}));
    const std::vector<double> kl = metrics(run, "kl");
    EXPECT_EQ(kl[0], 0);
    EXPECT_GT(kl[2], 0);
  }
}

// Several generations share their prompt in a micro batch, the teacher's too: as one sequence each.
TEST_F(Teacher, SharesPromptsAsThePolicyDoes) {
  const std::string teacher = new_teacher("teacher", {"model.d_model=32"});
  const auto first_kl = [&](const std::string& name, const std::string& prompt) {
    return metrics(train_new(opd(name, teacher,
                                 {"num_generations=6", "prompts_per_step=4", "steps=1",
                                  "reference_prompt=" + prompt})),
                   "kl")[0];
  };
  EXPECT_NE(first_kl("other", "9{prompt}"), first_kl("plain", "{prompt}"));
  const std::string run = train_new(opd("groups", teacher, {"num_generations=6"}));
  EXPECT_EQ(metrics(run, "ratio_deviation"), std::vector<double>(4, 0));
}

TEST_F(Teacher, MistakesAreErrors) {
  const std::string teacher = new_teacher("teacher", {"model.d_model=32"});
  const auto expect_error = [&](const std::vector<std::string>& keys, const std::string& message) {
    EXPECT_THROW_WITH(train_new(plan("mistake", keys)), InputError, message);
  };
  expect_error({"beta=1", "reference=" + teacher + "-none"}, "reference: ");
  expect_error({"beta=1", "reference=/nowhere"},
               "reference: /nowhere is no folder here, and none of base, start and policy");
  expect_error({"rewards=[]"}, "rewards: trainer grpo needs at least one reward");
  expect_error({"rewards=[]", "beta=1"}, "rewards: trainer grpo needs at least one reward");
  expect_error({"beta=1", "reference=policy"}, "reference: policy is the policy itself");
  expect_error({"beta=1", "reference=policy", "reference_prompt=x{prompt}", "num_iterations=2"},
               "reference: policy is that of the step");
  expect_error({"beta=1", "reference=" + teacher, "ref_sync_every=2"}, "ref_sync_every: moves");
  expect_error({"beta=1", "kl_estimator=jsd", "kl_in=reward"}, "kl_in: reward subtracts");
  expect_error({"beta=1", "kl_estimator=jsd", "kl_unbiased=true"}, "kl_unbiased: corrects");
  expect_error({"preset=opd"}, "preset: opd learns from a teacher; hint: reference=FOLDER");
  expect_error({"beta=1", "reference_prompt={hint}"}, "hint");
  expect_error({"beta=1", "reference_prompt={"}, "reference_prompt");
  expect_error({"beta=1", "reference_prompt=111111111111111{prompt}"},
               " tokens, which with a completion of 4 exceed the reference's context, 16");
  expect_error({"beta=1", "reference=" + new_teacher("short", {"model.context=15"})},
               " has a context of 15 tokens, and the policy's is 16");
  const std::string other = train_new(small_plan(
      dir_, "letters", std::string(kSmallModel) + kSmallSft, {"data.task=reverse", "dtype=f64"}));
  expect_error({"beta=1", "reference=" + other},
               " has another tokenizer: token 0 is '>', and the policy's is '+'");
}

// Rewards of none, whose sum is 0, are recorded too.
TEST_F(Teacher, RunsAreReplayed) {
  const std::string run = train_new(opd("run", new_teacher("teacher", {"model.d_model=32"}),
                                        {"reference_prompt={answer}+{prompt}"}));
  std::vector<std::string> lines;
  replay_run({.run = run, .step = 4}, [&](const std::string& line) { lines.push_back(line); });
  ASSERT_FALSE(lines.empty());
  EXPECT_NE(lines.back().find("step 4: equal: 8 rollouts"), std::string::npos) << lines.back();
}

// A stage that has ended needs its teacher no longer; a later one starts without it.
TEST_F(Teacher, IsNotNeededByFinishedRuns) {
  const std::string teacher = new_teacher("teacher", {"model.d_model=32"});
  const std::string run = train_new(opd("run", teacher));
  std::filesystem::rename(teacher, teacher + "-moved");
  train_rest(run);
  EXPECT_THROW_WITH(train_rest(run, {"steps=6"}), InputError, "reference: ");
}

TEST_F(Teacher, KeysOfRewardsAreSaidToDoNothing) {
  const std::string teacher = new_teacher("teacher", {"model.d_model=32"});
  for (const char* key : {"scale_rewards=batch", "surrogate=cispo", "top_entropy_quantile=0.5",
                          "shuffle_advantages=true", "advantage_clip=2"}) {
    const std::vector<std::string> warnings = opd("keys", teacher, {key}).stages[0].warnings();
    ASSERT_EQ(warnings.size(), 1u) << key;
    EXPECT_NE(warnings[0].find(": does nothing without rewards"), std::string::npos) << warnings[0];
  }
}

}  // namespace
}  // namespace cohort::test
