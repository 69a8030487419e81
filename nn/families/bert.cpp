// BERT (Devlin et al. 2019) and RoBERTa (Liu et al. 2019): norms after the sums and of the
// embeddings, types of tokens. RoBERTa counts positions from pad_token_id + 1.
#include <algorithm>
#include <iterator>

#include "nn/families/family.h"

namespace cohort {
namespace {

ModelConfig read_text_encoder(ConfigFile& file, int64_t first_position) {
  ModelConfig c = read_encoder(file);
  c.vocab_size = file.integer("vocab_size");
  c.token_types = file.integer("type_vocab_size", 2);
  c.context = file.integer("max_position_embeddings", 512) - first_position;
  c.tie_embeddings = file.flag("tie_word_embeddings", true);
  c.norm_place = NormPlace::kAfter;
  c.embedding_norm = true;
  c.family.first_position = first_position;
  file.expect("position_embedding_type", "absolute");
  read_head(file, c);
  if (c.head == HeadType::kMaskedToken) file.expect("tie_word_embeddings", true);
  return c;
}

// The modules of the embeddings and the blocks.
using Module = std::pair<const char*, const char*>;
constexpr Module kModules[] = {
    {"~embeddings.word_embeddings", "model.embed_tokens"},
    {"~embeddings.position_embeddings", "model.embed_positions"},
    {"~embeddings.token_type_embeddings", "model.embed_types"},
    {"~embeddings.LayerNorm", "model.embed_norm"},
    {"~encoder.layer.*.attention.self.query", "model.layers.*.self_attn.q_proj"},
    {"~encoder.layer.*.attention.self.key", "model.layers.*.self_attn.k_proj"},
    {"~encoder.layer.*.attention.self.value", "model.layers.*.self_attn.v_proj"},
    {"~encoder.layer.*.attention.output.dense", "model.layers.*.self_attn.o_proj"},
    {"~encoder.layer.*.attention.output.LayerNorm", "model.layers.*.post_attention_layernorm"},
    {"~encoder.layer.*.intermediate.dense", "model.layers.*.mlp.up_proj"},
    {"~encoder.layer.*.output.dense", "model.layers.*.mlp.down_proj"},
    {"~encoder.layer.*.output.LayerNorm", "model.layers.*.post_feedforward_layernorm"}};

// Modules of a family's heads.
struct HeadModules {
  const char *dense, *norm, *logits;
};
std::vector<TensorRule> rules_with(const ModelConfig& c, const char* base,
                                   const HeadModules& head) {
  std::vector<Module> modules(std::begin(kModules), std::end(kModules));
  modules.insert(modules.end(),
                 {{head.dense, "head.dense"}, {head.norm, "head.norm"}, {head.logits, "head"}});
  return encoder_rules(c, base, modules);
}

constexpr HeadModules kBertMasked = {"cls.predictions.transform.dense",
                                     "cls.predictions.transform.LayerNorm", "cls.predictions"},
                      kBertOther = {"~pooler.dense", "", "classifier"},
                      kRobertaMasked = {"lm_head.dense", "lm_head.layer_norm", "lm_head"},
                      kRobertaClasses = {"classifier.dense", "", "classifier.out_proj"};

}  // namespace

static ModelConfig read_bert(ConfigFile& file) {
  return read_text_encoder(file, 0);
}

static ModelConfig read_roberta(ConfigFile& file) {
  const int64_t padding = file.integer("pad_token_id", 1);
  if (padding < -1 || padding > INT32_MAX) file.refuse("pad_token_id", "expected a token");
  return read_text_encoder(file, padding + 1);
}

static std::vector<TensorRule> bert_rules(const ModelConfig& c) {
  return rules_with(c, "bert.", c.head == HeadType::kMaskedToken ? kBertMasked : kBertOther);
}

static std::vector<TensorRule> roberta_rules(const ModelConfig& c) {
  return rules_with(c, "roberta.",
                    c.head == HeadType::kMaskedToken ? kRobertaMasked
                    : c.head == HeadType::kClasses   ? kRobertaClasses
                                                     : kBertOther);
}

static Json write_bert(const ModelConfig& c) {
  // transformers looks types up even where all are 0.
  if (!c.is_encoder() || c.has_images() || c.token_types == 0) return {};
  if (c.head == HeadType::kMaskedToken && !c.tie_embeddings) return {};
  Json json = write_encoder(c, "bert");
  json.set("vocab_size", c.vocab_size).set("type_vocab_size", c.token_types);
  json.set("max_position_embeddings", std::max(c.context, c.position_rows));
  return json.set("tie_word_embeddings", c.tie_embeddings);
}

const Family kBert = {"bert", read_bert, bert_rules, write_bert};
const Family kRoberta = {"roberta", read_roberta, roberta_rules};

}  // namespace cohort
