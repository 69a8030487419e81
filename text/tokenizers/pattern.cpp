#include "text/tokenizers/pattern.h"

namespace cohort {

Pattern::Pattern(const Json& json) {
  if (const Json* text = json.find("String")) {
    text_ = text->as_string();
  } else {
    regex_text_ = json.at("Regex").as_string();
    regex_.emplace(regex_text_, Regex::Classes::kUnicode);
  }
}

void Pattern::find_all(std::string_view text, Work& work,
                       const std::function<void(size_t, size_t)>& found) const {
  if (regex_) return regex_->find_all(text, work.regex_left, found);
  if (text_.empty()) return;
  for (size_t at = text.find(text_); at != text.npos; at = text.find(text_, at + text_.size()))
    found(at, at + text_.size());
}

std::string Pattern::replace_all(std::string_view text, std::string_view content,
                                 Work& work) const {
  std::string out;
  size_t from = 0;
  find_all(text, work, [&](size_t begin, size_t end) {
    work.charge(begin - from + content.size());
    out.append(text.substr(from, begin - from)).append(content);
    from = end;
  });
  return out.append(text.substr(from));
}

}  // namespace cohort
