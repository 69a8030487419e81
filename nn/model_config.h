// The configuration of a model: keys, derived sizes, and their names in Hugging Face's config.json.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "config/visitor.h"
#include "core/device.h"
#include "kernels/activation.h"
#include "kernels/attention/attention.h"
#include "nn/precision.h"
#include "text/json.h"

namespace cohort {

enum class ContextLimit : uint8_t;  // data/data_check.h
enum class NormType { kRms, kLayer };
// Place of the norm of a sub-layer f: x + f(norm(x)); on the branch, x + norm(f(x)) (OLMo 2); or
// after the sum, norm(x + f(x)) (Vaswani et al. 2017, BERT).
enum class NormPlace { kBefore, kBranch, kAfter };
using MaskType = kernels::Mask;
// The head on the hidden states: logits of the next token, those of masked tokens (BERT: a dense
// layer, activation and norm before them), those of classes, or the pooler of a model without
// logits: tanh(W h + b) of the first position, which classes of texts have as well.
enum class HeadType { kNextToken, kMaskedToken, kClasses, kPooler };
// Schemes of positions (nn/positions.h).
enum class PositionType { kRope, kLearned, kSinusoidal, kAlibi, kT5, kExposb, kNone };
using MlpType = kernels::Activation;
enum class Recompute { kNone, kCheap, kBlock };
inline constexpr EnumName<NormType> kNormNames[] = {{NormType::kRms, "rms_norm"},
                                                    {NormType::kLayer, "layer_norm"}};
inline constexpr EnumName<NormPlace> kNormPlaceNames[] = {
    {NormPlace::kBefore, "before"}, {NormPlace::kBranch, "branch"}, {NormPlace::kAfter, "after"}};
inline constexpr EnumName<MaskType> kMaskNames[] = {{MaskType::kCausal, "causal"},
                                                    {MaskType::kFull, "full"}};
inline constexpr EnumName<PositionType> kPositionNames[] = {
    {PositionType::kRope, "rope"},
    {PositionType::kLearned, "learned"},
    {PositionType::kSinusoidal, "sinusoidal"},
    {PositionType::kAlibi, "alibi"},
    {PositionType::kT5, "t5"},
    {PositionType::kExposb, "exposb"},
    {PositionType::kNone, "none"}};
inline constexpr const char* kRemovedPosition = "stick_breaking";
inline constexpr EnumName<MlpType> kMlpNames[] = {{MlpType::kSwiGlu, "swiglu"},
                                                  {MlpType::kGelu, "gelu"},
                                                  {MlpType::kGeluTanh, "gelu_tanh"},
                                                  {MlpType::kGeGlu, "geglu"},
                                                  {MlpType::kGeGluTanh, "geglu_tanh"}};
inline constexpr EnumName<Recompute> kRecomputeNames[] = {
    {Recompute::kNone, "none"}, {Recompute::kCheap, "cheap"}, {Recompute::kBlock, "block"}};

// Low-rank adapters of the blocks' linear layers, which are trained instead of the model's own
// parameters (LoRA, Hu et al. 2021): y = W x + scale() B A x.
struct LoraConfig {
  int64_t rank = 0;  // A is [rank, in], B [out, rank]; 0: no adapters
  double alpha = 32;
  // Modules by the end of the name under which the model's family stores them ("q_proj",
  // "attn.c_proj"); empty: all linear layers of the blocks.
  std::vector<std::string> targets;
  bool rslora = false;  // scales by the root of the rank (Kalajdzievski 2023)
  uint64_t seed = 1;    // gives A's initial values; not a configuration key, as the next one
  int64_t slots = 1;    // adapters side by side, for sampling

  double scale() const {
    const auto r = static_cast<double>(rank);
    return alpha / (rslora ? std::sqrt(r) : r);
  }
  void visit(ConfigVisitor& v) {
    v.field("rank", rank, "of the adapters; 0: none, all parameters are trained",
            {.min = 0, .max = 4096});
    v.field("alpha", alpha, "the adapters' output is scaled by alpha / rank",
            {.min = 1e-6, .max = 1e6});
    v.field("targets", targets,
            "linear layers with adapters, as q_proj or mlp.down_proj; empty: all of the blocks");
    v.field("rslora", rslora, "scale by alpha / sqrt(rank) instead");
  }
};

// Constants of ExpoSB: rotary positions with gains, and scores that fade with the distance.
struct ExposbConfig {
  double position_gain = 0.2, position_decay = 1000;
  double channel_base = 0.8, channel_gain = 0.4, channel_center = 0.25, channel_width = 0.125;
  double distance_floor = 0.7, distance_rate = 0.005;

  // Factor of a channel of rotated queries and keys. Channels count as in interleaved pairs, of
  // which the i-th is (2i, 2i + 1).
  double gain(int64_t position, int64_t channel, int64_t head_dim) const;
  void visit(ConfigVisitor& v) {
    v.field("position_gain", position_gain,
            "queries and keys at position t are scaled by 1 + position_gain exp(-t / "
            "position_decay)",
            {.min = 0, .max = 100});
    v.field("position_decay", position_decay, "in tokens", {.min = 1e-6});
    v.field("channel_base", channel_base,
            "channel d of D by channel_base + channel_gain exp(-(d - center)^2 / (2 width^2))",
            {.min = 0, .max = 100});
    v.field("channel_gain", channel_gain, "see channel_base", {.min = 0, .max = 100});
    v.field("channel_center", channel_center, "center / D", {.min = 0, .max = 1});
    v.field("channel_width", channel_width, "width / D", {.min = 1e-6, .max = 100});
    v.field("distance_floor", distance_floor,
            "scores at distance n are scaled by floor + (1 - floor) exp(-distance_rate n)",
            {.min = 0, .max = 1});
    v.field("distance_rate", distance_rate, "per token", {.min = 0, .max = 100});
  }
};

// Layers with the gated delta rule in place of attention (nn/gated_delta.h).
struct DeltaConfig {
  int64_t full_every = 0, key_heads = 16, value_heads = 32, key_dim = 128, value_dim = 128;

  int64_t values() const { return value_heads * value_dim; }
  int64_t channels() const { return 2 * key_heads * key_dim + values(); }
  void visit(ConfigVisitor& v) {
    v.field(
        "full_every", full_every,
        "every n-th layer has attention, and the others the gated delta rule (all, if there are "
        "fewer layers); 0: all have attention",
        {.min = 0, .max = 1000});
    v.field("key_heads", key_heads, "heads of queries and keys", {.min = 1, .max = 1 << 12});
    v.field("value_heads", value_heads, "heads of values, a multiple of key_heads",
            {.min = 1, .max = 1 << 12});
    v.field("key_dim", key_dim, "width of a head of queries and keys", {.min = 1, .max = 1 << 10});
    v.field("value_dim", value_dim, "width of a head of values, that of keys",
            {.min = 1, .max = 1 << 10});
  }
};

// Properties of models that are no configuration keys: those of a family of nn/families/, from its
// config.json, and what resolve() derives.
struct FamilyFields {
  bool qkv_bias = false, o_bias = false, mlp_bias = false;  // ModelConfig::bias implies all of them
  bool no_qkv_bias = false;                                 // not even with ModelConfig::bias
  bool qk_norm_whole = false;  // RMSNorm on the queries and keys of all heads together
  int64_t first_position = 0;  // row of the table of learned positions that position 0 has
  double norm_offset = 0;      // added to the weights of RMS norms
  double embedding_scale = 1;  // factor of the embedding's output
  // Per layer; empty: all layers have the window and rotary positions.
  std::vector<bool> windowed, rotary;
  std::vector<double> rope_frequencies;  // empty: those of rope_theta
  double rope_scale = 1;                 // factor of cosines and sines

  bool operator==(const FamilyFields&) const = default;
};

struct ModelConfig {
  std::string path;  // model to start from; empty: a new one
  int64_t num_layers = 4, d_model = 128, num_heads = 4;
  int64_t num_kv_heads = 0;  // 0: num_heads
  int64_t head_dim = 0;      // 0: d_model / num_heads
  int64_t d_ff = 0;          // 0: 4 d_model, or 8/3 d_model rounded up to 16 for SwiGLU
  int64_t context = 0;       // longest sequence in tokens; 0: 256
  NormType norm = NormType::kRms;
  PositionType position = PositionType::kRope;
  MlpType mlp = MlpType::kSwiGlu;
  bool bias = false, tie_embeddings = false, qk_norm = false;
  double dropout = 0, norm_eps = 1e-5, rope_theta = 10000, init_std = 0.02;
  Recompute recompute = Recompute::kNone;
  // Attention of all layers; see visit_optional(). Families may have a window in some layers.
  int64_t window = 0;
  double soft_cap = 0;
  bool attention_sinks = false, attention_gate = false;
  double rotary_fraction = 1;
  MaskType mask = MaskType::kCausal;
  NormPlace norm_place = NormPlace::kBefore;
  bool embedding_norm = false;
  int64_t token_types = 0;
  // Images of image_size^2 pixels, in patches of patch_size^2, instead of tokens; 0: tokens.
  int64_t image_size = 0, patch_size = 0, channels = 3;
  int64_t position_buckets = 32, position_max_distance = 128;
  ExposbConfig exposb;
  DeltaConfig delta;
  int64_t vocab_size = 0;  // set from the tokenizer; 0 for images
  HeadType head = HeadType::kNextToken;
  // The classes of kClasses, at least two.
  std::vector<std::string> labels;
  // Rows of the table of learned positions if a run uses only the first `context` of them; 0: all.
  int64_t position_rows = 0;

  FamilyFields family;
  Json file;        // the family's config.json as it was read; null: none was
  LoraConfig lora;  // not in config.json, as the next one
  PrecisionConfig precision;
  // That of the folder's weights; kNf4 also without double quantisation.
  kernels::WeightFormat stored_format = kernels::WeightFormat::kModel;

  int64_t window_of(int layer) const {
    return family.windowed.empty() || family.windowed[static_cast<size_t>(layer)] ? window : 0;
  }
  bool has_delta() const { return delta.full_every > 0; }
  bool is_delta(int layer) const { return has_delta() && (layer + 1) % delta.full_every != 0; }
  // The number of layers before this one that are of its kind, attention or delta.
  int layer_of_kind(int layer) const {
    int count = 0;
    for (int i = 0; i < layer; ++i) count += is_delta(i) == is_delta(layer) ? 1 : 0;
    return count;
  }
  bool is_rotary(int layer) const {
    return is_rotated() && (family.rotary.empty() || family.rotary[static_cast<size_t>(layer)]);
  }
  bool is_rotated() const {
    return position == PositionType::kRope || position == PositionType::kExposb;
  }
  // The first elements of a head that rotary positions rotate.
  int64_t rotary_dim() const {
    return static_cast<int64_t>(static_cast<double>(head_dim) * rotary_fraction);
  }
  // The largest factor by which rotary positions scale a key.
  double max_rotary_gain() const;
  // True if a trained model may run with a larger context: no table of positions ends there, and
  // no rotary frequencies were trained for it.
  bool may_extend() const {
    return position != PositionType::kRope && position != PositionType::kLearned;
  }
  bool is_encoder() const { return mask == MaskType::kFull; }
  bool has_images() const { return image_size > 0; }
  int64_t num_patches() const { return image_size / patch_size * (image_size / patch_size); }
  // True if the embedding table is the matrix of the head.
  bool is_tied() const {
    return tie_embeddings && (head == HeadType::kNextToken || head == HeadType::kMaskedToken);
  }
  // Rows of the logits' matrix; 0: the model has no logits.
  int64_t num_logits() const {
    if (head == HeadType::kPooler) return 0;
    return head == HeadType::kClasses ? static_cast<int64_t>(labels.size()) : vocab_size;
  }
  // Throws InputError for an encoder.
  void require_decoder() const;
  // Changes the head, in `file` too. Throws InputError for classes without two labels.
  void set_head(HeadType type, std::vector<std::string> names = {});
  // Says whether messages may advise a larger context, of a model that is trained.
  ContextLimit context_limit() const;

  void visit(ConfigVisitor& v) {
    v.field("path", path,
            "folder of a model to start from, of Hugging Face's or a checkpoint; as init_from");
    v.field("num_layers", num_layers, "transformer blocks", {.min = 1, .max = 1000});
    v.field("d_model", d_model, "width of the residual stream", {.min = 1, .max = 1 << 20});
    v.field("num_heads", num_heads, "query heads", {.min = 1, .max = 1 << 16});
    v.field("num_kv_heads", num_kv_heads, "key/value heads; 0: as many as query heads",
            {.min = 0, .max = 1 << 16});
    v.field("head_dim", head_dim, "width of a head; 0: d_model / num_heads",
            {.min = 0, .max = 1 << 16});
    v.field("d_ff", d_ff, "width of the MLP; 0: 4 d_model, for swiglu 8/3 d_model",
            {.min = 0, .max = 1 << 22});
    v.field("context", context,
            "longest sequence in tokens; 0: that of the model to start from, or 256",
            {.min = 0, .max = 1 << 24});
    v.choice("norm", norm, kNormNames, "normalisation of each sub-layer");
    v.choice("position", position, kPositionNames, "how positions enter", kRemovedPosition);
    v.choice("mlp", mlp, kMlpNames, "activation of the MLP");
    v.field("bias", bias, "biases in linear layers and layer norms");
    v.field("tie_embeddings", tie_embeddings, "the head shares the embedding table");
    v.field("qk_norm", qk_norm, "RMSNorm on each head's queries and keys");
    v.field("dropout", dropout, "on embeddings, attention probabilities and residual branches",
            {.min = 0, .max = 0.99});
    v.field("norm_eps", norm_eps, "added to the variance", {.min = 0, .max = 1});
    v.field("rope_theta", rope_theta, "base of the rotary frequencies", {.min = 1});
    visit_optional(v);
    v.field("init_std", init_std, "standard deviation of initial weights", {.min = 0, .max = 10});
    v.choice(
        "recompute", recompute, kRecomputeNames,
        "what backward computes again instead of storing it: nothing, the outputs of norms and "
        "activations (cheap), or whole blocks");
  }
  // The keys that config.json of Cohort's own models has where they are not the defaults.
  void visit_optional(ConfigVisitor& v) {
    v.choice("mask", mask, kMaskNames,
             "a token sees those before it (causal), or all of its sequence (full: encoders)");
    v.choice("norm_place", norm_place, kNormPlaceNames,
             "norms before sub-layers, on their branches, or after the sum as in BERT");
    v.field("embedding_norm", embedding_norm, "a norm of the embeddings, as in BERT");
    v.field("token_types", token_types, "types of tokens that have an embedding; 0: none",
            {.min = 0, .max = 1 << 16});
    v.field("image_size", image_size,
            "side of square images in pixels, whose patches replace tokens (ViT); 0: tokens",
            {.min = 0, .max = 1 << 13});
    v.field("patch_size", patch_size, "side of a patch in pixels, which divides image_size",
            {.min = 0, .max = 1 << 13});
    v.field("channels", channels, "of an image: 1 (gray) or 3 (RGB)", {.min = 1, .max = 3});
    v.field("window", window, "keys that a query sees, its own included; 0: all before it",
            {.min = 0, .max = 1 << 30});
    v.field("soft_cap", soft_cap, "bounds scores: cap tanh(score / cap); 0: none", {.min = 0});
    v.field("attention_sinks", attention_sinks,
            "a learned logit per head, without a value, in each softmax of attention");
    v.field("attention_gate", attention_gate,
            "the output of attention times the sigmoid of a gate per element, which q_proj gives "
            "beside the queries; RMS norms then have weights 1 + w, as in Qwen3.5");
    v.field("rotary_fraction", rotary_fraction,
            "position rope: the share of each head's elements that is rotated, the first ones",
            {.min = 0, .max = 1});
    v.field("position_buckets", position_buckets,
            "position t5: distances that have a bias of their own; an even number",
            {.min = 2, .max = 1 << 16});
    v.field("position_max_distance", position_max_distance,
            "position t5: greater distances share the last bias", {.min = 1, .max = 1 << 20});
    v.section("exposb", exposb, "constants of position exposb");
    v.section("delta", delta, "layers with the gated delta rule (docs/gated_delta.md)");
  }
  // Fills in sizes that are 0 and checks consistency. Throws InputError naming the key.
  void resolve();
  // Throws InputError naming the key if the device's kernels do not support the model in `dtype`.
  void check_device(Device device, DType dtype) const;
  // Throws InputError if GPUs of this compute capability, 10 major + minor, do not support it.
  void check_gpu(int compute_capability, DType dtype) const;
  // check_gpu() of this machine's GPU; does nothing for other devices, and in a dry run.
  void check_gpu(Device device, DType dtype) const;
  // Conversion to and from config.json: `file`, else that of a family that computes the same
  // (nn/families/), else of Cohort with Hugging Face's names where they exist. The configuration
  // must be resolved. Throws InputError naming a field that is missing, not supported, or
  // outside the range of the configuration's key.
  Json to_json() const;
  static ModelConfig from_json(const Json& json);
};

// Sizes of a model, from its parameters.
struct ModelSize {
  int64_t parameters = 0;  // all of them but the adapters', a tied table once
  // Parameters used in a matmul per token, including the head.
  int64_t matmul_parameters = 0;
  int64_t head_parameters = 0;  // those of them in the head: used per target
  int64_t adapters = 0;         // parameters of adapters, all of which are used so
  // The number that an update changes.
  int64_t trained() const { return adapters > 0 ? adapters : parameters; }
};
ModelSize model_size(const ModelConfig& config);
// Floating point operations of forward and backward for one token in a sequence of `length` tokens,
// causal attention counted once: 6 N_matmul + 6 L d_attn length (encoders: 12 L d_attn length);
// with adapters, whose base needs no gradients of weights, 4 N_matmul + 6 N_adapters + the same.
// `targets`: the share of tokens that the head's matmuls have.
double train_flops_per_token(const ModelConfig& config, double length, double targets = 1);

}  // namespace cohort
