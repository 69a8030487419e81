#include "job/journal.h"

#include <zlib.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "core/log.h"
#include "sys/files.h"
#include "text/tokenizers/json_fields.h"

namespace cohort {
namespace {

// Appends the members of a record to a text, or sets them to those that a text begins with. Throws
// InputError if the text ends too soon.
class Archive {
 public:
  explicit Archive(std::string& out) : out_(&out) {}
  explicit Archive(std::string_view in) : in_(in) {}
  bool at_end() const { return in_.empty(); }

  void visit(StepRecord& r) {
    visit_all(r.step, r.plan, r.reward_names, r.learning_rate, r.beta, r.weights_before,
              r.weights_after, r.completions, r.advantages);
  }
  void visit(RecordedCompletion& c) {
    visit_all(c.index, c.prompt_length, c.stop_reason, c.tokens, c.loss_mask, c.logprobs, c.replies,
              c.rewards, c.total);
  }
  void visit(EnvironmentReply& r) {
    uint8_t done = r.done;
    // A beginning has messages and fields in an object.
    std::string messages = r.fields.is_null()
                               ? r.messages.dump()
                               : Json().set("messages", r.messages).set("fields", r.fields).dump();
    visit_all(r.tokens, done, r.reward, r.error, messages);
    r.done = done != 0;
    if (out_ != nullptr) return;
    r.messages = parse_json(messages, "messages");
    if (!r.messages.is_object()) return;
    r.fields = r.messages.at("fields").as_object();
    r.messages = Json(r.messages.at("messages"));
  }
  template <class Number>
  requires std::is_arithmetic_v<Number>
  void visit(Number& number) { visit_bytes(&number, sizeof number); }
  template <class List>
  requires requires(List list) { list.resize(0); }
  void visit(List& list) {
    using Element = typename List::value_type;
    constexpr bool kPlain = std::is_arithmetic_v<Element>;
    uint64_t size = list.size();
    visit(size);
    if (out_ == nullptr && size > in_.size() / (kPlain ? sizeof(Element) : 1))
      throw InputError("a number of elements is too large");
    if constexpr (kPlain) {
      list.resize(size);
      visit_bytes(list.data(), size * sizeof(Element));
    } else {  // grows by what has been read, as elements take more memory than bytes of the text
      for (uint64_t i = 0; i < size; ++i) visit(i < list.size() ? list[i] : list.emplace_back());
    }
  }

 private:
  template <class... Members>
  void visit_all(Members&... members) {
    (visit(members), ...);
  }
  void visit_bytes(void* data, size_t size) {
    char* const bytes = static_cast<char*>(data);
    if (out_ != nullptr) {
      out_->append(bytes, size);
      return;
    }
    if (size > in_.size()) throw InputError("it ends too soon");
    std::copy_n(in_.data(), size, bytes);
    in_.remove_prefix(size);
  }

  std::string* out_ = nullptr;  // nullptr: reads
  std::string_view in_;
};

// The first line of a file.
std::string header_of(uint64_t bytes, std::string_view compressed) {
  const std::string start = str("cohort-journal 3 ", bytes, " ");
  return str(start, hex(checksum(compressed, checksum(start))), "\n");
}

// Throws InputError saying what is wrong with the text of a file.
StepRecord decode(const std::string& text) {
  constexpr size_t kMaxRatio = 1100;  // decompressed to compressed, of zlib
  unsigned long bytes = 0;
  std::sscanf(text.c_str(), "cohort-journal 3 %lu", &bytes);
  const std::string body = text.substr(std::min(text.find('\n'), text.size() - 1) + 1);
  if (text != header_of(bytes, body) + body || bytes / kMaxRatio > body.size())
    throw InputError("its checksum does not match, or it has another version");
  std::string raw(bytes, '\0');
  if (uncompress(reinterpret_cast<Bytef*>(raw.data()), &bytes,
                 reinterpret_cast<const Bytef*>(body.data()), body.size()) != Z_OK ||
      bytes != raw.size())
    throw InputError("zlib cannot decompress it");
  StepRecord record;
  Archive archive{std::string_view(raw)};
  archive.visit(record);
  if (!archive.at_end()) throw InputError("it has more than a step");
  if (!std::ranges::is_sorted(record.completions, {}, &RecordedCompletion::index))
    throw InputError("its completions are not in order");
  for (const RecordedCompletion& c : record.completions) {
    if (c.loss_mask.size() != c.tokens.size() || c.logprobs.size() != c.tokens.size())
      throw InputError(str("completion ", c.index, " has lists of different lengths"));
    for (const EnvironmentReply& r : c.replies)
      if (!r.done && r.error.empty() && r.tokens.empty() && r.fields.is_null())
        throw InputError(str("completion ", c.index, " has a reply without tokens"));
  }
  return record;
}

struct FileName {
  int64_t step, rank, ranks;
};
// nullopt for a name that is no file's of a journal.
std::optional<FileName> parse_name(const std::string& name) {
  long long step = -1, rank = -1, ranks = -1;
  std::sscanf(name.c_str(), "step-%lld.rank-%lld-of-%lld", &step, &rank, &ranks);
  if ("/" + name != journal_path("", step, rank, ranks)) return std::nullopt;
  return FileName{step, rank, ranks};
}

}  // namespace

const RecordedCompletion* StepRecord::find(int64_t index) const {
  const auto at = std::ranges::lower_bound(completions, index, {}, &RecordedCompletion::index);
  return at != completions.end() && at->index == index ? &*at : nullptr;
}

uint64_t weights_hash(const Transformer& model) {
  uint64_t sum = 0;
  for (const Fingerprint& weights : weight_fingerprints(model.parameters()))
    sum += static_cast<uint64_t>(weights.sum);
  return sum;
}

std::string journal_path(const std::string& dir, int64_t step, int64_t rank, int64_t ranks) {
  return str(dir, "/step-", padded(step, 8), ".rank-", rank, "-of-", ranks);
}

void remove_abandoned_steps(const std::string& dir, int64_t step) {
  std::error_code error;
  for (const std::string& name : list_directory(dir))
    if (const auto file = parse_name(name); file && file->step > step)
      if (!std::filesystem::remove(dir + "/" + name, error))
        logging::warn("journal: the abandoned ", name, " is left: ", error.message());
}

std::string journal_plan(RunPlan plan) {
  for (TrainConfig& config : plan.stages) config.name = config.output_dir = "";
  return dump_plan(plan);
}

std::map<int64_t, int64_t> list_journal(const std::string& dir) {
  std::map<std::pair<int64_t, int64_t>, int64_t> files;  // by step and number of ranks
  for (const std::string& name : list_directory(dir))
    if (const auto file = parse_name(name)) ++files[{file->step, file->ranks}];
  std::map<int64_t, int64_t> out;
  for (const auto& [key, count] : files)
    if (count == key.second) out.insert(key);
  return out;
}

std::string encode_record(StepRecord record) {
  std::string raw;
  Archive(raw).visit(record);
  uLongf size = compressBound(raw.size());
  std::string body(size, '\0');
  const int code = compress2(reinterpret_cast<Bytef*>(body.data()), &size,
                             reinterpret_cast<const Bytef*>(raw.data()), raw.size(), 1);
  COHORT_CHECK(code == Z_OK, "[journal] zlib failed with code ", code);
  body.resize(size);
  return header_of(raw.size(), body) + body;
}

StepRecord read_record(const std::string& path,
                       const std::function<void(const StepRecord&)>& check) {
  const std::string text = read_text_file(path);
  return with_path(path + ": the journal of this step is damaged", [&] {
    StepRecord record = decode(text);
    const auto name = parse_name(std::filesystem::path(path).filename());
    if (name && name->step != record.step) throw InputError(str("it is of step ", record.step));
    check(record);
    return record;
  });
}

void ReplayedEnvironment::submit(const Example&, const Trajectory& trajectory, int64_t) {
  EnvironmentReply& reply = ready_.emplace_back();
  const RecordedCompletion* recorded = record_.find(trajectory.index);
  const auto turn = static_cast<size_t>(trajectory.num_turns());
  // The beginning is the first reply of the prompt's first dialogue.
  const bool has_start =
      recorded != nullptr && !recorded->replies.empty() && recorded->replies[0].fields.is_object();
  const size_t at = turn + (has_start ? 1 : 0);  // from 1
  if (recorded != nullptr && at > 0 && at <= recorded->replies.size() &&
      trajectory.tokens.size() <= recorded->tokens.size() &&
      std::equal(trajectory.tokens.begin(), trajectory.tokens.end(), recorded->tokens.begin())) {
    reply = recorded->replies[at - 1];
  } else {
    reply.done = true;
    reply.error = str("turn ", turn, " is not the recorded one");
  }
  reply.index = trajectory.index;
}

std::vector<EnvironmentReply> ReplayedEnvironment::poll(bool) {
  return std::exchange(ready_, {});
}

Journal::Journal(std::string dir, int64_t mib, const Communicator& comm, const std::string* plan)
    : dir_(std::move(dir)),
      bytes_(mib << 20),
      rank_(comm.rank()),
      ranks_(comm.size()),
      plan_(plan) {
  guard([&] {
    make_directory(dir_);
    for (const std::string& name : list_directory(dir_)) {
      const auto file = parse_name(name);
      const std::string path = dir_ + "/" + name;
      if (file && file->rank == rank_) sizes_[path] = std::max<int64_t>(0, readable_size(path));
    }
  });
}

void Journal::attach(DialogueOptions& dialogue) {
  dialogue.on_reply = [this](const EnvironmentReply& r) { replies_[r.index].push_back(r); };
}

void Journal::begin(const GrpoStep& step) {
  if (!weights_) weights_ = weights_hash(step.learner.model());
  record_ = {.step = step.step + 1,
             .plan = "",
             .reward_names = step.rewards.names(),
             .learning_rate = step.learning_rate,
             .beta = step.config.grpo.beta,
             .weights_before = *weights_,
             .completions = {},
             .advantages = {}};
}

void Journal::add(std::span<Group> groups) {
  for (const Group& group : groups)
    for (const ScoredCompletion& c : group.completions)
      record_.completions.push_back({.index = c.index,
                                     .prompt_length = c.prompt_length,
                                     .stop_reason = stop_reason_name(c.stop_reason),
                                     .tokens = c.tokens,
                                     .loss_mask = c.loss_mask,
                                     .logprobs = c.logprobs,
                                     .replies = std::move(replies_[c.index]),
                                     .rewards = c.rewards,
                                     .total = c.reward});
  replies_.clear();
}

void Journal::end(const GrpoStep& step, std::span<const Group> groups) {
  for (const Group& group : groups)
    for (const ScoredCompletion& c : group.completions) record_.advantages.push_back(c.advantage);
  if (rank_ == 0 && plan_ != nullptr) record_.plan = *plan_;
  weights_ = record_.weights_after = weights_hash(step.learner.model());
  flush();
  guard([&] {
    pending_ = std::async(std::launch::async, [this, record = std::move(record_)]() mutable {
      write(std::move(record));
    });
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

void Journal::write(StepRecord record) {
  const std::string path = journal_path(dir_, record.step, rank_, ranks_),
                    text = encode_record(std::move(record));
  replace_file(path, text);
  sizes_[path] = static_cast<int64_t>(text.size());
  int64_t total = 0;
  for (const auto& [file, size] : sizes_) total += size;
  for (; total > bytes_ && sizes_.size() > 1; sizes_.erase(sizes_.begin())) {
    std::filesystem::remove(sizes_.begin()->first);
    total -= sizes_.begin()->second;
  }
}

}  // namespace cohort
