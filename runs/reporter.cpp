#include "runs/reporter.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>

namespace cohort {

std::string utc_now() {
  using namespace std::chrono;
  const auto now = floor<milliseconds>(system_clock::now());
  const std::time_t seconds = system_clock::to_time_t(floor<std::chrono::seconds>(now));
  std::tm parts;
  gmtime_r(&seconds, &parts);
  char date[40], fraction[16];
  std::strftime(date, sizeof date, "%FT%T", &parts);
  std::snprintf(fraction, sizeof fraction, ".%03dZ",
                static_cast<int>(now.time_since_epoch().count() % 1000));
  return std::string(date) + fraction;
}

std::string text_curve(const std::vector<double>& values, int width, int height) {
  if (values.empty() || width < 1 || height < 2) return "";
  // Each column is the mean of an equal part of the values.
  const int columns = std::min<int>(width, static_cast<int>(values.size()));
  std::vector<double> means;
  for (int c = 0; c < columns; ++c) {
    const size_t begin = values.size() * static_cast<size_t>(c) / static_cast<size_t>(columns);
    const size_t end = values.size() * static_cast<size_t>(c + 1) / static_cast<size_t>(columns);
    double total = 0;
    for (size_t i = begin; i < end; ++i) total += values[i];
    means.push_back(total / static_cast<double>(end - begin));
  }
  const auto [lo, hi] = std::minmax_element(means.begin(), means.end());
  const double range = std::max(*hi - *lo, 1e-12);
  std::string text;
  for (int row = height - 1; row >= 0; --row) {
    char label[32];
    std::snprintf(label, sizeof label, "%8.3f |", *lo + range * row / (height - 1));
    text += label;
    for (const double m : means)
      text += std::lround((m - *lo) / range * (height - 1)) == row ? '*' : ' ';
    while (text.back() == ' ') text.pop_back();
    text += '\n';
  }
  text += "         +" + std::string(static_cast<size_t>(columns), '-') + "\n";
  return text;
}

}  // namespace cohort
