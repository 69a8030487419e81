// `cohort fill-mask`, `classify` and `embed` on small models made here.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>

#include "autograd/ops.h"
#include "job/encode.h"
#include "nn/model_folder.h"
#include "sys/files.h"
#include "tests/apps/process.h"
#include "tests/job/small_configs.h"
#include "tests/support/png_file.h"

namespace cohort::test {
namespace {

constexpr const char* kWords = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n##b\nc\n<d>\né\n";
constexpr int64_t kContext = 12;

class EncodeCommands : public testing::Test {
 protected:
  // A model's folder, with vocab.txt for an encoder, and the tokenizer of bytes for a decoder.
  // `all`: the value of all weights.
  std::string make(HeadType head, std::optional<double> all = {}) {
    ModelConfig c;
    c.num_layers = 2;
    c.d_model = 16;
    c.num_heads = 2;
    c.context = kContext;
    c.init_std = 0.4;
    c.vocab_size = head == HeadType::kNextToken ? 257 : 11;
    if (head != HeadType::kNextToken) {
      c.mask = MaskType::kFull;
      c.norm = NormType::kLayer;
      c.norm_place = NormPlace::kAfter;
      c.position = PositionType::kLearned;
      c.mlp = MlpType::kGelu;
      c.bias = c.embedding_norm = c.tie_embeddings = true;
      c.token_types = 2;
      c.set_head(head, head == HeadType::kClasses ? std::vector<std::string>{"bad", "good", "so"}
                                                  : std::vector<std::string>());
    }
    c.resolve();
    model_ = std::make_unique<Transformer>(c, DType::kF32, 5);
    for (const NamedParameter& p : model_->parameters())
      if (all) Tensor(p.value).fill_(*all);
    const std::string folder = dir_.path(str("model", count_++));
    std::filesystem::create_directories(folder);
    save_weights(*model_, folder);
    write_file(folder + "/config.json", saved_config(*model_).dump());
    if (head != HeadType::kNextToken) write_file(folder + "/vocab.txt", kWords);
    if (head == HeadType::kNextToken)
      for (const auto& [name, text] : make_byte_tokenizer()->files())
        write_file(folder + "/" + name, text);
    return folder;
  }
  static std::vector<Json> lines(const std::vector<std::string>& arguments,
                                 const std::string& input = "", const std::string& note = "") {
    const Output output = run_cohort(arguments, input);
    EXPECT_EQ(output.code, 0) << output.err;
    EXPECT_EQ(output.err, note);
    return json_lines_of(output.out);
  }
  static std::vector<float> floats(const Json& list) {
    std::vector<float> out;
    for (const Json& x : list.as_array()) out.push_back(static_cast<float>(x.as_double()));
    return out;
  }
  static TokenSequence sequence(std::vector<int32_t> ids, std::vector<int32_t> types = {}) {
    TokenSequence out{.tokens = std::move(ids), .types = std::move(types)};
    out.labels.assign(out.tokens.size(), -1);
    return out;
  }
  // softmax of the only target's logits, computed from the loss
  std::vector<double> probabilities(const TokenSequence& text) const {
    NoGradGuard no_grad;
    const PackedBatch batch = pack(std::span(&text, 1));
    std::vector<double> out;
    for (int64_t id = 0; id < model_->config().num_logits(); ++id)
      out.push_back(
          std::exp(token_log_probs(model_->hidden_at_targets(batch), model_->head(),
                                   Tensor::full({1}, static_cast<double>(id), DType::kI32))
                       .logprob.value()
                       .to_vector<double>()[0]));
    return out;
  }
  enum class Scale { kRaw, kUnit };
  std::vector<float> embedding(const TokenSequence& text, Pooling pooling,
                               Scale scale = Scale::kUnit) const {
    std::vector<float> out = embed(*model_, std::span(&text, 1), pooling)[0];
    if (scale == Scale::kUnit) normalize(out);
    return out;
  }

  TempDir dir_;
  std::unique_ptr<Transformer> model_;  // the last one of make()
  int count_ = 0;
};

// They are compared on what the run reads, though its tokenizer has no end of sequence.
TEST_F(EncodeCommands, MergedAdaptersAreComparedWithTheUnmergedModel) {
  std::string jsonl, text;
  for (const char* label : {"bad", "good", "so"})
    for (const char* a : {"a b", "c", "b b a", "é c b"}) {
      jsonl +=
          str(R"({"prompt": ")", a, R"(", "pair": ")", label, R"(", "answer": ")", label, "\"}\n");
      text += str(a, " c a b\n");
    }
  write_file(dir_.path("lines.jsonl"), jsonl);
  write_file(dir_.path("text.txt"), text);
  const std::string common =
      "num_threads: 1\nsteps: 2\nbatch_size: 3\nlearning_rate: 0.01\nlora: {rank: 2}\n"
      "eval: {at_start: no}\n";
  const auto compared = [&](HeadType head, const std::string& keys) {
    const std::string run = dir_.path(str("run", count_)), out = dir_.path(str("out", count_));
    write_file(dir_.path("run.yaml"), common + keys);
    const Output trained = run_cohort(
        {"train", dir_.path("run.yaml"), "output_dir=" + run, "init_from=" + make(head)});
    EXPECT_EQ(trained.code, 0) << trained.err;
    const std::string printed = run_cohort({"export", run, out, "--merged", "--dtype", "bf16"}).out;
    const size_t at = printed.find("KL(unmerged || merged): ");
    if (at == printed.npos) return printed;
    const double kl = std::stod(printed.substr(at + 24));
    EXPECT_GT(kl, 0) << printed;
    EXPECT_LT(kl, 1e-2) << printed;  // bf16 rounds by 2^-9
    return printed.substr(printed.find("over the", at), 40);
  };
  EXPECT_EQ(compared(HeadType::kClasses,
                     "trainer: classify\ndata: {jsonl: {path: lines.jsonl, pair: '{pair}'}, "
                     "held_out_fraction: 0}\n")
                .substr(0, 38),
            "over the 12 tokens of 12 training prom");
  EXPECT_EQ(compared(HeadType::kMaskedToken,
                     "trainer: mlm\ndata: {text: text.txt, held_out_fraction: 0.3}\n")
                .substr(0, 8),
            "over the");
}

TEST_F(EncodeCommands, AModelWithoutLogitsIsRounded) {
  const std::string model = make(HeadType::kPooler), out = dir_.path("out");
  const Output output = run_cohort({"export", model, out, "--dtype", "bf16"});
  EXPECT_EQ(output.code, 0) << output.err;
  EXPECT_EQ(lines({"embed", out, "a"}).size(), 1u);
}

TEST_F(EncodeCommands, FillMaskRanksTheTokensOfEachMask) {
  const std::string model = make(HeadType::kMaskedToken);
  const auto out = lines({"fill-mask", model, "a [MASK]c", "[MASK] [MASK]", "--top", "1000"});
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[0].at("text").as_string(), "a [MASK]c");
  EXPECT_EQ(out[0].as_object().size(), 2u);
  EXPECT_EQ(out[0].at("masks").as_array().size(), 1u);
  EXPECT_EQ(out[1].at("masks").as_array().size(), 2u);
  TokenSequence text = sequence({2, 5, 4, 8, 3}, {0, 0, 0, 0, 0});
  text.labels[2] = 0;
  const std::vector<double> expected = probabilities(text);
  const char* const tokens[] = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a",
                                "b",     "##b",   "c",     "<d>",   "é"};
  double before = 1;
  const Json::Array& likely = out[0].at("masks").as_array()[0].as_array();
  ASSERT_EQ(likely.size(), 11u);
  for (const Json& entry : likely) {
    const auto id = static_cast<size_t>(entry.at("id").as_int());
    const double probability = entry.at("probability").as_double();
    EXPECT_EQ(entry.at("token").as_string(), tokens[id]);
    EXPECT_NEAR(probability, expected[id], 1e-6);
    EXPECT_LE(probability, before);
    before = probability;
  }
  const auto five = lines({"fill-mask", model}, "a [MASK]c\n")[0].at("masks").as_array();
  ASSERT_EQ(five[0].as_array().size(), 5u);
  for (size_t i = 0; i < 5; ++i) EXPECT_EQ(five[0].as_array()[i].dump(), likely[i].dump());
}

// CLI11 takes arguments in brackets as lists.
TEST_F(EncodeCommands, ArgumentsInBracketsAreTexts) {
  const std::string masked = make(HeadType::kMaskedToken), decoder = make(HeadType::kNextToken);
  EXPECT_EQ(lines({"fill-mask", masked, "[MASK], a [MASK]"})[0].at("text").as_string(),
            "[MASK], a [MASK]");
  const auto logprobs = lines({"logprobs", decoder, "[1, 2]", "[a,b]"});
  ASSERT_EQ(logprobs.size(), 2u);
  EXPECT_EQ(logprobs[0].at("text").as_string(), "[1, 2]");
  const auto samples = lines({"generate", decoder, "[1, 2]", "--json", "--max-tokens", "1"});
  ASSERT_EQ(samples.size(), 1u);
  EXPECT_EQ(samples[0].at("prompt").as_string(), "[1, 2]");
  expect_bad_input(run_cohort({"inspect", "[1, 2]"}), {"no checkpoint at [1, 2]: "});
  expect_bad_input(run_cohort({"inspect", decoder, "[1]"}), {"not expected: [1]; hint: "});
}

TEST_F(EncodeCommands, ClassifyGivesTheLabelAndAllProbabilities) {
  const std::string model = make(HeadType::kClasses);
  const auto check = [&](const Json& line, TokenSequence text) {
    text.labels[0] = 0;
    const std::vector<double> expected = probabilities(text);
    const Json::Object& all = line.at("probabilities").as_object();
    ASSERT_EQ(all.size(), 3u);
    EXPECT_EQ(line.at("label").as_string(), all[0].first);
    EXPECT_EQ(line.at("probability").as_double(), all[0].second.as_double());
    double before = 1;
    for (const auto& [label, value] : all) {
      EXPECT_NEAR(value.as_double(), expected[label == "bad" ? 0 : label == "good" ? 1 : 2], 1e-6);
      EXPECT_LE(value.as_double(), before);
      before = value.as_double();
    }
  };
  const auto plain = lines({"classify", model}, "a b\n{\"text\": \"a\"}\n");
  ASSERT_EQ(plain.size(), 2u);
  check(plain[0], sequence({2, 5, 6, 3}));
  EXPECT_EQ(plain[1].at("text").as_string(), "{\"text\": \"a\"}");
  const auto json =
      lines({"classify", model, "--json-input"},
            "\"a b\"\n{\"text\": \"a b\", \"text_pair\": \"c\", \"id\": 7}\n{\"text\": \"a b\"}\n");
  ASSERT_EQ(json.size(), 3u);
  check(json[1], sequence({2, 5, 6, 3, 8, 3}, {0, 0, 0, 0, 1, 1}));
  EXPECT_EQ(json[1].at("text_pair").as_string(), "c");
  EXPECT_EQ(json[1].at("id").as_int(), 7);
  EXPECT_NE(json[1].at("probability").as_double(), json[0].at("probability").as_double());
  for (const size_t i : {0, 2}) EXPECT_EQ(json[i].dump(), plain[0].dump());
}

TEST_F(EncodeCommands, ImagesArePathsOrDataUris) {
  // 1 x 1, gray 7.
  const std::string uri =
      "data:image/png;base64,"
      "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgBwAACQAIICPDjAAAAABJ"
      "RU5ErkJggg==";
  write_file(dir_.path("set.jsonl"), str("{\"image\": \"", uri, "\", \"label\": 1.50}\n",
                                         "{\"image\": \"", uri, "\", \"label\": 2}\n"));
  write_file(dir_.path("run.yaml"),
             "num_threads: 1\nsteps: 1\nbatch_size: 2\neval: {at_start: no}\ntrainer: classify\n"
             "data: {images: {path: set.jsonl}, held_out_fraction: 0}\n"
             "model: {num_layers: 1, d_model: 16, num_heads: 2, mask: full, norm: layer_norm,\n"
             "  position: learned, mlp: gelu, bias: yes, image_size: 4, patch_size: 2}\n");
  const std::string run = dir_.path("run"), file = dir_.path("x.png");
  const Output trained = run_cohort({"train", dir_.path("run.yaml"), "output_dir=" + run});
  ASSERT_EQ(trained.code, 0) << trained.err;
  write_file(file, PngFile{1, 1, 8, 0}.bytes({"\7"}));
  const std::string object = str("{\"image\": \"", uri, "\", \"id\": 7}");
  const auto out = lines({"classify", run, "--json-input"},
                         str("\"", file, "\"\n", object, "\n\"", uri, "\"\n"));
  ASSERT_EQ(out.size(), 3u);
  EXPECT_EQ(out[1].at("id").as_int(), 7);
  EXPECT_EQ(out[1].at("image").as_string(), uri);
  const auto plain = lines({"classify", run, uri});
  ASSERT_EQ(plain.size(), 1u);
  for (const Json& line : {out[1], out[2], plain[0]})
    EXPECT_EQ(line.at("probabilities").dump(), out[0].at("probabilities").dump());
  EXPECT_NE(out[0].at("probabilities").find("1.50"), nullptr) << out[0].dump();
  for (const auto& [line, message] :
       {std::pair{"{\"image\": \"data:image/png;base64,iV*=\"}",
                  "the data URI is not base64; hint: data:image/png;base64,iVBOR..."},
        {"\"data:image/png,abc\"", "the data URI is not base64; hint: "},
        {"\"data:image/png;base64,\"", "the data URI: is neither PNG nor JPEG"},
        {"\"data:image/png;base64,R0lGODlh\"", "the data URI: is neither PNG nor JPEG"},
        {"\"data:image/png;base64,iVBORw0KGgo=\"", "the data URI: is a damaged or truncated PNG"},
        {"\"data:\"", "the data URI"},
        {"{\"image\": 3}", "expected text"}})
    expect_bad_input(run_cohort({"classify", run, "--json-input"}, str(object, "\n", line, "\n")),
                     {"text 2: ", message});
}

TEST_F(EncodeCommands, EmbedHasTheSameBitsInAnyOrderAndThreads) {
  const std::string model = make(HeadType::kPooler);
  std::vector<std::string> texts;
  for (int i = 0; i < 400; ++i) {  // several batches
    std::string text = i % 3 == 0 ? "a" : "é";
    for (int n = 0; n < i % 5; ++n) text += (i >> n) % 2 == 0 ? " ab" : " c";
    texts.push_back(text);
  }
  std::string forwards, backwards;
  for (const std::string& text : texts) {
    forwards += text + "\n";
    backwards = text + "\n" + backwards;
  }
  setenv("COHORT_NUM_THREADS", "3", 1);
  const auto out = lines({"embed", model}, forwards);
  setenv("COHORT_NUM_THREADS", "1", 1);
  const auto reversed = lines({"embed", model}, backwards);
  unsetenv("COHORT_NUM_THREADS");
  ASSERT_EQ(out.size(), texts.size());
  ASSERT_EQ(reversed.size(), texts.size());
  for (size_t i = 0; i < texts.size(); ++i) {
    EXPECT_EQ(out[i].at("text").as_string(), texts[i]);
    EXPECT_EQ(out[i].dump(), reversed[texts.size() - 1 - i].dump());
    if (i % 100 == 0) {
      EXPECT_EQ(lines({"embed", model, texts[i]})[0].dump(), out[i].dump());
    }
  }
}

TEST_F(EncodeCommands, EmbedPoolsAsAsked) {
  const std::string encoder = make(HeadType::kMaskedToken);
  const TokenSequence text = sequence({2, 5, 7, 3});
  const auto embed_with = [&](const std::vector<std::string>& options) {
    std::vector<std::string> arguments{"embed", encoder, "ab"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    return floats(lines(arguments)[0].at("embedding"));
  };
  EXPECT_EQ(embed_with({}), embedding(text, Pooling::kMean));
  EXPECT_EQ(embed_with({"--pooling", "mean", "--no-normalize"}),
            embedding(text, Pooling::kMean, Scale::kRaw));
  EXPECT_EQ(embed_with({"--pooling", "cls"}), embedding(text, Pooling::kCls));
  EXPECT_EQ(embed_with({"--pooling", "last"}), embedding(text, Pooling::kLast));
  const std::string decoder = make(HeadType::kNextToken);
  EXPECT_EQ(floats(lines({"embed", decoder, "ab"})[0].at("embedding")),
            embedding(sequence({'a', 'b'}), Pooling::kLast));
}

TEST_F(EncodeCommands, EmbedFollowsAFolderOfSentenceTransformers) {
  const std::string model = make(HeadType::kPooler);
  write_file(model + "/modules.json",
             R"([{"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
                 {"path": "1_Pooling",
                  "type": "sentence_transformers.sentence_transformer.modules.pooling.Pooling"}])");
  std::filesystem::create_directories(model + "/1_Pooling");
  write_file(model + "/1_Pooling/config.json",
             R"({"embedding_dimension": 16, "pooling_mode": "cls"})");
  write_file(model + "/sentence_bert_config.json", R"({"max_seq_length": 5})");
  write_file(model + "/config_sentence_transformers.json", R"({"prompts": {"query": "c "}})");
  const auto expected = [&](const std::vector<int32_t>& ids) {
    return embedding(sequence(ids), Pooling::kCls, Scale::kRaw);
  };
  EXPECT_EQ(floats(lines({"embed", model, "a b"})[0].at("embedding")), expected({2, 5, 6, 3}));
  const auto prompted = lines({"embed", model, "a b", "--prompt", "query", "--pooling", "mean"});
  EXPECT_EQ(prompted[0].at("text").as_string(), "a b");
  EXPECT_EQ(floats(prompted[0].at("embedding")),
            embedding(sequence({2, 8, 5, 6, 3}), Pooling::kMean, Scale::kRaw));
  // The end is cut, not the last special token.
  const auto cut = lines({"embed", model}, "a\na b c a b\nb a b c a b\n",
                         "cohort: text 2 is cut to 5 tokens; others are without a note\n");
  EXPECT_EQ(floats(cut[1].at("embedding")), expected({2, 5, 6, 8, 3}));
  EXPECT_EQ(floats(cut[2].at("embedding")), expected({2, 6, 5, 6, 3}));
  expect_bad_input(run_cohort({"embed", model, "a", "--prompt", "quer"}),
                   {": prompt: ", "has no prompt 'quer'; hint: its prompts are {\"query\":"});
  // A module in a folder of its own.
  std::filesystem::rename(model, dir_.path("inner"));
  std::filesystem::create_directories(model);
  std::filesystem::rename(dir_.path("inner"), model + "/0_Transformer");
  std::filesystem::rename(model + "/0_Transformer/1_Pooling", model + "/1_Pooling");
  write_file(model + "/1_Pooling/config.json", R"({"pooling_mode": "cls"})");
  write_file(model + "/modules.json",
             R"([{"path": "0_Transformer", "type": "sentence_transformers.models.Transformer"},
                 {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}])");
  EXPECT_EQ(floats(lines({"embed", model, "a b"})[0].at("embedding")), expected({2, 5, 6, 3}));
}

TEST_F(EncodeCommands, EmbedWritesNumPysFormat) {
  const std::string model = make(HeadType::kPooler), path = dir_.path("out.npy");
  const auto out = lines({"embed", model}, "a\nb c\nab\n");
  EXPECT_TRUE(lines({"embed", model, "--output", path}, "a\nb c\nab\n").empty());
  const std::string file = read_file(path);
  ASSERT_EQ(file.size(), 128u + 3 * 16 * 4);
  EXPECT_EQ(file.substr(0, 10), std::string("\x93NUMPY\x01\x00\x76\x00", 10));
  EXPECT_EQ(file.substr(10, 61), "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 16), } ");
  EXPECT_EQ(file.substr(126, 2), " \n");
  std::vector<float> rows(48);
  std::memcpy(rows.data(), file.data() + 128, 192);
  for (size_t i = 0; i < 3; ++i)
    EXPECT_EQ(std::vector<float>(rows.begin() + static_cast<int64_t>(i) * 16,
                                 rows.begin() + static_cast<int64_t>(i + 1) * 16),
              floats(out[i].at("embedding")));
  EXPECT_TRUE(lines({"embed", model, "--output", path}).empty());
  EXPECT_NE(read_file(path).find("'shape': (0, 16)"), std::string::npos);
  // A failure leaves the file as it was.
  const std::string before = read_file(path);
  EXPECT_EQ(run_cohort({"embed", model, "--output", path}, "a\n\xff\n").code, 2);
  EXPECT_EQ(read_file(path), before);
  EXPECT_EQ(run_cohort({"embed", model, "a", "--output", dir_.path()}).code, 1);
}

TEST_F(EncodeCommands, TextsAreAnsweredInBlocks) {
  const std::string model = make(HeadType::kClasses);
  std::string input;
  constexpr size_t kTexts = 30000;  // more than one block
  for (size_t i = 0; i < kTexts; ++i) input += i % 2 == 0 ? "a b\n" : "c\n";
  const auto out = lines({"classify", model}, input);
  ASSERT_EQ(out.size(), kTexts);
  for (size_t i = 2; i < out.size(); ++i) ASSERT_EQ(out[i].dump(), out[i - 2].dump());
  // A bad text of a later block has its number among all; earlier blocks are answered.
  const Output failed = run_cohort({"classify", model}, input + "\xff\n");
  EXPECT_EQ(failed.code, 2);
  EXPECT_NE(failed.err.find("text 30001: "), std::string::npos) << failed.err;
  EXPECT_GT(json_lines_of(failed.out).size(), 10000u);
}

TEST_F(EncodeCommands, LongTextsAreCutAndEmptyOnesHaveTheSpecialTokens) {
  const std::string model = make(HeadType::kClasses);
  std::string text = "a";
  for (int i = 0; i < 40; ++i) text += " b";
  const auto out = lines({"classify", model, text, "a b b b b b b b b b", ""}, "",
                         "cohort: text 1 is cut to 12 tokens; others are without a note\n");
  ASSERT_EQ(out.size(), 3u);
  EXPECT_EQ(out[0].at("probabilities").dump(), out[1].at("probabilities").dump());
  const std::string decoder = make(HeadType::kNextToken);
  expect_bad_input(run_cohort({"embed", decoder, "a", ""}), {"text 2: has no tokens; hint: "});
}

TEST_F(EncodeCommands, WhatAModelCannotDoIsRefused) {
  const std::string masked = make(HeadType::kMaskedToken), classes = make(HeadType::kClasses),
                    decoder = make(HeadType::kNextToken);
  for (const std::string& model : {classes, decoder})
    expect_bad_input(run_cohort({"fill-mask", model, "a"}),
                     {model, "no head for masked tokens; hint: trainer mlm", "cohort generate"});
  for (const std::string& model : {masked, decoder})
    expect_bad_input(run_cohort({"classify", model, "a"}),
                     {model, "no head for classes; hint: trainer classify"});
  for (const std::string& model : {masked, classes})
    expect_bad_input(run_cohort({"chat", model}), {"is an encoder", "hint: cohort fill-mask"});
  expect_bad_input(run_cohort({"fill-mask", masked, "a [MASK]", "a [mask]"}),
                   {"text 2: has no mask token in its 6 tokens; hint: write [MASK] where"});
  expect_bad_input(run_cohort({"fill-mask", masked, "[MASK] \xff"}), {"text 1: ", "UTF-8"});
  for (const char* top : {"0", "-1", "1001", "99999999999999999999", "x"})
    expect_bad_input(run_cohort({"fill-mask", masked, "[MASK]", "--top", top}), {"--top"});
  write_file(masked + "/vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\nm\na\nb\n##b\nc\n<d>\né\n");
  expect_bad_input(run_cohort({"fill-mask", masked, "a"}), {"mask"});
  expect_bad_input(run_cohort({"embed", masked, "a", "--pooling", "max"}), {"--pooling"});
  for (const auto& [line, message] :
       {std::pair{"3", "expected text"},
        {"{\"text\": 3}", "expected text"},
        {"{\"text_pair\": \"a\"}", "text"},
        {"[\"a\"]", "expected text"},
        {"{\"text\": \"a\", \"pair\": \"b\"}", "pair: a second text is called text_pair"},
        {"a", "not valid JSON"}})
    expect_bad_input(run_cohort({"classify", classes, "--json-input"}, str("\"a\"\n", line, "\n")),
                     {"text 2: ", message});
}

TEST_F(EncodeCommands, WhatIsNotFiniteIsAnError) {
  for (const HeadType head : {HeadType::kMaskedToken, HeadType::kClasses}) {
    const std::string model = make(head, std::numeric_limits<float>::max());
    for (const char* command : {"embed", head == HeadType::kClasses ? "classify" : "fill-mask"}) {
      const Output output = run_cohort({command, model, "a [MASK]"});
      EXPECT_EQ(output.code, 1) << output.out;
      EXPECT_TRUE(output.out.empty());
      EXPECT_NE(output.err.find("text 1: what the weights of " + model + " compute is not finite"),
                std::string::npos)
          << output.err;
    }
  }
}

}  // namespace
}  // namespace cohort::test
