// `cohort inspect`: describes a model from its folder, without reading the weights.
#include <algorithm>
#include <cstdio>
#include <map>

#include "apps/commands.h"
#include "core/dry_run.h"
#include "core/sizes.h"
#include "data/safetensors.h"
#include "job/checkpoint.h"
#include "nn/memory.h"
#include "nn/quantized_folder.h"
#include "text/chat.h"
#include "text/utf8.h"

namespace cohort::apps {
namespace {

void print_architecture(const ModelConfig& c) {
  std::printf("model\n");
  print_row("family", c.file.is_null() ? "cohort" : c.file.at("model_type").as_string());
  print_row("layers", str(c.num_layers, " of width ", c.d_model, ", MLP ", c.d_ff));
  print_row("heads", str(c.num_heads, " query, ", c.num_kv_heads, " key/value, of ", c.head_dim));
  if (c.window > 0) print_row("sliding window", str(c.window, " tokens"));
  print_row("vocabulary", str(c.vocab_size, " rows", c.tie_embeddings ? ", tied to the head" : ""));
  print_row("context", str(c.context, " tokens"));
  if (c.precision.rounds_keys()) print_row("cache", "fp8");
  if (c.precision.rounds_queries()) print_row("attention", "fp8");
  if (c.precision.is_quantized())
    print_row("linear layers", entry_of(kBaseNames, c.precision.base).name);
}

// Parts of the model, each with all parameters whose names contain a substring.
constexpr std::pair<const char*, const char*> kParts[] = {{"embeddings", "embed_"},
                                                          {"attention", "self_attn"},
                                                          {"delta layers", "linear_attn"},
                                                          {"MLPs", "mlp."},
                                                          {"head", "lm_head"}};

void print_adapter(const ModelConfig& config, const std::string& base) {
  const LoraConfig& lora = config.lora;
  std::printf("adapter\n");
  print_row("rank", str(lora.rank, ", output scaled by ", lora.scale(), " (alpha ", lora.alpha,
                        lora.rslora ? ", rslora)" : ")"));
  print_row("targets",
            lora.targets.empty() ? "all linear layers of the blocks" : join(lora.targets, ", "));
  print_row("base model", base);
  print_row("trainable parameters", std::to_string(model_size(config).adapters));
}

// `dir` has the weights.
void print_parameters(const ModelConfig& config, const std::string& dir) {
  std::map<std::string, int64_t> parts;
  const DryRun run({});
  const Transformer model(config, DType::kF32, std::nullopt);
  for (const NamedParameter& p : model.parameters()) {
    if (p.role == ParameterRole::kAdapter) continue;
    const char* name = "norms";
    for (const auto& [part, substring] : kParts)
      if (p.name.find(substring) != p.name.npos) name = part;
    parts[name] += p.value.numel();
  }
  std::printf("parameters\n");
  for (const auto& [name, count] : parts) print_row(name, std::to_string(count));
  print_row("all", std::to_string(model_size(config).parameters));
  const SafetensorsFolder files(dir, "model");
  std::map<std::string, int64_t> types;
  for (const std::string& name : files.names()) ++types[files.find(name)->stored_dtype(name)];
  std::vector<std::string> stored;
  for (const auto& [type, count] : types) stored.push_back(str(count, " ", type));
  print_row("stored tensors", join(stored, ", "));
}

void print_memory(const ModelConfig& config, const InspectOptions& options) {
  const int64_t length = std::min(options.context > 0 ? options.context : 4096, config.context);
  std::printf("memory, %s, %lld tokens\n", dtype_name(options.compute.dtype),
              static_cast<long long>(length));
  const DType dtype = options.compute.dtype;
  const Device device = device_named(options.compute.device, "--device");
  const MemoryEstimate memory =
      estimate_memory(config, dtype,
                      {.micro_batch_tokens = length,
                       .rollout_sequences = 1,
                       .rollout_length = length,
                       .rollout_prefill_tokens = length,
                       .optimizer = optimizer_bytes({}, config, dtype, device).memory,
                       .device = device});
  print_row("weights", mib(memory.parameters));
  print_row("training", mib(memory.persistent() + memory.update()));
  print_row("rollouts, a sequence", mib(memory.cache + memory.rollout));
  if (memory.states > 0) print_row("of these, its states", mib(memory.states));
}

void print_tokenizer(const std::string& dir) {
  std::printf("tokenizer\n");
  if (read_files(dir, kTokenizerFiles).empty()) return print_row("files", "none");
  const std::unique_ptr<Tokenizer> loaded = load_tokenizer(dir);
  const Tokenizer& tokenizer = *loaded;
  if (tokenizer.vocab_size() == 0) return print_row("files", kImageFile);
  print_row("ids", std::to_string(tokenizer.vocab_size()));
  std::string stops;
  for (const int32_t id : stop_ids_of(tokenizer))
    stops += str(stops.empty() ? "" : ", ", id, " ",
                 excerpt(tokenizer.decode({&id, 1}, SpecialText::kShow)));
  print_row("ends a text", stops);
  if (!find_chat_template(tokenizer.files())) return print_row("chat template", "none");
  const ChatFormat format(tokenizer, Json());
  print(stdout,
        str("chat template\n", format.prompt(Json::Array{make_message("user", "Hello")}), "\n"));
}

// `dir` is the folder that is described.
void describe(ModelConfig config, const std::string& dir, const std::string& weights,
              const std::string& tokenizer, const InspectOptions& options) {
  config.precision = load_precision(dir);
  if (!config.precision.is_quantized()) config.precision.base = whole_format(weights, config);
  if (options.compute.weights) config.precision.base = *options.compute.weights;
  check_precision(config, options.compute.dtype, dir + "/" + kPrecisionFile);
  config.check_device(device_named(options.compute.device, "--device"), options.compute.dtype);
  print_architecture(config);
  print_parameters(config, weights);
  print_memory(config, options);
  print_tokenizer(tokenizer);
}

}  // namespace

int inspect(const InspectOptions& options) {
  const std::string dir = find_checkpoint(options.model);
  if (!is_adapter_folder(dir)) {
    if (!options.compute.base.empty()) describe_model(dir, options.compute.base);  // refuses it
    describe(load_config(dir), dir, dir, dir, options);
    return kOk;
  }
  const AdapterConfig adapter = load_adapter_config(dir);
  const std::string base = find_base(dir, adapter, options.compute.base).path;
  const ModelConfig config = with_adapter(load_config(base), adapter, dir);
  print_adapter(config, base);
  describe(config, dir, base, has_tokenizer(dir) ? dir : base, options);
  return kOk;
}

}  // namespace cohort::apps
