#include "trainers/fingerprints.h"

#include "kernels/fingerprint.h"

namespace cohort {

std::vector<Fingerprint> fingerprints(const ParameterSet& set,
                                      const std::vector<FingerprintSource>& sources) {
  constexpr int64_t kMostWordsPerElement = 4;
  const Shape shape{std::ssize(sources)};
  Tensor on_host = Tensor::zeros(shape, DType::kI64),
         on_device = Tensor::zeros(shape, DType::kI64, set.device());
  std::vector<Fingerprint> out;
  for (const auto& [suffix, values, part] : sources) {
    const NamedParameter& p = set[part.parameter];
    const int64_t words_per_element = values.nbytes() / 2 / part.count,
                  address = kMostWordsPerElement * p.flat_index + words_per_element * part.begin;
    Tensor& sums = values.device() == set.device() ? on_device : on_host;
    Tensor sum = sums.narrow(0, std::ssize(out), 1);
    kernels::fingerprint(sum, values, address);
    out.push_back({p.name + suffix});
  }
  for (const Tensor& sums : {on_host, on_device}) {
    const std::vector<int64_t> values = sums.to_vector<int64_t>();
    for (size_t i = 0; i < out.size(); ++i) out[i].sum += values[i];  // one of the two is 0
  }
  return out;
}

std::vector<Fingerprint> weight_fingerprints(const ParameterSet& set) {
  std::vector<FingerprintSource> weights;
  for (const ParameterPart& part : parts_in(set, Slices()))
    weights.push_back({"", set[part.parameter].value, part});
  return fingerprints(set, weights);
}

std::string first_difference(Communicator& comm, const std::vector<Fingerprint>& all) {
  if (comm.size() == 1) return "";
  const size_t count = all.size();
  Tensor extremes = Tensor::empty({2, std::ssize(all)}, DType::kI64);
  auto* const largest = extremes.data<int64_t>();
  auto* const complements = largest + count;  // the largest is that of the smallest sum
  for (size_t i = 0; i < count; ++i) {
    largest[i] = all[i].sum;
    complements[i] = ~all[i].sum;
  }
  comm.all_reduce(extremes, Reduce::kMax);
  size_t first = 0;
  while (first < count && largest[first] == ~complements[first]) ++first;
  if (first == count) return "";
  Tensor sums = Tensor::empty({comm.size(), 1}, DType::kI64);
  sums.data<int64_t>()[comm.rank()] = all[first].sum;
  comm.all_gather(sums);
  std::string ranks;
  int64_t others = 0;
  for (int rank = 1; rank < comm.size(); ++rank)
    if (sums.data<int64_t>()[rank] != sums.data<int64_t>()[0])
      ranks += str(others++ > 0 ? ", " : "", rank);
  return str(others > 1 ? "ranks " : "rank ", ranks, others > 1 ? " have" : " has", " other ",
             all[first].name, " than rank 0");
}

}  // namespace cohort
