#include "trainers/across_ranks.h"

namespace cohort {

std::vector<double> reduce_over_ranks(Communicator& comm, const std::vector<double>& values,
                                      Reduce op) {
  Tensor t = Tensor::from(values);
  comm.all_reduce(t, op);
  return t.to_vector<double>();
}

void reduce_in_place(Communicator& comm, const std::vector<double*>& numbers, Reduce op) {
  std::vector<double> values;
  for (const double* number : numbers) values.push_back(*number);
  values = reduce_over_ranks(comm, values, op);
  for (size_t i = 0; i < numbers.size(); ++i) *numbers[i] = values[i];
}

std::vector<std::string> gather_texts(Communicator& comm, const std::vector<std::string>& texts) {
  if (comm.size() == 1) return texts;
  std::vector<double> sizes;
  for (const std::string& text : texts) sizes.push_back(static_cast<double>(text.size()));
  sizes = reduce_over_ranks(comm, sizes);
  // One number per byte: a sum over ranks, of which only one has nonzero values.
  std::vector<double> bytes;
  for (size_t i = 0; i < texts.size(); ++i) {
    const size_t begin = bytes.size();
    bytes.resize(begin + static_cast<size_t>(sizes[i]), 0);
    for (size_t k = 0; k < texts[i].size(); ++k)
      bytes[begin + k] = static_cast<unsigned char>(texts[i][k]);
  }
  bytes = reduce_over_ranks(comm, bytes);
  std::vector<std::string> all;
  size_t at = 0;
  for (const double size : sizes) {
    std::string& text = all.emplace_back();
    for (const size_t end = at + static_cast<size_t>(size); at < end; ++at)
      text += static_cast<char>(static_cast<unsigned char>(bytes[at]));
  }
  return all;
}

std::string first_text(Communicator& comm, const std::string& text) {
  std::vector<std::string> texts(static_cast<size_t>(comm.size()));
  texts[static_cast<size_t>(comm.rank())] = text;
  for (const std::string& each : gather_texts(comm, texts))
    if (!each.empty()) return each;
  return "";
}

RankShard shard_of(int64_t count, int rank, int size, int64_t rotation) {
  const int64_t each = count / size, extra = count % size;
  // `extra` consecutive ranks get one item more, starting where the previous rotation ended.
  const int64_t first = rotation * extra % size;
  const auto has_extra = [&](int64_t r) { return (r - first + size) % size < extra; };
  RankShard shard;
  for (int64_t r = 0; r < rank; ++r) shard.begin += each + has_extra(r);
  shard.end = shard.begin + each + has_extra(rank);
  return shard;
}

}  // namespace cohort
