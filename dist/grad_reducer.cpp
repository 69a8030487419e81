// The contract is in the header. What matters here: every rank must issue the same all_reduce calls
// in the same order, so a bucket that is full early waits for the ones before it.
#include "dist/grad_reducer.h"

#include <utility>

namespace cohort {

GradReducer::GradReducer(Communicator& comm, std::vector<Tensor> gradients, int64_t bucket_bytes)
    : comm_(comm),
      gradients_(std::move(gradients)),
      bucket_of_(gradients_.size()),
      ready_(gradients_.size()) {
  COHORT_CHECK(bucket_bytes > 0, "[grad_reducer] expected a positive bucket size, got ",
               bucket_bytes);
  check_gradients();
  int64_t filled = 0;
  for (int64_t i = static_cast<int64_t>(gradients_.size()) - 1; i >= 0; --i) {
    const Tensor& gradient = gradients_[i];
    const bool fits = !buckets_.empty() && filled + gradient.nbytes() <= bucket_bytes &&
                      gradient.dtype() == gradients_[buckets_.back().members[0]].dtype();
    if (!fits) {
      buckets_.emplace_back();
      filled = 0;
    }
    filled += gradient.nbytes();
    buckets_.back().members.push_back(i);
    bucket_of_[i] = num_buckets() - 1;
  }
  if constexpr (kWithCuda) {
    if (comm_.size() > 1 && !gradients_.empty() && gradients_[0].device().is_cuda())
      side_ = cuda::make_side_stream(gradients_[0].device());
  }
  for (Bucket& bucket : buckets_) {
    bucket.pending = static_cast<int64_t>(bucket.members.size());
    const Tensor& first = gradients_[bucket.members[0]];
    // A gradient that is alone in its bucket is reduced where it is.
    if (comm_.size() == 1 || side_ || (bucket.members.size() == 1 && first.is_contiguous()))
      continue;
    int64_t n = 0;
    for (const int64_t i : bucket.members) n += gradients_[i].numel();
    bucket.flat = Tensor::empty({n}, first.dtype(), first.device());
  }
}

void GradReducer::check_gradients() const {
  for (size_t i = 0; i < gradients_.size(); ++i) {
    const Tensor& gradient = gradients_[i];
    COHORT_CHECK(gradient.defined(), "[grad_reducer] gradient ", i, " is undefined");
    COHORT_CHECK(gradient.device() == gradients_[0].device(),
                 "[grad_reducer] expected gradients on one device, got ", gradient.str(), " and ",
                 gradients_[0].str());
  }
}

void GradReducer::mark_ready(int64_t i) {
  COHORT_CHECK(i >= 0 && i < static_cast<int64_t>(gradients_.size()), "[grad_reducer] gradient ", i,
               " of ", gradients_.size());
  COHORT_CHECK(!ready_[i], "[grad_reducer] gradient ", i, " is marked ready twice in a step");
  ready_[i] = true;
  --buckets_[bucket_of_[i]].pending;
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].pending == 0)
    reduce(buckets_[next_bucket_++]);
}

void GradReducer::finish() {
  while (next_bucket_ < buckets_.size()) reduce(buckets_[next_bucket_++]);
  if (side_) side_->join();
  next_bucket_ = 0;
  ready_.assign(ready_.size(), false);
  for (Bucket& bucket : buckets_) bucket.pending = static_cast<int64_t>(bucket.members.size());
}

void GradReducer::reduce(Bucket& bucket) {
  if (comm_.size() == 1) return;
  if (side_) {
    std::vector<Tensor> members;
    for (const int64_t i : bucket.members) members.push_back(gradients_[i]);
    side_->run([&] { comm_.all_reduce_many(members); });
    return;
  }
  if (!bucket.flat.defined()) {
    comm_.all_reduce(gradients_[bucket.members[0]]);
    return;
  }
  auto for_each_part = [&](auto&& fn) {
    int64_t at = 0;
    for (const int64_t i : bucket.members) {
      Tensor& gradient = gradients_[i];
      Tensor part = bucket.flat.narrow(0, at, gradient.numel()).reshape(gradient.shape());
      fn(gradient, part);
      at += gradient.numel();
    }
  };
  for_each_part([](Tensor& gradient, Tensor& part) { part.copy_(gradient); });
  comm_.all_reduce(bucket.flat);
  for_each_part([](Tensor& gradient, Tensor& part) { gradient.copy_(part); });
}

}  // namespace cohort
