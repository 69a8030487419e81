#include "trainers/across_ranks.h"

#include <algorithm>
#include <optional>
#include <span>

#include "core/allocator.h"

namespace cohort {

namespace {

constexpr size_t kPiece = 1 << 22;  // numbers that a device holds at a time

// The size of each list, which one rank has.
template <class List>
std::vector<double> sizes_of(Communicator& comm, const std::vector<List>& lists) {
  std::vector<double> sizes;
  for (const List& list : lists) sizes.push_back(static_cast<double>(list.size()));
  return reduce_over_ranks(comm, sizes);
}

}  // namespace

// A view of the numbers, as a dry run has no elements of its own.
std::vector<double> reduce_over_ranks(Communicator& comm, std::vector<double> values, Reduce op) {
  if (comm.size() == 1) return values;
  Tensor t = Tensor::borrow(values.data(), {}, {std::ssize(values)}, {1}, DType::kF64);
  comm.all_reduce(t, op);
  return values;
}

void reduce_in_place(Communicator& comm, const std::vector<double*>& numbers, Reduce op) {
  std::vector<double> values;
  for (const double* number : numbers) values.push_back(*number);
  values = reduce_over_ranks(comm, values, op);
  for (size_t i = 0; i < numbers.size(); ++i) *numbers[i] = values[i];
}

std::vector<std::vector<double>> gather_numbers(Communicator& comm,
                                                const std::vector<std::vector<double>>& lists,
                                                Device device) {
  if (comm.size() == 1) return lists;
  const std::vector<double> sizes = sizes_of(comm, lists);
  // Sums over ranks, of which only one has nonzero values.
  std::vector<double> numbers;
  for (size_t i = 0; i < lists.size(); ++i) {
    numbers.insert(numbers.end(), lists[i].begin(), lists[i].end());
    numbers.resize(numbers.size() + static_cast<size_t>(sizes[i]) - lists[i].size());
  }
  for (size_t begin = 0; begin < numbers.size(); begin += kPiece) {
    const auto piece = std::span(numbers).subspan(begin, std::min(kPiece, numbers.size() - begin));
    Tensor sums = Tensor::from(std::vector<double>(piece.begin(), piece.end())).to(device);
    comm.all_reduce(sums);
    std::ranges::copy(sums.to_vector<double>(), piece.begin());
  }
  // The device's sums are incomplete if a rank has ended meanwhile, which this call names.
  if (device.is_cuda()) comm.barrier();
  std::vector<std::vector<double>> all;
  auto next = numbers.begin();
  for (const double size : sizes) {
    all.emplace_back(next, next + static_cast<ptrdiff_t>(size));
    next += static_cast<ptrdiff_t>(size);
  }
  return all;
}

std::vector<std::string> gather_texts(Communicator& comm, const std::vector<std::string>& texts) {
  if (comm.size() == 1) return texts;
  const std::vector<double> sizes = sizes_of(comm, texts);
  // Eight bytes are an integer, whose sum over ranks has no carry: one rank has a nonzero byte.
  std::string bytes;
  for (size_t i = 0; i < texts.size(); ++i) {
    bytes += texts[i];
    bytes.resize(bytes.size() + static_cast<size_t>(sizes[i]) - texts[i].size());
  }
  Tensor sums = Tensor::zeros({(std::ssize(bytes) + 7) / 8}, DType::kI64);
  std::ranges::copy(bytes, static_cast<char*>(sums.raw()));
  if (!bytes.empty()) comm.all_reduce(sums);
  std::vector<std::string> all;
  const char* next = static_cast<const char*>(sums.raw());
  for (const double size : sizes) {
    all.emplace_back(next, static_cast<size_t>(size));
    next += all.back().size();
  }
  return all;
}

std::string first_text(Communicator& comm, const std::string& text) {
  double first = text.empty() ? -comm.size() : -comm.rank();
  reduce_in_place(comm, {&first}, Reduce::kMax);
  return gather_texts(comm, {comm.rank() == -static_cast<int>(first) ? text : ""})[0];
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
