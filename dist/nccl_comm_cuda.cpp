// NCCL behind Communicator. The NCCL communicator is a non-blocking one: no call of it waits for
// another rank, so this rank can always be told that one has died. The group's failure handler then
// aborts the communicator from its thread, and what waits on the device returns.
#include <nccl.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

#include "core/cuda.h"
#include "dist/nccl_comm.h"

namespace cohort::cuda {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kNoLimit{0};
constexpr milliseconds kInitLimit{300000}, kFinalizeLimit{10000};
constexpr milliseconds kAbortWait{2000};  // for a call in progress, before giving up on an abort
constexpr milliseconds kBlameWait{3000};  // for the group to find out whose fault an error is

ncclDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return ncclFloat64;
    case DType::kI32:
      return ncclInt32;
    case DType::kI64:
      return ncclInt64;
    default:
      return ncclFloat32;  // and bf16, which is converted
  }
}

// One algorithm and one protocol, except where the user has chosen others: the order of summation
// then follows from the size, the ranks and the machine, and not from NCCL's tuning. Switches that
// add in the network (NVLS) stay out.
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

  // Enqueued on the current stream.
  void all_reduce(Tensor& t, Reduce op) override {
    if (t.device().is_cpu()) return host_->all_reduce(t, op);
    const std::string what = describe_all_reduce(t, op) + " on cuda";
    COHORT_CHECK(t.device() == device_, "[all_reduce] this rank's communicator is for ",
                 device_.str(), ", got ", t.str());
    if (t.dtype() == DType::kBF16) {  // NCCL would round at every rank
      Tensor as_f32 = t.to(DType::kF32);
      all_reduce(as_f32, op);
      t.copy_(as_f32);
      return;
    }
    group_.note_call(what);
    if (t.numel() == 0) return;
    const cudaStream_t queue = stream(device_);
    ncclResult_t result = ncclRemoteError;
    {
      std::lock_guard lock(mutex_);
      if (comm_ != nullptr)
        result = ncclAllReduce(t.raw(), t.raw(), static_cast<size_t>(t.numel()), type_of(t.dtype()),
                               op == Reduce::kMax ? ncclMax : ncclSum, comm_, queue);
    }
    await(what, result, kNoLimit);
  }

  void barrier() override { host_->barrier(); }

 private:
  // Waits until NCCL has taken the call in; the device may still be far behind.
  void await(std::string_view what, ncclResult_t result, milliseconds limit) {
    const auto start = steady_clock::now();
    for (int i = 0; result == ncclInProgress; ++i) {
      if (i < 100) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        // The failure handler may have come before there was a communicator to abort.
        if (!group_.failure().empty()) fail(what, ncclRemoteError);
      }
      if (limit != kNoLimit && steady_clock::now() - start > limit)
        throw Error(str("[", what, "] NCCL was not ready after ", limit.count() / 1000, " s",
                        "; hint: NCCL_DEBUG=INFO shows what it waits for"));
      std::lock_guard lock(mutex_);
      const ncclResult_t asked =
          comm_ == nullptr ? ncclRemoteError : ncclCommGetAsyncError(comm_, &result);
      if (asked != ncclSuccess) result = asked;
    }
    if (result != ncclSuccess) fail(what, result);
  }

  [[noreturn]] void fail(std::string_view what, ncclResult_t result) {
    const std::string_view op = what.substr(0, what.find(' '));
    // NCCL often sees a broken connection first, but the group knows whose end it was.
    if (result == ncclRemoteError || result == ncclSystemError)
      if (const std::string failure = group_.wait_for_failure(kBlameWait); !failure.empty())
        throw PeerError(str("[", op, "] ", failure));
    std::string details;
    {
      std::lock_guard lock(mutex_);
      if (comm_ != nullptr) details = ncclGetLastError(comm_);
    }
    throw Error(str("[", op, "] NCCL: ", ncclGetErrorString(result), details.empty() ? "" : ": ",
                    details, "; hint: NCCL_DEBUG=WARN says more"));
  }

  // Ends what is under way, from any thread.
  void abort() {
    std::unique_lock lock(mutex_, kAbortWait);
    if (!lock.owns_lock() || comm_ == nullptr) return;
    const ncclComm_t comm = std::exchange(comm_, nullptr);
    lock.unlock();
    ncclCommAbort(comm);
  }

  // Lets the last collectives end on all ranks; false if they do not.
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
  std::timed_mutex mutex_;  // held during calls of NCCL, so that abort() does not cut into one
  ncclComm_t comm_ = nullptr;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(ProcessGroup& group, Device device,
                                                     std::unique_ptr<Communicator> host) {
  return std::make_unique<NcclCommunicator>(group, device, std::move(host));
}

}  // namespace cohort::cuda
