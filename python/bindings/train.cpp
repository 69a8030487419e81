// cohort.train(): run_training() with functions of Python as rewards, environments and reporter.
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>

#include "core/log.h"
#include "job/evaluation.h"
#include "job/run_directory.h"
#include "job/training.h"
#include "python/bindings/bindings.h"
#include "python/bindings/models.h"

namespace cohort::python {
namespace {

using Functions = std::map<std::string, nb::callable>;

nb::object answers_of(const nb::callable& function, std::span<const Json> requests) {
  return function(to_python(Json(Json::Array(requests.begin(), requests.end()))));
}

// The loss that a function gives, which gets a dictionary of arrays and returns the loss and its
// gradients with respect to log-probs and entropies (None: zero).
HostLoss loss_of(const std::string& name, const nb::callable& function) {
  return [name, function = &function](const HostLossArgs& args) {
    const nb::gil_scoped_acquire gil;
    const PolicyLossInputs& in = args.inputs;
    const Tensor& sampling = in.sampling_logprob.defined() ? in.sampling_logprob : in.old_logprob;
    nb::dict arrays;
    for (const auto& [key, value] : {std::pair{"logprob", &args.logprob},
                                     {"entropy", &args.entropy},
                                     {"old_logprob", &in.old_logprob},
                                     {"sampling_logprob", &sampling},
                                     {"ref_logprob", &in.ref_logprob},
                                     {"advantage", &in.advantage},
                                     {"weight", &in.weight},
                                     {"segments", &in.segments}})
      // Copies, as the function may write to them.
      arrays[key] = value->defined() ? nb::cast(Variable(value->clone())) : nb::none();
    arrays["beta"] = args.beta;
    const nb::object result = (*function)(arrays);
    const auto gradient = [&](nb::handle array, const char* of) {
      Tensor given;
      try {
        given = import_array(array, Access::kRead).value();
      } catch (const std::exception& e) {
        throw InputError(
            str("loss ", name, ": its gradient with respect to ", of, " is no array: ", e.what()));
      }
      if (given.shape() != args.logprob.shape())
        throw InputError(str("loss ", name, ": its gradient with respect to ", of, " is ",
                             given.str(), "; hint: one number for each of the ",
                             args.logprob.numel(), " tokens"));
      return without_gil(
          [&] { return given.to(args.logprob.device()).to(args.logprob.dtype()).clone(); });
    };
    args.dlogprob.copy_(gradient(result[1], "logprob"));
    if (!result[2].is_none()) args.dentropy = gradient(result[2], "entropy");
    return nb::cast<double>(result[0]);
  };
}

// One answer to each request of a function that gets a list of them.
std::vector<Json> answers_in_json(const nb::callable& function, std::span<const Json> requests,
                                  const std::string& where) {
  const nb::gil_scoped_acquire gil;
  const Json answers = from_python(answers_of(function, requests), where);
  if (!answers.is_array())
    throw InputError(str(where, ": its function returned ", answers.dump(),
                         "; hint: a list of answers, one to each request"));
  return answers.as_array();
}

struct TrainFunctions {
  Functions rewards, environments, losses, advantages;
};

Callbacks callbacks_of(const TrainFunctions& functions) {
  const auto& [rewards, environments, losses, advantages] = functions;
  Callbacks out;
  for (const auto& [name, function] : losses) out.losses[name] = loss_of(name, function);
  for (const auto& [name, function] : advantages)
    out.advantages[name] = [function = &function, name = name](std::span<const Json> requests) {
      return answers_in_json(*function, requests, "advantage " + name);
    };
  for (const auto& [name, function] : rewards)
    out.rewards[name] = [function = &function](std::span<const Json> requests) {
      const nb::gil_scoped_acquire gil;
      std::vector<Json> values;
      for (const nb::handle value : answers_of(*function, requests)) {
        if (values.size() > requests.size()) break;  // too many, and perhaps without an end
        values.push_back(value.is_none() ? Json() : Json(nb::cast<double>(nb::float_(value))));
      }
      return values;
    };
  for (const auto& [name, function] : environments)
    out.environments[name] = [function = &function, name = name](std::span<const Json> requests) {
      return answers_in_json(*function, requests, "environment " + name);
    };
  return out;
}

// Calls the methods of a Python object (cohort.Callback).
class PythonReporter final : public Reporter {
 public:
  explicit PythonReporter(nb::object object) : object_(std::move(object)) {}
  void begin_stage(const std::string& name, int64_t step, int64_t steps) override {
    call("on_stage", [&](const auto& method) { method(name, step, steps); });
  }
  void step(int64_t step, const Metrics& metrics) override {
    call("on_step", [&](const auto& method) {
      nb::dict values;
      values["step"] = step;
      for (const auto& [name, value] : metrics) values[nb::str(name.c_str())] = value;
      method(values);
    });
  }
  void completion(const std::string& json) override {
    call("on_completion", [&](const auto& method) { method(json); });
  }
  void message(const std::string& text) override {
    logging::record(text);
    call("on_message", [&](const auto& method) { method(text_of(text)); });
  }

 private:
  template <class F>
  void call(const char* name, const F& fn) {
    const nb::gil_scoped_acquire gil;
    fn(object_.attr(name));
  }
  nb::object object_;
};

struct Training {
  TrainRequest request;
  TrainFunctions functions;
  std::atomic<bool> stop{false};

  nb::dict run(const nb::object& callback) {
    PythonReporter reporter(callback);
    const RunResult result = without_gil([&] {
      return run_training(
          request, {.reporter = reporter, .stop = stop, .callbacks = callbacks_of(functions)});
    });
    nb::dict out;
    out["dir"] = result.run_dir;
    out["finished"] = result.end == StageEnd::kFinished;
    out["measure"] = result.measure;
    out["before"] = result.before;
    out["after"] = result.after;
    return out;
  }
  // The metrics of evaluate_model(), by default with the configuration of the model's run.
  nb::object evaluate(const Handle& model) {
    const bool is_given = !request.config.empty();
    if (!is_given) request.config = find_run_config(model->checkpoint).value_or("");
    if (request.config.empty())
      throw InputError(str("evaluate: ", model->checkpoint,
                           " belongs to no run; hint: give a configuration with the data and the "
                           "rewards"));
    const Callbacks callbacks = callbacks_of(functions);
    return to_python(without_gil([&] {
      RunPlan plan = plan_of(request);
      if (is_given) hold_nothing_out_of_few(plan);  // a run's own says what it held out
      bind_callbacks(plan, callbacks);
      prepare_programs(plan);
      return evaluate_model(plan, *model, &stop).metrics;
    }));
  }
  // The run's directory for files that the caller writes there, the values of their keys: the
  // wanted one if the run may continue, else a new one.
  std::string make_directory(const std::map<std::string, std::string>& files) {
    const auto set = [&](const std::string& key, const Json& value) {
      request.overrides.push_back(key + "=" + value.dump());
    };
    refuse_other_files(files);
    for (const auto& [key, file] : files) set(key, Json(Json::Array{file}));
    const std::string wanted = plan_of(request).output_dir;
    const std::string dir =
        request.continues ? make_run_directory(wanted) : create_run_directory(wanted);
    for (const auto& [key, file] : files) set(key, Json(Json::Array{dir + "/" + file}));
    set("output_dir", dir);
    request.continues = true;
    return dir;
  }

 private:
  // Throws InputError if the configuration names data files too.
  void refuse_other_files(const std::map<std::string, std::string>& files) const {
    RunPlan plan;
    try {
      plan = plan_of(request);
    } catch (const InputError&) {  // it may lack data
      return;
    }
    for (const TrainConfig& stage : plan.stages)
      for (const auto& [key, paths] : {std::pair("data.jsonl.path", &stage.data.jsonl.path),
                                       {"data.jsonl.eval_path", &stage.data.jsonl.eval_path}})
        if (files.contains(key) && !paths->empty())
          throw InputError(str(key, ": ", paths->front(),
                               " is given beside data in memory; hint: leave one of them out"));
  }
};

}  // namespace

void bind_train(nb::module_& m) {
  m.def(
      "config_fields",
      [](const std::string& path) {
        const RunPlan plan = load_plan(path, {});
        nb::dict out;
        for (const auto& [key, value] :
             plan.stages.size() == 1 ? config_fields(plan.stages[0]) : config_fields(plan))
          out[nb::str(key.c_str())] = value;
        return out;
      },
      nb::arg("path"), "The keys of a configuration, as overrides name them, with values as text.");
  nb::class_<Training>(m, "Training", "One call of run_training().")
      .def(
          "__init__",
          [](Training* self, std::string config, std::string yaml, std::string resume,
             bool continues, std::vector<std::string> overrides, Functions rewards,
             Functions environments, Functions losses, Functions advantages) {
            new (self) Training{{.config = std::move(config),
                                 .yaml = std::move(yaml),
                                 .resume = std::move(resume),
                                 .continues = continues,
                                 .overrides = std::move(overrides)},
                                {std::move(rewards), std::move(environments), std::move(losses),
                                 std::move(advantages)}};
          },
          nb::kw_only(), nb::arg("config"), nb::arg("yaml"), nb::arg("resume"),
          nb::arg("continues"), nb::arg("overrides"), nb::arg("rewards"), nb::arg("environments"),
          nb::arg("losses"), nb::arg("advantages"))
      .def("run", &Training::run, nb::arg("callback"))
      .def("evaluate", &Training::evaluate, nb::arg("model"))
      .def("make_directory", &Training::make_directory, nb::arg("files"))
      .def("stop", [](Training& self) { self.stop = true; });
}

}  // namespace cohort::python
