// `cohort report`: a self-contained HTML page of runs. job/run_report collects the lines of their
// logs, and the script of apps/report/page.html derives and draws what they say.
#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "apps/commands.h"
#include "job/report.h"
#include "job/run_report.h"
#include "sys/files.h"

extern const char* const kReportPage;

namespace cohort::apps {

int report(const ReportOptions& options) {
  // Limits of the metrics.jsonl lines of a stage, for one run and for many.
  constexpr size_t kMaxLines = 1000, kMinLines = 100;
  const size_t limit = std::max(kMinLines, kMaxLines / options.runs.size());
  Json runs = Json(Json::Array{});
  for (const std::string& run : options.runs) runs.push_back(run_report(run, limit));
  const Json data =
      Json().set("made", utc_now()).set("version", COHORT_VERSION).set("runs", std::move(runs));

  // JSON that is safe inside a <script> element: texts cannot contain "</script", which would end
  // the element, or "<!--", which would change its parsing.
  std::string script;
  for (const char c : data.dump()) script += c == '<' ? std::string("\\u003c") : std::string(1, c);
  constexpr std::string_view kPlaceholder = "\"DATA\"";
  std::string page = kReportPage;
  page.replace(page.find(kPlaceholder), kPlaceholder.size(), script);
  const std::string output =
      !options.output.empty() ? options.output
                              : (std::filesystem::path(options.runs[0]) / "report.html").string();
  replace_file(output, page);
  print(stdout, output + "\n");
  return kOk;
}

}  // namespace cohort::apps
