// Numbers in four or eight bits that are part of the policy: what a model computes with them, in
// rollouts and in training alike (docs/precision.md).
#pragma once

#include <string>

#include "config/visitor.h"
#include "core/dtype.h"
#include "kernels/quantized_weight.h"

namespace cohort {

struct ModelConfig;

// The type of cached keys and values: the model's, or e4m3.
enum class CachePrecision { kModel, kFp8 };
inline constexpr EnumName<CachePrecision> kCachePrecisionNames[] = {
    {CachePrecision::kModel, "bf16"}, {CachePrecision::kFp8, "fp8"}};

// The operands of attention: those of the model's dtype, or e4m3 (AttentionDesc::fp8_scales).
enum class AttentionPrecision { kModel, kFp8 };
inline constexpr EnumName<AttentionPrecision> kAttentionPrecisionNames[] = {
    {AttentionPrecision::kModel, "bf16"}, {AttentionPrecision::kFp8, "fp8"}};

inline constexpr EnumName<kernels::WeightFormat> kBaseNames[] = {
    {kernels::WeightFormat::kModel, "bf16"},
    {kernels::WeightFormat::kInt8, "int8"},
    {kernels::WeightFormat::kNf4, "nf4"},
    {kernels::WeightFormat::kNf4Single, "nf4_single"}};

struct PrecisionConfig {
  CachePrecision cache = CachePrecision::kModel;
  AttentionPrecision attention = AttentionPrecision::kModel;
  // The weights of the blocks' linear layers, which are then frozen.
  kernels::WeightFormat base = kernels::WeightFormat::kModel;

  bool is_quantized() const { return base != kernels::WeightFormat::kModel; }
  bool rounds_queries() const { return attention == AttentionPrecision::kFp8; }
  // Attention in FP8 has a cache in FP8.
  bool rounds_keys() const { return cache == CachePrecision::kFp8 || rounds_queries(); }
  void visit(ConfigVisitor& v) {
    v.choice("cache", cache, kCachePrecisionNames,
             "keys and values of attention: bf16 (the model's dtype) or fp8 (e4m3, half the memory "
             "of the cache); in training too, so that ratios stay 1");
    v.choice(
        "attention", attention, kAttentionPrecisionNames,
        "operands of attention: bf16 (the model's dtype) or fp8 (e4m3, with cache: fp8); on GPUs "
        "of compute capability 9.0, and the CPU");
    v.choice("base", base, kBaseNames,
             "weights of the blocks' linear layers, frozen, with lora: bf16 (the model's dtype), "
             "int8, nf4 (QLoRA's, with double quantisation) or nf4_single (without)");
  }
};

// A line that says so if a run asks for another precision than that of the model in `source`; "" if
// not.
std::string precision_change(const PrecisionConfig& asked, const PrecisionConfig& saved,
                             const std::string& source);
// Throws InputError if a resolved model does not support its precision in `dtype`. The message
// names the key, or `file` if the precision comes from that one.
void check_precision(const ModelConfig& config, DType dtype, const std::string& file = "");
// The dtype of the cache of a model in `dtype`.
DType cache_dtype(const ModelConfig& config, DType dtype);

inline constexpr const char* kPrecisionFile = "precision.json";
// precision.json of a model's folder, which has the keys that are not the defaults, and `cache`
// with `attention`. Throws InputError for an entry that cannot be read, has none of them, or other
// keys or values.
PrecisionConfig load_precision(const std::string& dir);
// Writes the file unless all values are the defaults; returns true if it did.
bool save_precision(const PrecisionConfig& precision, const std::string& dir);

}  // namespace cohort
