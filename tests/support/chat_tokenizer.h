// A tokenizer with a chat template, for tests of conversations.
#pragma once

#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/test_util.h"
#include "text/json.h"
#include "text/tokenizer.h"

namespace cohort::test {

// The files of a tokenizer of printable ASCII with the turns' tokens, and a template of turns.
inline NamedFiles chat_files(const std::string& chat_template) {
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
  return {{"tokenizer.json", json.dump()}, {"tokenizer_config.json", config.dump()}};
}
inline std::unique_ptr<Tokenizer> chat_tokenizer(const std::string& chat_template) {
  return make_tokenizer(chat_files(chat_template), "test");
}

// A tokenizer of bytes and special tokens: `stops`, separated by blanks, which end a text, and the
// texts of `variables`, which are the template's.
inline std::unique_ptr<Tokenizer> make_chat_tokenizer(const std::string& source,
                                                      const std::string& stops,
                                                      const Json& variables = Json::Object{}) {
  NamedFiles files = make_byte_tokenizer()->files();
  Json json = parse_json(files[0].second, "tokenizer.json"), ids = Json::Array{};
  Json config = parse_json(files[1].second, "tokenizer_config.json");
  std::string specials = stops;
  for (const auto& [name, token] : variables.as_object()) {
    config.set(name, token);
    if (stops.find(token.as_string()) == stops.npos) specials += " " + token.as_string();
  }
  std::istringstream words(specials);
  int64_t id = 256;
  for (std::string word; words >> word;) {
    json["added_tokens"].push_back(
        Json().set("id", ++id).set("content", word).set("special", true));
    if (stops.find(word) != stops.npos) ids.push_back(id);
  }
  config.set("chat_template", source);
  return make_tokenizer(
      {{"tokenizer.json", json.dump()},
       {"tokenizer_config.json", config.dump()},
       {"generation_config.json", Json().set("eos_token_id", std::move(ids)).dump()}},
      "test");
}

// The source of a template of the data in `dir`, by the name of its file without .jinja.
inline std::string real_template(const std::string& dir, const std::string& name) {
  const std::string path = dir + "/chat_templates/jinja2_rendered.json";
  const Json data = parse_json(read_file(path), path);
  for (const Json& t : data.at("templates").as_array())
    if (t.at("template_file").as_string() == name + ".jinja") return t.at("template").as_string();
  throw InputError("no template " + name);
}

inline constexpr const char* kTurns =
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}";
inline constexpr const char* kMarked =
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}";

}  // namespace cohort::test
