#include "job/pair_reference.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "core/log.h"
#include "core/progress.h"
#include "data/parallel_try.h"
#include "job/model_start.h"
#include "sys/files.h"
#include "trainers/across_ranks.h"

namespace cohort {
namespace {

using Pair = std::array<TokenSequence, 2>;

// Exact as a double.
double pair_checksum(const Pair& pair) {
  uint64_t sum = 0;
  const auto add = [&](const auto& values) {
    sum = checksum(
        {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0])}, sum);
  };
  for (const TokenSequence& answer : pair) {
    add(answer.tokens);
    add(answer.loss_mask);
  }
  return static_cast<double>(sum >> 11);
}

// ---- The file: a checksum, a line that names the format and the reference, and a record for each
// pair.

struct Record {
  double checksum, chosen, rejected;
};
std::string file_of(const std::string& dir) {
  return dir + "/pair_reference";
}
std::string header(const PreferenceConfig& config) {
  return str("\ncohort pair reference 1, ", entry_of(kPairReferenceTypes, config.reference).name,
             "\n");
}

void write(const std::string& dir, const PreferenceConfig& config,
           const PairReferences& references) {
  std::string text = header(config);
  for (const auto& [sum, pair] : references) {
    const Record record{sum, pair.chosen, pair.rejected};
    text.append(reinterpret_cast<const char*>(&record), sizeof record);
  }
  replace_file(file_of(dir), hex(checksum(text)) + text);
}

// Adds the file's pairs to `out`. Returns the reason why it cannot be used; "": it was.
std::string read(const std::string& dir, const PreferenceConfig& config, PairReferences& out) {
  if (!path_exists(file_of(dir))) return "is missing";
  const std::string text = read_text_file(file_of(dir)), head = header(config);
  const auto begin = std::min<size_t>(text.size(), 16);  // end of the checksum
  if (text.substr(0, begin) != hex(checksum(std::string_view(text).substr(begin))))
    return "is damaged";
  if (text.compare(begin, head.size(), head) != 0)
    return "has another preference.reference, or another format";
  for (size_t at = begin + head.size(); at + sizeof(Record) <= text.size(); at += sizeof(Record)) {
    Record record;
    std::memcpy(&record, text.data() + at, sizeof record);
    out[record.checksum] = {record.chosen, record.rejected};
  }
  return "";
}

// ---- The pairs of a stage

// The training pairs that the rest of the stage draws, then the held-out ones.
class StagePairs {
 public:
  explicit StagePairs(const StageSetup& setup, const ModelStart& start)
      : config_(setup.config), start_(start) {
    MixedOrder order = make_order(config_, start.data, start.state.planned_steps);
    order.seek(start.state.data_position);
    std::vector<bool> drawn(static_cast<size_t>(start.data.train->size()));
    size_t left = drawn.size();
    int64_t draws = (config_.batch.steps - start.state.step) * config_.batch.batch_size;
    for (; draws > 0 && left > 0; --draws) {
      const auto i = static_cast<size_t>(order.next());
      left -= !drawn[i];
      drawn[i] = true;
    }
    for (size_t i = 0; i < drawn.size(); ++i)
      if (drawn[i]) train_.push_back(static_cast<int64_t>(i));
  }
  int64_t size() const { return std::ssize(train_) + std::ssize(start_.data.held_out); }
  Pair get(int64_t i) const {
    const bool trained = i < std::ssize(train_);
    const auto k = static_cast<size_t>(trained ? i : i - std::ssize(train_));
    const Dataset& data = start_.data;
    return pair_sequences(trained ? data.train->get(train_[k]) : data.held_out[k], *data.tokenizer,
                          start_.learner->model().config().context, config_.data.too_long, i);
  }

 private:
  const TrainConfig& config_;
  const ModelStart& start_;
  std::vector<int64_t> train_;  // indices
};

// True if every pair has a reference. Each rank checks its share.
bool has_all(const PairReferences& references, const StagePairs& pairs, Communicator& comm) {
  const RankShard shard = shard_of(pairs.size(), comm.rank(), comm.size());
  std::atomic<int64_t> missing{0};
  parallel_try(shard.end - shard.begin, 16, [&](int64_t i) {
    missing += !references.contains(pair_checksum(pairs.get(shard.begin + i)));
  });
  auto all = static_cast<double>(missing);
  reduce_in_place(comm, {&all});
  return all == 0;
}

PairReferences compute(const StageSetup& setup, const StagePairs& pairs, const Transformer& model) {
  begin_activity("computing reference log-probs");
  std::vector<double> checksums(static_cast<size_t>(pairs.size()));
  const auto pair = [&](int64_t i) {
    ReferredPair out{pairs.get(i)};
    checksums[static_cast<size_t>(i)] = pair_checksum(out.answers);
    return out;
  };
  const bool base = setup.config.preference.reference == PairReferenceType::kBase;
  const std::vector<AnswerLogProbs> sums =
      pair_log_probs({.model = model,
                      .adapters = base ? Adapters::kOff : Adapters::kOn,
                      .micro_batch_tokens = setup.config.batch.micro_batch()},
                     pairs.size(), pair, setup.comm);
  checksums = reduce_over_ranks(setup.comm, checksums);
  PairReferences out;
  for (size_t i = 0; i < checksums.size(); ++i)
    out[checksums[i]] = {sums[2 * i].policy, sums[2 * i + 1].policy};
  return out;
}

}  // namespace

PairReferences pair_references(const StageSetup& setup, const ModelStart& start,
                               const std::function<std::unique_ptr<Transformer>()>& load_start) {
  const PreferenceConfig& config = setup.config.preference;
  if (config.reference == PairReferenceType::kNone) return {};
  const StagePairs pairs(setup, start);
  std::unique_ptr<Transformer> earlier;
  if (!start.checkpoint.empty()) {
    PairReferences known;
    std::string problem = first_text(setup.comm, read(setup.dir, config, known));
    if (problem.empty() && !has_all(known, pairs, setup.comm))
      problem = "lacks pairs that are needed now";
    if (problem.empty()) return known;
    if (setup.is_main())
      logging::warn(file_of(setup.dir), " ", problem,
                    ": the reference log-probs are computed again, with the model that the stage "
                    "began with");
    earlier = load_start();
  }
  PairReferences out =
      compute(setup, pairs, earlier != nullptr ? *earlier : start.learner->model());
  if (setup.is_main()) write(setup.dir, config, out);
  setup.comm.barrier();
  return out;
}

PairReferences read_pair_references(const std::string& dir, const PreferenceConfig& config) {
  PairReferences out;
  if (config.reference == PairReferenceType::kNone) return out;
  if (const std::string problem = read(dir, config, out); !problem.empty())
    throw InputError(str(file_of(dir), " ", problem,
                         "; hint: the loss of a pair is relative to its log-probs at the start of "
                         "the stage, which that file of the run has"));
  return out;
}

ReferredPair referred_pair(const TrainConfig& config, const Dataset& data, int64_t context,
                           const PairReferences& references, const Example& example,
                           int64_t index) {
  ReferredPair out{pair_sequences(example, *data.tokenizer, context, config.data.too_long, index)};
  if (config.preference.reference == PairReferenceType::kNone) return out;
  const auto found = references.find(pair_checksum(out.answers));
  if (found == references.end())
    throw InputError(str(example.where, ": the reference log-probs of this pair are not known: it ",
                         "is none of those of the run; hint: the data of the run"));
  out.reference = found->second;
  return out;
}

Metrics evaluate_pairs(const TrainConfig& config, const Dataset& data, const Scoring& scoring,
                       const PairReferences& references, Communicator& comm) {
  const auto pair = [&](int64_t i) {
    return referred_pair(config, data, scoring.model.config().context, references,
                         data.held_out[static_cast<size_t>(i)], i);
  };
  const std::vector<AnswerLogProbs> answers =
      pair_log_probs(scoring, std::ssize(data.held_out), pair, comm);
  PairSums sums;
  for (size_t i = 0; i < answers.size(); i += 2)
    sums.add(pair_terms(config.preference, answers[i], answers[i + 1]), answers[i], answers[i + 1]);
  if (sums.pairs == 0) return {};
  return {{"accuracy", sums.accurate / sums.pairs},
          {"val_loss", sums.mean_loss(config.preference)},
          {"rewards/margins", (sums.chosen_rewards - sums.rejected_rewards) / sums.pairs}};
}

}  // namespace cohort
