// `cohort report`: runs as one HTML page that needs nothing else. What it shows is collected by
// trainers/run_report, drawn by the script of apps/report/page.html.
#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "apps/commands.h"
#include "trainers/files.h"
#include "trainers/reporter.h"
#include "trainers/run_report.h"

extern const char* const kReportPage;

namespace cohort::apps {
namespace {

constexpr size_t kPoints = 1000, kFewestPoints = 100;  // of a curve

// JSON that no text in it can end or turn into markup: HTML reads what is between the tags of a
// script up to the first "</script", and "<!--" changes how it reads on.
std::string script_json(const Json& json) {
  std::string out;
  for (const char c : json.dump()) out += c == '<' ? std::string("\\u003c") : std::string(1, c);
  return out;
}

}  // namespace

int report(const ReportOptions& options) {
  const size_t points = std::max(kFewestPoints, kPoints / options.runs.size());
  Json runs = Json(Json::Array{});
  for (const std::string& run : options.runs) runs.push_back(run_report(run, points));
  const Json data =
      Json().set("made", utc_now()).set("version", COHORT_VERSION).set("runs", std::move(runs));

  constexpr std::string_view kPlace = "\"DATA\"";  // where the page has its data
  std::string page = kReportPage;
  page.replace(page.find(kPlace), kPlace.size(), script_json(data));
  const std::string output =
      !options.output.empty() ? options.output
                              : (std::filesystem::path(options.runs[0]) / "report.html").string();
  replace_file(output, page);
  std::printf("%s\n", output.c_str());
  return kOk;
}

}  // namespace cohort::apps
