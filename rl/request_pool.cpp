#include "rl/request_pool.h"

#include <utility>

#include "core/progress.h"

namespace cohort {

int64_t AnswerBox::begin() {
  const std::lock_guard lock(mutex_);
  ++num_unanswered_;
  return num_begun_++;
}

std::vector<RequestPool::Answer> AnswerBox::take(RequestPool::Wait wait) {
  using Wait = RequestPool::Wait;
  std::unique_lock lock(mutex_);
  answered_.wait(lock, [&] {
    return num_unanswered_ == 0 || failure_ || wait == Wait::kNone ||
           (wait == Wait::kOne && !answers_.empty());
  });
  if (failure_) std::rethrow_exception(failure_);
  std::vector<RequestPool::Answer> out;
  for (auto& [number, answer] : std::exchange(answers_, {})) out.push_back(std::move(answer));
  return out;
}

void AnswerBox::cancel() {
  const std::lock_guard lock(mutex_);
  answers_.clear();
  num_unanswered_ = 0;
  num_cancelled_ = num_begun_;
}

bool AnswerBox::is_cancelled(int64_t number) const {
  const std::lock_guard lock(mutex_);
  return number < num_cancelled_;
}

void AnswerBox::set(int64_t number, RequestPool::Answer answer) {
  const std::lock_guard lock(mutex_);
  if (number < num_cancelled_) return;
  answers_[number] = std::move(answer);
  note_progress();
  --num_unanswered_;
  answered_.notify_all();
}

void AnswerBox::fail() {
  const std::lock_guard lock(mutex_);
  failure_ = std::current_exception();
  answered_.notify_all();
}

}  // namespace cohort
