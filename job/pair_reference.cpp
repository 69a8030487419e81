#include "job/pair_reference.h"

#include <map>
#include <sstream>

#include "core/log.h"
#include "core/progress.h"
#include "data/parallel_try.h"
#include "sys/files.h"
#include "trainers/across_ranks.h"

namespace cohort {
namespace {

// Checksum of what the log-probs of a pair depend on; never 0, and exact as a double.
double pair_checksum(const std::array<TokenSequence, 2>& pair) {
  uint64_t sum = 0;
  const auto add = [&](const auto& values) {
    sum = checksum(
        {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0])}, sum);
  };
  for (const TokenSequence& answer : pair) {
    add(answer.tokens);
    add(answer.loss_mask);
  }
  return static_cast<double>(std::max<uint64_t>(1, sum >> 11));
}

std::array<TokenSequence, 2> sequences_of(const DataConfig& config, const Dataset& data,
                                          const Example& example, int64_t context, int64_t index) {
  return pair_sequences(example, *data.tokenizer, context, config.too_long, index);
}

// The indices of the training pairs that the rest of the stage draws, ascending.
std::vector<int64_t> drawn_pairs(const PairReferenceSetup& setup) {
  MixedOrder order = make_order(setup.config, setup.data, setup.planned_steps);
  order.seek(setup.position);
  std::vector<bool> drawn(static_cast<size_t>(setup.data.train->size()));
  size_t left = drawn.size();
  int64_t draws = (setup.config.batch.steps - setup.step) * setup.config.batch.batch_size;
  for (; draws > 0 && left > 0; --draws) {
    const auto i = static_cast<size_t>(order.next());
    left -= !drawn[i];
    drawn[i] = true;
  }
  std::vector<int64_t> out;
  for (size_t i = 0; i < drawn.size(); ++i)
    if (drawn[i]) out.push_back(static_cast<int64_t>(i));
  return out;
}

// ---- The file: a checksum, a header in lines, and the numbers of PairReference.

constexpr const char* kMagic = "cohort pair reference 1";

struct PairFile {
  std::string reference, fingerprint;  // the value of the key, and that of the data
  PairReferences pairs;
};
std::string file_of(const std::string& dir) {
  return dir + "/pair_reference";
}
std::string reference_name(const TrainConfig& config) {
  return entry_of(kPairReferenceTypes, config.preference.reference).name;
}

void write(const std::string& dir, const PairFile& file) {
  const auto& [train, held_out] = file.pairs;
  std::string text = str("\n", kMagic, "\n", file.reference, "\n", file.fingerprint, "\n",
                         train.size(), " ", held_out.size(), "\n");
  for (const auto* part : {&train, &held_out})
    text.append(reinterpret_cast<const char*>(part->data()), part->size() * sizeof(PairReference));
  replace_file(file_of(dir), hex(checksum(text)) + text);
}

// Returns the reason why the file cannot be read; "": it was.
std::string read(const std::string& dir, PairFile& out) {
  if (!path_exists(file_of(dir))) return "is missing";
  std::istringstream in(read_text_file(file_of(dir)));
  const std::string_view text = in.view();
  std::string sum, magic;
  size_t train = 0, held_out = 0;
  std::getline(in, sum);
  if (sum.size() > text.size() || sum != hex(checksum(text.substr(sum.size()))))
    return "is damaged";
  std::getline(in, magic);
  std::getline(in, out.reference);
  std::getline(in, out.fingerprint);
  in >> train >> held_out;
  const auto begin = in.get() == '\n' ? static_cast<size_t>(in.tellg()) : text.size();
  const size_t count = (text.size() - begin) / sizeof(PairReference);
  if (magic != kMagic || train > count || held_out != count - train) return "is of another version";
  out.pairs.train.resize(train);
  out.pairs.held_out.resize(held_out);
  in.read(reinterpret_cast<char*>(out.pairs.train.data()),
          static_cast<std::streamsize>(train * sizeof(PairReference)));
  in.read(reinterpret_cast<char*>(out.pairs.held_out.data()),
          static_cast<std::streamsize>(held_out * sizeof(PairReference)));
  return "";
}

// The checksum of each held-out pair.
std::vector<double> held_out_checksums(const TrainConfig& config, const Dataset& data,
                                       int64_t context) {
  std::vector<double> out(data.held_out.size());
  parallel_try(std::ssize(out), 16, [&](int64_t i) {
    const auto k = static_cast<size_t>(i);
    out[k] = pair_checksum(sequences_of(config.data, data, data.held_out[k], context, 0));
  });
  return out;
}

// Reason why the references of a file are not those that a resumed stage needs; "": they are.
std::string read_resumed(const PairReferenceSetup& setup, std::span<const int64_t> drawn,
                         PairReferences& out) {
  PairFile file;
  if (const std::string problem = read(setup.dir, file); !problem.empty()) return problem;
  if (file.reference != reference_name(setup.config))
    return "is of preference.reference: " + file.reference;
  if (file.fingerprint != setup.data.fingerprint ||
      std::ssize(file.pairs.train) != setup.data.train->size())
    return "is of other data";
  const bool all_drawn = std::ranges::all_of(
      drawn, [&](int64_t i) { return file.pairs.train[static_cast<size_t>(i)].checksum != 0; });
  std::vector<double> held_out;
  for (const PairReference& pair : file.pairs.held_out) held_out.push_back(pair.checksum);
  if (!all_drawn ||
      held_out != held_out_checksums(setup.config, setup.data, setup.model.config().context))
    return "lacks pairs that are needed now";
  out = std::move(file.pairs);
  return "";
}

// The references of `count` pairs, on every rank.
std::vector<PairReference> compute(const PairReferenceSetup& setup, const Transformer& model,
                                   int64_t count, const std::function<Example(int64_t)>& example) {
  std::vector<double> checksums(static_cast<size_t>(count));
  const auto pair = [&](int64_t i) {
    auto out = sequences_of(setup.config.data, setup.data, example(i), model.config().context, i);
    checksums[static_cast<size_t>(i)] = pair_checksum(out);
    return out;
  };
  const bool base = setup.config.preference.reference == PairReferenceType::kBase;
  const std::vector<AnswerLogProbs> sums =
      pair_log_probs({.model = model,
                      .adapters = base ? Adapters::kOff : Adapters::kOn,
                      .micro_batch_tokens = setup.config.batch.micro_batch()},
                     count, pair, setup.comm);
  checksums = reduce_over_ranks(setup.comm, checksums);
  std::vector<PairReference> out(checksums.size());
  for (size_t i = 0; i < out.size(); ++i)
    out[i] = {sums[2 * i].policy, sums[2 * i + 1].policy, checksums[i]};
  return out;
}

}  // namespace

PairReferences pair_references(const PairReferenceSetup& setup) {
  const TrainConfig& config = setup.config;
  const Dataset& data = setup.data;
  PairReferences out;
  if (config.preference.reference == PairReferenceType::kNone) return out;
  const std::vector<int64_t> drawn = drawn_pairs(setup);
  std::unique_ptr<Transformer> start;
  if (setup.load_start != nullptr) {
    // One rank may see an older file than the others.
    const std::string problem = first_text(setup.comm, read_resumed(setup, drawn, out));
    if (problem.empty()) return out;
    if (setup.comm.rank() == 0)
      logging::warn(file_of(setup.dir), " ", problem,
                    ": the reference log-probs are computed again, with the model that the stage "
                    "began with");
    start = setup.load_start();
  }
  begin_activity("computing reference log-probs");
  const Transformer& model = start != nullptr ? *start : setup.model;
  out.train.assign(static_cast<size_t>(data.train->size()), {});
  const std::vector<PairReference> of_drawn =
      compute(setup, model, std::ssize(drawn),
              [&](int64_t i) { return data.train->get(drawn[static_cast<size_t>(i)]); });
  for (size_t i = 0; i < drawn.size(); ++i) out.train[static_cast<size_t>(drawn[i])] = of_drawn[i];
  out.held_out = compute(setup, model, std::ssize(data.held_out),
                         [&](int64_t i) { return data.held_out[static_cast<size_t>(i)]; });
  if (setup.comm.rank() == 0) write(setup.dir, {reference_name(config), data.fingerprint, out});
  setup.comm.barrier();
  return out;
}

PairReferences held_out_references(const TrainConfig& config, const Dataset& data,
                                   const Transformer& model, const std::string& dir) {
  PairReferences out;
  if (config.preference.reference == PairReferenceType::kNone) return out;
  PairFile file;
  std::string problem = read(dir, file);
  if (problem.empty() && file.reference != reference_name(config))
    problem = "is of preference.reference: " + file.reference;
  std::map<double, PairReference> known;
  for (const auto* part : {&file.pairs.train, &file.pairs.held_out})
    for (const PairReference& pair : *part) known[pair.checksum] = pair;
  for (const double sum : held_out_checksums(config, data, model.config().context)) {
    const auto found = known.find(sum);
    if (found != known.end()) out.held_out.push_back(found->second);
  }
  if (problem.empty() && out.held_out.size() < data.held_out.size())
    problem = str("has ", out.held_out.size(), " of the ", data.held_out.size(), " held-out pairs");
  if (!problem.empty())
    throw InputError(str(file_of(dir), " ", problem,
                         "; hint: the loss of a pair is relative to its log-probs at the start of "
                         "the stage, which that file has for the pairs of the run"));
  return out;
}

std::array<TokenSequence, 2> checked_pair(const DataConfig& config, const Dataset& data,
                                          const Example& example, int64_t context, int64_t index,
                                          const PairReference* reference) {
  std::array<TokenSequence, 2> out = sequences_of(config, data, example, context, index);
  if (reference != nullptr && reference->checksum != pair_checksum(out))
    throw InputError(str(example.where,
                         ": the pair has other tokens than at the start of the "
                         "stage, when its reference log-probs were computed; hint: resume with the "
                         "keys of data and model that the stage began with"));
  return out;
}

Metrics evaluate_pairs(const TrainConfig& config, const Dataset& data, const Scoring& scoring,
                       const PairReferences& references, Communicator& comm) {
  const auto pair = [&](int64_t i) {
    return sequences_of(config.data, data, data.held_out[static_cast<size_t>(i)],
                        scoring.model.config().context, i);
  };
  std::vector<AnswerLogProbs> answers =
      pair_log_probs(scoring, std::ssize(data.held_out), pair, comm);
  PairSums sums;
  for (size_t i = 0; i < data.held_out.size(); ++i) {
    AnswerLogProbs &chosen = answers[2 * i], &rejected = answers[2 * i + 1];
    if (!references.held_out.empty()) {
      chosen.reference = references.held_out[i].chosen;
      rejected.reference = references.held_out[i].rejected;
    }
    sums.add(pair_terms(config.preference, chosen, rejected), chosen, rejected);
  }
  if (sums.pairs == 0) return {};
  return {{"accuracy", sums.accurate / sums.pairs},
          {"val_loss", sums.mean_loss(config.preference)},
          {"rewards/margins", (sums.chosen_rewards - sums.rejected_rewards) / sums.pairs}};
}

}  // namespace cohort
