// Rotary frequencies for texts longer than those a model was first trained on.
//   linear   f / factor                                                     (Chen et al. 2023)
//   llama3   long wavelengths by the factor, short ones not, a ramp between (Llama 3.1)
//   yarn     as llama3 with a ramp over dimensions, and larger logits       (Peng et al. 2023)
//   dynamic, longrope     depend on the length of the text: supported within the original context
#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/rope.h"
#include "nn/families/family.h"

namespace cohort {
namespace {

// Reader of rope_parameters or rope_scaling.
struct Scaling {
  ConfigFile fields;
  double theta;
  int64_t dim, max_positions;

  double positive(const char* field, double otherwise) {
    const double value = fields.number(field, otherwise);
    if (!(value > 0 && value < 1e12)) fields.refuse(field, "expected a positive number");
    return value;
  }
  double positive(const char* field) {
    if (fields.find(field) == nullptr) fields.refuse(field, "expected a positive number");
    return positive(field, 1);
  }
  int64_t original_context(int64_t otherwise) {
    const int64_t n = fields.integer("original_max_position_embeddings", otherwise);
    if (n < 1) fields.refuse("original_max_position_embeddings", "expected a number from 1");
    return n;
  }
};

void scale_linear(Scaling& in, ModelConfig& c) {
  const double factor = in.positive("factor");
  for (double& f : c.family.rope_frequencies) f /= factor;
}

void scale_llama3(Scaling& in, ModelConfig& c) {
  const double factor = in.positive("factor"), low = in.positive("low_freq_factor"),
               high = in.positive("high_freq_factor");
  const auto context = static_cast<double>(in.original_context(in.max_positions));
  if (!(low < high)) in.fields.refuse("high_freq_factor", "expected more than low_freq_factor");
  for (double& f : c.family.rope_frequencies) {
    const double rotations = context * f / (2 * std::numbers::pi);
    const double ramp = std::clamp((rotations - low) / (high - low), 0.0, 1.0);
    f = (1 - ramp) * f / factor + ramp * f;
  }
}

void scale_yarn(Scaling& in, ModelConfig& c) {
  if (in.fields.find("short_factor") != nullptr)
    in.fields.refuse("short_factor", "yarn has none; hint: an early Phi-3 calls longrope yarn");
  const auto context = static_cast<double>(in.original_context(in.max_positions));
  const double factor = in.positive("factor", static_cast<double>(in.max_positions) / context);
  const auto grow = [](double scale, double mscale) {
    return scale <= 1 ? 1.0 : 0.1 * mscale * std::log(scale) + 1;
  };
  const double mscale = in.fields.number("mscale", 0), all = in.fields.number("mscale_all_dim", 0);
  c.family.rope_scale = in.positive(
      "attention_factor",
      mscale != 0 && all != 0 ? grow(factor, mscale) / grow(factor, all) : grow(factor, 1));
  const auto dim = static_cast<double>(in.dim);
  // The dimension that completes this number of rotations within the context.
  const auto dimension = [&](double rotations) {
    return dim * std::log(context / (rotations * 2 * std::numbers::pi)) / (2 * std::log(in.theta));
  };
  double low = dimension(in.positive("beta_fast", 32)),
         high = dimension(in.positive("beta_slow", 1));
  if (in.fields.flag("truncate", true)) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < c.family.rope_frequencies.size(); ++i) {
    double& f = c.family.rope_frequencies[i];
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    f = ramp * f / factor + (1 - ramp) * f;
  }
}

// Within the original context the frequencies are the default ones.
void limit_dynamic(Scaling& in, ModelConfig& c) {
  in.positive("factor", 1);
  c.context = std::min(c.context, in.original_context(in.max_positions));
}

void limit_longrope(Scaling& in, ModelConfig& c) {
  const int64_t context = in.original_context(in.max_positions);
  const double factor =
      in.positive("factor", static_cast<double>(in.max_positions) / static_cast<double>(context));
  const std::vector<double> divisors = in.fields.numbers("short_factor");
  in.fields.ignore({"long_factor"});
  if (divisors.size() != c.family.rope_frequencies.size())
    in.fields.refuse("short_factor",
                     str("expected ", c.family.rope_frequencies.size(), " numbers"));
  for (size_t i = 0; i < divisors.size(); ++i) {
    if (!(divisors[i] > 0)) in.fields.refuse("short_factor", "expected positive numbers");
    c.family.rope_frequencies[i] /= divisors[i];
  }
  c.family.rope_scale = in.positive(
      "attention_factor",
      factor <= 1 ? 1 : std::sqrt(1 + std::log(factor) / std::log(static_cast<double>(context))));
  c.context = std::min(c.context, context);
}

struct ScalingType {
  const char* name;
  void (*apply)(Scaling& in, ModelConfig& config);
};
constexpr ScalingType kTypes[] = {{"linear", scale_linear},     {"llama3", scale_llama3},
                                  {"yarn", scale_yarn},         {"dynamic", limit_dynamic},
                                  {"longrope", limit_longrope}, {"su", limit_longrope}};

}  // namespace

void read_rope(ConfigFile& file, ModelConfig& c, double default_theta) {
  c.rope_theta = file.number("rope_theta", default_theta);
  const auto read_fraction = [&c, may_differ = c.rotary_fraction != 1](ConfigFile& fields) {
    if (!may_differ) return fields.expect("partial_rotary_factor", 1.0);
    c.rotary_fraction = fields.number("partial_rotary_factor", c.rotary_fraction);
    if (!(c.rotary_fraction > 0 && c.rotary_fraction <= 1))
      fields.refuse("partial_rotary_factor", "expected a number over 0, up to 1");
  };
  read_fraction(file);
  const int64_t original = file.integer("original_max_position_embeddings", 0);
  Json json;  // rope_parameters, and rope_scaling where that scales
  for (const char* field : {"rope_parameters", "rope_scaling"}) {
    const Json* found = file.find(field);
    if (found == nullptr) continue;
    if (!found->is_object()) file.refuse(field, "expected an object");
    const std::string* type = found->find_text(found->find("rope_type") ? "rope_type" : "type");
    if (!json.is_null() && (type == nullptr || *type == "default")) continue;
    const Json theta = json.get_or_null("rope_theta");
    json = *found;
    if (json.find("rope_theta") == nullptr) json.set("rope_theta", theta);
  }
  if (json.is_null()) return;
  if (original != 0 && json.find("original_max_position_embeddings") == nullptr)
    json.set("original_max_position_embeddings", original);
  Scaling in{.fields = ConfigFile(json), .theta = 0, .dim = 0, .max_positions = c.context};
  c.rope_theta = in.theta = in.fields.number("rope_theta", c.rope_theta);
  const std::string type =
      in.fields.text("rope_type", in.fields.text("type", std::string("default")));
  read_fraction(in.fields);
  if (type == "default") return;
  const auto* known = std::ranges::find(kTypes, type, &ScalingType::name);
  if (known == std::end(kTypes))
    in.fields.refuse("rope_type", "known: default, linear, dynamic, yarn, longrope, llama3");
  if (!(c.rope_theta > 1) || c.head_dim < 2 || c.head_dim % 2 != 0 || c.head_dim > 1 << 16)
    in.fields.refuse("rope_type", "it needs a rope_theta over 1 and an even head_dim up to 65536");
  in.dim = c.rotary_dim();
  if (in.dim < 2 || in.dim % 2 != 0)
    in.fields.refuse("partial_rotary_factor", "it needs an even number of rotated elements");
  c.family.rope_frequencies = kernels::rope_frequencies(in.dim, c.rope_theta);
  known->apply(in, c);
}

}  // namespace cohort
