// TRL's data formats without any template key: the format that is detected, and what is taught.
#include <gtest/gtest.h>

#include "data/data_check.h"
#include "data/dataset.h"
#include "data/split.h"
#include "job/preview.h"
#include "tests/support/chat_tokenizer.h"
#include "tests/support/test_util.h"
#include "trainers/sampling.h"

namespace cohort {
namespace {

using namespace test;

class TrlFormats : public testing::Test {
 protected:
  // The stage that a file with only these keys of `data` gives.
  TrainConfig plan(const char* trainer, const std::string& lines, const std::string& jsonl = "",
                   const std::string& data = "") const {
    write_file(dir_.path("lines.jsonl"), lines);
    write_file(
        dir_.path("run.yaml"),
        str("trainer: ", trainer, "\nsteps: 1\nrewards: [{name: exact_match}]\n",
            "data: {jsonl: {path: lines.jsonl, held_out_fraction: 0", jsonl, "}", data, "}\n"));
    return load_plan(dir_.path("run.yaml"), {}).stages[0];
  }
  static std::string shown(const Tokenizer& tokenizer, std::span<const int32_t> ids) {
    return tokenizer.decode(ids, SpecialText::kShow);
  }
  // Text of the training sequence of a problem, with each target between '[' and ']'.
  static std::string taught(const TrainConfig& config, int64_t index = 0,
                            const char* chat_template = kTurns) {
    const Dataset data = load_dataset(config, chat_tokenizer(chat_template));
    const TokenSequence s = supervised_sequence(data.train->get(index), *data.tokenizer, 1000);
    std::string out;
    for (size_t i = 0; i < s.tokens.size(); ++i) {
      if (s.loss_mask[i] != (i > 0 ? s.loss_mask[i - 1] : 0)) out += s.loss_mask[i] ? '[' : ']';
      out += shown(*data.tokenizer, {&s.tokens[i], 1});
    }
    return out + (s.loss_mask.back() ? "]" : "");
  }
  static Example problem(const TrainConfig& config) {
    return load_dataset(config, chat_tokenizer(kTurns)).train->get(0);
  }
  TempDir dir_;
};

const std::string kSystem = R"({"role": "system", "content": "S"})",
                  kQuestion = R"({"role": "user", "content": "1+1"})",
                  kEarlier = R"({"role": "assistant", "content": "?"})",
                  kAnswer = R"({"role": "assistant", "content": "2"})";
const std::string kAsked = "<|start|>user\n1+1<|end|>\n<|start|>assistant\n";

TEST_F(TrlFormats, OfConversationsTheCompletionIsTaught) {
  for (const std::string& completion : {"[" + kAnswer + "]", std::string("\"2\"")}) {
    const std::string line = R"({"prompt": [)" + kQuestion + R"(], "completion": )" + completion;
    EXPECT_EQ(taught(plan("sft", line + "}")), kAsked + "[2<|end|>\n]");
    EXPECT_EQ(taught(plan("sft", line + "}"), 0, kMarked), kAsked + "[2<|end|>]");
    EXPECT_EQ(problem(plan("grpo", line + "}")).prompt, kAsked);
    EXPECT_EQ(problem(plan("grpo", line + "}")).answer, "2");
    EXPECT_EQ(problem(plan("grpo", line + R"(, "solution": "b"})")).answer, "b");
    EXPECT_EQ(problem(plan("grpo", line + R"(, "answer": "a", "solution": "b"})")).answer, "a");
  }
}

// Answers among the messages of the prompt are context, with and without a system message.
TEST_F(TrlFormats, EarlierAnswersOfAPromptAreNotTaught) {
  const std::string messages = kQuestion + ", " + kEarlier + ", " + kQuestion;
  const std::string line = R"({"prompt": [)" + messages + R"(], "completion": [)" + kAnswer + "]}";
  const std::string turns = kAsked + "?<|end|>\n" + kAsked;
  EXPECT_EQ(taught(plan("sft", line)), turns + "[2<|end|>\n]");
  EXPECT_EQ(taught(plan("sft", line), 0, kMarked), kAsked + "?<|end|>" + kAsked + "[2<|end|>]");
  EXPECT_EQ(taught(plan("sft", line, "", ", system: S")),
            "<|start|>system\nS<|end|>\n" + turns + "[2<|end|>\n]");
  EXPECT_EQ(problem(plan("grpo", line, "", ", system: S")).prompt,
            "<|start|>system\nS<|end|>\n" + turns);
  const std::string own =
      R"({"prompt": [)" + kSystem + ", " + messages + R"(], "completion": [)" + kAnswer + "]}";
  EXPECT_EQ(taught(plan("sft", own, "", ", system: other")),
            "<|start|>system\nS<|end|>\n" + turns + "[2<|end|>\n]");
}

// Truncation removes the start of the earliest messages; the loss stays on the completion.
TEST_F(TrlFormats, ATruncatedPromptLeavesTheLossOnTheCompletion) {
  const std::string first = R"({"role": "user", "content": ")" + std::string(200, 'x') + R"("})";
  const TrainConfig config = plan("sft",
                                  R"({"prompt": [)" + first + ", " + kEarlier + ", " + kQuestion +
                                      R"(], "completion": [)" + kAnswer + "]}",
                                  "", ", too_long: truncate");
  for (const char* chat_template : {kTurns, kMarked}) {
    Dataset data = load_dataset(config, chat_tokenizer(chat_template));
    check_data(config, data, 96);
    const TokenSequence s = supervised_sequence(data.train->get(0), *data.tokenizer, 96);
    std::vector<int32_t> targets;
    for (size_t i = 0; i < s.tokens.size(); ++i)
      if (s.loss_mask[i]) targets.push_back(s.tokens[i]);
    EXPECT_EQ(shown(*data.tokenizer, targets).substr(0, 8), "2<|end|>");
    EXPECT_LE(targets.size(), 3u);
  }
}

TEST_F(TrlFormats, OfMessagesEveryAnswerIsTaught) {
  const std::string messages =
      R"({"messages": [)" + kQuestion + ", " + kEarlier + ", " + kQuestion + ", " + kAnswer + "]";
  EXPECT_EQ(taught(plan("sft", messages + "}")), kAsked + "[?<|end|>\n]" + kAsked + "[2<|end|>\n]");
  EXPECT_EQ(problem(plan("grpo", messages + "}")).prompt, kAsked + "?<|end|>\n" + kAsked);
  EXPECT_EQ(problem(plan("grpo", messages + R"(, "answer": 3})")).answer, "3");
  EXPECT_EQ(problem(plan("grpo", messages + R"(, "solution": "b"})")).answer, "b");
  // The whole conversation in place of a text prompt that has no completion.
  EXPECT_EQ(problem(plan("grpo", messages + R"(, "prompt": "1+1"})")).solution, "2");
}

TEST_F(TrlFormats, ConversationalPromptsHaveTheirGoldAnswer) {
  const std::string prompt = R"({"prompt": [)" + kQuestion + "]";
  for (const char* gold : {R"("answer": "2")", R"("solution": "2")", R"("answer": 2)"}) {
    const Example e = problem(plan("grpo", prompt + ", " + gold + "}"));
    EXPECT_EQ(e.prompt, kAsked);
    EXPECT_EQ(e.answer, "2");
    EXPECT_EQ(e.question, "1+1");
    EXPECT_EQ(taught(plan("sft", prompt + ", " + gold + "}")), kAsked + "[2<|end|>\n]");
  }
  EXPECT_EQ(problem(plan("grpo", prompt + "}")).answer, "");
  const Example both = problem(plan("grpo", prompt + R"(, "solution": "1+1=2", "answer": "2"})"));
  EXPECT_EQ(both.answer, "2");
  EXPECT_EQ(both.solution, "1+1=2");
  // A turn of the assistant ends a completion.
  const TrainConfig config = plan("grpo", prompt + "}");
  const auto tokenizer = chat_tokenizer(kTurns);
  EXPECT_EQ(sampling_for(config.sampling, config.data, *tokenizer).stop_tokens.size(), 1u);
}

TEST_F(TrlFormats, TextsAreTaughtAsTheyAre) {
  EXPECT_EQ(taught(plan("sft", R"({"prompt": "1+1=", "completion": "2"})")), "1+1=[2<|end|>]");
  EXPECT_EQ(problem(plan("grpo", R"({"prompt": "1+1=", "completion": "2"})")).answer, "2");
  const Example e =
      problem(plan("grpo", R"({"prompt": "1+1=", "completion": "<2>", "solution": "2"})"));
  EXPECT_EQ(e.answer, "2");
  EXPECT_EQ(e.solution, "<2>");
  EXPECT_EQ(problem(plan("grpo", R"({"prompt": "1+1=", "solution": "2"})")).answer, "2");
}

// A tokenizer without a beginning of sequence has its end of sequence before the text, as between
// the documents of pretraining, so that every token of the text is a target.
TEST_F(TrlFormats, OfATextEveryTokenIsTaught) {
  const TrainConfig config = plan("sft", R"({"text": "abc"})");
  EXPECT_EQ(taught(config), "<|end|>[abc<|end|>]");
  Dataset data = load_dataset(config, chat_tokenizer(kTurns));
  EXPECT_EQ(check_data(config, data, 100).longest_sequence, 5);
  EXPECT_THROW_WITH(plan("grpo", R"({"text": "abc"})"), InputError,
                    "lines.jsonl:1: prompt: none, solution: {text}: trainer grpo needs a prompt");
  EXPECT_THROW_WITH(plan("sft", R"({"text": "abc"})", "", ", chat: yes"), InputError,
                    "data.chat needs a prompt");
  // An empty text is one that ends at once.
  EXPECT_EQ(taught(plan("sft", R"({"text": ""})")), "<|end|>[<|end|>]");
}

// A problem has one split, in whatever format and for whichever trainer it is given.
TEST_F(TrlFormats, SplitsAreThoseOfTheMessagesBeforeTheAnswer) {
  const auto split = [&](const std::string& line) {
    return load_jsonl(plan("sft", line).data.jsonl).train->id(0).split;
  };
  const std::string prompt = R"({"prompt": [)" + kQuestion + "]";
  const uint64_t expected = split(R"({"messages": [)" + kQuestion + ", " + kAnswer + "]}");
  for (const std::string& rest :
       {R"(, "completion": [)" + kAnswer + "]}", std::string(R"(, "completion": "3"})"),
        std::string(R"(, "answer": "2"})"), std::string(R"(, "solution": "2"})"), std::string("}")})
    EXPECT_EQ(split(prompt + rest), expected) << rest;
}

// Tables that join formats have nulls where a row has no such column.
TEST_F(TrlFormats, FieldsThatAreNullDecideOnlyWhereNoOtherIsThere) {
  const std::string question = "[" + kQuestion + "]";
  const Example text = problem(plan("grpo", R"({"prompt": "p", "answer": null, "solution": "s"})"));
  EXPECT_EQ(text.prompt + "|" + text.answer + "|" + text.solution, "p|s|s");
  EXPECT_EQ(taught(plan("sft", R"({"prompt": "p", "completion": null, "answer": "a"})")),
            "p[a<|end|>]");
  EXPECT_EQ(taught(plan("sft", R"({"prompt": null, "text": "abc", "completion": null})")),
            "<|end|>[abc<|end|>]");
  EXPECT_EQ(taught(plan("sft", R"({"prompt": null, "completion": null, "messages": [)" + kQuestion +
                                   ", " + kAnswer + "]}")),
            kAsked + "[2<|end|>\n]");
  // A null answer is none; later lines may have one.
  for (const char* gold : {"answer", "solution"}) {
    const std::string lines = str(R"({"prompt": )", question, ", \"", gold, R"(": null})", "\n",
                                  R"({"prompt": )", question, ", \"", gold, R"(": ["2", "two"]})");
    const Dataset data = load_dataset(plan("grpo", lines), chat_tokenizer(kTurns));
    EXPECT_EQ(data.train->get(0).prompt, kAsked);
    EXPECT_EQ(data.train->get(0).answer, "");
    EXPECT_EQ(data.train->get(1).prompt, kAsked);
    EXPECT_EQ(data.train->get(1).answer, "2");
  }
  for (const char* gold : {"answer", "solution"})
    EXPECT_EQ(problem(plan("grpo", str(R"({"prompt": "p", ")", gold, R"(": null})"))).answer, "");
}

TEST_F(TrlFormats, NullCompletionsPromptsAndTextsAreErrors) {
  const auto refused = [&](const char* trainer, const std::string& line) {
    EXPECT_THROW_WITH(load_dataset(plan(trainer, line), chat_tokenizer(kTurns)).train->get(0),
                      InputError, "lines.jsonl:1: ");
  };
  const std::string question = R"({"prompt": [)" + kQuestion + "], ";
  for (const char* trainer : {"sft", "grpo"}) {
    refused(trainer, R"({"prompt": "p", "completion": null})");
    refused(trainer, R"({"prompt": null, "completion": "c"})");
    refused(trainer, R"({"prompt": null, "answer": "a"})");
    refused(trainer, question + R"("completion": null})");
    refused(trainer, R"({"prompt": [{"role": "user", "content": null}], "answer": "a"})");
    refused(trainer, R"({"messages": [{"role": "user", "content": null}], "answer": "a"})");
  }
  refused("sft", R"({"text": null})");
  refused("sft", R"({"prompt": "p", "answer": null})");
  refused("sft", R"({"prompt": "p", "solution": null})");
  refused("sft", question + R"("answer": null})");
  refused("sft", question + R"("solution": [null]})");
}

TEST_F(TrlFormats, WhatIsDetectedIsSaidOnceAndKept) {
  const std::string line = R"({"prompt": [)" + kQuestion + R"(], "solution": "2"})";
  const TrainConfig config = plan("grpo", "\n" + line + "\n");
  Dataset data = load_dataset(config, chat_tokenizer(kTurns));
  const std::string note = "data.jsonl: by the fields of " + dir_.path("lines.jsonl") +
                           ":2: messages: prompt, completion: solution, answer: {answer|solution}";
  const auto notes = check_data(config, data, 1000).notes;
  EXPECT_EQ(std::count(notes.begin(), notes.end(), note), 1) << notes.at(0);
  // The configuration of a run does not need the file to be read again.
  write_file(dir_.path("kept.yaml"), dump_plan({.stages = {config}}));
  std::filesystem::remove(dir_.path("lines.jsonl"));
  const DataConfig kept = load_plan(dir_.path("kept.yaml"), {}).stages[0].data;
  EXPECT_TRUE(kept.is_chat());
  EXPECT_EQ(kept.jsonl.completion, "solution");
  EXPECT_EQ(kept.jsonl.detected, "");
  for (const std::string& fields : {line, R"({"prompt": [)" + kQuestion + "]}"})
    EXPECT_EQ(prompt_of(kept, *chat_tokenizer(kTurns), parse_json(fields, ""), "prompt 1").prompt,
              kAsked);
}

// A model of `messages` takes the prompt of another conversational format.
TEST_F(TrlFormats, PromptsToGenerateFromMayBeOfEitherConversationalFormat) {
  const DataConfig data = plan("sft", R"({"messages": [)" + kQuestion + ", " + kAnswer + "]}").data;
  const auto tokenizer = chat_tokenizer(kTurns);
  for (const char* field : {"messages", "prompt"})
    EXPECT_EQ(prompt_of(data, *tokenizer,
                        parse_json(str("{\"", field, "\": [", kQuestion, "]}"), ""), "prompt 1")
                  .prompt,
              kAsked);
  EXPECT_THROW_WITH(prompt_of(data, *tokenizer, parse_json(R"({"prompt": "x"})", ""), "prompt 1"),
                    InputError, "prompt 1: no field 'messages'");
}

TEST_F(TrlFormats, KeysThatAreGivenAreUsedAsTheyAre) {
  const auto jsonl = [&](const std::string& line, const std::string& keys) {
    return plan("sft", line, keys).data.jsonl;
  };
  const std::string line = R"({"prompt": "p", "answer": "a", "completion": "c", "text": "t",
 "messages": [], "solution": "s"})";
  const Example e =
      load_jsonl(jsonl(line.substr(0, line.find('\n')) + line.substr(line.find('\n') + 1), ""))
          .train->get(0);
  EXPECT_EQ(e.prompt + e.answer + e.solution, "paa");
  EXPECT_EQ(jsonl(R"({"prompt": "p", "completion": "c"})", ", answer: '{completion}'").solution,
            "");
  EXPECT_EQ(jsonl(R"({"text": "p"})", ", prompt: '{prompt}'").prompt, "{prompt}");
  EXPECT_EQ(jsonl(R"({"messages": []})", ", completion: ''").messages, "");
  // Neither an unknown format nor an unreadable line has one.
  for (const char* none : {R"({"question": 1})", "not JSON", "[]", "", R"({"messages": []})",
                           R"({"text": "t", "answer": "a"})", R"({"prompt": "p"})"})
    EXPECT_EQ(jsonl(none, "").detected, "") << none;
}

TEST_F(TrlFormats, AListOfMessagesInATextTemplateIsRefused) {
  const std::string line = R"({"prompt": [)" + kQuestion + R"(], "answer": [)" + kAnswer + "]}";
  const auto load = [&](const std::string& keys) {
    return load_jsonl(plan("sft", line, keys).data.jsonl);
  };
  EXPECT_THROW_WITH(load(", prompt: 'Q: {question|prompt}'"), InputError,
                    "lines.jsonl:1: data.jsonl.prompt: the field 'question|prompt' is a list of "
                    "messages");
  EXPECT_THROW_WITH(load(", prompt: '{prompt}'"), InputError,
                    "hint: name the conversation by data.jsonl.messages: prompt");
  EXPECT_THROW_WITH(load(", prompt: '?'"), InputError, "data.jsonl.answer: the field 'answer'");
  EXPECT_THROW_WITH(load(", prompt: '?', answer: '', solution: '{answer}'"), InputError,
                    "data.jsonl.solution: the field 'answer'");
}

// Every line is read in the format of the first.
TEST_F(TrlFormats, LinesOfAnotherFormatAreNamed) {
  const std::string first =
      R"({"prompt": [)" + kQuestion + R"(], "completion": [)" + kAnswer + "]}\n";
  const auto refused = [&](const std::string& lines, const char* message) {
    EXPECT_THROW_WITH(load_dataset(plan("sft", lines), chat_tokenizer(kTurns)), InputError,
                      message);
  };
  refused(first + R"({"prompt": [)" + kQuestion + "]}",
          "lines.jsonl:2: no field 'completion' (data.jsonl.completion)");
  refused(first + R"({"prompt": "1", "completion": "2"})",
          "lines.jsonl:2: prompt: expected a list of {role, content}");
  refused(first + R"({"prompt": [)" + kQuestion + R"(], "completion": null})",
          "lines.jsonl:2: completion: expected a text or a list");
  refused(first + R"({"prompt": [)" + kQuestion + R"(], "completion": [{"role": 1}]})",
          "lines.jsonl:2: completion: message 1: expected messages");
  refused(first + R"({"prompt": [)" + kAnswer + R"(], "completion": "2"})",
          "lines.jsonl:2: prompt: ends with a message of the assistant");
  refused("{\"text\": \"a\"}\n{\"txt\": \"a\"}\n", "lines.jsonl:2: no field 'text'");
  refused(R"({"prompt": [)" + kQuestion + R"(], "answer": "2"})" + "\n" + first,
          "no field 'answer'");
  EXPECT_THROW_WITH(taught(plan("sft", R"({"prompt": [)" + kQuestion + R"(], "completion": [)" +
                                           kQuestion + "]}")),
                    InputError,
                    "no message has the role assistant: there is nothing to train on; the roles "
                    "are user; hint: user and assistant");
  EXPECT_THROW_WITH(load_dataset(plan("sft", first), make_byte_tokenizer()), InputError,
                    "no chat template");
  EXPECT_THROW_WITH(plan("sft", first, ", completion: completion"), InputError,
                    "data.jsonl.completion: follows the conversation of data.jsonl.messages");
}

// ---- Preference pairs

// The two training sequences of a pair, with each target between '[' and ']', and their number of
// shared tokens.
struct TaughtPair {
  std::string chosen, rejected;
  int64_t prefix;
};
TaughtPair pair_of(const TrainConfig& config, const char* chat_template = kTurns) {
  const Dataset data = load_dataset(config, chat_tokenizer(chat_template));
  const auto pair = pair_sequences(data.train->get(0), *data.tokenizer, 1000, TooLong::kError, 3);
  TaughtPair out{.prefix = pair[0].prefix};
  for (size_t k = 0; k < 2; ++k) {
    const TokenSequence& s = pair[k];
    EXPECT_EQ(s.group, 3);
    EXPECT_EQ(s.index, 6 + static_cast<int64_t>(k));
    EXPECT_EQ(s.prefix, out.prefix);
    std::string& text = k == 0 ? out.chosen : out.rejected;
    for (size_t i = 0; i < s.tokens.size(); ++i) {
      if (s.loss_mask[i] != (i > 0 ? s.loss_mask[i - 1] : 0)) text += s.loss_mask[i] ? '[' : ']';
      text += data.tokenizer->decode({&s.tokens[i], 1}, SpecialText::kShow);
    }
    if (s.loss_mask.back()) text += "]";
  }
  pack(pair);  // checks that the prefix is shared
  return out;
}

const std::string kWorse = R"({"role": "assistant", "content": "11"})";

TEST_F(TrlFormats, PairsOfTextsShareTheirPrompt) {
  const std::string line = R"({"prompt": "1+1=", "chosen": "2", "rejected": "11"})";
  const TaughtPair pair = pair_of(plan("dpo", line));
  EXPECT_EQ(pair.chosen, "1+1=[2<|end|>]");
  EXPECT_EQ(pair.rejected, "1+1=[11<|end|>]");
  EXPECT_EQ(pair.prefix, 3);  // the last token's target is an answer's first
  // By templates, of answers that begin alike.
  const TaughtPair own = pair_of(plan("dpo", R"({"q": "1+1", "good": "1", "bad": "10"})",
                                      ", prompt: '{q}=', answer: '{good}', rejected: '{bad}'"));
  EXPECT_EQ(own.chosen, "1+1=[1<|end|>]");
  EXPECT_EQ(own.rejected, "1+1=[10<|end|>]");
  EXPECT_EQ(own.prefix, 3);
  // As a user's message and the assistant's.
  const TaughtPair chat = pair_of(plan("dpo", line, "", ", chat: yes"));
  EXPECT_EQ(chat.chosen, "<|start|>user\n1+1=<|end|>\n<|start|>assistant\n[2<|end|>\n]");
  EXPECT_EQ(chat.rejected, "<|start|>user\n1+1=<|end|>\n<|start|>assistant\n[11<|end|>\n]");
}

TEST_F(TrlFormats, PairsOfConversationsTeachTheirAnswersAlone) {
  const std::string earlier = kQuestion + ", " + kEarlier + ", " + kQuestion;
  const std::string before = kAsked + "?<|end|>\n" + kAsked;
  const std::string lines[] = {
      // With a prompt, whose answers are messages or texts.
      R"({"prompt": [)" + earlier + R"(], "chosen": [)" + kAnswer + R"(], "rejected": [)" + kWorse +
          "]}",
      R"({"prompt": [)" + earlier + R"(], "chosen": "2", "rejected": "11"})",
      // Without one, and with one that is the last question as a text.
      R"({"chosen": [)" + earlier + ", " + kAnswer + R"(], "rejected": [)" + earlier + ", " +
          kWorse + "]}",
      R"({"prompt": "1+1", "chosen": [)" + earlier + ", " + kAnswer + R"(], "rejected": [)" +
          earlier + ", " + kWorse + "]}"};
  for (const std::string& line : lines) {
    SCOPED_TRACE(line);
    const TaughtPair pair = pair_of(plan("dpo", line));
    EXPECT_EQ(pair.chosen, before + "[2<|end|>\n]");
    EXPECT_EQ(pair.rejected, before + "[11<|end|>\n]");
    const TaughtPair marked = pair_of(plan("dpo", line), kMarked);
    EXPECT_EQ(marked.rejected, kAsked + "?<|end|>" + kAsked + "[11<|end|>]");
    const TaughtPair system = pair_of(plan("dpo", line, "", ", system: S"));
    EXPECT_EQ(system.rejected, "<|start|>system\nS<|end|>\n" + before + "[11<|end|>\n]");
    EXPECT_EQ(load_jsonl(plan("dpo", line).data.jsonl).train->id(0).split,
              load_jsonl(plan("dpo", lines[0]).data.jsonl).train->id(0).split);
  }
  // Answers with a further question.
  const std::string more = R"([)" + kWorse + ", " + kQuestion + ", " + kAnswer + "]";
  EXPECT_EQ(pair_of(plan("dpo", R"({"prompt": [)" + kQuestion + R"(], "chosen": [)" + kAnswer +
                                    R"(], "rejected": )" + more + "}"))
                .rejected,
            kAsked + "[11<|end|>\n]" + kAsked + "[2<|end|>\n]");
}

TEST_F(TrlFormats, LinesThatAreNoPairsAreNamed) {
  const auto refused = [&](const std::string& lines, const char* message,
                           const std::string& jsonl = "", const std::string& more = "") {
    EXPECT_THROW_WITH(load_dataset(plan("dpo", lines, jsonl, more), chat_tokenizer(kTurns)),
                      InputError, message);
  };
  const std::string first =
      R"({"prompt": "p", "chosen": "a", "rejected": "b"})" + std::string("\n");
  refused(first + R"({"prompt": "p", "chosen": "a", "rejected": "a"})",
          "lines.jsonl:2: the chosen and the rejected answer are equal");
  refused(first + R"({"prompt": "p", "chosen": "a"})", "lines.jsonl:2");
  refused(first + R"({"prompt": "p", "chosen": "a", "rejected": null})",
          "lines.jsonl:2: data.jsonl.rejected: expected one answer, got 0");
  refused(first + R"({"prompt": "p", "chosen": ["a", "c"], "rejected": ["a", "d"]})",
          "lines.jsonl:2: data.jsonl.answer: expected one answer, got 2");
  refused(
      first +
          R"({"prompt": "p", "chosen": {"role": "assistant", "content": "a"}, "rejected": "b"})",
      "lines.jsonl:2: data.jsonl.answer: the field 'chosen' is a list of messages");
  refused(R"({"prompt": "p", "chosen": [{"role": "user", "content": "p"}], "rejected": "b"})",
          "finds the format without data.jsonl.prompt, answer and rejected",
          ", prompt: '{prompt}', answer: '{chosen}', rejected: '{rejected}'");
  refused(first + R"({"prompt": "p", "chosen": null, "rejected": "b"})", "lines.jsonl:2");
  const std::string asked = "[" + kQuestion + "]", good = "[" + kQuestion + ", " + kAnswer + "]",
                    bad = "[" + kQuestion + ", " + kWorse + "]";
  refused(R"({"chosen": )" + good + R"(, "rejected": )" + good + "}",
          "lines.jsonl:1: the chosen and the rejected answer are equal");
  refused(R"({"chosen": )" + good + R"(, "rejected": )" + asked + "}",
          "lines.jsonl:1: chosen and rejected: expected the same first messages");
  refused(R"({"chosen": )" + good + R"(, "rejected": [)" + kWorse + "]}",
          "lines.jsonl:1: chosen and rejected: expected the same first messages");
  refused(R"({"chosen": )" + good + R"(, "rejected": "11"})",
          "lines.jsonl:1: rejected: expected a list of {role, content}");
  refused(R"({"prompt": )" + asked + R"(, "chosen": "2", "rejected": "2"})",
          "lines.jsonl:1: the chosen and the rejected answer are equal");
  refused(R"({"prompt": )" + asked + R"(, "chosen": "2"})", "trainer dpo needs pairs of answers");
  refused(R"({"prompt": )" + asked + R"(, "chosen": "2", "rejected": "3"})",
          "data.too_long: truncate would give", "", ", too_long: truncate");
  // Answers that differ in what the template does not show.
  const TrainConfig config = plan("dpo", first);
  Dataset data = load_dataset(
      plan(
          "dpo",
          R"({"prompt": )" + asked +
              R"(, "chosen": [{"role": "assistant", "content": "2", "name": "a"}], "rejected": [{"role": "assistant", "content": "2", "name": "b"}]})"),
      chat_tokenizer(kTurns));
  EXPECT_THROW_WITH(check_data(config, data, 100), InputError, "have the same tokens");
  // Other trainers say what to do with pairs.
  EXPECT_THROW_WITH(load_dataset(plan("sft", first), chat_tokenizer(kTurns)), InputError,
                    "trainer=dpo learns from both answers");
}

// The prompt of both loses its start, and the answers their ends.
TEST_F(TrlFormats, PairsOfTextsThatAreTooLongAreTruncatedAlike) {
  const TrainConfig config = plan("dpo",
                                  R"({"prompt": ")" + std::string(50, 'p') + R"(=", "chosen": ")" +
                                      std::string(90, 'c') + R"(", "rejected": "r"})",
                                  "", ", too_long: truncate");
  Dataset data = load_dataset(config, chat_tokenizer(kTurns));
  const DataLengths lengths = check_data(config, data, 40);
  EXPECT_NE(lengths.too_long, "");
  const auto pair = pair_sequences(data.train->get(0), *data.tokenizer, 40, TooLong::kTruncate, 0);
  pack(pair);
  EXPECT_EQ(pair[0].tokens.size(), 41u);
  EXPECT_EQ(pair[1].num_targets(), 2);
  EXPECT_GT(pair[0].num_targets(), 0);
  const std::string same(90, 'c');
  const TrainConfig equal = plan(
      "dpo", R"({"prompt": "p=", "chosen": ")" + same + R"(a", "rejected": ")" + same + R"(b"})",
      "", ", too_long: truncate");
  Dataset equal_data = load_dataset(equal, chat_tokenizer(kTurns));
  EXPECT_THROW_WITH(check_data(equal, equal_data, 40), InputError,
                    "have the same tokens in the context");
  EXPECT_THROW_WITH(([&] {
                      TrainConfig strict = config;
                      strict.data.too_long = TooLong::kError;
                      Dataset whole = load_dataset(strict, chat_tokenizer(kTurns));
                      check_data(strict, whole, 40);
                    }()),
                    InputError, "lines.jsonl:1: ");
}

}  // namespace
}  // namespace cohort
