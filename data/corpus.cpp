// Text files, their held-out split and the boundaries at which they may be split into pieces.
#include "data/corpus.h"

#include <glob.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <mutex>

#include "core/check.h"
#include "core/sizes.h"
#include "data/parallel_try.h"
#include "text/tokenizers/json_fields.h"
#include "text/utf8.h"

namespace cohort {
namespace {

constexpr int64_t kPiece = 256 << 10;  // bytes
// Bytes searched for a boundary, and bytes of context compared on each side of it.
constexpr int64_t kSearched = 16 << 10, kContext = 512;
// Every kForcedBoundary-th boundary is used even if it changes tokens.
constexpr int64_t kForcedBoundary = 256;

bool is_jsonl(const std::string& file) {
  return file.ends_with(".jsonl");
}

// Start of the first line that begins in [from, to); -1 if there is none.
int64_t find_line(const InputFile& file, int64_t from, int64_t to) {
  for (int64_t at = from - 1; at + 1 < to; at += kSearched) {
    const std::string text = file.read(at, std::min(at + kSearched, to - 1));
    if (const size_t end = text.find('\n'); end != text.npos)
      return at + static_cast<int64_t>(end) + 1;
  }
  return -1;
}

bool is_space(char c) {
  return c == ' ' || (c >= '\t' && c <= '\r');
}

// Candidate boundaries: between lines, before a single space, before any character. The likelier
// one to keep tokens unchanged comes first.
enum class Boundary { kLine, kSpace, kCharacter };

bool is_boundary(std::string_view text, size_t at, Boundary kind) {
  if (at < 2 || at + 1 >= text.size()) return false;
  if (kind == Boundary::kLine)
    return text[at - 1] == '\n' && !is_space(text[at - 2]) && !is_space(text[at]);
  if (kind == Boundary::kSpace)
    return text[at] == ' ' && !is_space(text[at - 1]) && !is_space(text[at + 1]);
  return next_utf8_boundary(text, at) == at;
}

// True if splitting the text at `at` leaves the tokens around it unchanged.
bool keeps_tokens(std::string_view text, size_t at, const Tokenizer& tokenizer) {
  const size_t context = kContext;
  const size_t begin = next_utf8_boundary(text, at - std::min(at, context));
  const size_t end = next_utf8_boundary(text, std::min(text.size(), at + context));
  try {
    std::vector<int32_t> parts = tokenizer.encode(text.substr(begin, at - begin));
    const std::vector<int32_t> second = tokenizer.encode(text.substr(at, end - at));
    parts.insert(parts.end(), second.begin(), second.end());
    return parts == tokenizer.encode(text.substr(begin, end - begin));
  } catch (const InputError&) {
    return true;  // encoding the piece reports the error
  }
}

// A boundary in [from, to) of a document that ends at `end`; -1 if there is none. Without a
// tokenizer the first candidate is taken.
int64_t find_boundary(const InputFile& file, int64_t from, int64_t to, int64_t end,
                      const Tokenizer* tokenizer) {
  constexpr int kTries = 4;
  const int64_t first = from - kContext;
  const std::string text = file.read(first, std::min(end, from + kSearched + kContext));
  const auto last = static_cast<size_t>(std::min(to - first, kContext + kSearched));
  for (const Boundary kind : {Boundary::kLine, Boundary::kSpace, Boundary::kCharacter}) {
    int tries = 0;
    for (size_t at = kContext; at < std::min(last, text.size()) && tries < kTries; ++at) {
      if (!is_boundary(text, at, kind)) continue;
      if (tokenizer == nullptr || keeps_tokens(text, at, *tokenizer))
        return first + static_cast<int64_t>(at);
      ++tries;
    }
  }
  return -1;
}

// 1-based number of the line that starts at byte `begin`.
int64_t line_number(const InputFile& file, int64_t begin) {
  int64_t lines = 1;
  for (int64_t at = 0; at < begin; at += kPiece) {
    const std::string text = file.read(at, std::min(begin, at + kPiece));
    lines += std::count(text.begin(), text.end(), '\n');
  }
  return lines;
}

std::string text_of_line(std::string_view line, const std::string& where) {
  const Json fields = parse_json(line, where);
  const std::string* text = fields.find_text("text");
  if (text == nullptr)
    throw InputError(str(where, ": expected an object with a text as the field 'text'"));
  return *text;
}

}  // namespace

std::vector<std::string> text_files(const std::string& path) {
  namespace fs = std::filesystem;
  std::vector<std::string> files;
  std::error_code error, ignored;
  if (fs::is_directory(path, ignored)) {
    fs::recursive_directory_iterator it(path, error);
    for (; !error && it != fs::end(it); it.increment(error)) {
      const bool hidden = it->path().filename().string().starts_with('.');
      if (hidden && it->is_directory(ignored)) it.disable_recursion_pending();
      if (!hidden && it->is_regular_file(ignored)) files.push_back(it->path().string());
    }
    if (error) throw InputError(str(path, ": cannot be read: ", error.message()));
    if (files.empty())
      throw InputError(
          str(path, ": there is no file in this folder; hint: remove it, or put files into it"));
  } else if (!fs::exists(path, ignored) && path.find_first_of("*?[") != path.npos) {
    glob_t found{};
    if (::glob(path.c_str(), 0, nullptr, &found) == 0)
      files.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    ::globfree(&found);
    if (files.empty()) throw InputError(str(path, ": no file matches this pattern"));
  } else {
    return {path};
  }
  std::sort(files.begin(), files.end());
  return files;
}

TextCorpus::TextCorpus(const std::vector<std::string>& files, double held_out_fraction)
    : has_document_ends_(files.size() > 1 || is_jsonl(files[0])) {
  COHORT_CHECK(!files.empty() && held_out_fraction >= 0 && held_out_fraction <= 1,
               "[text_corpus] expected files and a held-out fraction from 0 to 1, got ",
               held_out_fraction);
  int64_t size = 0;
  for (const std::string& file : files) {
    train_.push_back({.file = file, .end = InputFile(file).size()});
    size += train_.back().end;
    if (train_.back().end == 0) train_.pop_back();
  }
  const std::string where = files.size() == 1 ? files[0] : str(files[0], " and others");
  if (train_.empty())
    throw InputError(str(where, ": is empty; hint: name a file that holds the training text"));
  // Holds out the last files and the end of the file before them.
  const double boundary = std::floor(static_cast<double>(size) * (1 - held_out_fraction));
  int64_t rest = size - static_cast<int64_t>(boundary);
  while (!train_.empty() && rest >= train_.back().end) {
    rest -= train_.back().end;
    held_out_.push_back(std::move(train_.back()));
    train_.pop_back();
  }
  if (rest > 0) {
    TextSpan& last = train_.back();
    const InputFile file(last.file);
    const int64_t end = last.end;
    last.end -= rest;
    if (is_jsonl(last.file)) {
      const int64_t line = last.end == 0 ? 0 : find_line(file, last.end, end);
      last.end = line < 0 ? end : line;
    } else {
      constexpr int64_t kCharacter = 4;  // maximum UTF-8 bytes
      last.end += static_cast<int64_t>(
          next_utf8_boundary(file.read(last.end, std::min(end, last.end + kCharacter)), 0));
    }
    if (last.end < end) held_out_.push_back({last.file, last.end, end});
    if (last.end == 0) train_.pop_back();
  }
  std::reverse(held_out_.begin(), held_out_.end());
  if ((held_out_fraction < 1 && train_.empty()) || (held_out_fraction > 0 && held_out_.empty()))
    throw InputError(str(where, ": ", size, " bytes are too few to hold out ", held_out_fraction,
                         " of them; hint: use a longer text"));
}

void CharacterSet::add(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const Utf8Char c = decode_utf8(text, at);
    if (c.size == 0)
      throw InputError(str("byte ", at, " is not part of UTF-8 text; hint: convert the text to ",
                           "UTF-8, or use data.tokenizer: byte"));
    found_->set(c.code);
    at += c.size;
  }
}

std::string CharacterSet::text() const {
  std::string out;
  for (char32_t code = 0; code < found_->size(); ++code)
    if (found_->test(code)) out += encode_utf8(code);
  return out;
}

TextPieces::TextPieces(std::vector<TextSpan> spans) : spans_(std::move(spans)), first_pieces_{0} {
  for (const TextSpan& span : spans_) {
    first_pieces_.push_back(first_pieces_.back() + ceil_div(span.end - span.begin, kPiece));
    bytes_ += span.end - span.begin;
  }
}

// First byte of piece `index` of a span; -1 if the piece is merged into the one before it. A pure
// function of its arguments, so threads agree on boundaries without synchronisation.
int64_t TextPieces::piece_begin(const InputFile& file, const TextSpan& span, int64_t index,
                                const Tokenizer* tokenizer) const {
  const int64_t from = span.begin + index * kPiece;
  if (index == 0) return from;
  if (from >= span.end) return span.end;
  const int64_t to = std::min(from + kPiece, span.end);
  if (is_jsonl(span.file)) return find_line(file, from, to);
  return find_boundary(file, from, to, span.end,
                       index % kForcedBoundary == 0 ? nullptr : tokenizer);
}

void TextPieces::for_each_text(int64_t piece, const Tokenizer* tokenizer,
                               const UseText& use) const {
  const auto next = std::upper_bound(first_pieces_.begin(), first_pieces_.end(), piece);
  const auto owner = static_cast<size_t>(next - first_pieces_.begin()) - 1;
  const TextSpan& span = spans_[owner];
  const InputFile file(span.file);
  int64_t index = piece - first_pieces_[owner];
  const int64_t begin = piece_begin(file, span, index, tokenizer);
  if (begin < 0) return;
  int64_t end = -1;
  while (end < 0) end = piece_begin(file, span, ++index, tokenizer);
  const std::string text = file.read(begin, end);
  if (!is_jsonl(span.file)) {
    const std::string where = span.file + (begin > 0 ? str(": from byte ", begin, " on") : "");
    return with_path(where, [&] { use(text, end == span.end); });
  }
  for (size_t at = 0; at < text.size();) {
    const size_t line_end = std::min(text.find('\n', at), text.size());
    std::string_view line = std::string_view(text).substr(at, line_end - at);
    const auto byte = begin + static_cast<int64_t>(at);
    at = line_end + 1;
    if (byte == 0 && line.starts_with("\xEF\xBB\xBF")) line.remove_prefix(3);
    if (std::all_of(line.begin(), line.end(), is_space)) continue;
    const auto where = [&] { return str(span.file, ":", line_number(file, byte)); };
    std::string document;
    try {
      document = text_of_line(line, "");
    } catch (const InputError&) {
      text_of_line(line, where());  // throws the same error with its location
      throw;
    }
    try {
      if (!document.empty()) use(document, true);
    } catch (const InputError& e) {
      throw InputError(str(where(), ": ", e.what()));
    }
  }
}

std::vector<std::vector<int32_t>> TextPieces::encode(int64_t begin, int64_t end,
                                                     const Tokenizer& tokenizer,
                                                     std::optional<int32_t> document_end) const {
  std::vector<std::vector<int32_t>> tokens(static_cast<size_t>(end - begin));
  parallel_try(end - begin, 1, [&](int64_t i) {
    std::vector<int32_t>& out = tokens[static_cast<size_t>(i)];
    for_each_text(begin + i, &tokenizer, [&](std::string_view text, bool ends_document) {
      const std::vector<int32_t> ids = tokenizer.encode(text);
      out.insert(out.end(), ids.begin(), ids.end());
      if (ends_document && document_end) out.push_back(*document_end);
    });
  });
  return tokens;
}

std::string TextPieces::characters() const {
  CharacterSet found;
  std::mutex mutex;
  parallel_try(size(), 1, [&](int64_t i) {
    CharacterSet of_piece;
    for_each_text(i, nullptr, [&](std::string_view text, bool) { of_piece.add(text); });
    const std::lock_guard lock(mutex);
    found.add(of_piece);
  });
  return found.text();
}

}  // namespace cohort
