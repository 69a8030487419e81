// Copies of optimizer state between the host and three device buffers, on two streams.
#include <deque>

#include "core/cuda.h"
#include "trainers/host_state.h"

namespace cohort::cuda {
namespace {

class StreamCopies final : public BufferCopies {
 public:
  StreamCopies(Device device, size_t buffers)
      : device_(device), in_(device), out_(device), begin_(device), end_(device) {
    for (size_t i = 0; i < buffers; ++i) buffers_.emplace_back(device);
  }
  ~StreamCopies() override {
    // The host's memory may be freed next.
    for (const OwnedStream* stream : {&in_, &out_})
      cudaStreamSynchronize(static_cast<cudaStream_t>(stream->get().handle));
  }

  void begin() override {
    begin_.record(current_stream(device_));
    begin_.wait(in_.get());
  }
  void in(size_t i, const std::function<void()>& copies) override {
    Buffer& buffer = buffers_[i];
    buffer.is_out.wait(in_.get());
    {
      const StreamGuard guard(in_.get());
      copies();
    }
    buffer.is_in.record(in_.get());
    buffer.is_in.wait(current_stream(device_));
  }
  void out(size_t i, const std::function<void()>& copies) override {
    Buffer& buffer = buffers_[i];
    buffer.is_used.record(current_stream(device_));
    buffer.is_used.wait(out_.get());
    {
      const StreamGuard guard(out_.get());
      copies();
    }
    buffer.is_out.record(out_.get());
  }
  void end() override {
    end_.record(out_.get());
    end_.wait(current_stream(device_));
  }
  void synchronize() override { end_.synchronize(); }

 private:
  struct Buffer {
    explicit Buffer(Device device) : is_in(device), is_used(device), is_out(device) {}
    Event is_in, is_used, is_out;
  };

  const Device device_;
  OwnedStream in_, out_;
  Event begin_, end_;
  std::deque<Buffer> buffers_;
};

}  // namespace

std::unique_ptr<BufferCopies> make_buffer_copies(Device device, size_t buffers) {
  return std::make_unique<StreamCopies>(device, buffers);
}

}  // namespace cohort::cuda
