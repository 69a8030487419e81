// Sums gradients over ranks in fixed buckets, each as soon as all its gradients are final.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "dist/communicator.h"
#include "dist/side_stream.h"

namespace cohort {

// Buckets follow the parameter order from the last to the first (the order in which a backward
// finishes them) and hold at most `bucket_bytes` (a larger gradient has a bucket of its own). They
// depend on sizes only, and are reduced in one fixed order on every rank, whatever order gradients
// become ready in.
//
// On CUDA they are reduced on a stream of the reducer's own: a bucket starts when it is full,
// beside the rest of the backward, and after finish() the current stream goes on when all are done.
class GradReducer {
 public:
  // `gradients`: [n], those of all parameters one after the other, reduced where they are; that of
  // parameter i ends before element ends[i]. With one rank nothing is reduced; the checks stay.
  GradReducer(Communicator& comm, Tensor gradients, const std::vector<int64_t>& ends,
              int64_t bucket_bytes = int64_t{25} << 20);
  // Gradient i is final for this step. Calling it twice in a step throws Error.
  void mark_ready(int64_t i);
  // Reduces what is left (a rank without work marks nothing) and makes ready for the next step.
  void finish();
  int64_t num_buckets() const { return static_cast<int64_t>(buckets_.size()); }

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
