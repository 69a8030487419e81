// Output of commands on a pseudo-terminal of a given width, and in the log file.
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <map>
#include <regex>
#include <sstream>

#include "core/text.h"
#include "nn/model_folder.h"
#include "nn/transformer.h"
#include "tests/apps/process.h"
#include "tests/job/small_configs.h"

namespace cohort::test {
namespace {

winsize columns(int n) {
  winsize size{};
  size.ws_row = 24;
  size.ws_col = static_cast<unsigned short>(n);
  return size;
}

// The successive contents of the progress line.
std::vector<std::string> bars(const std::string& output) {
  static const std::string kClear = "\r\033[K";
  std::vector<std::string> out;
  for (size_t at = output.find(kClear); at != std::string::npos; at = output.find(kClear, at)) {
    at += kClear.size();
    const std::string line = output.substr(at, output.find_first_of("\r\n", at) - at);
    if (line.starts_with("grpo ")) out.push_back(line);
  }
  return out;
}

// A `cohort` process on its own terminal.
class Terminal {
 public:
  Terminal(const std::vector<std::string>& arguments, int width) {
    std::vector<std::string> all{COHORT_BINARY};
    all.insert(all.end(), arguments.begin(), arguments.end());
    std::vector<char*> argv;
    for (std::string& a : all) argv.push_back(a.data());
    argv.push_back(nullptr);
    const winsize size = columns(width);
    pid_ = forkpty(&fd_, nullptr, nullptr, &size);
    if (pid_ < 0) throw Error("cannot make a pseudo-terminal");
    if (pid_ == 0) {
      execv(COHORT_BINARY, argv.data());
      _exit(127);
    }
  }
  ~Terminal() {
    if (status_ < 0) kill(pid_, SIGKILL), waitpid(pid_, &status_, 0);
    close(fd_);
  }
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  void resize(int width) const {
    const winsize size = columns(width);
    EXPECT_EQ(ioctl(fd_, TIOCSWINSZ, &size), 0);
  }
  void type(const std::string& text) const {
    EXPECT_EQ(write(fd_, text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }
  // Reads until the output contains `text`, or to its end.
  const std::string& read_to(const std::string& text) {
    while (out_.find(text) == std::string::npos && read_some(-1)) continue;
    return out_;
  }
  // Reads the available output, without waiting.
  const std::string& read_available() {
    while (read_some(0)) continue;
    return out_;
  }
  // Reads until the progress line has been written `n` times, or to the end.
  std::vector<std::string> read_bars(size_t n) {
    while (bars(out_).size() < n && read_some(-1)) continue;
    return bars(out_);
  }
  const std::string& read_all() {
    while (read_some(-1)) continue;
    return out_;
  }
  int wait() {
    waitpid(pid_, &status_, 0);
    return WIFEXITED(status_) ? WEXITSTATUS(status_) : 128 + WTERMSIG(status_);
  }

 private:
  bool read_some(int timeout) {
    pollfd ready{.fd = fd_, .events = POLLIN, .revents = 0};
    if (poll(&ready, 1, timeout) <= 0) return false;
    char buffer[4096];
    const ssize_t n = read(fd_, buffer, sizeof buffer);
    if (n > 0) out_.append(buffer, static_cast<size_t>(n));
    return n > 0;
  }

  int fd_ = -1, status_ = -1;
  pid_t pid_ = -1;
  std::string out_;
};

int64_t step_of(const std::string& bar) {
  return std::stoll(bar.substr(5));
}

class Progress : public testing::Test {
 protected:
  void SetUp() override {
    write_file(dir_.path("run.yaml"),
               "output_dir: run\n" + std::string(kSmallModel) + kSmallData + kSmallGrpo);
  }
  std::vector<std::string> train(int64_t steps) const {
    return {"train", dir_.path("run.yaml"), str("steps=", steps), "eval.every=100"};
  }
  // Expects complete parts, and the numbers that the run has logged.
  void expect_complete(const std::vector<std::string>& shown) const {
    static const std::regex kForm(
        "grpo \\d+/\\d+( \\[#*\\.*\\])?( [0-9:]+ elapsed(, [0-9:]+ left)?)?"
        "((  (loss|reward|no-signal|entropy|tokens/s) \\S+)*)");
    static const std::regex kReward("  reward (\\S+)");
    std::map<int64_t, double> rewards;
    for (const Json& line : json_lines(run_ + "/metrics.jsonl"))
      if (line.find("reward") != nullptr)
        rewards[line.at("step").as_int()] = metric(line, "reward");
    for (const std::string& bar : shown) {
      EXPECT_TRUE(std::regex_match(bar, kForm)) << bar;
      std::smatch match;
      if (!std::regex_search(bar, match, kReward)) continue;
      char text[32];
      std::snprintf(text, sizeof text, "%.4g", rewards.at(step_of(bar)));
      EXPECT_EQ(match[1].str(), text) << bar;
    }
  }
  TempDir dir_;
  const std::string run_ = dir_.path("run");
};

TEST_F(Progress, NeverReachesTheLastColumn) {
  for (const int width : {200, 80, 60, 40, 12, 5}) {
    Terminal terminal(train(150), width);
    const std::vector<std::string> shown = bars(terminal.read_all());
    EXPECT_EQ(terminal.wait(), 0);
    EXPECT_EQ(shown.empty(), width == 5);
    for (const std::string& bar : shown) EXPECT_LT(bar.size(), static_cast<size_t>(width)) << bar;
    expect_complete(shown);
    if (shown.empty()) continue;
    EXPECT_EQ(shown.back().find("tokens/s") != std::string::npos, width == 200) << shown.back();
    EXPECT_EQ(shown.back().find("reward") != std::string::npos, width >= 60) << shown.back();
    EXPECT_TRUE(width < 200 || shown.back().find("/150 [########################] ") == 8)
        << shown.back();
    std::filesystem::remove_all(run_);
  }
}

TEST_F(Progress, FollowsTheTerminalsSize) {
  Terminal terminal(train(1'000'000), 200);  // more steps than the test waits for
  terminal.read_to("\r\033[Kgrpo ");
  terminal.resize(40);
  const size_t before = bars(terminal.read_available()).size();
  const std::vector<std::string> shown = terminal.read_bars(before + 4);
  ASSERT_GE(shown.size(), before + 4);
  EXPECT_GT(shown[0].size(), 80u);
  // One line may have been buffered, and the last may be incomplete.
  for (size_t i = before + 1; i + 1 < shown.size(); ++i)
    EXPECT_LT(shown[i].size(), 40u) << shown[i];
}

TEST_F(Progress, ShowsTheTimeLeftAfterAFewSteps) {
  Terminal terminal(train(300), 200);
  const std::vector<std::string> shown = bars(terminal.read_all());
  EXPECT_EQ(terminal.wait(), 0);
  ASSERT_GE(shown.size(), 2u);
  EXPECT_LT(step_of(shown[0]), 3);
  for (const std::string& bar : shown)
    EXPECT_EQ(bar.find(" left") != std::string::npos, step_of(bar) >= 3) << bar;
}

TEST_F(Progress, TheLogFileHasTheMessagesOfTheRun) {
  Terminal terminal(train(150), 80);
  const std::string output = terminal.read_all();
  EXPECT_EQ(terminal.wait(), 0);
  const std::string log = read_file(run_ + "/log.txt");
  for (const std::string& text :
       {"run directory: " + run_, std::string("step 0: pass@1 (task) 0."),
        std::string("step 100: pass@1"), std::string("step 150: pass@1"),
        std::string("mean reward over 150 steps"), std::string("before GRPO (held-out"),
        std::string("run: pass@1 (task) 0.")}) {
    EXPECT_NE(log.find(text), std::string::npos) << text << "\n" << log;
    EXPECT_NE(output.find(text), std::string::npos) << text << "\n" << output;
  }
  const size_t once = output.find("step 100: pass@1");
  EXPECT_EQ(output.find("step 100: pass@1", once + 1), std::string::npos);
}

TEST_F(Progress, TheLogFileHasTheErrorThatEndedARun) {
  ASSERT_EQ(run_cohort(train(2)).code, 0);
  const std::string log = read_file(run_ + "/log.txt");
  const Output output = run_cohort({"train", "--resume", run_, "steps=4", "data.task=sort"});
  EXPECT_EQ(output.code, 2);
  const std::string added = read_file(run_ + "/log.txt").substr(log.size());
  const std::string message = output.err.substr(output.err.find("cohort: ") + 8);
  EXPECT_NE(added.find("failed: " + message), std::string::npos) << added << "\n" << output.err;
}

// The output of a command on a terminal, where the user types a line and ends the input. Line ends
// are those of files.
std::string on_terminal(const std::vector<std::string>& arguments, const std::string& line = "") {
  Terminal terminal(arguments, 200);
  if (!line.empty()) terminal.type(line + "\n\4");
  std::string output = terminal.read_all();
  terminal.wait();
  output.erase(std::remove(output.begin(), output.end(), '\r'), output.end());
  return output;
}

TEST(Help, WrapsAtTheTerminalsWidth) {
  const auto words = [](const std::string& text) {
    std::istringstream in(text);
    return std::vector<std::string>(std::istream_iterator<std::string>(in), {});
  };
  const std::string whole = run_cohort({"train", "--help"}).out;
  EXPECT_NE(
      whole.find("\ntrainer                        what to do: next-token training, supervised "
                 "fine-tuning, GRPO; of encoders: masked language modelling, classes; dpo: "
                 "preference pairs (choice, "
                 "pretrain | sft | grpo | mlm | classify | dpo; default pretrain)\n"),
      whole.npos);
  for (const int width : {20, 40, 60, 80, 400}) {
    Terminal terminal({"train", "--help"}, width);
    std::string shown = terminal.read_all();
    EXPECT_EQ(terminal.wait(), 0);
    shown.erase(std::remove(shown.begin(), shown.end(), '\r'), shown.end());
    EXPECT_EQ(words(shown), words(whole));
    std::istringstream lines(shown);
    for (std::string line; std::getline(lines, line);)
      EXPECT_TRUE(line.size() <= static_cast<size_t>(std::max(width, 40)) ||
                  line.find(COHORT_BINARY) != line.npos)
          << line;
    EXPECT_TRUE(width != 400 || shown == whole);
    EXPECT_EQ(
        shown.find("\ntrainer                        what to do: next-token training, "
                   "supervised\n                               fine-tuning, GRPO;") != shown.npos,
        width == 80);
  }
}

TEST(Prompts, TerminalsShowThatTheyAreRead) {
  const TempDir dir;
  write_file(dir.path("run.yaml"),
             "output_dir: run\n" + std::string(kSmallModel) + kSmallData + kSmallSft);
  ASSERT_EQ(run_cohort({"train", dir.path("run.yaml"), "steps=1"}).code, 0);
  for (const char* command : {"generate", "logprobs"})
    EXPECT_NE(on_terminal({command, dir.path("run")}, "1+1=").find("reading texts, one per line"),
              std::string::npos);
  EXPECT_EQ(run_cohort({"generate", dir.path("run")}, "1+1=\n").err, "");
}

// Expects that on a terminal the command shows `shown` and no control character. A pipe, and with
// `with_raw` a terminal, receives `bytes`.
void expect_escaped(std::vector<std::string> arguments, const std::string& bytes,
                    const std::string& shown, bool with_raw) {
  const std::string output = on_terminal(arguments);
  EXPECT_NE(output.find(shown), output.npos) << output;
  EXPECT_EQ(escape_controls(output), output);
  const Output piped = run_cohort(arguments);
  EXPECT_NE((piped.out + piped.err).find(bytes), std::string::npos) << piped.out << piped.err;
  if (!with_raw) return;
  arguments.push_back("--raw");
  EXPECT_NE(on_terminal(arguments).find(bytes), std::string::npos);
}

const std::string kEvil = "\x1b[31m\x1b]0;x\x07\xe2\x80\xae\xc2\x9b\x32J",
                  kEvilShown = "\\x1b[31m\\x1b]0;x\\x07\\u202e\\u009b2J";

class Escapes : public testing::Test {
 protected:
  // A model of bytes, in a folder of its own name.
  std::string train_bytes(const std::string& name) const {
    std::filesystem::create_directory(dir_.path(name));
    write_file(dir_.path(name + "/run.yaml"),
               "output_dir: run\n" + std::string(kSmallModel) +
                   "data: {task: addition, task_sizes: {max_size: 2}, tokenizer: byte}\n" +
                   kSmallSft);
    return dir_.path(name + "/run");
  }
  TempDir dir_;
};

TEST_F(Escapes, OfArgumentsAndFilesDoNotReachTheTerminalInErrors) {
  expect_escaped({"check", dir_.path(kEvil)}, kEvil, kEvilShown, false);
  expect_escaped({kEvil}, kEvil, kEvilShown, false);
  write_file(dir_.path("model.safetensors"), "");
  write_file(dir_.path("config.json"), Json().set("model_type", kEvil).dump());
  expect_escaped({"inspect", dir_.path("")}, kEvil, kEvilShown, false);
  const std::string many = "\x1b[31m" + std::string(1 << 20, 'm');
  write_file(dir_.path("config.json"), Json().set("model_type", many).dump());
  const std::string output = on_terminal({"inspect", dir_.path("")});
  EXPECT_EQ(escape_controls(output), output);
  EXPECT_LT(output.size(), 8000u);
}

TEST_F(Escapes, OfTemplatesAndTokensDoNotReachTheTerminal) {
  write_file(dir_.path("a.jinja"), kEvil);
  write_file(dir_.path("context.json"), "{}");
  expect_escaped(
      {"template", "render", dir_.path("a.jinja"), "--context", dir_.path("context.json")}, kEvil,
      kEvilShown, true);
  write_file(dir_.path("tokenizer.json"), R"({"type": "byte"})");
  const std::vector<std::string> decode = {"tokenizer", "decode", dir_.path("")};
  const std::string ids = "[194,155,226,128,174,127]", bytes = "\xc2\x9b\xe2\x80\xae\x7f";
  EXPECT_EQ(run_cohort(decode, ids + "\n").out, "\"" + bytes + "\"\n");
  const std::string output = on_terminal(decode, ids);
  EXPECT_NE(output.find("\"\\u009b\\u202e\\x7f\""), output.npos) << output;
  EXPECT_NE(on_terminal({"tokenizer", "decode", dir_.path(""), "--raw"}, ids).find(bytes),
            std::string::npos);
}

TEST_F(Escapes, OfARunDoNotReachTheTerminalOrItsLog) {
  train_bytes(kEvil);
  expect_escaped({"check", dir_.path(kEvil + "/run.yaml"), "output_dir=" + dir_.path("run")}, kEvil,
                 kEvilShown + "/run.yaml: ok", false);
  const std::string output =
      on_terminal({"train", dir_.path(kEvil + "/run.yaml"), "output_dir=" + dir_.path("run")});
  // The program itself writes colours and clears the progress line.
  static const std::regex kProgress("\033\\[(K|m|3[0-9]m)");
  const std::string text = std::regex_replace(output, kProgress, "");
  EXPECT_EQ(escape_controls(text), text);
  EXPECT_NE(text.find("run directory: " + dir_.path("run")), text.npos) << text;
  const std::string log = read_file(dir_.path("run/log.txt"));
  EXPECT_EQ(escape_controls(log), log);
  EXPECT_NE(log.find("run directory: " + dir_.path("run")), log.npos) << log;
}

// Each byte is a token of its own: characters and escape sequences arrive in pieces.
TEST_F(Escapes, OfCompletionsDoNotReachTheTerminalInPieces) {
  const std::string run = train_bytes("bytes");
  ASSERT_EQ(run_cohort({"train", dir_.path("bytes/run.yaml")}).code, 0);
  std::vector<std::string> generate = {"generate", run, "\x1b[1m", "--max-tokens=10", "--num=9"};
  for (const int byte : {0x1b, 0xc2, 0x9b}) generate.push_back(str("--logit-bias=", byte, ":200"));
  const std::string piped = run_cohort(generate).out, output = on_terminal(generate);
  EXPECT_NE(piped.find("\xc2\x9b"), piped.npos);
  EXPECT_NE(piped.find("\x1b[1m"), piped.npos);
  EXPECT_EQ(output, escape_controls(piped));
  generate.push_back("--raw");
  EXPECT_EQ(on_terminal(generate), piped);
  generate.back() = "--json";
  EXPECT_EQ(on_terminal(generate), escape_controls(run_cohort(generate).out));
}

TEST_F(Escapes, OfRepliesDoNotReachTheTerminal) {
  const std::string model = dir_.path("model");
  std::filesystem::create_directory(model);
  Json::Object vocab;
  for (const char* token : {"</s>", "u", "a"})
    vocab.emplace_back(token, static_cast<int64_t>(vocab.size()));
  while (vocab.size() < 32)
    vocab.emplace_back(str("\x1b[", vocab.size(), "m"), static_cast<int64_t>(vocab.size()));
  Json bpe = Json().set("type", "BPE").set("merges", Json::Array{}).set("vocab", std::move(vocab));
  write_file(model + "/tokenizer.json",
             Json().set("decoder", Json().set("type", "Fuse")).set("model", std::move(bpe)).dump());
  write_file(model + "/tokenizer_config.json", R"({"eos_token": "</s>"})");
  write_file(model + "/chat_template.jinja", "{{ messages[0].content }}");
  write_file(model + "/config.json",
             R"({"model_type": "qwen2", "vocab_size": 32, "hidden_size": 16, "eos_token_id": 0,
                 "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
                 "intermediate_size": 24, "max_position_embeddings": 64,
                 "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true})");
  save_weights(Transformer(load_config(model), DType::kF32, 1), model, "model");
  const std::vector<std::string> chat = {"chat", model, "--max-tokens=20", "--temperature=1"};
  const std::string piped = run_cohort(chat, "ua\n").out, output = on_terminal(chat, "ua");
  EXPECT_NE(piped.find("\x1b["), piped.npos) << piped;
  EXPECT_NE(output.find(escape_controls(piped)), output.npos) << output;
  EXPECT_EQ(escape_controls(output), output);
  EXPECT_NE(output.find("temperature 1, at most 20 tokens a reply; /new begins"), output.npos);
  EXPECT_NE(
      on_terminal({"chat", model, "--max-tokens=20", "--temperature=1", "--raw"}, "ua").find(piped),
      output.npos);
  write_file(model + "/chat_template.jinja", kEvil);
  expect_escaped({"inspect", model}, kEvil, "chat template\n" + kEvilShown, false);
}

}  // namespace
}  // namespace cohort::test
