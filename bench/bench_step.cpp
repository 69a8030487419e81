// One training step (forward, backward, clipping, AdamW) of a configuration's model on random
// tokens: tokens/s, FLOP/s and memory. On the CPU also the FLOP/s relative to those of Eigen's own
// multi-threaded sgemm on the matmuls of that step; on CUDA relative to the H200's dense bf16 peak
// of 989 TFLOP/s (MFU). Then the time of each op (bench/op_times.h).
//
//   cohort_bench_step configs/shakespeare_char.yaml data.text=...
//   cohort_bench_step bench/configs/gpt2_124m.yaml --vocab 50304 micro_batch_tokens=8192
//   cohort_bench_step bench/configs/bert_base.yaml --vocab 30522 --targets 0.15
//   cohort_bench_step bench/configs/vit_b16.yaml --forward batch_size=64
//
// With --forward the model's output alone, without gradients: hidden states, logits of the targets
// and the most likely ones. Images are bytes in the device's memory.
//
// With RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set this process is one of several
// ranks, each with its own batch; rank 0 prints.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <iostream>

#include "bench/eigen_sgemm.h"
#include "bench/op_times.h"
#include "bench/timing.h"
#include "core/allocator.h"
#include "core/graph.h"
#include "core/parallel.h"
#include "distributed/communicator.h"
#include "distributed/process_group.h"
#include "job/config.h"
#include "nn/memory.h"
#include "trainers/learner.h"

namespace {

using namespace cohort;

struct Gemm {
  int64_t m, n, k;
  double count;  // per step
};

// Size of the step's batch, on this rank.
struct StepSizes {
  int64_t sequences = 0, tokens = 0, targets = 0;
  int64_t largest = 0;  // tokens of the largest micro batch
  double share() const { return static_cast<double>(targets) / static_cast<double>(tokens); }
};

// Every matmul of a step: forward, and two of the same size backward.
std::vector<Gemm> step_gemms(const ModelConfig& c, const StepSizes& step) {
  const int64_t q = c.num_heads * c.head_dim, kv = c.num_kv_heads * c.head_dim;
  const double layers = static_cast<double>(c.num_layers), ups = is_gated(c.mlp) ? 2 : 1;
  std::vector<Gemm> out;
  int64_t tokens = step.tokens;
  const auto add = [&](int64_t rows, int64_t columns, double count) {
    out.push_back({tokens, rows, columns, count});
    out.push_back({tokens, columns, rows, count});  // dx
    out.push_back({rows, columns, tokens, count});  // dw
  };
  add(q, c.d_model, 2 * layers);
  add(kv, c.d_model, 2 * layers);
  add(c.d_ff, c.d_model, ups * layers);
  add(c.d_model, c.d_ff, layers);
  if (c.has_images()) add(c.d_model, c.channels * c.patch_size * c.patch_size, 1);
  tokens = step.targets;
  if (c.head != HeadType::kNextToken && !c.has_images()) add(c.d_model, c.d_model, 1);
  add(c.num_logits(), c.d_model, 1);
  return out;
}

double eigen_flops_per_second(const std::vector<Gemm>& gemms) {
  double flops = 0, seconds = 0;
  for (const Gemm& g : gemms) {
    flops += 2.0 * static_cast<double>(g.m * g.n * g.k) * g.count;
    seconds += g.count * bench::eigen_sgemm_seconds(g.m, g.n, g.k, num_threads());
  }
  return flops / seconds;
}

// The image or the text of an encoder, and labels of at least one position: the first one for
// classes, else a share of them.
TokenSequence labeled_sequence(const ModelConfig& c, int64_t length, double targets, Rng& rng) {
  TokenSequence out;
  const auto size = static_cast<size_t>(length);
  const auto label = [&] { return static_cast<int32_t>(rng.below(c.num_logits())); };
  out.labels.assign(size, -1);
  if (c.head == HeadType::kClasses) {
    out.labels[0] = label();
  } else {
    out.labels[static_cast<size_t>(rng.below(length))] = label();
    for (size_t t = 0; t < size; ++t)
      if (rng.below(1 << 20) < static_cast<int64_t>(targets * (1 << 20))) out.labels[t] = label();
  }
  if (!c.has_images()) {
    for (int64_t t = 0; t < length; ++t)
      out.tokens.push_back(static_cast<int32_t>(rng.below(c.vocab_size)));
    return out;
  }
  out.pixels.resize(static_cast<size_t>(c.image_size * c.image_size * c.channels));
  for (uint8_t& byte : out.pixels) byte = static_cast<uint8_t>(rng.below(256));
  out.pixel_values = Tensor::empty({c.channels, 256}, DType::kF32);
  for (int64_t i = 0; i < out.pixel_values.numel(); ++i)
    out.pixel_values.data<float>()[i] = static_cast<float>(i % 256) / 127.5f - 1;
  return out;
}

// With `ragged`, lengths are spread evenly over the context. `targets`: the share of positions with
// a label in an encoder of masked tokens.
std::vector<TokenSequence> random_sequences(const ModelConfig& c, int64_t sequences, uint64_t seed,
                                            double targets, bool ragged = false) {
  Rng rng(seed, rng_stream(kBenchPurpose));
  std::vector<TokenSequence> list;
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t length = ragged && !c.has_images() ? 2 + rng.below(c.context - 1) : c.context;
    TokenSequence sequence;
    if (c.is_encoder()) {
      sequence = labeled_sequence(c, length, targets, rng);
    } else {
      for (int64_t t = 0; t <= length; ++t)
        sequence.tokens.push_back(static_cast<int32_t>(rng.below(c.vocab_size)));
      sequence.loss_mask.assign(sequence.tokens.size(), 1);
    }
    sequence.index = s;
    list.push_back(std::move(sequence));
  }
  return list;
}

// The model that the configuration's trainer would make of data with these sizes.
ModelConfig bench_model(const TrainConfig& config, int64_t vocab, int64_t classes) {
  ModelConfig model = config.model;
  model.vocab_size = model.has_images() ? 0 : vocab;
  if (config.batch.trainer == TrainerType::kMlm) model.set_head(HeadType::kMaskedToken);
  if (config.batch.trainer == TrainerType::kClassify) {
    std::vector<std::string> labels;
    for (int64_t i = 0; i < classes; ++i) labels.push_back(std::to_string(i));
    model.set_head(HeadType::kClasses, labels);
  }
  model.resolve();
  return model;
}

// Copies the batches to the model's device, and counts them.
StepSizes place_batches(const Transformer& model, std::vector<PackedBatch>& batches) {
  StepSizes out;
  for (PackedBatch& batch : batches) {
    out.sequences += batch.cu_seqlens.numel() - 1;
    batch = model.to_device(batch);
    out.tokens += batch.size();
    out.targets += batch.num_targets();
    out.largest = std::max(out.largest, batch.size());
  }
  return out;
}

void print_rates(const ModelConfig& model, const StepSizes& step, double ranks, double seconds) {
  std::printf("tokens/s              %.0f\n", ranks * static_cast<double>(step.tokens) / seconds);
  if (model.is_encoder())
    std::printf("%-22s%.1f\n", model.has_images() ? "images/s" : "sequences/s",
                ranks * static_cast<double>(step.sequences) / seconds);
}

// Times the model's output alone.
void run_forward(const TrainConfig& config, const ModelConfig& config_of_model, Device device,
                 double targets, bool ops) {
  const Transformer model(config_of_model, config.dtype, 1, device);
  const ModelConfig& c = model.config();
  std::vector<PackedBatch> batches = pack_micro_batches(
      random_sequences(c, config.batch.batch_size, 1, targets), config.batch.micro_batch());
  const StepSizes step = place_batches(model, batches);
  const NoGradGuard no_grad;
  const auto forward = [&] {
    for (const PackedBatch& batch : batches)
      most_likely(model.hidden_at_targets(batch).value(), model.head());
    synchronize(device);
  };
  allocator(device).reset_peak();
  const double seconds = bench::median_seconds(forward, 10, 1);
  const double flops = train_flops_per_token(c, static_cast<double>(c.context), step.share()) / 3 *
                       static_cast<double>(step.tokens);
  std::printf("tokens                %lld, in micro batches of %lld\n",
              static_cast<long long>(step.tokens), static_cast<long long>(step.largest));
  std::printf("forward               %.3f ms\n", seconds * 1e3);
  print_rates(c, step, 1, seconds);
  std::printf("GFLOP/s               %.1f\n", flops / seconds * 1e-9);
  std::printf("peak memory           %.1f MiB\n",
              static_cast<double>(allocator(device).stats().peak_bytes) / (1 << 20));
  if (device.is_cuda())
    std::printf("MFU                   %.1f %%\n", 100 * flops / seconds / 989e12);
  if (ops) bench::print_op_times(device, forward, seconds, {});
}

// Steps of sequences of other lengths each, as in SFT: the memory that the allocator holds beside
// the peak of tensors.
void run_ragged(Learner& learner, const TrainConfig& config, int64_t steps, double targets) {
  const Transformer& model = learner.model();
  Allocator& memory = allocator(model.device());
  memory.reset_peak();
  Stopwatch clock;
  for (int64_t step = 0; step < steps; ++step) {
    std::vector<PackedBatch> batches =
        pack_micro_batches(random_sequences(model.config(), config.batch.batch_size,
                                            static_cast<uint64_t>(step) + 2, targets, true),
                           config.batch.micro_batch());
    const auto loss = [&](int64_t i) {
      const PackedBatch batch = model.to_device(batches[static_cast<size_t>(i)]);
      return cross_entropy(model.hidden_at_targets(batch, {.mode = Mode::kTrain}), model.head(),
                           batch.targets,
                           Tensor::full({batch.num_targets()}, 1e-4,
                                        accumulate_dtype(model.dtype()), model.device()));
    };
    learner.update(static_cast<int64_t>(batches.size()), loss, 1e-4);
    const AllocatorStats stats = memory.stats();
    if ((step + 1) % std::max<int64_t>(1, steps / 4) == 0)
      std::printf(
          "ragged step %-10lld peak %.1f MiB, held %.1f MiB (%.2f)\n",
          static_cast<long long>(step + 1), static_cast<double>(stats.peak_bytes) / (1 << 20),
          static_cast<double>(stats.reserved_bytes) / (1 << 20),
          static_cast<double>(stats.reserved_bytes) / static_cast<double>(stats.peak_bytes));
  }
  synchronize(model.device());
  std::printf("ragged                %.2f ms a step\n",
              1e3 * clock.lap() / static_cast<double>(steps));
}

void print_cpu_efficiency(const ModelConfig& model, const StepSizes& step,
                          double flops_per_second) {
  const double eigen = eigen_flops_per_second(step_gemms(model, step));
  std::printf("threads               %d\n", num_threads());
  std::printf("Eigen sgemm GFLOP/s   %.1f  (the step's own shapes)\n", eigen * 1e-9);
  std::printf("share of Eigen        %.0f %%\n", 100 * flops_per_second / eigen);
}

int run(int argc, char** argv) {
  CLI::App app{"training step benchmark"};
  std::string path;
  std::vector<std::string> overrides;
  int64_t vocab = 66, ragged = 0, classes = 1000;
  double targets = 0.15;
  bool graph = false, forward = false, no_ops = false;
  app.add_option("config", path, "CONFIG.yaml")->required();
  app.add_option("overrides", overrides, "key=value ...");
  app.add_option("--vocab", vocab, "vocabulary size")->capture_default_str();
  app.add_option("--classes", classes, "labels of trainer: classify")->capture_default_str();
  app.add_option("--targets", targets, "share of tokens with a label of trainer: mlm")
      ->capture_default_str();
  app.add_flag("--forward", forward, "the model's output alone, without gradients");
  app.add_flag("--no-ops", no_ops, "without the table of ops");
  app.add_option("--ragged", ragged, "steps of sequences of other lengths each, and no others");
  app.add_flag("--graph", graph,
               "on CUDA, also compare a micro batch's forward and backward with a CUDA graph");
  CLI11_PARSE(app, argc, argv);
  const TrainConfig config = load_plan(path, overrides).stages.back();
  if (config.num_threads > 0) set_num_threads(static_cast<int>(config.num_threads));
  const ModelConfig model = bench_model(config, vocab, classes);
  if (forward) {
    run_forward(config, model, parse_device(config.device, "device"), targets, !no_ops);
    return 0;
  }
  const RankInfo ranks = rank_info();
  std::unique_ptr<ProcessGroup> group;
  if (ranks.size > 1)
    group = std::make_unique<ProcessGroup>(ranks, ProcessGroup::default_options());
  const Device device =
      group ? Device::cuda(ranks.local_rank) : parse_device(config.device, "device");
  const auto comm = group ? make_communicator(*group, device) : make_single_communicator();
  Learner learner(std::make_unique<Transformer>(model, config.dtype, 1, device), config.optimizer,
                  *comm);
  std::vector<PackedBatch> batches = pack_micro_batches(
      random_sequences(model, config.batch.batch_size, 1, targets), config.batch.micro_batch());
  if (ragged > 0) {
    run_ragged(learner, config, ragged, targets);
    return 0;
  }
  const StepSizes sizes = place_batches(learner.model(), batches);
  const auto loss = [&](int64_t i) {
    const PackedBatch& batch = batches[static_cast<size_t>(i)];
    const Tensor weights =
        Tensor::full({batch.num_targets()}, 1.0 / static_cast<double>(sizes.targets),
                     accumulate_dtype(config.dtype), device);
    return cross_entropy(learner.model().hidden_at_targets(batch, {.mode = Mode::kTrain}),
                         learner.model().head(), batch.targets, weights);
  };
  const auto step = [&] { learner.update(static_cast<int64_t>(batches.size()), loss, 1e-4); };
  allocator(device).reset_peak();
  step();
  step();
  const int64_t reserved = allocator(device).stats().reserved_bytes;
  const double seconds = bench::median_seconds(step, 10, group ? 0 : 3);
  if (ranks.rank != 0) return 0;
  const AllocatorStats memory = allocator(device).stats();
  const int64_t peak = memory.peak_bytes;
  const OptimizerBytes optimizer =
      optimizer_bytes(config.optimizer, model, config.dtype, device, ranks.size);
  const int64_t estimate = estimate_memory(model, config.dtype,
                                           {.micro_batch_tokens = sizes.largest,
                                            .targets = sizes.share(),
                                            .optimizer = optimizer.memory,
                                            .optimizer_workspace = optimizer.workspace,
                                            .gradients = optimizer.gradients,
                                            .weights = optimizer.weights,
                                            .released = optimizer.released,
                                            .device = device})
                               .peak();
  const double flops =
      train_flops_per_token(model, static_cast<double>(model.context), sizes.share()) *
      static_cast<double>(sizes.tokens);
  std::printf("tokens per step       %d x %lld, in micro batches of %lld\n", ranks.size,
              static_cast<long long>(sizes.tokens), static_cast<long long>(sizes.largest));
  std::printf("step                  %.2f ms\n", seconds * 1e3);
  print_rates(model, sizes, ranks.size, seconds);
  std::printf("GFLOP/s               %.1f  (6 N_matmul + %d L d_attn T per token%s)\n",
              flops / seconds * 1e-9, model.is_encoder() ? 12 : 6,
              model.is_encoder() ? ", the head's by targets" : "");
  std::printf("peak memory           %.1f MiB, estimated %.1f MiB (%+.1f %%)\n",
              static_cast<double>(peak) / (1 << 20), static_cast<double>(estimate) / (1 << 20),
              100 * (static_cast<double>(estimate) / static_cast<double>(peak) - 1));
  std::printf("held from the system  %.1f MiB, %+.1f MiB since step 2\n",
              static_cast<double>(memory.reserved_bytes) / (1 << 20),
              static_cast<double>(memory.reserved_bytes - reserved) / (1 << 20));
  if (device.is_cuda())
    std::printf("MFU                   %.1f %%\n", 100 * flops / seconds / 989e12);
  else
    print_cpu_efficiency(model, sizes, flops / seconds);
  if (graph && device.is_cuda()) {
    const auto forward_and_backward = [&] {
      HeadLoss made = loss(0);
      backward(std::move(made));
    };
    GraphRunner recorded(device, forward_and_backward);
    recorded.run();
    const auto seconds_of = [&](const std::function<void()>& work) {
      return bench::median_seconds(
          [&] {
            work();
            synchronize(device);
          },
          10, 2);
    };
    const double eager = seconds_of(forward_and_backward),
                 replayed = seconds_of([&] { recorded.run(); });
    std::printf("forward and backward  %.3f ms, replayed as a CUDA graph %.3f ms (%.1f %% less)\n",
                eager * 1e3, replayed * 1e3, 100 * (1 - replayed / eager));
  }
  // The traced steps of several ranks would need all of them.
  if (!group && !no_ops)
    bench::print_op_times(
        device, step, seconds,
        bench::step_costs(learner.model(), config.optimizer.storage, sizes.tokens, sizes.targets));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  pin_nccl_algorithms();
  try {
    return run(argc, argv);
  } catch (const std::exception& e) {
    std::cerr << "cohort_bench_step: " << e.what() << '\n';
    return 2;
  }
}
