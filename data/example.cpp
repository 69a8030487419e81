// Example sets held in memory.
#include "data/example.h"

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

class ChangedSet final : public ExampleSet {
 public:
  ChangedSet(std::shared_ptr<const ExampleSet> examples, std::function<void(Example&)> change,
             std::optional<std::vector<int64_t>> indices)
      : examples_(std::move(examples)), change_(std::move(change)), indices_(std::move(indices)) {}

  int64_t size() const override { return indices_ ? std::ssize(*indices_) : examples_->size(); }
  ExampleId id(int64_t index) const override { return examples_->id(source_of(index)); }
  Example get(int64_t index) const override {
    Example example = examples_->get(source_of(index));
    change_(example);
    return example;
  }

 private:
  int64_t source_of(int64_t index) const {
    return indices_ ? indices_->at(static_cast<size_t>(index)) : index;
  }

  std::shared_ptr<const ExampleSet> examples_;
  std::function<void(Example&)> change_;
  std::optional<std::vector<int64_t>> indices_;
};

}  // namespace

std::vector<int32_t> encode_prompt(const Example& example, const Tokenizer& tokenizer) {
  if (!example.prompt_tokens.empty()) return example.prompt_tokens;
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

std::unique_ptr<ExampleSet> make_changed_set(std::shared_ptr<const ExampleSet> examples,
                                             std::function<void(Example&)> change,
                                             std::optional<std::vector<int64_t>> indices) {
  return std::make_unique<ChangedSet>(std::move(examples), std::move(change), std::move(indices));
}

}  // namespace cohort
