// NCCL backend of Communicator. The NCCL communicator is non-blocking: no call waits for another
// rank, so this rank can always be notified of a failed one. The group's failure handler then
// aborts the communicator from its own thread, and pending kernels return.
#include <nccl.h>

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "core/cuda.h"
#include "core/log.h"
#include "core/progress.h"
#include "distributed/communicator.h"
#include "distributed/process_group.h"

namespace cohort::cuda {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kNoLimit{0};
constexpr milliseconds kInitLimit{300000}, kFinalizeLimit{10000};
constexpr milliseconds kPoll{200};
constexpr milliseconds kAbortWait{2000};    // for a call in progress; then abort() gives up
constexpr milliseconds kFailureWait{3000};  // for the group to determine which rank has failed

ncclDataType_t type_of(DType dtype) {
  if (dtype == DType::kF64) return ncclFloat64;
  if (dtype == DType::kI32) return ncclInt32;
  return dtype == DType::kI64 ? ncclInt64 : ncclFloat32;  // also for bf16, which is converted
}

// Other settings of the user may be meant, but change bits.
void warn_of_other_algorithms() {
  for (const auto& [name, value] : kNcclVariables)
    if (const char* set = std::getenv(name); set == nullptr || std::string_view(set) != value)
      logging::warn(name, " is ", set == nullptr ? "not set" : set, ": sums over ranks may have ",
                    "other bits in every run; hint: ", name, "=", value);
}

// A call that the device may not have completed.
struct DeviceCall {
  explicit DeviceCall(Device device) : begin(device), end(device) {}
  uint64_t number = 0;
  Event begin, end;
  bool is_enqueued = false;  // `end` is recorded
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(ProcessGroup& group, Device device, std::unique_ptr<Communicator> host)
      : group_(group), device_(device), host_(std::move(host)) {
    if (rank() == 0) warn_of_other_algorithms();
    activate(device_);
    ncclUniqueId id{};
    if (rank() == 0)
      if (const ncclResult_t result = ncclGetUniqueId(&id); result != ncclSuccess)
        fail("nccl_init", result);
    const std::string bytes = group_.broadcast("nccl_init", {id.internal, sizeof id.internal});
    std::memcpy(id.internal, bytes.data(), sizeof id.internal);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    group_.set_failure_handler([this] { abort(); });
    try {
      ncclResult_t result = ncclSuccess;
      {
        std::lock_guard lock(mutex_);
        result = ncclCommInitRankConfig(&comm_, size(), id, rank(), &config);
      }
      await("nccl_init", result, kInitLimit);
      poller_ = std::jthread([this](const std::stop_token& stop) { poll(stop); });
    } catch (...) {
      group_.set_failure_handler({});
      abort();
      throw;
    }
  }

  ~NcclCommunicator() override {
    poller_ = {};
    group_.set_failure_handler({});
    if (comm_ == nullptr) return;
    if (std::uncaught_exceptions() == 0 && group_.failure().empty() && finalize())
      ncclCommDestroy(comm_);
    else
      ncclCommAbort(comm_);
  }

  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  int hosts() const override { return group_.hosts(); }

  // Enqueues on the current stream.
  void all_reduce(Tensor& t, Reduce op) override {
    if (t.device().is_cpu()) return host_->all_reduce(t, op);
    const std::string call = describe_all_reduce(t, op) + " on cuda";
    COHORT_CHECK(t.device() == device_, "[all_reduce] this rank's communicator is for ",
                 device_.str(), ", got ", t.str());
    if (t.dtype() == DType::kBF16) {  // NCCL would round at every rank
      Tensor as_f32 = t.to(DType::kF32);
      all_reduce(as_f32, op);
      t.copy_(as_f32);
      return;
    }
    enqueue(call, t.numel(), [&](cudaStream_t queue) {
      return ncclAllReduce(t.raw(), t.raw(), static_cast<size_t>(t.numel()), type_of(t.dtype()),
                           op == Reduce::kMax ? ncclMax : ncclSum, comm_, queue);
    });
  }

  void all_to_all(Tensor& received, const Tensor& parts, const RankSets& among) override {
    if (parts.device().is_cpu()) return host_->all_to_all(received, parts, among);
    const std::string call = describe_all_to_all(received, parts, among) + " on cuda";
    const size_t element = dtype_size(parts.dtype()),
                 width = static_cast<size_t>(parts.dim(1)) * element,
                 stride = static_cast<size_t>(parts.strides()[0]) * element;
    enqueue(call, parts.numel(), [&](cudaStream_t queue) {
      ncclResult_t result = ncclGroupStart();
      for (int i = 0; i < among.count && is_started(result); ++i) {
        const auto row = static_cast<size_t>(i);
        const int peer = among.member(rank(), i);
        result = ncclSend(static_cast<const char*>(parts.raw()) + row * stride, width, ncclUint8,
                          peer, comm_, queue);
        if (is_started(result))
          result = ncclRecv(static_cast<char*>(received.raw()) + row * width, width, ncclUint8,
                            peer, comm_, queue);
      }
      const ncclResult_t end = ncclGroupEnd();
      return is_started(result) ? end : result;
    });
  }

  void all_gather(Tensor& all) override {
    if (all.device().is_cpu()) return host_->all_gather(all);
    const std::string call = describe_all_gather(all, size()) + " on cuda";
    const size_t width = static_cast<size_t>(all.dim(1)) * dtype_size(all.dtype());
    enqueue(call, all.numel(), [&](cudaStream_t queue) {
      char* const rows = static_cast<char*>(all.raw());
      return ncclAllGather(rows + static_cast<size_t>(rank()) * width, rows, width, ncclUint8,
                           comm_, queue);
    });
  }

  void barrier() override { host_->barrier(); }

 private:
  static bool is_started(ncclResult_t result) {
    return result == ncclSuccess || result == ncclInProgress;
  }

  // Records the call, and enqueues it on the current stream by `start`, called with `mutex_` held,
  // unless it has no elements.
  template <class Start>
  void enqueue(const std::string& call, int64_t elements, const Start& start) {
    const uint64_t number = group_.record_call(call);
    if (elements == 0) return;
    const cudaStream_t queue = stream(device_);
    DeviceCall& device_call = begin_call(number);
    ncclResult_t result = ncclRemoteError;
    {
      std::lock_guard lock(mutex_);
      if (comm_ != nullptr) result = start(queue);
    }
    await(call, result, kNoLimit);
    std::lock_guard lock(calls_mutex_);
    device_call.end.record(current_stream(device_));
    device_call.is_enqueued = true;
  }

  DeviceCall& begin_call(uint64_t number) {
    std::lock_guard lock(calls_mutex_);
    if (free_.empty()) free_.push_back(std::make_unique<DeviceCall>(device_));
    calls_.push_back(std::move(free_.back()));
    free_.pop_back();
    calls_.back()->number = number;
    calls_.back()->is_enqueued = false;
    calls_.back()->begin.record(current_stream(device_));
    return *calls_.back();
  }

  // Watches NCCL and the device: its asynchronous errors, and which calls are completed. The driver
  // may block this thread, which must not be the group's.
  void poll(const std::stop_token& stop) {
    activate(device_);
    while (!stop.stop_requested()) {
      if (has_failed()) return;
      std::unique_lock lock(calls_mutex_);
      for (; !calls_.empty() && calls_.front()->is_enqueued && calls_.front()->end.is_reached();
           calls_.pop_front())
        free_.push_back(std::move(calls_.front()));
      const DeviceCall* first = calls_.empty() ? nullptr : calls_.front().get();
      group_.set_device_call(first == nullptr ? 0 : first->number,
                             first != nullptr && first->begin.is_reached());
      woken_.wait_for(lock, stop, kPoll, [] { return false; });
    }
  }

  // Reports an asynchronous error to the group, which may know better which rank has failed.
  bool has_failed() {
    std::unique_lock lock(mutex_);
    ncclResult_t result = ncclSuccess;
    if (comm_ == nullptr || ncclCommGetAsyncError(comm_, &result) != ncclSuccess ||
        result == ncclSuccess || result == ncclInProgress)
      return false;
    const std::string details = ncclGetLastError(comm_);
    lock.unlock();
    if (group_.wait_for_failure(kFailureWait).empty())
      group_.fail(str("NCCL: ", ncclGetErrorString(result), ": ", details,
                      "; hint: NCCL_DEBUG=WARN shows details"));
    return true;
  }

  // Waits until NCCL has enqueued the call, not for the device.
  void await(std::string_view call, ncclResult_t result, milliseconds limit) {
    const auto start = steady_clock::now();
    for (int i = 0; result == ncclInProgress; ++i) {
      if (i < 100) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        if (limit != kNoLimit) note_progress();  // which has a limit of its own
        // The failure handler may have run before there was a communicator to abort.
        if (!group_.failure().empty()) fail(call, ncclRemoteError);
      }
      if (limit != kNoLimit && steady_clock::now() - start > limit)
        throw Error(str("[", call, "] NCCL was not ready after ", limit.count() / 1000, " s",
                        "; hint: NCCL_DEBUG=INFO shows what it waits for"));
      std::lock_guard lock(mutex_);
      const ncclResult_t asked =
          comm_ == nullptr ? ncclRemoteError : ncclCommGetAsyncError(comm_, &result);
      if (asked != ncclSuccess) result = asked;
    }
    if (result != ncclSuccess) fail(call, result);
  }

  [[noreturn]] void fail(std::string_view call, ncclResult_t result) {
    const std::string_view op = call.substr(0, call.find(' '));
    // NCCL often notices a broken connection first, but only the group knows which rank failed.
    if (result == ncclRemoteError || result == ncclSystemError)
      if (const std::string failure = group_.wait_for_failure(kFailureWait); !failure.empty())
        throw PeerError(str("[", op, "] ", failure));
    std::string details;
    {
      std::lock_guard lock(mutex_);
      if (comm_ != nullptr) details = ncclGetLastError(comm_);
    }
    throw Error(str("[", op, "] NCCL: ", ncclGetErrorString(result), details.empty() ? "" : ": ",
                    details, "; hint: NCCL_DEBUG=WARN shows details"));
  }

  // Aborts pending calls; may be called from any thread.
  void abort() {
    std::unique_lock lock(mutex_, kAbortWait);
    if (!lock.owns_lock() || comm_ == nullptr) return;
    const ncclComm_t comm = std::exchange(comm_, nullptr);
    lock.unlock();
    ncclCommAbort(comm);
  }

  // Completes the last collectives on all ranks. Returns false on failure.
  bool finalize() {
    ncclResult_t result = ncclCommFinalize(comm_);
    const auto end = steady_clock::now() + kFinalizeLimit;
    while (result == ncclInProgress && steady_clock::now() < end && group_.failure().empty()) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      if (ncclCommGetAsyncError(comm_, &result) != ncclSuccess) return false;
    }
    return result == ncclSuccess;
  }

  ProcessGroup& group_;
  const Device device_;
  const std::unique_ptr<Communicator> host_;
  std::timed_mutex mutex_;  // held during NCCL calls, so that abort() does not interrupt one
  ncclComm_t comm_ = nullptr;
  std::deque<std::unique_ptr<DeviceCall>> calls_;  // not known to be completed
  std::vector<std::unique_ptr<DeviceCall>> free_;  // to be reused
  std::mutex calls_mutex_;                         // protects both
  std::condition_variable_any woken_;
  std::jthread poller_;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(ProcessGroup& group, Device device,
                                                     std::unique_ptr<Communicator> host) {
  return std::make_unique<NcclCommunicator>(group, device, std::move(host));
}

}  // namespace cohort::cuda
