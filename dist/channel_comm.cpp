// Collectives of CPU tensors over the connections of a process group: every rank gets every rank's
// bytes and does the arithmetic itself. Made for a handful of numbers per step, and for running
// several processes where there is no GPU.
#include <algorithm>
#include <cstring>

#include "core/with_cuda.h"
#include "dist/collective_args.h"
#include "dist/communicator.h"
#include "dist/nccl_comm.h"
#include "dist/process_group.h"
#include "dist/rank_order.h"

namespace cohort {
namespace {

using Parts = std::vector<std::string>;  // of all ranks

std::string_view bytes_of(const Tensor& t) {
  return {static_cast<const char*>(t.raw()), static_cast<size_t>(t.nbytes())};
}

void set_bytes(Tensor& t, int64_t at, std::string_view bytes) {
  if (!bytes.empty()) std::memcpy(static_cast<char*>(t.raw()) + at, bytes.data(), bytes.size());
}

class ChannelCommunicator final : public Communicator {
 public:
  explicit ChannelCommunicator(ProcessGroup& group) : group_(group) {}
  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }

  void all_reduce(Tensor& t, Reduce op) override {
    detail::check_collective_tensor("all_reduce", "t", t);
    detail::check_reducible("all_reduce", t);
    check_cpu(t);
    const char* call = op == Reduce::kMax ? "all_reduce (max)" : "all_reduce";
    exchange(describe(call, t), bytes_of(t), t.nbytes(),
             [&](int64_t at, const Parts& parts) { reduce_into(t, 0, op, at, parts); });
  }

  void broadcast(Tensor& t, int root) override {
    detail::check_collective_tensor("broadcast", "t", t);
    detail::check_root(root, size());
    check_cpu(t);
    const std::string_view mine = rank() == root ? bytes_of(t) : std::string_view();
    exchange(describe(str("broadcast (root ", root, ")"), t), mine, t.nbytes(),
             [&](int64_t at, const Parts& parts) {
               set_bytes(t, at, parts[static_cast<size_t>(root)]);
             });
  }

  void all_gather(Tensor& out, const Tensor& in) override {
    detail::check_parts("all_gather", out, in, rank(), size());
    check_cpu(in);
    check_cpu(out);
    exchange(describe("all_gather", in), bytes_of(in), in.nbytes(),
             [&](int64_t at, const Parts& parts) {
               for (int r = 0; r < size(); ++r)
                 set_bytes(out, r * in.nbytes() + at, parts[static_cast<size_t>(r)]);
             });
  }

  void reduce_scatter(Tensor& out, const Tensor& in) override {
    detail::check_parts("reduce_scatter", in, out, rank(), size());
    detail::check_reducible("reduce_scatter", in);
    check_cpu(in);
    check_cpu(out);
    exchange(describe("reduce_scatter", in), bytes_of(in), in.nbytes(),
             [&](int64_t at, const Parts& parts) {
               reduce_into(out, rank() * out.numel(), Reduce::kSum, at, parts);
             });
  }

  void barrier() override { group_.exchange("barrier", {}); }

 private:
  static void check_cpu(const Tensor& t) {
    COHORT_CHECK(t.device().is_cpu(), "[communicator] expected a CPU tensor, got ", t.str());
  }
  static std::string describe(const std::string& call, const Tensor& t) {
    return str(call, " of ", dtype_name(t.dtype()), t.shape().str());
  }

  // Every rank's `mine`, of `nbytes` bytes or none, in pieces that the group can carry: take(at,
  // parts) gets those from byte `at` on.
  template <class F>
  void exchange(const std::string& call, std::string_view mine, int64_t nbytes, F&& take) {
    constexpr size_t kUnit = 8;  // bytes: no element is cut in two
    const size_t most = std::max(group_.max_part() / kUnit, size_t{1}) * kUnit;
    const auto end = static_cast<size_t>(nbytes);
    size_t at = 0;
    do {
      take(static_cast<int64_t>(at),
           group_.exchange(call, mine.empty() ? mine : mine.substr(at, most)));
      at += most;
    } while (at < end);
  }

  // out = the reduction of the elements from `first` on of all ranks' bytes, as far as they are in
  // these parts, which start at byte `at`.
  static void reduce_into(Tensor& out, int64_t first, Reduce op, int64_t at, const Parts& parts) {
    dispatch_reducible(out.dtype(), [&]<class T>() {
      // Strings do not promise the alignment of T.
      std::vector<std::vector<T>> values;
      for (const std::string& part : parts) {
        values.emplace_back(part.size() / sizeof(T));
        if (!part.empty()) std::memcpy(values.back().data(), part.data(), part.size());
      }
      const int64_t start = at / static_cast<int64_t>(sizeof(T));
      const int64_t begin = std::max(first, start) - start;
      const int64_t end =
          std::min(first + out.numel(), start + static_cast<int64_t>(values[0].size())) - start;
      T* to = out.data<T>();
      reduce_in_rank_order<T>(
          op, static_cast<int>(parts.size()), begin, std::max(begin, end),
          [&](int r) { return values[static_cast<size_t>(r)].data(); },
          [&](int64_t i, const T* block, int64_t count) {
            std::copy_n(block, count, to + (start + i - first));
          });
    });
  }

  ProcessGroup& group_;
};

std::unique_ptr<Communicator> host_communicator(ProcessGroup&, Device,
                                                std::unique_ptr<Communicator> host) {
  return host;
}

}  // namespace

std::unique_ptr<Communicator> make_communicator(ProcessGroup& group, Device device) {
  return on_device<host_communicator, cuda::make_nccl_communicator>(
      device, group, device, std::make_unique<ChannelCommunicator>(group));
}

}  // namespace cohort
