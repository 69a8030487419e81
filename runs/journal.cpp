#include "runs/journal.h"

#include <zlib.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "core/log.h"
#include "kernels/weight_hash.h"
#include "sys/files.h"

namespace cohort {
namespace {

constexpr int kVersion = 1;

// ---- The format: one function for each struct, which writes it or reads it

class Writer {
 public:
  void bytes(const void* data, size_t size) {
    if (size > 0) out.append(static_cast<const char*>(data), size);
  }
  size_t count(uint64_t n, size_t) {
    bytes(&n, sizeof n);
    return n;
  }
  std::string out;
};

class Reader {
 public:
  explicit Reader(std::string_view in) : in_(in) {}
  void bytes(void* data, size_t size) {
    if (size > in_.size()) throw InputError("a number of elements is too large");
    if (size > 0) std::memcpy(data, in_.data(), size);
    in_.remove_prefix(size);
  }
  size_t count(uint64_t, size_t element_size) {
    uint64_t n = 0;
    bytes(&n, sizeof n);
    if (n > in_.size() / element_size) throw InputError("a number of elements is too large");
    return n;
  }
  bool at_end() const { return in_.empty(); }

 private:
  std::string_view in_;
};

template <class Archive, class... Fields>
void visit_all(Archive& archive, Fields&... fields);

template <class Archive>
void visit(Archive& archive, RecordedReply& r) {
  visit_all(archive, r.tokens, r.done, r.reward, r.error, r.messages);
}

// Log-probs are f32 where that keeps every bit.
template <class Archive>
void visit_logprobs(Archive& archive, std::vector<double>& values) {
  std::vector<float> narrow;
  uint8_t is_narrow = 1;
  for (const double x : values) {
    narrow.push_back(static_cast<float>(x));
    is_narrow &= std::bit_cast<uint64_t>(double{narrow.back()}) == std::bit_cast<uint64_t>(x);
  }
  visit_all(archive, is_narrow);
  if (is_narrow == 0) return visit_all(archive, values);
  visit_all(archive, narrow);
  values.assign(narrow.begin(), narrow.end());
}

template <class Archive>
void visit(Archive& archive, RecordedCompletion& c) {
  visit_all(archive, c.index, c.prompt_length, c.stop_reason, c.tokens, c.loss_mask);
  visit_logprobs(archive, c.logprobs);
  visit_all(archive, c.replies, c.rewards, c.total, c.advantage);
}

template <class Archive>
void visit(Archive& archive, StepRecord& r) {
  visit_all(archive, r.step, r.rank, r.ranks, r.planned_steps, r.learning_rate, r.beta,
            r.weights_before, r.weights_after, r.completions);
}

template <class Archive, class Field>
void visit_field(Archive& archive, Field& field) {
  if constexpr (std::is_arithmetic_v<Field>) {
    archive.bytes(&field, sizeof field);
  } else if constexpr (requires { field.resize(0); }) {
    using Element = typename Field::value_type;
    constexpr bool kPlain = std::is_arithmetic_v<Element>;
    field.resize(archive.count(field.size(), kPlain ? sizeof(Element) : 1));
    if constexpr (kPlain)
      archive.bytes(field.data(), field.size() * sizeof(Element));
    else
      for (Element& each : field) visit(archive, each);
  } else {
    visit(archive, field);
  }
}

template <class Archive, class... Fields>
void visit_all(Archive& archive, Fields&... fields) {
  (visit_field(archive, fields), ...);
}

std::string header_of(size_t bytes, size_t compressed) {
  return str("cohort-journal ", kVersion, " ", bytes, " ", compressed, " ");
}

// Returns what is wrong with a file; empty: `record` is its content.
std::string decode(std::string_view text, StepRecord& record) {
  constexpr size_t kDigits = 16;
  constexpr size_t kMaxRatio = 1100;  // decompressed to compressed, of zlib
  const size_t line = std::min(text.find('\n'), text.size());
  if (line == text.size() || line < kDigits) return "it is no journal, or truncated";
  const std::string_view head = text.substr(0, line - kDigits), body = text.substr(line + 1);
  if (text.substr(line - kDigits, kDigits) != hex(checksum(body, checksum(head))))
    return "its checksum does not match";
  int version = 0;
  unsigned long bytes = 0, compressed = 0;
  std::sscanf(std::string(head).c_str(), "cohort-journal %d %lu %lu", &version, &bytes,
              &compressed);
  if (version != kVersion) return str("it has version ", version, ", expected ", kVersion);
  if (head != header_of(bytes, compressed) || compressed != body.size() ||
      bytes / kMaxRatio > compressed)
    return "its sizes are wrong";
  std::string raw(bytes, '\0');
  if (uncompress(reinterpret_cast<Bytef*>(raw.data()), &bytes,
                 reinterpret_cast<const Bytef*>(body.data()), compressed) != Z_OK ||
      bytes != raw.size())
    return "zlib cannot decompress it";
  Reader reader(raw);
  try {
    visit(reader, record);
  } catch (const InputError& e) {
    return e.what();
  }
  return reader.at_end() ? "" : "it has more than a step";
}

// The step and the rank of a file name (-1: the only rank); false for any other name.
bool parse_name(const std::string& name, int64_t& step, int64_t& rank) {
  long long number = 0, suffix = -1;
  if (std::sscanf(name.c_str(), "step-%lld.rank-%lld", &number, &suffix) < 1) return false;
  step = number;
  rank = suffix;
  return "/" + name == journal_path("", step, std::max<int64_t>(rank, 0), rank < 0 ? 1 : 2);
}

}  // namespace

const RecordedCompletion* StepRecord::find(int64_t index) const {
  const auto at = std::ranges::lower_bound(completions, index, {}, &RecordedCompletion::index);
  return at != completions.end() && at->index == index ? &*at : nullptr;
}

uint64_t weights_hash(const Transformer& model) {
  std::vector<Tensor> weights;
  for (const NamedParameter& p : model.parameters())
    if (p.trained()) weights.push_back(p.value);
  Tensor hash = Tensor::empty({1}, DType::kI64, model.device());
  kernels::weight_hash(hash, weights);
  return static_cast<uint64_t>(hash.to_vector<int64_t>()[0]);
}

std::string journal_path(const std::string& dir, int64_t step, int64_t rank, int64_t ranks) {
  char name[64];
  std::snprintf(name, sizeof name, "/step-%08lld", static_cast<long long>(step));
  return ranks == 1 ? dir + name : str(dir, name, ".rank-", rank);
}

std::map<int64_t, int64_t> list_journal(const std::string& dir) {
  std::map<int64_t, std::pair<int64_t, int64_t>> found;  // files, and the largest rank plus one
  for (const std::string& name : list_directory(dir)) {
    int64_t step = 0, rank = 0;
    if (!parse_name(name, step, rank)) continue;
    auto& [files, ranks] = found[step];
    ++files;
    ranks = std::max({ranks, rank + 1, int64_t{1}});
  }
  std::map<int64_t, int64_t> out;
  for (const auto& [step, counts] : found)
    if (counts.first == counts.second) out[step] = counts.second;
  return out;
}

std::string encode_record(StepRecord record) {
  Writer writer;
  visit(writer, record);
  uLongf size = compressBound(writer.out.size());
  std::string body(size, '\0');
  const int code =
      compress2(reinterpret_cast<Bytef*>(body.data()), &size,
                reinterpret_cast<const Bytef*>(writer.out.data()), writer.out.size(), 1);
  COHORT_CHECK(code == Z_OK, "[journal] zlib failed with code ", code);
  body.resize(size);
  const std::string header = header_of(writer.out.size(), body.size());
  return header + hex(checksum(body, checksum(header))) + "\n" + body;
}

StepRecord read_record(const std::string& path) {
  StepRecord record;
  if (const std::string why = decode(read_text_file(path), record); !why.empty())
    throw InputError(str(path, ": the journal of this step is damaged: ", why));
  return record;
}

std::vector<EnvironmentReply> RecordingEnvironment::poll(bool wait) {
  std::vector<EnvironmentReply> out = inner_.poll(wait);
  for (const EnvironmentReply& r : out)
    replies_[r.index].push_back({r.tokens, r.done, r.reward, r.error, r.messages.dump()});
  return out;
}

void ReplayedEnvironment::submit(const Example&, const Trajectory& trajectory, int64_t) {
  if (std::exchange(step_, record_.step) != record_.step) turns_.clear();
  EnvironmentReply& reply = ready_.emplace_back();
  reply.index = trajectory.index;
  const RecordedCompletion* recorded = record_.find(trajectory.index);
  const size_t turn = turns_[trajectory.index]++, length = trajectory.tokens.size();
  if (recorded == nullptr || turn >= recorded->replies.size() || length > recorded->tokens.size() ||
      !std::equal(trajectory.tokens.begin(), trajectory.tokens.end(), recorded->tokens.begin())) {
    reply.done = true;
    reply.error = str("turn ", turn + 1, " is not the recorded one");
    return;
  }
  const RecordedReply& r = recorded->replies[turn];
  reply.tokens = r.tokens;
  reply.done = r.done != 0;
  reply.reward = r.reward;
  reply.error = r.error;
  reply.messages = parse_json(r.messages, "messages of the journal");
}

std::vector<EnvironmentReply> ReplayedEnvironment::poll(bool) {
  return std::exchange(ready_, {});
}

Journal::Journal(std::string dir, int64_t bytes, const Communicator& comm, int64_t step)
    : dir_(std::move(dir)), bytes_(bytes), rank_(comm.rank()), ranks_(comm.size()) {
  guard([&] {
    make_directory(dir_);
    for (const std::string& name : list_directory(dir_)) {
      int64_t of = 0, rank = 0;
      if (!parse_name(name, of, rank)) continue;
      const std::string path = dir_ + "/" + name;
      if (of > step && rank_ == 0)
        std::filesystem::remove(path);
      else if (of <= step && std::max<int64_t>(rank, 0) == rank_)
        sizes_[of] = std::max<int64_t>(0, readable_size(path));
    }
  });
}

Environment* Journal::wrap(Environment* inner) {
  return inner == nullptr ? nullptr : &environment_.emplace(*inner, replies_);
}

void Journal::begin(const GrpoStep& step) {
  if (!weights_) weights_ = weights_hash(step.learner.model());
  record_ = {.step = step.step + 1,
             .rank = rank_,
             .ranks = ranks_,
             .planned_steps = step.config.batch.steps,
             .learning_rate = step.learning_rate,
             .beta = step.config.grpo.beta,
             .weights_before = *weights_,
             .completions = {}};
  sampled_.clear();
}

void Journal::add(std::span<const Trajectory> completions, RewardSet::Scores& scores) {
  for (size_t i = 0; i < completions.size(); ++i) {
    const Trajectory& t = completions[i];
    RecordedCompletion& c = record_.completions.emplace_back();
    c = {.index = t.index,
         .prompt_length = t.prompt_length,
         .stop_reason = static_cast<uint8_t>(t.stop_reason),
         .tokens = t.tokens,
         .loss_mask = t.loss_mask,
         .logprobs = t.logprobs,
         .replies = std::move(replies_[t.index]),
         .rewards = {},
         .total = scores.total[i]};
    for (const std::vector<double>& each : scores.each) c.rewards.push_back(each[i]);
  }
  replies_.clear();
}

void Journal::end(const GrpoStep& step, const ScoredRollouts& rollouts) {
  for (size_t i = 0; i < rollouts.trajectories.size(); ++i) {
    const int64_t place = rollouts.trajectories[i].index;
    const auto sampled = sampled_.find(place);
    const auto* found = record_.find(sampled == sampled_.end() ? place : sampled->second);
    record_.completions[static_cast<size_t>(found - record_.completions.data())].advantage =
        rollouts.advantages[i];
  }
  weights_ = record_.weights_after = weights_hash(step.learner.model());
  flush();
  guard([&] {
    pending_ =
        std::async(std::launch::async, [this, record = std::move(record_)]() { write(record); });
  });
}

void Journal::flush() {
  if (!pending_.valid()) return;
  guard([&] {
    pending_.get();
    failing_ = false;
  });
}

// The first of several failures in a row is a warning.
void Journal::guard(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& e) {
    if (!std::exchange(failing_, true))
      logging::warn("journal: ", e.what(),
                    "; the run continues, and such steps cannot be replayed; hint: journal_mb=0 "
                    "writes no journal");
  }
}

void Journal::write(const StepRecord& record) {
  const std::string text = encode_record(record);
  replace_file(journal_path(dir_, record.step, rank_, ranks_), text);
  sizes_[record.step] = static_cast<int64_t>(text.size());
  int64_t total = 0;
  for (const auto& [step, size] : sizes_) total += size;
  while (total > bytes_ && sizes_.size() > 1) {
    const auto [step, size] = *sizes_.begin();
    for (const int64_t ranks : {int64_t{1}, int64_t{2}})  // both names
      std::filesystem::remove(journal_path(dir_, step, rank_, ranks));
    total -= size;
    sizes_.erase(sizes_.begin());
  }
}

}  // namespace cohort
