// cohort.Model in C++.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "job/checkpoint.h"
#include "job/model_settings.h"
#include "job/run_directory.h"
#include "python/bindings/bindings.h"

namespace cohort::python {

class SetModel : public LoadedModel {
 public:
  SetModel(std::string given, LoadedModel loaded)
      : LoadedModel(std::move(loaded)), path(std::move(given)) {}
  const std::string path;  // as it was given: a folder, a run, or one of sentence-transformers
  // Read at the first use, as not all uses need a run's configuration that can be read.
  const ModelSettings& settings() const {
    without_gil([&] {  // which messages take
      std::call_once(is_read_, [&] {
        settings_ = model_settings(*this, find_run_config(checkpoint), SamplingConfig());
      });
    });
    return settings_;
  }

 private:
  mutable std::once_flag is_read_;
  mutable ModelSettings settings_;
};
// Engines share the model with the object of Python that has loaded it.
struct Handle : std::shared_ptr<const SetModel> {};

}  // namespace cohort::python
