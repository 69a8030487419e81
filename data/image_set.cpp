#include "data/image_set.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "core/text.h"
#include "data/corpus.h"
#include "data/parallel_try.h"
#include "data/split.h"
#include "sys/files.h"
#include "sys/input_file.h"
#include "text/tokenizers/json_fields.h"
#include "text/utf8.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;

// Path of a file in a folder. Throws InputError if it leads out of the folder, also by a link.
std::string path_in(const fs::path& folder, const std::string& name) {
  const fs::path path = folder / name;
  std::error_code error;
  const fs::path found =
      fs::canonical(path, error).lexically_relative(fs::canonical(folder, error));
  if (!error && *found.begin() == "..")
    throw InputError(str(path.string(), ": leads out of the folder; hint: copy the image into it"));
  return path.string();
}

}  // namespace

void ImageSet::read_folder(const std::string& path) {
  for (const std::string& name : list_directory(path)) {
    const fs::path folder = fs::path(path) / name;
    if (std::error_code ignored; name[0] == '.' || !fs::is_directory(folder, ignored)) continue;
    if (!is_utf8(name))
      throw InputError(folder.string() + ": the name, a label, is not UTF-8; hint: rename it");
    for (const std::string& file : text_files(folder.string())) {
      const std::string relative = fs::path(file).lexically_relative(path).string();
      entries_.push_back({file, path_in(path, relative), name, {split_hash(relative)}});
    }
  }
  if (entries_.empty())
    throw InputError(path + ": has no class folders; hint: a folder for each label, or JSONL");
}

void ImageSet::read_lines(const std::string& path, const std::string& label) {
  // Without templates, records are read as they are.
  lines_ = load_jsonl({.path = {path}, .prompt = "", .answer = "", .held_out_fraction = 0}).train;
  entries_.resize(static_cast<size_t>(lines_->size()));
  parallel_try(size(), 16, [&](int64_t i) {
    const Example line = lines_->get(i);
    const auto text = [&](const std::string& name) {
      const Json& value = line.fields.get_or_null(name);
      if (value.is_string() || value.is_number()) return value.to_text();
      throw InputError("expected a text or a number as the field '" + name +
                       "'; hint: data.images.field and data.images.label");
    };
    fs::path folder = fs::path(line.where.substr(0, line.where.rfind(':'))).parent_path();
    if (folder.empty()) folder = ".";
    entries_[static_cast<size_t>(i)] = with_path(line.where, [&] {
      const std::string image = text(field_);
      const std::string file = image.starts_with("data:") ? "" : path_in(folder, image);
      return Entry{line.where, file, text(label), {split_hash(image)}};
    });
  });
}

ImageSet::ImageSet(const std::string& path, const std::string& field, const std::string& label,
                   std::vector<std::string> known)
    : labels_(std::move(known)), field_(field) {
  std::error_code ignored;
  fs::is_directory(path, ignored) ? read_folder(path) : read_lines(path, label);
  std::vector<std::string> marks(entries_.size());
  parallel_try(size(), 16, [&](int64_t i) {
    const Entry& entry = entries_[static_cast<size_t>(i)];
    const int64_t bytes = with_path(
        entry.where, [&] { return entry.file.empty() ? 0 : InputFile(entry.file).size(); });
    marks[static_cast<size_t>(i)] = str(entry.id.split, ' ', bytes, ' ', entry.name, '\n');
  });
  fingerprint_ = hex(checksum(join(marks, "")));
  if (labels_.empty()) {
    std::set<std::string> found;
    for (const Entry& entry : entries_) found.insert(entry.name);
    labels_.assign(found.begin(), found.end());
    if (labels_.size() < 2)
      throw InputError(path + ": all images have one label; hint: add those of another class");
  }
  for (Entry& entry : entries_) {
    entry.label = std::ranges::find(labels_, entry.name) - labels_.begin();
    if (entry.label == std::ssize(labels_))
      throw InputError(str(entry.where, ": the label '", entry.name,
                           "' is not known; hint: labels are ", join(labels_, ", ")));
  }
}

Example ImageSet::get(int64_t i) const {
  const Entry& entry = entries_.at(static_cast<size_t>(i));
  return {.prompt = entry.where,
          .answer = entry.name,
          .images = shared_from_this(),
          .image = i,
          .where = entry.where};
}

Image ImageSet::load(int64_t i, int64_t channels) const {
  const Entry& entry = entries_.at(static_cast<size_t>(i));
  return with_path(entry.where, [&] {
    if (!entry.file.empty()) return read_image(entry.file, channels);
    return read_image(lines_->get(i).fields.at(field_).as_string(), channels);
  });
}

std::vector<std::string> ImageSet::check_all(int64_t channels) const {
  std::vector<std::string> messages(entries_.size());
  parallel_try(size(), 1, [&](int64_t i) {
    try {
      load(i, channels);
    } catch (const InputError& e) {
      messages[static_cast<size_t>(i)] = e.what();
    }
  });
  std::erase(messages, "");
  return messages;
}

}  // namespace cohort
