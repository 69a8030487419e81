// Ranks as threads of this process, on the CPU. A collective is two meetings of all ranks: at the
// first each has published its tensors and the calls are compared, at the second nobody reads
// them any more. Between the two, every rank works on memory that no other rank writes, so no
// scratch memory is needed. A rank that throws or returns wakes all who wait for it.
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

#include "core/parallel.h"
#include "dist/collective_args.h"
#include "dist/communicator.h"
#include "dist/rank_order.h"

namespace cohort {
namespace {

// What one rank brings to a collective. `in` and `out` are the same tensor for all_reduce and
// broadcast.
struct Call {
  const char* op = "";
  int root = -1;
  Reduce reduce = Reduce::kSum;
  DType dtype = DType::kU8;
  Shape in_shape, out_shape;
  const void* in = nullptr;
  void* out = nullptr;

  bool matches(const Call& other) const {
    return std::strcmp(op, other.op) == 0 && root == other.root && reduce == other.reduce &&
           dtype == other.dtype && in_shape == other.in_shape && out_shape == other.out_shape;
  }
  // "all_reduce(max) of f32[3]".
  std::string describe() const {
    std::string text = op;
    if (root >= 0) text += str("(root ", root, ")");
    if (reduce == Reduce::kMax) text += "(max)";
    if (out == nullptr) return text;  // barrier
    text += str(" of ", dtype_name(dtype), in_shape.str());
    if (in_shape != out_shape) text += str(" to ", out_shape.str());
    return text;
  }
};

// The meeting point of all ranks.
class Group {
 public:
  explicit Group(int size) : calls_(static_cast<size_t>(size)) {}
  int size() const { return static_cast<int>(calls_.size()); }
  const Call& call(int rank) const { return calls_[static_cast<size_t>(rank)]; }

  // Publishes this rank's call and returns when every rank made the same one. Throws PeerError
  // if a rank has failed, has ended or made another call.
  void begin(int rank, const Call& call) {
    std::unique_lock lock(mutex_);
    if (failure_.empty()) {
      calls_[static_cast<size_t>(rank)] = call;
      const uint64_t meeting = meetings_;
      if (arrived_ + 1 == size()) compare();
      if (failure_.empty()) arrive();
      changed_.wait(lock, [&] { return meetings_ != meeting || !failure_.empty(); });
      if (meetings_ != meeting) return;
    }
    throw PeerError(str("[", call.op, "] ", failure_));
  }

  // Waits until every rank is through with the tensors. Ranks cannot fail between begin() and
  // end(), so this always returns; what a rank does after its end() must not disturb those that
  // have not woken from theirs.
  void end() {
    std::unique_lock lock(mutex_);
    const uint64_t meeting = meetings_;
    arrive();
    changed_.wait(lock, [&] { return meetings_ != meeting; });
  }

  // Rank `rank` threw the current exception.
  void fail(int rank) {
    std::string message = "unknown exception";
    try {
      throw;
    } catch (const std::exception& e) {
      message = e.what();
    } catch (...) {
    }
    std::lock_guard lock(mutex_);
    if (!exception_) exception_ = std::current_exception();
    stop(str("rank ", rank, " failed: ", message));
  }

  // Rank `rank` returned; who waits for it, or calls it later, waits in vain.
  void leave(int rank) {
    std::lock_guard lock(mutex_);
    stop(str("rank ", rank, " has ended and takes no part in this call"));
  }

  std::exception_ptr exception() const { return exception_; }

 private:
  void arrive() {
    if (++arrived_ < size()) return;
    arrived_ = 0;
    ++meetings_;
    changed_.notify_all();
  }

  void compare() {
    for (int r = 1; r < size(); ++r)
      if (!call(r).matches(call(0)))
        return stop(str("ranks disagree: rank 0 calls ", call(0).describe(), ", rank ", r,
                        " calls ", call(r).describe()));
  }

  // The first reason stays: it is the cause of the later ones.
  void stop(const std::string& reason) {
    if (failure_.empty()) failure_ = reason;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Call> calls_;
  int arrived_ = 0;
  uint64_t meetings_ = 0;
  std::string failure_;  // why no further collective can take place
  std::exception_ptr exception_;
};

// Reduces the elements [begin, end) over all ranks: see dist/rank_order.h.
template <class T, class F>
void reduce_elements(const Group& group, int64_t begin, int64_t end, F&& store) {
  reduce_in_rank_order<T>(
      group.call(0).reduce, group.size(), begin, end,
      [&](int rank) { return static_cast<const T*>(group.call(rank).in); }, store);
}

void copy_bytes(void* to, const void* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
}

class LocalCommunicator final : public Communicator {
 public:
  LocalCommunicator(Group& group, int rank) : group_(group), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return group_.size(); }

  // Each rank reduces one slice and writes it to all ranks: it alone touches that slice of anyone.
  void all_reduce(Tensor& t, Reduce op) override {
    detail::check_collective_tensor("all_reduce", "t", t);
    detail::check_reducible("all_reduce", t);
    const int64_t n = t.numel();
    run(make_call("all_reduce", t, t, {.reduce = op}), [&] {
      dispatch_reducible(t.dtype(), [&]<class T>() {
        reduce_elements<T>(group_, n * rank_ / size(), n * (rank_ + 1) / size(),
                           [&](int64_t at, const T* values, int64_t count) {
                             for (int r = 0; r < size(); ++r)
                               std::copy_n(values, count, static_cast<T*>(group_.call(r).out) + at);
                           });
      });
    });
  }

  void broadcast(Tensor& t, int root) override {
    detail::check_collective_tensor("broadcast", "t", t);
    detail::check_root(root, size());
    run(make_call("broadcast", t, t, {.root = root}),
        [&] { copy_bytes(t.raw(), group_.call(root).in, t.nbytes()); });
  }

  void all_gather(Tensor& out, const Tensor& in) override {
    detail::check_parts("all_gather", out, in, rank_, size());
    run(make_call("all_gather", out, in, {}), [&] {
      for (int r = 0; r < size(); ++r)
        copy_bytes(static_cast<char*>(out.raw()) + r * in.nbytes(), group_.call(r).in, in.nbytes());
    });
  }

  void reduce_scatter(Tensor& out, const Tensor& in) override {
    detail::check_parts("reduce_scatter", in, out, rank_, size());
    detail::check_reducible("reduce_scatter", in);
    const int64_t n = out.numel();
    run(make_call("reduce_scatter", out, in, {}), [&] {
      dispatch_reducible(in.dtype(), [&]<class T>() {
        T* to = out.data<T>();
        reduce_elements<T>(group_, n * rank_, n * (rank_ + 1),
                           [&](int64_t at, const T* values, int64_t count) {
                             std::copy_n(values, count, to + at - n * rank_);
                           });
      });
    });
  }

  void barrier() override {
    run({.op = "barrier"}, [] {});
  }

 private:
  struct Options {
    int root = -1;
    Reduce reduce = Reduce::kSum;
  };
  static Call make_call(const char* op, Tensor& out, const Tensor& in, Options options) {
    COHORT_CHECK(in.device().is_cpu() && out.device().is_cpu(), "[", op,
                 "] ranks of one process exchange CPU tensors, got ", in.str(), " and ", out.str());
    return {op,         options.root, options.reduce, in.dtype(),
            in.shape(), out.shape(),  in.raw(),       out.raw()};
  }

  template <class F>
  void run(const Call& call, F&& work) {
    group_.begin(rank_, call);
    work();
    group_.end();
  }

  Group& group_;
  const int rank_;
};

}  // namespace

void run_local_ranks(int ranks, const std::function<void(Communicator&)>& body) {
  COHORT_CHECK(ranks >= 1, "[run_local_ranks] expected at least one rank, got ", ranks);
  Group group(ranks);
  const int threads = std::max(1, num_threads() / ranks);
  auto run_rank = [&](int rank) {
    try {
      set_num_threads(threads);
      LocalCommunicator communicator(group, rank);
      body(communicator);
      group.leave(rank);
    } catch (...) {
      group.fail(rank);
    }
  };
  std::vector<std::jthread> workers;
  workers.reserve(static_cast<size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    try {
      workers.emplace_back(run_rank, rank);
    } catch (...) {
      group.fail(rank);  // no thread to be had: those that run must not wait for it
      break;
    }
  }
  for (std::jthread& worker : workers) worker.join();
  if (group.exception()) std::rethrow_exception(group.exception());
}

}  // namespace cohort
