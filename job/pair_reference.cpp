#include "job/pair_reference.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "core/log.h"
#include "core/progress.h"
#include "data/parallel_try.h"
#include "job/model_start.h"
#include "sys/files.h"
#include "trainers/across_ranks.h"

namespace cohort {
namespace {

template <class Number>
std::string_view bytes_of(const std::vector<Number>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(Number)};
}

// Exact as a double.
double pair_checksum(const PreferenceConfig& config, std::span<const TokenSequence> answers) {
  uint64_t sum = checksum(entry_of(kPairReferenceTypes, config.reference).name);
  for (const TokenSequence& answer : answers)
    sum = checksum(bytes_of(answer.loss_mask), checksum(bytes_of(answer.tokens), sum));
  return static_cast<double>(sum >> 11);
}

// The checksums of `count` pairs, of which each rank makes a share.
std::vector<double> pair_checksums(const PreferenceConfig& config, int64_t count,
                                   const GetPair& pair, Communicator& comm) {
  std::vector<double> out(static_cast<size_t>(count));
  const RankShard shard = shard_of(count, comm.rank(), comm.size());
  parallel_try(shard.end - shard.begin, 16, [&](int64_t i) {
    out[static_cast<size_t>(shard.begin + i)] = pair_checksum(config, pair(shard.begin + i));
  });
  return reduce_over_ranks(comm, out);
}

PairReference reference_at(const PreferenceConfig& config, const PairReferences& references,
                           double sum, const std::string& where) {
  if (config.reference == PairReferenceType::kNone) return {};
  const auto found = references.find(sum);
  if (found == references.end())
    throw InputError(str(where, ": the reference log-probs of this pair are not known: it is none ",
                         "of those of the run; hint: the data of the run"));
  return found->second;
}

std::string file_of(const std::string& dir) {
  return dir + "/pair_reference";
}

// The file is a checksum, and three numbers for each pair.
void write(const std::string& dir, const PairReferences& references) {
  std::vector<double> numbers;
  for (const auto& [sum, pair] : references)
    numbers.insert(numbers.end(), {sum, pair.chosen, pair.rejected});
  replace_file(file_of(dir), str(hex(checksum(bytes_of(numbers))), bytes_of(numbers)));
}

// Adds the file's pairs to `out`. Returns the reason why it cannot be used; "": it was.
std::string read(const std::string& dir, PairReferences& out) {
  if (!path_exists(file_of(dir))) return "is missing";
  const std::string text = read_text_file(file_of(dir));
  const size_t begin = std::min<size_t>(text.size(), 16);  // end of the checksum
  std::vector<double> numbers((text.size() - begin) / sizeof(double));
  if (!numbers.empty())
    std::memcpy(numbers.data(), text.data() + begin, numbers.size() * sizeof(double));
  if (numbers.size() % 3 != 0 || text != str(hex(checksum(bytes_of(numbers))), bytes_of(numbers)))
    return "is damaged";
  for (size_t i = 0; i < numbers.size(); i += 3) out[numbers[i]] = {numbers[i + 1], numbers[i + 2]};
  return "";
}

// The training examples that the rest of the stage draws.
std::vector<int64_t> drawn_examples(const TrainConfig& config, const ModelStart& start) {
  MixedOrder order = make_order(config, start.data, start.state.planned_steps);
  order.seek(start.state.data_position);
  const int64_t draws = (config.batch.steps - start.state.step) * config.batch.batch_size;
  std::set<int64_t> out;
  for (int64_t i = 0; i < draws && std::ssize(out) < start.data.train->size(); ++i)
    out.insert(order.next());
  return {out.begin(), out.end()};
}

}  // namespace

PairReferences pair_references(const StageSetup& setup, const ModelStart& start,
                               const std::function<std::unique_ptr<Transformer>()>& load_start) {
  const PreferenceConfig& config = setup.config.preference;
  if (config.reference == PairReferenceType::kNone) return {};
  const Dataset& data = start.data;
  const Transformer& model = start.learner->model();
  const std::vector<int64_t> drawn = drawn_examples(setup.config, start);
  const int64_t trained = std::ssize(drawn), count = trained + std::ssize(data.held_out);
  const GetPair pair = [&](int64_t i) {
    return pair_sequences(i < trained ? data.train->get(drawn[static_cast<size_t>(i)])
                                      : data.held_out[static_cast<size_t>(i - trained)],
                          *data.tokenizer, model.config().context, setup.config.data.too_long, i);
  };
  const std::vector<double> sums = pair_checksums(config, count, pair, setup.comm);
  PairReferences out;
  std::unique_ptr<Transformer> earlier;
  if (!start.checkpoint.empty()) {
    if (const std::string problem = first_text(setup.comm, read(setup.dir, out)); !problem.empty())
      throw InputError(str(file_of(setup.dir), " ", problem,
                           "; hint: restore it, because the loss is relative to log-probs at the "
                           "start of the stage, or start a run with init_from=",
                           start.checkpoint));
    if (std::ranges::all_of(sums, [&](double sum) { return out.contains(sum); })) return out;
    if (setup.is_main())
      logging::info(file_of(setup.dir),
                    " lacks pairs: they are computed by the model that the stage began with");
    earlier = load_start();
  }
  begin_activity("computing reference log-probs");
  const bool base = config.reference == PairReferenceType::kBase;
  const std::vector<AnswerLogProbs> answers =
      pair_log_probs({.model = earlier != nullptr ? *earlier : model,
                      .adapters = base ? Adapters::kOff : Adapters::kOn,
                      .micro_batch_tokens = setup.config.batch.micro_batch()},
                     count, pair, setup.comm);
  for (size_t i = 0; i < sums.size(); ++i) {
    const PairReference now{answers[2 * i].policy, answers[2 * i + 1].policy};
    const auto& [at, is_new] = out.emplace(sums[i], now);
    if (!is_new && earlier != nullptr && at->second != now)
      throw InputError(str(file_of(setup.dir), " has other reference log-probs than ",
                           setup.config.init_from,
                           " gives: the model that the stage began with has changed; hint: restore "
                           "it, or train no further than the pairs of the file"));
  }
  if (setup.is_main()) write(setup.dir, out);
  setup.comm.barrier();
  return out;
}

PairReferences read_pair_references(const std::string& dir, const PreferenceConfig& config) {
  PairReferences out;
  if (config.reference == PairReferenceType::kNone) return out;
  if (const std::string problem = read(dir, out); !problem.empty())
    throw InputError(str(file_of(dir), " ", problem,
                         "; hint: the loss of a pair is relative to its log-probs at the start of "
                         "the stage, which that file of the run has"));
  return out;
}

PairReference reference_of(const PreferenceConfig& config, const PairReferences& references,
                           std::span<const TokenSequence> answers) {
  return reference_at(config, references, pair_checksum(config, answers), "a training pair");
}

Metrics evaluate_pairs(const TrainConfig& config, const Dataset& data, const Scoring& scoring,
                       const PairReferences& references, Communicator& comm) {
  if (data.held_out.empty()) return {};
  const int64_t count = std::ssize(data.held_out), context = scoring.model.config().context;
  const GetPair pair = [&](int64_t i) {
    return pair_sequences(data.held_out[static_cast<size_t>(i)], *data.tokenizer, context,
                          config.data.too_long, i);
  };
  const std::vector<double> checksums = pair_checksums(config.preference, count, pair, comm);
  std::vector<AnswerLogProbs> answers = pair_log_probs(scoring, count, pair, comm);
  PairSums sums;
  for (size_t i = 0; i < checksums.size(); ++i) {
    AnswerLogProbs &chosen = answers[2 * i], &rejected = answers[2 * i + 1];
    const PairReference reference =
        reference_at(config.preference, references, checksums[i], data.held_out[i].where);
    chosen.reference = reference.chosen;
    rejected.reference = reference.rejected;
    sums.add(pair_terms(config.preference, chosen, rejected), chosen, rejected);
  }
  return {{"accuracy", sums.accurate / sums.pairs},
          {"val_loss", sums.mean_loss(config.preference)},
          {"rewards/margins", (sums.chosen_rewards - sums.rejected_rewards) / sums.pairs}};
}

}  // namespace cohort
