// Fields of a config.json.
#include "nn/families/family.h"
#include "text/utf8.h"

namespace cohort {
namespace {

// Fields about training, generation, files and programs that do not affect the forward.
constexpr std::string_view kHarmless =
    "architectures model_type torch_dtype dtype transformers_version use_cache bos_token_id "
    "eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id "
    "attention_dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout hidden_dropout_prob "
    "initializer_range pretraining_tp auto_map task_specific_params output_attentions "
    "output_hidden_states return_dict id2label label2id problem_type tokenizer_class prefix "
    "chunk_size_feed_forward tf_legacy_loss use_bfloat16 pruned_heads torchscript "
    "finetuning_task gradient_checkpointing cache_implementation transformers.js_config "
    "max_length min_length do_sample early_stopping num_beams num_beam_groups "
    "diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
    "output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens loss_type is_llama_config rope_interleaved model_name name_or_path "
    "keys_to_ignore_at_inference source_dtype";

bool is_harmless(const std::string& field) {
  for (const char* prefix : {"_", "summary_", "unsloth"})
    if (field.starts_with(prefix)) return true;
  return has_word(kHarmless, field);
}

// Quantised weights by the fields that describe them: "bitsandbytes, 4 bits".
std::string quantization_of(const Json& json) {
  const std::string* method = json.find_text("quant_method");
  std::string text = method == nullptr ? "" : *method;
  const auto add = [&](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
  const Json& bits = json.get_or_null("bits");
  if (bits.is_int()) add(str(bits.as_int(), " bits"));
  if (const std::string* type = json.find_text("bnb_4bit_quant_type")) add(*type);
  return text.empty() ? "a method that it does not name" : text;
}

bool is_on(const Json& json, const char* field) {
  const Json& value = json.get_or_null(field);
  return value.is_bool() && value.as_bool();
}

}  // namespace

bool is_blank(const Json& value) {
  return value.is_null() || (value.is_bool() && !value.as_bool()) ||
         (value.is_string() && value.as_string().empty()) ||
         (value.is_array() && value.as_array().empty()) ||
         (value.is_object() && value.as_object().empty());
}

kernels::WeightFormat stored_format(const Json& config) {
  for (const char* field : {"quantization_config", "quantization"}) {
    const Json& value = config.get_or_null(field);
    if (value.is_null() || (value.is_object() && value.as_object().empty())) continue;
    const std::string* const method = value.find_text("quant_method");
    if (method != nullptr && *method == "bitsandbytes") {
      const std::string* const type = value.find_text("bnb_4bit_quant_type");
      if (is_on(value, "load_in_8bit")) return kernels::WeightFormat::kInt8;
      if (is_on(value, "load_in_4bit") && type != nullptr && *type == "nf4")
        return kernels::WeightFormat::kNf4;
    }
    throw InputError(str("the field ", field, ": quantized weights (", quantization_of(value),
                         ") are not supported, but for nf4 and int8 of bitsandbytes; hint: use the "
                         "folder of the 16-bit model, whose name has no -GPTQ, -AWQ or -FP8"));
  }
  return kernels::WeightFormat::kModel;
}

Json model_fields(const Json& config) {
  Json out = Json::Object{};
  for (const auto& [field, value] : config.as_object())
    if (!is_blank(value) && (field == "model_type" || !is_harmless(field))) out.set(field, value);
  return out;
}

const Json* ConfigFile::find(const char* field) {
  used_.insert(field);
  const Json* value = json_.find(field);
  return value != nullptr && value->is_null() ? nullptr : value;
}

int64_t ConfigFile::integer(const char* field) {
  if (find(field) == nullptr) throw InputError(str("the field ", field, " is missing"));
  return integer(field, 0);
}

void ConfigFile::expect(const char* field, const Json& value) {
  const Json* found = find(field);
  if (found == nullptr) return;
  const bool equal = found->is_number() && value.is_number()
                         ? found->as_double() == value.as_double()
                         : found->dump() == value.dump();
  if (!equal) refuse(field, str("only ", value.dump(), " is supported"));
}

void ConfigFile::refuse(const char* field, const std::string& why) const {
  const Json* found = json_.find(field);
  throw InputError(str("the field ", field, " is ",
                       found == nullptr ? std::string("missing") : found->dump(), ": ", why));
}

void ConfigFile::check_all_used() const {
  for (const auto& [field, value] : json_.as_object()) {
    if (used_.contains(field) || is_blank(value) || is_harmless(field)) continue;
    throw InputError(
        str("the field ", field, " is not supported for model_type ",
            json_.at("model_type").as_string(),
            "; hint: remove it from config.json if it does not change what the model computes"));
  }
}

}  // namespace cohort
