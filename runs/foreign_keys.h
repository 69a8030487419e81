// Names of keys in the configurations of other trainers, for those who come from them.
#pragma once

#include <string>
#include <vector>

namespace cohort {

// A row of foreign_keys.txt, which explains them.
struct ForeignKey {
  std::string theirs;  // "lr"; "rollout.n", with its section; "vllm_", all that begin with it
  std::string ours;    // a key; empty: there is none
  std::string remark;  // what to give instead, or how the values differ; may be empty
};
const std::vector<ForeignKey>& foreign_keys();

// The end of a message about a key that is unknown here: "; it is 'steps' here"; "" if no other
// trainer has it. `path`: its dotted path, or one that ends in it.
std::string foreign_key_text(const std::string& path);

}  // namespace cohort
