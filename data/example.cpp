// Example sets held in memory.
#include "data/example.h"

#include <utility>

#include "data/split.h"

namespace cohort {
namespace {

class MemorySet final : public ExampleSet {
 public:
  explicit MemorySet(std::vector<Example> examples) : examples_(std::move(examples)) {}

  int64_t size() const override { return static_cast<int64_t>(examples_.size()); }
  Example get(int64_t index) const override {
    COHORT_CHECK(index >= 0 && index < size(), "[examples] index ", index, " of ", size());
    return examples_[static_cast<size_t>(index)];
  }

 private:
  std::vector<Example> examples_;
};

}  // namespace

std::vector<int32_t> encode_prompt(const Example& example, const Tokenizer& tokenizer) {
  std::vector<int32_t> ids = tokenizer.encode(example.prompt, example.special);
  // Some tokenizers append an end of sequence to every text.
  if (example.special == SpecialTokens::kAdd && !ids.empty() && ids.back() == tokenizer.eos_id() &&
      ids != tokenizer.encode(example.prompt))
    ids.pop_back();
  if (example.whole_text && example.special == SpecialTokens::kAdd &&
      encode_prompt({}, tokenizer).empty())
    ids.insert(ids.begin(), tokenizer.eos_id());
  return ids;
}

ExampleId ExampleSet::id(int64_t index) const {
  return {.split = split_hash(get(index).key())};
}

std::unique_ptr<ExampleSet> make_example_set(std::vector<Example> examples) {
  return std::make_unique<MemorySet>(std::move(examples));
}

}  // namespace cohort
