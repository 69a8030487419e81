// Shared by the task files: one constant per task for the table in data/tasks.cpp.
#pragma once

#include <string>
#include <string_view>

#include "data/example.h"

namespace cohort {

extern const Task kAdditionTask, kArithmeticTask, kCountdownTask, kParityTask, kReverseTask,
    kSortTask;

// Checkers ignore spaces and line breaks around an answer.
std::string_view trimmed(std::string_view text);
// 1 if the completion is the answer.
double check_answer(const Example& example, std::string_view completion);
// `size` lowercase letters.
std::string random_letters(Rng& rng, int64_t size);

}  // namespace cohort
