// Models in Hugging Face's format as arguments of the commands.
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>

#include "data/safetensors.h"
#include "tests/apps/process.h"
#include "tests/apps/tiny_tokenizer.h"
#include "text/json.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

const fs::path kFamilies = fs::path(__FILE__).parent_path().parent_path() / "reference/families";

// A tokenizer of letters, a space and end of sequence: 28 ids for models of 32 rows.
std::string letters() {
  Json::Object vocab;
  std::vector<std::string> names = {"</s>", "\xc4\xa0"};
  for (char c = 'a'; c <= 'z'; ++c) names.emplace_back(1, c);
  for (const std::string& name : names)
    vocab.emplace_back(name, static_cast<int64_t>(vocab.size()));
  const Json byte_level = Json().set("type", "ByteLevel").set("add_prefix_space", false);
  Json end = Json().set("id", 0).set("content", "</s>").set("special", true);
  for (const char* flag : {"single_word", "lstrip", "rstrip", "normalized"}) end.set(flag, false);
  Json model = Json().set("type", "BPE").set("merges", Json::Array{});
  return Json()
      .set("added_tokens", Json::Array{end})
      .set("pre_tokenizer", byte_level)
      .set("decoder", byte_level)
      .set("model", model.set("vocab", std::move(vocab)))
      .dump();
}

class ModelFolders : public testing::Test {
 protected:
  ModelFolders() {
    fs::copy(kFamilies / "qwen2", model_);
    write_file(model_ + "/tokenizer.json", letters());
    write_file(model_ + "/tokenizer_config.json", R"({"eos_token": "</s>"})");
    write_file(
        dir_.path("lines.jsonl"),
        "{\"prompt\": \"ab\", \"answer\": \"c\"}\n{\"prompt\": \"b\", \"answer\": \"cd\"}\n");
    write_file(dir_.path("run.yaml"),
               "trainer: sft\nsteps: 2\nbatch_size: 2\noutput_dir: run\nlearning_rate: 1e-2\n"
               "model: {path: model}\nmax_completion_length: 4\nrewards: [{name: exact_match}]\n"
               "data: {jsonl: {path: lines.jsonl, held_out_fraction: 0}}\n");
  }
  Output train(std::vector<std::string> more = {}) const {
    more.insert(more.begin(), {"train", dir_.path("run.yaml")});
    return run_cohort(more);
  }
  TempDir dir_;
  const std::string model_ = dir_.path("model");
  const std::string saved_ = dir_.path("run/checkpoints/step-00000002");
};

TEST_F(ModelFolders, AreTrainedAndSavedAsFoldersAgain) {
  const Output output = train();
  ASSERT_EQ(output.code, 0) << output.err;
  for (const char* file :
       {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"})
    EXPECT_EQ(parse_json(read_file(saved_ + "/" + file), file).dump(),
              parse_json(read_file(model_ + "/" + file), file).dump());
  std::vector<std::string> names = SafetensorsFile(saved_ + "/model.safetensors").names(),
                           before = SafetensorsFile(model_ + "/model.safetensors").names();
  std::sort(names.begin(), names.end());
  std::sort(before.begin(), before.end());
  EXPECT_EQ(names, before);
  // The saved folder is a complete model.
  const std::string copy = dir_.path("copy");
  fs::create_directory(copy);
  for (const char* file : {"config.json", "model.safetensors", "tokenizer.json"})
    fs::copy(saved_ + "/" + file, copy + "/" + file);
  EXPECT_EQ(run_cohort({"logprobs", copy, "abc"}).out, run_cohort({"logprobs", saved_, "abc"}).out);
  EXPECT_EQ(
      train({"init_from=" + copy, "model.path=" + copy, "output_dir=" + dir_.path("on")}).code, 0);
  EXPECT_EQ(run_cohort({"train", "--resume", dir_.path("run"), "steps=3"}).code, 0);
}

// config.json ties the head, the file has another one: it is used, trained and saved.
TEST_F(ModelFolders, AHeadThatIsTiedByMistakeIsUsed) {
  const std::vector<std::string> logprobs = {"logprobs", model_, "abcabc"};
  const std::string untied = run_cohort(logprobs).out;
  Json config = parse_json(read_file(model_ + "/config.json"), "");
  write_file(model_ + "/config.json", config.set("tie_word_embeddings", true).dump());
  const std::string notice = "lm_head.weight differs from it: the head is not tied";
  const auto expect_notices = [&](const Output& output, size_t count) {
    ASSERT_EQ(output.code, 0) << output.err;
    size_t found = 0;
    for (size_t at = 0; (at = output.err.find(notice, at)) != output.err.npos; ++at) ++found;
    EXPECT_EQ(found, count) << output.err;
  };
  const Output tied = run_cohort(logprobs);
  expect_notices(tied, 1);
  EXPECT_EQ(tied.out, untied);
  expect_notices(run_cohort({"check", dir_.path("run.yaml")}), 1);
  expect_notices(train(), 1);
  EXPECT_FALSE(json_of(saved_ + "/config.json").at("tie_word_embeddings").as_bool());
  const SafetensorsFile before(model_ + "/model.safetensors"), after(saved_ + "/model.safetensors");
  EXPECT_GT(relative_error(after.read("lm_head.weight"), before.read("lm_head.weight")), 0);
  EXPECT_LT(relative_error(after.read("lm_head.weight"), before.read("lm_head.weight")), 0.5);
  expect_notices(run_cohort({"train", "--resume", dir_.path("run"), "steps=3"}), 0);
  const std::string out = dir_.path("out");
  expect_notices(run_cohort({"export", dir_.path("run"), out}), 0);
  EXPECT_FALSE(json_of(out + "/config.json").at("tie_word_embeddings").as_bool());
  EXPECT_EQ(run_cohort({"logprobs", out, "abcabc"}).out,
            run_cohort({"logprobs", dir_.path("run"), "abcabc"}).out);
  // Adapters on it, with a reference.
  const std::string adapted = dir_.path("adapted");
  const std::vector<std::string> keys = {
      "lora.rank=2",       "output_dir=" + adapted, "trainer=grpo",           "beta=0.1",
      "num_generations=2", "reference=start",       "max_completion_length=3"};
  expect_notices(train(keys), 1);
  expect_notices(run_cohort({"generate", adapted, "ab", "--max-tokens=2"}), 1);
  expect_notices(run_cohort({"export", adapted, dir_.path("merged"), "--merged"}), 1);
  EXPECT_FALSE(json_of(dir_.path("merged/config.json")).at("tie_word_embeddings").as_bool());
}

TEST_F(ModelFolders, ContextsCanBeShortenedAndNotLengthened) {
  const Output shorter = train({"model.context=8"});
  EXPECT_EQ(shorter.code, 0) << shorter.err;
  const Output longer = train({"model.context=64", "output_dir=" + dir_.path("longer")});
  EXPECT_EQ(longer.code, 2);
  EXPECT_NE(longer.err.find("has context: 32"), std::string::npos) << longer.err;
}

// The saved folder has all positions again, of which unused ones are unchanged.
TEST_F(ModelFolders, LearnedPositionsCanBeShortened) {
  for (const char* file : {"config.json", "model.safetensors"})
    fs::copy(kFamilies / "gpt2" / file, model_ + "/" + file, fs::copy_options::overwrite_existing);
  const Output output = train({"model.context=8"});
  ASSERT_EQ(output.code, 0) << output.err;
  EXPECT_EQ(parse_json(read_file(saved_ + "/config.json"), "").at("n_positions").as_int(), 32);
  const auto rows = [](const std::string& folder, int64_t begin, int64_t count) {
    return SafetensorsFile(folder + "/model.safetensors")
        .read("transformer.wpe.weight")
        .narrow(0, begin, count)
        .clone();
  };
  EXPECT_TRUE(bit_equal(rows(saved_, 8, 24), rows(model_, 8, 24)));
  EXPECT_FALSE(bit_equal(rows(saved_, 0, 8), rows(model_, 0, 8)));
  EXPECT_EQ(run_cohort({"train", "--resume", dir_.path("run"), "steps=3"}).code, 0);
  EXPECT_EQ(run_cohort({"logprobs", saved_, "abcdefghijklmnopqrst"}).code, 0);
  EXPECT_EQ(train({"model.context=2"}).code, 2) << "a problem has more tokens";
}

TEST_F(ModelFolders, MismatchesAreNamed) {
  const auto refused = [&](const std::string& message) {
    const Output output = run_cohort({"generate", model_, "ab"});
    EXPECT_EQ(output.code, 2);
    EXPECT_NE(output.err.find(message), std::string::npos) << output.err;
  };
  const std::string config = read_file(model_ + "/config.json");
  const auto with = [&](const char* field, const Json& value) {
    Json json = parse_json(config, "");
    write_file(model_ + "/config.json", json.set(field, value).dump());
  };
  with("model_type", "gemma2");
  refused("config.json: model_type: 'gemma2' is not supported; known: bert, gemma, gpt2");
  with("final_logit_softcapping", 30.0);
  refused("the field final_logit_softcapping is not supported for model_type qwen2");
  with("rope_parameters", Json().set("rope_type", "ntk").set("rope_theta", 1e4));
  refused("known: default, linear, dynamic, yarn, longrope, llama3");
  with("vocab_size", 16);
  refused("config.json has a vocabulary of 16, tokenizer.json one of 28");
  with("hidden_size", 24);
  refused("expected shape");
  write_file(model_ + "/config.json", config);
  fs::remove(model_ + "/tokenizer.json");
  refused("has no tokenizer");
}

TEST_F(ModelFolders, OtherFormatsSayWhatTheyAreAndWhatToDo) {
  const auto refused = [&](const std::string& path, const std::vector<std::string>& texts) {
    for (const char* command : {"generate", "chat", "eval", "inspect"})
      expect_bad_input(run_cohort({command, path}), texts);
    expect_bad_input(train({"model.path=" + path}), texts);
  };
  const std::string from = ".from_pretrained('" + model_ + "'",
                    weights = model_ + "/model.safetensors";
  refused(weights, {"it is a file, and a model is a folder; hint: give the folder"});
  for (const std::string& file : {weights, model_ + "/golden.safetensors"}) fs::remove(file);
  write_file(model_ + "/training_args.bin", "PK");  // holds no weights
  refused(model_,
          {"it has config.json and no model.safetensors; hint: ", "is the download complete?"});
  const std::string bin = model_ + "/pytorch_model-00001-of-00002.bin";
  write_file(bin, "PK");
  for (const std::string& path : {bin, model_})
    refused(path,
            {": pytorch_model-00001-of-00002.bin is a pickle file", "hint: convert it in Python",
             from + ").save_pretrained('NEW', safe_serialization=True)"});
  write_file(model_ + "/m-q8_0.gguf", "GGUF");
  for (const std::string& path : {model_ + "/m-q8_0.gguf", model_})
    refused(path, {": m-q8_0.gguf is in llama.cpp's format", from + ", gguf_file='m-q8_0.gguf')"});
  write_file(model_ + "/adapter_model.bin", "PK");
  refused(model_, {"it has adapter_model.bin of an adapter (LoRA) and no adapter_config.json"});
  write_file(model_ + "/adapter_config.json", "{}");
  for (const char* file : {"adapter_config.json", "adapter_model.bin"})
    refused(model_ + "/" + file, {"it is a file of an adapter (LoRA); hint: give its folder"});
  for (const char* command : {"generate", "chat", "inspect"})
    expect_bad_input(run_cohort({command, model_}),
                     {"adapter_config.json: the field peft_type is missing"});
  fs::remove_all(model_);
  fs::create_directories(model_ + "/snapshots");
  refused(model_, {"Hugging Face cache", "snapshots/"});
  fs::rename(model_ + "/snapshots", model_ + "/checkpoint-500");
  refused(model_, {"output of transformers or TRL; hint: ", "like " + model_ + "/checkpoint-500"});
  write_file(model_ + "/checkpoint-500/model.safetensors", "");
  refused(model_ + "/checkpoint-500", {"it has model.safetensors and no config.json; hint: "});
}

TEST_F(ModelFolders, PointersOfGitLfsAreNamed) {
  write_file(model_ + "/model.safetensors",
             "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n");
  expect_bad_input(run_cohort({"generate", model_, "ab"}),
                   {"model.safetensors: is a pointer of Git LFS", "hint: git lfs pull"});
}

TEST_F(ModelFolders, NamesOnTheHubAreNotDownloaded) {
  const std::string name = "HuggingFaceTB/SmolLM2-135M",
                    load = "hf download " + name + " --local-dir SmolLM2-135M ";
  expect_bad_input(run_cohort({"generate", name, "ab"}), {"nothing is downloaded", load});
  expect_bad_input(run_cohort({"chat", "https://models.example/" + name}), {load});
  expect_bad_input(run_cohort({"chat", "gpt2"}), {"hf download gpt2 --local-dir gpt2 "});
  for (const std::string key : {"model.path", "data.tokenizer_path"})
    expect_bad_input(train({key + "=" + name}), {key + ": ", "'" + name + "'", load});
  for (const std::string& path : {dir_.path("none"), dir_.path("none/it"), std::string("a/b/c")})
    EXPECT_EQ(run_cohort({"generate", path, "ab"}).err,
              "cohort: no checkpoint at " + path + ": it does not exist\n");
}

TEST_F(ModelFolders, InspectDescribesThem) {
  const Output output = run_cohort({"inspect", model_});
  EXPECT_EQ(output.code, 0) << output.err;
  for (const char* line : {"qwen2", "2 of width 16", "4 query, 2 key/value, of 4", "0 '</s>'",
                           "chat template                none"})
    EXPECT_NE(output.out.find(line), std::string::npos) << line << "\n" << output.out;
  const auto parameters = [](const std::string& out, const char* row) {
    return std::stoll(out.substr(out.find(row) + std::strlen(row)));
  };
  EXPECT_EQ(parameters(run_cohort({"check", dir_.path("run.yaml")}).out, "  parameters"),
            parameters(output.out, "\n  all"));  // more rows than the tokenizer has ids
  fs::remove(model_ + "/tokenizer.json");
  EXPECT_EQ(run_cohort({"inspect", model_}).code, 0);
  EXPECT_EQ(output.out.find("\n  cache  "), std::string::npos);
  write_file(model_ + "/precision.json", "{\"cache\": \"fp8\"}");
  const Output rounded = run_cohort({"inspect", model_});
  EXPECT_NE(rounded.out.find("\n  cache  "), std::string::npos) << rounded.out;
  expect_bad_input(run_cohort({"inspect", model_, "--dtype", "bf16"}),
                   {model_ + "/precision.json: cache: fp8 supports a head_dim of"});
}

class Chat : public ModelFolders {
 protected:
  Chat() {
    write_file(model_ + "/chat_template.jinja",
               "{% for m in messages %}{{ m.role[0] }}{{ m.content }}</s>{% endfor %}"
               "{% if add_generation_prompt %}a{{ thinking }}{% endif %}");
  }
  // The greedy completion of a text, up to the end of the turn.
  std::string completion(const std::string& text) const {
    const Output output =
        run_cohort({"generate", model_, text, "--temperature=0", "--max-tokens=5", "--json"});
    EXPECT_EQ(output.code, 0) << output.err;
    return parse_json(output.out, "").at("completion").as_string();
  }
};

TEST_F(Chat, RepliesToTheWholeConversation) {
  const std::string first = "sbe</s>uab</s>a", one = completion(first),
                    two = completion(first + one + "</s>ub\nc</s>a");
  const std::vector<std::string> chat = {"chat", model_, "--temperature=0", "--max-tokens=5",
                                         "--system=be"};
  EXPECT_EQ(run_cohort(chat, "ab\nb\\\nc\n").out, one + "\n" + two + "\n");
  EXPECT_EQ(run_cohort(chat, "ab\n/new\n\nab\n").out, one + "\n" + one + "\n");
  std::vector<std::string> thinking = chat;
  thinking.push_back(R"(--chat-template-kwargs={"thinking": "b"})");
  EXPECT_EQ(run_cohort(thinking, "ab\n").out, completion(first + "b") + "\n");
}

TEST_F(Chat, EmptyCompletionsNameTheWaysToTheTemplate) {
  std::vector<std::string> generate = {"generate", model_, "ab", "--max-tokens=5", "--num=2"};
  EXPECT_EQ(run_cohort(generate).err,
            "cohort: the text was continued as it is, without the model's chat template; hint: "
            "--chat makes it a message\n");
  generate.push_back("--logit-bias=0:200");
  const auto expect_notice = [&](bool named) {
    const Output output = run_cohort(generate);
    EXPECT_EQ(output.code, 0);
    EXPECT_NE(output.err.find("2 of 2 completions are empty"), std::string::npos) << output.err;
    EXPECT_EQ(output.err.find("hint: --chat applies the model's") != std::string::npos, named)
        << output.err;
  };
  expect_notice(true);
  generate.push_back("--best-of=3");
  expect_notice(true);
  fs::remove(model_ + "/chat_template.jinja");
  expect_notice(false);
}

TEST_F(Chat, GenerateRendersAMessageByTheTemplate) {
  const Output output =
      run_cohort({"generate", model_, "ab", "b", "--chat", "--temperature=0", "--max-tokens=5"});
  EXPECT_EQ(output.out, completion("uab</s>a") + "\n" + completion("ub</s>a") + "\n");
  EXPECT_EQ(output.err, "");
  EXPECT_EQ(parse_json(run_cohort({"generate", model_, "ab", "--chat", "--json"}).out, "")
                .at("prompt")
                .as_string(),
            "uab</s>a");
  expect_bad_input(run_cohort({"generate", model_, "ab", "--chat", "--template"}), {"--chat"});
  fs::remove(model_ + "/chat_template.jinja");
  expect_bad_input(run_cohort({"generate", model_, "ab", "--chat"}), {"has no chat template"});
}

TEST_F(Chat, SaysHowItSamplesAndKnowsItsCommands) {
  fs::remove(model_ + "/generation_config.json");
  const std::vector<std::string> chat = {"chat", model_, "--max-tokens=5"};
  const Output greedy = run_cohort(chat, "ab\n/help\n");
  EXPECT_EQ(greedy.out, completion("uab</s>a") + "\n");
  EXPECT_EQ(greedy.err.find("greedy, at most 5 tokens a reply; /new begins another"),
            greedy.err.find('\n') + 1)
      << greedy.err;
  expect_bad_input(run_cohort(chat, "/quit\n"), {"unknown command '/quit'; hint: /help"});
  expect_bad_input(run_cohort(chat, "/system be brief\n"),
                   {"unknown command '/system be", "--system"});
  EXPECT_EQ(run_cohort(chat, "/a b\n").code, 0);
  write_file(model_ + "/generation_config.json", R"({"temperature": 0.7, "top_k": 20})");
  EXPECT_EQ(run_cohort(chat, "/help\n").err.find("temperature 0.7, top-k 20, at most 5"), 0u);
  write_file(model_ + "/generation_config.json", R"({"do_sample": true})");
  EXPECT_EQ(run_cohort(chat, "/help\n").err.find("temperature 1, at most 5"), 0u);
}

TEST_F(Chat, GenerateTakesTheTemplateOfAConfiguration) {
  const std::string message = R"({"talk": [{"role": "user", "content": "ab"}], "answer": "c"})";
  write_file(dir_.path("talk.jsonl"), message + "\n");
  write_file(dir_.path("talk.yaml"),
             "trainer: grpo\nmodel: {path: model}\nrewards: [{name: exact_match}]\n"
             "data: {jsonl: {path: talk.jsonl, messages: talk, held_out_fraction: 0}}\n");
  std::vector<std::string> generate = {"generate",       model_,   message,          "--template",
                                       "--max-tokens=5", "--json", "--temperature=0"};
  expect_bad_input(run_cohort(generate), {"belongs to no run", "hint: ", "--config CONFIG.yaml"});
  generate.push_back("--config=" + dir_.path("talk.yaml"));
  const Output output = run_cohort(generate);
  ASSERT_EQ(output.code, 0) << output.err;
  const Json line = parse_json(output.out, "");
  EXPECT_EQ(line.at("prompt").as_string(), "uab</s>a");
  EXPECT_EQ(line.at("completion").as_string(), completion("uab</s>a"));
  std::erase(generate, "--template");
  expect_bad_input(run_cohort(generate), {"--config", "--template"});
}

TEST_F(Chat, SamplesAsTheFolderRecommends) {
  write_file(model_ + "/generation_config.json", R"({"temperature": 0.0, "top_k": 20})");
  EXPECT_EQ(run_cohort({"chat", model_, "--max-tokens=5"}, "ab\n").out,
            completion("uab</s>a") + "\n");
}

TEST_F(Chat, FollowsGenerationConfigAndNamesWhatItDoesNot) {
  const auto run = [&](const char* command, const std::string& json,
                       std::vector<std::string> more = {}) {
    write_file(model_ + "/generation_config.json", json);
    more.insert(more.begin(), {command, model_});
    if (command == std::string("generate")) more.insert(more.end(), {"uab</s>a", "--json"});
    const Output output = run_cohort(more, "ab\n");
    EXPECT_EQ(output.code, 0) << output.err;
    return output;
  };
  const auto generated = [&](const std::string& json, const std::vector<std::string>& more = {}) {
    return parse_json(run("generate", json, more).out, "").at("completion").as_string();
  };
  const auto replied = [&](const std::string& json, const std::vector<std::string>& more = {}) {
    const std::string out = run("chat", json, more).out;
    return out.substr(0, out.size() - 1);
  };
  const std::string greedy = generated("{}", {"--temperature=0", "--max-tokens=5"});
  ASSERT_EQ(greedy.size(), 5u);
  const std::string third(1, greedy[2]);
  // Each key has the effect of its option.
  struct Case {
    std::string json;
    std::vector<std::string> options;
  };
  for (const Case& c : std::vector<Case>{
           {R"({"do_sample": false, "temperature": 9, "max_new_tokens": 5})",
            {"--temperature=0", "--max-tokens=5"}},
           {R"({"do_sample": true, "temperature": 3.0, "max_new_tokens": 6})",
            {"--temperature=3", "--max-tokens=6"}},
           {R"({"top_k": 2, "max_new_tokens": 7})", {"--top-k=2", "--max-tokens=7"}},
           {R"({"top_p": 0.5, "max_new_tokens": 7})", {"--top-p=0.5", "--max-tokens=7"}},
           {R"({"min_p": 0.4, "max_new_tokens": 7})", {"--min-p=0.4", "--max-tokens=7"}},
           {R"({"repetition_penalty": 1.7, "do_sample": false, "max_new_tokens": 7})",
            {"--repetition-penalty=1.7", "--temperature=0", "--max-tokens=7"}},
           {R"({"presence_penalty": 2.5, "do_sample": false, "max_new_tokens": 7})",
            {"--presence-penalty=2.5", "--temperature=0", "--max-tokens=7"}},
           {R"({"frequency_penalty": 2.5, "do_sample": false, "max_new_tokens": 7})",
            {"--frequency-penalty=2.5", "--temperature=0", "--max-tokens=7"}},
           {R"({"suppress_tokens": [3, 5], "do_sample": false, "max_new_tokens": 7})",
            {"--logit-bias", "3:-inf", "5:-inf", "--temperature=0", "--max-tokens=7"}},
           {str(R"({"stop_strings": [")", third, R"("], "do_sample": false})"),
            {"--stop", third, "--temperature=0"}},
           {str(R"({"stop_strings": ")", third, R"(", "do_sample": false})"),
            {"--stop", third, "--temperature=0"}},
           // The prompt has 5 tokens.
           {R"({"max_length": 8, "do_sample": false})", {"--temperature=0", "--max-tokens=3"}},
           {R"({"max_length": 6, "max_new_tokens": 4, "do_sample": false})",
            {"--temperature=0", "--max-tokens=4"}}}) {
    SCOPED_TRACE(c.json);
    EXPECT_EQ(generated(c.json), generated("{}", c.options));
    EXPECT_EQ(replied(c.json), replied("{}", c.options));
    EXPECT_EQ(run("chat", c.json).err.find("not followed"), std::string::npos);
  }
  EXPECT_EQ(generated(R"({"stop_strings": ["</s>"], "do_sample": false, "max_new_tokens": 5})"),
            greedy);  // a special token is one in any case
  // Options that are given win.
  const std::string all =
      R"({"do_sample": true, "temperature": 50, "max_new_tokens": 1, "stop_strings": [")" + third +
      R"("], "min_p": 1, "repetition_penalty": 9.5})";
  EXPECT_EQ(generated(all, {"--temperature=0", "--max-tokens=5", "--stop", "~", "--min-p=0",
                            "--repetition-penalty=1"}),
            greedy);
  EXPECT_NE(generated(R"({"do_sample": false})", {"--top-k=9", "--max-tokens=12"}),
            generated(R"({"do_sample": false})", {"--max-tokens=12"}));
  // A field that is not followed is named once, unless it changes nothing.
  for (const char* command : {"generate", "chat"}) {
    const std::string err =
        run(command,
            R"({"num_beams": 4, "no_repeat_ngram_size": 1, "typical_p": 0.5, "mine": "x",
                "max_new_tokens": 1, "bad_words_ids": [[1]], "forced_eos_token_id": 2,
                "forced_bos_token_id": 0})",
            {"--max-tokens=2"})
            .err;
    const std::string line =
        "not followed: num_beams, no_repeat_ngram_size, typical_p, mine, bad_words_ids, "
        "forced_eos_token_id, forced_bos_token_id";
    EXPECT_NE(err.find(line), std::string::npos) << err;
    EXPECT_EQ(err.find(line), err.rfind(line)) << err;
    EXPECT_EQ(run(command,
                  R"({"num_beams": 1, "no_repeat_ngram_size": 0, "typical_p": 1.0, "mine": null,
                      "bad_words_ids": null, "use_cache": true, "eos_token_id": [0, 31],
                      "pad_token_id": 0, "transformers_version": "5.0", "length_penalty": 1.0,
                      "early_stopping": false, "cache_implementation": "hybrid", "do_sample": true,
                      "_from_model_config": true, "diversity_penalty": 0.0})",
                  {"--max-tokens=2"})
                  .err.find("not followed"),
              std::string::npos);
  }
}

// A stop token that is not special ends a completion, and is no part of its text.
TEST_F(Chat, StopTokensAreNoPartOfTheText) {
  const auto line = [&] {
    return parse_json(
        run_cohort({"generate", model_, "uab</s>a", "--json", "--temperature=0", "--max-tokens=9"})
            .out,
        "");
  };
  const Json whole = line();
  const Json::Array ids = whole.at("ids").as_array();
  const auto begin = static_cast<size_t>(whole.at("prompt_length").as_int());
  const int64_t stop = ids.at(begin + 2).as_int();
  size_t length = 0;
  while (ids[begin + length].as_int() != stop) ++length;
  write_file(model_ + "/generation_config.json", str("{\"eos_token_id\": [0, ", stop, "]}"));
  const Json ended = line();
  EXPECT_EQ(ended.at("completion").as_string(),
            whole.at("completion").as_string().substr(0, length));
  EXPECT_EQ(ended.at("ids").as_array().size(), begin + length + 1);
  EXPECT_EQ(ended.at("stopped").as_string(), "eos");
}

// Another user's files in and above the model's folder.
TEST_F(Chat, PlantedConfigurationsAreNotUsed) {
  const std::vector<std::string> chat = {"chat", model_, "--temperature=0", "--max-tokens=5"};
  const Output before = run_cohort(chat, "ab\n");
  ASSERT_EQ(before.code, 0) << before.err;
  for (const std::string& folder : {model_, dir_.path()})
    write_file(folder + "/config.yaml",
               "trainer: sft\ndata: {system: planted, task: addition, chat_template_kwargs: "
               "'{\"thinking\": \"b\"}'}\n");
  const Output after = run_cohort(chat, "ab\n");
  EXPECT_EQ(after.out, before.out);
  EXPECT_EQ(after.err, before.err);
}

TEST_F(Chat, RecommendationsOutsideTheirRangeAreNamed) {
  const auto chat_with = [&](const std::string& json, std::vector<std::string> more = {}) {
    write_file(model_ + "/generation_config.json", json);
    more.insert(more.begin(), {"chat", model_, "--max-tokens=1"});
    return run_cohort(more, "ab\n");
  };
  const std::string file = model_ + "/generation_config.json: ";
  expect_bad_input(chat_with(R"({"top_k": -2})"),
                   {file + "top_k: expected a number at least -1, got '-2'"});
  expect_bad_input(chat_with(R"({"top_k": 1.5})"), {file + "top_k: expected a whole number"});
  expect_bad_input(chat_with(R"({"top_p": 0})"), {file + "top_p: expected a number from"});
  expect_bad_input(chat_with(R"({"top_p": "0.9"})"), {file + "top_p: expected a number"});
  expect_bad_input(chat_with(R"({"temperature": -0.5})"),
                   {file + "temperature: expected a number"});
  expect_bad_input(chat_with(R"({"temperature": 1e999})"), {file});
  expect_bad_input(chat_with(R"({"temperature": NaN})"), {file});
  expect_bad_input(chat_with("[]"), {model_ + "/generation_config.json: "});
  expect_bad_input(chat_with(R"({"min_p": 1.5})"), {file + "min_p: expected a number"});
  expect_bad_input(chat_with(R"({"do_sample": "no"})"), {file + "do_sample: expected true"});
  expect_bad_input(chat_with(R"({"do_sample": 0})"), {file + "do_sample: expected true"});
  expect_bad_input(chat_with(R"({"repetition_penalty": -1})"), {file + "repetition_penalty: exp"});
  expect_bad_input(chat_with(R"({"stop_strings": [""]})"), {file + "stop_strings: an empty text"});
  expect_bad_input(chat_with(R"({"stop_strings": {"a": 1}})"), {file + "stop_strings: expected"});
  expect_bad_input(chat_with(R"({"suppress_tokens": [32]})"),
                   {file + "suppress_tokens: expected a number from 0 to 31"});
  expect_bad_input(chat_with(R"({"suppress_tokens": [-1]})"), {file + "suppress_tokens: "});
  const auto generate_with = [&](const std::string& json) {
    write_file(model_ + "/generation_config.json", json);
    return run_cohort({"generate", model_, "ab"});
  };
  for (const char* value : {"0", "-3", "1.5", "\"9\"", "true", "[2]", "1e400"})
    for (const char* key : {"max_new_tokens", "max_length"})
      expect_bad_input(generate_with(str("{\"", key, "\": ", value, "}")), {file});
  expect_bad_input(generate_with(R"({"max_length": 2})"),
                   {"has 2 tokens", "max_length is 2", "; hint: a larger max_length or shorter"});
  for (const Output& output : {chat_with(R"({"top_k": -2})", {"--top-k=0"}),
                               chat_with(R"({"top_k": -1, "temperature": 1})"),
                               chat_with(R"({"top_k": null, "top_p": 1.0, "temperature": 1})")})
    EXPECT_EQ(output.code, 0) << output.err;
}

TEST_F(Chat, InterruptsStopAReply) {
  Json config = parse_json(read_file(model_ + "/config.json"), "");
  config.set("max_position_embeddings", 1 << 20).set("eos_token_id", 0);
  write_file(model_ + "/config.json", config.dump());
  fs::remove(model_ + "/generation_config.json");
  write_file(model_ + "/chat_template.jinja", "{{ messages[0].content }}");
  // The model repeats itself without end after this text.
  Process process({"chat", model_, "--temperature=0", "--max-tokens=200000"}, "next\nnext\n");
  std::string notices;
  for (int i = 0; i < 2; ++i) {
    const size_t before = process.out().size();
    while (process.out().size() < before + 8 && process.running()) usleep(1000);
    ASSERT_TRUE(process.running()) << process.err();
    process.signal(SIGINT);
    notices += "[stopped]\n";
    while (process.err().size() < notices.size() && process.running()) usleep(1000);
  }
  const Output output = process.wait();
  EXPECT_EQ(output.code, 0);
  EXPECT_EQ(output.err, notices);
}

TEST_F(Chat, AnInputThatCannotBeReadIsAnError) {
  const std::string command = str(COHORT_BINARY, " chat ", model_, " < / 2> ", model_, "/err");
  EXPECT_EQ(WEXITSTATUS(std::system(command.c_str())), 2);
  EXPECT_EQ(read_file(model_ + "/err"),
            "cohort: cannot read standard input: Is a directory; hint: give lines through a pipe "
            "or a file\n");
}

TEST_F(Chat, MismatchesAreNamed) {
  expect_bad_input(run_cohort({"chat", model_}, std::string(40, 'a') + "\n"),
                   {"prompt 0 has 43 tokens, the model's context is 32"});
  expect_bad_input(run_cohort({"chat", model_, "--chat-template-kwargs=[]"}, "a\n"),
                   {"--chat-template-kwargs: expected an object"});
  fs::remove(model_ + "/chat_template.jinja");
  expect_bad_input(run_cohort({"chat", model_}, "a\n"),
                   {"has no chat template", "hint: cohort generate " + model_});
}

}  // namespace
}  // namespace cohort::test
