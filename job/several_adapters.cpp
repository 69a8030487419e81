#include "job/several_adapters.h"

#include "core/log.h"
#include "sys/files.h"

namespace cohort {

LoadedModel load_with_adapters(const std::string& base, std::span<const std::string> adapters,
                               DType dtype, Device device,
                               std::optional<kernels::WeightFormat> format) {
  if (adapters.size() > kMaxAdapters)
    throw InputError(
        str("--adapter: expected at most ", kMaxAdapters, " adapters, got ", adapters.size()));
  ModelDescription saved = describe_model(base);
  if (!saved.base.path.empty())
    throw InputError(base + " is an adapter; hint: give its base, and it by --adapter NAME=DIR");
  const ModelConfig plain = saved.config;
  const auto refuse = [](const std::string& dir, const std::string& what) {
    throw InputError(str("--adapter: ", dir, " ", what, "; hint: use it in a call of its own"));
  };
  std::vector<double> scales;
  for (const std::string& dir : adapters) {
    const AdapterConfig adapter = load_adapter_config(dir);
    AdapterBase found = find_base(dir, adapter, base);
    if (!found.fingerprint.empty()) verify_base(found, dir);
    ModelConfig with = with_adapter(plain, adapter, dir);
    scales.push_back(with.lora.scale());
    with.precision = load_precision(dir);
    if (!with.precision.is_quantized()) with.precision.base = plain.precision.base;
    if (with.precision.rounds_keys())  // whose scales depend on the adapter
      refuse(dir, "was trained with precision.cache: fp8");
    if (scales.size() == 1) saved.config = with;
    if (format && *format != with.precision.base)
      logging::warn("--weights: the adapter ", dir, " was trained on a base in ",
                    entry_of(kBaseNames, with.precision.base).name);
    else if (!format && with.precision.base != saved.config.precision.base)
      refuse(dir, "has a base in another format than " + adapters[0]);
    if (has_tokenizer(dir) && load_tokenizer(dir)->files() != saved.tokenizer->files())
      refuse(dir, "has another tokenizer or chat template than " + base);
    if (path_exists(dir + "/generation_config.json"))
      logging::warn("--adapter: generation_config.json of ", dir, " is not used, but the base's");
    if (with.lora.rank != saved.config.lora.rank || with.lora.targets != saved.config.lora.targets)
      refuse(dir, "has another rank, or other modules, than " + adapters[0]);
  }
  saved.config.lora.slots = std::ssize(adapters);
  if (format) saved.config.precision.base = *format;
  check_precision(saved.config, dtype, format ? "--weights" : adapters[0] + "/" + kPrecisionFile);
  LoadedModel loaded{std::make_unique<Transformer>(saved.config, dtype, std::nullopt, device),
                     std::move(saved.tokenizer),
                     base,
                     {}};
  load_weights(*loaded.model, base);
  for (size_t i = 0; i < adapters.size(); ++i)
    load_adapter(*loaded.model, adapters[i], static_cast<int64_t>(i), scales[i]);
  return loaded;
}

}  // namespace cohort
