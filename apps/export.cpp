// `cohort export`: writes a model alone, as a folder of Hugging Face's.
#include <atomic>

#include "apps/commands.h"
#include "apps/signals.h"
#include "sys/files.h"

namespace cohort::apps {
namespace {

struct Interrupted {};

// The name of a dtype in config.json.
const char* torch_name(const std::string& option) {
  if (option == "f32") return "float32";
  return option == "f16" ? "float16" : "bfloat16";
}

}  // namespace

int export_folder(const ExportOptions& options) {
  NewFolder output(options.output);
  std::string dtype;
  const LoadedModel loaded = load_found(options.model, [&](const std::string& checkpoint) {
    const std::string stored = stored_dtype(checkpoint);
    LoadedModel found = load_model(checkpoint, dtype_holding(stored));
    const std::string& source = found.model->config().source_dtype;
    dtype = source.empty() ? stored : source;
    return found;
  });
  if (!options.dtype.empty()) dtype = torch_name(options.dtype);
  const std::atomic<bool>& interrupted = interrupt_request();
  try {
    export_model(*loaded.model, *loaded.tokenizer, output.create(), dtype, [&] {
      if (interrupted) throw Interrupted();
    });
    output.finish();
  } catch (const Interrupted&) {
    return kInterrupted;
  }
  print(stdout, str(options.output, ": ", model_size(loaded.model->config()).parameters,
                    " parameters in ", dtype, "\n"));
  return kOk;
}

}  // namespace cohort::apps
