// Keys of `data` that hold out text and problems, and keys that do nothing for the data given.
#include "job/config.h"
#include "tests/support/test_util.h"

namespace cohort::test {
namespace {

class DataKeys : public testing::Test {
 protected:
  RunPlan load_text(const std::string& yaml, const std::vector<std::string>& overrides = {}) {
    write_file(dir_.path("plan.yaml"), yaml);
    return load_plan(dir_.path("plan.yaml"), overrides);
  }
  TempDir dir_;
};

// data.jsonl.held_out_fraction is an earlier name.
TEST_F(DataKeys, OneKeyHoldsOutTextAndProblems) {
  const auto fraction = [&](const std::string& data, const std::vector<std::string>& more = {}) {
    const bool text = data.starts_with("text");
    return load_text(str("trainer: ", text ? "pretrain" : "sft", "\ndata: {", data, "}\n"), more)
        .stages[0]
        .data.jsonl.held_out();
  };
  EXPECT_EQ(fraction("text: a.txt, held_out_fraction: 0.3"), 0.3);
  EXPECT_EQ(fraction("jsonl: {path: a.jsonl}, held_out_fraction: 0.3"), 0.3);
  EXPECT_EQ(fraction("jsonl: {path: a.jsonl, held_out_fraction: 0.3}"), 0.3);
  EXPECT_EQ(fraction("jsonl: {path: a.jsonl, held_out_fraction: 0.3}, held_out_fraction: 0.30"),
            0.3);
  EXPECT_EQ(fraction("jsonl: {path: a.jsonl, held_out_fraction: none}, held_out_fraction: 0.2"),
            0.2);
  EXPECT_EQ(fraction("jsonl: {path: a.jsonl, held_out_fraction: 0.2}, held_out_fraction: none"),
            0.2);
  EXPECT_EQ(fraction("text: a.txt, jsonl: {held_out_fraction: 0.3}"), 0.3);
  for (const char* data : {"jsonl: {path: a.jsonl, held_out_fraction: 0.3}, held_out_fraction: 0.1",
                           "text: a.txt, jsonl: {held_out_fraction: 0.3}, held_out_fraction: 0.1"})
    EXPECT_THROW_WITH(fraction(data), InputError,
                      "plan.yaml:2: data.held_out_fraction: '0.1' contradicts "
                      "data.jsonl.held_out_fraction: '0.3', its earlier name; hint: ");
  // On the command line either name replaces what the file says, by either name.
  for (const char* file : {"jsonl: {path: a.jsonl, held_out_fraction: 0.3}",
                           "jsonl: {path: a.jsonl}, held_out_fraction: 0.3"})
    for (const char* key : {"data.held_out_fraction", "data.jsonl.held_out_fraction"})
      EXPECT_EQ(fraction(file, {str(key, "=0")}), 0) << file << key;
  EXPECT_THROW_WITH(fraction("jsonl: {path: a.jsonl}",
                             {"data.held_out_fraction=0.2", "data.jsonl.held_out_fraction=0.3"}),
                    InputError, "command line: data.held_out_fraction: '0.2' contradicts ");
  EXPECT_THROW_WITH(fraction("jsonl: {path: a.jsonl, held_out_fraction: 1.5}"), InputError,
                    "plan.yaml:2: data.held_out_fraction: expected a number from 0 to 1");
  // A stage replaces what stands beside the stages, by either name.
  const RunPlan plan = load_text(
      "trainer: sft\ndata: {held_out_fraction: 0.2, jsonl: {path: a.jsonl}}\n"
      "stages:\n- {steps: 1}\n- {steps: 2, data: {jsonl: {held_out_fraction: 0.3}}}\n");
  EXPECT_EQ(plan.stages[0].data.jsonl.held_out(), 0.2);
  EXPECT_EQ(plan.stages[1].data.jsonl.held_out(), 0.3);
  // One key is shown.
  const std::string dump = dump_plan(plan), help = config_help<TrainConfig>();
  EXPECT_EQ(dump.find("held_out_fraction: 0.2"), dump.rfind("held_out_fraction: 0.2"));
  EXPECT_EQ(help.find("held_out_fraction"), help.rfind("held_out_fraction"));
}

// refill_rounds is an earlier name of dynamic_sampling_rounds.
TEST_F(DataKeys, DynamicSamplingRoundsAreReadByTheirEarlierName) {
  const auto rounds = [&](const std::string& keys, const std::vector<std::string>& more = {}) {
    const RunPlan plan =
        load_text("trainer: grpo\ndata: {task: parity}\nrewards: [{name: task}]\n" + keys, more);
    EXPECT_EQ(dump_plan(plan).find("refill_rounds"), std::string::npos);
    return plan.stages.back().grpo.dynamic_sampling_rounds;
  };
  EXPECT_EQ(rounds("refill_rounds: 2\n"), 2);
  EXPECT_EQ(rounds("refill_rounds: 2\n", {"dynamic_sampling_rounds=3"}), 3);
  EXPECT_EQ(rounds("dynamic_sampling_rounds: 2\n", {"refill_rounds=3"}), 3);
  EXPECT_EQ(
      rounds("refill_rounds: 2\nstages: [{steps: 1}, {steps: 1, dynamic_sampling_rounds: 4}]\n"),
      4);
  EXPECT_EQ(
      rounds("dynamic_sampling_rounds: 2\nstages: [{steps: 1}, {steps: 1, refill_rounds: 4}]\n"),
      4);
  EXPECT_EQ(rounds("dynamic_sampling_rounds: 2\nstages: [{dynamic_sampling_rounds: 4}]\n",
                   {"refill_rounds=5"}),
            5);
  EXPECT_EQ(
      rounds("stages: [{steps: 1}]\n", {"stages.0.dynamic_sampling_rounds=4", "refill_rounds=5"}),
      rounds("stages: [{steps: 1}]\n",
             {"stages.0.dynamic_sampling_rounds=4", "dynamic_sampling_rounds=5"}));
  EXPECT_EQ(rounds("stages: [{steps: 1}, {steps: 2}]\n", {"stages.1.refill_rounds=6"}), 6);
  EXPECT_EQ(rounds("refill_rounds: 2\ndynamic_sampling_rounds: 2\n"), 2);
  EXPECT_THROW_WITH(
      rounds("refill_rounds: 2\ndynamic_sampling_rounds: 3\n"), InputError,
      "dynamic_sampling_rounds: '3' contradicts refill_rounds: '2', its earlier name; "
      "hint: give one of them");
  EXPECT_THROW_WITH(rounds("refill_rounds: -1\n"), InputError,
                    "plan.yaml:4: dynamic_sampling_rounds: expected a number from 0 to 1000");
}

// The config.yaml of a run of an earlier version has both keys, of which one had no effect.
TEST_F(DataKeys, HeldOutFractionsOfEarlierRunsStay) {
  const auto reread = [&](const std::string& data, const std::string& held_out,
                          const std::string& of_jsonl, const std::vector<std::string>& more = {}) {
    std::string dump = dump_plan(load_text(
        str("trainer: ", data.starts_with("text") ? "pretrain" : "sft", "\ndata: {", data, "}\n")));
    const std::string now = "held_out_fraction: none\n", key = "      jsonl:\n";
    dump.replace(dump.find(now), now.size(), str("held_out_fraction: ", held_out, "\n"));
    dump.insert(dump.find(key) + key.size(), str("        held_out_fraction: ", of_jsonl, "\n"));
    const RunPlan plan = load_text(dump, more);
    EXPECT_EQ(plan.stages[0].warnings(), std::vector<std::string>{});
    return plan.stages[0].data.jsonl.held_out();
  };
  EXPECT_EQ(reread("jsonl: {path: a.jsonl}", "0.1", "0.3"), 0.3);
  EXPECT_EQ(reread("jsonl: {path: a.jsonl}", "0.3", "none"), 0.1);
  EXPECT_EQ(reread("jsonl: {path: a.jsonl, eval_path: b.jsonl}", "0.1", "none"), 0);
  EXPECT_EQ(reread("text: a.txt", "0.05", "none"), 0.05);
  EXPECT_EQ(reread("text: a.txt", "0.05", "0.3"), 0.05);
  EXPECT_EQ(reread("task: addition", "0.1", "none"), 0.1);
  EXPECT_EQ(reread("jsonl: {path: a.jsonl}", "0.1", "0.3", {"data.held_out_fraction=1"}), 1);
  EXPECT_EQ(reread("jsonl: {path: a.jsonl}", "0.1", "0.3", {"data.jsonl.held_out_fraction=1"}), 1);
}

TEST_F(DataKeys, KeysOfDataThatNothingReadsGiveWarnings) {
  const auto warnings = [&](const std::string& yaml) {
    return load_text(yaml).stages[0].warnings();
  };
  const std::string task = "task: addition", jsonl = "jsonl: {path: a.jsonl}",
                    messages = "jsonl: {path: a.jsonl, messages: turns}", text = "text: a.txt";
  const struct {
    std::string source, key, named;
  } cases[] = {
      {task, "held_out_fraction: 0.2", "held_out_fraction: 0.2"},
      {task, "eval_text: b.txt", "eval_text: "},
      {task, "fingerprint: ab", "fingerprint: ab"},
      {task, "jsonl: {limit: 3}", "jsonl.limit: 3"},
      {task, "jsonl: {prompt: '{q}'}", "jsonl.prompt: "},
      {task, "jsonl: {answer: '{a}'}", "jsonl.answer: "},
      {task, "cache_dir: c", "cache_dir: "},
      {task, "system: Be brief.", "system: \"Be brief.\""},
      {jsonl, "eval_text: b.txt", "eval_text: "},
      {jsonl, "task_sizes: {max_size: 3}", "task_sizes.max_size: 3"},
      {jsonl, "cache_dir: c", "cache_dir: "},
      {jsonl, "curriculum_patience: 3", "curriculum_patience: 3"},
      {jsonl, "chat_template_kwargs: '{}'", "chat_template_kwargs: "},
      {jsonl, "tokenizer: byte, tokenizer_path: t", "tokenizer: byte"},
      {text, "eval_text: b.txt, held_out_fraction: 0.2", "held_out_fraction: 0.2"},
      {text, "jsonl: {solution: '{s}'}", "jsonl.solution: "},
  };
  for (const auto& [source, key, named] : cases) {
    const std::string yaml = str("trainer: ", source == text ? "pretrain" : "sft", "\ndata: {",
                                 source, ", ", key, "}\n");
    const std::vector<std::string> found = warnings(yaml);
    ASSERT_EQ(found.size(), 1u) << yaml;
    EXPECT_TRUE(found[0].starts_with("data." + named)) << found[0];
    EXPECT_NE(found[0].find(" does nothing here: it is for "), std::string::npos) << found[0];
  }
  for (const std::string& yaml : std::vector<std::string>{
           "data: {" + text + ", cache_dir: c, held_out_fraction: 0.2}\n",
           "trainer: sft\ndata: {" + jsonl + ", held_out_fraction: 0, fingerprint: ab}\n",
           "trainer: sft\ndata: {jsonl: {path: a.jsonl, eval_path: b.jsonl}, held_out_fraction: "
           "0}\n",
           "trainer: sft\ndata: {" + messages + ", system: s, chat_template_kwargs: '{}'}\n",
           "trainer: sft\ndata: {" + task + ", task_sizes: {max_size: 3}, chat: true, system: s}\n",
           "trainer: sft\ndata: {task: addition, jsonl: {prompt: '{q}', answer: '{a}'}}\n"
           "eval: {sets: [{name: one, path: b.jsonl}]}\n",
           // A key beside the stages is for those that read it.
           "data: {cache_dir: c, tokenizer_path: t, held_out_fraction: 0.2}\nstages:\n"
           "- {data: {text: a.txt}}\n- {trainer: sft, data: {task: addition}}\n"})
    EXPECT_EQ(warnings(yaml), std::vector<std::string>{}) << yaml;
  EXPECT_EQ(warnings("trainer: sft\ndata: {jsonl: {path: a.jsonl, messages: turns, prompt: '{q}', "
                     "solution: '{s}'}}\n")
                .size(),
            2u);
  EXPECT_EQ(warnings("trainer: sft\ndata: {task: addition, cache_dir: c}\nstages:\n"
                     "- {steps: 1}\n- {steps: 2}\n")
                .size(),
            1u);
  EXPECT_EQ(warnings("trainer: sft\nmodel: {path: m}\ndata: {task: addition, tokenizer_path: t}\n")
                .size(),
            1u);
}

TEST_F(DataKeys, KeysOfImagesAreForImagesAndThoseOfTextsForTexts) {
  const std::string images = "images: {path: a}", texts = "jsonl: {path: a.jsonl}";
  const auto warnings = [&](const std::string& source, const std::string& keys) {
    const std::string model = source.starts_with("images") ? ", image_size: 8, patch_size: 4" : "";
    const bool of_model = keys.starts_with("channels");
    return load_text(str("trainer: classify\nmodel: {mask: full", model,
                         of_model ? ", " + keys : "", "}\ndata: {", source,
                         of_model || keys.empty() ? "" : ", " + keys, "}\n"))
        .stages[0]
        .warnings();
  };
  for (const std::string& source : {images, texts})
    EXPECT_EQ(warnings(source, ""), std::vector<std::string>{});
  const struct {
    std::string source, keys, warning;
  } cases[] = {
      {texts, "images: {eval_path: b}", "data.images.eval_path: "},
      {texts, "images: {field: file}", "data.images.field: file does nothing here: it is for "},
      {texts, "images: {label: class}", "data.images.label: class does nothing here: it is for "},
      {texts, "images: {augment: crop_flip}",
       "data.images.augment: crop_flip does nothing here: it is for data.images.path; hint: "},
      {texts, "channels: 1", "model.channels: 1 does nothing here: it is for data.images.path; "},
      {images, "jsonl: {prompt: '{q}'}", "data.jsonl.prompt: "},
      {images, "jsonl: {pair: '{q}'}", "data.jsonl.pair: "},
      {images, "jsonl: {limit: 3}", "data.jsonl.limit: 3 does nothing here: "},
      {images, "chat: yes", "data.chat: true does nothing here: it is for texts; hint: "},
      {images, "system: s", "data.system: s does nothing here: "},
      {images, "tokenizer: byte", "data.tokenizer: byte does nothing here: "},
      {images, "eval_text: b.txt", "data.eval_text: "},
      {images, "cache_dir: c", "data.cache_dir: "},
  };
  for (const auto& [source, keys, warning] : cases) {
    const std::vector<std::string> found = warnings(source, keys);
    ASSERT_EQ(found.size(), 1u) << keys;
    EXPECT_TRUE(found[0].starts_with(warning)) << found[0];
    EXPECT_TRUE(found[0].ends_with("; hint: leave it out")) << found[0];
  }
  EXPECT_EQ(warnings(images, "chat: yes, system: s").size(), 2u);
  EXPECT_EQ(warnings(images, "channels: 1"), std::vector<std::string>{});
  EXPECT_EQ(warnings("images: {path: a, eval_path: b, field: f, label: l, augment: crop_flip}", "")
                .size(),
            0u);
}

}  // namespace
}  // namespace cohort::test
