// Pretraining, supervised fine-tuning and encoders: the loss over the targets of packed sequences.
#include "core/log.h"
#include "job/preview.h"
#include "job/stage.h"
#include "trainers/across_ranks.h"

namespace cohort {
namespace {

// A window of text, the `index`-th of its step.
TokenSequence text_sequence(Stage& stage, const TextWindow& window, int64_t length,
                            const Masking* masking, int64_t index) {
  std::vector<int32_t> tokens = window.tokens.read(window.begin, length);
  if (masking != nullptr)
    return masked_sequence(tokens, *stage.data().tokenizer, *masking, stage.step(), index);
  return {.tokens = std::move(tokens),
          .loss_mask = std::vector<uint8_t>(static_cast<size_t>(length), 1)};
}

// This rank's sequences of the step that starts at data position `position`.
std::vector<TokenSequence> next_sequences(Stage& stage, MixedOrder* order, const Masking* masking,
                                          int64_t position) {
  const TrainConfig& config = stage.config();
  const Dataset& data = stage.data();
  const ModelConfig& model = stage.model().config();
  const RankShard shard =
      shard_of(config.batch.batch_size, stage.comm().rank(), stage.comm().size(), stage.step());
  std::vector<TokenSequence> out;
  for (int64_t i = 0; i < config.batch.batch_size; ++i) {
    const int64_t example = order != nullptr ? order->next() : 0;
    if (i < shard.begin || i >= shard.end) continue;
    if (config.batch.trainer == TrainerType::kClassify) {
      out.push_back(class_sequence(data.train->get(example), *data.tokenizer, model.context,
                                   model.labels));
    } else if (order != nullptr) {
      out.push_back(supervised_sequence(data.train->get(example), *data.tokenizer, model.context,
                                        config.data.too_long));
    } else {
      const uint64_t seed = config.data_seed();
      const int64_t n = window_length(config.batch.trainer, *data.tokenizer, model.context);
      out.push_back(
          text_sequence(stage, text_window(data, n, seed, position + i), n, masking, i));
      // Prefetches the tokens of the next step from disk.
      const TextWindow next = text_window(data, n, seed, position + config.batch.batch_size + i);
      next.tokens.will_read(next.begin, n);
    }
    out.back().index = i;
  }
  return out;
}

}  // namespace

StageEnd train_supervised(Stage& stage) {
  const TrainConfig& config = stage.config();
  std::optional<MixedOrder> order;
  std::optional<Masking> masking;
  if (config.batch.trainer == TrainerType::kMlm)
    masking.emplace(*stage.data().tokenizer, config.masking, static_cast<uint64_t>(config.seed));
  if (!reads_text(config.batch.trainer)) {
    order = make_order(config, stage.data(), stage.state().planned_steps);
    order->seek(stage.state().data_position);
  }
  if (const int ranks = stage.comm().size();
      stage.is_main() && !stage.finished() && config.batch.batch_size < ranks)
    logging::warn("batch_size: ", config.batch.batch_size, " sequences leave ",
                  ranks - config.batch.batch_size, " of ", ranks,
                  " ranks without work; hint: a larger batch_size or fewer ranks");
  while (stage.more()) {
    Stopwatch clock;
    const auto sequences =
        next_sequences(stage, order ? &*order : nullptr, masking ? &*masking : nullptr,
                       stage.state().data_position);
    double targets = 0, tokens = 0;
    for (const TokenSequence& sequence : sequences) {
      targets += static_cast<double>(sequence.num_targets());
      tokens += static_cast<double>(sequence.num_inputs());
    }
    reduce_in_place(stage.comm(), {&targets, &tokens});
    if (targets == 0)
      throw InputError(
          str("step ", stage.step() + 1, ": none of its ", config.batch.batch_size,
              " sequences has a target token",
              context_hint(context_limit(config, stage.model().config()), "shorter prompts")));
    const ForwardOptions options{
        .mode = Mode::kTrain, .seed = static_cast<uint64_t>(config.seed), .step = stage.step()};

    std::vector<PackedBatch> batches;
    const auto pack = [&](int64_t micro_batch_tokens) {
      batches = pack_micro_batches(sequences, micro_batch_tokens);
      int64_t largest = 0;
      for (const PackedBatch& batch : batches) largest = std::max(largest, batch.size());
      return largest;
    };
    const auto loss = [&](int64_t i) {
      const Transformer& model = stage.model();
      const PackedBatch batch = model.to_device(batches[static_cast<size_t>(i)]);
      const Tensor weights = Tensor::full({batch.num_targets()}, 1 / targets,
                                          accumulate_dtype(model.dtype()), model.device());
      return cross_entropy(model.hidden_at_targets(batch, options), model.head(), batch.targets,
                           weights);
    };
    const double rate = stage.learning_rate();
    Learner::Update update;
    stage.learner().within_memory(config.batch.micro_batch(), pack, [&] {
      update = stage.learner().update(static_cast<int64_t>(batches.size()), loss, rate);
    });

    stage.state().data_position += config.batch.batch_size;
    stage.end_step({{"loss", update.loss},
                    {"learning_rate", rate},
                    {"grad_norm", update.grad_norm},
                    {"num_tokens", tokens},
                    {"num_target_tokens", targets},
                    {"time/update", clock.lap()}});
  }
  return stage.finish();
}

}  // namespace cohort
