// Dialogues: what follows a turn of the policy. An environment gives the tokens that the policy
// observes before its next turn, or ends the dialogue.
//
// The sampler asks after each turn and samples other sequences meanwhile. Replies may come
// late and in any order: a trajectory depends on their contents alone. Implementations are in
// rl/environments.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "data/example.h"
#include "rl/engine/trajectory.h"

namespace cohort {

// The answer to one turn, or to the question how the dialogues of a prompt begin.
struct EnvironmentReply {
  int64_t index = 0;            // Trajectory::index
  std::vector<int32_t> tokens;  // the observation: at least one token, unless the dialogue ends
  bool done = false;            // the dialogue ends with the turn
  double reward = std::numeric_limits<double>::quiet_NaN();  // for the turn; NaN: none
  // The environment has failed: the dialogue ends and has no reward. Empty: it has not.
  std::string error;
  Json messages;  // the observation as a list of messages, for logs and rewards; null: none
  // The object that a beginning, whose messages follow the prompt, adds to the fields of the line.
  // Null: the reply answers a turn.
  Json fields;
};

class Environment {
 public:
  virtual ~Environment() = default;
  // Texts that end a turn, besides the stop tokens and the stop strings of the run.
  virtual std::vector<std::string> stop_strings() const { return {}; }
  // A turn of the trajectory has ended by a stop token or a stop string. Does not wait. Indices are
  // unique among the dialogues of one Sampler::sample(), and each has one turn outstanding at most.
  virtual void submit(const Example& example, const Trajectory& trajectory, int64_t step) = 0;
  // True if dialogues begin with the environment. submit() of a trajectory without tokens then asks
  // for the beginning of all dialogues of a prompt.
  virtual bool starts() const { return false; }
  // The example with the prompt and fields of such a reply. Throws InputError.
  virtual Example started(const Example& example, const EnvironmentReply&) const { return example; }
  // The replies since the last call, one per submit(), in any order. With `wait`, returns at least
  // one if any is outstanding. Throws Error if the environment cannot continue at all.
  virtual std::vector<EnvironmentReply> poll(bool wait) = 0;
  // Gives up all outstanding replies, after an exception.
  virtual void cancel_all() {}
};

// Options of the dialogues of Sampler::sample().
struct DialogueOptions {
  Environment* environment = nullptr;  // nullptr: completions have one turn
  int64_t max_turns = 8;               // turns of the policy at most
  int64_t max_sequence_length = 0;     // prompt, turns and observations in tokens; 0: the context
  double discount = 1;                 // the reward of turn t counts discount^(t - 1), t from 1
  // Called for each reply, before the dialogue continues.
  std::function<void(const EnvironmentReply&)> on_reply = [](const EnvironmentReply&) {};
};

}  // namespace cohort
