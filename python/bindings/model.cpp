// cohort.Model and Engine: models from folders, their log-probs, and sampling.
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "config/node.h"
#include "core/device.h"
#include "core/log.h"
#include "data/chat_examples.h"
#include "data/parallel_try.h"
#include "job/encode.h"
#include "job/evaluation.h"
#include "nn/adapter_folder.h"
#include "nn/merge.h"
#include "python/bindings/bindings.h"
#include "python/bindings/models.h"
#include "rl/engine/rollout.h"
#include "sys/files.h"
#include "text/chat_template.h"
#include "text/tokenizers/json_fields.h"
#include "trainers/sampling.h"

namespace cohort::python {
namespace {

// Keys of a section of the configuration.
template <class Section>
Section section_of(const nb::kwargs& keys, const char* name, Section section = {}) {
  read_config(section, parse_yaml(json_text(keys), name));
  return section;
}

// A prompt is a text, token ids, a conversation that the chat template renders, or {"rendered":
// text}, such a rendering.
using Prompt = std::variant<std::string, std::vector<int32_t>, nb::list, nb::dict>;

std::string rendered_text(const nb::dict& prompt) {
  return nb::cast<std::string>(prompt["rendered"]);
}

Json messages_of(const nb::list& prompt) {
  Json messages = from_python(prompt, "prompt");
  if (!std::ranges::all_of(messages.as_array(), &Json::is_object))
    throw InputError(
        "prompt: expected a text, token ids, or a conversation as a list of {\"role\", "
        "\"content\"}; hint: Engine.rollouts() takes several prompts");
  return messages;
}

// The prompts of conversations, with the run's system message, template variables and tools, but
// for the variables and tools that are given (or None).
class ChatPrompts {
 public:
  ChatPrompts(const SetModel& loaded, nb::handle variables, nb::handle tools)
      : data_([&] {
          DataConfig data = loaded.settings().data;
          if (!variables.is_none()) data.chat_template_kwargs = json_text(variables);
          if (!tools.is_none()) data.tools = from_python(tools, "tools");
          return data;
        }()),
        format_(chat_format(data_, *loaded.tokenizer)) {}

  std::string render(const Json& messages) const {
    return format_.prompt(with_system(normalized_messages(messages, "prompt"), data_.system));
  }
  // The whole conversation, as training has it.
  std::string conversation(const Json& messages) const {
    return format_.conversation(with_system(normalized_messages(messages, "text"), data_.system))
        .text;
  }
  const ChatFormat& format() const { return format_; }

 private:
  const DataConfig data_;
  const ChatFormat format_;
};

void check_ids(const LoadedModel& loaded, const std::vector<int32_t>& ids) {
  const int64_t vocab = loaded.model->config().vocab_size;
  if (ids.empty()) throw InputError("prompt: expected token ids, got none");
  for (const int32_t id : ids)
    if (id < 0 || id >= vocab)
      throw InputError(str("prompt: token id ", id, " is outside of the vocabulary of ", vocab));
}

// The tokens of a text, token ids, a whole conversation, or a rendered one.
std::vector<int32_t> tokens_of(const SetModel& loaded, const Prompt& prompt) {
  if (const auto* ids = std::get_if<std::vector<int32_t>>(&prompt)) return *ids;
  if (const auto* text = std::get_if<std::string>(&prompt))
    return loaded.tokenizer->encode(*text, SpecialTokens::kAdd);
  const auto* conversation = std::get_if<nb::list>(&prompt);
  const Json messages = conversation != nullptr ? messages_of(*conversation) : Json();
  return loaded.tokenizer->encode(
      conversation != nullptr ? ChatPrompts(loaded, nb::none(), nb::none()).conversation(messages)
                              : rendered_text(std::get<nb::dict>(prompt)),
      SpecialTokens::kNone);
}

std::vector<Variable> logprobs(const LoadedModel& loaded,
                               const std::vector<std::vector<int32_t>>& texts, double temperature) {
  const int64_t context = loaded.model->config().context;
  for (const std::vector<int32_t>& ids : texts) {
    check_ids(loaded, ids);
    if (const auto n = static_cast<int64_t>(ids.size()); n < 2 || n > context + 1)
      throw InputError(str("logprobs: expected 2 to ", context + 1, " tokens, got ", n));
  }
  const std::vector<Tensor> values = token_logprobs(*loaded.model, texts, temperature);
  return {values.begin(), values.end()};
}

// Lets Python handle signals, whose exception is thrown.
void check_signals() {
  const nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) nb::raise_python_error();
}

// [N, d_model] f32, as `cohort embed` computes them.
Variable embeddings(const LoadedModel& loaded, const SentenceFolder& folder,
                    const std::vector<std::string>& texts) {
  constexpr size_t kBlock = 1024;  // texts that are tokenized before signals are handled
  const auto name_of = [](size_t i) { return str("texts[", i, "]"); };
  std::vector<float> all;
  bool is_noted = false;
  for (size_t begin = 0; begin < texts.size(); begin += kBlock) {
    std::vector<TokenSequence> block(std::min(kBlock, texts.size() - begin));
    std::vector<uint8_t> is_cut(block.size());
    parallel_try(std::ssize(block), 4, [&](int64_t at) {
      const auto i = static_cast<size_t>(at);
      with_path(name_of(begin + i),
                [&] { is_cut[i] = encode_text(loaded, folder, texts[begin + i], {}, block[i]); });
    });
    for (size_t i = 0; i < block.size() && !is_noted; ++i)
      if ((is_noted = is_cut[i] != 0))
        logging::info(name_of(begin + i), " is cut to ", block[i].tokens.size(),
                      " tokens; others are without a note");
    const auto rows = embed(loaded, folder, block, check_signals);
    for (size_t i = 0; i < rows.size(); ++i) {
      if (rows[i].empty()) throw_not_finite(name_of(begin + i), loaded.checkpoint);
      all.insert(all.end(), rows[i].begin(), rows[i].end());
    }
  }
  return Variable(Tensor::from(all).reshape({std::ssize(texts), loaded.model->config().d_model}));
}

// Writes the weights in memory; `merged`: those of the base, from its folder, with the adapter.
void export_folder(const LoadedModel& loaded, const std::string& dir, const std::string& dtype,
                   bool merged) {
  const bool is_adapted = !loaded.base.path.empty();
  if (merged && !is_adapted)
    throw InputError(str("merged: ", loaded.checkpoint, " has no adapter; hint: omit it"));
  NewFolder output(dir);
  const std::string folder = output.create();
  if (merged) {
    const DType sum = dtype == "float64" ? DType::kF64 : DType::kF32;
    const PrecisionConfig& precision = loaded.model->config().precision;
    LoadedModel whole = load_model(loaded.checkpoint, sum, {}, loaded.base.path, 0, precision.base);
    if (precision.is_quantized()) whole.model = expanded(*whole.model);
    whole.model->set_adapters(loaded.model->adapters());
    merge_adapters(*whole.model, stored_type(dtype));
    export_model(*whole.model, *whole.tokenizer, folder, dtype, [] {});
  } else if (is_adapted) {
    save_adapter(*loaded.model, folder, loaded.base.path, dtype);
    save_precision(loaded.model->config().precision, folder);
    for (const auto& [file, content] : loaded.tokenizer->files())
      write_file_durable(folder + "/" + file, content);
  } else if (loaded.model->config().precision.is_quantized()) {
    export_model(*expanded(*loaded.model), *loaded.tokenizer, folder, dtype, [] {});
  } else {
    export_model(*loaded.model, *loaded.tokenizer, folder, dtype, [] {});
  }
  output.finish();
}

// Calls on_text(completion, text) with each piece of text, and lets Python handle signals.
class Progress {
 public:
  // None: there is none.
  explicit Progress(const nb::object& on_text)
      : on_text_(on_text), is_called_(!on_text.is_none()) {}

  // False ends the completion.
  bool add(const Trajectory& t) {
    if (is_called_ && !has_failed()) {
      const std::string text = rest_of(t);
      return text.empty() ||
             with_gil([&] { return nb::cast<bool>(on_text_(t.index, text_of(text))); });
    }
    const auto now = Clock::now();
    if (has_failed() || now < next_check_) return !has_failed();
    next_check_ = now + std::chrono::milliseconds(50);
    return with_gil([] {
      check_signals();
      return true;
    });
  }
  void finish(const Trajectory& t) {
    if (!is_called_ || has_failed()) return;
    if (const std::string rest = rest_of(t); !rest.empty())
      with_gil([&] { return nb::cast<bool>(on_text_(t.index, text_of(rest))); });
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  using Clock = std::chrono::steady_clock;
  bool has_failed() const { return error_ != nullptr; }
  // The text that the callback has not got yet.
  std::string rest_of(const Trajectory& t) {
    return t.text.substr(std::exchange(given_[t.index], t.text.size()));
  }
  template <class F>
  bool with_gil(const F& fn) {
    const nb::gil_scoped_acquire gil;
    try {
      return fn();
    } catch (...) {  // ends all completions first
      error_ = std::current_exception();
      return false;
    }
  }

  const nb::object& on_text_;
  const bool is_called_;
  std::map<int64_t, size_t> given_;  // bytes, by Trajectory::index
  Clock::time_point next_check_ = Clock::now();
  std::exception_ptr error_;
};

// [N, length of the longest] with `fill` after each row.
template <class T>
Variable rows_of(const std::vector<Trajectory>& all, T fill, std::vector<T> Trajectory::*row) {
  size_t length = 0;
  for (const Trajectory& t : all) length = std::max(length, t.tokens.size());
  std::vector<T> values;
  for (const Trajectory& t : all) {
    values.insert(values.end(), (t.*row).begin(), (t.*row).end());
    values.resize(values.size() + length - (t.*row).size(), fill);
  }
  return Variable(Tensor::from(values).reshape(
      {static_cast<int64_t>(all.size()), static_cast<int64_t>(length)}));
}

template <class Value>
auto each_of(const std::vector<Trajectory>& all, const Value& value) {
  std::vector<decltype(value(all[0]))> out;
  for (const Trajectory& t : all) out.push_back(value(t));
  return out;
}

nb::dict arrays_of(const std::vector<Trajectory>& all, int32_t padding) {
  nb::dict out;
  out["tokens"] = rows_of(all, padding, &Trajectory::tokens);
  out["loss_mask"] = rows_of(all, uint8_t{0}, &Trajectory::loss_mask);
  out["logprobs"] = rows_of(all, 0.0, &Trajectory::logprobs);
  out["sampling_logprobs"] = rows_of(all, 0.0, &Trajectory::sampling_logprobs);
  out["entropies"] = rows_of(all, 0.0, &Trajectory::entropies);
  out["lengths"] = Variable(Tensor::from(
      each_of(all, [](const auto& t) { return static_cast<int64_t>(t.tokens.size()); })));
  out["prompt_lengths"] =
      Variable(Tensor::from(each_of(all, [](const auto& t) { return t.prompt_length; })));
  out["texts"] = each_of(all, [](const auto& t) { return text_of(t.text); });
  out["stop_reasons"] =
      each_of(all, [](const auto& t) { return std::string(stop_reason_name(t.stop_reason)); });
  return out;
}

// The rollout engine of a model. One call runs at a time; others wait.
class PythonEngine {
 public:
  PythonEngine(const Handle& model, int64_t max_concurrent, const nb::kwargs& limits)
      : loaded_(model), engine_(*model->model, [&] {
          auto config = section_of<EngineConfig>(limits, "Engine");
          if (max_concurrent < 0)
            throw InputError(
                str("Engine: max_concurrent: expected 0 or more, got ", max_concurrent));
          config.max_concurrent = max_concurrent;
          return config;
        }()) {}

  nb::dict rollouts(const std::vector<Prompt>& prompts, int64_t num_generations,
                    const SampleAddress& address, const nb::object& on_text, nb::handle variables,
                    nb::handle tools, const nb::kwargs& sampling) {
    SamplingConfig config = loaded_->settings().sampling;
    if (sampling.contains("max_completion_length")) config.max_total_length = 0;
    config = section_of(sampling, "rollouts", std::move(config));
    const std::vector<Example> examples = examples_of(prompts, variables, tools, config);
    constexpr int64_t kMaxCompletions = 10'000'000;  // kept in memory
    const auto count = static_cast<int64_t>(prompts.size());
    if (num_generations < 1 || (count > 0 && num_generations > kMaxCompletions / count))
      throw InputError(str("rollouts: num_generations: expected 1 to ",
                           kMaxCompletions / std::max<int64_t>(1, count), ", got ",
                           num_generations));
    const auto all = without_gil([&] {
      const std::lock_guard lock(mutex_);
      const Sampler sampler(engine_, *loaded_->tokenizer, config);
      Progress progress(on_text);
      auto trajectories = sampler.sample(
          examples, num_generations, address,
          {.on_finished = [&](const Example&, const Trajectory& t) { progress.finish(t); },
           .on_token = [&](const Trajectory& t) { return progress.add(t); }});
      progress.rethrow();
      return trajectories;
    });
    return arrays_of(all, loaded_->tokenizer->eos_id());
  }
  void release_cache() {
    without_gil([&] {
      const std::lock_guard lock(mutex_);
      engine_.release_cache();
    });
  }

 private:
  std::vector<Example> examples_of(const std::vector<Prompt>& prompts, nb::handle variables,
                                   nb::handle tools, SamplingConfig& config) {
    std::vector<Example> out;
    std::optional<ChatPrompts> chat;
    for (const Prompt& prompt : prompts) {
      if (const auto* text = std::get_if<std::string>(&prompt)) {
        out.push_back({.prompt = *text});
        continue;
      }
      if (const auto* ids = std::get_if<std::vector<int32_t>>(&prompt)) {
        check_ids(*loaded_, *ids);
        out.push_back({.prompt_tokens = *ids});
        continue;
      }
      const auto* conversation = std::get_if<nb::list>(&prompt);
      const Json messages = conversation != nullptr ? messages_of(*conversation) : Json();
      if (!chat) {
        chat.emplace(*loaded_, variables, tools);
        add_end_of_turn(config, chat->format().end_of_turn(*loaded_->tokenizer));
      }
      out.push_back({.prompt = conversation != nullptr ? chat->render(messages)
                                                       : rendered_text(std::get<nb::dict>(prompt)),
                     .special = SpecialTokens::kNone});
    }
    return out;
  }

  const Handle loaded_;
  Engine engine_;
  std::mutex mutex_;
};

void bind_engine(nb::module_& m) {
  nb::class_<PythonEngine>(m, "Engine",
                           "Samples completions by continuous batching over a paged cache of keys "
                           "and values, which is kept between calls. Calls from several threads "
                           "run one after the other.")
      .def(nb::init<const Handle&, int64_t, const nb::kwargs&>(), nb::arg("model"), nb::kw_only(),
           nb::arg("max_concurrent") = 0, nb::arg("limits"),
           "max_concurrent: sequences that are computed at a time, 0: as many as fit; "
           "memory_fraction: upper limit of the cache, relative to the free memory (0.5); "
           "max_cache_tokens: its limit in tokens, 0: none. InputError for other values.")
      .def(
          "rollout_arrays",
          [](PythonEngine& self, const std::vector<Prompt>& prompts, int64_t num_generations,
             uint64_t seed, int64_t step, nb::object on_text, nb::object variables,
             nb::object tools, const nb::kwargs& sampling) {
            return self.rollouts(prompts, num_generations, {.seed = seed, .step = step}, on_text,
                                 variables, tools, sampling);
          },
          nb::arg("prompts"), nb::arg("num_generations"), nb::arg("seed"), nb::arg("step"),
          nb::arg("on_text").none(), nb::arg("chat_template_kwargs").none(),
          nb::arg("tools").none(), nb::arg("sampling"), "The fields of Rollouts.")
      .def("release_cache", &PythonEngine::release_cache,
           "Frees the cache and returns unused memory to the system; the next call makes it anew.");
}

// Makes the model in `self`.
void load(Handle* self, const std::string& path, const std::string& device,
          const std::string& dtype, const std::string& base, int64_t context,
          const std::string& weights) {
  std::optional<kernels::WeightFormat> format;
  for (const auto& [value, name] : kBaseNames)
    if (weights == name) format = value;
  if (!weights.empty() && !format)
    throw InputError(str("weights: expected \"bf16\", \"int8\", \"nf4\" or \"nf4_single\", got \"",
                         weights, "\""));
  const DType type = dtype_named(dtype);
  const Device on = parse_device(device, "device");
  if (!is_float(type) || (on.is_cpu() && type == DType::kBF16))
    throw InputError(
        str("dtype: expected ",
            on.is_cpu() ? "float32 or float64 on a CPU" : "float32 or bfloat16 on a GPU", ", got ",
            dtype));
  // Folders of sentence-transformers may have the model in a folder of its own.
  LoadedModel loaded = without_gil([&] {
    const std::string model = is_model_folder(path) ? path : read_sentence_folder(path).model;
    return load_found(model, [&](const std::string& checkpoint) {
      return load_model(checkpoint, type, on, base, context, format);
    });
  });
  new (self) Handle(std::make_shared<SetModel>(path, std::move(loaded)));
}

void bind_weights(nb::class_<Handle>& model) {
  model
      .def(
          "parameters",
          [](const Handle& self) {
            nb::dict out;
            for (const auto& parameter : self->model->parameters())
              if (!parameter.quantized.defined())
                out[nb::str(parameter.name.c_str())] = Variable(parameter.value);
            return out;
          },
          nb::sig("def parameters(self) -> dict[str, Tensor]"),
          "The weights by name, as tensors that share their memory; docs/python.md: writing them.")
      .def(
          "export_folder",
          [](const Handle& self, const std::string& dir, const std::string& dtype, bool merged) {
            without_gil([&] { export_folder(*self, dir, dtype, merged); });
          },
          nb::arg("dir"), nb::arg("dtype"), nb::arg("merged"), "Model.export().");
}

}  // namespace

void bind_model(nb::module_& m) {
  nb::class_<Handle> model(m, "LoadedModel", "A model, its tokenizer and its folder.");
  model
      .def("__init__", &load, nb::arg("path"), nb::arg("device"), nb::arg("dtype"), nb::arg("base"),
           nb::arg("context"), nb::arg("weights"))
      .def_prop_ro(
          "folder", [](const Handle& self) { return self->checkpoint; },
          "The folder that the model was read from.")
      .def_prop_ro(
          "config", [](const Handle& self) { return to_python(self->model->config().to_json()); },
          nb::sig("def config(self) -> dict[str, typing.Any]"), "The content of config.json.")
      .def(
          "encode",
          [](const Handle& self, const std::string& text) {
            return self->tokenizer->encode(text, SpecialTokens::kAdd);
          },
          nb::arg("text"), "Token ids of a text, as the model expects one to begin.")
      .def(
          "decode",
          [](const Handle& self, const std::vector<int32_t>& ids) {
            return text_of(self->tokenizer->decode(ids));
          },
          nb::arg("ids"), "The text of token ids; special tokens give none.")
      .def(
          "chat_text",
          [](const Handle& self, const nb::list& messages, nb::object variables, nb::object tools) {
            return ChatPrompts(*self, variables, tools).render(messages_of(messages));
          },
          nb::arg("messages"), nb::arg("chat_template_kwargs").none(), nb::arg("tools").none(),
          nb::sig(
              "def chat_text(self, messages: list[dict[str, typing.Any]], chat_template_kwargs: "
              "typing.Any, tools: typing.Any) -> str"),
          "The text of Model.chat_prompt().")
      .def(
          "each_logprobs",
          [](const Handle& self, const std::vector<Prompt>& texts, double temperature) {
            std::vector<std::vector<int32_t>> all;
            for (const Prompt& text : texts) all.push_back(tokens_of(*self, text));
            return without_gil([&] { return logprobs(*self, all, temperature); });
          },
          nb::arg("texts"), nb::arg("temperature"), "Model.logprobs() of several texts.")
      .def(
          "each_embedding",
          [](const Handle& self, const std::vector<std::string>& texts, const std::string& prompt,
             const std::string& pooling, bool normalize) {
            return without_gil([&] {
              SentenceFolder folder = read_sentence_folder(self->path, prompt, pooling);
              folder.normalize = folder.normalize && normalize;
              return embeddings(*self, folder, texts);
            });
          },
          nb::arg("texts"), nb::arg("prompt"), nb::arg("pooling"), nb::arg("normalize"),
          "Model.embed() of several texts.");
  bind_weights(model);
  bind_engine(m);
}

}  // namespace cohort::python
