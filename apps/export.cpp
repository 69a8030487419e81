// `cohort export`: writes a model alone, as a folder of Hugging Face's, or an adapter, as PEFT's.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>

#include "apps/commands.h"
#include "apps/signals.h"
#include "core/parallel.h"
#include "data/class_examples.h"
#include "job/run.h"
#include "job/run_directory.h"
#include "kernels/matmul.h"
#include "nn/merge.h"
#include "sys/files.h"

namespace cohort::apps {
namespace {

struct Interrupted {};

// From the first call on, an interrupt does not end the process.
void check_interrupt() {
  if (interrupt_request()) throw Interrupted();
}

// The name of a dtype in config.json.
const char* torch_name(const std::string& option) {
  if (option == "f32") return "float32";
  return option == "f16" ? "float16" : "bfloat16";
}

// The dtype that holds numbers of both.
std::string common_dtype(const std::string& a, const std::string& b) {
  if (a == b) return a;
  return a == "float64" || b == "float64" ? "float64" : "float32";
}

// Texts of the run of a checkpoint, on which the exported model is compared with the trained one.
struct RunTexts {
  std::vector<TokenSequence> sequences;
  std::string origin;  // "held-out prompts of runs/a/config.yaml"
};

RunTexts texts_of(const TrainConfig& config, const Dataset& data, const ModelConfig& model) {
  constexpr int64_t kTexts = 64, kWindow = 256;
  RunTexts out;
  const auto add = [&](std::vector<int32_t> tokens) {
    tokens.resize(std::min(tokens.size(), static_cast<size_t>(model.context)));
    if (!tokens.empty()) out.sequences.push_back({.tokens = tokens, .labels = std::move(tokens)});
  };
  if (reads_text(config.batch.trainer)) {
    const TokenStream& text = data.held_out_text;
    for (int64_t i = 0; i < kTexts && i * kWindow < text.size(); ++i)
      add(text.read(i * kWindow, std::min(kWindow, text.size() - i * kWindow)));
    out.origin = "held-out texts";
    return out;
  }
  const bool held_out = data.held_out_set != nullptr && data.held_out_set->size() > 0;
  const ExampleSet& set = held_out ? *data.held_out_set : *data.train;
  const ClassReader classes({*data.tokenizer, model.labels, model.context, model.image_size,
                             model.channels, model.token_types},
                            Augment::kNone, 0);
  for (int64_t i = 0; i < std::min(kTexts, set.size()); ++i)
    if (config.batch.trainer == TrainerType::kClassify)
      out.sequences.push_back(classes.read(set.get(i), -1, i));
    else
      add(encode_prompt(set.get(i), *data.tokenizer));
  out.origin = held_out ? "held-out prompts" : "training prompts";
  return out;
}

// A model before and after the changes of an export, for messages.
struct ModelNames {
  const char *before, *after;
};

// The texts of the run that wrote the checkpoint; none if there is no run, or they cannot be read,
// which a line says.
RunTexts run_texts(const LoadedModel& loaded, const ModelNames& names) {
  const auto path = find_run_config(loaded.checkpoint);
  if (!path) return {};
  try {
    const TrainConfig config = load_plan(*path, {}).stages.back();
    const Dataset data = load_dataset(
        config, make_tokenizer(loaded.tokenizer->files(), loaded.checkpoint), DataParts::kAll);
    RunTexts out = texts_of(config, data, loaded.model->config());
    out.origin += " of " + *path;
    return out;
  } catch (const Error& e) {
    print(stdout, str("the ", names.after, " model is not compared with the ", names.before,
                      " one: ", e.what(), "\n"));
    return {};
  }
}

// The head's input at each position of each text, or of a text with a class at its first one.
std::vector<Tensor> hidden_states(const Transformer& model, const RunTexts& texts) {
  NoGradGuard no_grad;
  std::vector<Tensor> out;
  for (const TokenSequence& sequence : texts.sequences) {
    check_interrupt();
    out.push_back(model.hidden_at_targets(pack({&sequence, 1})).value());
  }
  return out;
}

// log(sum(exp(x))) of n logits.
template <class T>
double log_sum_exp(const T* x, int64_t n) {
  const auto largest = static_cast<double>(*std::max_element(x, x + n));
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += std::exp(static_cast<double>(x[i]) - largest);
  return largest + std::log(sum);
}

// Sum over the tokens of KL(a || b) of their distributions, of inputs [T, d] of the heads v of a
// and w of b.
double kl_sum(const Tensor& a, const HeadWeights& v, const Tensor& b, const HeadWeights& w) {
  const int64_t tokens = a.dim(0), vocab = v.weight.value().dim(0);
  Tensor p = Tensor::empty({tokens, vocab}, a.dtype()), q = Tensor::empty_like(p);
  kernels::linear_forward({p, a, v.weight.value(), v.bias.value()});
  kernels::linear_forward({q, b, w.weight.value(), w.bias.value()});
  std::vector<double> kl(static_cast<size_t>(tokens));
  dispatch_float(a.dtype(), "export", [&]<class T>() {
    parallel_for(tokens, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const T *x = p.data<T>() + t * vocab, *y = q.data<T>() + t * vocab;
        const double x_sum = log_sum_exp(x, vocab), y_sum = log_sum_exp(y, vocab);
        for (int64_t i = 0; i < vocab; ++i) {
          const double log_p = static_cast<double>(x[i]) - x_sum,
                       log_q = static_cast<double>(y[i]) - y_sum;
          kl[static_cast<size_t>(t)] += std::exp(log_p) * (log_p - log_q);
        }
      }
    });
  });
  return std::accumulate(kl.begin(), kl.end(), 0.0);
}

double percent(int64_t part, int64_t all) {
  return std::round(10000 * static_cast<double>(part) / static_cast<double>(all)) / 100;
}

void print_change(const MergeChange& change) {
  print(stdout,
        str("merged: ", change.moved, " of the ", change.weights, " weights with adapters moved (",
            percent(change.moved, change.weights), " %), by ", change.mean, " on average\n"));
}

// Says what rounding to `dtype` keeps of the changes since the start of the checkpoint's run.
void print_kept(const LoadedModel& loaded, const std::string& dtype) {
  try {
    const auto path = find_run_config(loaded.checkpoint);
    std::string start = path ? load_plan(*path, {}).stages.front().init_from : "";
    if (!start.empty()) start = find_checkpoint(start);
    if (!is_model_folder(start)) return;
    const KeptChange kept = kept_change(*loaded.model, stored_type(dtype), start);
    if (kept.changed > 0)
      print(stdout,
            str("rounded: ", kept.kept, " of the ", kept.changed,
                " weights that training has changed differ in ", dtype, " from those of ", start,
                " (", percent(kept.kept, kept.changed), " %); without --dtype all are kept\n"));
  } catch (const Error& e) {
    print(stdout, str("the changes that rounding keeps are not counted: ", e.what(), "\n"));
  }
}

// Changes the loaded model by change(), and says by how much its distribution moves.
void change_model(const LoadedModel& loaded, const ModelNames& names,
                  const std::function<void()>& change) {
  const RunTexts texts = run_texts(loaded, names);
  const std::vector<Tensor> before = hidden_states(*loaded.model, texts);
  if (before.empty()) return change();
  HeadWeights head = loaded.model->head();
  for (Variable* const v : {&head.weight, &head.bias})
    if (v->defined()) *v = Variable(v->value().clone());
  change();
  const std::vector<Tensor> after = hidden_states(*loaded.model, texts);
  double kl = 0;
  int64_t tokens = 0;
  for (size_t i = 0; i < before.size(); ++i) {
    check_interrupt();
    kl += kl_sum(before[i], head, after[i], loaded.model->head());
    tokens += before[i].dim(0);
  }
  print(stdout, str("KL(", names.before, " || ", names.after,
                    "): ", kl / static_cast<double>(tokens), " per token, over the ", tokens,
                    " tokens of ", before.size(), " ", texts.origin, "\n"));
}

void write_whole(const ExportOptions& options, const std::string& checkpoint, NewFolder& output) {
  std::string stored = stored_dtype(checkpoint, options.merged ? "adapter_model" : "model");
  if (options.merged)
    stored = common_dtype(stored, stored_dtype(describe_model(checkpoint, options.base).base.path));
  const std::string dtype = options.dtype.empty() ? stored : torch_name(options.dtype);
  const bool rounds = common_dtype(stored, dtype) != dtype;
  // Comparisons are computed in f32 or f64.
  const std::string computed = options.merged || rounds ? common_dtype(stored, "float32") : stored;
  LoadedModel loaded = load_model(checkpoint, dtype_holding(computed), {}, options.base);
  if (loaded.model->config().precision.is_quantized()) loaded.model = expanded(*loaded.model);
  if (options.merged)
    change_model(loaded, {"unmerged", "merged"},
                 [&] { print_change(merge_adapters(*loaded.model, stored_type(dtype))); });
  else if (rounds)
    change_model(loaded, {"trained", "exported"}, [&] {
      print_kept(loaded, dtype);
      round_weights(*loaded.model, stored_type(dtype));
    });
  check_interrupt();
  export_model(*loaded.model, *loaded.tokenizer, output.create(), dtype, check_interrupt);
  output.finish();
  print(stdout, str(options.output, ": ", model_size(loaded.model->config()).parameters,
                    " parameters in ", dtype, "\n"));
}

// The configuration of an adapter's model and the path or name of its base. A checkpoint has both;
// for others the base is found.
std::pair<ModelConfig, std::string> adapted_model(const ExportOptions& options,
                                                  const std::string& checkpoint) {
  const AdapterConfig adapter = load_adapter_config(checkpoint);
  const bool is_whole = path_exists(checkpoint + "/manifest.json");
  if (is_whole && options.base.empty())
    return {with_adapter(load_config(checkpoint), adapter, checkpoint),
            load_state(checkpoint).base.path};
  const std::string base = find_base(checkpoint, adapter, options.base).path;
  return {with_adapter(load_config(base), adapter, checkpoint), base};
}

void write_adapter_folder(const ExportOptions& options, const std::string& checkpoint,
                          NewFolder& output) {
  const auto [config, base] = adapted_model(options, checkpoint);
  const std::string stored = stored_dtype(checkpoint, "adapter_model"),
                    dtype = options.dtype.empty() ? stored : torch_name(options.dtype);
  std::vector<TensorSource> sources;
  for (const auto& [name, value] : read_adapter_tensors(checkpoint + "/adapter_model.safetensors",
                                                        config, dtype_holding(stored)))
    sources.push_back({name, value.shape(), stored_type(dtype), [&dtype, name, value] {
                         check_interrupt();
                         return stored_values(value, stored_type(dtype), name);
                       }});
  check_interrupt();
  const std::string dir = output.create();
  write_adapter(config, sources, dir, base);
  save_precision(load_precision(checkpoint), dir);
  if (has_tokenizer(checkpoint)) {
    const auto tokenizer = load_tokenizer(checkpoint);
    for (const auto& [file, content] : tokenizer->files())
      write_file_durable(dir + "/" + file, content);
  }
  output.finish();
  print(stdout, str(options.output, ": an adapter of rank ", config.lora.rank, " of ", base, ", ",
                    model_size(config).adapters, " parameters in ", dtype, "\n"));
}

}  // namespace

int export_folder(const ExportOptions& options) {
  NewFolder output(options.output);
  try {
    load_found(options.model, [&](const std::string& checkpoint) {
      const bool is_adapter = is_adapter_folder(checkpoint);
      if (options.merged && !is_adapter)
        throw InputError(
            str("--merged: ", checkpoint, " is a whole model already; hint: omit --merged"));
      if (is_adapter && !options.merged)
        write_adapter_folder(options, checkpoint, output);
      else
        write_whole(options, checkpoint, output);
      return true;
    });
  } catch (const Interrupted&) {
    return kInterrupted;
  }
  return kOk;
}

}  // namespace cohort::apps
