// Whether the data of a run fit its model and its keys.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "trainers/dataset.h"

namespace cohort {

// Tokens of the shortest and the longest prompt, and of what is trained on: a window of text;
// prompt, solution and end of sequence (sft); the prompt (grpo).
struct DataLengths {
  int64_t shortest_prompt = 0, longest_prompt = 0, longest_sequence = 0;
  double mean_sequence = 0;
  std::string too_long;  // what became of problems that are too long; empty: there are none
  // Notes on the data for the user, each with the key that it is about.
  std::vector<std::string> notes;
};
// Makes the data fit a model's context, so that a bad example is an error now and not in the middle
// of a run: all of a finite set, the first 1,000 problems of an endless one. Problems that are too
// long are cut or left out as config.data.too_long says; of the held-out problems config.eval.size
// stay, those whose hashes are the smallest. Throws InputError naming the first example that is
// empty, has a character without a token, or nothing that would be learned; the longest that is too
// long; the text if it is shorter than a window; or a key: one that holds everything out, or one of
// sampling that asks for what cannot be.
DataLengths check_data(const TrainConfig& config, Dataset& data, int64_t context);
// The same for the held-out problems alone, where nothing is to be trained.
DataLengths check_held_out(const TrainConfig& config, Dataset& data, int64_t context);

// Counts the held-out problems of `data` that are trained on, by its stage or by an earlier one,
// and names the first of them; empty: none. Two problems are the same if their ExampleId says so.
// An earlier stage whose files are gone is left out.
std::string held_out_leak(const Dataset& data, std::span<const TrainConfig> earlier);

// Logs which problems are used where that is not all or not as many as asked for, and the notes.
void log_what_is_used(const TrainConfig& config, const Dataset& data, const DataLengths& lengths);

}  // namespace cohort
