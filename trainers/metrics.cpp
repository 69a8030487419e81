#include "trainers/metrics.h"

#include "trainers/across_ranks.h"

namespace cohort {

std::optional<double> Metrics::find(const std::string& name) const {
  for (const auto& [key, value] : entries_)
    if (key == name) return value;
  return std::nullopt;
}

double Metrics::at(const std::string& name) const {
  const std::optional<double> value = find(name);
  COHORT_CHECK(value.has_value(), "[metrics] there is no ", name);
  return *value;
}

double MetricSums::Metric::value() const {
  if (kind == Kind::kMean) return moments.mean();
  if (kind == Kind::kDeviation) return moments.deviation();
  const bool extreme = kind == Kind::kMax || kind == Kind::kMin;
  if (extreme && std::isinf(moments.sum)) return std::nan("");
  return kind == Kind::kMin ? -moments.sum : moments.sum;
}

Metrics MetricSums::reduce(Communicator& comm) const {
  std::vector<Metric> all = metrics_;
  std::vector<double*> sums, maxima;
  for (auto& [name, kind, moments] : all) {
    if (kind == Kind::kMax || kind == Kind::kMin)
      maxima.push_back(&moments.sum);
    else if (kind != Kind::kLocal)
      sums.insert(sums.end(), {&moments.sum, &moments.count, &moments.squares});
  }
  reduce_in_place(comm, sums);
  reduce_in_place(comm, maxima, Reduce::kMax);
  Metrics out;
  for (const Metric& metric : all) out.add(metric.name, metric.value());
  return out;
}

}  // namespace cohort
