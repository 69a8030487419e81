// Environments of external programs, which answer in time, late, twice, never, or lie; and the
// Python helper.
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>

#include "rl/engine/rollout.h"
#include "rl/environment.h"
#include "tests/support/chat_tokenizer.h"
#include "tests/support/test_util.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

// Executes the text of each turn: r is the request, say() and later() answer it, `held` keeps
// requests.
constexpr const char* kEnvironmentProgram = R"(
import json, os, signal, sys, threading, time
lock, held, state = threading.Lock(), [], {}
def write(text):
    with lock:
        sys.stdout.write(text)
        sys.stdout.flush()
def line(r, **keys):
    return json.dumps({"index": r["index"], "turn": r["turn"], **keys}) + "\n"
def say(of=None, **keys):
    write(line(of or r, **keys))
def later(seconds, of, **keys):
    threading.Timer(seconds, lambda: say(of, **keys)).start()
for text in sys.stdin:
    r = json.loads(text)
    exec(r["completion"])
)";

class CommandEnvironment : public testing::Test {
 protected:
  CommandEnvironment() { write_file(dir_.path("program.py"), kEnvironmentProgram); }

  EnvironmentConfig config(const std::string& run = "python3 -S program.py") const {
    EnvironmentConfig out;
    out.name = "command";
    out.program.run = run;
    out.program.directory = dir_.path("");
    out.tool_format = ToolFormat::kHermes;
    out.program.timeout = 20;
    return out;
  }
  // `file`: an environment file of the helper.
  EnvironmentConfig helper(const std::string& file, const std::string& options = "") const {
    write_file(dir_.path("file.py"), file);
    return config("python3 '" + (kScripts / "cohort_environment.py").string() + "' file.py" +
                  options);
  }
  void start(const EnvironmentConfig& config) {
    environment_ = make_environment(config, {.tokenizer = *tokenizer_, .chat = std::nullopt});
  }
  // A dialogue whose turns before `turn` are "x", and whose last is `text`.
  Trajectory trajectory(int64_t index, const std::string& text, int64_t turn = 1) const {
    Trajectory out{.index = index, .text = text};
    out.append_observed(tokenizer_->encode("p")[0]);
    for (int64_t i = 1; i < turn; ++i) {
      out.append_sampled(tokenizer_->encode("x")[0], 0);
      out.append_observed(tokenizer_->encode("o")[0]);
    }
    for (const int32_t id : tokenizer_->encode(text)) out.append_sampled(id, 0);
    out.append_sampled(tokenizer_->eos_id(), 0);
    out.transcript = Json::Array{make_message("assistant", text)};
    return out;
  }
  void submit(int64_t index, const std::string& text, int64_t turn = 1) {
    environment_->submit(example_, trajectory(index, text, turn), /*step=*/7);
  }
  // The next `count` replies by index.
  std::map<int64_t, EnvironmentReply> replies(size_t count) {
    std::map<int64_t, EnvironmentReply> out;
    while (out.size() < count)
      for (EnvironmentReply& reply : environment_->poll(/*wait=*/true)) {
        const int64_t index = reply.index;
        EXPECT_TRUE(out.emplace(index, std::move(reply)).second) << index;
      }
    EXPECT_TRUE(environment_->poll(/*wait=*/false).empty());
    return out;
  }
  std::string text_of(const EnvironmentReply& reply) const {
    return reply.error.empty() ? tokenizer_->decode(reply.tokens) : "! " + reply.error;
  }
  std::string ask(const std::string& text, int64_t index = 0) {
    submit(index, text);
    return text_of(replies(1).at(index));
  }
  static void expect_error(const EnvironmentReply& reply, const std::string& text) {
    EXPECT_NE(reply.error.find(text), std::string::npos) << text << ": " << reply.error;
    EXPECT_TRUE(reply.tokens.empty() && std::isnan(reply.reward) && reply.messages.is_null());
  }

  static inline const fs::path kScripts =
      fs::path(__FILE__).parent_path().parent_path().parent_path() / "scripts";
  const Example example_{.prompt = "p", .answer = "42", .fields = Json().set("unit", "m")};
  const std::unique_ptr<Tokenizer> tokenizer_ = chat_tokenizer(kTurns);
  TempDir dir_;
  std::unique_ptr<Environment> environment_;
};

constexpr const char* kPid = "say(observation=str(os.getpid()))";
constexpr const char* kHold = "held.append(r)";

TEST_F(CommandEnvironment, BeginsTheDialoguesOfAPrompt) {
  EnvironmentConfig options = helper(
      "class Environment:\n"
      "    def start(self, prompt, fields, turn):\n"
      "        assert turn == 0 and prompt != 'bad', 'no beginning'\n"
      "        if prompt == 'odd': return {'done': True}\n"
      "        return {'messages': [{'role': 'user', 'content': 'And?'}],\n"
      "                'fields': {'answer': [7, None, '7.0'], 'unit': fields['unit'] + '2'}}\n"
      "    def turn(self, completion): return 'no'\n");
  options.starts = true;
  const ChatFormat chat(*tokenizer_, Json());
  for (const bool is_chat : {false, true}) {
    environment_ = make_environment(
        options, {.tokenizer = *tokenizer_, .chat = is_chat ? std::optional(chat) : std::nullopt});
    ASSERT_TRUE(environment_->starts());
    std::vector<Example> prompts(3, example_);
    prompts[0].other_answers = {"42.0"};
    prompts[1].prompt = "bad";
    prompts[2].prompt = "odd";
    if (is_chat) {
      prompts[0].conversation = Json::Array{make_message("user", "p")};
      prompts[0].prompt = chat.prompt(prompts[0].conversation);
    }
    std::vector<int64_t> indices;
    const auto begun = begin_dialogues(
        {.environment = environment_.get(),
         .on_reply = [&](const EnvironmentReply& reply) { indices.push_back(reply.index); }},
        prompts, 4, {.step = 7, .prompt_indices = {2, 5, 9}});
    std::ranges::sort(indices);
    EXPECT_EQ(indices, (std::vector<int64_t>{8, 20, 36}));
    EXPECT_EQ(begun[0].start_error, "");
    EXPECT_EQ(begun[0].answer, "7");
    EXPECT_EQ(begun[0].other_answers, std::vector<std::string>{"7.0"});
    EXPECT_EQ(begun[0].fields.dump(), R"({"unit":"m2","answer":[7,null,"7.0"]})");
    const Json whole = Json::Array{make_message("user", "p"), make_message("user", "And?")};
    EXPECT_EQ(begun[0].prompt, is_chat ? chat.prompt(whole) : "pAnd?");
    EXPECT_EQ(begun[1].start_error, "it reports: 'AssertionError: no beginning'");
    EXPECT_EQ(begun[2].start_error, "its answer to turn 0 has an unknown key 'done'");
    EXPECT_EQ(begun[2].prompt, "odd");
  }
}

TEST_F(CommandEnvironment, RequestsDescribeTheTurn) {
  start(config());
  const std::string text =
      "say(observation=[json.dumps(r)] * 2) # <|start|>\n"
      "# <tool_call>{\"name\": \"add\", \"arguments\": {\"x\": 1}}</tool_call>\n"
      "# <tool_call>{\"name\": \"add\"</tool_call>";
  submit(3, text, 2);
  const EnvironmentReply reply = replies(1).at(3);
  ASSERT_EQ(reply.error, "");
  const Json::Array& messages = reply.messages.as_array();
  ASSERT_EQ(messages.size(), 2u);
  EXPECT_EQ(messages[0].at("role").as_string(), "tool");
  EXPECT_EQ(messages[0].at("name").as_string(), "add");
  Json request = parse_json(messages[1].at("content").as_string(), "request");
  const Json::Array calls = request.at("tool_calls").as_array();
  EXPECT_EQ(calls.at(0).dump(), R"({"name":"add","arguments":{"x":1}})");
  EXPECT_FALSE(calls.at(1).at("error").as_string().empty());
  request.set("tool_calls", Json());
  const Json expected =
      Json()
          .set("index", 3)
          .set("step", 7)
          .set("turn", 2)
          .set("completion", text)
          .set("messages", Json::Array{make_message("user", "p"), make_message("assistant", text)})
          .set("tool_calls", Json())
          .set("answer", "42")
          .set("fields", example_.fields)
          .set("prompt", "p")
          .set("length", static_cast<int64_t>(tokenizer_->encode(text).size()) + 2);
  EXPECT_EQ(request.dump(), expected.dump());
}

TEST_F(CommandEnvironment, ConversationsAreMessages) {
  start(config());
  Example chat = example_;
  chat.conversation = Json::Array{make_message("system", "s"), make_message("user", "u")};
  environment_->submit(chat, trajectory(0, "say(observation=str(r['messages'][:2]))"), 0);
  EXPECT_EQ(text_of(replies(1).at(0)),
            "[{'role': 'system', 'content': 's'}, {'role': 'user', 'content': 'u'}]");
}

TEST_F(CommandEnvironment, ALinesOwnToolsAndVariablesHoldForItsDialogue) {
  const auto tokenizer = chat_tokenizer(
      "{% for m in messages %}{% if m.role == 'user' and loop.last and tools %}{{ tools | tojson }}"
      "{% endif %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
      "{% if add_generation_prompt %}<|start|>assistant\n{{ mood }}{% endif %}");
  EnvironmentConfig llama = config();
  llama.tool_format = ToolFormat::kLlama3;
  environment_ = make_environment(llama, {*tokenizer, ChatFormat(*tokenizer, Json())});
  // The text is an answer, or a call of the line's tool that does not end.
  const auto observed = [&](const Json& variables) {
    Example example = example_;
    example.template_variables = variables;
    environment_->submit(
        example,
        trajectory(
            0, "{'x': 1}\nsay(messages=[{'role': 'user', 'content': str(len(r['tool_calls']))}])"),
        0);
    const EnvironmentReply reply = replies(1).at(0);
    return reply.error + tokenizer->decode(reply.tokens, SpecialText::kShow);
  };
  const std::string user = "<|start|>user\n0<|end|>\n<|start|>assistant\n";
  EXPECT_EQ(observed({}), "\n" + user);
  const Json add = parse_json(R"([{"name": "add"}])", "tools");
  EXPECT_EQ(observed(Json().set("mood", "calm").set("tools", add)),
            "\n" + std::string(R"([{"name": "add"}])") + user + "calm");
  const auto num_calls = [&](const Json& variables) {
    Example example = example_;
    example.template_variables = variables;
    environment_->submit(example,
                         trajectory(0,
                                    "{\"name\": \"add\", \"parameters\": {}}\n"
                                    "say(observation=str(len(r['tool_calls'])))"),
                         0);
    return replies(1).at(0).messages.as_array().at(0).at("content").as_string();
  };
  EXPECT_EQ(num_calls({}), "1");  // unknown tools: of any name
  EXPECT_EQ(num_calls(Json().set("tools", add)), "1");
  EXPECT_EQ(num_calls(Json().set("tools", parse_json(R"([{"name": "sub"}])", ""))), "0");
}

TEST_F(CommandEnvironment, AnswersComeInAnyOrder) {
  EnvironmentConfig three = config();
  three.program.workers = 3;
  start(three);
  // Each program answers its 20 requests in reverse order, once it has them all.
  for (int64_t i = 0; i < 60; ++i)
    submit(i, str(kHold,
                  "\nif len(held) == 20:\n"
                  "  for one in reversed(held): say(one, observation='to %d' % one['index'])"));
  for (const auto& [index, reply] : replies(60)) {
    EXPECT_EQ(text_of(reply), str("to ", index));
    EXPECT_FALSE(reply.done);
  }
  EXPECT_TRUE(environment_->poll(/*wait=*/true).empty());
}

TEST_F(CommandEnvironment, TurnsOfADialogueGoToOneProgram) {
  EnvironmentConfig three = config();
  three.program.workers = 3;
  start(three);
  std::map<int64_t, std::string> pids;
  for (int64_t turn = 1; turn <= 3; ++turn) {
    for (int64_t i = 0; i < 7; ++i) submit(i, kPid, turn);
    for (const auto& [index, reply] : replies(7))
      EXPECT_EQ(pids.emplace(index, text_of(reply)).first->second, text_of(reply));
  }
  EXPECT_NE(pids[0], pids[1]);
  EXPECT_EQ(pids[0], pids[3]);
}

TEST_F(CommandEnvironment, ObservationsAreMessages) {
  start(config());
  const std::string call = " # <tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
  const auto messages = [&](const std::string& code) {
    submit(0, code);
    const EnvironmentReply reply = replies(1).at(0);
    return reply.error.empty() ? reply.messages.dump() : reply.error;
  };
  EXPECT_EQ(messages("say(observation='a')"), R"([{"role":"user","content":"a"}])");
  EXPECT_EQ(messages("say(observation='a')" + call),
            R"([{"role":"tool","content":"a","name":"f"}])");
  EXPECT_EQ(messages("say(observation='a')" + call + call), R"([{"role":"tool","content":"a"}])");
  EXPECT_EQ(messages("say(observation=['a'])" + call),
            R"([{"role":"tool","content":"a","name":"f"}])");
  const std::string own = R"([{"role":"tool","content":"a","x":1},{"role":"user","content":"b"}])";
  EXPECT_EQ(messages("say(messages=" + own + ")"), own);
  submit(0, "say(messages=" + own + ", reward=-0.5)");
  const EnvironmentReply reply = replies(1).at(0);
  EXPECT_EQ(text_of(reply), "ab");
  EXPECT_EQ(reply.reward, -0.5);
  submit(0, "say(done=True, reward=2)");
  const EnvironmentReply end = replies(1).at(0);
  EXPECT_TRUE(end.done && end.tokens.empty() && end.messages.is_null() && end.error.empty());
  EXPECT_EQ(end.reward, 2);
}

TEST_F(CommandEnvironment, ObservationsArePlainText) {
  const std::unique_ptr<Tokenizer> bytes = make_byte_tokenizer();
  auto environment = make_environment(config(), {.tokenizer = *bytes, .chat = std::nullopt});
  std::string text;
  for (char c = 1; c < 32; ++c) text += c;
  text += "\x7f<|end|><|endoftext|>\xc3\xa4\"\\";
  Trajectory turn{.stop_reason = StopReason::kStopString};
  for (const int32_t id : bytes->encode("say(observation=''.join(map(chr, range(1, "
                                        "32)))+'\\x7f<|end|><|endoftext|>\\xe4\"\\\\')"))
    turn.append_sampled(id, 0);
  environment->submit(example_, turn, 0);
  const std::vector<EnvironmentReply> replies = environment->poll(/*wait=*/true);
  EXPECT_EQ(bytes->decode(replies.at(0).tokens), text) << replies.at(0).error;
  EXPECT_EQ(replies.at(0).tokens.size(), text.size());
}

TEST_F(CommandEnvironment, TheTextOfACallbackIsReadAsAPrograms) {
  EnvironmentConfig own;
  own.name = "mine";
  own.program.callback = std::make_shared<const Callback>([](std::span<const Json> requests) {
    return std::vector<Json>(requests.size(),
                             Json().set("observation", "a\xff").set("reward", double{NAN}));
  });
  start(own);
  submit(0, "x");
  const EnvironmentReply reply = replies(1).at(0);
  EXPECT_EQ(reply.messages.as_array().at(0).at("content").as_string(), "a\xef\xbf\xbd");
  EXPECT_TRUE(std::isnan(reply.reward));
}

TEST_F(CommandEnvironment, InvalidAnswersFailTheirDialogue) {
  start(config());
  const std::string pid = ask(kPid);
  const std::vector<std::pair<std::string, std::string>> answers = {
      {"say()", "needs exactly one of 'observation', 'messages', 'done': true, and 'error'"},
      {"say(done=True, observation='a')", "needs exactly one of"},
      {"say(done=False)", "needs exactly one of"},
      {"say(done=True, rewrd=1)", "its answer has an unknown key 'rewrd'"},
      {"say(done=1)", "its answer: done: expected true or false"},
      {"say(error=1)", "its answer: error: expected text"},
      {"say(error='no\\nroom')", "it reports: 'no\\nroom'"},
      {"say(observation=1)", "its answer: observation: expected a list"},
      {"say(observation=['a'])", "its observation has 1 texts for 0 tool calls"},
      {"say(observation='')", "its observation has no tokens"},
      {"say(observation='\\xe4')", "no token"},
      {"say(messages=[])", "its answer has no messages"},
      {"say(messages=[{'role': 'system', 'content': 'a'}])", "a message of the role 'system'"},
      {"say(messages=[{'role': 'user', 'content': 1}])",
       "its answer: messages[0].content: expected text"},
      {"say(done=True, reward='1')", "its answer: reward: expected a number"},
      {"say(observation=[1]) # <tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>",
       "its answer: observation[0]: expected text"}};
  for (size_t i = 0; i < answers.size(); ++i) submit(static_cast<int64_t>(i), answers[i].first);
  submit(99, kPid);
  const auto all = replies(answers.size() + 1);
  EXPECT_EQ(text_of(all.at(99)), pid);
  for (size_t i = 0; i < answers.size(); ++i)
    expect_error(all.at(static_cast<int64_t>(i)), answers[i].second);
}

// They fail all dialogues of the program, which is restarted.
TEST_F(CommandEnvironment, OffencesEndTheProgram) {
  start(config());
  std::set<std::string> pids;
  const std::vector<std::pair<std::string, std::string>> offences = {
      {"write('x' * (100 << 20))", "its answer is over 1 MB (ended by cohort)"},
      {"say(observation='y' * (2 << 20))", "its answer is over 1 MB"},
      {"write('yes\\n')", "its answer: not valid JSON: "},
      {"write(line(r, done=True, reward=float('nan')))", "its answer: not valid JSON: "},
      {"write(line(r, done=True, reward=5).replace('5', '1e999'))", "its answer: not valid JSON: "},
      {"write('[]\\n')", "its answer: expected an object"},
      {"say({'index': 2, 'turn': 1}, done=True)", "it answers no request that it has: '{"},
      {"say({'index': 1, 'turn': 2}, done=True)", "it answers no request that it has"},
      {"say(held[0], done=True), say(held[0], done=True)", "it answers no request that it has"},
      {"os._exit(3)", "it has ended, or closed its output (exit code 3)"},
      {"os.close(1), time.sleep(100)", "it has ended, or closed its output"},
      {"os.kill(os.getpid(), 9)", "(signal 9)"}};
  for (const auto& [code, error] : offences) {
    pids.insert(ask(kPid));
    submit(5, kHold);
    submit(6, kHold);
    submit(1, code);
    const auto all = replies(3);
    // An answer that was right at its time counts.
    if (code.starts_with("say(held[0]"))
      EXPECT_TRUE(all.at(5).done);
    else
      expect_error(all.at(5), error);
    expect_error(all.at(6), error);
    expect_error(all.at(1), error);
  }
  EXPECT_EQ(pids.size(), offences.size());
}

TEST_F(CommandEnvironment, UnaskedAnswersFailNoRequest) {
  start(config());
  EXPECT_EQ(ask("say(observation='a'), later(0.05, {'index': 8, 'turn': 1}, done=True)"), "a");
  usleep(300'000);
  EXPECT_EQ(ask("say(observation='b')"), "b");
}

TEST_F(CommandEnvironment, AnswersBeforeTheEndCount) {
  start(config());
  for (int64_t i = 0; i < 20; ++i) submit(i, i < 19 ? kHold : "r");
  submit(20, "for one in held[:10]: say(one, observation='a')\nos._exit(4)");
  for (const auto& [index, reply] : replies(21)) {
    if (index < 10)
      EXPECT_EQ(text_of(reply), "a") << index;
    else
      expect_error(reply, "(exit code 4)");
  }
}

TEST_F(CommandEnvironment, KilledProgramsAreRestarted) {
  start(config());
  for (int i = 0; i < 3; ++i) {
    const std::string pid = ask(kPid);
    ASSERT_EQ(::kill(std::stoi(pid), SIGKILL), 0) << pid;
    usleep(200'000);
  }
  EXPECT_EQ(ask("say(observation='a')"), "a");
}

TEST_F(CommandEnvironment, SizesOfObservations) {
  start(config());
  EXPECT_EQ(ask("say(observation='a' * 900000)").size(), 900'000u);
  expect_error((submit(0, "say(observation='a' * 1100000)"), replies(1).at(0)), "is over 1 MB");
  EXPECT_EQ(ask(str("say(observation='b' * 1100000) #", std::string(200'000, 'x'))).size(),
            1'100'000u);
  // 8 MB wait for a program that does not read.
  submit(0, "time.sleep(0.5), say(observation='c')");
  for (int64_t i = 1; i < 9; ++i) submit(i, "say(observation='d') #" + std::string(500'000, 'x'));
  for (const auto& [index, reply] : replies(9)) EXPECT_EQ(text_of(reply), index == 0 ? "c" : "d");
}

TEST_F(CommandEnvironment, ProgramsHaveSoManyRequestsAtATime) {
  EnvironmentConfig few = config();
  few.concurrent = 64;
  start(few);
  for (int64_t i = 0; i < 100; ++i)
    submit(i,
           "held.append(r)\n"
           "def answer():\n"
           "  n = len(held)\n"
           "  for one in held[64 if n > 64 else 0:n]: say(one, observation=str(n))\n"
           "if len(held) in (64, 100): threading.Timer(0.2, answer).start()");
  for (const auto& [index, reply] : replies(100))
    EXPECT_EQ(text_of(reply), index < 64 ? "64" : "100") << index;
}

TEST_F(CommandEnvironment, AProgramThatAnswersOthersIsNotLate) {
  EnvironmentConfig hasty = config();
  hasty.program.timeout = 1;
  start(hasty);
  const std::string pid = ask(kPid);
  submit(0, "later(1.3, r, observation='a')");
  submit(1, "later(0.7, r, observation='b')");
  const auto all = replies(2);
  EXPECT_EQ(text_of(all.at(0)), "a");
  EXPECT_EQ(text_of(all.at(1)), "b");
  EXPECT_EQ(ask(kPid, 1), pid);
}

TEST_F(CommandEnvironment, ATurnWithoutAnAnswerFailsOnceTheOthersHaveTheirs) {
  EnvironmentConfig hasty = config();
  hasty.program.timeout = 1;
  start(hasty);
  const std::string pid = ask(kPid);
  submit(0, "held.append(r)");
  submit(1, "later(0.3, r, observation='a')");
  const auto all = replies(2);
  expect_error(all.at(0), "no answer in 1 s");
  EXPECT_EQ(text_of(all.at(1)), "a");
  EXPECT_NE(ask(kPid, 2), pid);
}

TEST_F(CommandEnvironment, AProgramThatHangsIsRestarted) {
  EnvironmentConfig hasty = config();
  hasty.program.timeout = 0.5;
  start(hasty);
  const std::string pid = ask(kPid);
  submit(0, "time.sleep(1000)");
  for (int64_t i = 1; i < 4; ++i) submit(i, kPid);
  for (const auto& [index, reply] : replies(4)) expect_error(reply, "no answer in 0.5 s (ended by");
  EXPECT_NE(ask(kPid), pid);
}

TEST_F(CommandEnvironment, CancelledTurnsHaveNoReplies) {
  EnvironmentConfig two = config();
  two.program.workers = 2;
  start(two);
  for (int round = 0; round < 3; ++round) {
    // Answered, answered late, never answered, with a request half sent, and not sent.
    for (int64_t i = 0; i < 20; ++i) {
      submit(i, "say(observation='old')");
      submit(20 + i, "later(0.1, r, observation='late')");
      submit(40 + i, kHold);
    }
    submit(60, "time.sleep(0.05)");
    for (int64_t i = 61; i < 90; ++i) submit(i, "#" + std::string(100'000, 'x'));
    if (round % 2 == 0) {
      EXPECT_FALSE(environment_->poll(/*wait=*/true).empty());
    }
    environment_->cancel_all();
    EXPECT_TRUE(environment_->poll(/*wait=*/true).empty());
    for (int64_t i = 0; i < 60; ++i) submit(i, "say(observation='new')");
    for (const auto& [index, reply] : replies(60)) EXPECT_EQ(text_of(reply), "new") << index;
  }
}

TEST_F(CommandEnvironment, ProgramsThatCannotRunAreInputErrors) {
  EXPECT_THROW_WITH(start(config("'a")), InputError, "environment: run: a quote ' is not");
  start(config("no-such-program"));
  EXPECT_THROW_WITH(submit(0, ""), InputError, "cannot run 'no-such-program'");
}

// ---- The Python helper

std::string call(const std::string& name, const std::string& arguments) {
  return "<tool_call>{\"name\": \"" + name + "\", \"arguments\": " + arguments + "}</tool_call>";
}

TEST_F(CommandEnvironment, TheHelperCallsTools) {
  start(
      helper("import asyncio, time\n"
             "from cohort_environment import tool\n"
             "@tool\n"
             "def slow(x: int):\n"
             "    print('printed')\n"
             "    time.sleep(0.3)\n"
             "    return {'x': x}\n"
             "@tool\n"
             "async def fast(x: int) -> str: return str(x) + '\\ud800'\n"
             "@tool\n"
             "def large() -> str: return 'x' * 2000000\n"));
  ask(call("fast", "{\"x\": 1}"));
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < 40; ++i) submit(i, call("slow", str("{\"x\": ", i, "}")));
  submit(40, call("fast", "{\"x\": 1}") + call("nothing", "{}"));
  submit(41, call("fast", "{\"y\": 1}") + call("fast", "[]") + "<tool_call>{</tool_call>");
  submit(42, "the end");
  submit(43, call("large", "{}"));
  const auto all = replies(44);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(6));
  for (int64_t i = 0; i < 40; ++i) EXPECT_EQ(text_of(all.at(i)), str("{\"x\": ", i, "}"));
  EXPECT_EQ(text_of(all.at(40)), "1?Error: there is no tool nothing; there are: slow, fast, large");
  const Json::Array& errors = all.at(41).messages.as_array();
  EXPECT_EQ(errors.size(), 3u);
  for (const Json& error : errors)
    EXPECT_TRUE(error.at("content").as_string().starts_with("Error: ")) << error.dump();
  EXPECT_TRUE(all.at(42).done);
  expect_error(all.at(43), "over 1 MB");
}

TEST_F(CommandEnvironment, TheHelperPlaysDialogues) {
  const char* bodies = R"(        await_or_not = None
        if completion == 'end': return Done(0.5)
        if completion == 'list': return [{'role': 'user', 'content': 'm'}]
        if completion == 'dict': return {'observation': 'd', 'reward': 1, 'index': 77}
        if completion == 'nan': return Done(float('nan'))
        if completion == 'raise': raise ValueError('oh')
        if completion == 'none': return None
        return fields['unit'] + str(turn) + messages[0]['content']
)";
  for (const char* kind : {"", "async "}) {
    start(helper(str("from __future__ import annotations\nfrom cohort_environment import Done\n"
                     "class Environment:\n    ",
                     kind, "def turn(self, messages, completion, fields, turn):\n", bodies),
                 " --concurrency 2"));
    const std::vector<std::string> turns = {"x", "end", "list", "dict", "nan", "raise", "none"};
    for (size_t i = 0; i < turns.size(); ++i) submit(static_cast<int64_t>(i), turns[i]);
    const auto all = replies(turns.size());
    EXPECT_EQ(text_of(all.at(0)), "m1p");
    EXPECT_TRUE(all.at(1).done);
    EXPECT_EQ(all.at(1).reward, 0.5);
    EXPECT_EQ(text_of(all.at(2)), "m");
    EXPECT_EQ(text_of(all.at(3)), "d");
    EXPECT_EQ(all.at(3).reward, 1);
    expect_error(all.at(4), "it reports: 'ValueError: Out of range float");
    expect_error(all.at(5), "it reports: 'ValueError: oh'");
    expect_error(all.at(6), "it reports: 'TypeError: ");
  }
}

TEST_F(CommandEnvironment, TheHelperPrintsSchemas) {
  const std::string out = dir_.path("tools.json");
  const auto print = [&](const std::string& file) {
    const std::string run = str("python3 '", (kScripts / "cohort_environment.py").string(), "' '",
                                file, "' --schemas > '", out, "'");
    EXPECT_EQ(std::system(run.c_str()), 0);
    return read_file(out);
  };
  const fs::path example = kScripts.parent_path() / "examples/tools_python";
  EXPECT_EQ(print((example / "tools.py").string()), read_file((example / "tools.json").string()));
  EnvironmentConfig with_schemas = config();
  with_schemas.tool_schemas = out;
  EXPECT_EQ(tool_schemas(with_schemas).as_array().size(), 2u);
  write_file(dir_.path("file.py"), R"(
from __future__ import annotations
from typing import Any, Literal, Optional
from cohort_environment import tool
print("printed")
@tool
def f(a: list[int], b: Literal["x", "y"], c: Any, d, e: Optional[bool] = None):
    """Does
    things.

    Args:
        a (list): one
          and two
        e: three: four
    """
)");
  EXPECT_EQ(parse_json(print(dir_.path("file.py")), "schemas").dump(),
            R"([{"type":"function","function":{"name":"f","description":"Does things.",)"
            R"("parameters":{"type":"object","properties":{)"
            R"("a":{"type":"array","items":{"type":"integer"},"description":"one and two"},)"
            R"("b":{"type":"string","enum":["x","y"]},"c":{},"d":{},)"
            R"("e":{"type":"boolean","description":"three: four"}},)"
            R"("required":["a","b","c","d"]}}}])");
}

}  // namespace
}  // namespace cohort::test
