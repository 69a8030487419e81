#include "text/tokenizers/added_tokens.h"

#include <algorithm>

#include "text/tokenizers/json_fields.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace cohort {
namespace {

bool is_word(std::string_view text, size_t at) {
  return has_class(decode_utf8(text, at).code, kWordCharacter);
}

bool is_whole_word(std::string_view text, const Match& match) {
  return (match.begin == 0 || !is_word(text, last_utf8_begin(text, match.begin))) &&
         (match.end == text.size() || !is_word(text, match.end));
}

// Offset of the white space that ends at `end`; at least `from`.
size_t space_begin(std::string_view text, size_t from, size_t end) {
  while (end > from) {
    const size_t before = last_utf8_begin(text, end);
    if (!has_class(decode_utf8(text, before).code, kWhiteSpace)) break;
    end = before;
  }
  return std::max(end, from);
}

size_t space_end(std::string_view text, size_t at) {
  while (at < text.size()) {
    const Utf8Char c = decode_utf8(text, at);
    if (!has_class(c.code, kWhiteSpace)) break;
    at += c.size;
  }
  return at;
}

}  // namespace

AddedToken read_added_token(const Json& json, int64_t id) {
  AddedToken token;
  token.content = json.at("content").as_string();
  token.id = id;
  token.single_word = flag(json, "single_word", false);
  token.lstrip = flag(json, "lstrip", false);
  token.rstrip = flag(json, "rstrip", false);
  token.special = flag(json, "special", false);
  token.normalized = flag(json, "normalized", !token.special);
  return token;
}

AddedTokens::AddedTokens(std::vector<AddedToken> tokens, const Normalizer& normalizer)
    : tokens_(std::move(tokens)) {
  size_t bytes = 0;
  for (const AddedToken& token : tokens_) bytes += token.content.size();
  Work work(bytes);
  std::vector<std::string> raw, normalized;
  for (size_t i = 0; i < tokens_.size(); ++i) {
    Set& set = tokens_[i].normalized ? normalized_ : raw_;
    std::string content = tokens_[i].content;
    if (tokens_[i].normalized && normalizer) normalizer(content, work);
    (tokens_[i].normalized ? normalized : raw).push_back(content);
    texts_.push_back(std::move(content));
    set.tokens.push_back(i);
  }
  raw_.matcher = LeftmostLongest(raw);
  normalized_.matcher = LeftmostLongest(normalized);
}

void AddedTokens::find(const Set& set, std::string_view text, const Sink& sink) const {
  size_t done = 0, space_checked = 0;  // rstrip has searched for white space up to space_checked
  for (const Match& match : set.matcher.find_all(text)) {
    const AddedToken& token = tokens_[set.tokens[static_cast<size_t>(match.text)]];
    if (token.single_word && !is_whole_word(text, match)) continue;
    size_t begin = match.begin, end = match.end;
    if (token.lstrip) begin = std::max(space_begin(text, done, begin), done);
    if (token.rstrip)
      end = space_checked = std::max(space_end(text, std::max(end, space_checked)), end);
    if (done < begin) sink(done, begin, nullptr);
    sink(begin, end, &token);
    done = end;
  }
  if (done < text.size()) sink(done, text.size(), nullptr);
}

}  // namespace cohort
