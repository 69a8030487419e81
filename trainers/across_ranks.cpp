#include "trainers/across_ranks.h"

#include <optional>

#include "core/allocator.h"

namespace cohort {

std::vector<double> reduce_over_ranks(Communicator& comm, const std::vector<double>& values,
                                      Reduce op) {
  if (comm.size() == 1) return values;
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

void on_all_ranks(Communicator& comm, const std::function<void()>& work) {
  std::optional<NonFiniteError> bad;
  std::optional<OutOfMemoryError> full;
  try {
    work();
  } catch (const NonFiniteError& e) {
    bad = e;
  } catch (const OutOfMemoryError& e) {
    full = e;
  }
  double non_finite = bad ? 1 : 0, out_of_memory = full ? 1 : 0;
  reduce_in_place(comm, {&non_finite, &out_of_memory});
  if (non_finite > 0)
    throw bad ? *bad : NonFiniteError("another rank's logits hold NaN or infinity");
  if (out_of_memory > 0) throw full ? *full : OutOfMemoryError("another rank is out of memory");
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
