#include "trainers/stage.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "core/log.h"
#include "trainers/files.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;

constexpr size_t kShownCompletions = 3;  // before and after, in the final report

std::string shown(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '\n')
      out += "\\n";
    else
      out += c;
  }
  return out;
}

std::string decimals(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

Json to_json(const std::vector<ProblemResult>& problems) {
  Json list = Json(Json::Array{});
  for (size_t i = 0; i < std::min(problems.size(), kShownCompletions); ++i) {
    Json item;
    item.set("prompt", problems[i].prompt)
        .set("completion", problems[i].completion)
        .set("correct", problems[i].correct);
    list.push_back(std::move(item));
  }
  return list;
}

std::string completions_text(const Json& list) {
  std::string text;
  for (const Json& item : list.as_array())
    text += str("  ", item.at("correct").as_bool() ? "right  " : "wrong  ",
                shown(item.at("prompt").as_string()), " ", shown(item.at("completion").as_string()),
                "\n");
  return text;
}

// Keeps the lines up to `step`: a resumed run writes the later ones again.
void truncate_log(const std::string& path, int64_t step) {
  if (!fs::exists(path)) return;
  std::istringstream in(read_text_file(path));
  std::string kept;
  for (std::string line; std::getline(in, line);) {
    try {
      if (parse_json(line, path).at("step").as_int() <= step) kept += line + "\n";
    } catch (const InputError&) {
      break;  // the line a kill cut short
    }
  }
  replace_file(path, kept);
}

}  // namespace

Stage::Stage(const StageSetup& setup)
    : config_(setup.config),
      dir_(setup.dir),
      comm_(setup.comm),
      reporter_(setup.reporter),
      stop_(setup.stop),
      device_(setup.device),
      step_start_(std::chrono::steady_clock::now()) {
  build_model();
  if (config_.trainer != TrainerType::kPretrain) correct_ = correctness_of(config_, data_.task);
  if (!is_main()) return;
  open_logs();
  reporter_.begin_stage(trainer_name(config_.trainer), state_.step, config_.steps);
}

void Stage::build_model() {
  const std::string checkpoints = dir_ + "/checkpoints";
  const auto resumed = newest_checkpoint(checkpoints);
  if (resumed) {
    state_ = load_state(*resumed);
    saved_step_ = state_.step;
  }
  check_equal_starts(resumed ? *resumed : "no checkpoint in " + checkpoints);
  LoadedModel loaded;
  if (resumed || !config_.init_from.empty())
    loaded = load_model(resumed ? *resumed : find_checkpoint(config_.init_from), config_, device_);
  data_ = load_dataset(config_, std::move(loaded.tokenizer));
  if (loaded.model == nullptr) {
    ModelConfig model = config_.model;
    model.vocab_size = data_.tokenizer->vocab_size();
    model.resolve();
    loaded.model = std::make_unique<Transformer>(model, config_.dtype,
                                                 static_cast<uint64_t>(config_.seed), device_);
  }
  check_data(config_, data_, loaded.model->config().context);
  if (const auto n = static_cast<int64_t>(data_.held_out.size());
      is_main() && config_.trainer != TrainerType::kPretrain && n < config_.eval.size)
    logging::info("eval.size: ", config_.eval.size,
                  " held-out problems were asked for, the data have ", n);
  if (config_.trainer == TrainerType::kGrpo && config_.grpo.beta > 0) {
    reference_ = std::make_unique<Transformer>(loaded.model->config(), config_.dtype, 0, device_);
    if (resumed)
      load_weights(*reference_, *resumed + "/reference.safetensors");
    else
      reference_->copy_from(*loaded.model);
  }
  learner_ = std::make_unique<Learner>(std::move(loaded.model), config_.optimizer, comm_);
  if (!resumed) return;
  learner_->optimizer().load(SafetensorsFile(*resumed + "/optimizer.safetensors"), state_.updates);
  if (!is_main()) return;
  if (state_.finished)
    logging::info(trainer_name(config_.trainer), " is finished, at step ", state_.step,
                  "; to train on, start a run with init_from");
  else
    logging::info("resuming ", trainer_name(config_.trainer), " at step ", state_.step, " from ",
                  *resumed);
}

// Ranks that do not see the same files would each train on from their own.
void Stage::check_equal_starts(const std::string& found) {
  const auto step = static_cast<double>(saved_step_);
  const auto extremes = reduce_over_ranks(comm_, {step, -step}, Reduce::kMax);
  if (extremes[0] != -extremes[1])
    throw InputError(str("the ranks have found different checkpoints: rank ", comm_.rank(), " has ",
                         found,
                         "; hint: the run directory must be on a file system that all "
                         "hosts share"));
}

void Stage::open_logs() {
  for (auto [stream, name] :
       {std::pair{&metrics_, "metrics.jsonl"}, std::pair{&completions_, "completions.jsonl"}}) {
    const std::string path = dir_ + "/" + name;
    truncate_log(path, state_.best_step < 0 ? -1 : state_.step);
    stream->open(path, std::ios::app);
    if (!*stream) throw InputError(str("cannot write ", path));
  }
}

bool Stage::agree(bool mine) {
  return comm_.size() == 1 ? mine
                           : reduce_over_ranks(comm_, {mine ? 1.0 : 0.0}, Reduce::kMax)[0] > 0;
}

bool Stage::more() {
  if (state_.best_step < 0) evaluate();  // the first evaluation comes before the first step
  interrupted_ = agree(stop_.load());
  step_start_ = std::chrono::steady_clock::now();
  return state_.step < config_.steps && !interrupted_ && !reached_ && !state_.finished;
}

void Stage::end_step(const Metrics& metrics) {
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - step_start_).count();
  state_.seconds += seconds;
  state_.step += 1;
  state_.updates = learner_->optimizer().updates();
  if (is_main()) {
    Metrics all = metrics;
    double tokens = 0;
    for (const auto& [name, value] : metrics) {
      if (name == "num_tokens") tokens = value;
      if (name == "reward") {
        Json curve =
            state_.report.find("curve") ? *state_.report.find("curve") : Json(Json::Array{});
        curve.push_back(value);
        state_.report.set("curve", std::move(curve));
      }
    }
    all.emplace_back("step_time", seconds);
    all.emplace_back("tokens_per_second", tokens / seconds);
    if (state_.step % config_.log_every == 0 || state_.step == config_.steps) {
      Json line;
      line.set("step", state_.step).set("time", utc_now());
      for (const auto& [name, value] : all) line.set(name, value);
      metrics_ << line.dump() << '\n' << std::flush;
    }
    reporter_.step(state_.step, all);
  }
  const int64_t every = config_.eval.every, save_every = config_.checkpoint.every;
  const bool improved_possible =
      every > 0 && state_.step % every == 0 && state_.step < config_.steps;
  const int64_t best_before = state_.best_step;
  if (improved_possible) evaluate();
  if (reached_) return;  // finish() saves
  if (save_every > 0 && (state_.step % save_every == 0 || state_.best_step != best_before) &&
      state_.step < config_.steps)
    save(false);
}

Metrics Stage::evaluation_metrics() {
  if (config_.trainer == TrainerType::kPretrain) {
    if (data_.held_out_tokens.size() < 2) return {};
    return {
        {"val_loss", evaluate_text(model(), data_.held_out_tokens, config_.micro_batch_tokens)}};
  }
  ProblemScores scores =
      evaluate_problems(model(), *data_.tokenizer, data_.held_out, correct_, config_, state_.step);
  last_problems_ = std::move(scores.greedy);
  return scores.metrics;
}

void Stage::evaluate() {
  learner_->check_weights();
  evaluated_step_ = state_.step;
  std::vector<double> score{0};
  if (is_main()) {
    const Metrics metrics = evaluation_metrics();
    Json line;
    line.set("step", state_.step).set("eval", true);
    std::string text = str("step ", state_.step, ":");
    for (const auto& [name, value] : metrics) {
      line.set(name, value);
      text += str(" ", name, " ", decimals(value, 4));
    }
    if (!metrics.empty())
      score[0] = config_.trainer == TrainerType::kPretrain ? -metrics[0].second : metrics[0].second;
    metrics_ << line.dump() << '\n' << std::flush;
    for (size_t i = 0; i < std::min<size_t>(8, last_problems_.size()); ++i) {
      const ProblemResult& p = last_problems_[i];
      Json sample;
      sample.set("step", state_.step)
          .set("eval", true)
          .set("prompt", p.prompt)
          .set("completion", p.completion);
      sample.set("answer", p.answer).set("correct", p.correct);
      log_completion(sample);
    }
    if (state_.report.find("first") == nullptr) {
      Json first;
      first.set("score", score[0]).set("completions", to_json(last_problems_));
      state_.report.set("first", std::move(first));
    }
    reporter_.message(text);
  }
  if (comm_.size() > 1) score = reduce_over_ranks(comm_, score);  // only rank 0 has one
  score_ = score[0];
  if (state_.best_step < 0 || score_ > state_.best) {
    state_.best = score_;
    state_.best_step = state_.step;
  }
  reached_ = config_.eval.stop_at > 0 && config_.trainer != TrainerType::kPretrain &&
             score_ >= config_.eval.stop_at;
}

void Stage::save(bool finished) {
  learner_->check_weights();  // no checkpoint holds what is not finite
  state_.finished = finished;
  saved_step_ = state_.step;
  if (is_main())
    save_checkpoint(
        dir_ + "/checkpoints",
        {learner_->model(), reference_.get(), *data_.tokenizer, learner_->optimizer(), state_},
        config_.checkpoint.keep_last);
  comm_.barrier();
}

void Stage::log_completion(const Json& line) {
  if (is_main()) completions_ << line.dump() << '\n' << std::flush;
}

void Stage::warn(const std::string& warning) const {
  if (!is_main()) return;
  std::string best;
  if (state_.best_step >= 0) {
    const std::string checkpoint = checkpoint_path(dir_ + "/checkpoints", state_.best_step);
    best =
        str("; best so far: step ", state_.best_step, " (score ", decimals(state_.best, 4), "), ",
            fs::exists(checkpoint) ? checkpoint
                                   : "which was not saved; hint: checkpoint.every saves it");
  }
  logging::warn("step ", state_.step + 1, ": ", warning, best);
}

StageEnd Stage::finish() {
  if (interrupted_ && state_.step < config_.steps && !reached_ && !state_.finished) {
    if (saved_step_ != state_.step) save(false);
    if (is_main()) reporter_.end_stage();
    return StageEnd::kInterrupted;
  }
  if (!state_.finished) {
    if (evaluated_step_ != state_.step) evaluate();
    if (is_main()) {
      Json last;
      last.set("score", score_).set("completions", to_json(last_problems_));
      state_.report.set("last", std::move(last));
    }
    save(true);
    if (is_main() && config_.trainer == TrainerType::kGrpo) reporter_.message(report());
  }
  if (is_main()) reporter_.end_stage();
  return StageEnd::kFinished;
}

std::string Stage::report() const {
  std::string text;
  if (const Json* curve = state_.report.find("curve")) {
    std::vector<double> values;
    for (const Json& v : curve->as_array()) values.push_back(v.as_double());
    text += str("mean reward over ", values.size(), " steps\n", text_curve(values, 64, 10));
  }
  for (const auto& [key, title] : {std::pair{"first", "before"}, std::pair{"last", "after"}})
    if (const Json* part = state_.report.find(key))
      text += str(title, " GRPO (held-out pass@1 ", decimals(part->at("score").as_double(), 3),
                  "):\n", completions_text(part->at("completions")));
  return text;
}

}  // namespace cohort
