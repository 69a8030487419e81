// Collectives on CPU tensors over the connections of a process group. Threads of one process only
// synchronize there and read each other's memory; processes send the data: a few numbers per step
// next to NCCL, or the gradients of small models without a GPU.
#include "distributed/communicator.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>

#include "core/parallel.h"
#include "core/with_cuda.h"
#include "distributed/process_group.h"
#include "kernels/pairwise_sum.h"

namespace cohort {
namespace {

constexpr int kBlock = 256;      // elements that a thread reduces at a time
constexpr int kTreeLevels = 17;  // for at most 2^16 ranks

// Elements of a rank, whose sums are those of Communicator::all_reduce(), or maxima.
template <class T, Reduce op>
struct Block {
  T v[kBlock];
  friend Block operator+(const Block& a, const Block& b) {
    Block out;
    for (int i = 0; i < kBlock; ++i)
      if constexpr (op == Reduce::kSum)
        out.v[i] = a.v[i] + b.v[i];
      else  // propagates NaN
        out.v[i] = a.v[i] != a.v[i] || a.v[i] > b.v[i] ? a.v[i] : b.v[i];
    return out;
  }
};

// Writes to each of `to` the sum (or max) of the n elements at each of `from`: the same bits for
// any number of threads. Buffers of `to` and `from` are identical or disjoint, maybe unaligned.
using ReduceBuffers = void (*)(const std::vector<char*>& from, const std::vector<char*>& to,
                               int64_t n);
template <class T, Reduce op>
void reduce_in_tree(const std::vector<char*>& from, const std::vector<char*>& to, int64_t n) {
  using Accumulator = std::conditional_t<is_narrow<T>, float, T>;
  parallel_for(n, kBlock, [&](int64_t begin, int64_t end) {
    const size_t at = static_cast<size_t>(begin) * sizeof(T),
                 bytes = static_cast<size_t>(end - begin) * sizeof(T);
    kernels::PairwiseSum<Block<Accumulator, op>, kTreeLevels> sum;
    Block<Accumulator, op> part;
    T values[kBlock] = {};
    for (const char* rank : from) {
      std::memcpy(values, rank + at, bytes);
      for (int i = 0; i < kBlock; ++i) part.v[i] = static_cast<Accumulator>(values[i]);
      sum.add(part);
    }
    part = sum.total();
    for (int i = 0; i < kBlock; ++i) values[i] = static_cast<T>(part.v[i]);
    for (char* out : to) std::memcpy(out + at, values, bytes);
  });
}

class HostCommunicator final : public Communicator {
 public:
  // Without a group: a single rank.
  explicit HostCommunicator(ProcessGroup* group) : group_(group) {}
  int rank() const override { return group_ == nullptr ? 0 : group_->rank(); }
  int size() const override { return group_ == nullptr ? 1 : group_->size(); }
  int hosts() const override { return group_ == nullptr ? 1 : group_->hosts(); }

  void all_reduce(Tensor& t, Reduce op) override {
    const std::string call = describe_all_reduce(t, op);
    if (group_ == nullptr) return;
    COHORT_CHECK(t.device().is_cpu(), "[all_reduce] expected a CPU tensor, got ", t.str());
    dispatch_all(t.dtype(), [&]<class T>() {
      if constexpr (sizeof(T) > 1) {
        ReduceBuffers reduce =
            op == Reduce::kSum ? reduce_in_tree<T, Reduce::kSum> : reduce_in_tree<T, Reduce::kMax>;
        group_->is_one_process() ? reduce_in_memory(call, t, reduce)
                                 : reduce_by_messages(call, t, reduce);
      }
    });
  }

  void all_to_all(Tensor& received, const Tensor& parts, const RankSets& among) override {
    const std::string call = describe_all_to_all(received, parts, among);
    COHORT_CHECK(parts.device().is_cpu(), "[all_to_all] expected CPU tensors, got ", parts.str());
    const auto width = static_cast<size_t>(received.dim(1)) * dtype_size(parts.dtype());
    const auto stride = static_cast<size_t>(parts.strides()[0]) * dtype_size(parts.dtype());
    exchange_rows(call, among, static_cast<const char*>(parts.raw()), stride, width,
                  static_cast<char*>(received.raw()));
  }

  void all_gather(Tensor& all) override {
    const std::string call = describe_all_gather(all, size());
    COHORT_CHECK(all.device().is_cpu(), "[all_gather] expected a CPU tensor, got ", all.str());
    const auto width = static_cast<size_t>(all.dim(1)) * dtype_size(all.dtype());
    char* const rows = static_cast<char*>(all.raw());
    exchange_rows(call, {1, size()}, rows + static_cast<size_t>(rank()) * width, 0, width, rows);
  }

  void barrier() override {
    if (group_ != nullptr) group_->broadcast("barrier", {});
  }

 private:
  // Every rank has rows of `width` bytes, row i for the i-th rank of its set, `stride` bytes apart
  // (0: one row for all). Writes those for this rank to `out`, in rank order. A row of `out` may be
  // the one sent.
  void exchange_rows(const std::string& call, const RankSets& among, const char* rows,
                     size_t stride, size_t width, char* out) {
    const auto count = static_cast<size_t>(among.count);
    // The start of what rank r gets, in what the others send.
    const auto offset = [&](int r, size_t row_bytes) {
      return stride == 0 ? 0 : static_cast<size_t>(among.place(r)) * row_bytes;
    };
    const auto of_set = [&](const std::vector<std::string>& parts, int r, size_t i) -> const auto& {
      return parts[static_cast<size_t>(among.member(r, static_cast<int>(i)))];
    };
    if (group_ == nullptr) {
      if (rows != out) std::memcpy(out, rows, width);
      return;
    }
    if (group_->is_one_process()) {
      const std::vector<std::string> addresses =
          group_->exchange(call, {reinterpret_cast<const char*>(&rows), sizeof rows});
      for (size_t i = 0; i < count; ++i) {
        const char* from = nullptr;
        std::memcpy(&from, of_set(addresses, rank(), i).data(), sizeof from);
        from += offset(rank(), stride);
        if (from != out + i * width) std::memcpy(out + i * width, from, width);
      }
      group_->exchange(call, {});  // waits until all ranks have read
      return;
    }
    const auto ranks = static_cast<size_t>(size());
    const size_t sent = stride == 0 ? 1 : count,
                 most = std::max<size_t>(1, group_->max_exchange() / ranks / sent);
    size_t at = 0;
    do {
      const size_t piece = std::min(most, width - at);
      std::string bytes;
      for (size_t i = 0; i < sent; ++i) bytes.append(rows + i * stride + at, piece);
      const std::string mine =
          group_->deal(call, bytes, [&](const std::vector<std::string>& parts) {
            std::vector<std::string> results(stride == 0 ? 1 : ranks);
            for (size_t r = 0; r < results.size(); ++r)
              for (size_t i = 0; i < count; ++i) {
                const int to = static_cast<int>(r);
                results[r].append(of_set(parts, to, i), offset(to, piece), piece);
              }
            return results;
          });
      for (size_t i = 0; i < count; ++i)
        std::memcpy(out + i * width + at, mine.data() + i * piece, piece);
      at += piece;
    } while (at < width);
  }

  // The ranks exchange the addresses of their tensors. Each rank reduces one slice for all ranks,
  // which no other rank accesses.
  void reduce_in_memory(const std::string& call, Tensor& t, ReduceBuffers reduce) {
    char* data = static_cast<char*>(t.raw());
    const int64_t begin = t.numel() * rank() / size(), end = t.numel() * (rank() + 1) / size();
    std::vector<char*> slices;
    for (const std::string& part :
         group_->exchange(call, {reinterpret_cast<const char*>(&data), sizeof data})) {
      std::memcpy(&data, part.data(), sizeof data);
      slices.push_back(data + begin * static_cast<int64_t>(dtype_size(t.dtype())));
    }
    reduce(slices, slices, end - begin);
    group_->broadcast(call, {});  // waits until all ranks are done
  }

  // Rank 0 reduces for all ranks, in chunks, of which it holds one per rank.
  void reduce_by_messages(const std::string& call, Tensor& t, ReduceBuffers reduce) {
    constexpr size_t kChunk = 1 << 20, kUnit = 8;  // bytes: no element is split
    const size_t max_chunk = std::min(kChunk, group_->max_exchange()) / kUnit * kUnit;
    char* bytes = static_cast<char*>(t.raw());
    const auto end = static_cast<size_t>(t.nbytes());
    size_t at = 0;
    do {
      const size_t count = std::min(max_chunk, end - at);
      const auto reduce_parts = [&](std::vector<std::string> parts) {
        std::vector<char*> from;
        for (std::string& part : parts) from.push_back(part.data());
        reduce(from, {from[0]}, static_cast<int64_t>(count / dtype_size(t.dtype())));
        return std::move(parts[0]);
      };
      const std::string result = group_->combine(call, {bytes + at, count}, reduce_parts);
      std::memcpy(bytes + at, result.data(), count);
      at += count;
    } while (at < end);
  }

  ProcessGroup* group_;
};

}  // namespace

std::string describe_all_reduce(const Tensor& t, Reduce op) {
  COHORT_CHECK(t.defined() && t.is_contiguous(), "[all_reduce] expected t to be contiguous, got ",
               t.defined() ? "a strided " : "", t.str());
  COHORT_CHECK(is_float(t.dtype()) || t.dtype() == DType::kI32 || t.dtype() == DType::kI64,
               "[all_reduce] expected numbers to reduce, got ", t.str());
  return str("all_reduce ", op == Reduce::kMax ? "(max) " : "", "of ", dtype_name(t.dtype()),
             t.shape().str());
}

std::string describe_all_to_all(const Tensor& received, const Tensor& parts,
                                const RankSets& among) {
  COHORT_CHECK(received.rank() == 2 && received.shape() == parts.shape() &&
                   received.dim(0) == among.count && received.dtype() == parts.dtype() &&
                   received.device() == parts.device() && received.is_contiguous() &&
                   (parts.strides()[1] == 1 || parts.dim(1) <= 1),
               "[all_to_all] expected a row of one length for each of ", among.count,
               " ranks, got ", parts.str(), " to send and ", received.str(), " to receive");
  return str("all_to_all of ", dtype_name(parts.dtype()), parts.shape().str(),
             among.step > 1 ? str(" among ranks ", among.step, " apart") : "");
}

std::string describe_all_gather(const Tensor& all, int ranks) {
  COHORT_CHECK(all.rank() == 2 && all.dim(0) == ranks && all.is_contiguous(),
               "[all_gather] expected a row for each of ", ranks, " ranks, got ", all.str());
  return str("all_gather of ", dtype_name(all.dtype()), all.shape().str());
}

std::unique_ptr<Communicator> make_single_communicator() {
  return std::make_unique<HostCommunicator>(nullptr);
}

std::unique_ptr<Communicator> make_communicator(ProcessGroup& group, Device device) {
  return on_device<[](ProcessGroup&, Device, std::unique_ptr<Communicator> host) { return host; },
                   cuda::make_nccl_communicator>(device, group, device,
                                                 std::make_unique<HostCommunicator>(&group));
}

void pin_nccl_algorithms() {
  for (const auto& [name, value] : kNcclVariables) ::setenv(name, value, /*overwrite=*/0);
}

void run_local_ranks(int ranks, const std::function<void(Communicator&)>& body) {
  COHORT_CHECK(ranks >= 1, "[run_local_ranks] expected at least one rank, got ", ranks);
  std::vector<std::unique_ptr<ProcessGroup>> groups(1);  // a single rank needs none
  if (ranks > 1) groups = ProcessGroup::of_threads(ranks);
  const int threads = std::max(1, num_threads() / ranks);
  std::mutex mutex;
  std::exception_ptr first;
  const auto fail = [&](const std::unique_ptr<ProcessGroup>& group, const std::string& message) {
    {
      std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
    }
    if (group) group->fail(message);
  };
  const auto run_rank = [&](size_t rank) {
    const std::unique_ptr<ProcessGroup> group = std::move(groups[rank]);
    try {
      set_num_threads(threads);
      HostCommunicator communicator(group.get());
      body(communicator);
    } catch (const std::exception& e) {
      fail(group, e.what());
    } catch (...) {
      fail(group, "unknown exception");
    }
  };
  {
    std::vector<std::jthread> workers;
    try {
      for (size_t rank = 0; rank < groups.size(); ++rank) workers.emplace_back(run_rank, rank);
    } catch (const std::exception& e) {
      fail(groups[workers.size()], e.what());  // no thread: the running ranks must not wait for it
    }
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace cohort
