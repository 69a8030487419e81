// Names of keys in the configurations of other trainers, and of their values, for those who come
// from them.
#pragma once

#include <string>
#include <vector>

#include "config/node.h"

namespace cohort {

// A row of foreign_keys.txt, which explains them.
struct ForeignKey {
  // "lr"; "rollout.n", with its section; "vllm_", all that begin with it; "loss_type=cispo", a key
  // with one of its values; "=ppo", a value of any key.
  std::string theirs;
  std::string ours;    // a key, or "surrogate: cispo"; empty: there is none
  std::string remark;  // what to give instead, or how the values differ; may be empty
};
const std::vector<ForeignKey>& foreign_keys();

// The end of a message about a key that is unknown here: "; it is 'steps' here"; "" if no other
// trainer has it. `path`: its dotted path, or one that ends in it; `value`: its value, if it is a
// scalar.
std::string foreign_key_text(const std::string& path, const std::string& value = "");
// The end of a message about a value that a key does not have here: "; it is 'surrogate: cispo'
// here"; "" if no other trainer has it.
std::string foreign_value_text(const std::string& path, const std::string& value);

// Throws InputError for rewards of a file, or of its stages, that are no maps: rewards: reward.py.
void refuse_reward_texts(const ConfigNode& root);

}  // namespace cohort
