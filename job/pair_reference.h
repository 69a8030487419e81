// The reference log-probs of a stage's preference pairs (dpo), computed once, before the first update.
// No reference model is held beside the policy: the file DIR/pair_reference has two numbers for each
// pair that the stage draws.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "job/config.h"

namespace cohort {

// By the index of a pair among the training pairs (checksum 0: the stage does not draw it), and among
// the held-out ones.
struct PairReferences {
  std::vector<PairReference> train, held_out;
};

struct PairReferenceSetup {
  const TrainConfig& config;
  const Dataset& data;       // after check_data()
  const Transformer& model;  // the policy, which is the reference until the first update
  Communicator& comm;
  std::string dir;                         // of the stage
  std::span<const int64_t> planned_steps;  // as make_order()
  int64_t step = 0, position = 0;          // of the next step, in the stage and in the data
  // The model that the stage has begun with, where the policy is not it any more; else null.
  std::function<std::unique_ptr<Transformer>()> load_start = nullptr;
};
// Computes the log-probs and writes the file. A resumed stage (with load_start) reads it, and computes
// them again only if the file is damaged or lacks a pair. Empty with preference.reference: none.
// Every rank calls it. Throws what load_start() throws.
PairReferences pair_references(const PairReferenceSetup& setup);
// The references of the held-out pairs of `data` by the file of a stage, for evaluation alone. Throws
// InputError if there is no file, or it lacks one of them.
PairReferences held_out_references(const TrainConfig& config, const Dataset& data,
                                   const Transformer& model, const std::string& dir);

// pair_sequences() of a stage's pair. Throws InputError naming it if `reference`, unless null, is
// that of other tokens.
std::array<TokenSequence, 2> checked_pair(const DataConfig& config, const Dataset& data,
                                          const Example& example, int64_t context, int64_t index,
                                          const PairReference* reference);

// Scores of the held-out pairs: "accuracy" and "rewards/margins" by the rewards, "val_loss". Empty
// if nothing is held out.
Metrics evaluate_pairs(const TrainConfig& config, const Dataset& data, const Scoring& scoring,
                       const PairReferences& references, Communicator& comm);

}  // namespace cohort
