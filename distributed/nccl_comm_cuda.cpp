// NCCL backend of Communicator. The NCCL communicator is non-blocking: no call waits for another
// rank, so this rank can always be notified of a failed one. The group's failure handler then
// aborts the communicator from its own thread, and pending kernels return.
#include <nccl.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

#include "core/cuda.h"
#include "distributed/communicator.h"
#include "distributed/process_group.h"

namespace cohort::cuda {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kNoLimit{0};
constexpr milliseconds kInitLimit{300000}, kFinalizeLimit{10000};
constexpr milliseconds kAbortWait{2000};    // for a call in progress; then abort() gives up
constexpr milliseconds kFailureWait{3000};  // for the group to determine which rank has failed

ncclDataType_t type_of(DType dtype) {
  if (dtype == DType::kF64) return ncclFloat64;
  if (dtype == DType::kI32) return ncclInt32;
  return dtype == DType::kI64 ? ncclInt64 : ncclFloat32;  // also for bf16, which is converted
}

// Pins one algorithm and protocol unless the user has set others, so that the summation order
// depends on the size, the ranks and the machine, not on NCCL's tuning. In-network reduction (NVLS)
// is disabled.
void pin_algorithms() {
  static std::once_flag once;
  std::call_once(once, [] {
    for (const auto& [name, value] :
         {std::pair{"NCCL_ALGO", "Ring"}, {"NCCL_PROTO", "Simple"}, {"NCCL_NVLS_ENABLE", "0"}})
      ::setenv(name, value, /*overwrite=*/0);
  });
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(ProcessGroup& group, Device device, std::unique_ptr<Communicator> host)
      : group_(group), device_(device), host_(std::move(host)) {
    pin_algorithms();
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
    } catch (...) {
      group_.set_failure_handler({});
      abort();
      throw;
    }
  }

  ~NcclCommunicator() override {
    group_.set_failure_handler({});
    if (comm_ == nullptr) return;
    if (std::uncaught_exceptions() == 0 && group_.failure().empty() && finalize())
      ncclCommDestroy(comm_);
    else
      ncclCommAbort(comm_);
  }

  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }

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
    group_.record_call(call);
    if (t.numel() == 0) return;
    const cudaStream_t queue = stream(device_);
    ncclResult_t result = ncclRemoteError;
    {
      std::lock_guard lock(mutex_);
      if (comm_ != nullptr)
        result = ncclAllReduce(t.raw(), t.raw(), static_cast<size_t>(t.numel()), type_of(t.dtype()),
                               op == Reduce::kMax ? ncclMax : ncclSum, comm_, queue);
    }
    await(call, result, kNoLimit);
  }

  void barrier() override { host_->barrier(); }

 private:
  // Waits until NCCL has enqueued the call, not for the device.
  void await(std::string_view call, ncclResult_t result, milliseconds limit) {
    const auto start = steady_clock::now();
    for (int i = 0; result == ncclInProgress; ++i) {
      if (i < 100) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
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
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(ProcessGroup& group, Device device,
                                                     std::unique_ptr<Communicator> host) {
  return std::make_unique<NcclCommunicator>(group, device, std::move(host));
}

}  // namespace cohort::cuda
