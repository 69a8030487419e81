// cohort.train(): run_training() with functions of Python as rewards, environments and reporter.
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "apps/commands.h"
#include "core/log.h"
#include "core/parallel.h"
#include "core/progress.h"
#include "distributed/communicator.h"
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
    nb::dict arrays;
    for (const auto& [key, value] : {std::pair{"logprob", &args.logprob},
                                     {"entropy", &args.entropy},
                                     {"old_logprob", &in.old_logprob},
                                     {"sampling_logprob", &in.sampling()},
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
  // True while a method runs, or waits for the program.
  bool is_called() const { return is_called_; }

 private:
  template <class F>
  void call(const char* name, const F& fn) {
    const nb::gil_scoped_acquire gil;
    is_called_ = true;
    fn(object_.attr(name));  // its exceptions end the run
    is_called_ = false;
  }
  nb::object object_;
  std::atomic<bool> is_called_{false};
};

// The process of rank 0 is the program's and does not end with its run. A program that takes its
// time between two steps makes progress.
ProcessGroup::Options options_of(int rank, const PythonReporter& reporter) {
  ProcessGroup::Options out = ProcessGroup::default_options();
  out.is_busy = is_saving;
  out.watchdog = [&] {
    if (reporter.is_called()) note_progress();
    return watchdog_limit();
  };
  out.on_overdue = [rank](const std::string& failure, ProcessGroup::Origin) {
    if (rank > 0) _exit(apps::kPeerFailed);
    logging::warn(failure, "; this process waits for a function or its GPU; hint: restart it if ",
                  "the GPU does not answer");
  };
  return out;
}

struct Training {
  TrainRequest request;
  TrainFunctions functions;
  std::atomic<bool> stop{false};

  // Alone, or as one of `size` ranks, processes of this machine that meet at `port` and give the
  // same name.
  nb::dict run(const nb::object& callback, int rank, int size, int port, const std::string& name) {
    PythonReporter reporter(callback);
    RunHost host{.reporter = reporter, .stop = stop, .callbacks = callbacks_of(functions)};
    if (size > 1) pin_nccl_algorithms();
    const RunResult result = without_gil([&] {
      if (size == 1) return run_training(request, host);
      const RankInfo info{rank, size, rank, size, "127.0.0.1", port, "cohort.train", name};
      ProcessGroup group(info, options_of(rank, reporter));
      host.group = &group;
      set_num_threads(std::max(1, num_threads() / size));
      try {
        return run_training(request, host);
      } catch (const std::exception& e) {
        group.fail(e.what());
        throw;
      }
    });
    nb::dict out;
    out["dir"] = result.run_dir;
    out["finished"] = result.end == StageEnd::kFinished;
    out["measure"] = result.measure;
    out["before"] = result.before;
    out["after"] = result.after;
    return out;
  }
  // Throws InputError unless `count` ranks can train on the GPUs of this machine.
  void expect_gpus(int count) const {
    const RunPlan plan = plan_of(request);
    prepare_programs(plan);  // before this process uses CUDA
    apps::expect_gpus(plan, count, "gpus");
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
      .def("run", &Training::run, nb::arg("callback"), nb::arg("rank") = 0, nb::arg("size") = 1,
           nb::arg("port") = 0, nb::arg("name") = "")
      .def("expect_gpus", &Training::expect_gpus, nb::arg("count"))
      .def_prop_ro("continues", [](const Training& self) { return self.request.continues; })
      .def_prop_ro("overrides", [](const Training& self) { return self.request.overrides; })
      .def("evaluate", &Training::evaluate, nb::arg("model"))
      .def("make_directory", &Training::make_directory, nb::arg("files"))
      .def("stop", [](Training& self) { self.stop = true; });
}

}  // namespace cohort::python
