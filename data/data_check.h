// Checks that the data of a run fit its model and its configuration.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/dataset.h"

namespace cohort {

// Lengths in tokens of the shortest and the longest prompt, and of the training sequences: a window
// of text; prompt, solution and end of sequence (sft); the prompt (grpo).
struct DataLengths {
  int64_t shortest_prompt = 0, longest_prompt = 0, longest_sequence = 0;
  double mean_sequence = 0;
  std::string too_long;  // treatment of the problems that are too long; empty: there are none
  // Notes on the data for the user, each naming the key it concerns.
  std::vector<std::string> notes;
};
// Fits the data to a model's context and validates them before the run: all of a finite set, the
// first 1,000 problems of an endless one. Problems that are too long are truncated or skipped
// according to config.data.too_long; of the held-out problems the config.eval_size with the
// smallest hashes are kept. Throws InputError naming the first example that is empty, has a
// character without a token or no target tokens; the longest that is too long; the text if it is
// shorter than a window; or the key that holds everything out.
// `limit`: what messages advise about the context. kWholeModel: the model has no larger one.
enum class ContextLimit : uint8_t { kMayGrow, kWholeModel };
DataLengths check_data(const DataSections& config, Dataset& data, int64_t context,
                       ContextLimit limit = ContextLimit::kMayGrow);
// Checks only the held-out problems, for evaluation without training.
DataLengths check_held_out(const DataSections& config, Dataset& data, int64_t context,
                           ContextLimit limit = ContextLimit::kMayGrow);

// The hint of a message about a sequence that is too long: a larger context, where there may be
// one, or `otherwise`.
std::string context_hint(ContextLimit limit, const std::string& otherwise);

// Counts the held-out problems of `data` that are trained on, by its stage or by an earlier one,
// and names the first of them; empty: none. Problems are identified by their ExampleId. Earlier
// stages whose files no longer exist are skipped.
std::string held_out_leak(const Dataset& data, const std::vector<DataSections>& earlier);

// Logs the number of problems used, if it is not all or not as many as requested, and the notes.
void log_data_usage(const DataSections& config, const Dataset& data, const DataLengths& lengths);

}  // namespace cohort
