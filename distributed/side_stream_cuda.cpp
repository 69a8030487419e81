// Side streams of CUDA devices, ordered with the current stream by events.
#include "distributed/side_stream.h"

#include "core/cuda.h"

namespace cohort::cuda {
namespace {

class CudaSideStream final : public SideStream {
 public:
  explicit CudaSideStream(Device device)
      : device_(device),
        stream_(device, OwnedStream::Priority::kHighest),  // not after blocks of queued kernels
        ready_(device),
        done_(device) {}

  void run(const std::function<void()>& work) override {
    ready_.record(current_stream(device_));
    ready_.wait(stream_.get());
    const StreamGuard guard(stream_.get());
    work();
  }
  void wait() override {
    done_.record(stream_.get());
    done_.wait(current_stream(device_));
  }

 private:
  const Device device_;
  OwnedStream stream_;
  Event ready_, done_;
};

}  // namespace

std::unique_ptr<SideStream> make_side_stream(Device device) {
  return std::make_unique<CudaSideStream>(device);
}

}  // namespace cohort::cuda
