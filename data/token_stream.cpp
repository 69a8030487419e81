// Tokens in memory and in shards. A shard is a header and the tokens, 16 bits each if the
// vocabulary allows. Tokens are read with pread(): a mapping would count as resident memory, and a
// read error would end the process.
#include "data/token_stream.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <future>
#include <string_view>

#include "core/check.h"
#include "core/log.h"
#include "core/parallel.h"
#include "core/sizes.h"
#include "core/text.h"
#include "core/trace.h"
#include "sys/files.h"

namespace cohort {
namespace {

static_assert(std::endian::native == std::endian::little, "shards hold little-endian numbers");

constexpr int64_t kPiecesPerShard = 4096;  // about 1 GB of text
constexpr int64_t kChunk = 1 << 20;        // bytes of tokens per checksum step

struct Header {
  char magic[8] = {'c', 'o', 'h', 't', 'o', 'k', '0', '1'};
  uint64_t fingerprint = 0;  // checksum of the inputs of the tokens
  uint64_t count = 0;        // number of tokens
  uint64_t sum = 0;          // checksum() over chunks of kChunk bytes
};

std::string describe(DurableFile::Step step, const std::string& path, const std::string& reason) {
  return str(path, ": cannot be ", step == DurableFile::Step::kCreate ? "created" : "written", ": ",
             reason,
             "; hint: data.cache_dir names a folder with enough space for the tokens of the text");
}

// Writes a file that appears under its name only when complete.
class ShardWriter {
 public:
  ShardWriter(const std::string& path, uint64_t fingerprint, int64_t width)
      : width_(width), file_(path, describe) {
    header_.fingerprint = fingerprint;
    write_header();
  }

  void add(const std::vector<std::vector<int32_t>>& pieces) {
    for (const std::vector<int32_t>& tokens : pieces) {
      for (const int32_t& token : tokens)  // the low bytes come first
        waiting_.append(reinterpret_cast<const char*>(&token), static_cast<size_t>(width_));
      header_.count += tokens.size();
    }
    size_t done = 0;
    for (; waiting_.size() - done >= kChunk; done += kChunk) put(done, kChunk);
    waiting_.erase(0, done);
    file_.start_flush();
  }
  void finish() {
    if (!waiting_.empty()) put(0, waiting_.size());
    file_.rewind();
    write_header();
    file_.finish();
  }

 private:
  void write_header() { file_.write({reinterpret_cast<const char*>(&header_), sizeof header_}); }
  void put(size_t begin, size_t size) {
    const std::string_view bytes = std::string_view(waiting_).substr(begin, size);
    header_.sum = checksum(bytes, header_.sum);
    file_.write(bytes);
  }

  const int64_t width_;
  DurableFile file_;
  Header header_;
  std::string waiting_;
};

// Excludes other processes from writing the shards of a folder; waits for one that does.
FileLock lock_folder(const std::string& dir) {
  const std::string path = dir + "/.lock";
  FileLock lock(path);
  if (!lock.is_open())
    throw Error(str(path, ": cannot be created: ", system_reason(),
                    "; hint: data.cache_dir names a folder that you may write to"));
  if (lock.try_lock()) return lock;
  logging::info("waiting for another process that writes the tokens in ", dir);
  if (!lock.lock())
    throw Error(str(path, ": cannot be locked: ", system_reason(),
                    "; hint: data.cache_dir names a folder on a file system with locks"));
  return lock;
}

std::string cache_folder(const std::string& given) {
  if (!given.empty()) return given;
  const auto in = [](const char* name, const char* below) {
    const char* value = std::getenv(name);
    return value == nullptr || value[0] != '/' ? std::string() : std::string(value) + below;
  };
  std::string dir = in("XDG_CACHE_HOME", "/cohort");
  if (dir.empty()) dir = in("HOME", "/.cache/cohort");
  if (dir.empty())
    throw InputError("data.cache_dir: the tokens of the text need a folder; hint: name one");
  return dir;
}

uint64_t fingerprint_of(const std::vector<TextSpan>& text, const Tokenizer& tokenizer,
                        std::optional<int32_t> document_end, const std::string& text_checksum) {
  std::string all = str("tokens 1 ", text_checksum, " ", document_end.value_or(-1), "\n");
  for (const TextSpan& span : text)
    all += str(std::filesystem::path(span.file).filename().string(), " ", span.begin, " ", span.end,
               "\n");
  uint64_t sum = checksum(all);
  for (const auto& [name, content] : tokenizer.files())
    sum = checksum(content, checksum(name, sum));
  return sum;
}

}  // namespace

TokenStream::TokenStream(std::vector<int32_t> tokens) {
  const auto count = static_cast<int64_t>(tokens.size());
  add({.tokens = std::move(tokens)}, count);
}

void TokenStream::add(Part part, int64_t count) {
  if (count == 0) return;
  part.begin = size_;
  part.end = size_ += count;
  parts_.push_back(std::move(part));
}

void TokenStream::append(TokenStream other) {
  for (Part& part : other.parts_) add(std::move(part), part.end - part.begin);
}

std::vector<int32_t> TokenStream::read(int64_t begin, int64_t count) const {
  COHORT_CHECK(begin >= 0 && count >= 0 && begin + count <= size_,
               "[token_stream] expected a part of ", size_, " tokens, got ", count, " from ", begin,
               " on");
  std::vector<int32_t> out;
  out.reserve(static_cast<size_t>(count));
  for (const Part& part : parts_) {
    const int64_t first = std::max(begin, part.begin), last = std::min(begin + count, part.end);
    if (first >= last) continue;
    const int64_t from = first - part.begin, to = last - part.begin;
    if (part.file == nullptr) {
      out.insert(out.end(), part.tokens.begin() + from, part.tokens.begin() + to);
      continue;
    }
    constexpr int64_t kHeader = sizeof(Header);
    const std::string bytes =
        part.file->read(kHeader + from * part.width, kHeader + to * part.width);
    const auto width = static_cast<size_t>(part.width);
    for (size_t at = 0; at < bytes.size(); at += width) {
      int32_t token = 0;
      std::memcpy(&token, bytes.data() + at, width);
      if (token < 0 || token >= part.vocab_size)
        throw InputError(str(part.file->path(), ": is damaged: it has the token ", token, " of ",
                             part.vocab_size, "; hint: delete it and start again"));
      out.push_back(token);
    }
  }
  return out;
}

void TokenStream::will_read(int64_t begin, int64_t count) const {
  for (const Part& part : parts_) {
    const int64_t first = std::max(begin, part.begin), last = std::min(begin + count, part.end);
    if (first < last && part.file != nullptr)
      part.file->will_read((first - part.begin) * part.width, (last - part.begin) * part.width);
  }
}

// The files of one text in one folder.
class TokenShards {
 public:
  TokenShards(const TextPieces& pieces, const Tokenizer& tokenizer,
              std::optional<int32_t> document_end)
      : pieces_(pieces), tokenizer_(tokenizer), document_end_(document_end) {}

  TokenStream in_memory() const {
    std::vector<int32_t> tokens;
    encode(0, pieces_.size(), [&](auto parts) {
      for (const std::vector<int32_t>& part : parts)
        tokens.insert(tokens.end(), part.begin(), part.end());
    });
    return TokenStream(std::move(tokens));
  }

  TokenStream in_files(const std::string& dir, uint64_t fingerprint) {
    std::vector<TokenStream::Part> shards(
        static_cast<size_t>(ceil_div(pieces_.size(), kPiecesPerShard)));
    // A complete cache may be read-only: it needs no lock.
    bool complete = open_missing(shards, dir, fingerprint, Report::kNothing);
    for (int attempt = 1; !complete; ++attempt) {
      std::optional<FileLock> lock;
      bool made = false;
      try {
        make_directory(dir);
        made = true;
        lock = lock_folder(dir);
        complete = open_missing(shards, dir, fingerprint, Report::kDamage);
        for (size_t i = 0; !complete && i < shards.size(); ++i)
          if (shards[i].file == nullptr) shards[i] = make(shard_path(dir, i), fingerprint, i);
        complete = true;
      } catch (const Error&) {
        const bool removed = lock ? !lock->exists() : made && !path_exists(dir);
        if (attempt == kAttempts || !removed) throw;
        logging::warn(dir, ": was removed by another process, and is made again");
      }
    }
    TokenStream stream;
    for (TokenStream::Part& shard : shards) {
      const int64_t tokens = shard.end;
      stream.add(std::move(shard), tokens);
    }
    return stream;
  }

 private:
  int64_t width() const { return tokenizer_.vocab_size() <= 1 << 16 ? 2 : 4; }

  // Encodes pieces in order, in batches that keep all threads busy.
  template <class Use>
  void encode(int64_t begin, int64_t end, Use&& use) const {
    const int64_t batch = 16 * int64_t{num_threads()};
    for (int64_t at = begin; at < end; at += batch)
      use(pieces_.encode(at, std::min(end, at + batch), tokenizer_, document_end_));
  }

  enum class Report { kNothing, kDamage };

  static std::string shard_path(const std::string& dir, size_t index) {
    return str(dir, "/", padded(static_cast<int64_t>(index), 5), ".tokens");
  }

  // Opens the shards that are not open yet. Returns true if all of them are.
  bool open_missing(std::vector<TokenStream::Part>& shards, const std::string& dir,
                    uint64_t fingerprint, Report report) const {
    parallel_for(std::ssize(shards), 1, [&](int64_t begin, int64_t end) {
      for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i)
        if (shards[i].file == nullptr) shards[i] = open(shard_path(dir, i), fingerprint, report);
    });
    return std::ranges::none_of(shards, [](const auto& shard) { return shard.file == nullptr; });
  }

  // An empty part if the file does not exist or is not valid.
  TokenStream::Part open(const std::string& path, uint64_t fingerprint, Report report) const try {
    if (!path_exists(path)) return {};
    auto file = std::make_unique<InputFile>(path);
    Header header;
    const Header expected;
    const std::string bytes = file->read(0, sizeof header);
    std::memcpy(&header, bytes.data(), sizeof header);
    const auto count = static_cast<int64_t>(header.count);
    const bool known = std::memcmp(header.magic, expected.magic, sizeof header.magic) == 0 &&
                       header.fingerprint == fingerprint && count >= 0 &&
                       count <= file->size() / width() &&
                       file->size() == static_cast<int64_t>(sizeof header) + count * width();
    uint64_t sum = 0;
    for (int64_t at = sizeof header; known && at < file->size(); at += kChunk)
      sum = checksum(file->read(at, std::min(at + kChunk, file->size())), sum);
    if (!known || sum != header.sum) {
      if (report == Report::kDamage) logging::warn(path, ": is damaged and is written again");
      return {};
    }
    return {.file = std::move(file),
            .width = width(),
            .vocab_size = static_cast<int32_t>(tokenizer_.vocab_size()),
            .end = count};
  } catch (const std::exception& e) {
    if (report == Report::kDamage) logging::warn(e.what(), "; it is written again");
    return {};
  }

  TokenStream::Part make(const std::string& path, uint64_t fingerprint, size_t shard) {
    std::error_code ignored;  // the writer reports what cannot be replaced
    for (const char* end : {"", ".tmp"}) std::filesystem::remove(path + end, ignored);
    const int64_t begin = static_cast<int64_t>(shard) * kPiecesPerShard;
    const int64_t end = std::min(begin + kPiecesPerShard, pieces_.size());
    if (shard == 0) logging::info("the tokens of the text are cached as ", path);
    ShardWriter writer(path, fingerprint, width());
    int64_t done = begin;
    std::future<void> writing;  // the previous batch, while the next one is encoded
    encode(begin, end, [&](std::vector<std::vector<int32_t>> parts) {
      done += static_cast<int64_t>(parts.size());
      if (writing.valid()) writing.get();
      writing = std::async(std::launch::async,
                           [&writer, parts = std::move(parts)] { writer.add(parts); });
      if ((since_last_ += watch_.lap()) < kSecondsBetweenReports) return;
      since_last_ = 0;
      logging::info("writing tokens of ", mib(pieces_.bytes()),
                    " of text: ", 100 * done / pieces_.size(), " %");
    });
    if (writing.valid()) writing.get();
    writer.finish();
    TokenStream::Part part = open(path, fingerprint, Report::kNothing);
    if (part.file == nullptr)
      throw Error(str(path, ": does not hold what was written to it; hint: data.cache_dir names a ",
                      "folder on another disk"));
    return part;
  }

  static constexpr int kAttempts = 3;
  static constexpr double kSecondsBetweenReports = 10;
  const TextPieces& pieces_;
  const Tokenizer& tokenizer_;
  const std::optional<int32_t> document_end_;
  Stopwatch watch_;
  double since_last_ = 0;
};

TokenStream load_tokens(const std::vector<TextSpan>& text, const Tokenizer& tokenizer,
                        std::optional<int32_t> document_end, const TokenCache& cache) {
  const TextPieces pieces(text);
  TokenShards shards(pieces, tokenizer, document_end);
  if (cache.dir.empty() && pieces.bytes() <= kShortText) return shards.in_memory();
  const uint64_t fingerprint = fingerprint_of(text, tokenizer, document_end, cache.checksum);
  return shards.in_files(cache_folder(cache.dir) + "/" + hex(fingerprint), fingerprint);
}

}  // namespace cohort
