// The folder of a model: config.json and safetensors, in Hugging Face's format (nn/families/) or in
// Cohort's own.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "data/safetensors.h"
#include "nn/transformer.h"
#include "text/tokenizer.h"
#include "text/tokenizers/json_fields.h"

namespace cohort {

// True if the folder has a config.json and weights. Throws Error if the system cannot tell.
bool is_model_folder(const std::string& dir);

// The end of an error message about a path without a model: the reason, and the step that leads to
// one, for weights in other formats, adapters, other folders, and names on the Hugging Face Hub.
// "" if there is nothing to say.
std::string explain_no_model(const std::string& path);
// The hint for `path` if it does not exist and the user's `name` for it reads like one on the Hub,
// else "".
std::string hub_hint(const std::string& name, const std::string& path);

// DIR/config.json, resolved. A head that it ties to the embedding table, and that the weights in
// DIR have with other values, is not tied, which is logged once. Throws InputError naming the file
// and the field.
ModelConfig load_config(const std::string& dir);

// kYes: the logits' weights of an encoder keep their values, and what else of its head the files
// lack, which is logged.
enum class NewHead : bool { kNo, kYes };
// Reads DIR/STEM.safetensors or its shards into the model's parameters, converted to its dtype, but
// for those of adapters (nn/adapter_folder.h), which keep their values, as they are not written.
// Tensors of other heads of an encoder are left out, which is logged. Throws InputError for a
// tensor that is missing, unknown to the model, or of another shape.
void load_weights(Transformer& model, const std::string& dir, const std::string& stem = "model",
                  NewHead new_head = NewHead::kNo);

// The type of a parameter in files whose weights have `type` ("BF16").
std::string type_in_files(const NamedParameter& parameter, const std::string& type);
// The weights, without adapters, as tensors of type_in_files() under the names of the model's
// family.
std::vector<TensorSource> weight_sources(const Transformer& model, const std::string& type);
// The file of a folder that holds such a tensor, and its name there, which may lack the prefix
// "model." or "transformer."; nullptr: none does.
std::pair<const SafetensorsFile*, std::string> find_weight(const SafetensorsFolder& folder,
                                                           const std::string& name);
// Writes the weights, without adapters, under the names of the model's family and flushes them to
// disk. Returns the names of the files.
std::vector<std::string> save_weights(const Transformer& model, const std::string& dir,
                                      const std::string& stem = "model");
// Content of config.json: to_json() with the dtype of the weights. `tokenizer` (nullptr: not known)
// names the end of a text in the file of a model made here.
Json saved_config(const Transformer& model, const Tokenizer* tokenizer = nullptr);

// Tokenizer::stop_ids(); empty if the tokenizer has no end of sequence.
std::vector<int32_t> stop_ids_of(const Tokenizer& tokenizer);

// The floating point type of the folder's weights by its name in config.json ("float16"); the type
// that holds all of them if they differ.
std::string stored_dtype(const std::string& dir, const std::string& stem = "model");
// True if numbers of a type of safetensors ("F16") may be rounded when they become `dtype`.
bool loses_bits(const std::string& stored, DType dtype);
// The name of such a type in safetensors ("F16").
const char* stored_type(const std::string& name);
// DType that holds numbers of such a type exactly.
DType dtype_holding(const std::string& name);
// Writes the weights as `dtype` ("float16", "bfloat16", "float32" or "float64"), their config.json
// and the tokenizer's files into DIR. Calls `before_tensor` before each tensor. Throws InputError
// as stored_values() does, and for another name.
void export_model(const Transformer& model, const Tokenizer& tokenizer, const std::string& dir,
                  const std::string& dtype, const std::function<void()>& before_tensor);

}  // namespace cohort
