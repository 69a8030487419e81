// Every rank must issue the same all_reduce calls in the same order, so a bucket that is complete
// waits for its predecessors.
#include "distributed/grad_reducer.h"

#include <algorithm>
#include <utility>

namespace cohort {

GradReducer::GradReducer(Communicator& comm, SideStream* side, std::vector<GradientBuffer> buffers,
                         int64_t bucket_bytes)
    : comm_(comm), side_(side) {
  COHORT_CHECK(bucket_bytes > 0, "[grad_reducer] expected a positive bucket size, got ",
               bucket_bytes);
  for (const auto& [all, ends] : buffers) {
    COHORT_CHECK(all.defined() && all.is_contiguous() &&
                     all.numel() == (ends.empty() ? 0 : ends.back()) &&
                     std::is_sorted(ends.begin(), ends.end()),
                 "[grad_reducer] expected contiguous buffers of gradients, got ", all.str());
    ready_.resize(ready_.size() + ends.size());
  }
  bucket_of_.resize(ready_.size());
  size_t parameter = ready_.size();
  for (auto buffer = buffers.rbegin(); buffer != buffers.rend(); ++buffer) {
    const auto& [all, ends] = *buffer;
    const int64_t max_numel = bucket_bytes / static_cast<int64_t>(dtype_size(all.dtype()));
    int64_t bucket_end = -1;  // none yet
    for (size_t i = ends.size(); i-- > 0;) {
      const int64_t begin = i == 0 ? 0 : ends[i - 1];
      if (bucket_end < 0 || bucket_end - begin > max_numel) {
        bucket_end = ends[i];
        buckets_.push_back({});
      }
      buckets_.back().part = all.narrow(0, begin, bucket_end - begin);
      ++buckets_.back().pending;
      bucket_of_[--parameter] = buckets_.size() - 1;
    }
  }
}

void GradReducer::mark_ready(int64_t i) {
  COHORT_CHECK(i >= 0 && i < static_cast<int64_t>(ready_.size()), "[grad_reducer] gradient ", i,
               " of ", ready_.size());
  const auto index = static_cast<size_t>(i);
  COHORT_CHECK(!ready_[index], "[grad_reducer] gradient ", i, " is marked ready twice");
  ready_[index] = true;
  --buckets_[bucket_of_[index]].pending;
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].pending == 0)
    reduce(buckets_[next_bucket_++]);
}

void GradReducer::finish() {
  while (next_bucket_ < buckets_.size()) reduce(buckets_[next_bucket_++]);
  if (side_ != nullptr) side_->wait();
}

void GradReducer::reduce(Bucket& bucket) {
  if (comm_.size() == 1) return;
  const auto sum = [&] { comm_.all_reduce(bucket.part); };
  if (side_ != nullptr)
    side_->run(sum);
  else
    sum();
}

}  // namespace cohort
