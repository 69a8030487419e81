// Every rank must issue the same all_reduce calls in the same order, so a bucket that is complete
// waits for its predecessors.
#include "distributed/grad_reducer.h"

#include <algorithm>
#include <utility>

#include "core/with_cuda.h"

namespace cohort {
GradReducer::GradReducer(Communicator& comm, Tensor gradients, const std::vector<int64_t>& ends,
                         int64_t bucket_bytes)
    : comm_(comm), gradients_(std::move(gradients)), bucket_of_(ends.size()), ready_(ends.size()) {
  COHORT_CHECK(bucket_bytes > 0, "[grad_reducer] expected a positive bucket size, got ",
               bucket_bytes);
  COHORT_CHECK(gradients_.defined() && gradients_.is_contiguous() &&
                   gradients_.numel() == (ends.empty() ? 0 : ends.back()) &&
                   std::is_sorted(ends.begin(), ends.end()),
               "[grad_reducer] expected one contiguous buffer of gradients, got ",
               gradients_.str());
  const int64_t max_numel = bucket_bytes / dtype_size(gradients_.dtype());
  for (size_t i = ends.size(); i-- > 0;) {
    const int64_t begin = i == 0 ? 0 : ends[i - 1];
    if (buckets_.empty() || buckets_.back().end - begin > max_numel)
      buckets_.push_back({.end = ends[i]});
    buckets_.back().begin = begin;
    ++buckets_.back().members;
    bucket_of_[i] = buckets_.size() - 1;
  }
  const Device device = gradients_.device();
  if (comm_.size() > 1)
    side_ = on_device<[](Device) { return std::unique_ptr<SideStream>(); }, cuda::make_side_stream>(
        device, device);
  for (Bucket& bucket : buckets_) bucket.pending = bucket.members;
}

void GradReducer::mark_ready(int64_t i) {
  COHORT_CHECK(i >= 0 && i < static_cast<int64_t>(ready_.size()), "[grad_reducer] gradient ", i,
               " of ", ready_.size());
  COHORT_CHECK(!ready_[i], "[grad_reducer] gradient ", i, " is marked ready twice in a step");
  ready_[i] = true;
  --buckets_[bucket_of_[i]].pending;
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].pending == 0)
    reduce(buckets_[next_bucket_++]);
}

void GradReducer::finish() {
  while (next_bucket_ < buckets_.size()) reduce(buckets_[next_bucket_++]);
  if (side_) side_->wait();
  next_bucket_ = 0;
  ready_.assign(ready_.size(), false);
  for (Bucket& bucket : buckets_) bucket.pending = bucket.members;
}

void GradReducer::reduce(const Bucket& bucket) {
  if (comm_.size() == 1) return;
  Tensor part = gradients_.narrow(0, bucket.begin, bucket.end - bucket.begin);
  const auto sum = [&] { comm_.all_reduce(part); };
  if (side_)
    side_->run(sum);
  else
    sum();
}

}  // namespace cohort
