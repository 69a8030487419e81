// `cohort replay`: repeats steps of a GRPO run, and prints a completion of the last one.
#include <bit>
#include <cmath>
#include <cstdio>

#include "apps/commands.h"
#include "core/log.h"
#include "core/text.h"
#include "runs/replay.h"
#include "sys/files.h"
#include "text/utf8.h"

namespace cohort::apps {
namespace {

std::string quoted(const std::string& text) {
  return Json(repair_utf8(text)).dump();
}

// The number, with all digits and its bits if `exact`.
std::string number(double x, bool exact) {
  if (exact) return str(format_double(x), " (", hex(std::bit_cast<uint64_t>(x)), ")");
  return score_text(x, 4);
}

void print_token(const ReplayedCompletion& c, size_t i, bool exact, bool raw) {
  const Trajectory& t = c.trajectory;
  const bool sampled = t.loss_mask[i] == 1;
  char line[64];
  std::snprintf(line, sizeof line, "%8zu %8d  %-9s", i, t.tokens[i],
                sampled ? "sampled" : "observed");
  std::string numbers = "         -         -";
  if (sampled && exact)
    numbers =
        str("log-prob ", number(t.logprobs[i], true), ", entropy ", number(t.entropies[i], true));
  else if (sampled)
    numbers = str("  ", number(t.logprobs[i], false), "    ", number(t.entropies[i], false));
  print(stdout, str(line, " ", numbers, "  ", quoted(c.texts[i]), "\n"), raw);
}

// Texts of prompt, turns and observations, the table of tokens, rewards and advantage.
void print_completion(const ReplayedCompletion& c, bool raw) {
  const Trajectory& t = c.trajectory;
  int turn = 0;
  size_t at = 0;
  for (size_t i = 0; i < c.spans.size(); ++i) {
    const bool sampled = t.loss_mask[at] == 1;
    const std::string name = i == 0 ? "prompt" : sampled ? str("turn ", ++turn) : "observation";
    print(stdout, str(name, ":\n", c.spans[i], "\n\n"), raw);
    at = c.ends[i];
  }
  print(stdout, "position       id  kind       log-prob   entropy  text\n");
  for (size_t i = 0; i < t.tokens.size(); ++i) print_token(c, i, false, raw);
  print(stdout, str("\nstop reason: ", stop_reason_name(t.stop_reason), "\n"));
  if (!t.environment_error.empty())
    print(stdout, str("error of the environment: ", t.environment_error, "\n"), raw);
  for (const auto& [name, value] : c.rewards)
    print(stdout,
          str("reward ", name, ": ", std::isnan(value) ? "none" : format_double(value), "\n"));
  print(stdout, str("advantage: ", format_double(c.advantage), "\n"));
}

}  // namespace

int replay(const ReplayCommand& options) {
  logging::set_console_level(logging::Level::kError);  // the run has had its warnings
  const ReplayResult result =
      replay_run({.run = options.run,
                  .step = options.step,
                  .prompt = options.prompt,
                  .completion = options.completion,
                  .on_step = [](const std::string& line) { print_now(line + "\n"); }});
  if (!result.difference.empty()) {
    print(stdout, result.difference + "\n");
    return kFailed;
  }
  if (!result.completion) return kOk;
  const auto size = static_cast<int64_t>(result.completion->texts.size());
  if (!options.token) {
    print_completion(*result.completion, options.raw);
  } else if (*options.token < 0 || *options.token >= size) {
    throw InputError(str("--token ", *options.token, ": the sequence has 0 to ", size - 1));
  } else {
    print_token(*result.completion, static_cast<size_t>(*options.token), true, options.raw);
  }
  return kOk;
}

}  // namespace cohort::apps
