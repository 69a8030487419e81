// Names of keys in the configurations of other trainers, for those who come from them.
#pragma once

#include <span>
#include <string>

namespace cohort {

struct ForeignKey {
  const char* theirs;  // "lr"; "rollout.n", with its section; "vllm_", all that begin with it
  const char* ours;    // a key; empty: there is none
  const char* remark;  // what to give instead, or how the values differ; may be empty
};
// Names from TRL, transformers' TrainingArguments, peft and verl; see docs/from_trl.md.
std::span<const ForeignKey> foreign_keys();

// The end of a message about a key that is unknown here: "; it is 'steps' here"; "" if no other
// trainer has it. `path`: its dotted path, or one that ends in it.
std::string foreign_key_text(const std::string& path);

}  // namespace cohort
