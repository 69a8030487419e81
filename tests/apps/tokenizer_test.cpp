// `cohort tokenizer`: training, encoding and decoding through the command.
#include "tests/apps/process.h"

namespace cohort::test {
namespace {

class TokenizerCommand : public testing::Test {
 protected:
  // A folder with a tokenizer of 280 tokens.
  std::string trained() {
    std::string text;
    for (int i = 0; i < 100; ++i) text += "hello world, it's the same line again\n";
    write_file(dir_.path("text.txt"), text);
    const Output output =
        run_cohort({"tokenizer", "train", "--vocab-size", "280", "--special", "<end>", "--output",
                    dir_.path("out"), dir_.path("text.txt")});
    EXPECT_EQ(output.code, 0) << output.err;
    EXPECT_NE(output.out.find(" 280 tokens"), std::string::npos) << output.out;
    return dir_.path("out");
  }
  TempDir dir_;
};

TEST_F(TokenizerCommand, ModelsAreTrainedFromAFolderOfText) {
  const std::string text = dir_.path("text"), tokenizer = dir_.path("tokenizer"),
                    run = dir_.path("run");
  std::filesystem::create_directory(text);
  for (const char* name : {"one", "two", "three"}) {
    std::string content;
    for (int i = 0; i < 40; ++i) content += str("This is line ", i, " of ", name, ".\n");
    write_file(text + "/" + name + ".txt", content);
  }
  const auto succeed = [](const std::vector<std::string>& arguments) {
    const Output output = run_cohort(arguments);
    EXPECT_EQ(output.code, 0) << output.err;
    return output.out;
  };
  const std::string source =
      (std::filesystem::path(__FILE__).parent_path().parent_path().parent_path() /
       "configs/pretrain.yaml")
          .string();
  succeed({"tokenizer", "train", "--vocab-size=300", "--output=" + tokenizer, text});
  const std::vector<std::string> train = {"train",
                                          source,
                                          "data.text=" + text,
                                          "data.tokenizer_path=" + tokenizer,
                                          "steps=3",
                                          "model.context=16",
                                          "output_dir=" + run};
  EXPECT_NE(succeed(train).find("validation loss 5."), std::string::npos);
  const std::string completion = succeed({"generate", run, "This is", "--max-tokens=4"});
  EXPECT_TRUE(completion.starts_with("This is")) << completion;
  // The tokenizer's folder is no longer needed, and a different tokenizer is rejected.
  std::filesystem::rename(tokenizer, tokenizer + "_moved");
  succeed({"train", "--resume", run, "steps=4"});
  succeed({"tokenizer", "train", "--special=<end>", "--output=" + tokenizer, text});
  const auto refused = [&](const char* why) {
    const Output output = run_cohort({"train", "--resume", run, "steps=5"});
    EXPECT_EQ(output.code, 2);
    EXPECT_NE(output.err.find(why), std::string::npos) << output.err;
  };
  refused("has another tokenizer");
  // Changed texts are rejected too.
  std::filesystem::remove_all(tokenizer);
  write_file(text + "/four.txt", "more");
  refused("is not the file that was meant");
}

TEST_F(TokenizerCommand, RoundTripsLines) {
  const std::string folder = trained();
  const std::string lines = "\"hello world\"\n\"\"\n\"two\\nlines <end> é\"\n";
  const Output ids = run_cohort({"tokenizer", "encode", folder}, lines);
  ASSERT_EQ(ids.code, 0) << ids.err;
  EXPECT_NE(ids.out.find("\n[]\n"), std::string::npos);
  const Output back = run_cohort({"tokenizer", "decode", folder}, ids.out);
  EXPECT_EQ(back.out, lines);
  const Output skipped = run_cohort({"tokenizer", "decode", folder, "--skip-special"}, ids.out);
  EXPECT_EQ(skipped.out, "\"hello world\"\n\"\"\n\"two\\nlines  é\"\n");
}

TEST_F(TokenizerCommand, NamesTheLineThatIsWrong) {
  const std::string folder = trained();
  const auto encode = [&](const std::string& lines) {
    Output output = run_cohort({"tokenizer", "encode", folder}, lines);
    output.out.clear();  // the lines before
    return output;
  };
  expect_bad_input(encode("\"a\"\nb\n"), {"line 2: not valid JSON"});
  expect_bad_input(encode("3\n"), {"line 1: expected text, got a whole number"});
  expect_bad_input(run_cohort({"tokenizer", "decode", folder}, "[-1]\n"), {"line 1", "id -1"});
  expect_bad_input(run_cohort({"tokenizer", "decode", folder}, "[1.5]\n"), {"line 1"});
}

TEST_F(TokenizerCommand, RefusesWhatItCannotRead) {
  expect_bad_input(run_cohort({"tokenizer"}), {"cohort tokenizer --help"});
  expect_bad_input(run_cohort({"tokenizer", "encode", dir_.path("no")}),
                   {"is not a folder", "hint"});
  expect_bad_input(run_cohort({"tokenizer", "encode", dir_.path()}), {"has no tokenizer", "hint"});
  const std::string out = dir_.path("out");
  expect_bad_input(run_cohort({"tokenizer", "train", "--output", out, dir_.path("no.txt")}),
                   {"no.txt: cannot be opened"});
  write_file(dir_.path("bad.txt"), "ab\xff");
  expect_bad_input(run_cohort({"tokenizer", "train", "--output", out, dir_.path("bad.txt")}),
                   {"bad.txt", "byte 2 is not part of UTF-8"});
  EXPECT_FALSE(std::filesystem::exists(out));
  const std::string folder = trained();
  expect_bad_input(run_cohort({"tokenizer", "train", "--output", folder, dir_.path("text.txt")}),
                   {"has a tokenizer.json", "name another folder"});
}

}  // namespace
}  // namespace cohort::test
