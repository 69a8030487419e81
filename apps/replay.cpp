// `cohort replay`: repeats steps of a GRPO run, and prints a completion of the last one.
#include <cmath>
#include <cstdio>

#include "apps/commands.h"
#include "core/log.h"
#include "core/text.h"
#include "text/utf8.h"

namespace cohort::apps {
namespace {

// Prints a row of the table of tokens, with the numbers as text.
void print_token(const ReplayedCompletion& c, size_t i, std::string (*number)(double), bool raw) {
  const Trajectory& t = c.trajectory;
  char start[64];
  std::snprintf(start, sizeof start, "%8zu %8d  %-9s ", i, t.tokens[i],
                t.loss_mask[i] == 1 ? "sampled" : "observed");
  std::string numbers;
  if (t.loss_mask[i] == 1)
    numbers = str("log-prob ", number(t.logprobs[i]), ", entropy ", number(t.entropies[i]), "  ");
  const std::string text = c.tokenizer->decode({&t.tokens[i], 1}, SpecialText::kShow);
  print(stdout, str(start, numbers, Json(repair_utf8(text)).dump(), "\n"), raw);
}

// Texts of prompt, turns and observations, the table of tokens, rewards and advantage.
void print_completion(const ReplayedCompletion& c, bool raw) {
  const Trajectory& t = c.trajectory;
  const auto prompt_end = static_cast<size_t>(t.prompt_length);
  int turn = 0;
  for (size_t begin = 0, end = 0; begin < t.tokens.size(); begin = end) {
    while (++end < t.tokens.size() && end != prompt_end && t.loss_mask[end] == t.loss_mask[begin])
      continue;
    const std::string name = begin == 0                ? "prompt"
                             : t.loss_mask[begin] == 1 ? str("turn ", ++turn)
                                                       : "observation";
    const std::span tokens = std::span(t.tokens).subspan(begin, end - begin);
    print(stdout, str(name, ":\n", c.tokenizer->decode(tokens, SpecialText::kShow), "\n\n"), raw);
  }
  print(stdout, "position       id  kind\n");
  for (size_t i = 0; i < t.tokens.size(); ++i)
    print_token(
        c, i, [](double x) { return score_text(x, 4); }, raw);
  print(stdout, str("\nstop reason: ", stop_reason_name(t.stop_reason), "\n"));
  if (!t.environment_error.empty())
    print(stdout, str("error of the environment: ", t.environment_error, "\n"), raw);
  for (const auto& [name, value] : c.rewards)
    print(stdout,
          str("reward ", name, ": ", std::isnan(value) ? "none" : format_double(value), "\n"));
  print(stdout, str("advantage: ", format_double(c.advantage), "\n"));
  for (size_t k = 0; k < c.turn_advantages.size(); ++k)
    print(stdout,
          str("advantage of turn ", k + 1, ": ", format_double(c.turn_advantages[k]), "\n"));
}

}  // namespace

int replay(const ReplayCommand& options) {
  logging::set_console_level(logging::Level::kError);  // the run has had its warnings
  std::optional<ReplayedCompletion> completion;
  try {
    completion = replay_run(options, [](const std::string& line) { print_now(line + "\n"); });
  } catch (const ReplayDifference& e) {
    print(stdout, str(e.what(), "\n"));
    return kFailed;
  }
  if (!completion) return kOk;
  const std::optional<int64_t> token = options.token;
  const auto size = static_cast<int64_t>(completion->trajectory.tokens.size());
  if (!token)
    print_completion(*completion, options.raw);
  else if (*token < 0 || *token >= size)
    throw InputError(str("--token ", *token, ": the sequence has 0 to ", size - 1));
  else
    print_token(*completion, static_cast<size_t>(*token), with_bits, options.raw);
  return kOk;
}

}  // namespace cohort::apps
