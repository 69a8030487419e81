// cohort.ops: the differentiable ops. Unary, binary and gated ones come from their lists.
#include "autograd/ops.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <utility>

#include "core/rng.h"
#include "core/sizes.h"
#include "kernels/attention/attention.h"
#include "kernels/quantize.h"
#include "kernels/rope.h"
#include "kernels/sampling.h"
#include "python/bindings/bindings.h"

namespace cohort::python {

using kernels::AttentionDesc;

Tensor packed(const Tensor& t) {
  if (t.rank() != 3 && t.rank() != 4) return t;  // the kernel's check names the shape
  const bool is_batch = t.rank() == 4;
  const Shape& steps = t.strides();
  const auto fits = [&](int64_t bytes) { return t.device().is_cpu() || bytes % 16 == 0; };
  const auto size = static_cast<int64_t>(dtype_size(t.dtype()));
  const bool is_strided = steps[-1] == 1 && fits(steps[-2] * size) && fits(steps[-3] * size) &&
                          (!is_batch || t.dim(0) < 2 || steps[0] == steps[1] * t.dim(1));
  const bool is_view =
      fits(reinterpret_cast<intptr_t>(t.raw())) && (t.is_contiguous() || is_strided);
  if (!is_batch) return is_view ? t : t.clone();
  const Shape shape{t.dim(0) * t.dim(1), t.dim(2), t.dim(3)};
  if (!is_view || t.is_contiguous()) return (is_view ? t : t.clone()).reshape(shape);
  return Tensor::borrow(
      const_cast<void*>(t.raw()), [t] {}, shape, {steps[1], steps[2], 1}, t.dtype(), t.device());
}

Tensor sequence_offsets(const Tensor& cu_seqlens, const Tensor& q) {
  if (cu_seqlens.defined()) return cu_seqlens;
  const bool is_batch = q.rank() == 4;
  const int64_t count = is_batch ? q.dim(0) : 1,
                length = q.rank() == 0 ? 0 : q.dim(is_batch ? 1 : 0);
  if (count * length > INT32_MAX)
    throw InputError(str("flash_attention: ", q.str(), " has more than 2^31 - 1 tokens"));
  // An upload costs more than a small kernel. Entries stay, because any stream may be using them.
  constexpr size_t kMaxEntries = 256;
  static std::mutex mutex;
  static auto& cache = *new std::map<std::tuple<int, int64_t, int64_t>, Tensor>;
  const std::lock_guard lock(mutex);
  const std::tuple key{q.device().is_cpu() ? -1 : q.device().index, count, length};
  if (const auto it = cache.find(key); it != cache.end()) return it->second;
  std::vector<int32_t> offsets;
  for (int64_t i = 0; i <= count; ++i) offsets.push_back(static_cast<int32_t>(i * length));
  const Tensor out = Tensor::from(offsets).to(q.device());
  if (cache.size() < kMaxEntries) {
    synchronize(q.device());  // other streams do not wait for this one
    cache[key] = out;
  }
  return out;
}

namespace {

// The purpose of rng_stream() for tokens of sample().
constexpr uint64_t kPythonSamplePurpose = 10;

// A tensor of indices in i32. On CUDA the values are not checked.
Tensor indices(const Tensor& x) {
  if (!x.defined()) return x;
  COHORT_CHECK(is_integer(x.dtype()), "[indices] expected an integer type, got ", x.str());
  if (x.dtype() == DType::kI64 && x.device().is_cpu())
    for (const int64_t value : x.to_vector<int64_t>())
      COHORT_CHECK(std::in_range<int32_t>(value), "[indices] ", value, " is out of range");
  return x.contiguous().to(DType::kI32);
}

// A table of terms of the scores: a constant in f64, numpy's default, becomes f32 for q of less.
Variable table(const Variable& x, const Variable& q) {
  const bool is_wide = x.defined() && x.value().dtype() == DType::kF64 && !x.requires_grad() &&
                       q.value().dtype() != DType::kF64;
  return is_wide ? Variable(x.value().to(DType::kF32)) : x;
}

// Checks the tile mask and the prefixes of sequences of one length, `length`.
void check_masks(const AttentionDesc& desc, int64_t length) {
  const int64_t tiles = ceil_div(length, kernels::kMaskTile);
  if (desc.tiles.defined() && desc.tiles.rank() == 2 && desc.tiles.dim(0) != tiles)
    throw InputError(str("flash_attention: tiles: a mask of ", desc.tiles.dim(0), " x ",
                         desc.tiles.dim(0), " tiles for sequences of ", length,
                         " tokens; hint: tile_mask() of visible [", tiles, ", ", tiles, "]"));
  if (!desc.prefix_lm.defined() || !desc.prefix_lm.device().is_cpu()) return;
  for (const int32_t prefix : desc.prefix_lm.to_vector<int32_t>())
    if (prefix < 0 || prefix > length)
      throw InputError(
          str("flash_attention: prefix_lm: expected lengths from 0 to ", length, ", got ", prefix));
}

// x [.., heads, D] rounded to multiples of e4m3 numbers by `scales` [heads]; gradients pass
// unchanged.
Variable round_heads(const Variable& x, const Tensor& scales) {
  const Tensor heads = packed(x.value()).contiguous();
  Tensor y = Tensor::empty_like(heads);
  kernels::rope({.y = y,
                 .x = heads,
                 .positions = Tensor::zeros({heads.dim(0)}, DType::kI32, heads.device()),
                 .table = {},
                 .scales = scales});
  return make_node("round_heads", y.reshape(x.value().shape()), {x},
                   [](const Tensor& dy, Gradients& g) {
                     if (g.needed(0)) g.pass(0, dy);
                   });
}

// x [T, heads, D] without `mean` [heads, D], in f32.
Tensor without_mean(const Tensor& x, const Tensor& mean) {
  COHORT_CHECK((mean.shape() == Shape{x.dim(1), x.dim(2)}),
               "[flash_attention] expected k_mean [Hkv, D], got ", mean.str());
  const Tensor row = mean.to(DType::kF32).to(x.device()).contiguous().reshape({1, mean.numel()}),
               rows = Tensor::zeros({x.dim(0)}, DType::kI32, x.device());
  const Tensor means = embedding(Variable(row), rows).value().reshape(x.shape());
  return sub(Variable(x.contiguous().to(DType::kF32)), Variable(means)).value();
}

// x [T, heads, D] in i8, with the scales [T, heads].
Variable int8_heads(const Tensor& x, Tensor& scales) {
  auto out = kernels::Quantized::empty({x.dim(0) * x.dim(1), x.dim(2)}, DType::kI8,
                                       kernels::ScaleGroups::kRows, x.device());
  kernels::quantize({out, x.contiguous().reshape(out.values.shape())});
  scales = out.scales.reshape({x.dim(0), x.dim(1)});
  return Variable(out.values.reshape(x.shape()));
}

// k_mean: of int8 attention, perhaps undefined; std::nullopt: another precision.
Variable flash_attention(Variable q, Variable k, Variable v, const Tensor& offsets,
                         AttentionDesc rules, const AttentionTerms& terms,
                         const std::optional<Tensor>& k_mean) {
  const Tensor queries = q.value(), keys = k.value();
  COHORT_CHECK(queries.rank() == 3 || queries.rank() == 4,
               "[flash_attention] expected q [T, H, D] or [B, T, H, D], got ", queries.str());
  COHORT_CHECK(
      queries.rank() == keys.rank() && (queries.numel() == 0 || queries.dim(0) == keys.dim(0)),
      "[flash_attention] expected one form of q and k, got ", queries.str(), " and ", keys.str());
  if (k_mean) {
    COHORT_CHECK(queries.dtype() == keys.dtype() && keys.dtype() == v.value().dtype(),
                 "[flash_attention] expected one dtype of q, k and v, got ", queries.str(), ", ",
                 keys.str(), " and ", v.value().str());
    if (needs_gradient(std::array{q, k, v}))
      throw InputError(
          "flash_attention: precision \"int8\" has no gradients; hint: detach() q, k and v");
    const Tensor heads = packed(keys);
    q = int8_heads(packed(queries), rules.q_scales);
    k = int8_heads(k_mean->defined() ? without_mean(heads, *k_mean) : heads, rules.k_scales);
  }
  if (!offsets.defined()) check_masks(rules, queries.dim(-3));
  if (rules.fp8_scales.defined()) {
    const Tensor scales = rules.fp8_scales = rules.fp8_scales.to(queries.device());
    const int64_t heads = queries.dim(-2), kv_heads = keys.dim(-2);
    if (scales.rank() != 1 || scales.numel() != heads + 2 * kv_heads)
      throw InputError(str("flash_attention: scales: expected [", heads + 2 * kv_heads,
                           "], one for each head of q, k and v, got ", scales.str()));
    q = round_heads(q, scales.narrow(0, 0, heads));
    k = round_heads(k, scales.narrow(0, heads, kv_heads));
    v = round_heads(v, scales.narrow(0, heads + kv_heads, kv_heads));
  }
  const auto views = [](std::span<const Tensor> tensors) {
    return std::array{packed(tensors[0]), packed(tensors[1]), packed(tensors[2])};
  };
  return attention(std::array{q, k, v}, views, Tensor::empty_like(queries),
                   sequence_offsets(offsets, queries), rules, terms);
}

// The scales of precision "fp8"; undefined: another one. Checks what comes with a precision.
Tensor fp8_scales(const std::string& precision, const Tensor& scales, const Tensor& k_mean) {
  if (!precision.empty() && precision != "fp8" && precision != "int8")
    throw InputError("flash_attention: precision: expected \"fp8\", \"int8\" or \"\", got \"" +
                     precision + "\"");
  if ((precision == "fp8") != scales.defined() || (precision != "int8" && k_mean.defined()))
    throw InputError(
        "flash_attention: expected scales with precision=\"fp8\", k_mean with precision=\"int8\", "
        "and only then");
  return scales.defined() ? scales.to(DType::kF32).contiguous() : scales;
}

void bind_attention(nb::module_& m) {
  define(
      m, "flash_attention",
      +[](const Strided& q, const Strided& k, const Strided& v, bool causal, int64_t window,
          int64_t window_right, double soft_cap, double scale, const MaybeVariable& slopes,
          const MaybeVariable& bias, const MaybeVariable& sinks, const MaybeVariable& prefix_lm,
          const MaybeVariable& tiles, const MaybeVariable& cu_seqlens, const std::string& precision,
          const MaybeVariable& scales, const MaybeVariable& k_mean) {
        const AttentionDesc desc{
            .scale = scale,
            .mask = causal ? kernels::Mask::kCausal : kernels::Mask::kFull,
            .window = window,
            .window_right = window_right,
            .prefix_lm = indices(prefix_lm.value()),
            .tiles = tiles.value(),
            .soft_cap = soft_cap,
            .slopes = table(slopes, q).value(),
            .fp8_scales = fp8_scales(precision, scales.value(), k_mean.value())};
        return flash_attention(q, k, v, indices(cu_seqlens.value()), desc,
                               {table(bias, q), table(sinks, q)},
                               precision == "int8" ? std::optional(k_mean.value()) : std::nullopt);
      },
      nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::kw_only(), nb::arg("causal") = true,
      nb::arg("window") = 0, nb::arg("window_right") = -1, nb::arg("soft_cap") = 0.0,
      nb::arg("scale") = 0.0, nb::arg("slopes") = nb::none(), nb::arg("bias") = nb::none(),
      nb::arg("sinks") = nb::none(), nb::arg("prefix_lm") = nb::none(),
      nb::arg("tiles") = nb::none(), nb::arg("cu_seqlens") = nb::none(), nb::arg("precision") = "",
      nb::arg("scales") = nb::none(), nb::arg("k_mean") = nb::none(),
      R"(softmax(scale q k^T) v, without the matrix of scores in memory; the backward is deterministic.

q: [T, H, D] with sequences packed one after the other, or a batch [B, T, H, D]; float32 and, on the
CPU, float64 or, on CUDA, bfloat16, with any strides. k, v: the same with Hkv heads, of which H is a multiple.
cu_seqlens: [S + 1] ascending from 0 to T, the offsets of the sequences; by default one sequence, or
one for each entry of a batch. On CUDA its values are not checked. -> the shape of q.

causal: a query sees no later key. window: the keys up to its own that it sees, 0: all. window_right:
the later keys that it sees if not causal, -1: all. scale: 0 for 1 / sqrt(D). soft_cap: scores become
cap tanh(score / cap). slopes: [H], ALiBi. bias: [H, 2 R + 1], by distance, differentiable. sinks: [H],
logits of keys without values, differentiable. prefix_lm: [S], the length of the prefix that all queries of
a sequence see. tiles: of tile_mask(). precision: "fp8" rounds q, k, v and the probabilities to e4m3; gradients
pass the rounding unchanged. scales: its [H + 2 Hkv] powers of two, of which 448 times should be no less than the
magnitudes in that head of q, k or v; on CUDA "fp8" needs bfloat16, heads of 64, 128 or 256 and compute
capability 9.0. "int8" rounds each token's head of q and k to int8 with its largest magnitude / 127 as
scale, after k_mean [Hkv, D] is subtracted from k, so that more of the range of int8 is used; it has no gradients, causal
and full masks alone and, on CUDA, bfloat16 and heads of 64 or 128. Constants may be float64. Error for other shapes, dtypes and combinations.)");
  define(
      m, "tile_mask",
      +[](const Variable& visible) {
        COHORT_CHECK(visible.shape().rank() == 2 && visible.shape()[0] == visible.shape()[1],
                     "[tile_mask] expected visible [N, N], got ", visible.value().str());
        const int64_t n = visible.shape()[0];
        const Tensor flags = visible.value().to(Device{}).to(DType::kF64);
        std::vector<std::pair<int64_t, int64_t>> pairs;
        for (int64_t i = 0; i < n * n; ++i)
          if (flags.data<double>()[i] != 0) pairs.emplace_back(i / n, i % n);
        return Variable(kernels::make_tile_mask(pairs, n, visible.value().device()));
      },
      nb::arg("visible"),
      R"(Block-sparse masks for flash_attention: visible [N, N] uint8 or bool is not 0 where the queries 128 i to
128 i + 127 of a sequence see the keys 128 j to 128 j + 127. -> int32 [N, ceil(N / 32)], on the same
device.)");
}

void bind_elementwise(nb::module_& m) {
#define COHORT_DEFINE(Op, name) \
  define(m, #name, &cohort::name, nb::arg("x"), "The function of each element of a float type.");
  COHORT_UNARY_OPS(COHORT_DEFINE)
#undef COHORT_DEFINE
#define COHORT_DEFINE(Op, name)                 \
  define(m, #name, &cohort::name, nb::arg("x"), \
         "f(gate) * up of [..., 2 F], gate | up side by side -> [..., F]; a float type.");
  COHORT_GATED_OPS(COHORT_DEFINE)
#undef COHORT_DEFINE
#define COHORT_DEFINE(Op, name)                               \
  define(m, #name, &cohort::name, nb::arg("a"), nb::arg("b"), \
         "The function of the elements of a and b, of one shape and float type.");
  COHORT_BINARY_OPS(COHORT_DEFINE)
#undef COHORT_DEFINE
  define(m, "sum", static_cast<Variable (*)(const Variable&)>(&sum), nb::arg("x"),
         "[1]: the sum, float32 for bfloat16.");
}

std::pair<Variable, Variable> sample(const Strided& logits, double temperature, int64_t top_k,
                                     double top_p, double min_p, uint64_t seed) {
  const Tensor& z = logits.value();
  const int64_t n = z.rank() == 2 ? z.dim(0) : 0;  // the kernel's check names the shape
  kernels::SamplingParams params{temperature, top_k, top_p, min_p};
  params.seed = seed;
  params.stream = rng_stream(kPythonSamplePurpose);
  kernels::SamplingState state{kernels::pack_params({&params, 1}).to(z.device())};
  std::vector<int64_t> rows(static_cast<size_t>(n));
  std::iota(rows.begin(), rows.end(), 0);
  const auto row = [&](DType dtype) { return Tensor::zeros({n}, dtype, z.device()); };
  const auto statistic = [&] { return row(accumulate_dtype(z.dtype())); };
  kernels::Samples out{row(DType::kI32), statistic(), statistic(), statistic(), statistic()};
  kernels::sample_logits({out, state, z, row(DType::kI32), Tensor::from(rows).to(z.device())});
  return std::pair(Variable(out.tokens), Variable(out.logprob));
}

kernels::ScaleGroups scale_groups(bool blocks) {
  return blocks ? kernels::ScaleGroups::kBlocks : kernels::ScaleGroups::kRows;
}

std::pair<Variable, Variable> quantize(const Variable& x, const std::string& dtype, bool blocks,
                                       bool transpose) {
  const Tensor& in = x.value();
  const Tensor source = transpose && in.rank() == 2 ? in.transpose(0, 1) : in;
  auto out = kernels::Quantized::empty(source.shape(), dtype_named(dtype), scale_groups(blocks),
                                       in.device());
  kernels::quantize({out, blocks ? source : source.contiguous()});
  return {Variable(out.values), Variable(out.scales)};
}

Variable dequantize(const Variable& values, const Variable& scales, const std::string& dtype,
                    bool blocks) {
  const Tensor& in = values.value();
  Tensor y = Tensor::empty(in.shape(), dtype_named(dtype), in.device());
  kernels::dequantize({y, {in, scales.value(), scale_groups(blocks)}});
  return Variable(y);
}

void bind_quantize(nb::module_& m) {
  define(
      m, "quantize", &quantize, nb::arg("x"), nb::arg("dtype") = "e4m3", nb::kw_only(),
      nb::arg("blocks") = false, nb::arg("transpose") = false,
      R"(x [T, K] in 8 bits -> values [T, K] and float32 scales, whose product is x but for one rounding.

dtype: "e4m3" (torch's float8_e4m3fn; numpy() gives its bytes) with a power of two for each row and 128 columns,
scales [ceil(K / 128), T rounded up to a multiple of 4], so that products are bfloat16 numbers; or "int8" with the
largest magnitude / 127 of each row, scales [T]. blocks: a scale for 128 x 128 elements, [ceil(T / 128), ceil(K /
128)], e4m3 only. transpose: of x^T. Zeros have scale 1; a group with an infinity or NaN has scale NaN.)");
  define(m, "dequantize", &dequantize, nb::arg("values"), nb::arg("scales"),
         nb::arg("dtype") = "float32", nb::kw_only(), nb::arg("blocks") = false,
         "values * scales of quantize(), of another float type if `dtype` says so.");
}

void bind_layers(nb::module_& m) {
  const auto x = nb::arg("x"), w = nb::arg("w");
  const auto no_bias = nb::arg("bias") = nb::none();
  const auto eps = nb::arg("eps") = 1e-5;
  define(
      m, "rms_norm",
      +[](const Variable& x, const Variable& w, double eps, double offset) {
        return rms_norm(x, w, {.eps = eps, .weight_offset = offset});
      },
      x, w, eps, nb::arg("weight_offset") = 0.0,
      "x / sqrt(mean(x^2) + eps) * (w + weight_offset) over rows. x: [..., C], w: [C].");
  define(
      m, "layer_norm",
      +[](const Variable& x, const Variable& w, const MaybeVariable& bias, double eps) {
        return layer_norm(x, w, bias, {.eps = eps});
      },
      x, w, no_bias, eps,
      "(x - mean) / sqrt(variance + eps) * w + bias over rows. x: [..., C]; w, bias: [C].");
  define(
      m, "linear",
      +[](const Variable& x, const Variable& w, const MaybeVariable& bias) {
        return linear(x, w, bias);
      },
      x, w, no_bias, "x w^T + bias. x: [..., K], w: [N, K], bias: [N] -> [..., N].");
  define(
      m, "embedding",
      +[](const Variable& table, const Strided& ids) {
        return embedding(table, indices(ids.value()));
      },
      nb::arg("table"), nb::arg("ids"),
      "Rows of table [V, C] -> [T, C]. ids: [T], from 0 to V - 1; Error for others on the CPU.");
  define(
      m, "token_log_probs",
      +[](const Variable& x, const Variable& w, const Strided& targets, double temperature) {
        TokenLogProbs out =
            token_log_probs(x, w, indices(targets.value()), {.temperature = temperature});
        return std::pair(out.logprob, out.entropy);
      },
      x, w, nb::arg("targets"), nb::arg("temperature") = 1.0,
      R"(Log-probs of `targets` [T] and entropies under softmax(x w^T / temperature), both [T], whose
logits are never in memory as a whole. x: [T, C], w: [V, C].)");
  define(
      m, "sample", &sample, nb::arg("logits"), nb::kw_only(), nb::arg("temperature") = 1.0,
      nb::arg("top_k") = 0, nb::arg("top_p") = 1.0, nb::arg("min_p") = 0.0, nb::arg("seed") = 0,
      R"(Samples a token for each row of logits [N, V], float32 or, on the CPU, float64 -> tokens [N] int32 and
their log-probs [N] at the temperature before truncation. temperature: 0 for the largest logit. top_k: 0
for all tokens, top_p: 1, min_p: 0. Equal seeds give equal tokens, so each step needs its own seed. Error for
parameters out of range; NaN or infinite logits: Error on the CPU, token -1 on CUDA.)");
  define(m, "scale", static_cast<Variable (*)(const Variable&, double)>(&scale), x,
         nb::arg("factor"), "factor * x.");
  define(
      m, "reshape",
      +[](const Variable& x, const std::vector<int64_t>& shape) {
        Shape sizes;
        for (const int64_t size : shape) sizes.push_back(size);
        return reshape(x, sizes);
      },
      x, nb::arg("shape"), "A view in another shape, of which one size may be -1.");
}

}  // namespace

void bind_ops(nb::module_& m) {
  bind_attention(m);
  bind_elementwise(m);
  bind_layers(m);
  bind_quantize(m);
}

}  // namespace cohort::python
