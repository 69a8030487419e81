// Collectives of CPU tensors over the connections of a process group: every rank gets every rank's
// bytes and does the arithmetic itself. Made for a handful of numbers per step, and for running
// several processes where there is no GPU.
#include <cstring>

#include "dist/collective_args.h"
#include "dist/communicator.h"
#include "dist/nccl_comm.h"
#include "dist/process_group.h"
#include "dist/rank_order.h"

namespace cohort {
namespace {

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
    const char* call = op == Reduce::kMax ? "all_reduce (max)" : "all_reduce";
    reduce_into(t, 0, op, exchange(describe(call, t), t));
  }

  void broadcast(Tensor& t, int root) override {
    detail::check_collective_tensor("broadcast", "t", t);
    detail::check_root(root, size());
    const std::string call = describe(str("broadcast (root ", root, ")"), t);
    const std::string_view mine = rank() == root ? bytes_of(t) : std::string_view();
    check_cpu(t);
    set_bytes(t, 0, group_.exchange(call, mine)[static_cast<size_t>(root)]);
  }

  void all_gather(Tensor& out, const Tensor& in) override {
    detail::check_parts("all_gather", out, in, rank(), size());
    check_cpu(out);
    const auto parts = exchange(describe("all_gather", in), in);
    for (int r = 0; r < size(); ++r) set_bytes(out, r * in.nbytes(), parts[static_cast<size_t>(r)]);
  }

  void reduce_scatter(Tensor& out, const Tensor& in) override {
    detail::check_parts("reduce_scatter", in, out, rank(), size());
    detail::check_reducible("reduce_scatter", in);
    check_cpu(out);
    reduce_into(out, rank() * out.numel(), Reduce::kSum,
                exchange(describe("reduce_scatter", in), in));
  }

  void barrier() override { group_.exchange("barrier", {}); }

 private:
  static void check_cpu(const Tensor& t) {
    COHORT_CHECK(t.device().is_cpu(), "[communicator] expected a CPU tensor, got ", t.str());
  }
  static std::string describe(const std::string& call, const Tensor& t) {
    return str(call, " of ", dtype_name(t.dtype()), t.shape().str());
  }
  std::vector<std::string> exchange(const std::string& call, const Tensor& t) {
    check_cpu(t);
    return group_.exchange(call, bytes_of(t));
  }

  // out = the reduction of the elements from `first` on of all parts.
  static void reduce_into(Tensor& out, int64_t first, Reduce op,
                          const std::vector<std::string>& parts) {
    dispatch_reducible(out.dtype(), [&]<class T>() {
      // Strings do not promise the alignment of T.
      std::vector<std::vector<T>> values;
      for (const std::string& part : parts) {
        values.emplace_back(part.size() / sizeof(T));
        if (!part.empty()) std::memcpy(values.back().data(), part.data(), part.size());
      }
      T* to = out.data<T>();
      reduce_in_rank_order<T>(
          op, static_cast<int>(parts.size()), first, first + out.numel(),
          [&](int r) { return values[static_cast<size_t>(r)].data(); },
          [&](int64_t at, const T* block, int64_t count) {
            std::copy_n(block, count, to + at - first);
          });
    });
  }

  ProcessGroup& group_;
};

}  // namespace

std::unique_ptr<Communicator> make_communicator(ProcessGroup& group, Device device) {
  auto host = std::make_unique<ChannelCommunicator>(group);
  if constexpr (kWithCuda) {
    if (device.is_cuda()) return cuda::make_nccl_communicator(group, device, std::move(host));
  }
  return host;
}

}  // namespace cohort
