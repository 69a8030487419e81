// `cohort report`: the page contains the lines of a run's logs, whatever they contain, and its
// script, in a browser, derives and draws what they say.
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <map>

#include "tests/apps/process.h"
#include "tests/job/small_configs.h"
#include "text/utf8.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = 0; (at = text.find(part, at)) != text.npos; at += part.size()) ++count;
  return count;
}

class Report : public testing::Test {
 protected:
  // Writes the page of the runs and returns its data.
  Json report(std::vector<std::string> runs) const {
    runs.insert(runs.begin(), {"report", "--output", page_});
    const Output output = run_cohort(runs);
    EXPECT_EQ(output.code, 0) << output.err;
    EXPECT_EQ(output.out, page_ + "\n");
    const std::string page = read_file(page_),
                      tag = "<script type=\"application/json\" id=\"data\">";
    const size_t begin = page.find(tag) + tag.size();
    return parse_json(page.substr(begin, page.find("</script", begin) - begin), page_);
  }
  // A small run of two stages.
  std::string train(const std::string& name, std::vector<std::string> more = {}) const {
    write_file(dir_.path("run.yaml"),
               str("output_dir: ", name, "\n", kSmallData,
                   "model: {num_layers: 1, d_model: 16, num_heads: 2, context: 16, init_std: 0.1}\n"
                   "num_threads: 1\nlearning_rate: 1e-2\nmax_completion_length: 4\n"
                   "eval: {every: 2, size: 8, num_samples: 4, k: [2]}\n"
                   "stages:\n  - {trainer: sft, steps: 6, batch_size: 8}\n"
                   "  - trainer: grpo\n    steps: 4\n    prompts_per_step: 4\n"
                   "    num_generations: 6\n"
                   "    rewards: [{name: format, pattern: '.*1.*'}, {name: task}]\n"));
    more.insert(more.begin(), {"train", dir_.path("run.yaml")});
    const Output output = run_cohort(more);
    EXPECT_EQ(output.code, 0) << output.err;
    return dir_.path(name);
  }
  // A run directory with just these files.
  std::string make_run(const std::string& name, const std::string& metrics,
                       const std::string& completions = "", const std::string& log = "") const {
    const std::string run = dir_.path(name);
    fs::create_directories(run);
    write_file(run + "/metrics.jsonl", metrics);
    if (!completions.empty()) write_file(run + "/completions.jsonl", completions);
    if (!log.empty()) write_file(run + "/log.txt", log);
    return run;
  }

  TempDir dir_;
  const std::string page_ = dir_.path("page.html");
};

class ReportSlow : public Report {};

using Points = std::vector<std::pair<int64_t, double>>;
using Curves = std::map<std::string, Points>;

Curves curves_of_lines(const std::vector<Json>& lines) {
  Curves curves;
  for (const Json& line : lines)
    for (const auto& [name, value] : line.as_object())
      if (value.is_number() && name != "step")
        curves[name].emplace_back(line.at("step").as_int(), value.as_double());
  return curves;
}

// The curves of a stage in the data of a page.
Curves curves_of(const Json& stage) {
  return curves_of_lines(stage.at("metrics").at("lines").as_array());
}

Curves logged_curves(const std::string& path) {
  return curves_of_lines(json_lines(path));
}

// The only run of the data.
const Json& run_of(const Json& data) {
  EXPECT_EQ(data.at("runs").as_array().size(), 1u);
  return data.at("runs").as_array().at(0);
}

TEST_F(Report, HoldsEveryNumberOfMetricsJsonl) {
  const std::string run = train("run");
  const Json data = report({run});
  const Json& shown = run_of(data);
  EXPECT_EQ(shown.at("path").as_string(), run);
  EXPECT_TRUE(shown.at("whole").as_bool());
  EXPECT_TRUE(shown.at("problems").as_array().empty());
  const Json::Array& stages = shown.at("stages").as_array();
  ASSERT_EQ(stages.size(), 2u);
  const Json::Array& configs = shown.at("config").at("stages").as_array();
  ASSERT_EQ(configs.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    const std::string name = stages[i].at("name").as_string(), dir = run + "/" + name;
    EXPECT_EQ(curves_of(stages[i]), logged_curves(dir + "/metrics.jsonl")) << dir;
    EXPECT_TRUE(stages[i].at("metrics").at("means").as_array().empty());
    EXPECT_EQ(str(i + 1, "-", configs[i].at("trainer").as_string()), name);
    const LoadedModel model = load_model(find_checkpoint(dir), DType::kF32);
    EXPECT_EQ(stages[i].at("checkpoint").at("parameters").as_int(),
              model_size(model.model->config()).parameters);
  }
  EXPECT_GT(curves_of(stages[1]).size(), 20u);
  const Json::Array& samples = stages[1].at("completions").as_array();
  EXPECT_EQ(samples.size(), json_lines(run + "/2-grpo/completions.jsonl").size());
  EXPECT_EQ(samples.back().at("rewards").as_object().size(), 2u);
  EXPECT_EQ(configs[1].at("rewards").as_array().at(0).at("name").as_string(), "format");
  // A single stage; the default path of the page.
  EXPECT_EQ(run_cohort({"report", run + "/2-grpo/"}).out, run + "/2-grpo/report.html\n");
  const Json stage_data = report({run + "/2-grpo"});
  const Json& stage = run_of(stage_data);
  EXPECT_EQ(stage.at("stages").dump(), Json(Json::Array{stages[1]}).dump());
  EXPECT_EQ(stage.at("config").dump(), shown.at("config").dump());
  EXPECT_FALSE(stage.at("whole").as_bool());
}

TEST_F(Report, HostileTextsAreText) {
  const std::string attack = "</script><script>alert(1)</script><!--<script>";
  const std::string path = dir_.path("run") + "/completions.jsonl";
  std::string lines;
  lines += Json().set("step", 1).set("prompt", attack).set("completion", attack).dump() + "\n";
  lines +=
      "{\"step\": 1, \"prompt\": \"\\u0000\\u001b[31m\\u202e\", \"completion\": \"\xff\xfe\"}\n";
  lines +=
      Json().set("step", 1).set("completion", std::string(1 << 20, 'x') + "\xc3\xa9").dump() + "\n";
  lines +=
      Json().set("step", 2).set("prompt", Json::Array{1, "two"}).set("rewards", attack).dump() +
      "\n";
  lines += std::string(100000, '[') + "\n{\"step\": 1e400}\nnot JSON\n{\"step\": \"1\"}\n[]\n";
  const std::string run = make_run(
      "run", "{\"step\": 1, \"" + attack + "\": 0.5, \"loss\": null, \"correct\": {\"a\": 1}}\n",
      lines,
      "[2026-11-22 07:13:48.164 warning] " + attack + "\xff; hint: " + attack + "\n[2\n[2] \n");
  write_file(run + "/config.yaml", "trainer: grpo\nname: \"" + attack + "\"\n");
  const Json data = report({run});
  const std::string page = read_file(page_);
  EXPECT_TRUE(is_utf8(page));
  EXPECT_EQ(count_of(page, "</script"), 2u);
  EXPECT_EQ(count_of(page, "<script"), 2u);
  EXPECT_EQ(count_of(page, "<!--"), 1u);
  EXPECT_LT(page.size(), 100000u);
  const Json& shown = run_of(data);
  const Json& stage = shown.at("stages").as_array()[0];
  const Json::Array& samples = stage.at("completions").as_array();
  ASSERT_EQ(samples.size(), 4u);
  EXPECT_EQ(samples[0].at("completion").as_string(), attack);
  EXPECT_EQ(samples[1].at("completion").as_string(), "\xef\xbf\xbd\xef\xbf\xbd");
  EXPECT_NE(samples[2].at("completion").as_string().find("truncated: 1048578 bytes"),
            std::string::npos);
  EXPECT_EQ(samples[3].at("prompt").as_string(), "[1,\"two\"]");
  EXPECT_EQ(curves_of(stage), (Curves{{attack, {{1, 0.5}}}}));
  EXPECT_EQ(shown.at("problems").dump(),
            Json(Json::Array{path + ": 5 damaged lines are left out"}).dump());
  const Json::Array& warnings = shown.at("messages").at("warnings").as_array();
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_EQ(
      warnings[0].at("text").as_string(),
      attack + "\xef\xbf\xbd; hint: " + attack + "\n[2\n[2] ");  // continuation lines, not messages
}

TEST_F(Report, ShowsCompletionsOfStepsFromTheFirstToTheLast) {
  std::string lines;
  for (int step = 1; step <= 100; ++step)
    for (int i = 0; i < 10; ++i) {
      Json line = Json().set("step", step).set("completion", str(step, " ", i));
      if (step % 10 == 0) line.set("eval", true);
      lines += line.dump() + "\n";
    }
  const Json data = report({make_run("run", "", lines)});
  std::map<bool, std::map<int64_t, int64_t>> samples;  // number by step; true: evaluations
  for (const Json& line : run_of(data).at("stages").as_array().at(0).at("completions").as_array())
    EXPECT_EQ(line.at("completion").as_string(),
              str(line.at("step").as_int(), " ",
                  samples[line.find("eval") != nullptr][line.at("step").as_int()]++));
  EXPECT_EQ(samples[true].size(), 10u);
  EXPECT_LE(samples[false].size(), 13u);
  EXPECT_GE(samples[false].size(), 6u);
  EXPECT_EQ(samples[false].begin()->first, 1);
  EXPECT_EQ(samples[false].rbegin()->first, 99);
  for (const auto& [kind, steps] : samples)
    for (const auto& [step, number] : steps) EXPECT_EQ(number, 8);
}

// 60 curves of 10000 points, each with a spike. Numbers that are sometimes missing, and times.
std::string long_metrics() {
  std::string metrics;
  for (int step = 1; step <= 10000; ++step) {
    Json line = Json().set("step", step).set("time", str("time ", step)).set("kl", Json());
    if (step % 100 == 7) line.set("pass@1", step / 1e4).set("correct", "task >= 1");
    for (int i = 0; i < 60; ++i)
      line.set(str("rewards/reward_", i, "/mean"),
               step == 5003 + i ? 100.0 : 1.0 / (step + i + 0.5));
    metrics += line.dump() + "\n";
  }
  return metrics;
}

// Spikes of a long run are kept, and the page stays small.
TEST_F(ReportSlow, LongRunsAreThinnedWithTheirSpikes) {
  const std::string run = make_run("run", long_metrics());
  const auto start = std::chrono::steady_clock::now();
  const Json data = report({run});
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  RecordProperty("milliseconds", static_cast<int>(1000 * seconds.count()));
  EXPECT_LT(seconds.count(), 30);  // about one second without sanitizers
  EXPECT_LT(fs::file_size(page_), 2u << 20);
  const Json& metrics = run_of(data).at("stages").as_array()[0].at("metrics");
  const Curves all = logged_curves(run + "/metrics.jsonl"),
               shown = curves_of_lines(metrics.at("lines").as_array());
  EXPECT_EQ(shown.size(), 61u);
  EXPECT_EQ(shown.at("pass@1"), all.at("pass@1"));
  for (int i = 0; i < 60; ++i) {
    const std::string name = str("rewards/reward_", i, "/mean");
    const Points &logged = all.at(name), &points = shown.at(name);
    EXPECT_LE(points.size(), 1000u);
    EXPECT_EQ(points.front(), logged.front());
    EXPECT_EQ(points.back(), logged.back());
    EXPECT_EQ(std::count(points.begin(), points.end(), std::pair(int64_t{5003} + i, 100.0)), 1);
    for (const auto& point : points) EXPECT_EQ(logged[static_cast<size_t>(point.first - 1)], point);
    double sum = 0, logged_sum = 0;
    int64_t count = 0;
    for (const Json& means : metrics.at("means").as_array()) {
      const Json::Array& mean = means.at(name).as_array();
      sum += mean.at(0).as_double() * mean.at(1).as_double();
      count += mean.at(1).as_int();
    }
    for (const auto& point : logged) logged_sum += point.second;
    EXPECT_EQ(count, 10000);
    EXPECT_NEAR(sum / 10000, logged_sum / 10000, 1e-12);
  }
  const Json::Array& lines = metrics.at("lines").as_array();
  EXPECT_EQ(lines.front().at("time").as_string(), "time 1");
  EXPECT_EQ(lines.back().at("time").as_string(), "time 10000");
}

TEST_F(Report, KeepsWhatCanBeRead) {
  // Killed while writing a line: complete lines are used.
  const std::string torn = make_run("torn", "{\"step\": 1, \"loss\": 0.5}\n{\"step\": 2, \"lo");
  const Json data = report({torn});
  EXPECT_EQ(curves_of(run_of(data).at("stages").as_array().at(0)), (Curves{{"loss", {{1, 0.5}}}}));
  EXPECT_TRUE(run_of(data).at("problems").as_array().empty());
  // An invalid configuration; an invalid checkpoint.
  write_file(torn + "/config.yaml", "a: [");
  fs::create_directories(torn + "/checkpoints/step-00000001");
  write_file(torn + "/checkpoints/step-00000001/state.json", "{");
  EXPECT_EQ(run_of(report({torn})).at("problems").as_array().size(), 2u);
}

// Messages of all levels, with warnings that differ by numbers.
std::string example_log() {
  const auto line = [](int second, const std::string& level, const std::string& text) {
    return str("[2026-11-22 07:13:", second, ".164 ", level, "] ", text, "\n");
  };
  return line(10, "info", "run directory: runs/demo") +
         line(11, "warning", "step 3: the reward has collapsed: 0.1; hint: a lower learning_rate") +
         line(12, "warning", "two lines\nmemory plan") + line(13, "info", "step 4") +
         line(14, "warning",
              "step 12: the reward has collapsed: 0.25; hint: a lower learning_rate") +
         line(15, "info", "failed: out of memory; hint: a smaller model");
}

TEST_F(Report, GroupsWarningsThatDifferByNumbers) {
  const Json data = report({make_run("run", "", "", example_log())});
  const Json& messages = run_of(data).at("messages");
  const Json::Array& warnings = messages.at("warnings").as_array();
  ASSERT_EQ(warnings.size(), 3u);
  EXPECT_EQ(warnings[0].at("count").as_int(), 2);
  EXPECT_EQ(warnings[0].at("text").as_string(),
            "step 12: the reward has collapsed: 0.25; hint: a lower learning_rate");
  EXPECT_EQ(warnings[0].at("first").as_string(), "2026-11-22 07:13:11");
  EXPECT_EQ(warnings[0].at("last").as_string(), "2026-11-22 07:13:14");
  EXPECT_EQ(warnings[1].at("text").as_string(), "two lines\nmemory plan");
  EXPECT_EQ(warnings[2].at("level").as_string(), "failed");
  EXPECT_EQ(messages.at("last").as_string(), "failed: out of memory; hint: a smaller model");
}

TEST_F(Report, NamesTheErrorOfAPath) {
  const std::string run = make_run("run", "{\"step\": 1, \"loss\": 0.5}\n"),
                    file = run + "/metrics.jsonl";
  expect_bad_input(run_cohort({"report", dir_.path("none")}), {"none: does not exist; hint: "});
  expect_bad_input(run_cohort({"report", file}),
                   {file + ": is a file, not a run directory; hint: "});
  expect_bad_input(run_cohort({"report", run, dir_.path()}), {"is not a run directory", "hint: "});
  expect_bad_input(run_cohort({"report", ""}), {"'': does not exist; hint: "});
  expect_bad_input(run_cohort({"report"}), {"runs is required", "hint: "});
  fs::remove(file);
  fs::create_directory(file);
  expect_bad_input(run_cohort({"report", run}), {"metrics.jsonl: is not a file"});
  const Output output =
      run_cohort({"report", make_run("other", ""), "--output", dir_.path("no/page")});
  EXPECT_EQ(output.code, 1);
  EXPECT_NE(output.err.find("cannot create " + dir_.path("no/page")), std::string::npos)
      << output.err;
}

// If the disk is full, the previous page remains.
TEST_F(Report, IsReplacedAtomically) {
  const std::string run = make_run("run", "{\"step\": 1, \"loss\": 0.5}\n");
  report({run});
  const std::string before = read_file(page_);
  const Output output = run_cohort_with({.call = "write", .path = "page.html", .error = ENOSPC},
                                        {"report", run, "--output", page_});
  EXPECT_EQ(output.code, 1);
  EXPECT_EQ(read_file(page_), before);
}

// ---- In a browser ----

// Opens the page in a frame of a phone's width, and writes the drawn elements, and what the page's
// readRun() derives of the lines, as JSON.
constexpr const char* kInspector = R"(<!DOCTYPE html>
<iframe id="frame" width="360" height="740" src="page.html"></iframe><pre id="found"></pre><script>
onload = () => {
  const {contentDocument: page, contentWindow: view} = document.getElementById("frame");
  const lines = [...page.querySelectorAll("polyline[data-metric]")].map((line) => ({
    run: Number(line.dataset.run), stage: line.dataset.stage, metric: line.dataset.metric,
    y: [...line.points].map((point) => point.y), x: [...line.points].map((point) => point.x)}));
  const svg = page.querySelector("svg.chart"), box = svg.getBoundingClientRect();
  svg.dispatchEvent(new view.PointerEvent("pointermove", {clientX: box.right - 2, clientY: box.top + 5}));
  const tip = page.querySelector(".tip")?.textContent;
  for (const select of page.querySelectorAll("select")) for (const option of select.options) {
    select.value = option.value;
    select.dispatchEvent(new view.Event("change"));
  }
  for (const details of page.querySelectorAll("details")) details.open = true;
  const charts = [...page.querySelectorAll("figcaption span:first-child")].map((title) => title.textContent);
  const sample = page.querySelector(".sample")?.textContent;
  const {runs} = JSON.parse(page.getElementById("data").textContent);
  for (const run of runs) view.readRun(run);
  console.log("inspected");
  document.getElementById("found").textContent = JSON.stringify({lines, tip, charts, sample, runs, title: page.title,
    text: page.body.innerText.length, summary: page.querySelector("section.grid").innerText, width: page.documentElement.scrollWidth, viewport: view.innerWidth,
    markup: page.querySelectorAll("script, img, iframe, link").length});
};
</script>)";

class BrowserSlow : public Report {
 protected:
  void SetUp() override {
    if (!have_tool("browser", "command -v chromium"))
      GTEST_SKIP() << "no chromium: install it to run this test (scripts/setup.sh --dev)";
  }
  // The result of kInspector. Expects no console message but its own.
  Json inspect_page() const {
    write_file(dir_.path("look.html"), kInspector);
    const std::string dom = dir_.path("dom"), err = dir_.path("err");
    const int status = std::system(
        str("timeout 100 chromium --headless --disable-gpu --disable-dev-shm-usage --no-first-run "
            "--disable-component-update ",
            geteuid() == 0 ? "--no-sandbox " : "",
            "--disable-background-networking --host-resolver-rules='MAP * ~NOTFOUND' ",
            "--allow-file-access-from-files --enable-logging=stderr --user-data-dir=",
            dir_.path("profile"), " --virtual-time-budget=5000 --dump-dom file://",
            dir_.path("look.html"), " > ", dom, " 2> ", err)
            .c_str());
    EXPECT_EQ(status, 0) << read_file(err);
    EXPECT_EQ(count_of(read_file(err), "CONSOLE"), 1u) << read_file(err);
    const std::string out = read_file(dom), tag = "<pre id=\"found\">";
    const size_t begin = out.find(tag) + tag.size();
    std::string found = out.substr(begin, out.find("</pre>", begin) - begin);
    for (const auto& [entity, character] : {std::pair{"&lt;", "<"}, {"&gt;", ">"}, {"&amp;", "&"}})
      for (size_t at = 0; (at = found.find(entity, at)) != found.npos; ++at)
        found.replace(at, std::string(entity).size(), character);
    return parse_json(found, "found");
  }
};

// y must be an affine function of the values, and x of the steps.
void expect_drawn(const Json& line, const Points& points) {
  const std::string name = line.at("metric").as_string();
  const Json::Array &x = line.at("x").as_array(), &y = line.at("y").as_array();
  ASSERT_EQ(y.size(), points.size()) << name;
  const auto by_value = [](const auto& a, const auto& b) { return a.second < b.second; };
  const auto [low, high] = std::minmax_element(points.begin(), points.end(), by_value);
  const auto at = [&](const Json::Array& list, const auto& point) {
    return list[static_cast<size_t>(point - points.begin())].as_double();
  };
  const double range = std::max(high->second - low->second, 1e-300),
               steps =
                   std::max<double>(1, static_cast<double>(points.back().first - points[0].first));
  if (low->second < high->second) {
    EXPECT_GT(at(y, low), at(y, high)) << name;
  }
  for (size_t i = 0; i < points.size(); ++i) {  // coordinates have two decimals
    const double y_fraction = (points[i].second - low->second) / range,
                 x_fraction = static_cast<double>(points[i].first - points[0].first) / steps;
    EXPECT_NEAR(y[i].as_double(), at(y, low) + y_fraction * (at(y, high) - at(y, low)), 0.02)
        << name;
    EXPECT_NEAR(x[i].as_double(),
                x[0].as_double() + x_fraction * (x.back().as_double() - x[0].as_double()), 0.02)
        << name;
  }
}

TEST_F(BrowserSlow, DrawsEveryCurveOnAPhone) {
  const std::string one = train("one"), two = train("two", {"learning_rate=1e-3", "seed=3"});
  for (const std::vector<std::string>& runs : {std::vector{one}, {one, two}}) {
    const Json data = report(runs);
    const Json found = inspect_page();
    std::map<std::string, const Json*> lines;
    for (const Json& line : found.at("lines").as_array())
      EXPECT_TRUE(lines
                      .emplace(str(line.at("run").as_int(), line.at("stage").as_string(), " ",
                                   line.at("metric").as_string()),
                               &line)
                      .second);
    size_t expected = 0;
    for (size_t run = 0; run < runs.size(); ++run)
      for (const Json& stage : data.at("runs").as_array()[run].at("stages").as_array())
        for (const auto& [name, points] : curves_of(stage)) {
          const std::string trainer = stage.at("name").as_string().substr(2);
          const auto line = lines.find(str(run, trainer, " ", name));
          ASSERT_NE(line, lines.end()) << name;
          expect_drawn(*line->second, points);
          ++expected;
        }
    EXPECT_EQ(lines.size(), expected);
    EXPECT_LE(found.at("width").as_int(), found.at("viewport").as_int());
    EXPECT_EQ(found.at("viewport").as_int(), 360);
    // The first chart is pass@1, and the pointer is at its end.
    const std::string tip = found.at("tip").as_string();
    EXPECT_EQ(tip.find("grpo step 4"), 0u) << tip;
    const Points scores =
        curves_of(data.at("runs").as_array()[0].at("stages").as_array()[1]).at("pass@1");
    const std::string score = Json(scores.back().second).dump();  // JavaScript prints "0.0" as "0"
    EXPECT_NE(tip.find(score.substr(0, score.find(".0"))), std::string::npos) << tip;
  }
}

TEST_F(BrowserSlow, ShowsTheCriterionBesidePassRatesOnly) {
  for (const auto& [metric, has_criterion] : {std::pair{"pass@1", true}, {"val_loss", false}}) {
    const Json line = Json().set("step", 1).set(metric, 0.5).set("correct", "task >= 1");
    report({make_run("run", line.dump() + "\n")});
    const std::string summary = inspect_page().at("summary").as_string();
    EXPECT_NE(summary.find(metric), summary.npos) << summary;
    EXPECT_EQ(summary.find("task >= 1") != summary.npos, has_criterion) << summary;
  }
}

// The score is that which chooses the best checkpoint.
TEST_F(BrowserSlow, ShowsTheScoreOfTheBestCheckpoint) {
  const std::string lines =
      "{\"step\": 1, \"accuracy\": 0.5, \"val_loss\": 2, \"pass@1\": 0.5, \"aime/pass@1\": 0.2}\n"
      "{\"step\": 2, \"accuracy\": 0.8, \"val_loss\": 3, \"pass@1\": 0.5, \"aime/pass@1\": 0.1}\n"
      "{\"step\": 3, \"accuracy\": 0.7, \"val_loss\": 1, \"pass@1\": 0.6, \"aime/pass@1\": 0.3}\n";
  const auto expect = [&](const std::string& config, const std::string& score, double best) {
    std::string kept;
    for (Json line : json_lines_of(lines)) {
      Json some = Json().set("step", line.at("step")).set("val_loss", line.at("val_loss"));
      for (const char* name : {"accuracy", "pass@1", "aime/pass@1"})
        if ((std::string(name) == "accuracy") == (score == "accuracy, classify"))
          some.set(name, line.at(name));
      kept += some.dump() + "\n";
    }
    write_file(make_run("run", kept) + "/config.yaml", "stages:\n  - " + config + "\n");
    report({dir_.path("run")});
    const std::string summary = inspect_page().at("summary").as_string();
    EXPECT_NE(summary.find(score), summary.npos) << summary;
    EXPECT_NE(summary.find(Json(best).dump()), summary.npos) << summary;
  };
  expect("{trainer: classify}", "accuracy, classify", 0.8);
  expect("{trainer: grpo, eval: {best: \"\"}}", "pass@1, grpo", 0.6);
  expect("{trainer: grpo, eval: {best: aime}}", "aime/pass@1, grpo", 0.3);
}

TEST_F(BrowserSlow, DrawsStandardErrorsApartFromScores) {
  const Json line = Json()
                        .set("step", 1)
                        .set("pass@1", 0.5)
                        .set("sampled_pass@2", 0.6)
                        .set("maj@2", 0.4)
                        .set("pass@1_stderr", 0.1)
                        .set("sampled_pass@2_stderr", 0.2)
                        .set("maj@2_stderr", 0.3);
  const std::string sample =
      "{\"step\": 1, \"reward\": 1, \"truncated\": true, \"stop_reason\": \"context\"}\n";
  report({make_run("run", line.dump() + "\n", sample)});
  const Json found = inspect_page();
  EXPECT_EQ(found.at("charts").dump(),
            "[\"pass@k\",\"errors of pass@k\",\"maj@2\",\"maj@2_stderr\"]");
  EXPECT_NE(found.at("sample").as_string().find("truncated: context"), std::string::npos);
}

TEST_F(BrowserSlow, ShowsHowManyParametersAnAdapterHas) {
  const std::string base = train("base"), run = train("run", {"model.path=" + base, "lora.rank=2"});
  for (const bool is_adapter : {false, true}) {
    const Json data = report({is_adapter ? run : base});
    EXPECT_EQ(run_of(data).at("problems").dump(), "[]");
    const Json& checkpoint = run_of(data).at("stages").as_array().back().at("checkpoint");
    const ModelSize size = model_size(
        load_model(find_checkpoint(is_adapter ? run : base), DType::kF32).model->config());
    EXPECT_EQ(checkpoint.at("parameters").as_int(), size.parameters);
    EXPECT_EQ(checkpoint.at("trained").as_int(), is_adapter ? size.adapters : size.parameters);
    const std::string summary = inspect_page().at("summary").as_string();
    EXPECT_EQ(summary.find(str(", ", size.adapters, " trained (LoRA)")) != summary.npos, is_adapter)
        << summary;
  }
}

// The curves that the page's script has derived, or their trends.
Curves derived_curves(const Json& stage, bool trends = false) {
  Curves curves;
  for (const Json& curve : stage.at("curves").as_array()) {
    const Json& source = trends ? curve.at("trend") : curve;
    Points& points = curves[curve.at("name").as_string()];
    const Json::Array &steps = source.at("steps").as_array(),
                      &values = source.at("values").as_array();
    EXPECT_EQ(steps.size(), values.size());
    for (size_t i = 0; i < steps.size(); ++i)
      points.emplace_back(static_cast<int64_t>(steps[i].as_double()), values[i].as_double());
  }
  return curves;
}

TEST_F(BrowserSlow, DerivesNamesFactsAndStates) {
  const std::string run = train("run"), line = "{\"step\": 1, \"loss\": 0.5}\n",
                    prefix = "[2026-11-22 07:13:48.164 info] ";
  // The second stage has not begun; after more training and a kill its checkpoint is outdated.
  fs::copy(run, dir_.path("begun"), fs::copy_options::recursive);
  fs::remove_all(dir_.path("begun/2-grpo"));
  fs::copy(run, dir_.path("longer"), fs::copy_options::recursive);
  const std::string log = dir_.path("longer/2-grpo/metrics.jsonl");
  write_file(log, read_file(log) + "{\"step\":5}\n");
  fs::create_directories(dir_.path("new"));  // only a configuration
  write_file(dir_.path("new/config.yaml"), "stages:\n  - {trainer: sft}\n");
  const std::vector<std::string> runs{
      run,
      run + "/2-grpo",
      dir_.path("begun"),
      dir_.path("longer"),
      dir_.path("new"),
      make_run("torn", line + "{\"step\": 2, \"lo"),
      make_run("empty", ""),
      make_run("failed", line, "", example_log()),
      make_run("stopped", line, "", prefix + "interrupted; saved.\n")};
  report(runs);
  const Json found = inspect_page();
  std::string states;
  for (const Json& each : found.at("runs").as_array())
    states += each.at("name").as_string() + " " + each.at("status").as_string() + "\n";
  EXPECT_EQ(states,
            "run finished\nrun/2-grpo finished\nbegun unfinished\nlonger unfinished\n"
            "new unfinished\ntorn unfinished\nempty unfinished\nfailed failed\n"
            "stopped interrupted\n");
  const Json& shown = found.at("runs").as_array()[0];
  for (const Json& stage : shown.at("stages").as_array()) {
    const std::string dir = run + "/" + stage.at("name").as_string();
    EXPECT_EQ(derived_curves(stage), logged_curves(dir + "/metrics.jsonl")) << dir;
    EXPECT_EQ(stage.at("config").at("trainer").as_string(), stage.at("trainer").as_string());
    const std::vector<Json> lines = json_lines(dir + "/metrics.jsonl");
    const Json& facts = stage.at("facts");
    EXPECT_EQ(facts.at("step").as_int(), lines.back().at("step").as_int());
    EXPECT_EQ(facts.at("begin").as_string(), lines.front().at("time").as_string());
    EXPECT_EQ(facts.at("end").as_string(), lines.back().at("time").as_string());
    EXPECT_EQ(facts.at("rule").as_string(), "task >= 1");
  }
  const Json& config = shown.at("stages").as_array()[1].at("config");
  EXPECT_EQ(config.at("rewards.0.name").as_string(), "format");
  EXPECT_EQ(config.at("eval.k").as_string(), "2");
  const Json::Array& warnings = found.at("runs").as_array()[7].at("warnings").as_array();
  ASSERT_EQ(warnings.size(), 3u);
  EXPECT_EQ(warnings[0].at("text").as_string(), "step 12: the reward has collapsed: 0.25");
  EXPECT_EQ(warnings[0].at("hint").as_string(), "a lower learning_rate");
  EXPECT_EQ(warnings[1].at("hint").as_string(), "");
}

TEST_F(BrowserSlow, SmoothsLongCurves) {
  const std::string run = make_run("run", long_metrics());
  std::string noise;
  for (int step = 1; step <= 250; ++step)
    noise += Json().set("step", step).set("loss", step % 3).dump() + "\n";
  for (const bool is_thinned : {true, false}) {
    if (!is_thinned) write_file(run + "/metrics.jsonl", noise);
    report({run});
    const Json found = inspect_page();
    const Json& stage = run_of(found).at("stages").as_array()[0];
    const Curves all = logged_curves(run + "/metrics.jsonl"), trends = derived_curves(stage, true);
    EXPECT_EQ(trends.size(), all.size());
    for (const Json& curve : stage.at("curves").as_array()) {
      const std::string name = curve.at("name").as_string();
      const size_t n = all.at(name).size();
      EXPECT_EQ(curve.at("of").as_double(), static_cast<double>(n));
      ASSERT_EQ(trends.at(name).size(), n > 200 ? 100u : 0u) << name;
      for (size_t i = 0; i < 100 && n > 200; ++i) {
        const size_t begin = n * i / 100, end = n * (i + 1) / 100;
        double sum = 0;
        for (size_t k = begin; k < end; ++k) sum += all.at(name)[k].second;
        EXPECT_NEAR(trends.at(name)[i].second, sum / static_cast<double>(end - begin), 1e-12);
        EXPECT_NEAR(static_cast<double>(trends.at(name)[i].first),
                    static_cast<double>(begin + end) / 2, is_thinned ? 50 : 1);
      }
    }
  }
}

TEST_F(BrowserSlow, ShowsHostileTextsAsText) {
  const std::string attack =
      "</script><img src=x onerror=console.log(1)><script>console.log(2)</script>";
  const std::string name(300, 'w');
  const std::string run = make_run(
      "run",
      Json().set("step", 1)
              .set("time", attack)
              .set(attack, 1.5)
              .set(name, 1e300)
              .set("x", -1e-300)
              .dump() +
          "\n{\"step\": 9007199254740993, \"loss\": 1}\n",
      Json().set("step", 1).set("prompt", attack).set("completion", name + name).dump() + "\n" +
          Json()
              .set("step", 2)
              .set("eval", true)
              .set("correct", attack)
              .set("rewards", attack)
              .dump() +
          "\n",
      "[2026-11-22 07:13:48.164 warning] " + attack + "; hint: " + name + "\n");
  write_file(run + "/config.yaml", "stages:\n  - {name: \"" + attack + "\", __proto__: 1}\n");
  report({run});
  const Json found = inspect_page();
  EXPECT_EQ(found.at("markup").as_int(), 2);  // the page's own scripts
  EXPECT_EQ(found.at("lines").as_array().size(), 4u);
  EXPECT_LE(found.at("width").as_int(), 360);
}

TEST_F(BrowserSlow, DrawsRunsWithHardlyAnyData) {
  fs::create_directories(dir_.path("new"));
  write_file(dir_.path("new/config.yaml"), "stages:\n  - {trainer: sft}\n");
  report(
      {dir_.path("new"), make_run("empty", ""), make_run("one", "{\"step\": 1, \"loss\": 0.5}\n")});
  const Json found = inspect_page();
  EXPECT_EQ(found.at("lines").as_array().size(), 1u);
  EXPECT_GT(found.at("text").as_int(), 100);
}

}  // namespace
}  // namespace cohort::test
