// Sums gradients over ranks in fixed buckets, each as soon as all its gradients are final.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "distributed/communicator.h"
#include "distributed/side_stream.h"

namespace cohort {

// The contiguous storage [n] of the gradients of neighbouring parameters; ends[i] is the end offset
// of the i-th of them.
struct GradientBuffer {
  Tensor all;
  std::vector<int64_t> ends;
};

// Sums the gradients of one update. Buckets follow the parameter order from the last to the first
// (the order in which the backward completes them), do not cross buffers, and hold at most
// `bucket_bytes` (a larger gradient has its own bucket). They depend on sizes only, and every rank
// reduces them in the same fixed order, whatever the order in which gradients become ready.
//
// On CUDA buckets are reduced on a side stream: a bucket starts once it is complete, overlapping
// with the rest of the backward; after finish() the current stream waits for all of them.
class GradReducer {
 public:
  // `buffers`, in the order of the parameters, are reduced in place. `side` is null on the CPU, and
  // must outlive the reducer. With one rank only the arguments are checked.
  GradReducer(Communicator& comm, SideStream* side, std::vector<GradientBuffer> buffers,
              int64_t bucket_bytes = int64_t{25} << 20);
  // Marks gradient i, counted over all buffers, as final. Throws Error if called twice.
  void mark_ready(int64_t i);
  // Reduces the remaining buckets (a rank without work marks none); called once.
  void finish();

 private:
  struct Bucket {
    Tensor part;
    int64_t pending = 0;  // gradients that are not final
  };
  void reduce(Bucket& bucket);

  Communicator& comm_;
  SideStream* const side_;
  std::vector<Bucket> buckets_;
  std::vector<size_t> bucket_of_;
  std::vector<bool> ready_;
  size_t next_bucket_ = 0;
};

}  // namespace cohort
