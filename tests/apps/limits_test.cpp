// Limits of the system and of memory, a deleted current directory and damaged files: every command
// ends with an error that says why.
#include <sys/wait.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "tests/apps/process.h"

namespace cohort {
namespace {

using test::expect_bad_input;
using test::Output;

class Limits : public ::testing::Test {
 protected:
  void SetUp() override {
    test::write_file(dir_.path("run.yaml"),
                     str("output_dir: ", dir_.path("run"), "\nnum_threads: 1\nsteps: 1\n",
                         "trainer: sft\nbatch_size: 2\neval: {size: 2}\ndata: {task: reverse}\n",
                         "model: {num_layers: 1, d_model: 16, num_heads: 2, context: 32}\n"));
  }
  void train() { ASSERT_EQ(shell("", str("train ", dir_.path("run.yaml"))).code, 0); }
  // Copies the trained model into a folder without a manifest.
  void copy_model() {
    train();
    std::filesystem::create_directory(dir_.path("model"));
    for (const char* name : {"config.json", "tokenizer.json", "model.safetensors"})
      std::filesystem::copy(dir_.path(str("run/checkpoints/best/", name)), dir_.path("model"));
  }
  // Runs the shell command `before`, then cohort.
  Output shell(const std::string& before, const std::string& arguments) const {
    const std::string out = dir_.path("out"), err = dir_.path("err");
    const std::string command = str("cd ", dir_.path(), "\n", before, "\nexec ", COHORT_BINARY, " ",
                                    arguments, " > ", out, " 2> ", err, " < /dev/null");
    test::write_file(dir_.path("command.sh"), command);
    const int status = std::system(str("bash ", dir_.path("command.sh")).c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), test::read_file(out),
            test::read_file(err)};
  }
  const test::TempDir dir_;
};

std::string repeated(int n, const std::string& text) {
  std::string out;
  for (int i = 0; i < n; ++i) out += text;
  return out;
}

TEST_F(Limits, DeepNestingNeedsNoLargeStack) {
  const std::string open = repeated(250, "["), close = repeated(250, "]");
  test::write_file(dir_.path("context.json"), str("{\"deep\": ", open, close, "}"));
  const auto render = [&](const std::string& source) {
    test::write_file(dir_.path("t"), source);
    return shell("ulimit -s 96",
                 str("template render ", dir_.path("t"), " --context ", dir_.path("context.json")));
  };
  EXPECT_EQ(render("{{ deep | tojson }}").out, open + close);
  EXPECT_EQ(render(repeated(140, "{% if deep %}") + "a" + repeated(140, "{% endif %}")).out, "a");
  expect_bad_input(render("{{ " + repeated(100'000, "(") + " }}"), {"t:1:", "nested deeper than"});
  expect_bad_input(render("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}"),
                   {"t:1:", "nested deeper than"});
  test::write_file(dir_.path("deep.yaml"), "a: " + repeated(100'000, "["));
  expect_bad_input(shell("ulimit -s 96", str("check ", dir_.path("deep.yaml"))),
                   {"deep.yaml:1: nested deeper than"});
}

TEST_F(Limits, EveryCommandSaysThatTheCurrentDirectoryIsGone) {
  for (const char* command :
       {"train x", "check x", "generate x y", "chat x", "logprobs x y", "eval x", "inspect x",
        "report x", "tokenizer encode x", "template render x --context y", "gradcheck"})
    expect_bad_input(shell("mkdir gone; cd gone; rmdir ../gone", command),
                     {"the current directory cannot be determined: No such file", "hint"});
  EXPECT_EQ(shell("mkdir gone; cd gone; rmdir ../gone", "--help").code, 0);
}

TEST_F(Limits, TooManyCompletionsAreRefusedByName) {
  train();
  for (const char* option : {"--num", "--best-of"})
    for (const char* number : {"1000000000", "9223372036854775807"})
      expect_bad_input(
          shell("", str("generate ", dir_.path("run"), " ab cd ", option, " ", number)),
          {str(option, ": expected at most 5000000 with 2 prompts, got ", number)});
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they reserve more
  const Output full =
      shell("ulimit -v 600000", str("generate ", dir_.path("run"), " ab --num 10000000"));
  EXPECT_EQ(full.code, 1);
  EXPECT_NE(full.err.find("out of memory"), std::string::npos) << full.err;
#endif
}

TEST_F(Limits, AZeroByteInAFileIsAnError) {
  copy_model();
  const auto expect_refused = [&](const char* name, const std::string& damaged, size_t at) {
    const std::string path = dir_.path(str("model/", name)), before = test::read_file(path);
    test::write_file(path, damaged);
    expect_bad_input(shell("", str("generate ", dir_.path("model"), " ab")),
                     {name, str("a zero byte, at byte ", at)});
    test::write_file(path, before);
  };
  for (const char* name : {"config.json", "tokenizer.json"}) {
    const std::string text = test::read_file(dir_.path(str("model/", name)));
    expect_refused(name, text + '\0' + text, text.size() + 1);
  }
  std::string tensors = test::read_file(dir_.path("model/model.safetensors"));
  uint64_t size = 0;
  std::memcpy(&size, tensors.data(), sizeof size);
  tensors.insert(8 + size, 8, '\0');
  const size_t at = size + 1;
  size += 8;
  std::memcpy(tensors.data(), &size, sizeof size);
  expect_refused("model.safetensors", tensors, at);

  const std::string line = "{\"a\": 1, \"b\": 2}", data = dir_.path("data.jsonl");
  test::write_file(data, repeated(20, line + "\n") + line + std::string(1, '\0') + "x\n");
  const std::string keys =
      str(" data.task= data.tokenizer=byte data.jsonl.prompt={a} data.jsonl.answer={b}",
          " data.jsonl.path=", data);
  expect_bad_input(shell("", str("check ", dir_.path("run.yaml"), keys)),
                   {str("data.jsonl:21: not valid JSON: a zero byte, at byte ", line.size() + 1)});
}

TEST_F(Limits, ErrorsOfFieldsNameFileAndField) {
  copy_model();
  const std::string path = dir_.path("model/config.json"), field = "\"vocab_size\": ";
  std::string text = test::read_file(path);
  text.insert(text.find(field) + field.size(), "99999999999999999999");
  test::write_file(path, text);
  expect_bad_input(shell("", str("generate ", dir_.path("model"), " ab")),
                   {"model/config.json: vocab_size: expected a whole number, got 99999999"});
}

}  // namespace
}  // namespace cohort
