// DPO and its relatives: updates on preference pairs (rl/preference.h), relative to reference
// log-probs that were computed before the first update (job/pair_reference.h).
#include "core/log.h"
#include "data/parallel_try.h"
#include "job/stage.h"
#include "trainers/across_ranks.h"
#include "trainers/balance.h"

namespace cohort {
namespace {

struct PairStep {
  std::vector<TokenSequence> sequences;   // this rank's: chosen and rejected answers in turn
  std::vector<PairReference> references;  // by TokenSequence::group, those of all ranks
  double chosen_tokens = 0, inputs = 0;   // over all ranks; both answers have their prompt
};

PairStep next_step(Stage& stage, MixedOrder& order) {
  const TrainConfig& config = stage.config();
  const int64_t count = config.batch.batch_size;
  const RankShard shard = shard_of(count, stage.comm().rank(), stage.comm().size(), stage.step());
  std::vector<int64_t> examples;
  for (int64_t i = 0; i < count; ++i) examples.push_back(order.next());
  PairStep out;
  out.sequences.resize(2 * static_cast<size_t>(shard.end - shard.begin));
  out.references.resize(examples.size());
  parallel_try(shard.end - shard.begin, 1, [&](int64_t k) {
    const auto i = static_cast<size_t>(shard.begin + k);
    ReferredPair pair =
        referred_pair(config, stage.data(), stage.model().config().context, stage.pair_references(),
                      stage.data().train->get(examples[i]), shard.begin + k);
    std::ranges::move(pair.answers, out.sequences.begin() + 2 * k);
    out.references[i] = pair.reference;
  });
  for (const TokenSequence& s : out.sequences) {
    out.inputs += static_cast<double>(s.num_inputs());
    if (s.index % 2 == 0) out.chosen_tokens += static_cast<double>(s.num_targets());
  }
  std::vector<double*> numbers = {&out.inputs, &out.chosen_tokens};
  for (PairReference& pair : out.references)
    numbers.insert(numbers.end(), {&pair.chosen, &pair.rejected});
  reduce_in_place(stage.comm(), numbers);  // one rank has each reference, so the sums are exact
  return out;
}

// The metrics of a step by TRL's names.
Metrics metrics_of(Stage& stage, PairSums sums, const PairStep& step) {
  reduce_in_place(stage.comm(), {&sums.pairs, &sums.excess, &sums.chosen_rewards,
                                 &sums.rejected_rewards, &sums.accurate, &sums.chosen_logprobs,
                                 &sums.rejected_logprobs, &sums.chosen_tokens});
  const double n = sums.pairs;
  return {{"loss", sums.mean_loss(stage.config().preference)},
          {"rewards/chosen", sums.chosen_rewards / n},
          {"rewards/rejected", sums.rejected_rewards / n},
          {"rewards/accuracies", sums.accurate / n},
          {"rewards/margins", (sums.chosen_rewards - sums.rejected_rewards) / n},
          {"logps/chosen", sums.chosen_logprobs / n},
          {"logps/rejected", sums.rejected_logprobs / n},
          {"num_tokens", step.inputs}};
}

}  // namespace

StageEnd train_preference(Stage& stage) {
  const TrainConfig& config = stage.config();
  const int64_t count = config.batch.batch_size;
  MixedOrder order = make_order(config, stage.data(), stage.state().planned_steps);
  order.seek(stage.state().data_position);
  if (stage.is_main() && !stage.finished() && count < stage.comm().size())
    logging::warn("batch_size: ", count, " pairs leave ", stage.comm().size() - count, " of ",
                  stage.comm().size(), " ranks without work; hint: a larger batch_size");
  while (stage.more()) {
    Stopwatch clock;
    PairStep step = next_step(stage, order);
    const RankLoad load = balance(stage.comm(), stage.model(), step.sequences, 2 * count);
    std::vector<PackedBatch> batches;
    const auto pack = [&](int64_t micro_batch_tokens) {
      batches = pack_micro_batches(step.sequences, micro_batch_tokens, Groups::kWhole);
      int64_t largest = 0;
      for (const PackedBatch& batch : batches) largest = std::max(largest, batch.size());
      return largest;
    };
    const PairUpdate update{config.preference, static_cast<double>(count), step.chosen_tokens};
    PairSums sums;
    const auto loss = [&, next = size_t{0}](int64_t i) mutable {
      if (i == 0) next = 0;
      const PackedBatch& packed = batches[static_cast<size_t>(i)];
      const int32_t last =
          packed.segments.narrow(0, packed.num_targets() - 1, 1).to_vector<int32_t>()[0];
      std::vector<PairReference> references;
      for (int32_t answer = 0; answer <= last; answer += 2, next += 2)
        references.push_back(step.references[static_cast<size_t>(step.sequences[next].group)]);
      const Transformer& model = stage.model();
      const PackedBatch batch = model.to_device(packed);
      return preference_loss(model.hidden_at_targets(batch), model.head(), batch, references,
                             update, sums);
    };
    const double rate = stage.learning_rate();
    Learner::Update made;
    stage.learner().within_memory(config.batch.micro_batch(), pack, [&] {
      sums = {};
      made = stage.learner().update(std::ssize(batches), loss, rate);
    });
    stage.state().data_position += count;
    Metrics metrics = metrics_of(stage, sums, step);
    metrics.add("learning_rate", rate);
    metrics.add("grad_norm", made.grad_norm);
    metrics.add("time/update", clock.lap());
    if (load.largest > 0) metrics.add("update/balance", load.mean / load.largest);
    stage.end_step(metrics);
  }
  return stage.finish();
}

}  // namespace cohort
