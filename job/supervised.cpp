// Pretraining, supervised fine-tuning and encoders: the loss over the targets of packed sequences.
// DPO and its relatives: that of preference pairs (rl/preference.h), relative to reference
// log-probs that were computed before the first update (job/pair_reference.h).
#include <future>

#include "core/log.h"
#include "data/class_examples.h"
#include "data/parallel_try.h"
#include "job/preview.h"
#include "job/stage.h"
#include "trainers/across_ranks.h"
#include "trainers/balance.h"

namespace cohort {
namespace {

// The sequences of a stage's steps.
class SequenceSource {
 public:
  explicit SequenceSource(Stage& stage) : stage_(stage) {
    const auto seed = static_cast<uint64_t>(config_.seed);
    const TrainerType trainer = config_.batch.trainer;
    if (trainer == TrainerType::kMlm) masking_.emplace(*data_.tokenizer, config_.masking, seed);
    if (trainer == TrainerType::kClassify)
      classes_.emplace(ClassReader::Model{*data_.tokenizer, model_.labels, model_.context,
                                          model_.image_size, model_.channels, model_.token_types},
                       config_.data.images.augment, seed);
    if (reads_text(trainer)) return;
    problems_ = make_order(config_, data_, stage.state().planned_steps);
    problems_->seek(stage.state().data_position);
  }

  // This rank's sequences of a step, which starts at data position `position`: of dpo a chosen and
  // a rejected answer in turn. For consecutive steps.
  std::vector<TokenSequence> next(int64_t step, int64_t position) {
    const Communicator& comm = stage_.comm();
    const RankShard shard = shard_of(config_.batch.batch_size, comm.rank(), comm.size(), step);
    std::vector<int64_t> examples;
    for (int64_t i = 0; i < config_.batch.batch_size; ++i)
      examples.push_back(problems_ ? problems_->next() : position + i);
    const int64_t size = config_.batch.trainer == TrainerType::kDpo ? 2 : 1;
    std::vector<TokenSequence> out(static_cast<size_t>(size * (shard.end - shard.begin)));
    parallel_try(shard.end - shard.begin, 1, [&](int64_t k) {
      const int64_t i = shard.begin + k, example = examples[static_cast<size_t>(i)];
      TokenSequence& made = out[static_cast<size_t>(size * k)];
      if (size == 2) {
        std::ranges::move(pair_sequences(data_.train->get(example), *data_.tokenizer,
                                         model_.context, config_.data.too_long, i),
                          &made);
        return;
      }
      made = problems_ ? of_problem(data_.train->get(example), step, i) : of_text(example, step, i);
      made.index = i;
    });
    return out;
  }
  // True if sequences take long to make: those of the next step are made during an update.
  bool is_slow() const { return model_.has_images(); }

 private:
  TokenSequence of_problem(const Example& example, int64_t step, int64_t index) const {
    if (classes_) return classes_->read(example, step, index);
    return supervised_sequence(example, *data_.tokenizer, model_.context, config_.data.too_long);
  }
  // The window at a data position.
  TokenSequence of_text(int64_t position, int64_t step, int64_t index) const {
    const uint64_t seed = config_.data_seed();
    const int64_t n = window_length(config_.batch.trainer, *data_.tokenizer, model_.context);
    const TextWindow window = text_window(data_, n, seed, position);
    std::vector<int32_t> tokens = window.tokens.read(window.begin, n);
    // Prefetches the tokens of the next step from disk.
    const TextWindow next = text_window(data_, n, seed, position + config_.batch.batch_size);
    next.tokens.will_read(next.begin, n);
    if (masking_) return masked_sequence(tokens, *data_.tokenizer, *masking_, step, index);
    return {.tokens = std::move(tokens),
            .loss_mask = std::vector<uint8_t>(static_cast<size_t>(n), 1)};
  }

  Stage& stage_;
  const TrainConfig& config_ = stage_.config();
  const Dataset& data_ = stage_.data();
  const ModelConfig& model_ = stage_.model().config();
  std::optional<MixedOrder> problems_;
  std::optional<Masking> masking_;
  std::optional<ClassReader> classes_;
};

void warn_of_idle_ranks(Stage& stage) {
  const int64_t sequences = stage.config().batch.batch_size, ranks = stage.comm().size();
  if (stage.is_main() && !stage.finished() && sequences < ranks)
    logging::warn("batch_size: ", sequences,
                  stage.config().batch.trainer == TrainerType::kDpo ? " pairs" : " sequences",
                  " leave ", ranks - sequences, " of ", ranks,
                  " ranks without work; hint: a larger batch_size or fewer ranks");
}

struct TokenCounts {
  double targets = 0, inputs = 0;
};
// Counts over the ranks of a step. Throws InputError if it has no target.
TokenCounts count_tokens(Stage& stage, std::span<const TokenSequence> sequences) {
  TokenCounts out;
  for (const TokenSequence& sequence : sequences) {
    out.targets += static_cast<double>(sequence.num_targets());
    out.inputs += static_cast<double>(sequence.num_inputs());
  }
  reduce_in_place(stage.comm(), {&out.targets, &out.inputs});
  if (out.targets == 0)
    throw InputError(str(
        "step ", stage.step() + 1, ": none of its ", stage.config().batch.batch_size,
        " sequences has a target token",
        context_hint(context_limit(stage.config(), stage.model().config()), "shorter prompts")));
  return out;
}

// balance() of this rank's part of a step.
RankLoad balance_step(Stage& stage, std::vector<TokenSequence>& sequences) {
  const BatchConfig& batch = stage.config().batch;
  const int64_t all = (batch.trainer == TrainerType::kDpo ? 2 : 1) * batch.batch_size;
  return balance(stage.comm(), stage.model(), sequences, all, stage.learner().reduction_lanes());
}

// (dpo) The loss of an update's pairs.
class PairLoss {
 public:
  // `sequences`: this rank's.
  PairLoss(Stage& stage, std::span<const TokenSequence> sequences)
      : stage_(stage), update_{stage.config().preference} {
    update_.pairs = static_cast<double>(stage.config().batch.batch_size);
    for (size_t i = 0; i < sequences.size(); i += 2) {
      update_.chosen_tokens += static_cast<double>(sequences[i].num_targets());
      references_.push_back(
          reference_of(update_.config, stage.pair_references(), sequences.subspan(i, 2)));
    }
    reduce_in_place(stage.comm(), {&update_.chosen_tokens});
  }
  // That of a micro batch of the sequences [begin, end). The first one begins the metrics again.
  HeadLoss of(const PackedBatch& batch, size_t begin, size_t end) {
    if (begin == 0) sums_ = {};
    const auto references = std::span(references_).subspan(begin / 2, (end - begin) / 2);
    const Transformer& model = stage_.model();
    return preference_loss(model.hidden_at_targets(batch), model.head(), batch, references, update_,
                           sums_);
  }
  // The metrics of the update, over all ranks, by TRL's names.
  Metrics metrics() {
    PairSums& s = sums_;
    reduce_in_place(stage_.comm(),
                    {&s.pairs, &s.excess, &s.chosen_rewards, &s.rejected_rewards, &s.accurate,
                     &s.chosen_logprobs, &s.rejected_logprobs, &s.chosen_tokens});
    return {{"loss", s.mean_loss(update_.config)},
            {"rewards/chosen", s.chosen_rewards / s.pairs},
            {"rewards/rejected", s.rejected_rewards / s.pairs},
            {"rewards/accuracies", s.accurate / s.pairs},
            {"rewards/margins", (s.chosen_rewards - s.rejected_rewards) / s.pairs},
            {"logps/chosen", s.chosen_logprobs / s.pairs},
            {"logps/rejected", s.rejected_logprobs / s.pairs}};
  }

 private:
  Stage& stage_;
  PairUpdate update_;
  std::vector<PairReference> references_;
  PairSums sums_;
};

int64_t largest_size(std::span<const PackedBatch> batches) {
  int64_t out = 0;
  for (const PackedBatch& batch : batches) out = std::max(out, batch.size());
  return out;
}

}  // namespace

StageEnd train_supervised(Stage& stage) {
  const TrainConfig& config = stage.config();
  SequenceSource source(stage);
  std::future<std::vector<TokenSequence>> ahead;  // waits for its thread when it is destroyed
  warn_of_idle_ranks(stage);
  while (stage.more()) {
    Stopwatch clock;
    const int64_t step = stage.step(), position = stage.state().data_position;
    std::vector<TokenSequence> sequences =
        ahead.valid() ? ahead.get() : source.next(step, position);
    const double waited = clock.lap();
    if (source.is_slow() && step + 1 < config.batch.steps)
      ahead = std::async(std::launch::async, [&, step, position, threads = num_threads()] {
        set_num_threads(threads);
        return source.next(step + 1, position + config.batch.batch_size);
      });
    const TokenCounts count = count_tokens(stage, sequences);
    const bool dpo = config.batch.trainer == TrainerType::kDpo;
    const RankLoad load = balance_step(stage, sequences);
    std::optional<PairLoss> pairs;
    if (dpo) pairs.emplace(stage, sequences);
    const ForwardOptions options{
        .mode = Mode::kTrain, .seed = static_cast<uint64_t>(config.seed), .step = stage.step()};

    std::vector<size_t> begins;
    std::vector<PackedBatch> batches;
    const auto pack = [&](int64_t micro_batch_tokens) {
      const Groups groups = dpo ? Groups::kWhole : Groups::kMaySplit;
      begins = split_micro_batches(sequences, micro_batch_tokens, groups);
      batches = pack_micro_batches(sequences, micro_batch_tokens, groups);
      return largest_size(batches);
    };
    const auto loss = [&](int64_t i) {
      const Transformer& model = stage.model();
      const auto k = static_cast<size_t>(i);
      const PackedBatch batch = model.to_device(batches[k]);
      if (pairs) return pairs->of(batch, begins[k], begins[k + 1]);
      const Tensor weights = Tensor::full({batch.num_targets()}, 1 / count.targets,
                                          accumulate_dtype(model.dtype()), model.device());
      return cross_entropy(model.hidden_at_targets(batch, options), model.head(), batch.targets,
                           weights);
    };
    const double rate = stage.learning_rate();
    Learner::Update update;
    stage.learner().within_memory(config.batch.micro_batch(), pack, [&] {
      update = stage.learner().update(std::ssize(batches), loss, rate, nullptr, lanes_of(batches));
    });

    stage.state().data_position += config.batch.batch_size;
    Metrics metrics = pairs ? pairs->metrics() : Metrics{{"loss", update.loss}};
    metrics.add("learning_rate", rate);
    metrics.add("grad_norm", update.grad_norm);
    metrics.add("num_tokens", count.inputs);
    metrics.add("num_target_tokens", count.targets);
    metrics.add("time/update", clock.lap() + (source.is_slow() ? 0 : waited));
    if (source.is_slow()) metrics.add("time/data", waited);
    if (load.largest > 0) metrics.add("update/balance", load.mean / load.largest);
    stage.end_step(metrics);
  }
  return stage.finish();
}

}  // namespace cohort
