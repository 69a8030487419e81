// Rows are grouped like the ops in autograd/ops_*.cpp. Sizes are small, odd or 1, for every tail.
#include "tests/support/op_cases.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "autograd/ops.h"
#include "core/rng.h"
#include "kernels/rope.h"
#include "nn/feed_forward.h"
#include "nn/lora.h"
#include "tests/support/loss_node.h"
#include "tests/support/op_case_inputs.h"

namespace cohort {
namespace {

using test::constant;
using test::cross_entropy_node;
using test::Domain;
using test::f32_constant;
using test::ids;
using test::Inputs;
using test::inputs;
using test::InputSpec;
using Fn = std::function<Variable(Inputs)>;
using Table = std::vector<OpCase>;

// Ops that are not listed are smooth everywhere.
Domain unary_domain(const std::string& op) {
  if (op == "log" || op == "sqrt") return Domain::kPositive;
  return op == "relu" ? Domain::kNonZero : Domain::kReal;
}
Domain second_domain(const std::string& op) {
  return op == "div" ? Domain::kNonZero : Domain::kReal;
}

void add_unary(Table& table, const std::string& op, Variable (*fn)(const Variable&)) {
  for (const Shape& shape : {Shape{1}, Shape{3, 1}, Shape{2, 3, 7}, Shape{67}})
    table.push_back({op, shape.str(), inputs({{shape, unary_domain(op)}}),
                     [fn](Inputs in) { return fn(in[0]); }});
}

void add_binary(Table& table, const std::string& op,
                Variable (*fn)(const Variable&, const Variable&)) {
  const Domain domain = second_domain(op);
  for (const Shape& shape : {Shape{1}, Shape{3, 1}, Shape{2, 3, 7}, Shape{67}})
    table.push_back({op, shape.str(), inputs({{shape}, {shape, domain}}),
                     [fn](Inputs in) { return fn(in[0], in[1]); }});
  // Both contributions add up in one gradient, with a third from the outer add().
  table.push_back({op, "one variable as both operands", inputs({{{5, 3}, domain}}),
                   [fn](Inputs in) { return add(fn(in[0], in[0]), in[0]); }});
  table.push_back({op, "a constant second operand", inputs({{{5, 3}}}), [fn, domain](Inputs in) {
                     return fn(in[0], Variable(constant({{5, 3}, domain}, in[0])));
                   }});
}

void add_gated(Table& table, const std::string& op, Variable (*fn)(const Variable&)) {
  for (const Shape& shape : {Shape{2}, Shape{3, 2}, Shape{2, 3, 14}, Shape{5, 70}})
    table.push_back({op, shape.str(), inputs({{shape}}), [fn](Inputs in) { return fn(in[0]); }});
  table.push_back({op, "its input used outside too", inputs({{{3, 10}}}), [fn](Inputs in) {
                     const Variable x = scale(in[0], 1.5);
                     return add(sum(fn(x)), sum(square(x)));
                   }});
}

void add_elementwise(Table& table) {
#define COHORT_ADD_UNARY(Op, name) add_unary(table, #name, cohort::name);
#define COHORT_ADD_BINARY(Op, name) add_binary(table, #name, cohort::name);
  COHORT_UNARY_OPS(COHORT_ADD_UNARY)
#define COHORT_ADD_GATED(Op, name) add_gated(table, #name, cohort::name);
  COHORT_BINARY_OPS(COHORT_ADD_BINARY)
  COHORT_GATED_OPS(COHORT_ADD_GATED)
#undef COHORT_ADD_UNARY
#undef COHORT_ADD_BINARY
#undef COHORT_ADD_GATED
}

void add_reductions_and_views(Table& table) {
  table.push_back(
      {"scale", "by -1.75", inputs({{{5, 13}}}), [](Inputs in) { return scale(in[0], -1.75); }});
  for (const Shape& shape : {Shape{1}, Shape{5, 13}}) {
    table.push_back({"sum", shape.str(), inputs({{shape}}), [](Inputs in) { return sum(in[0]); }});
    table.push_back({"weighted_sum", shape.str(), inputs({{shape}}),
                     [shape](Inputs in) { return weighted_sum(in[0], constant({shape}, in[0])); }});
  }
  table.push_back({"reshape", "[6, 4] to [2, 3, 4]", inputs({{{6, 4}}}), [](Inputs in) {
                     return reshape(square(in[0]), {2, 3, 4});
                   }});
  table.push_back({"reshape", "of a parameter, twice", inputs({{{6, 4}}}), [](Inputs in) {
                     return mul(reshape(in[0], {24}), reshape(scale(in[0], 2), {24}));
                   }});
  table.push_back({"select", "two overlapping rows", inputs({{{4, 3, 2}}}), [](Inputs in) {
                     const Variable x = square(in[0]);
                     return add(mul(select(x, 1), select(x, 3)), select(x, 1));
                   }});
  table.push_back({"select_rows", "some, and all", inputs({{{5, 3}}}), [](Inputs in) {
                     const Variable x = square(in[0]);
                     const Variable some = select_rows(x, ids({0, 2, 3}, x));
                     return add(sum(square(some)), sum(select_rows(x, ids({0, 1, 2, 3, 4}, x))));
                   }});
  table.push_back(
      {"select", "the only row", inputs({{{1, 5}}}), [](Inputs in) { return select(in[0], 0); }});
}

void add_linears(Table& table) {
  table.push_back({"linear", "x x^T", inputs({{{4, 6}}}), [](Inputs in) {
                     const Variable x = square(in[0]);
                     return linear(x, x);
                   }});
  for (const Shape& x : {Shape{1, 1}, Shape{5, 7}, Shape{2, 3, 4}, Shape{7}, Shape{37, 18}}) {
    const int64_t k = x[-1], n = k == 1 ? 1 : 6;
    table.push_back({"linear", x.str() + " with bias", inputs({{x}, {{n, k}}, {{n}}}),
                     [](Inputs in) { return linear(in[0], in[1], in[2]); }});
    table.push_back({"linear", x.str() + " without bias", inputs({{x}, {{n, k}}}),
                     [](Inputs in) { return linear(in[0], in[1]); }});
  }
  table.push_back({"embedding", "repeated and unused rows", inputs({{{6, 5}}}), [](Inputs in) {
                     return embedding(in[0], ids({4, 0, 4, 2, 4, 0, 1}, in[0]));
                   }});
  table.push_back({"embedding", "rows from the third on", inputs({{{6, 5}}}), [](Inputs in) {
                     return add(embedding(in[0], ids({3, 0, 1, 3}, in[0]), 2),
                                embedding(in[0], ids({0, 5, 5, 1}, in[0])));
                   }});
  for (const int64_t n : {1, 3})
    table.push_back({"prepend_row", str("groups of ", n), inputs({{{1, 5}}, {{6, 5}}}),
                     [n](Inputs in) { return prepend_row(in[0], in[1], n); }});
  table.push_back({"embedding", "one row", inputs({{{1, 1}}}),
                   [](Inputs in) { return embedding(in[0], ids({0}, in[0])); }});
}

// A frozen layer [out, in] with an adapter of inputs `a` and `b`.
Linear adapted(int64_t out, const Variable& a, const Variable& b, std::vector<Lora::Module> modules,
               const Variable& bias = {},
               kernels::WeightFormat format = kernels::WeightFormat::kModel) {
  Linear layer{.bias = bias.detach(),
               .lora = {.a = a, .b = b, .modules = std::move(modules), .scale = 0.75}};
  const int64_t in = a.shape()[1], columns = layer.input_padding();
  const Tensor all = constant(InputSpec{{out, in + columns}}, a);
  all.narrow(1, in, columns).zero_();
  layer.weight = LayerWeight(Variable(all.hide_padding(1, in)));
  if (format != kernels::WeightFormat::kModel) {
    const Device device = all.device();
    const auto host = kernels::quantize_weight(
        all.narrow(1, 0, in).contiguous().to(Device{}).to(DType::kF32), format);
    layer.weight.leaf = Variable(Tensor::without_elements({out, in}, all.dtype(), device));
    layer.weight.quantized = {host.values.to(device), host.scales.to(device), in};
    layer.weight.adapter = all.narrow(1, in, columns).contiguous();
  }
  write_lora_columns(layer.lora, layer.weight, b.value().clone().reshape({b.value().numel()}));
  return layer;
}

Linear without_adapter(const Linear& layer) {
  return {.weight = LayerWeight(Variable(layer.weight.values().contiguous()))};
}

void add_lora(Table& table) {
  struct Row {
    const char* name;
    int64_t tokens, in, out, rank;
    std::vector<Lora::Module> modules;
  };
  for (const Row& row :
       {Row{"one module", 7, 9, 5, 2, {{0, 5}}}, Row{"one row, rank 1", 1, 3, 2, 1, {{0, 2}}},
        Row{"two of three modules", 19, 8, 11, 3, {{0, 4}, {7, 4}}},
        Row{"three modules", 33, 16, 24, 4, {{0, 8}, {8, 8}, {16, 8}}}}) {
    int64_t rows = 0;
    for (const Lora::Module& module : row.modules) rows += module.rows;
    const auto count = static_cast<int64_t>(row.modules.size());
    const InputSpec x{{row.tokens, row.in}}, a{{count * row.rank, row.in}}, b{{rows, row.rank}};
    table.push_back({"lora_linear", row.name, inputs({x, a, b}), [row](Inputs in) {
                       const Variable bias(constant(InputSpec{{row.out}}, in[0]));
                       return adapted(row.out, in[1], in[2], row.modules, bias)(in[0]);
                     }});
    // The adapter's columns of the input are padding of a norm's output.
    table.push_back(
        {"lora_linear", str(row.name, " behind a norm"), inputs({x, a, b}), [row](Inputs in) {
           const Linear layer = adapted(row.out, in[1], in[2], row.modules);
           const Variable w(constant(InputSpec{{row.in}}, in[0]));
           return layer(rms_norm(in[0], w, {.eps = 1e-2, .padding = layer.input_padding()}));
         }});
  }
  for (const auto& [name, format] :
       {std::pair("int8", kernels::WeightFormat::kInt8), {"nf4", kernels::WeightFormat::kNf4}})
    table.push_back({"lora_linear", str("base in ", name),
                     inputs({{{7, 136}}, {{2, 136}}, {{5, 2}}}), [format = format](Inputs in) {
                       return adapted(5, in[1], in[2], {{0, 5}}, {}, format)(in[0]);
                     }});
  table.push_back(
      {"lora_linear", "adapters off", inputs({{{7, 9}}, {{2, 9}}, {{5, 2}}}), [](Inputs in) {
         const Linear layer = adapted(5, in[1], in[2], {{0, 5}});
         const Variable off = layer(in[0], Adapters::kOff);
         return add(off, scale(layer(in[0]), 0.5));
       }});
}

void add_lora_mlp(Table& table) {
  using kernels::Activation;
  struct Row {
    const char* name;
    Activation activation;
    bool up, down;
  };
  for (const Row& row : {Row{"gelu, both layers", Activation::kGelu, true, true},
                         Row{"swiglu, both layers", Activation::kSwiGlu, true, true},
                         Row{"swiglu, the first", Activation::kSwiGlu, true, false},
                         Row{"geglu, the second", Activation::kGeGlu, false, true}})
    for (const bool recompute : {false, true}) {
      constexpr int64_t kIn = 8, kHidden = 12, kRank = 3;
      const bool gated = is_gated(row.activation);
      const int64_t up_rows = gated ? 2 * kHidden : kHidden, parts = gated ? 2 : 1;
      std::vector<Lora::Module> modules = {{0, kHidden}};
      if (gated) modules.push_back({kHidden, kHidden});
      table.push_back({"mlp", str("LoRA, ", row.name, recompute ? ", recomputed" : ""),
                       inputs({{{19, kIn}},
                               {{parts * kRank, kIn}},
                               {{up_rows, kRank}},
                               {{kRank, kHidden}},
                               {{kIn, kRank}}}),
                       [=](Inputs in) {
                         Linear up = adapted(up_rows, in[1], in[2], modules);
                         Linear down = adapted(kIn, in[3], in[4], {{0, kIn}});
                         if (!row.up) up = without_adapter(up);
                         if (!row.down) down = without_adapter(down);
                         const Variable y =
                             mlp(in[0], up, down,
                                 {.activation = row.activation, .recompute = recompute});
                         // Every input has a gradient.
                         Variable rest = sum(square(in[1]));
                         for (size_t i = 2; i < in.size(); ++i)
                           rest = add(rest, sum(square(in[i])));
                         return add(sum(mul(y, y)), rest);
                       }});
    }
}

void add_mlp(Table& table) {
  using kernels::Activation;
  struct Row {
    const char* name;
    Activation activation;
    Shape x;
    int64_t hidden;
  };
  for (const Row& row : {Row{"gelu", Activation::kGelu, {7}, 33},
                         Row{"gelu_tanh", Activation::kGeluTanh, {2, 3, 4}, 17},
                         Row{"swiglu", Activation::kSwiGlu, {5, 7}, 9},
                         Row{"geglu", Activation::kGeGlu, {19, 8}, 12},
                         Row{"geglu_tanh", Activation::kGeGluTanh, {2, 3, 4}, 8}}) {
    const int64_t c = row.x[-1], up = is_gated(row.activation) ? 2 * row.hidden : row.hidden;
    for (const bool recompute : {false, true}) {
      const MlpDesc desc{.activation = row.activation, .recompute = recompute};
      const char* kept = recompute ? ", recomputed" : "";
      table.push_back({"mlp", str(row.name, " of ", row.x.str(), " with biases", kept),
                       inputs({{row.x}, {{up, c}}, {{up}}, {{c, row.hidden}}, {{c}}}),
                       [desc](Inputs in) {
                         return mlp(in[0], {in[1], in[2]}, {in[3], in[4]}, desc);
                       }});
      table.push_back({"mlp", str(row.name, " of ", row.x.str(), " without biases", kept),
                       inputs({{row.x}, {{up, c}}, {{c, row.hidden}}}), [desc](Inputs in) {
                         return mlp(in[0], {in[1], {}}, {in[2], {}}, desc);
                       }});
    }
  }
}

void add_row_ops(Table& table) {
  // A row of one element has a gradient only with a large epsilon: its norm is +-1 otherwise.
  for (const auto& [shape, eps] :
       {std::pair{Shape{3, 1}, 0.5}, std::pair{Shape{5, 7}, 1e-5}, std::pair{Shape{2, 3, 10}, 1e-5},
        std::pair{Shape{19, 33}, 1e-3}}) {
    const int64_t c = shape[-1];
    table.push_back({"rms_norm", shape.str(), inputs({{shape}, {{c}}}),
                     [eps = eps](Inputs in) { return rms_norm(in[0], in[1], {.eps = eps}); }});
    table.push_back(
        {"rms_norm", shape.str() + " offset 1", inputs({{shape}, {{c}}}), [eps = eps](Inputs in) {
           return rms_norm(in[0], in[1], {.eps = eps, .weight_offset = 1});
         }});
    table.push_back(
        {"layer_norm", shape.str() + " with bias", inputs({{shape}, {{c}}, {{c}}}),
         [eps = eps](Inputs in) { return layer_norm(in[0], in[1], in[2], {.eps = eps}); }});
    table.push_back(
        {"layer_norm", shape.str() + " without bias", inputs({{shape}, {{c}}}),
         [eps = eps](Inputs in) { return layer_norm(in[0], in[1], {}, {.eps = eps}); }});
    table.push_back(
        {"add_rms_norm", shape.str(), inputs({{shape}, {shape}, {{c}}}), [eps = eps](Inputs in) {
           const AddNorm y = add_rms_norm(in[0], in[1], in[2], {.eps = eps});
           return mul(y.sum, y.normed);
         }});
    table.push_back({"add_rms_norm", shape.str() + " offset 1", inputs({{shape}, {shape}, {{c}}}),
                     [eps = eps](Inputs in) {
                       const AddNorm y =
                           add_rms_norm(in[0], in[1], in[2], {.eps = eps, .weight_offset = 1});
                       return mul(y.sum, y.normed);
                     }});
    table.push_back({"add_layer_norm", shape.str() + " with bias",
                     inputs({{shape}, {shape}, {{c}}, {{c}}}), [eps = eps](Inputs in) {
                       const AddNorm y = add_layer_norm(in[0], in[1], in[2], in[3], {.eps = eps});
                       return mul(y.sum, y.normed);
                     }});
  }
}

Tensor rope_table(int64_t positions, int64_t dim, const Variable& like) {
  return kernels::rope_table(positions, kernels::rope_frequencies(dim, 100), 1,
                             accumulate_dtype(like.value().dtype()))
      .to(like.value().device());
}

void add_rope(Table& table) {
  struct Size {
    int64_t heads, kv_heads, dim, rotated;
    std::vector<int32_t> positions;
  };
  for (const Size& size : {Size{1, 1, 2, 2, {3}}, Size{2, 2, 6, 6, {0, 1, 2, 0, 9}},
                           Size{4, 1, 10, 10, {5, 5, 8}}, Size{4, 1, 10, 4, {5, 5, 8}}}) {
    const Shape shape{static_cast<int64_t>(size.positions.size()), size.heads + 2 * size.kv_heads,
                      size.dim};
    const std::string name = str(shape.str(), " of which ", size.rotated, " rotate");
    const auto rotate = [size](Variable x) {
      const Tensor at = ids(size.positions, x), angles = rope_table(10, size.rotated, x);
      return rope(std::move(x), at, angles, size.kv_heads);
    };
    table.push_back(
        {"rope", name, inputs({{shape}}), [rotate](Inputs in) { return rotate(in[0]); }});
    table.push_back({"rope", name + " in place", inputs({{shape}}),
                     [rotate](Inputs in) { return scale(rotate(scale(in[0], -1.5)), 2); }});
  }
}

void add_gates(Table& table) {
  const auto fn = [](const Variable& x) {
    const auto [qkv, gates] = split_gates(x, 3, 4);
    return add(sum(square(qkv)), sum(square(gates)));
  };
  // 3 queries of 4 elements on 2 keys, and without keys.
  for (const int64_t width : {40, 24})
    table.push_back({"split_gates", str(width, " columns"), inputs({{{5, width}}}),
                     [=](Inputs in) { return fn(in[0]); }});
  table.push_back(
      {"split_gates", "its input used outside too", inputs({{{5, 40}}}), [=](Inputs in) {
         const Variable x = scale(in[0], 1.5);
         return add(fn(x), sum(square(x)));
       }});
  table.push_back({"split_gates", "gates alone", inputs({{{5, 40}}}),
                   [](Inputs in) { return square(split_gates(in[0], 3, 4).gates); }});
}

void add_qk_norm(Table& table) {
  const Shape qkv{5, 8, 6};  // 4 heads on 2
  table.push_back({"qk_norm", "each head", inputs({{qkv}, {{6}}, {{6}}}), [](Inputs in) {
                     return qk_norm(in[0], {in[1], in[2]}, 2, 1e-3);
                   }});
  table.push_back({"qk_norm", "offset 1", inputs({{qkv}, {{6}}, {{6}}}), [](Inputs in) {
                     return qk_norm(in[0], {in[1], in[2]}, 2, 1e-3, 1);
                   }});
  table.push_back({"qk_norm", "all heads together", inputs({{qkv}, {{24}}, {{12}}}), [](Inputs in) {
                     return qk_norm(in[0], {in[1], in[2]}, 2, 1e-3);
                   }});
  table.push_back(
      {"qk_norm", "its input used outside too", inputs({{qkv}, {{6}}, {{6}}}), [](Inputs in) {
         const Variable x = scale(in[0], 1.5);
         return add(qk_norm(x, {in[1], in[2]}, 2, 1e-3), x);
       }});
}

kernels::DropoutSpec dropout_spec(int64_t tokens, double p, uint64_t stream, const Variable& like) {
  std::vector<int64_t> sequences;
  std::vector<int32_t> positions;
  for (int64_t t = 0; t < tokens; ++t) {
    sequences.push_back(7 + t / 4);
    positions.push_back(static_cast<int32_t>(t % 4));
  }
  return {.p = p,
          .seed = 5,
          .stream = rng_stream(kernels::kDropoutPurpose, 3, stream),
          .sequences = Tensor::from(sequences).to(like.value().device()),
          .positions = ids(positions, like)};
}

void add_attention(Table& table) {
  struct Row {
    const char* variant;
    int64_t heads, kv_heads, dim;
    std::vector<int32_t> starts;
    kernels::AttentionDesc desc;
    double dropout = 0;
  };
  const kernels::AttentionDesc causal, full{.mask = kernels::Mask::kFull};
  const std::vector<Row> rows = {
      {"one token", 1, 1, 1, {0, 1}, causal},
      {"causal, lengths 5 1 0 9", 2, 2, 4, {0, 5, 6, 6, 15}, causal},
      {"4 heads on 2, head dim 5", 4, 2, 5, {0, 3, 9}, causal},
      {"full, 3 heads on 1", 3, 1, 4, {0, 4, 5, 11}, full},
      {"scale 0.3", 1, 1, 8, {0, 7}, {.scale = 0.3}},
      {"a window of 3 keys", 2, 1, 4, {0, 5, 6, 13}, {.window = 3}},
      {"across a tile of 128 keys", 1, 1, 3, {0, 131}, causal},
      {"across a tile of 64 keys, dim 130", 1, 1, 130, {0, 67}, causal},
      {"dropout", 2, 1, 4, {0, 4, 8, 12}, causal, 0.3},
      {"full with dropout", 2, 2, 3, {0, 4, 8}, full, 0.5},
  };
  for (const Row& row : rows) {
    const Shape qkv{row.starts.back(), row.heads + 2 * row.kv_heads, row.dim};
    table.push_back({"attention", row.variant, inputs({{qkv}}), [row](Inputs in) {
                       kernels::AttentionDesc desc = row.desc;
                       if (row.dropout > 0)
                         desc.dropout =
                             dropout_spec(row.starts.back(), row.dropout, 1 << 8 | 1, in[0]);
                       return attention(in[0], row.kv_heads, ids(row.starts, in[0]), desc);
                     }});
  }
  table.push_back(
      {"attention", "bias and sinks, in a window", inputs({{{9, 6, 3}}, {{4, 7}}, {{4}}}),
       [](Inputs in) {
         const AttentionTerms terms{in[1], in[2]};
         return attention(in[0], 1, ids({0, 2, 9}, in[0]), {.window = 4, .soft_cap = 2}, 0, terms);
       }});
  table.push_back({"relative_bias", "5 rows for 7 distances", inputs({{{5, 3}}}), [](Inputs in) {
                     return relative_bias(in[0], ids({4, 4, 1, 0, 0, 2, 0}, in[0]));
                   }});
  table.push_back({"attention", "its input used outside too", inputs({{{6, 4, 3}}}), [](Inputs in) {
                     const Variable x = scale(in[0], 1.5);
                     return add(sum(attention(x, 1, ids({0, 2, 6}, x), {})), sum(square(x)));
                   }});
  for (const Shape& shape : {Shape{1, 1}, Shape{9, 7}, Shape{6, 33}})
    table.push_back({"dropout", shape.str(), inputs({{shape}}), [shape](Inputs in) {
                       return dropout(in[0], dropout_spec(shape[0], 0.4, 1 << 8 | 3, in[0]));
                     }});
}

void add_head(Table& table) {
  const std::vector<int32_t> targets = {2, 1, 0, 8, 8, 3, 5};
  const std::vector<InputSpec> specs = {{{7, 6}}, {{9, 6}}};
  struct Row {
    const char* variant;
    double weight_logprob, weight_entropy;  // 0: this output is not used
    kernels::HeadDesc desc;
  };
  for (const Row& row : {Row{"log-prob", 1, 0, {}}, Row{"entropy", 0, 1, {}},
                         Row{"both, temperature 0.7", 1, -0.6, {.temperature = 0.7}},
                         Row{"both, chunks of 2 tokens", 0.5, 1, {.chunk_tokens = 2}}})
    table.push_back({"token_log_probs", row.variant, inputs(specs), [row, targets](Inputs in) {
                       const auto [logprob, entropy] =
                           token_log_probs(in[0], in[1], ids(targets, in[0]), row.desc);
                       if (row.weight_entropy == 0) return logprob;
                       if (row.weight_logprob == 0) return entropy;
                       return add(scale(logprob, row.weight_logprob),
                                  scale(entropy, row.weight_entropy));
                     }});
  table.push_back(
      {"token_log_probs", "one token, two words", inputs({{{1, 3}}, {{2, 3}}}), [](Inputs in) {
         const auto [logprob, entropy] = token_log_probs(in[0], in[1], ids({1}, in[0]));
         return add(logprob, entropy);
       }});
  const std::vector<InputSpec> biased = {{{7, 6}}, {{9, 6}}, {{9}}};
  table.push_back(
      {"token_log_probs", "a bias, temperature 0.7", inputs(biased), [targets](Inputs in) {
         const auto [logprob, entropy] = token_log_probs(in[0], {in[1], in[2]}, ids(targets, in[0]),
                                                         {.temperature = 0.7, .chunk_tokens = 2});
         return add(logprob, scale(entropy, -0.6));
       }});
  table.push_back({"cross_entropy", "a bias", inputs(biased), [targets](Inputs in) {
                     const Tensor weights = f32_constant(InputSpec{{7}, Domain::kPositive}, in[0]);
                     return cross_entropy_node(in[0], {in[1], in[2]}, ids(targets, in[0]), weights,
                                               {.chunk_tokens = 3});
                   }});
  table.push_back({"cross_entropy", "weights", inputs(specs), [targets](Inputs in) {
                     const Tensor weights = f32_constant(InputSpec{{7}, Domain::kPositive}, in[0]);
                     return cross_entropy_node(in[0], in[1], ids(targets, in[0]), weights,
                                               {.chunk_tokens = 3});
                   }});
  table.push_back(
      {"cross_entropy", "the table as input and head", inputs({{{9, 6}}}), [targets](Inputs in) {
         const Variable x = embedding(in[0], ids({1, 0, 8, 3, 3, 2, 7}, in[0]));
         const Tensor weights = f32_constant(InputSpec{{7}, Domain::kPositive}, in[0]);
         return cross_entropy_node(x, in[0], ids(targets, in[0]), weights);
       }});
}

// A feed-forward block with a residual: every parameter enters as an input.
Variable mlp_block(const Variable& x, Inputs w) {
  const Variable h = rms_norm(x, w[0], {.eps = 1e-5});
  return add(x, linear(swiglu(linear(h, w[1], w[2])), w[3]));
}

void add_columns(Table& table) {
  table.push_back({"columns", "the middle", inputs({{{4, 7}}}),
                   [](Inputs in) { return columns(in[0], 2, 3); }});
  table.push_back({"columns", "two parts of one input, which overlap", inputs({{{5, 6}}}),
                   [](Inputs in) { return mul(columns(in[0], 0, 4), columns(in[0], 2, 4)); }});
}

// Chunks are of 64 tokens.
void add_gated_delta(Table& table) {
  struct Row {
    const char* variant;
    int64_t key_heads, heads, dim;
    std::vector<int32_t> starts, prefixes;
  };
  for (const Row& row :
       std::vector<Row>{{"one token", 1, 1, 1, {0, 1}, {}},
                        {"4 heads on 2, lengths 63 0 5", 2, 4, 3, {0, 63, 63, 68}, {}},
                        {"64 tokens", 1, 2, 2, {0, 64}, {}},
                        {"65 and 130 tokens", 1, 1, 4, {0, 65, 195}, {}},
                        {"two behind a prefix", 1, 2, 2, {0, 70, 75, 137}, {0, 0, 0, 70, 0, 70}}}) {
    const int64_t tokens = row.starts.back();
    const int64_t channels = (2 * row.key_heads + row.heads) * row.dim;
    const InputSpec gates{{tokens, row.heads}}, heads{{row.heads}};
    table.push_back({"gated_delta", row.variant,
                     inputs({{{tokens, channels}}, gates, gates, {{channels, 4}}, heads, heads}),
                     [row](Inputs in) {
                       kernels::GatedDeltaDesc desc;
                       const auto pairs = static_cast<int64_t>(row.prefixes.size() / 2);
                       if (pairs > 0) desc.prefixes = ids(row.prefixes, in[0]).reshape({pairs, 2});
                       return gated_delta({in[0], in[1], in[2], in[3], in[4], in[5]},
                                          {row.key_heads, row.heads, row.dim},
                                          ids(row.starts, in[0]), desc);
                     },
                     false});
  }
}

Variable attention_block(const Variable& x, Inputs w) {
  const int64_t tokens = x.value().dim(0);
  const Tensor positions = ids({0, 1, 2, 0, 1, 2, 3}, x);
  const Tensor angles = rope_table(4, 4, x);
  const Variable h = layer_norm(x, w[0], w[1], {.eps = 1e-5});
  const Variable qkv =
      rope(reshape(linear(h, w[2]), {tokens, 4, 4}), positions, angles, 1);  // 2 heads on 1
  const Variable o = attention(qkv, 1, ids({0, 3, 7}, x), {});
  return add(x, linear(reshape(o, {tokens, 8}), w[3]));
}

void add_composites(Table& table) {
  const Shape x{7, 6};
  const std::vector<InputSpec> mlp = {{x}, {{6}}, {{18, 6}}, {{18}}, {{6, 9}}};
  table.push_back({"composite", "residual MLP block", inputs(mlp),
                   [](Inputs in) { return mlp_block(in[0], in.subspan(1)); }});
  table.push_back({"checkpoint", "residual MLP block", inputs(mlp), [](Inputs in) {
                     return checkpoint([](Inputs x) { return mlp_block(x[0], x.subspan(1)); }, in,
                                       {});
                   }});
  table.push_back(
      {"checkpoint", "nested, its input used outside too", inputs({{{3, 4}}}), [](Inputs in) {
         const Fn inner = [](Inputs x) { return mul(tanh(x[0]), x[0]); };
         const Fn outer = [inner](Inputs x) {
           const Variable y = square(x[0]);
           return add(checkpoint(inner, {&y, 1}, {}), x[0]);
         };
         const Variable y = exp(in[0]);
         return mul(checkpoint(outer, {&y, 1}, {}), in[0]);
       }});
  table.push_back({"composite", "residual attention block",
                   inputs({{x}, {{6}}, {{6}}, {{16, 6}}, {{6, 8}}}),
                   [](Inputs in) { return attention_block(in[0], in.subspan(1)); }});
}

}  // namespace

std::vector<OpCase> op_cases() {
  Table table;
  add_elementwise(table);
  add_reductions_and_views(table);
  add_linears(table);
  add_mlp(table);
  add_lora(table);
  add_lora_mlp(table);
  add_row_ops(table);
  add_rope(table);
  add_gates(table);
  add_qk_norm(table);
  add_attention(table);
  add_columns(table);
  add_gated_delta(table);
  add_head(table);
  add_policy_loss(table);
  add_composites(table);
  return table;
}

GradcheckResult run_op_case(const OpCase& test) {
  return gradcheck(test.fn, test.inputs(0));
}

}  // namespace cohort
