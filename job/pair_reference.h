// The reference log-probs of a stage's preference pairs (dpo), computed once, before the first
// update: no reference model is held beside the policy. The file DIR/pair_reference has two numbers
// for each pair that the stage draws or holds out.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "job/config.h"

namespace cohort {

struct ModelStart;
struct StageSetup;

// By a checksum of preference.reference and of the tokens and loss masks of both answers. Empty:
// preference.reference is none.
using PairReferences = std::map<double, PairReference>;

// Computes them with the model of a new stage, and writes the file. A stage that is resumed reads
// it, and adds pairs that it lacks with load_start(): the model that the stage has begun with.
// Throws InputError if the file is missing or damaged, or if that model gives other log-probs for
// pairs that it has. Every rank calls it.
PairReferences pair_references(const StageSetup& setup, const ModelStart& start,
                               const std::function<std::unique_ptr<Transformer>()>& load_start);
// Reads the file of a stage. Throws InputError if it cannot be used.
PairReferences read_pair_references(const std::string& dir, const PreferenceConfig& config);

// That of the pair_sequences() of a pair; zeros if preference.reference is none. Throws InputError
// if it is not known.
PairReference reference_of(const PreferenceConfig& config, const PairReferences& references,
                           std::span<const TokenSequence> answers);

// Scores of the held-out pairs: "accuracy" and "rewards/margins" by the rewards, "val_loss". Empty
// if nothing is held out.
Metrics evaluate_pairs(const TrainConfig& config, const Dataset& data, const Scoring& scoring,
                       const PairReferences& references, Communicator& comm);

}  // namespace cohort
