#include "rl/engine/rollout.h"

#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <map>

#include "core/on_exit.h"
#include "data/data_check.h"
#include "text/chat.h"
#include "text/utf8.h"

namespace cohort {

namespace {

// The purpose of rng_stream() for sampled tokens.
constexpr uint64_t kSamplePurpose = 3;

void check_stop_string(const std::string& text, const Tokenizer& tokenizer) {
  if (text.empty()) throw InputError("stop_strings: an empty text would end every completion");
  std::vector<int32_t> ids;
  try {
    ids = tokenizer.encode(text);
  } catch (const InputError&) {
    return;  // a character that this tokenizer never writes
  }
  for (const int32_t id : ids)
    if (tokenizer.decode({&id, 1}, SpecialText::kHideControl).empty() &&
        !tokenizer.decode({&id, 1}, SpecialText::kShow).empty())
      throw InputError(str(
          "stop_strings: ", excerpt(text),
          " can never end a completion: ", excerpt(tokenizer.decode({&id, 1}, SpecialText::kShow)),
          " is a special token, which gives no text; hint: stop_tokens: [", id, "]"));
}

// Decodes a completion token by token.
class CompletionDecoder {
 public:
  CompletionDecoder(const Tokenizer& tokenizer, std::span<const int32_t> before)
      : stream_(tokenizer, before, SpecialText::kHideControl) {}
  // Appends the text of a token that is no stop token. Returns true if one of the stop strings ends
  // in it.
  bool push(int32_t id, std::span<const std::string> stop_strings, std::string& text) {
    const size_t decoded = text.size();
    text += stream_.push(id);
    if (stop_strings.empty()) return false;
    size_t longest = 0;
    for (const std::string& stop : stop_strings) longest = std::max(longest, stop.size());
    // A stop string may end in bytes that the decoder still holds back.
    const std::string end = text.substr(decoded - std::min(decoded, longest)) + stream_.peek();
    return std::ranges::any_of(
        stop_strings, [&](const std::string& stop) { return end.find(stop) != std::string::npos; });
  }
  std::string peek() const { return stream_.peek(); }

 private:
  StreamDecoder stream_;
};

// Parses "ID:BIAS".
std::pair<int32_t, float> parse_bias(const std::string& text) {
  char *colon = nullptr, *end = nullptr;
  const int64_t id = std::strtoll(text.c_str(), &colon, 10);
  const double bias = *colon == ':' ? std::strtod(colon + 1, &end) : 0;
  if (colon == text.c_str() || *colon != ':' || end == colon + 1 || *end != '\0' ||
      std::isnan(bias) || bias > FLT_MAX || id < 0 || id > INT32_MAX)
    throw InputError(str("logit_bias: expected ID:BIAS, got '", text,
                         "'; hint: \"50256:-100\" prevents token 50256 from being sampled"));
  return {static_cast<int32_t>(id), static_cast<float>(bias)};
}

}  // namespace

bool SamplingConfig::restricts() const {
  return top_k > 0 || top_p < 1 || min_p > 0 || repetition_penalty != 1 || presence_penalty != 0 ||
         frequency_penalty != 0 || !logit_bias.empty();
}

void SamplingConfig::visit(ConfigVisitor& v) {
  v.field("temperature", temperature, "of the sampling distribution; 0: greedy",
          {.min = 0, .max = 100});
  v.field("top_k", top_k, "sample from the k most likely tokens only (off-policy); 0, -1: off",
          {.min = -1});
  v.field("top_p", top_p,
          "sample from the smallest set with this probability only (off-policy); 1: off",
          {.min = 1e-6, .max = 1});
  v.field("min_p", min_p,
          "sample from tokens of at least this fraction of the largest probability only "
          "(off-policy); 0: off",
          {.min = 0, .max = 1});
  v.field("repetition_penalty", repetition_penalty,
          "divides positive logits of tokens that prompt or completion have, multiplies negative "
          "ones (off-policy); 1: off",
          {.min = 0.01, .max = 100});
  v.field("presence_penalty", presence_penalty,
          "subtracted from the logits of tokens that the completion has (off-policy); 0: off",
          {.min = -100, .max = 100});
  v.field("frequency_penalty", frequency_penalty,
          "subtracted once per occurrence of the token in the completion (off-policy); 0: off",
          {.min = -100, .max = 100});
  v.field("logit_bias", logit_bias, "added to tokens' logits (off-policy): a list of ID:BIAS");
  v.field("max_completion_length", max_completion_length, "maximum number of sampled tokens",
          {.min = 1, .max = 1 << 24});
  v.field("stop_tokens", stop_tokens, "token ids that end a completion, besides end of sequence",
          {.min = 0});
  v.field("stop_strings", stop_strings, "texts that end a completion, which keeps them");
}

void check_sampling_tokens(const SamplingConfig& config, const Tokenizer& tokenizer,
                           int64_t vocab_size) {
  const auto check = [&](const char* key, int64_t id) {
    if (id >= vocab_size)
      throw InputError(str(key, ": ", id, " is outside the vocabulary of ", vocab_size,
                           "; hint: ids are 0 to ", vocab_size - 1));
  };
  for (const int64_t id : config.stop_tokens) check("stop_tokens", id);
  for (const std::string& bias : config.logit_bias) check("logit_bias", parse_bias(bias).first);
  for (const std::string& text : config.stop_strings) check_stop_string(text, tokenizer);
}

std::string turn_text(const Tokenizer& tokenizer, const Trajectory& trajectory) {
  std::span<const int32_t> turn = trajectory.last_turn();
  CompletionDecoder decoder(
      tokenizer, std::span(trajectory.tokens).first(trajectory.tokens.size() - turn.size()));
  if (trajectory.stop_reason == StopReason::kStopToken) turn = turn.first(turn.size() - 1);
  std::string text;
  for (const int32_t id : turn) decoder.push(id, {}, text);
  return text + decoder.peek();
}

Trajectory as_sampled(const std::string& text, const Tokenizer& tokenizer,
                      const SamplingConfig& config) {
  Trajectory out{.max_tokens = config.max_completion_length, .text = text};
  std::vector<int32_t> ids, stops = tokenizer.stop_ids();
  try {
    ids = tokenizer.encode(text);
  } catch (const InputError&) {
    return out;
  }
  stops.insert(stops.end(), config.stop_tokens.begin(), config.stop_tokens.end());
  CompletionDecoder decoder(tokenizer, {});
  out.text.clear();
  for (const int32_t id : ids) {
    out.append_sampled(id, 0);
    if (std::ranges::find(stops, id) != stops.end() ||
        decoder.push(id, config.stop_strings, out.text))
      break;
  }
  out.text += decoder.peek();
  return out;
}

namespace {

// The index of the i-th prompt of a call.
int64_t index_of(const SampleAddress& address, size_t i) {
  return address.prompt_indices.empty() ? static_cast<int64_t>(i) : address.prompt_indices.at(i);
}

}  // namespace

std::vector<Example> begin_dialogues(const DialogueOptions& dialogue,
                                     std::span<const Example> prompts, int64_t num_generations,
                                     const SampleAddress& address) {
  std::vector<Example> out(prompts.begin(), prompts.end());
  Environment* const environment = dialogue.environment;
  if (environment == nullptr || !environment->starts()) return out;
  std::map<int64_t, Example*> open;  // by the index of the first of the prompt's dialogues
  const OnExit give_up([&] {
    if (!open.empty()) environment->cancel_all();
  });
  for (size_t i = 0; i < out.size(); ++i) {
    const Trajectory none{.index = index_of(address, i) * num_generations};
    open[none.index] = &out[i];
    environment->submit(out[i], none, address.step);
  }
  while (!open.empty())
    for (const EnvironmentReply& reply : environment->poll(true)) {
      dialogue.on_reply(reply);
      Example& example = *open.extract(reply.index).mapped();
      example.start_error = reply.error;
      try {
        if (reply.error.empty()) example = environment->started(example, reply);
      } catch (const InputError& e) {
        example.start_error = e.what();
      }
    }
  return out;
}

std::vector<Example> Sampler::begin(std::span<const Example> prompts, int64_t num_generations,
                                    const SampleAddress& address) const {
  std::vector<Example> out = begin_dialogues(dialogue_, prompts, num_generations, address);
  if (dialogue_.environment == nullptr || !dialogue_.environment->starts()) return out;
  for (size_t i = 0; i < out.size(); ++i)
    if (const size_t length = encode_prompt(out[i], tokenizer_).size();
        out[i].start_error.empty() && static_cast<int64_t>(length) >= max_length()) {
      out[i] = prompts[i];
      out[i].start_error =
          str("the prompt has ", length, " tokens with what begins the dialogue, of ", max_length(),
              ", which leaves none for a completion");
    }
  return out;
}

Sampler::Sampler(Engine& engine, const Tokenizer& tokenizer, const SamplingConfig& config,
                 const DialogueOptions& dialogue)
    : engine_(engine),
      tokenizer_(tokenizer),
      config_(config),
      dialogue_(dialogue),
      stop_tokens_(tokenizer.stop_ids()) {
  check_sampling_tokens(config, tokenizer, engine.model().config().vocab_size);
  if (dialogue_.environment != nullptr)
    for (const std::string& text : dialogue_.environment->stop_strings())
      config_.stop_strings.push_back(text);
  for (const int64_t id : config.stop_tokens) stop_tokens_.push_back(static_cast<int32_t>(id));
  for (const std::string& bias : config.logit_bias) logit_bias_.push_back(parse_bias(bias));
}

std::vector<Trajectory> Sampler::start(std::span<const Example> prompts, int64_t num_generations,
                                       const SampleAddress& address) const {
  const int64_t limit = max_length();
  std::vector<Trajectory> out;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const int64_t index = index_of(address, i);
    Trajectory trajectory{.tokens = encode_prompt(prompts[i], tokenizer_),
                          .max_tokens = config_.max_completion_length,
                          .group = index};
    const size_t length = trajectory.tokens.size();
    if (length == 0)
      throw InputError(
          str("prompt ", index, " is empty; a completion needs at least one token to follow"));
    if (static_cast<int64_t>(length) >= limit) {
      const ModelConfig& model = engine_.model().config();
      const char* key = config_.max_total_length > 0 ? "max_length" : "max_sequence_length";
      throw InputError(
          str("prompt ", index, " has ", length, " tokens, the model's context is ", model.context,
              limit < model.context ? str(" and ", key, " is ", limit) : "",
              ", which leaves no token for a completion",
              limit < model.context ? str("; hint: a larger ", key, " or shorter prompts")
                                    : context_hint(model.context_limit(), "shorter prompts")));
    }
    trajectory.loss_mask.assign(length, 0);
    for (auto* values :
         {&trajectory.logprobs, &trajectory.sampling_logprobs, &trajectory.entropies})
      values->assign(length, 0);
    trajectory.prompt_length = static_cast<int64_t>(length);
    for (int64_t g = 0; g < num_generations; ++g) {
      trajectory.index = index * num_generations + g;
      out.push_back(trajectory);
    }
  }
  return out;
}

// Maximum length of a prompt with all that follows.
int64_t Sampler::max_length() const {
  int64_t length = engine_.model().config().context;
  if (config_.max_total_length > 0) length = std::min(length, config_.max_total_length);
  const int64_t limit = dialogue_.max_sequence_length;
  return dialogue_.environment != nullptr && limit > 0 ? std::min(limit, length) : length;
}

EngineRequest Sampler::request(std::span<const Trajectory> group,
                               const SampleAddress& address) const {
  const Trajectory& first = group[0];
  const int64_t limit = max_length();
  EngineRequest out{.prompt = first.tokens,
                    .max_length = config_.max_length(first.prompt_length, limit),
                    .session_length = dialogue_.environment == nullptr ? 0 : limit,
                    .completions = {},
                    .stop_tokens = stop_tokens_,
                    .logit_bias = logit_bias_};
  for (size_t g = 0; g < group.size(); ++g)
    out.completions.push_back(
        {.temperature = config_.temperature,
         .top_k = std::max<int64_t>(0, config_.top_k),
         .top_p = config_.top_p,
         .min_p = config_.min_p,
         .repetition_penalty = static_cast<float>(config_.repetition_penalty),
         .presence_penalty = static_cast<float>(config_.presence_penalty),
         .frequency_penalty = static_cast<float>(config_.frequency_penalty),
         .seed = address.seed,
         .stream = rng_stream(kSamplePurpose, static_cast<uint64_t>(address.step),
                              static_cast<uint64_t>(first.group / address.repeats) << 24 | g)});
  return out;
}

// A completion that is being sampled.
struct Sampler::OpenCompletion {
  Trajectory* out = nullptr;  // null: it has ended
  const Example* example = nullptr;
  int64_t request = 0, completion = 0;
  CompletionDecoder decoder;
  int64_t turns = 0;   // that have ended
  bool waits = false;  // for the environment
};

// One call of sample().
class Sampler::Call {
 public:
  Call(const Sampler& sampler, const SampleAddress& address, const SampleCallbacks& callbacks)
      : sampler_(sampler), step_(address.step), callbacks_(callbacks) {}
  // An exception must not leave requests in the engine, nor replies in the environment.
  ~Call() {
    sampler_.engine_.cancel_all();
    sampler_.engine_.poll();
    if (outstanding_ > 0) environment().cancel_all();
  }

  void open(int64_t request, const Example& example, std::span<Trajectory> group) {
    std::vector<OpenCompletion>& open = requests_[request];
    for (size_t i = 0; i < group.size(); ++i)
      open.push_back({.out = &group[i],
                      .example = &example,
                      .request = request,
                      .completion = static_cast<int64_t>(i),
                      .decoder = CompletionDecoder(sampler_.tokenizer_, group[i].tokens)});
    for (OpenCompletion& o : open) dialogues_[o.out->index] = &o;
  }

  // The environment could not begin the dialogues.
  void fail(const Example& example, std::span<Trajectory> group) const {
    for (Trajectory& t : group) {
      t.environment_error = "the beginning of the dialogue: " + example.start_error;
      t.stop_reason = StopReason::kFailed;
      if (callbacks_.on_finished) callbacks_.on_finished(example, t);
    }
  }

  void run() {
    for (bool more = true; more || outstanding_ > 0;) {
      more = sampler_.engine_.step();
      for (const EngineToken& token : sampler_.engine_.poll()) {
        OpenCompletion& open = requests_.at(token.request)[static_cast<size_t>(token.completion)];
        // A token in flight when the completion or its turn ended is none of it.
        if (open.out == nullptr || open.waits) continue;
        if (append(open, token)) end_turn(open, token.end != EngineToken::End::kNone);
      }
      if (outstanding_ == 0) continue;
      for (const EnvironmentReply& reply : environment().poll(!more)) more |= take(reply);
    }
  }

 private:
  Environment& environment() const { return *sampler_.dialogue_.environment; }

  // Returns true if this token ends the turn.
  bool append(OpenCompletion& open, const EngineToken& token) const {
    Trajectory& out = *open.out;
    out.append_sampled(token.token, token.logprob, token.sampling_logprob, token.entropy);
    out.truncated_mass += token.truncated_mass;
    const bool is_stop_token = token.end == EngineToken::End::kStopToken;
    const bool has_stop_string =
        !is_stop_token && open.decoder.push(token.token, sampler_.config_.stop_strings, out.text);
    const bool wanted = !callbacks_.on_token || callbacks_.on_token(out);
    if (is_stop_token)
      out.stop_reason = StopReason::kStopToken;
    else if (has_stop_string)
      out.stop_reason = StopReason::kStopString;
    else if (token.end == EngineToken::End::kLength)
      out.stop_reason =
          out.completion_length() >= sampler_.config_.max_completion_length ||
                  static_cast<int64_t>(out.tokens.size()) == sampler_.config_.max_total_length
              ? StopReason::kLength
              : StopReason::kContext;
    else if (!wanted)
      out.stop_reason = StopReason::kCancelled;
    else
      return false;
    return true;
  }

  // The completion has ended, or a turn of a dialogue, of which the environment says what follows.
  void end_turn(OpenCompletion& open, bool engine_ended) {
    Trajectory& t = *open.out;
    t.text += open.decoder.peek();
    if (sampler_.dialogue_.environment == nullptr) return finish(open);
    ++open.turns;
    t.transcript.push_back(make_message("assistant", t.text));
    if (t.truncated()) return finish(open);
    if (!engine_ended)
      sampler_.engine_.end_turn(open.request, open.completion,
                                static_cast<int64_t>(t.tokens.size()));
    open.waits = true;
    ++outstanding_;
    environment().submit(*open.example, t, step_);
  }

  // Continues or ends a dialogue. Returns true if it continues.
  bool take(const EnvironmentReply& reply) {
    OpenCompletion& open = *dialogues_.at(reply.index);
    COHORT_CHECK(open.waits, "[sampler] dialogue ", reply.index, " has no turn outstanding");
    open.waits = false;
    --outstanding_;
    Trajectory& t = *open.out;
    const DialogueOptions& options = sampler_.dialogue_;
    options.on_reply(reply);
    t.turn_rewards.resize(static_cast<size_t>(open.turns), std::nan(""));
    t.turn_rewards.back() = reply.reward;
    if (!std::isnan(reply.reward)) {
      const double before = std::isnan(t.environment_reward) ? 0 : t.environment_reward;
      t.environment_reward =
          before + std::pow(options.discount, static_cast<double>(open.turns - 1)) * reply.reward;
    }
    const auto length = static_cast<int64_t>(t.tokens.size() + reply.tokens.size());
    const int64_t limit = sampler_.max_length(),
                  left = sampler_.config_.max_completion_length - t.completion_length();
    if (!reply.error.empty()) {
      t.environment_error = reply.error;
      t.stop_reason = StopReason::kFailed;
    } else if (!reply.done) {
      if (open.turns < options.max_turns && left > 0 && length < limit)
        return extend(open, reply, std::min(length + left, limit));
      t.stop_reason = open.turns >= options.max_turns ? StopReason::kTurns
                      : left <= 0                     ? StopReason::kLength
                                                      : StopReason::kContext;
    }
    finish(open);
    return false;
  }

  bool extend(OpenCompletion& open, const EnvironmentReply& reply, int64_t max_length) {
    Trajectory& t = *open.out;
    sampler_.engine_.extend(open.request, open.completion, reply.tokens, max_length);
    for (const int32_t token : reply.tokens) t.append_observed(token);
    if (reply.messages.is_array())
      for (const Json& message : reply.messages.as_array()) t.transcript.push_back(message);
    t.text.clear();
    open.decoder = CompletionDecoder(sampler_.tokenizer_, t.tokens);
    return true;
  }

  void finish(OpenCompletion& open) {
    sampler_.engine_.cancel(open.request, open.completion);
    const Trajectory& t = *std::exchange(open.out, nullptr);
    if (callbacks_.on_finished) callbacks_.on_finished(*open.example, t);
  }

  const Sampler& sampler_;
  const int64_t step_;
  const SampleCallbacks& callbacks_;
  std::map<int64_t, std::vector<OpenCompletion>> requests_;
  std::map<int64_t, OpenCompletion*> dialogues_;  // by Trajectory::index
  int64_t outstanding_ = 0;                       // dialogues that wait for the environment
};

std::vector<Trajectory> Sampler::sample(std::span<const Example> prompts, int64_t num_generations,
                                        const SampleAddress& address,
                                        const SampleCallbacks& callbacks) const {
  std::vector<Trajectory> out = start(prompts, num_generations, address);
  Call call(*this, address, callbacks);
  const auto group = static_cast<size_t>(num_generations);
  for (size_t i = 0; i < prompts.size(); ++i) {
    const std::span<Trajectory> trajectories(out.data() + i * group, group);
    if (!prompts[i].start_error.empty()) {
      call.fail(prompts[i], trajectories);
      continue;
    }
    EngineRequest in = request(trajectories, address);
    if (!address.adapters.empty()) in.adapter = address.adapters[i];
    call.open(engine_.submit(std::move(in)), prompts[i], trajectories);
  }
  call.run();
  return out;
}

}  // namespace cohort
