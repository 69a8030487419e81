// Problems as conversations: what is trained on, and what the model is asked.
#include <gtest/gtest.h>

#include "tests/support/test_util.h"
#include "trainers/dataset.h"

namespace cohort {
namespace {

using namespace test;

// A tokenizer of bytes with the turns' tokens, and a template of turns.
std::unique_ptr<Tokenizer> chat_tokenizer(const std::string& chat_template) {
  Json::Object vocab;
  // GPT-2's names of the bytes that are printable ASCII, a space and a line break.
  std::vector<std::string> names = {"\xc4\xa0", "\xc4\x8a"};
  for (char c = '!'; c <= '~'; ++c) names.emplace_back(1, c);
  for (const std::string& name : names)
    vocab.emplace_back(name, static_cast<int64_t>(vocab.size()));
  Json::Array added;
  for (const char* text : {"<|start|>", "<|end|>"}) {
    Json token;
    token.set("id", static_cast<int64_t>(vocab.size() + added.size())).set("content", text);
    for (const char* flag : {"single_word", "lstrip", "rstrip", "normalized"})
      token.set(flag, false);
    added.push_back(token.set("special", true));
  }
  const Json byte_level = Json().set("type", "ByteLevel").set("add_prefix_space", false);
  Json json;
  json.set("added_tokens", std::move(added)).set("pre_tokenizer", byte_level);
  json.set("decoder", byte_level);
  json.set("model",
           Json().set("type", "BPE").set("vocab", std::move(vocab)).set("merges", Json::Array{}));
  Json config;
  config.set("eos_token", "<|end|>").set("chat_template", chat_template);
  return make_tokenizer(
      NamedFiles{{"tokenizer.json", json.dump()}, {"tokenizer_config.json", config.dump()}},
      "test");
}

constexpr const char* kTurns =
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}";
constexpr const char* kMarked =
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}";
// As a template that leaves out what earlier turns have thought.
constexpr const char* kForgets =
    "{% for m in messages %}{% if loop.last %}!{% endif %}{{ m.content }}<|end|>{% endfor %}";

class ChatData : public testing::Test {
 protected:
  TempDir dir_;
  TrainConfig config(TrainerType trainer, const std::string& lines) const {
    TrainConfig config = default_config(trainer, 10);
    config.data.jsonl.path = {dir_.path("lines.jsonl")};
    config.data.jsonl.held_out_fraction = 0;
    write_file(config.data.jsonl.path[0], lines);
    return config;
  }
  // What is learned of example 0, each token that is not shown as '_'.
  static std::string learned(const Dataset& data) {
    const TokenSequence s = supervised_sequence(data.train->get(0), *data.tokenizer, 1000);
    std::string out;
    for (size_t i = 0; i < s.tokens.size(); ++i) {
      if (s.loss_mask[i] == 0)
        out.push_back('_');
      else
        out += data.tokenizer->decode({&s.tokens[i], 1}, SpecialText::kShow);
    }
    return out;
  }
  static std::string text(const Dataset& data) {
    const TokenSequence s = supervised_sequence(data.train->get(0), *data.tokenizer, 1000);
    return data.tokenizer->decode(s.tokens, SpecialText::kShow);
  }
};

const char* const kMessages =
    "{\"messages\": [{\"role\": \"user\", \"content\": \"1+1\"}, {\"role\": \"assistant\", "
    "\"content\": \"2\"}, {\"role\": \"user\", \"content\": \"x\"}, {\"role\": \"assistant\", "
    "\"content\": \"yz\"}]}\n";

TEST_F(ChatData, PromptsAndSolutionsBecomeTurns) {
  TrainConfig c = config(TrainerType::kSft, "{\"prompt\": \"1+1\", \"answer\": \"2\"}\n");
  c.data.chat = true;
  c.data.system = "Be kind.";
  const Dataset data = load_dataset(c, chat_tokenizer(kTurns));
  EXPECT_EQ(text(data),
            "<|start|>system\nBe "
            "kind.<|end|>\n<|start|>user\n1+1<|end|>\n<|start|>assistant\n2<|end|>\n");
  EXPECT_TRUE(learned(data).ends_with("_2<|end|>\n")) << learned(data);
  EXPECT_EQ(learned(data).find_first_not_of('_'), learned(data).size() - 9);
}

TEST_F(ChatData, OnlyTheAssistantsTurnsAreLearned) {
  TrainConfig c = config(TrainerType::kSft, kMessages);
  c.data.jsonl.messages = "messages";
  std::string shown = learned(load_dataset(c, chat_tokenizer(kTurns)));
  std::erase(shown, '_');
  EXPECT_EQ(shown, "2<|end|>\nyz<|end|>\n");
}

TEST_F(ChatData, GenerationBlocksSayWhatIsLearned) {
  TrainConfig c = config(TrainerType::kSft, kMessages);
  c.data.jsonl.messages = "messages";
  std::string shown = learned(load_dataset(c, chat_tokenizer(kMarked)));
  std::erase(shown, '_');
  EXPECT_EQ(shown, "2<|end|>yz<|end|>");
}

TEST_F(ChatData, ATemplateThatChangesEarlierTurnsIsRefused) {
  TrainConfig c = config(TrainerType::kSft, kMessages);
  c.data.jsonl.messages = "messages";
  EXPECT_THROW_WITH(learned(load_dataset(c, chat_tokenizer(kForgets))), InputError,
                    "changes the text before it");
  EXPECT_THROW_WITH(load_dataset(c, make_byte_tokenizer()), InputError, "no chat template");
}

TEST_F(ChatData, PoliciesAreAskedForTheAssistantsTurn) {
  TrainConfig c = config(TrainerType::kGrpo, kMessages);
  c.data.jsonl.messages = "messages";
  const Dataset data = load_dataset(c, chat_tokenizer(kTurns));
  const Example example = data.train->get(0);
  EXPECT_EQ(example.prompt,
            "<|start|>user\n1+1<|end|>\n<|start|>assistant\n2<|end|>\n<|start|>user\nx<|end|>\n"
            "<|start|>assistant\n");
  EXPECT_EQ(example.solution, "yz");
  // The token that ends a turn ends a completion.
  EXPECT_EQ(sampling_for(c, *data.tokenizer).stop_tokens,
            std::vector<int64_t>{data.tokenizer->encode("<|end|>").at(0)});
}

TEST_F(ChatData, BadConversationsAreNamed) {
  TrainConfig c = config(TrainerType::kSft, "{\"messages\": [{\"content\": \"x\"}]}\n");
  c.data.jsonl.messages = "messages";
  EXPECT_THROW_WITH(load_dataset(c, chat_tokenizer(kTurns)), InputError,
                    "lines.jsonl:1: messages:");
  c.data.jsonl.messages = "turns";
  EXPECT_THROW_WITH(load_dataset(c, chat_tokenizer(kTurns)), InputError, "no field 'turns'");
}

}  // namespace
}  // namespace cohort
