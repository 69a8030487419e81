// Requests to a server that answers, fails, hangs, floods or is not there, and rewards behind it.
#include "rl/http_pool.h"

#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "rl/reward.h"
#include "rl/rewards/external.h"
#include "sys/files.h"
#include "sys/polling.h"
#include "sys/sockets.h"
#include "tests/support/answer_server.h"

namespace cohort::test {
namespace {

using Wait = RequestPool::Wait;

// A second of back-off takes 10 ms.
HttpPoolOptions quick(const std::string& url, int64_t retries = 2) {
  return {.name = "reward http",
          .server = {.url = url, .retries = retries},
          .timeout = 1,
          .validate =
              [](const std::string&, const std::string& answer) {
                return std::string(answer.starts_with('{') ? "" : "it is no object");
              },
          .second = std::chrono::duration<double>(0.01)};
}
std::string request(int64_t index) {
  return Json().set("index", index).dump();
}

// The answer to a request whose tries the path describes; "! " precedes an error.
std::string answer_of(const AnswerServer& server, const std::string& path, int64_t retries = 2) {
  const auto pool = make_http_pool(quick(server.url(path), retries));
  pool->submit(request(7));
  const RequestPool::Answer answer = pool->take(Wait::kAll).at(0);
  return answer.error.empty() ? answer.line : "! " + answer.error;
}

TEST(HttpPool, AnswersComeInTheOrderOfTheRequests) {
  const AnswerServer server;
  HttpPoolOptions options = quick(server.url("ok:0.01"));
  options.concurrent = 7;
  const auto pool = make_http_pool(options);
  for (int round = 0; round < 2; ++round) {
    for (int64_t i = 0; i < 50; ++i) pool->submit(request(i + 100 * round), {i, round});
    const auto answers = pool->take(Wait::kAll);
    ASSERT_EQ(answers.size(), 50u);
    for (int64_t i = 0; i < 50; ++i) {
      const RequestPool::Answer& answer = answers[static_cast<size_t>(i)];
      EXPECT_EQ(answer.key, (RequestPool::Key{i, round}));
      EXPECT_EQ(parse_json(answer.line, "answer").at("index").as_int(), i + 100 * round)
          << answer.error;
    }
  }
  EXPECT_TRUE(pool->take(Wait::kAll).empty());
}

TEST(HttpPool, TriesAgainWhatWasNotAnswered) {
  const AnswerServer server;
  const ExpectLog waits("answers nothing");
  const std::string right = "{\"index\": 7, \"reward\": 0.07}";
  for (const char* path : {"500/ok", "503/502/ok", "408/ok", "429/ok", "reset/ok", "half/ok",
                           "never/ok", "half/reset/ok"})
    EXPECT_EQ(answer_of(server, path), right) << path;
  // The server says how long to wait: 30 s, 300 ms here.
  const auto start = Clock::now();
  EXPECT_EQ(answer_of(server, "429:30/ok"), right);
  EXPECT_GE(Clock::now() - start, std::chrono::milliseconds(300));
  // 1, 2, 4, 8 and 16 s.
  answer_of(server, "500/500/500/500/500/ok", 5);
  std::vector<double> times;
  for (const Json& one : server.requests())
    if (one.at("path").as_string() == "/500/500/500/500/500/ok")
      times.push_back(one.at("time").as_double());
  ASSERT_EQ(times.size(), 6u);
  for (size_t i = 1; i < 6; ++i)
    EXPECT_GE(times[i] - times[i - 1], 0.01 * std::ldexp(1.0, static_cast<int>(i) - 1));
}

TEST(HttpPool, AnswersThatAreWrongAreNotAskedForAgain) {
  const AnswerServer server, other;
  const auto starts = [](const std::string& text, const std::string& begin) {
    return text.starts_with(begin) ? begin : text;
  };
  EXPECT_EQ(answer_of(server, "404/ok"), "! HTTP 404: 'no, '");
  EXPECT_EQ(answer_of(server, "401/ok"), "! HTTP 401: 'no, '");
  EXPECT_EQ(answer_of(server, "text:nonsense/ok"), "! it is no object");
  EXPECT_EQ(answer_of(server, "huge/ok"), "! its answer is too long");
  EXPECT_EQ(answer_of(server, "endless/ok"), "! its answer is too long");
  const std::string there = str("redirect:127.0.0.1:", other.port(), "_ok");
  EXPECT_EQ(starts(answer_of(server, there), "! HTTP 307: a redirect to "),
            "! HTTP 307: a redirect to ");
  EXPECT_TRUE(other.requests().empty());
  EXPECT_EQ(server.requests().size(), 6u);
}

// Requests that the server cannot answer, of which there are few, are no outage, and fail alone.
TEST(HttpPool, ARequestFailsAtTheLastOfItsTries) {
  const AnswerServer server;
  const ExpectLog waits("answers nothing");  // after 10 seconds, of the 31 between the tries
  const auto pool = make_http_pool(quick(server.url("unless:/poison"), 5));
  for (int64_t i = 0; i < 40; ++i)
    pool->submit(Json().set("index", i).set("text", i % 20 == 19 ? "/poison" : "").dump());
  const auto answers = pool->take(Wait::kAll);
  ASSERT_EQ(answers.size(), 40u);
  for (size_t i = 0; i < 40; ++i)
    EXPECT_EQ(answers[i].error, i % 20 == 19 ? "HTTP 503: 'no, ', at the last of 6 tries" : "")
        << i;
  EXPECT_EQ(server.requests().size(), 38u + 2 * 6);
}

TEST(HttpPool, AnOutageIsWaitedForAndEndsThePool) {
  const int port = free_port();
  HttpPoolOptions options = quick(str("http://127.0.0.1:", port, "/ok"));
  // Two minutes until the first answer: 0.6 s here.
  options.second = std::chrono::duration<double>(0.005);
  {
    const ExpectLog waits("answers nothing");
    const auto pool = make_http_pool(options);
    const auto start = Clock::now();
    for (int64_t i = 0; i < 100; ++i) pool->submit(request(i));
    std::string why;
    try {
      pool->take(Wait::kAll);
    } catch (const InputError& e) {
      why = e.what();
    }
    EXPECT_NE(why.find("reward http: http://127.0.0.1:"), why.npos) << why;
    EXPECT_NE(why.find("/ok has answered nothing for 2 minutes"), why.npos) << why;
    EXPECT_GE(Clock::now() - start, std::chrono::milliseconds(500));
  }
  // Later, outage_minutes: a server that comes back after more than two minutes, and after more
  // tries than a request has, answers all.
  options.second = std::chrono::duration<double>(0.002);
  options.server.outage_minutes = 60;
  auto server = std::make_unique<AnswerServer>(port);
  const auto pool = make_http_pool(options);
  pool->submit(request(1));
  EXPECT_EQ(pool->take(Wait::kAll).at(0).error, "");
  server.reset();
  const ExpectLog waits("answers nothing");
  for (int64_t i = 0; i < 100; ++i) pool->submit(request(i));
  ::usleep(500000);
  EXPECT_TRUE(pool->take(Wait::kNone).empty());
  server = std::make_unique<AnswerServer>(port);
  for (const auto& answer : pool->take(Wait::kAll)) EXPECT_EQ(answer.error, "");
  EXPECT_EQ(server->requests().size(), 100u);
}

// 64 at a time, which take 3.2 s at least.
TEST(HttpPoolSlow, TwoThousandRequestsOf100MsTakeLittleTime) {
  const AnswerServer server;
  HttpPoolOptions options = quick(server.url("ok:0.1"));
  options.concurrent = 64;
  options.timeout = 10;
  const auto pool = make_http_pool(options);
  const auto cpu = [] {
    rusage used{};
    ::getrusage(RUSAGE_SELF, &used);
    return static_cast<double>(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           1e-6 * static_cast<double>(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
  };
  const auto start = Clock::now();
  const double before = cpu();
  for (int64_t i = 0; i < 2000; ++i) pool->submit(request(i));
  for (const auto& answer : pool->take(Wait::kAll)) EXPECT_EQ(answer.error, "");
  const std::chrono::duration<double> took = Clock::now() - start;
  std::printf("%.2f s, %.1f %% of a core\n", took.count(), 100 * (cpu() - before) / took.count());
  EXPECT_LE(took.count(), 7);                     // 3.3 with a core for the server
  EXPECT_LE(cpu() - before, 0.3 * took.count());  // 0.05 to 0.1; a busy wait takes all of it
}

// A request to stop ends the wait for a server that is gone.
TEST(HttpPool, ARequestToStopEndsAnOutage) {
  std::atomic<bool> stop = false;
  HttpPoolOptions options = quick(str("http://127.0.0.1:", free_port(), "/ok"));
  options.server.stop = &stop;
  options.second = std::chrono::duration<double>(0.1);
  const auto pool = make_http_pool(options);
  for (int64_t i = 0; i < 3; ++i) pool->submit(request(i));
  ::usleep(100000);
  EXPECT_TRUE(pool->take(Wait::kNone).empty());
  stop = true;
  const auto start = Clock::now();
  EXPECT_THROW(pool->take(Wait::kAll), InputError);
  EXPECT_LE(Clock::now() - start, std::chrono::seconds(10));
}

TEST(HttpPool, GivesUpCancelledRequests) {
  const AnswerServer server;
  const auto pool = make_http_pool(quick(server.url("never/ok")));
  for (int64_t i = 0; i < 50; ++i) pool->submit(request(i));
  ::usleep(100000);
  pool->cancel();
  EXPECT_TRUE(pool->take(Wait::kAll).empty());
  pool->submit(request(0));  // its second try at the server, as it was sent before
  EXPECT_EQ(pool->take(Wait::kAll).at(0).error, "");
}

TEST(HttpPool, CertificatesAreVerified) {
  if (std::system("openssl version >/dev/null 2>&1") != 0) GTEST_SKIP() << "needs openssl";
  const AnswerServer server(0, true);
  const auto error_of = [&](const std::string& host, const std::string& ca_file) -> std::string {
    HttpPoolOptions options = quick(server.url("ok", host));
    options.server.ca_file = ca_file;
    options.server.outage_minutes = 0.01;
    const auto pool = make_http_pool(options);
    pool->submit(request(1));
    try {
      return pool->take(Wait::kAll).at(0).error;
    } catch (const InputError& e) {
      return e.what();
    }
  };
  EXPECT_EQ(error_of("localhost", server.ca_file()), "");
  EXPECT_NE(error_of("127.0.0.1", server.ca_file()).find("last problem: SSL"), std::string::npos)
      << error_of("127.0.0.1", server.ca_file());
  EXPECT_NE(error_of("localhost", "").find("certificate"), std::string::npos);
  EXPECT_THROW(
      make_http_pool({.name = "", .server = {.url = server.url("ok"), .ca_file = "/none"}}),
      InputError);
}

TEST(HttpPool, KeysComeFromTheEnvironmentAndStayThere) {
  const AnswerServer server;
  ::setenv("COHORT_TEST_KEY", "secret-4711", 1);
  HttpPoolOptions options = quick(server.url("401"));
  options.server.headers_env = {{"Authorization", "Bearer ${COHORT_TEST_KEY}"}};
  const auto pool = make_http_pool(options);
  pool->submit(request(1));
  EXPECT_EQ(pool->take(Wait::kAll).at(0).error, "HTTP 401: 'no, Bearer ***'");
  EXPECT_EQ(server.requests().at(0).at("key").as_string(), "Bearer secret-4711");
  ::setenv("COHORT_TEST_KEY", "a\"secret", 1);  // also as JSON spells it
  HttpPoolOptions echo = quick(server.url("text:{\"t\": \"a\\\"secret a\"secret\"}"));
  echo.server.headers_env = options.server.headers_env;
  const auto other = make_http_pool(echo);
  other->submit(request(1));
  EXPECT_EQ(other->take(Wait::kAll).at(0).line, "{\"t\": \"*** ***\"}");
  const auto refusal = [](ServerConfig config) -> std::string {
    try {
      make_http_pool({.name = "", .server = std::move(config)});
    } catch (const InputError& e) {
      return e.what();
    }
    return "";
  };
  const std::map<std::string, std::string> key = {{"Authorization", "Bearer ${COHORT_TEST_KEY}"}};
  for (const char* url : {"http://example.org/", "http://127.0.0.1.example.org/",
                          "http://localhost.example.org/", "http://[::2]/", "HTTP://127.0.0.1/",
                          "http://127.0.0.1@example.org/", "http://example.org\\@127.0.0.1/"})
    EXPECT_NE(refusal({.url = url, .headers_env = key}), "") << url;
  EXPECT_EQ(refusal({.url = "https://example.org/", .headers_env = key}), "");
  EXPECT_EQ(refusal({.url = "http://[::1]:80/", .headers_env = key}), "");
  EXPECT_NE(refusal({.url = "http://127.0.0.1/", .headers_env = key, .proxy = "http://x.org"}), "");
  EXPECT_EQ(refusal({.url = "http://127.0.0.1/", .headers_env = {{"Authorization", "${NO_SUCH}"}}}),
            "headers_env.Authorization: the variable NO_SUCH of the environment is not set; hint: "
            "export NO_SUCH=... before the command");
  EXPECT_NE(refusal({.url = "https://x.org", .headers_env = {{"Authorization", "abc"}}}), "");
  for (const char* url : {"http://127.1.2.3.4/", "http://u:pw@127.0.0.1/"}) {
    EXPECT_NE(refusal({.url = url, .headers_env = key}), "") << url;
    EXPECT_EQ(refusal({.url = url, .headers_env = key}).find("pw"), std::string::npos);
  }
  ::setenv("COHORT_TEST_KEY", "ab", 1);
  EXPECT_NE(refusal({.url = "https://x.org", .headers_env = key}).find("too short"),
            std::string::npos);
  ::setenv("COHORT_TEST_KEY", "a\r\nHost: b", 1);
  EXPECT_NE(refusal({.url = "https://x.org", .headers_env = key}), "");
  ::unsetenv("COHORT_TEST_KEY");
}

// Two prompts with two completions each; the numbers of their words are 1 to 4.
class ServedReward : public testing::Test {
 protected:
  RewardSet::Scores score(const RewardConfig& config,
                          std::vector<std::string> texts = {"a", "b b", "c c c", "d d d d"}) const {
    const RewardSet rewards({config}, nullptr);
    std::vector<Trajectory> all;
    for (const std::string& text : texts) {
      Trajectory& t = all.emplace_back();
      t.text = text;
      t.index = std::ssize(all) - 1;
    }
    return rewards.score(prompts_, all, 7);
  }
  RewardConfig judge(const std::string& path) const {
    return {.name = "judge",
            .server = {.url = server_.url(path)},
            .answers = dir_.path("judge.jsonl"),
            .judge = {.model = "m", .prompt = "{completion}"}};
  }
  const std::vector<Example> prompts_ = {
      {.prompt = "first", .answer = "1", .fields = Json().set("unit", "m")}, {.prompt = "second"}};
  const AnswerServer server_;
  TempDir dir_;
};
using Values = std::vector<double>;

TEST_F(ServedReward, HttpIsAProgramsRequestAndAnswer) {
  RewardConfig config{.name = "http",
                      .server = {.url = server_.url("ok")},
                      .concurrent = 2,
                      .answers = dir_.path("judge.jsonl")};
  EXPECT_EQ(score(config).each[0], (Values{0, 0.01, 0.02, 0.03}));
  const Json body = server_.requests().at(0).at("body");
  for (const char* key : {"index", "step", "prompt", "completion", "answer", "fields"})
    EXPECT_NE(body.find(key), nullptr) << key;
  EXPECT_EQ(score(config).each[0], (Values{0, 0.01, 0.02, 0.03}));
  EXPECT_EQ(server_.requests().size(), 4u);  // none again
  config.batch = true;
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(score(config).each[0], (Values{0, 0.01, 0.02, 0.03}));
    EXPECT_EQ(server_.requests().size(), 6u);
  }
  config.server.url = server_.url("404");
  const RewardSet::Scores failed = score(config);
  EXPECT_EQ(failed.failed[0], 4);
  EXPECT_EQ(failed.first_error[0], "HTTP 404: 'no, '");
  EXPECT_TRUE(std::isnan(failed.total[0]));
}

TEST_F(ServedReward, AJudgeScoresOnItsScale) {
  RewardConfig config = judge("chat");
  EXPECT_EQ(score(config).each[0], (Values{0.1, 0.2, 0.3, 0.4}));
  const Json body = server_.requests().at(0).at("body");
  EXPECT_EQ(body.at("model").as_string(), "m");
  EXPECT_EQ(body.at("max_tokens").as_int(), 64);
  EXPECT_EQ(body.at("temperature").as_double(), 0);
  EXPECT_EQ(body.at("messages").as_array().size(), 1u);
  config.judge.scale = {5, 1};
  config.server.url = server_.url("chat:N is less than 9. Score: N");
  config.pattern = "Score: (\\d+)";
  EXPECT_EQ(score(config).each[0], (Values{1, 0.75, 0.5, 0.25}));
  config.pattern = "";
  config.judge.field = "score";
  config.server.url = server_.url("chat:```json {\"why\": \"}\", \"score\": N} ```");
  EXPECT_EQ(score(config).each[0], (Values{1, 0.75, 0.5, 0.25}));
  // Votes of the seeds 0 and 1: N + 0 and N + 10, N being the words.
  config = judge("chat:SEEDN");
  config.judge.scale = {0, 20};
  config.judge.votes = 2;
  const Values means = score(config).each[0];
  for (size_t i = 0; i < 4; ++i) EXPECT_DOUBLE_EQ(means[i], 0.3 + 0.05 * static_cast<double>(i));
}

TEST_F(ServedReward, AJudgementThatIsNoScoreIsAFailure) {
  RewardConfig config = judge("chat");
  const auto error = [&](const std::string& path) {
    config.server.url = server_.url(path);
    const RewardSet::Scores scores = score(config);
    EXPECT_EQ(scores.failed[0], 4);
    EXPECT_TRUE(std::isnan(scores.each[0][0]));
    return scores.first_error[0];
  };
  EXPECT_EQ(error("chat:11"), "its score '11' is outside of the scale from 0 to 10");
  EXPECT_EQ(error("chat:nan"), "its score 'nan' is outside of the scale from 0 to 10");
  EXPECT_EQ(error("chat:ten"), "its score is no number: 'ten' in 'ten'");
  EXPECT_EQ(error("text:{}"), "its answer: missing key 'choices'");
  EXPECT_NE(error("text:hello").find("its answer: not valid JSON"), std::string::npos);
  config.pattern = "Score: (.*)";
  EXPECT_EQ(error("chat:7"), "the pattern does not match its answer '7'");
  // The log shows the judgements, which are no scores: they are asked for again.
  const std::string log = read_text_file(dir_.path("judge.jsonl"));
  EXPECT_EQ(std::ranges::count(log, '\n'), 4 * 4);
  EXPECT_NE(log.find("\"score\":{\"error\":\"the pattern does not match its answer '7'\"},"
                     "\"text\":\"7\""),
            log.npos)
      << log;
  const size_t before = server_.requests().size();
  error("chat:7");
  EXPECT_EQ(server_.requests().size(), before + 4);
}

TEST_F(ServedReward, ScoresAreThoseOfPatternAndScale) {
  RewardConfig config = judge("chat:N then 7");
  config.pattern = "(\\d+) then";
  EXPECT_EQ(score(config).each[0], (Values{0.1, 0.2, 0.3, 0.4}));
  config.pattern = "then (\\d+)";
  EXPECT_EQ(score(config).each[0], (Values{0.7, 0.7, 0.7, 0.7}));
  config.judge.scale = {0, 70};
  EXPECT_EQ(score(config).each[0], (Values{0.1, 0.1, 0.1, 0.1}));
}

TEST_F(ServedReward, ThePromptIsATemplateOfTheLine) {
  RewardConfig config = judge("chat:1");
  config.judge.system = "You are strict.";
  config.judge.prompt = "{prompt} ({unit|answer}) {{}}: {completion}, {transcript}";
  EXPECT_THROW(score(config), InputError);  // the second line has no unit, and no answer
  config.judge.prompt = "{prompt} ({unit|answer|prompt}) {{}}: {completion}, {transcript}";
  score(config, {"{prompt}", "b"});
  std::vector<std::string> seen;
  for (const Json& one : server_.requests()) seen.push_back(one.at("body").at("messages").dump());
  EXPECT_NE(std::ranges::find(seen,
                              "[{\"role\":\"system\",\"content\":\"You are strict.\"},{\"role\":"
                              "\"user\",\"content\":\"first (m) {}: {prompt}, assistant: "
                              "{prompt}\"}]"),
            seen.end())
      << join(seen, "\n");
}

TEST_F(ServedReward, EqualRequestsAreAskedOnceAlsoAfterAKill) {
  const RewardConfig config = judge("chat");
  const Values expected{0.1, 0.1, 0.2, 0.1};
  EXPECT_EQ(score(config, {"a", "a", "b b", "a"}).each[0], expected);
  EXPECT_EQ(server_.requests().size(), 2u);
  const std::string log = dir_.path("judge.jsonl");
  const std::string lines = read_text_file(log);
  EXPECT_EQ(std::ranges::count(lines, '\n'), 2);
  for (const char* part : {"\"request\":\"", "\"score\":0.1", "\"text\":\"2\"", "\"time\":\"20"})
    EXPECT_NE(lines.find(part), lines.npos) << lines;
  // A line that a kill has cut is asked again, and does not spoil the next one.
  write_file(log, lines.substr(0, lines.size() - 5));
  EXPECT_EQ(score(config, {"a", "a", "b b", "a"}).each[0], expected);
  EXPECT_EQ(server_.requests().size(), 3u);
  EXPECT_EQ(score(config, {"a", "a", "b b", "a"}).each[0], expected);
  EXPECT_EQ(server_.requests().size(), 3u);
  RewardConfig other = config;
  other.judge.model = "n";
  score(other, {"a", "a", "b b", "a"});
  EXPECT_EQ(server_.requests().size(), 5u);
}

TEST(ServedRewards, BadKeysAreNamed) {
  const auto error = [](const RewardConfig& config) -> std::string {
    try {
      const RewardSet rewards({config}, nullptr);
    } catch (const InputError& e) {
      return e.what();
    }
    return "";
  };
  RewardConfig judge{.name = "judge"};
  EXPECT_NE(error(judge).find("model: needs"), std::string::npos) << error(judge);
  judge.judge.model = "m";
  EXPECT_NE(error(judge).find("prompt: needs"), std::string::npos) << error(judge);
  judge.judge.prompt = "{completion";
  EXPECT_NE(error(judge).find("opens no field"), std::string::npos) << error(judge);
  judge.judge.prompt = "{completion}";
  EXPECT_NE(error(judge).find("url: needs"), std::string::npos) << error(judge);
  judge.server.url = "http://127.0.0.1/";
  EXPECT_EQ(error(judge), "");
  judge.judge.scale = {1, 1};
  EXPECT_NE(error(judge).find("scale: expected"), std::string::npos) << error(judge);
  EXPECT_NE(error({.name = "http", .program = {.run = "x"}}).find("run: this reward"),
            std::string::npos);
}

}  // namespace
}  // namespace cohort::test
