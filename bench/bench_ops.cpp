// The op table as a benchmark: one row per kernel with its shape, median time, GB/s or GFLOP/s, and
// the share of a bound timed beside it on as many threads. Ops that move data are held against a
// plain copy of as many bytes (every argument counts once, also one the formula does not need),
// products against Eigen's own sgemm. f32, random data.
//
//   cohort_bench_ops --filter attention --threads 2
#include <CLI/CLI.hpp>
#include <cstdio>
#include <iostream>

#include "bench/eigen_sgemm.h"
#include "bench/timing.h"
#include "core/parallel.h"
#include "kernels/attention/attention.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/head.h"
#include "kernels/matmul.h"
#include "kernels/norm.h"
#include "kernels/optimizer.h"
#include "kernels/policy_loss.h"
#include "kernels/rope.h"
#include "kernels/sampling.h"

namespace {

using namespace cohort;
using namespace cohort::kernels;

constexpr double kSeconds = 0.1;  // spent on each timing, at least
constexpr int64_t kTokens = 4096, kChannels = 512, kVocab = 8192;
constexpr Grad kOver = Grad::kOverwrite;

// What a row is held against: a copy of `bytes`, or, where `flops` is set, Eigen's rate on a
// product of m x n x k.
struct Work {
  double bytes = 0, flops = 0;
  int64_t m = 1024, n = 1024, k = 1024;
};
struct Row {
  std::string name, shape;
  Work work;
  std::function<void()> call;
};
using Rows = std::vector<Row>;

// `arrays` arrays of this shape, each read or written once.
Work moves(const Shape& shape, double arrays) {
  return {.bytes = arrays * sizeof(float) * static_cast<double>(shape.numel())};
}
Work multiplies(int64_t m, int64_t n, int64_t k, double products = 1) {
  return {.flops = products * 2 * static_cast<double>(m * n * k), .m = m, .n = n, .k = k};
}

// Uniform in [low, high).
Tensor random(const Shape& shape, float low = -2, float high = 2) {
  static uint64_t stream = 0;
  ++stream;
  Tensor t = Tensor::empty(shape, DType::kF32);
  for (int64_t i = 0; i < t.numel(); ++i) {
    const uint32_t word = philox(1, stream, static_cast<uint64_t>(i / 4))[i % 4];
    t.data<float>()[i] = low + (high - low) * uniform_f32(word);
  }
  return t;
}
template <class T>
Tensor random_ids(int64_t size, int64_t limit) {
  Rng rng(2, rng_stream(RngPurpose::kTest));
  std::vector<T> ids(static_cast<size_t>(size));
  for (T& id : ids) id = static_cast<T>(rng.below(limit));
  return Tensor::from(ids);
}
// 0, step, 2 step, ..., each modulo `period`.
template <class T>
Tensor counting(int64_t size, int64_t step, int64_t period) {
  std::vector<T> values;
  for (int64_t i = 0; i < size; ++i) values.push_back(static_cast<T>(i * step % period));
  return Tensor::from(values);
}

void add_matmul(Rows& rows) {
  // Layers of configs/demo.yaml, configs/shakespeare_char.yaml and a larger model, which decodes
  // last.
  for (const auto& [tokens, out, in] : {std::array<int64_t, 3>{8192, 176, 64},
                                        {768, 512, 128},
                                        {kTokens, 1376, kChannels},
                                        {32, 1376, kChannels}}) {
    const std::string shape = str("x[", tokens, ", ", in, "] w[", out, ", ", in, "]");
    Tensor x = random({tokens, in}), w = random({out, in}), dy = random({tokens, out});
    Tensor y = random({tokens, out}), dx = random({tokens, in}), dw = random({out, in});
    rows.push_back({"linear_forward", shape, multiplies(tokens, out, in),
                    [=]() mutable { linear_forward(y, x, w, {}); }});
    if (tokens <= 32) continue;
    rows.push_back(
        {"linear_dgrad", shape, multiplies(tokens, in, out), [=]() mutable { matmul(dx, dy, w); }});
    rows.push_back({"linear_wgrad", shape, multiplies(out, in, tokens),
                    [=]() mutable { matmul(dw, dy, x, {.a = Transpose::kYes}); }});
  }
}

void add_attention(Rows& rows) {
  for (const auto& [sequences, length, heads, dim] :
       {std::array<int64_t, 4>{128, 32, 4, 16}, {16, 256, 8, 64}, {2, 2048, 8, 64}}) {
    const std::string shape = str(sequences, " x ", length, " tokens, ", heads, " heads of ", dim);
    const Shape size{sequences * length, heads, dim};
    Tensor q = random(size), k = random(size), v = random(size), dout = random(size);
    Tensor o = random(size), dq = random(size), dk = random(size), dv = random(size);
    Tensor lse = random({heads, size[0]});
    const Tensor starts = counting<int32_t>(sequences + 1, length, size[0] + 1);
    attention_forward(o, lse, q, k, v, starts, {});  // for the backward
    // A causal product counts the visible half: two products forward, five backward.
    const double product = static_cast<double>(sequences * heads * length * (length + 1) * dim);
    rows.push_back({"attention_forward", shape, {.flops = 2 * product}, [=]() mutable {
                      attention_forward(o, lse, q, k, v, starts, {});
                    }});
    rows.push_back({"attention_backward", shape, {.flops = 5 * product}, [=]() mutable {
                      attention_backward(dq, kOver, dk, kOver, dv, kOver, dout, q, k, v, o, lse,
                                         starts, {});
                    }});
  }
  // Decode: each sequence brings one token and reads all its cached keys and values.
  constexpr int64_t kSequences = 64, kCached = 256, kBlock = 16, kHeads = 8, kDim = 64;
  const int64_t blocks = kSequences * kCached / kBlock;
  const Shape pages{blocks, kBlock, kHeads, kDim};
  const PagedKV cache{random(pages), random(pages),
                      counting<int32_t>(blocks, 1, blocks).reshape({kSequences, -1})};
  Tensor q = random({kSequences, kHeads, kDim}), o = random({kSequences, kHeads, kDim});
  const Tensor sequences = counting<int32_t>(kSequences, 1, kSequences);
  const Tensor positions = Tensor::full({kSequences}, kCached - 1, DType::kI32);
  rows.push_back({"attention_paged", str(kSequences, " x 1 token on ", kCached, " cached"),
                  moves(pages, 2),
                  [=]() mutable { attention_paged(o, q, cache, sequences, positions, {}); }});
}

void add_head(Rows& rows) {
  constexpr int64_t kRows = 1024;
  const std::string shape = str("x[", kRows, ", ", kChannels, "] w[", kVocab, ", ", kChannels, "]");
  Tensor x = random({kRows, kChannels}, -0.1f, 0.1f), w = random({kVocab, kChannels}, -0.1f, 0.1f);
  Tensor logprob = random({kRows}), entropy = random({kRows}), lse = random({kRows});
  Tensor dlogprob = random({kRows}), dx = random(x.shape()), dw = random(w.shape());
  const Tensor targets = random_ids<int32_t>(kRows, kVocab);
  head_logprob_forward(logprob, entropy, lse, x, w, targets, {});  // for the backward
  rows.push_back(
      {"head_logprob_forward", shape, multiplies(kRows, kVocab, kChannels),
       [=]() mutable { head_logprob_forward(logprob, entropy, lse, x, w, targets, {}); }});
  // Three products: the logits again, dx and dw.
  rows.push_back(
      {"head_logprob_backward", shape, multiplies(kRows, kVocab, kChannels, 3), [=]() mutable {
         head_logprob_backward(dx, kOver, dw, kOver, dlogprob, {}, x, w, targets, lse, entropy, {});
       }});
  const Shape logits{256, kVocab};
  const Tensor z = random(logits, -10, 10), address = random_ids<int64_t>(logits[0], 1 << 20);
  Tensor tokens = random_ids<int32_t>(logits[0], kVocab), drawn = random({logits[0]});
  for (const auto& [name, top_p] : {std::pair{"sample", 1.0}, {"sample_top_p", 0.9}})
    rows.push_back({name, logits.str(), moves(logits, 1), [=, top_p = top_p]() mutable {
                      sample_logits(tokens, drawn, z, address, address, {.top_p = top_p});
                    }});
}

// Ops on [tokens, channels], which share their tensors.
void add_row_ops(Rows& rows) {
  const Shape shape{kTokens, kChannels}, heads{kTokens, 8, kChannels / 8};
  const auto add = [&](const std::string& name, double arrays, std::function<void()> call) {
    rows.push_back({name, shape.str(), moves(shape, arrays), std::move(call)});
  };
  const Tensor x = random(shape), dy = random(shape), positive = random(shape, 0.1f, 1);
  const Tensor table = random({kVocab, kChannels}), ids = random_ids<int32_t>(kTokens, kVocab);
  const Tensor w = random({kChannels}), b = random({kChannels});
  Tensor y = random(shape), dx = random(shape), dtable = random(table.shape());
  Tensor dw = random({kChannels}), db = random({kChannels});
  Tensor mean = random({kTokens}), rstd = random({kTokens}, 0.5f, 1);

  add("rms_norm_forward", 2, [=]() mutable { rms_norm_forward(y, rstd, x, w, 1e-5); });
  add("rms_norm_backward", 3,
      [=]() mutable { rms_norm_backward(dx, kOver, dw, kOver, dy, x, w, rstd); });
  add("layer_norm_forward", 2, [=]() mutable { layer_norm_forward(y, mean, rstd, x, w, b, 1e-5); });
  add("layer_norm_backward", 3, [=]() mutable {
    layer_norm_backward(dx, kOver, dw, kOver, db, kOver, dy, x, w, mean, rstd);
  });
  add("softmax_forward", 2, [=]() mutable { softmax_forward(y, x); });
  add("softmax_backward", 3, [=]() mutable { softmax_backward(dx, dy, positive, kOver); });
  const Tensor positions = counting<int32_t>(kTokens, 1, 256);
  const DropoutSpec spec{
      .p = 0.1, .sequences = counting<int64_t>(kTokens, 1, kTokens), .positions = positions};
  add("dropout", 2, [=]() mutable { dropout(y, x, spec); });
  const Tensor angles = rope_table(256, heads[2], 10000, DType::kF32);
  add("rope", 2, [=, from = x.reshape(heads), to = y.reshape(heads)]() mutable {
    rope(to, from, positions, angles, RopeDirection::kForward);
  });
  add("embedding_forward", 2, [=]() mutable { embedding_forward(y, table, ids); });
  add("embedding_backward", 3,  // reads dy, adds it to rows of the table
      [=]() mutable { embedding_backward(dtable, dy, ids, Grad::kAccumulate); });

  // Positive where an op is not defined, or not smooth, at 0.
#define COHORT_ADD_UNARY(Op, name)                                                   \
  add(#name "_forward", 2, [=]() mutable { kernels::name##_forward(y, positive); }); \
  add(#name "_backward", 3,                                                          \
      [=]() mutable { kernels::name##_backward(dx, dy, positive, positive, kOver); });
#define COHORT_ADD_BINARY(Op, name)                                                     \
  add(#name "_forward", 3, [=]() mutable { kernels::name##_forward(y, x, positive); }); \
  add(#name "_backward", 5,                                                             \
      [=]() mutable { kernels::name##_backward(dx, kOver, y, kOver, dy, x, positive); });
  COHORT_UNARY_OPS(COHORT_ADD_UNARY)
  COHORT_BINARY_OPS(COHORT_ADD_BINARY)
#undef COHORT_ADD_UNARY
#undef COHORT_ADD_BINARY
}

void add_training(Rows& rows) {
  const Shape parameter{1 << 20}, tokens{16384};
  std::vector<AdamWTensor> adamw;
  std::vector<Tensor> gradients;
  for (int i = 0; i < 4; ++i) {
    gradients.push_back(random(parameter));
    adamw.push_back({.param = random(parameter),
                     .grad = gradients.back(),
                     .m = random(parameter),
                     .v = random(parameter, 0),
                     .weight_decay = 0.1});
  }
  const std::string shape = str("4 x ", parameter.str());
  // Reads parameter, gradient and moments; writes all but the gradient.
  rows.push_back({"adamw", shape, moves(parameter, 4 * 7),
                  [=]() mutable { adamw_step(adamw, {.learning_rate = 1e-4}); }});
  Tensor norm = Tensor::zeros({1}, DType::kF64);
  rows.push_back(
      {"grad_norm", shape, moves(parameter, 4), [=]() mutable { grad_norm(norm, gradients); }});
  const Tensor lp = random(tokens, -3, 0), old = random(tokens, -3, 0), ref = random(tokens, -3, 0);
  const Tensor advantage = random(tokens), weight = random(tokens, 0.5f, 1);
  Tensor loss = random({1}), dlogprob = random(tokens);
  rows.push_back({"policy_loss", tokens.str(), moves(tokens, 6), [=]() mutable {
                    PolicyLossStats stats;
                    policy_loss(loss, dlogprob, stats, lp, old, ref, advantage, weight,
                                {.beta = 0.01});
                  }});
}

double copy_seconds(double bytes) {
  const auto half = static_cast<int64_t>(bytes / sizeof(float) / 2);
  const Tensor from = random({half});
  Tensor to = random({half});
  const auto copy = [&] {
    parallel_for(half, 1 << 14, [&](int64_t begin, int64_t end) {
      std::copy(from.data<float>() + begin, from.data<float>() + end, to.data<float>() + begin);
    });
  };
  return bench::median_seconds(copy, 5, kSeconds);
}

// Timed beside its row, so that both meet the same machine.
double bound_seconds(const Work& w) {
  if (w.flops == 0) return copy_seconds(w.bytes);
  const double product = 2 * static_cast<double>(w.m * w.n * w.k);
  return bench::eigen_sgemm_seconds(w.m, w.n, w.k, num_threads()) * w.flops / product;
}

void print_row(const Row& row) {
  const double bound = bound_seconds(row.work);
  const double seconds = bench::median_seconds(row.call, 5, kSeconds);
  const bool product = row.work.flops > 0;
  std::printf("%-22s %-38s %11.1f %9.1f %-7s %7.0f %%\n", row.name.c_str(), row.shape.c_str(),
              seconds * 1e6, (product ? row.work.flops : row.work.bytes) / seconds * 1e-9,
              product ? "GFLOP/s" : "GB/s", 100 * bound / seconds);
  std::fflush(stdout);
}

int run(int argc, char** argv) {
  CLI::App app{"op benchmark"};
  std::string filter;
  int threads = num_threads();
  app.add_option("--filter", filter, "only ops whose name contains this text");
  app.add_option("--threads", threads, "CPU threads")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  set_num_threads(threads);

  Rows rows;
  for (const auto add : {add_matmul, add_attention, add_head, add_row_ops, add_training}) add(rows);
  std::erase_if(rows, [&](const Row& row) { return row.name.find(filter) == row.name.npos; });
  if (rows.empty()) throw InputError(str("no op has '", filter, "' in its name"));
  std::printf("%d threads, f32; share: of a copy of as many bytes, or of Eigen's sgemm\n", threads);
  std::printf("%-22s %-38s %11s %17s %9s\n", "op", "shape", "median us", "rate", "share");
  for (const Row& row : rows) print_row(row);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& e) {
    std::cerr << "cohort_bench_ops: " << e.what() << '\n';
    return 2;
  }
}
