// Sums gradients over ranks in fixed buckets, each as soon as all its gradients are final.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "distributed/communicator.h"
#include "distributed/side_stream.h"

namespace cohort {

// Buckets follow the parameter order from the last to the first (the order in which the backward
// completes them) and hold at most `bucket_bytes` (a larger gradient has its own bucket). They
// depend on sizes only, and every rank reduces them in the same fixed order, whatever the order in
// which gradients become ready.
//
// On CUDA buckets are reduced on a side stream: a bucket starts once it is complete, overlapping
// with the rest of the backward; after finish() the current stream waits for all of them.
class GradReducer {
 public:
  // `gradients`: [n], the concatenated gradients of all parameters, reduced in place; ends[i] is
  // the end offset of parameter i. With one rank only the arguments are checked.
  GradReducer(Communicator& comm, Tensor gradients, const std::vector<int64_t>& ends,
              int64_t bucket_bytes = int64_t{25} << 20);
  // Marks gradient i as final for this step. Throws Error if called twice in a step.
  void mark_ready(int64_t i);
  // Reduces the remaining buckets (a rank without work marks none) and resets for the next step.
  void finish();

 private:
  struct Bucket {
    int64_t begin = 0, end = 0;  // elements
    int64_t members = 0, pending = 0;
  };
  void reduce(const Bucket& bucket);

  Communicator& comm_;
  Tensor gradients_;
  std::vector<Bucket> buckets_;
  std::vector<size_t> bucket_of_;
  std::vector<bool> ready_;
  size_t next_bucket_ = 0;
  std::unique_ptr<SideStream> side_;
};

}  // namespace cohort
