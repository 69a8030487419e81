// Problems as conversations: training text, loss mask and prompts.
#include <gtest/gtest.h>

#include <filesystem>

#include "data/data_check.h"
#include "data/dataset.h"
#include "job/config.h"
#include "job/preview.h"
#include "tests/support/byte_fallback.h"
#include "tests/support/chat_tokenizer.h"
#include "tests/support/test_util.h"
#include "text/utf8.h"
#include "trainers/sampling.h"

namespace cohort {
namespace {

using namespace test;

// Renders earlier turns differently, like templates that remove earlier reasoning.
constexpr const char* kRewritesEarlierTurns =
    "{% for m in messages %}{% if loop.last %}!{% endif %}{{ m.content }}<|end|>{% endfor %}";

class ChatData : public testing::Test {
 protected:
  TempDir dir_;
  TrainConfig config(TrainerType trainer, const std::string& lines) const {
    TrainConfig config;
    config.batch.trainer = trainer;
    config.data.jsonl.path = {dir_.path("lines.jsonl")};
    config.data.jsonl.held_out_fraction = 0;
    write_file(config.data.jsonl.path[0], lines);
    return config;
  }
  // The preview of supervised training on the lines.
  StagePreview preview(const char* chat_template, const std::string& lines,
                       const std::string& keys = "") const {
    std::filesystem::create_directories(dir_.path("tokens"));
    for (const auto& [name, content] : chat_files(chat_template))
      write_file(dir_.path("tokens/" + name), content);
    write_file(dir_.path("lines.jsonl"), lines);
    write_file(dir_.path("plan.yaml"),
               "trainer: sft\nmodel: {d_model: 16, num_heads: 2, context: 96}\n"
               "data: {tokenizer_path: tokens, too_long: truncate, jsonl: {path: lines.jsonl, "
               "held_out_fraction: 0}}\neval: {every: 0}\n" +
                   keys);
    return preview_plan(load_plan(dir_.path("plan.yaml"), {})).at(0);
  }
  // The target tokens of example 0, with every other token as '_'.
  static std::string targets(const Dataset& data) {
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
  EXPECT_TRUE(targets(data).ends_with("_2<|end|>\n")) << targets(data);
  EXPECT_EQ(targets(data).find_first_not_of('_'), targets(data).size() - 9);
}

TEST_F(ChatData, OnlyTheAssistantsTurnsAreTargets) {
  TrainConfig c = config(TrainerType::kSft, kMessages);
  c.data.jsonl.messages = "messages";
  std::string text = targets(load_dataset(c, chat_tokenizer(kTurns)));
  std::erase(text, '_');
  EXPECT_EQ(text, "2<|end|>\nyz<|end|>\n");
}

TEST_F(ChatData, GenerationBlocksMarkTheTargets) {
  TrainConfig c = config(TrainerType::kSft, kMessages);
  c.data.jsonl.messages = "messages";
  std::string text = targets(load_dataset(c, chat_tokenizer(kMarked)));
  std::erase(text, '_');
  EXPECT_EQ(text, "2<|end|>yz<|end|>");
}

TEST_F(ChatData, ATemplateThatChangesEarlierTurnsIsRefused) {
  TrainConfig c = config(TrainerType::kSft, kMessages);
  c.data.jsonl.messages = "messages";
  EXPECT_THROW_WITH(targets(load_dataset(c, chat_tokenizer(kRewritesEarlierTurns))), InputError,
                    "changes the text before it");
  EXPECT_THROW_WITH(load_dataset(c, make_byte_tokenizer()), InputError, "no chat template");
  EXPECT_THROW_WITH(load_dataset(c, nullptr), InputError,
                    "there is no chat template that renders the conversations, as no model is "
                    "given; hint: model.path=DIR");
}

TEST_F(ChatData, PromptsOfPoliciesEndBeforeTheAssistantsTurn) {
  TrainConfig c = config(TrainerType::kGrpo, kMessages);
  c.data.jsonl.messages = "messages";
  const Dataset data = load_dataset(c, chat_tokenizer(kTurns));
  const Example example = data.train->get(0);
  EXPECT_EQ(example.prompt,
            "<|start|>user\n1+1<|end|>\n<|start|>assistant\n2<|end|>\n<|start|>user\nx<|end|>\n"
            "<|start|>assistant\n");
  EXPECT_EQ(example.solution, "yz");
  // The token that ends a turn ends a completion.
  EXPECT_EQ(sampling_for(c.sampling, c.data, *data.tokenizer).stop_tokens,
            std::vector<int64_t>{data.tokenizer->encode("<|end|>").at(0)});
}

TEST_F(ChatData, BadConversationsAreNamed) {
  TrainConfig c = config(TrainerType::kSft, "{\"messages\": [{\"content\": \"x\"}]}\n");
  c.data.jsonl.messages = "messages";
  EXPECT_THROW_WITH(load_dataset(c, chat_tokenizer(kTurns)), InputError,
                    "lines.jsonl:1: messages:");
  for (const TrainerType trainer : {TrainerType::kSft, TrainerType::kGrpo}) {
    c = config(trainer, R"({"messages": [{"role": "human", "content": "q"}, )"
                        R"({"role": "gpt", "content": "a"}]})");
    c.data.jsonl.messages = "messages";
    EXPECT_THROW_WITH(load_dataset(c, chat_tokenizer(kTurns)).train->get(0), InputError,
                      "the roles are human, gpt; hint: user and assistant");
  }
  c.data.jsonl.messages = "turns";
  EXPECT_THROW_WITH(load_dataset(c, chat_tokenizer(kTurns)), InputError, "no field 'turns'");
  c.data.jsonl.messages = "messages";
  for (const auto& [roles, error] : {std::pair{std::vector{"system", "human"},
                                               "no message has the role user; the roles are "
                                               "system, human; hint: user and assistant"},
                                     {std::vector{"critic", "user"}, ""},
                                     {std::vector{"developer"}, ""}}) {
    Json messages = Json::Array{};
    for (const char* role : roles) messages.push_back(make_message(role, "q"));
    write_file(c.data.jsonl.path[0], Json().set("messages", messages).dump() + "\n");
    const auto render = [&] { load_dataset(c, chat_tokenizer(kTurns)).train->get(0); };
    if (*error == 0)
      EXPECT_NO_THROW(render());
    else
      EXPECT_THROW_WITH(render(), InputError, error);
  }
}

// Shows the variables `tools` and `mood`.
constexpr const char* kShowsVariables =
    "{% if tools is defined %}{{ tools | tojson }}{% endif %}"
    "{% if mood is defined %}({{ mood }}){% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls is defined %}{{ m.tool_calls | tojson }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}";

TEST_F(ChatData, ALinesOwnToolsAndVariablesAreItsTemplates) {
  const struct {
    const char *fields, *shown;
  } cases[] = {
      {R"("tools": [{"name": "f"}])", R"([{"name": "f"}])"},
      {R"("tools": "[{\"name\": \"f\"}]")", R"([{"name": "f"}])"},
      {R"("tools": [])", "[]"},
      {R"("tools": null)", ""},
      {R"("tools": "null")", ""},
      {R"("tools": "")", ""},
      {R"("chat_template_kwargs": {"mood": 1.0})", "(1.0)"},
      {R"("chat_template_kwargs": "{\"mood\": false}")", "(False)"},
      {R"("chat_template_kwargs": {"mood": null})", "(None)"},
      {R"("chat_template_kwargs": null)", "(calm)"},
      {R"("chat_template_kwargs": {}, "tools": [{"name": "g"}])", R"([{"name": "g"}](calm))"},
      {R"("chat_template_kwargs": {"mood": "x"}, "tools": [{"name": "g"}])",
       R"([{"name": "g"}](x))"},
  };
  const std::string turns = "<|start|>user\n1+1<|end|>\n<|start|>assistant\n";
  for (const auto& [fields, shown] : cases)
    for (
        const char* problem :
        {R"("messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}])",
         R"("prompt": "1+1", "answer": "2")"}) {
      const std::string line = str("{", problem, ", ", fields, "}");
      TrainConfig c = config(TrainerType::kGrpo, line + "\n");
      if (line.find("messages") != line.npos) c.data.jsonl.messages = "messages";
      c.data.chat = true;
      if (std::string_view(shown).find('(') != std::string_view::npos)
        c.data.chat_template_kwargs = R"({"mood": "calm"})";
      const auto tokenizer = chat_tokenizer(kShowsVariables);
      EXPECT_EQ(prompt_of(c.data, *tokenizer, parse_json(line, ""), "line").prompt, shown + turns);
      EXPECT_EQ(load_dataset(c, chat_tokenizer(kShowsVariables)).train->get(0).prompt,
                shown + turns)
          << line;
      c.batch.trainer = TrainerType::kSft;
      Dataset data = load_dataset(c, chat_tokenizer(kShowsVariables));
      EXPECT_EQ(text(data), shown + turns + "2<|end|>\n") << line;
      EXPECT_TRUE(targets(data).ends_with("_2<|end|>\n")) << line;
      // They count in the lengths that are checked.
      const auto length = static_cast<int64_t>(data.tokenizer->encode(text(data)).size());
      EXPECT_EQ(check_data(c, data, 1000).longest_sequence, length);
    }
}

TEST_F(ChatData, ToolsAndVariablesOfALineThatDoNotFitAreErrors) {
  const auto refuse = [&](const std::string& fields, const char* message,
                          const std::function<void(DataConfig&)>& change = nullptr) {
    TrainConfig c =
        config(TrainerType::kSft, str(R"({"prompt": "p", "answer": "a", )", fields, "}"));
    c.data.chat = true;
    if (change) change(c.data);
    EXPECT_THROW_WITH(load_dataset(c, chat_tokenizer(kShowsVariables)).train->get(0), InputError,
                      str("lines.jsonl:1: ", message));
  };
  refuse(R"("tools": "[{")", "tools: not valid JSON");
  refuse(R"("tools": {"name": "f"})", "tools: expected a list of JSON schemas");
  refuse(R"("tools": ["f"])", "tools: expected a list of JSON schemas");
  refuse(R"("chat_template_kwargs": [1])", "chat_template_kwargs: expected an object");
  refuse(R"("chat_template_kwargs": "x")", "chat_template_kwargs: not valid JSON");
  for (const char* name : {"messages", "add_generation_prompt", "tools"})
    refuse(str(R"("chat_template_kwargs": {")", name, R"(": []})"),
           str("chat_template_kwargs: '", name, "'").c_str());
  const auto with_tools = [](DataConfig& data) {
    data.tools = parse_json(R"([{"name":"g"}])", "");
  };
  refuse(R"("tools": [{"name": "f"}])", "tools: they differ from those of the run", with_tools);
  refuse(R"("tools": [])", "tools: they differ from those of the run", with_tools);
  refuse(R"("tools": [{"name": "f"}])", "tools: they differ from those of the run",
         [](DataConfig& data) { data.chat_template_kwargs = R"({"tools": []})"; });
  // Equal tools are no conflict, and texts without a chat template have fields of any meaning.
  TrainConfig c = config(TrainerType::kSft,
                         R"({"prompt": "p", "answer": "a", "tools": "[{\"name\": \"g\"}]"})");
  c.data.chat = true;
  with_tools(c.data);
  EXPECT_TRUE(load_dataset(c, chat_tokenizer(kShowsVariables))
                  .train->get(0)
                  .prompt.starts_with(R"([{"name": "g"}]<|start|>user)"));
  c = config(TrainerType::kSft, R"({"prompt": "p", "answer": "a", "tools": "hammer"})");
  EXPECT_EQ(load_dataset(c, chat_tokenizer(kTurns)).train->get(0).prompt, "p");
}

// Keys that are null are not there, and no text is "None".
TEST_F(ChatData, NullsOfMessagesDoNotReachTheTemplate) {
  const std::string calls = R"([{"function": {"name": "f", "arguments": {"x": null}}}])";
  TrainConfig c = config(
      TrainerType::kSft,
      R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+1"}], "tool_calls": null}, )"
      R"({"role": "assistant", "content": null, "tool_calls": )" +
          calls +
          R"(}, {"role": "tool", "content": "2", "name": null}, {"role": "assistant", "content": "2", "tool_calls": null}]})");
  c.data.jsonl.messages = "messages";
  EXPECT_EQ(text(load_dataset(c, chat_tokenizer(kShowsVariables))),
            "<|start|>user\n1+1<|end|>\n<|start|>assistant\n" + calls +
                "<|end|>\n<|start|>tool\n2<|end|>\n<|start|>assistant\n2<|end|>\n");
}

// Lines of conversations; each pair is a role and its content.
std::string conversation_of(const std::vector<std::pair<std::string, std::string>>& turns) {
  Json messages = Json::Array{};
  for (const auto& [role, content] : turns)
    messages.push_back(Json().set("role", role).set("content", content));
  return Json().set("messages", std::move(messages)).dump() + "\n";
}

class LongConversations : public ChatData {
 protected:
  TrainConfig long_config(TrainerType trainer, const std::string& lines) const {
    TrainConfig out = config(trainer, lines);
    out.data.jsonl.messages = "messages";
    out.data.too_long = TooLong::kTruncate;
    out.sampling.max_completion_length = 16;
    return out;
  }
  static std::pair<Dataset, DataLengths> fitted(const TrainConfig& config, int64_t context,
                                                const char* chat_template = kTurns) {
    Dataset data = load_dataset(config, chat_tokenizer(chat_template));
    DataLengths lengths = check_data(config, data, context);
    return {std::move(data), std::move(lengths)};
  }
  // The text of a problem's training sequence, and its target tokens.
  static std::pair<std::string, std::string> text_and_targets(const Dataset& data, int64_t index,
                                                              int64_t context) {
    const TokenSequence s =
        supervised_sequence(data.train->get(index), *data.tokenizer, context, TooLong::kTruncate);
    EXPECT_LE(static_cast<int64_t>(s.tokens.size()), context + 1);
    std::vector<int32_t> targets;
    for (size_t i = 0; i < s.tokens.size(); ++i)
      if (s.loss_mask[i] != 0) targets.push_back(s.tokens[i]);
    return {data.tokenizer->decode(s.tokens, SpecialText::kShow),
            data.tokenizer->decode(targets, SpecialText::kShow)};
  }
};

// The earliest message loses its start; the template, the system message and the answer are kept.
TEST_F(LongConversations, LoseTheStartOfTheirEarliestMessages) {
  const std::string question = std::string(80, 'x') + " 1+1?";
  for (const char* chat_template : {kTurns, kMarked}) {
    const auto [data, lengths] = fitted(
        long_config(
            TrainerType::kSft,
            conversation_of({{"system", "Sum."}, {"user", question}, {"assistant", "It is 2."}})),
        96, chat_template);
    EXPECT_EQ(lengths.too_long.find("truncated 1 of 1 training problems"), 0u) << lengths.too_long;
    const auto [text, targets] = text_and_targets(data, 0, 96);
    EXPECT_EQ(text.find("<|start|>system\nSum.<|end|>\n<|start|>user\nx"), 0u) << text;
    EXPECT_NE(text.find("x 1+1?<|end|>\n<|start|>assistant\nIt is 2.<|end|>"), text.npos) << text;
    EXPECT_GE(data.tokenizer->encode(text).size(), 95u);  // no more is truncated than necessary
    EXPECT_EQ(targets.find("It is 2.<|end|>"), 0u);
    EXPECT_LE(targets.size(), 16u);
  }
}

// The template of a truncated conversation has the line's tools.
TEST_F(LongConversations, KeepTheirTools) {
  const std::string line =
      R"({"tools": [{"name": "f"}], "messages": [{"role": "user", "content": ")" +
      std::string(90, 'x') + R"("}, {"role": "assistant", "content": "2"}]})";
  const auto [data, lengths] = fitted(long_config(TrainerType::kSft, line), 96, kShowsVariables);
  EXPECT_FALSE(lengths.too_long.empty());
  const auto [text, targets] = text_and_targets(data, 0, 96);
  EXPECT_TRUE(text.starts_with(R"([{"name": "f"}]<|start|>user)")) << text;
  EXPECT_EQ(targets, "2<|end|>\n");
}

// The earliest of several turns are truncated, and a truncated answer has no loss.
TEST_F(LongConversations, HaveNoLossOnTruncatedAnswers) {
  const std::string lines = conversation_of({{"user", "one"},
                                             {"assistant", std::string(90, 'a') + " first"},
                                             {"user", "two"},
                                             {"assistant", "second"},
                                             {"user", "three"},
                                             {"assistant", "third"}});
  const auto [data, lengths] = fitted(long_config(TrainerType::kSft, lines), 130);
  const auto [text, targets] = text_and_targets(data, 0, 130);
  EXPECT_EQ(text.find("<|start|>user\n<|end|>\n<|start|>assistant\na"), 0u) << text;
  EXPECT_EQ(targets, "second<|end|>\nthird<|end|>\n");
}

TEST_F(LongConversations, OfPoliciesLeaveTokensForACompletion) {
  const auto [data, lengths] = fitted(
      long_config(TrainerType::kGrpo,
                  conversation_of({{"user", std::string(200, 'y') + " 2+2?"}, {"assistant", "4"}})),
      64);
  const std::string prompt = data.train->get(0).prompt;
  EXPECT_EQ(prompt.find("<|start|>user\ny"), 0u);
  EXPECT_TRUE(prompt.ends_with("y 2+2?<|end|>\n<|start|>assistant\n"));
  const auto tokens = static_cast<int64_t>(data.tokenizer->encode(prompt).size());
  EXPECT_LE(tokens, 64 - 16);
  EXPECT_GE(tokens, 64 - 20);
}

TEST_F(LongConversations, AreRefusedIfTheTemplateAloneIsTooLong) {
  const std::string answer = conversation_of({{"user", "?"}, {"assistant", "4"}});
  EXPECT_THROW_WITH(fitted(long_config(TrainerType::kSft, answer), 18), InputError,
                    "lines.jsonl:1: '<|start|>user\\n<|end|>");
  EXPECT_THROW_WITH(fitted(long_config(TrainerType::kGrpo, answer), 18), InputError,
                    "the truncated prompt still has 19 tokens");
  // A template whose generation blocks print nothing.
  const char* empty_blocks =
      "{% for m in messages %}<|start|>{{ m.content }}{% if m.role == 'assistant' %}"
      "{% generation %}{% endgeneration %}{% endif %}{% endfor %}";
  TrainConfig c = long_config(TrainerType::kSft, answer);
  c.data.too_long = TooLong::kError;
  EXPECT_THROW_WITH(fitted(c, 100, empty_blocks), InputError, "it has no target tokens; hint: ");
}

// A system message of the conversation replaces data.system, which is noted.
TEST_F(ChatData, AConversationsSystemMessageTakesPrecedence) {
  const std::string own =
      conversation_of({{"system", "Other."}, {"user", "1"}, {"assistant", "2"}});
  const std::string none = conversation_of({{"user", "3"}, {"assistant", "4"}});
  TrainConfig c = config(TrainerType::kSft, none + own);
  c.data.jsonl.messages = "messages";
  c.data.system = "Ours.";
  Dataset data = load_dataset(c, chat_tokenizer(kTurns));
  const std::string note = "data.system: conversations that have a system message keep it";
  const auto notes = check_data(c, data, 1000).notes;
  EXPECT_TRUE(std::any_of(notes.begin(), notes.end(),
                          [&](const std::string& n) { return n.starts_with(note); }));
  EXPECT_EQ(data.train->get(0).prompt.find("<|start|>system\nOurs.<|end|>\n<|start|>user\n3"), 0u);
  EXPECT_EQ(data.train->get(1).prompt.find("<|start|>system\nOther.<|end|>\n<|start|>user\n1"), 0u);
  c = config(TrainerType::kSft, none);
  c.data.jsonl.messages = "messages";
  c.data.system = "Ours.";
  data = load_dataset(c, chat_tokenizer(kTurns));
  for (const std::string& n : check_data(c, data, 1000).notes) EXPECT_FALSE(n.starts_with(note));
}

// Without a special token at its end, a turn ends with its text.
TEST_F(ChatData, TheTextAfterAnAnswerIsAStopStringWithoutASpecialToken) {
  TrainConfig c = config(TrainerType::kGrpo, "{\"prompt\": \"1+1\", \"answer\": \"2\"}\n");
  c.batch.prompts_per_step = 1;
  c.data.chat = true;
  const auto sampling = [&](const char* chat_template) {
    const auto tokenizer = chat_tokenizer(chat_template);
    return sampling_for(c.sampling, c.data, *tokenizer);
  };
  const char* plain = "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n\n{% endfor %}";
  EXPECT_EQ(sampling(plain).stop_strings, std::vector<std::string>{"\n\n"});
  EXPECT_TRUE(sampling(plain).stop_tokens.empty());
  // A special token counts at any position.
  const char* later = "{% for m in messages %}{{ m.content }} .<|end|>\n{% endfor %}";
  EXPECT_TRUE(sampling(later).stop_strings.empty());
  EXPECT_EQ(sampling(later).stop_tokens.size(), 1u);
  EXPECT_TRUE(sampling("{% for m in messages %}{{ m.content }}{% endfor %}").stop_strings.empty());
  Dataset data = load_dataset(c, chat_tokenizer(plain));
  const auto notes = check_data(c, data, 1000).notes;
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_EQ(
      notes[0],
      "chat template: no special token ends the assistant's turns; the text '\\n\\n' is a stop "
      "string instead");
}

// `cohort check` judges solutions as training judges completions of their tokens: special tokens of
// the form are text, those that end a turn are not, and templates may open the form in the prompt.
TEST_F(ChatData, SolutionsAreJudgedAsCompletionsOfTheirTokens) {
  const auto judged = [&](const std::string& opening, const std::string& solution) {
    NamedFiles files =
        chat_files(str(kTurns, "{% if add_generation_prompt %}", opening, "{% endif %}"));
    Json json = parse_json(files[0].second, "tokenizer.json");
    Json::Array added = json.at("added_tokens").as_array();
    for (const char* text : {"<think>", "</think>"})
      added.push_back(Json()
                          .set("id", added.back().at("id").as_int() + 1)
                          .set("content", text)
                          .set("special", true));
    files[0].second = json.set("added_tokens", std::move(added)).dump();
    std::filesystem::create_directories(dir_.path("tokens"));
    for (const auto& [name, content] : files) write_file(dir_.path("tokens/" + name), content);
    write_file(
        dir_.path("lines.jsonl"),
        Json().set("prompt", "1+1").set("answer", "2").set("solution", solution).dump() + "\n");
    write_file(
        dir_.path("plan.yaml"),
        "trainer: grpo\nmodel: {d_model: 16, num_heads: 2, context: 96}\n"
        "data: {tokenizer_path: tokens, chat: true, jsonl: {path: lines.jsonl, eval_path: "
        "lines.jsonl, answer: '{answer}', solution: '{solution}'}}\neval: {correct: "
        "{reward: numeric}}\nmax_completion_length: 16\nrewards: [{name: think_format}, "
        "{name: format, pattern: '.*</think>2'}, {name: numeric, pattern: '</think>(.*)'}]\n");
    return preview_plan(load_plan(dir_.path("plan.yaml"), {})).at(0).gold_rewards.at(0);
  };
  const std::string right = "think_format 1, format 1, numeric 1; total 3";
  EXPECT_EQ(judged("", "<think>1+1</think>2"), right);
  EXPECT_EQ(judged("", "<think>1+1</think>2<|end|>"), right);
  EXPECT_EQ(judged("", "<think>1+1</think>2<|end|>\n<|start|>user"), right);
  EXPECT_EQ(judged("<think>", "1+1</think>2"), right);
  EXPECT_EQ(judged("<think>\n", "1+1</think>2<|end|>"), right);
  EXPECT_EQ(judged("<think>", "<think>1+1</think>2"),
            "think_format 0, format 1, numeric 1; total 2");
  EXPECT_EQ(judged("", "1+1</think>2"), "think_format 0, format 1, numeric 1; total 2");
}

// A model that learns no stop token never ends an answer by itself.
TEST_F(ChatData, ExamplesWithoutAStopTokenGiveAWarning) {
  const std::string one = str(kMessages), long_one = one.substr(0, one.find("yz")) +
                                                     std::string(40, 'y') +
                                                     one.substr(one.find("yz"));
  const auto warning = [&](const char* chat_template, const std::string& lines) {
    return preview(chat_template, lines).stop_warning;
  };
  const char* open =
      "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
      "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}";
  const char* outside =
      "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
      "{% generation %}{{ m.content }}{% endgeneration %}<|end|>\n{% else %}{{ m.content }}<|end|>"
      "\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}";
  const char* plain =
      "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n\n{% endfor %}"
      "{% if add_generation_prompt %}### assistant\n{% endif %}";
  const std::string text = "data: 2 of the first 2 examples have no stop token that is learned";
  EXPECT_EQ(warning(open, one + one).substr(0, text.size()), text);
  EXPECT_EQ(warning(outside, one + one).substr(0, text.size()), text);
  EXPECT_EQ(warning(kTurns, one + one), "");  // a line end follows the stop token
  EXPECT_EQ(warning(kMarked, one + one), "");
  EXPECT_EQ(warning(plain, one + one), "");             // ends in a stop string
  EXPECT_EQ(warning(kTurns, long_one + long_one), "");  // truncated, not without an end
  const std::string sums = "{\"prompt\": \"1+1\", \"answer\": \"2\"}\n";
  EXPECT_EQ(warning(kTurns, sums + sums), "");  // texts, which the end of sequence follows
}

// A template without tools would teach empty turns.
TEST_F(ChatData, CallsAndToolsThatTheTemplateDoesNotShowGiveAWarning) {
  const auto warning = [&](const char* chat_template, const std::string& lines) {
    return preview(chat_template, lines).template_warning;
  };
  const std::string call =
      R"({"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "", )"
      R"("tool_calls": [{"function": {"name": "sum", "arguments": {}}}]}]})"
      "\n";
  EXPECT_EQ(warning(kTurns, str(kMessages) + call)
                .find(dir_.path("lines.jsonl") + ":2: message 2: the chat template shows nothing "
                                                 "of its tool_calls"),
            0u)
      << warning(kTurns, str(kMessages) + call);
  EXPECT_EQ(warning(kShowsVariables, str(kMessages) + call), "");
  const std::string quoted = replaced(call, "{}}}]", R"("{\"a\": 1}"}}])");
  const char* plain =
      "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
      "{% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments }}{% endfor %}"
      "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}";
  EXPECT_EQ(warning(plain, quoted), "");
  EXPECT_EQ(warning(kShowsVariables, quoted)
                .find(dir_.path("lines.jsonl") + ":1: the chat template quotes the arguments "
                                                 "of tool_calls, a text; hint: an object"),
            0u)
      << warning(kShowsVariables, quoted);
  const std::string tools =
      R"({"prompt": [{"role": "user", "content": "1+1"}], "completion": "2", )"
      R"("tools": [{"type": "function", "function": {"name": "sum"}}]})"
      "\n";
  EXPECT_EQ(
      warning(kTurns, tools)
          .find(dir_.path("lines.jsonl") + ":1: the chat template shows nothing of the schemas"),
      0u);
  EXPECT_EQ(warning(kShowsVariables, tools), "");
}

TEST_F(ChatData, AnEnvironmentWhoseToolsNoPromptShowsIsNoted) {
  write_file(dir_.path("play.py"),
             "import json, sys\n"
             "for line in sys.stdin:\n"
             "    turn = {key: json.loads(line)[key] for key in ('index', 'turn')}\n"
             "    print(json.dumps({**turn, 'done': True}), flush=True)\n");
  const std::string tools = R"([{"type": "function", "function": {"name": "sum"}}])";
  write_file(dir_.path("tools.json"), tools);
  const auto is_noted = [&](const std::string& lines, const std::string& keys) {
    const std::vector<std::string> notes =
        preview(kShowsVariables, lines,
                str("environment: {name: command, run: python3 play.py", keys, "}\n"))
            .lengths.notes;
    return std::ranges::any_of(notes, [](const std::string& note) {
      return note.find("environment: without tool_schemas no prompt shows tools; hint: ") == 0;
    });
  };
  EXPECT_TRUE(is_noted(kMessages, ""));
  EXPECT_FALSE(is_noted(kMessages, ", tool_schemas: tools.json, tool_format: hermes"));
  EXPECT_FALSE(is_noted(R"({"prompt": "1+1", "completion": "2", "tools": )" + tools + "}\n", ""));
}

// SentencePiece prepends a space to a text: encoding a solution alone would train on a space that
// the data does not have.
TEST(SupervisedText, IsTokenizedAsAWhole) {
  const auto tokenizer = test::byte_fallback_tokenizer();
  const auto targets = [&](const std::string& prompt, const std::string& solution) {
    const TokenSequence s =
        supervised_sequence({.prompt = prompt, .solution = solution}, *tokenizer, 100);
    EXPECT_EQ(s.loss_mask.size(), s.tokens.size());
    std::vector<int32_t> whole = tokenizer->encode(prompt + solution);
    whole.push_back(tokenizer->eos_id());
    EXPECT_EQ(s.tokens, whole);
    std::vector<int32_t> out;
    for (size_t i = 0; i < s.tokens.size(); ++i)
      if (s.loss_mask[i] != 0) out.push_back(s.tokens[i]);
    return out;
  };
  EXPECT_EQ(targets("a\n", "b"), (std::vector<int32_t>{261, 2}));
  EXPECT_EQ(targets("a\n", " b"), (std::vector<int32_t>{263, 2}));
  EXPECT_EQ(targets("a", "ba"), (std::vector<int32_t>{261, 260, 2}));
  EXPECT_EQ(targets("a ", "b"), (std::vector<int32_t>{263, 2}));  // one token for both
  EXPECT_EQ(targets("a", ""), (std::vector<int32_t>{2}));
}

}  // namespace
}  // namespace cohort
