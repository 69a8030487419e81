// The op table as a benchmark: one row per kernel with its shape, median time, GB/s or GFLOP/s, and
// the fraction of a reference rate that is timed on the same device. The reference of memory-bound
// ops is a plain copy of as many bytes (every argument counts once, even if the formula does not
// need it), that of matmuls Eigen's own sgemm on as many threads, or on CUDA cuBLAS's matmul of
// 8192^3. Random data.
//
//   cohort_bench_ops --filter attention --threads 2
//   cohort_bench_ops --device cuda --dtype bf16
#include <CLI/CLI.hpp>
#include <cstdio>
#include <iostream>
#include <memory>
#include <numeric>
#include <set>

#include "autograd/ops.h"
#include "bench/eigen_sgemm.h"
#include "bench/timing.h"
#include "core/graph.h"
#include "core/parallel.h"
#include "kernels/activation.h"
#include "kernels/attention/attention.h"
#include "kernels/embedding.h"
#include "kernels/gated_delta/gated_delta.h"
#include "kernels/lora.h"
#include "kernels/matmul.h"
#include "kernels/norm.h"
#include "kernels/optimizer.h"
#include "kernels/patches.h"
#include "kernels/quantized_weight.h"
#include "kernels/rope.h"
#include "kernels/sampling.h"

namespace {

using namespace cohort;
using namespace cohort::kernels;

constexpr double kSeconds = 0.1;  // minimum of each timing

// Device, dtype and sizes, which are large enough to fill the device.
struct Setup {
  Device device;
  DType dtype = DType::kF32;
  int64_t tokens = 4096, channels = 512, vocab = 8192;
};
Setup g_setup;

// Work of an op, which determines the reference: a copy of `bytes`, or if `flops` is set, Eigen's
// rate on a matmul of m x n x k.
struct Work {
  double bytes = 0, flops = 0;
  int64_t m = 1024, n = 1024, k = 1024;
};
struct Row {
  std::string name, shape;
  Work work;
  std::function<void()> call;
  int ops_per_call = 1;
};
using Rows = std::vector<Row>;

// `arrays` arrays of this shape, each read or written once.
Work moves(const Shape& shape, double arrays) {
  return {.bytes = arrays * static_cast<double>(dtype_size(g_setup.dtype)) *
                   static_cast<double>(shape.numel())};
}
Work multiplies(int64_t m, int64_t n, int64_t k, double count = 1) {
  return {.flops = count * 2 * static_cast<double>(m * n * k), .m = m, .n = n, .k = k};
}

// Uniform in [low, high).
Tensor random_of(DType dtype, const Shape& shape, float low, float high) {
  static uint64_t stream = 0;
  ++stream;
  Tensor t = Tensor::empty(shape, DType::kF32);
  float* values = t.data<float>();
  parallel_for(t.numel(), 1 << 14, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t word =
          philox(1, stream, static_cast<uint64_t>(i / 4))[static_cast<size_t>(i % 4)];
      values[i] = low + (high - low) * uniform_f32(word);
    }
  });
  return t.to(g_setup.device).to(dtype);
}
Tensor random(const Shape& shape, float low = -2, float high = 2) {
  return random_of(g_setup.dtype, shape, low, high);
}
// A tensor in the accumulate dtype: statistics, losses or weight gradients.
Tensor random_accumulator(const Shape& shape, float low = -2, float high = 2) {
  return random_of(accumulate_dtype(g_setup.dtype), shape, low, high);
}
template <class T>
Tensor random_ids(int64_t size, int64_t limit) {
  Rng rng(2, rng_stream(kBenchPurpose));
  std::vector<T> ids(static_cast<size_t>(size));
  for (T& id : ids) id = static_cast<T>(rng.below(limit));
  return Tensor::from(ids).to(g_setup.device);
}
// 0, step, 2 step, ..., each modulo `period`.
template <class T>
Tensor counting(int64_t size, int64_t step, int64_t period) {
  std::vector<T> values;
  for (int64_t i = 0; i < size; ++i) values.push_back(static_cast<T>(i * step % period));
  return Tensor::from(values).to(g_setup.device);
}

void add_matmul(Rows& rows) {
  // Layers of configs/demo.yaml, configs/shakespeare_char.yaml and a larger model, which decodes
  // last.
  std::vector<std::array<int64_t, 3>> sizes = {{8192, 176, 64},
                                               {768, 512, 128},
                                               {g_setup.tokens, 1376, g_setup.channels},
                                               {32, 1376, g_setup.channels}};
  if (g_setup.device.is_cuda())
    sizes = {{16384, 4864, 896}, {16384, 896, 4864}, {32768, 2304, 768}, {32, 4864, 896}};
  for (const auto& [tokens, out, in] : sizes) {
    const std::string shape = str("x[", tokens, ", ", in, "] w[", out, ", ", in, "]");
    Tensor x = random({tokens, in}), w = random({out, in}), dy = random({tokens, out});
    Tensor y = random({tokens, out}), dx = random({tokens, in}), dw = random_accumulator({out, in});
    rows.push_back({"linear_forward", shape, multiplies(tokens, out, in), [=]() mutable {
                      linear_forward({y, x, w, {}});
                    }});
    if (tokens <= 32) {
      const Tensor gate_and_up = random({2 * out, in});
      rows.push_back({"linear_activation",
                      str("x[", tokens, ", ", in, "] w", gate_and_up.shape().str()),
                      multiplies(tokens, 2 * out, in), [=]() mutable {
                        linear_activation({y, x, gate_and_up, {}, Activation::kSwiGlu});
                      }});
      continue;
    }
    rows.push_back({"linear_dgrad", shape, multiplies(tokens, in, out), [=]() mutable {
                      matmul({dx, dy, w});
                    }});
    rows.push_back({"linear_wgrad", shape, multiplies(out, in, tokens), [=]() mutable {
                      matmul({dw, dy, x, {.a = Transpose::kYes}});
                    }});
  }
}

// The layer of lora_linear with its weight in 8 or 4 bits, and its expansion.
void add_quantized(Rows& rows, const Tensor& x, const Tensor& a, const Tensor& w, Tensor y) {
  const int64_t out = w.dim(0), rank = a.dim(0), in = w.dim(1) - rank;
  for (const auto& [name, format] :
       {std::pair("int8", WeightFormat::kInt8), {"nf4", WeightFormat::kNf4}}) {
    const QuantizedWeight host =
        quantize_weight(w.narrow(1, 0, in).contiguous().to(Device{}).to(DType::kF32), format);
    const QuantizedWeight q{host.values.to(w.device()), host.scales.to(w.device()), in};
    const Tensor adapter = w.narrow(1, in, rank).contiguous();
    Tensor expanded = Tensor::empty({out, in}, w.dtype(), w.device());
    const auto bytes = static_cast<double>(q.nbytes());
    rows.push_back({str("dequantize_weight ", name),
                    expanded.shape().str(),
                    {.bytes = bytes + static_cast<double>(expanded.nbytes())},
                    [=]() mutable {
                      dequantize_weight({expanded, q});
                    }});
    if (reads_quantized(x.rows(), q, x.dtype(), rank, false))
      rows.push_back({str("quantized_linear ", name),
                      str("x", x.shape().str(), " w", w.shape().str()),
                      {.bytes = bytes},
                      [=, h = x.narrow(1, in, rank), body = x.narrow(1, 0, in)]() mutable {
                        lora_input({.h = h, .x = body, .a = a});
                        quantized_linear({y, x, q, adapter, {}});
                      }});
  }
}

// h of an adapter of rank 64, and the layer that adds it, for decoding and training.
void add_lora(Rows& rows) {
  constexpr int64_t kRank = 64;
  std::vector<std::array<int64_t, 3>> sizes = {{32, 512, 128}};
  if (g_setup.device.is_cuda())
    sizes = {{1, 896, 896},      {64, 896, 896},    {512, 896, 896},    {1, 4096, 4096},
             {64, 4096, 4096},   {512, 4096, 4096}, {1, 4096, 14336},   {64, 4096, 14336},
             {512, 4096, 14336}, {1, 6144, 4096},   {64, 6144, 4096},   {1, 28672, 4096},
             {64, 28672, 4096},  {16384, 896, 896}, {3072, 4096, 4096}, {32768, 4096, 4096},
             {8192, 4096, 14336}};
  for (const auto& [tokens, out, in] : sizes) {
    const Tensor x = random({tokens, in + kRank}), a = random({kRank, in});
    const Tensor w = random({out, in + kRank}), body = x.narrow(1, 0, in);
    Tensor h = x.narrow(1, in, kRank), y = random({tokens, out});
    rows.push_back({"lora_input", str("x[", tokens, ", ", in, "] a", a.shape().str()),
                    moves({tokens, in}, 1),
                    [=]() mutable { lora_input({.h = h, .x = body, .a = a}); }});
    rows.push_back({"lora_linear", str("x", x.shape().str(), " w", w.shape().str()),
                    multiplies(tokens, out, in + kRank), [=]() mutable {
                      lora_input({.h = h, .x = body, .a = a});
                      linear_forward({y, x, w, {}, kRank});
                    }});
    add_quantized(rows, x, a, w, y);
  }
  // The gradients of h and B, of rank 16.
  std::vector<std::array<int64_t, 3>> outputs = {{512, 128, 1}};
  if (g_setup.device.is_cuda())
    outputs = {
        {3072, 4096, 1}, {3072, 6144, 1}, {3072, 28672, 2}, {16384, 896, 1}, {16384, 9728, 2}};
  for (const auto& [tokens, out, count] : outputs) {
    const int64_t rank = 16;
    std::vector<AdapterSlice> modules;
    for (int64_t m = 0; m < count; ++m) modules.push_back({m * (out / count), out / count});
    const Tensor dy = random({tokens, out}), h = random({tokens, kRank});
    const Tensor w = random({out, 512 + kRank}), sb = w.narrow(1, 512, kRank);
    Tensor dh = random({tokens, kRank}), db = random_accumulator({out, rank});
    rows.push_back({"lora_output_gradients",
                    str("dy", dy.shape().str(), " of ", count, count > 1 ? " modules" : " module"),
                    moves({tokens, out}, 1), [=]() mutable {
                      lora_output_gradients(
                          {.dh = dh, .db = {db}, .dy = dy, .h = h, .sb = sb, .modules = modules});
                    }});
  }
}

void add_attention(Rows& rows) {
  std::vector<std::array<int64_t, 5>> sizes = {
      {128, 32, 4, 4, 16}, {16, 256, 8, 8, 64}, {2, 2048, 8, 8, 64}};
  if (g_setup.device.is_cuda())
    sizes = {{64, 256, 6, 6, 64},    {32, 1024, 12, 12, 64}, {8, 2048, 14, 2, 64},
             {4, 4096, 32, 32, 64},  {1, 16384, 32, 32, 64}, {4, 4096, 16, 16, 128},
             {1, 16384, 16, 16, 128}};
  for (const auto& [sequences, length, heads, kv_heads, dim] : sizes) {
    const std::string grouped = heads == kv_heads ? "" : str("/", kv_heads);
    const std::string shape =
        str(sequences, " x ", length, " tokens, ", heads, grouped, " heads of ", dim);
    const Shape size{sequences * length, heads, dim}, kv_size{size[0], kv_heads, dim};
    Tensor q = random(size), k = random(kv_size), v = random(kv_size), dout = random(size);
    Tensor o = random(size), dq = random(size), dk = random(kv_size), dv = random(kv_size);
    Tensor lse = random_accumulator({heads, size[0]});
    const Tensor starts = counting<int32_t>(sequences + 1, length, size[0] + 1);
    attention_forward({o, lse, q, k, v, starts, {}});  // for the backward
    // FLOPs of the causal half of one matmul: the forward has two matmuls, the backward five.
    const double matmul_flops =
        static_cast<double>(sequences * heads * length * (length + 1) * dim);
    rows.push_back({"attention_forward", shape, {.flops = 2 * matmul_flops}, [=]() mutable {
                      attention_forward({o, lse, q, k, v, starts, {}});
                    }});
    rows.push_back({"attention_backward", shape, {.flops = 5 * matmul_flops}, [=]() mutable {
                      attention_backward({{dq}, {dk}, {dv}, dout, q, k, v, o, lse, starts, {}});
                    }});
  }
}

// Pages of a cache: random ones, repeated, since random numbers come from the host.
Tensor random_pages(const Shape& shape, DType dtype) {
  const Tensor some = random({std::min<int64_t>(shape[0], 1024), shape[1], shape[2], shape[3]});
  Tensor out = Tensor::empty(shape, dtype, g_setup.device);
  for (int64_t block = 0; block < shape[0]; block += some.dim(0)) {
    const int64_t count = std::min(some.dim(0), shape[0] - block);
    out.narrow(0, block, count).copy_(some.narrow(0, 0, count).to(dtype));
  }
  return out;
}

// Decode attention of one token per sequence over its cached keys and values. A call uses several
// caches, like the layers of a model, so that they are not read from the device's L2 cache. It is
// replayed as a graph, like decode steps.
void add_decode_from(Rows& rows, DType dtype) {
  constexpr int64_t kBlock = 16;
  constexpr int kCaches = 5;
  std::vector<std::array<int64_t, 5>> sizes = {{64, 256, 8, 8, 64}};
  if (g_setup.device.is_cuda())
    sizes = {{1, 640, 14, 2, 64},    {64, 640, 14, 2, 64},   {256, 256, 14, 2, 64},
             {512, 384, 14, 2, 64},  {512, 2048, 14, 2, 64}, {1, 1024, 32, 8, 128},
             {1, 32768, 32, 8, 128}, {32, 4096, 32, 8, 128}, {512, 2048, 32, 8, 128}};
  for (const auto& [sequences, cached, heads, kv_heads, dim] : sizes) {
    const int64_t blocks = sequences * cached / kBlock;
    const Shape pages{blocks, kBlock, kv_heads, dim};
    const Tensor table = counting<int32_t>(blocks, 1, blocks).reshape({sequences, -1});
    std::vector<PagedKV> caches;
    const Tensor scales = Tensor::full({2 * kv_heads}, 0x1p-8, DType::kF32, g_setup.device);
    for (int i = 0; i < kCaches; ++i)
      caches.push_back({random_pages(pages, dtype), random_pages(pages, dtype), table,
                        dtype == DType::kE4M3 ? scales : Tensor()});
    Tensor qkv = random({sequences, heads + 2 * kv_heads, dim});
    Tensor o = random({sequences, heads, dim});
    const Tensor angles =
        rope_table(cached, rope_frequencies(dim, 10000), 1, DType::kF32).to(g_setup.device);
    const Tensor numbers = counting<int32_t>(sequences, 1, sequences);
    const Tensor positions =
        Tensor::full({sequences}, static_cast<double>(cached - 1), DType::kI32, g_setup.device);
    const auto replay = std::make_shared<GraphRunner>(g_setup.device, [=]() mutable {
      for (PagedKV& cache : caches)
        attention_decode({.o = o,
                          .cache = cache,
                          .qkv = qkv,
                          .sequences = numbers,
                          .positions = positions,
                          .table = angles});
    });
    rows.push_back(
        {dtype == DType::kE4M3 ? "attention_decode_e4m3" : "attention_decode",
         str(sequences, " on ", cached, " keys, ", heads, "/", kv_heads, " heads of ", dim),
         {.bytes = 2.0 * static_cast<double>(caches[0].k.nbytes())},
         [replay] { replay->run(); },
         kCaches});
  }
}

void add_decode(Rows& rows) {
  add_decode_from(rows, g_setup.dtype);
  if (g_setup.dtype == DType::kBF16) add_decode_from(rows, DType::kE4M3);
}

// The gated delta rule, of packed sequences and of one token of each of many.
void add_gated_delta(Rows& rows) {
  std::vector<std::array<int64_t, 5>> sizes = {{4, 256, 2, 4, 32}};
  if (g_setup.device.is_cuda())
    sizes = {{1, 8192, 16, 32, 128}, {8, 1024, 16, 32, 128}, {1, 8192, 16, 16, 128},
             {1, 10240, 4, 8, 128},  {5, 2048, 2, 4, 128},   {256, 1, 2, 4, 128},
             {256, 1, 16, 32, 128},  {512, 1, 16, 16, 128}};
  for (const auto& [sequences, length, key_heads, heads, dim] : sizes) {
    const std::string shape =
        str(sequences, " x ", length, " tokens, ", heads, "/", key_heads, " heads of ", dim);
    const int64_t tokens = sequences * length;
    const Shape keys{tokens, key_heads, dim}, values{tokens, heads, dim}, gates{tokens, heads};
    const DeltaTensors in{.q = random(keys, -0.1f, 0.1f),
                          .k = random(keys, -0.1f, 0.1f),
                          .v = random(values),
                          .g = random_accumulator(gates, -1, 0),
                          .beta = random_accumulator(gates, 0, 1)};
    Tensor o = random(values), u = random(values);
    const auto bytes = static_cast<double>(2 * in.q.nbytes() + 3 * in.v.nbytes());
    const Tensor starts = counting<int32_t>(sequences + 1, length, tokens + 1),
                 numbers = counting<int32_t>(sequences, 1, sequences),
                 positions = Tensor::full({sequences}, 100, DType::kI32, g_setup.device);
    if (length == 1) {
      const DType statistic = accumulate_dtype(g_setup.dtype);
      DeltaState state{Tensor::zeros({sequences, heads, dim, dim}, statistic, g_setup.device),
                       random({sequences, kDeltaChunk, key_heads, dim}, -0.1f, 0.1f),
                       random({sequences, kDeltaChunk, heads, dim}),
                       random_accumulator({sequences, kDeltaChunk, heads}, -1, 0)};
      // Half of the matrix in bf16, and the rows before.
      const double state_bytes = static_cast<double>(state.s.nbytes()) / 2 +
                                 static_cast<double>(state.k.nbytes() + state.u.nbytes()) * 36 / 64;
      const auto replay = std::make_shared<GraphRunner>(g_setup.device, [=]() mutable {
        gated_delta_cached({o, state, in, numbers, positions, 0, true});
      });
      rows.push_back(
          {"gated_delta_decode", shape, {.bytes = state_bytes}, [replay] { replay->run(); }});
      continue;
    }
    rows.push_back({"gated_delta", shape, {.bytes = bytes}, [=]() mutable {
                      gated_delta({o, u, in, starts});
                    }});
    Tensor dq = random(keys), dk = random(keys), dv = random(values),
           dg = random_accumulator(gates), dbeta = random_accumulator(gates);
    rows.push_back({"gated_delta_backward", shape, {.bytes = 2 * bytes}, [=]() mutable {
                      gated_delta_backward({{dq}, {dk}, {dv}, {dg}, {dbeta}, o, in, u, starts});
                    }});
  }
}

void add_head(Rows& rows) {
  const int64_t kRows = g_setup.device.is_cuda() ? 8192 : 1024;
  const std::string shape =
      str("x[", kRows, ", ", g_setup.channels, "] w[", g_setup.vocab, ", ", g_setup.channels, "]");
  Tensor x = random({kRows, g_setup.channels}, -0.1f, 0.1f),
         w = random({g_setup.vocab, g_setup.channels}, -0.1f, 0.1f);
  Tensor logprob = random_accumulator({kRows}), entropy = random_accumulator({kRows}),
         lse = random_accumulator({kRows});
  Tensor dlogprob = random_accumulator({kRows}), dx = random(x.shape()),
         dw = random_accumulator(w.shape());
  const Tensor targets = random_ids<int32_t>(kRows, g_setup.vocab);
  head_logprob_forward({logprob, entropy, lse, {x, w, targets}});  // for the backward
  rows.push_back({"head_logprob_forward", shape, multiplies(kRows, g_setup.vocab, g_setup.channels),
                  [=]() mutable {
                    head_logprob_forward({logprob, entropy, lse, {x, w, targets}});
                  }});
  // Three matmuls: the recomputed logits, dx and dw.
  rows.push_back(
      {"head_logprob_backward", shape, multiplies(kRows, g_setup.vocab, g_setup.channels, 3),
       [=]() mutable {
         head_logprob_backward({{dx}, {dw}, dlogprob, {}, {x, w, targets}, lse, entropy});
       }});
  const Shape logits{256, g_setup.vocab};
  const Tensor z = random_accumulator(logits, -10, 10),
               address = random_ids<int64_t>(logits[0], 1 << 20);
  Samples out{.tokens = random_ids<int32_t>(logits[0], g_setup.vocab),
              .logprob = random_accumulator({logits[0]}),
              .entropy = random_accumulator({logits[0]}),
              .truncated_mass = random_accumulator({logits[0]}),
              .sampling_logprob = random_accumulator({logits[0]})};
  const Tensor slots = Tensor::zeros({logits[0]}, DType::kI32, g_setup.device);
  const auto add_sample = [&](const char* name, const SamplingParams& params) {
    SamplingState state{.params = pack_params({&params, 1}).to(g_setup.device)};
    rows.push_back({name, logits.str(), moves(logits, 1), [=]() mutable {
                      sample_logits({out, state, z, slots, address});
                    }});
  };
  add_sample("sample", {});
  add_sample("sample_top_p", {.top_p = 0.9});
  add_sample("sample_min_p", {.min_p = 0.05});
  // With counts, every row needs its own slot. Traffic: logits and counts are read, the modified
  // logits are written and read.
  const std::vector<SamplingParams> penalties(static_cast<size_t>(logits[0]),
                                              {.presence_penalty = 0.5});
  std::vector<int32_t> slot_ids(penalties.size());
  std::iota(slot_ids.begin(), slot_ids.end(), 0);
  SamplingState state{.params = pack_params(penalties).to(g_setup.device),
                      .counts = Tensor::zeros(logits, DType::kI32, g_setup.device)};
  rows.push_back({"sample_penalties", logits.str(), moves(logits, 4),
                  [=, own_slots = Tensor::from(slot_ids).to(g_setup.device)]() mutable {
                    sample_logits({out, state, z, own_slots, address});
                  }});
}

// Ops on [tokens, channels], which use the same tensors.
void add_row_ops(Rows& rows) {
  const Shape shape{g_setup.tokens, g_setup.channels},
      heads{g_setup.tokens, g_setup.channels / 64, 64};
  const auto add = [&](const std::string& name, double arrays, std::function<void()> call) {
    rows.push_back({name, shape.str(), moves(shape, arrays), std::move(call)});
  };
  const Tensor x = random(shape), dy = random(shape), positive = random(shape, 0.1f, 1);
  const Tensor table = random({g_setup.vocab, g_setup.channels}),
               ids = random_ids<int32_t>(g_setup.tokens, g_setup.vocab);
  const Tensor w = random({g_setup.channels}), b = random({g_setup.channels});
  Tensor y = random(shape), z = random(shape), dx = random(shape);
  Tensor dtable = random_accumulator(table.shape());
  Tensor dw = random_accumulator({g_setup.channels}), db = random_accumulator({g_setup.channels});
  Tensor mean = random_accumulator({g_setup.tokens}),
         rstd = random_accumulator({g_setup.tokens}, 0.5f, 1);

  add("rms_norm_forward", 2, [=]() mutable { rms_norm_forward({y, rstd, x, w, 1e-5}); });
  add("rms_norm_backward", 3, [=]() mutable { rms_norm_backward({{dx}, {dw}, dy, x, w, rstd}); });
  add("add_rms_norm_forward", 4, [=]() mutable {
    add_rms_norm_forward({z, y, rstd, x, dy, w, 1e-5});
  });
  add("bias_backward", 1, [=]() mutable { bias_backward({{db}, dy}); });
  add("layer_norm_forward", 2, [=]() mutable {
    layer_norm_forward({y, mean, rstd, x, w, b, 1e-5});
  });
  add("layer_norm_backward", 3, [=]() mutable {
    layer_norm_backward({{dx}, {dw}, {db}, dy, x, w, mean, rstd});
  });
  const Tensor positions = counting<int32_t>(g_setup.tokens, 1, 256);
  const DropoutSpec spec{.p = 0.1,
                         .sequences = counting<int64_t>(g_setup.tokens, 1, g_setup.tokens),
                         .positions = positions};
  add("dropout", 2, [=]() mutable { dropout({y, x, spec}); });
  const Tensor angles =
      rope_table(256, rope_frequencies(heads[2], 10000), 1, DType::kF32).to(g_setup.device);
  add("rope", 2, [=, from = x.reshape(heads), to = y.reshape(heads)]() mutable {
    rope({to, from, positions, angles, RopeDirection::kForward});
  });
  add("embedding_forward", 2, [=]() mutable { embedding_forward({y, table, ids}); });
  // Reads dy; reads and writes the rows of the gradient (f32 with bf16) that have a token.
  const auto tokens = ids.to_vector<int32_t>();
  const auto touched = static_cast<double>(std::set(tokens.begin(), tokens.end()).size());
  const double gradient_words = g_setup.dtype == DType::kBF16 ? 2 : 1;
  add("embedding_backward", 1 + 2 * gradient_words * touched / static_cast<double>(g_setup.tokens),
      [=]() mutable {
        embedding_backward({{dtable, Grad::kAccumulate}, dy, ids});
      });

  // Images of 224 pixels in patches of 16: reads bytes, writes as many elements.
  const int64_t images = g_setup.device.is_cuda() ? 64 : 4, side = 224, channels = 3;
  std::vector<uint8_t> bytes(static_cast<size_t>(images * side * side * channels));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 2654435761u >> 24);
  const Tensor pixels = Tensor::from(bytes, {images, side, side, channels}).to(g_setup.device);
  const Tensor byte_values = random_accumulator({channels, 256});
  Tensor rows_of_patches = random({images * 14 * 14, channels * 16 * 16});
  rows.push_back({"patches",
                  pixels.shape().str(),
                  {.bytes = static_cast<double>(pixels.numel()) *
                            static_cast<double>(1 + dtype_size(g_setup.dtype))},
                  [=]() mutable {
                    patches({rows_of_patches, pixels, byte_values, 16});
                  }});

  // `positive` is used because some ops are not defined, or not smooth, at 0.
#define COHORT_ADD_UNARY(Op, name)                                                     \
  add(#name "_forward", 2, [=]() mutable { kernels::name##_forward({y, positive}); }); \
  add(#name "_backward", 3, [=]() mutable {                                            \
    kernels::name##_backward({{dx}, dy, positive, positive});                          \
  });
#define COHORT_ADD_BINARY(Op, name)                                                       \
  add(#name "_forward", 3, [=]() mutable { kernels::name##_forward({y, x, positive}); }); \
  add(#name "_backward", 5, [=]() mutable {                                               \
    kernels::name##_backward({{dx}, {y}, dy, x, positive});                               \
  });
  const Tensor halves = random({shape[0], 2 * shape[1]});
  Tensor dhalves = random(halves.shape());
#define COHORT_ADD_GATED(Op, name)                                                   \
  add(#name "_forward", 3, [=]() mutable { kernels::name##_forward({y, halves}); }); \
  add(#name "_backward", 5, [=]() mutable { kernels::name##_backward({{dhalves}, dy, halves}); });
  // The case of an MLP with biases whose activation is recomputed.
  Tensor dbias = random_accumulator({g_setup.channels}), dy_then_y = random(shape);
  add("activation_backward", 4, [=]() mutable {
    activation_backward({dx, {dbias}, dy_then_y, x, Activation::kGeluTanh, dy_then_y});
  });
  COHORT_UNARY_OPS(COHORT_ADD_UNARY)
  COHORT_BINARY_OPS(COHORT_ADD_BINARY)
  COHORT_GATED_OPS(COHORT_ADD_GATED)
#undef COHORT_ADD_UNARY
#undef COHORT_ADD_BINARY
#undef COHORT_ADD_GATED
}

void add_training(Rows& rows) {
  const Shape parameter{g_setup.device.is_cuda() ? 1 << 26 : 1 << 20}, tokens{16384};
  std::vector<AdamWTensor> adamw;
  std::vector<Tensor> gradients;
  for (int i = 0; i < 4; ++i) {
    gradients.push_back(random_accumulator(parameter));
    adamw.push_back({.param = random(parameter),
                     .grad = gradients.back(),
                     .m = random_accumulator(parameter),
                     .v = random_accumulator(parameter, 0),
                     .weight_decay = 0.1});
    if (g_setup.dtype == DType::kBF16)
      adamw.back().low_bits = Tensor::zeros({2 * parameter.numel()}, DType::kU8, g_setup.device);
  }
  const std::string shape = str("4 x ", parameter.str());
  // Reads parameter, low bits of its master, gradient and moments; writes all but the gradient.
  const double words = g_setup.dtype == DType::kBF16 ? 14 : 7;
  rows.push_back({"adamw", shape, moves(parameter, 4 * words),
                  [=]() mutable { adamw_step(adamw, {.learning_rate = 1e-4}); }});
  Tensor norm = Tensor::zeros({1}, DType::kF64, g_setup.device);
  const double gradient_words = g_setup.dtype == DType::kBF16 ? 2 : 1;
  rows.push_back({"grad_norm", shape, moves(parameter, 4 * gradient_words),
                  [=]() mutable { grad_norm(norm, gradients); }});
  const Tensor lp = random_accumulator(tokens, -3, 0);
  const PolicyLossConstants constants{.old_logprob = random_accumulator(tokens, -3, 0),
                                      .ref_logprob = random_accumulator(tokens, -3, 0),
                                      .advantage = random_accumulator(tokens),
                                      .weight = random_accumulator(tokens, 0.5f, 1)};
  Tensor loss = random_accumulator({1}), dlogprob = random_accumulator(tokens),
         stats = PolicyLossStats::zeros(g_setup.device);
  Tensor terms =
      Tensor::empty({tokens.numel(), 1 + PolicyLossStats::kSize}, DType::kF64, g_setup.device);
  rows.push_back(
      {"policy_loss", tokens.str(), moves(tokens, 6 + 2 * 14), [=]() mutable {
         policy_loss_terms({dlogprob, terms, lp, constants, {.beta = 0.01}, 0, tokens.numel()});
         policy_loss_sums({loss, stats, terms});
       }});
}

// Seconds of one call. On a device many calls are enqueued at a time, so that the host's launch
// cost does not count.
double call_seconds(const std::function<void()>& call) {
  if (g_setup.device.is_cpu()) return bench::median_seconds(call, 5, kSeconds);
  constexpr int kCalls = 20;
  const auto many = [&] {
    for (int i = 0; i < kCalls; ++i) call();
    synchronize(g_setup.device);
  };
  return bench::median_seconds(many, 5, 0.02) / kCalls;
}

double copy_seconds(double bytes) {
  if (g_setup.device.is_cuda()) {
    const auto half = static_cast<int64_t>(bytes / 2);
    const Tensor from = Tensor::empty({half}, DType::kU8, g_setup.device);
    Tensor to = Tensor::empty_like(from);
    return call_seconds([&] { to.copy_(from); });
  }
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

// Seconds of the reference. Copies and Eigen's matmuls are timed right before their row, so that
// both run at the same clocks; cuBLAS's matmul is timed once.
double reference_seconds(const Work& w) {
  if (w.flops == 0) return copy_seconds(w.bytes);
  if (g_setup.device.is_cuda()) {
    constexpr int64_t kSize = 8192;
    static const double rate = [] {
      Tensor a = random({kSize, kSize}), b = random({kSize, kSize}), c = Tensor::empty_like(a);
      return 2.0 * kSize * kSize * kSize / call_seconds([&] {
               matmul({c, a, b, {.b = Transpose::kYes}});
             });
    }();
    return w.flops / rate;
  }
  const double sgemm_flops = 2 * static_cast<double>(w.m * w.n * w.k);
  return bench::eigen_sgemm_seconds(w.m, w.n, w.k, num_threads()) * w.flops / sgemm_flops;
}

void print_row(const Row& row) {
  const double reference = reference_seconds(row.work);
  const double seconds = call_seconds(row.call) / row.ops_per_call;
  const bool is_matmul = row.work.flops > 0;
  std::printf("%-22s %-38s %11.1f %9.1f %-7s %7.0f %%\n", row.name.c_str(), row.shape.c_str(),
              seconds * 1e6, (is_matmul ? row.work.flops : row.work.bytes) / seconds * 1e-9,
              is_matmul ? "GFLOP/s" : "GB/s", 100 * reference / seconds);
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
  std::string device = "cpu", dtype = "f32";
  app.add_option("--device", device, "cpu, cuda or cuda:N")->capture_default_str();
  app.add_option("--dtype", dtype, "f32, or bf16 on CUDA")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  set_num_threads(threads);
  g_setup.device = parse_device(device, "device");
  if (dtype == "bf16") g_setup.dtype = DType::kBF16;
  if (g_setup.device.is_cuda()) {
    g_setup.tokens = 16384;
    g_setup.channels = 4096;
    g_setup.vocab = 32768;
  } else if (g_setup.dtype == DType::kBF16) {
    throw InputError("--dtype: bf16 needs a CUDA device");
  }

  Rows rows;
  for (const auto add : {add_matmul, add_lora, add_attention, add_decode, add_gated_delta, add_head,
                         add_row_ops, add_training})
    add(rows);
  std::erase_if(rows, [&](const Row& row) { return row.name.find(filter) == row.name.npos; });
  if (rows.empty()) throw InputError(str("--filter: no op name contains '", filter, "'"));
  if (g_setup.device.is_cuda())
    std::printf("%s, %s; share: relative to a copy of as many bytes, or to cuBLAS at 8192^3\n",
                device.c_str(), dtype.c_str());
  else
    std::printf(
        "%d threads, f32; share: relative to a copy of as many bytes, or to Eigen's sgemm\n",
        threads);
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
