#include "data/image_set.h"

#include <filesystem>
#include <map>
#include <set>

#include "core/text.h"
#include "data/corpus.h"
#include "data/parallel_try.h"
#include "data/split.h"
#include "sys/files.h"
#include "sys/input_file.h"

namespace cohort {

namespace fs = std::filesystem;

struct ImageSet::Item {
  std::string where;  // "FILE:LINE"; empty for an image of a class folder
  fs::path folder;    // that `image` is relative to
  std::string image, label;

  bool is_uri() const { return image.starts_with("data:"); }
  // Throws InputError if the file is outside of the folder.
  std::string file() const {
    std::error_code error;
    const fs::path file = fs::canonical(folder / image, error);
    const fs::path relative = file.lexically_relative(fs::canonical(folder, error));
    if (!file.empty() && *relative.begin() == "..")
      throw InputError(str(image, ": leads out of the folder ", folder.string(),
                           "; hint: copy the image into it"));
    return (folder / image).string();
  }
  // Calls use(), and adds the line to an error.
  template <class Use>
  auto locate(const Use& use) const {
    try {
      return use();
    } catch (const InputError& e) {
      throw InputError(str(where, where.empty() ? "" : ": ", e.what()));
    }
  }
};

namespace {

int base64_digit(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  return c == '+' ? 62 : c == '/' ? 63 : -1;
}

// Bytes of a data URI: "data:image/png;base64,iVBOR...".
std::string uri_bytes(std::string_view uri) {
  const size_t comma = std::min(uri.find(','), uri.size() - 1);
  if (!uri.substr(0, comma).ends_with(";base64"))
    throw InputError("the data URI has no base64; hint: data:image/png;base64,...");
  std::string bytes;
  uint32_t bits = 0;
  int count = 0;
  for (size_t at = comma + 1; at < uri.size(); ++at) {
    const int digit = base64_digit(uri[at]);
    if (digit < 0 && uri.find_first_not_of('=', at) == uri.npos) break;
    if (digit < 0)
      throw InputError(
          str("byte ", at + 1, " of the data URI is not base64; hint: encode the image again"));
    bits = bits << 6 | static_cast<uint32_t>(digit);
    count += 6;
    if (count < 8) continue;
    count -= 8;
    bytes += static_cast<char>(bits >> count);
  }
  return bytes;
}

// A field that is a text or a whole number.
std::string text_of_field(const Json& line, const std::string& field, const char* key) {
  const Json& value = line.get_or_null(field);
  if ((value.is_string() || value.is_int()) && !value.to_text().empty()) return value.to_text();
  std::vector<std::string> names;
  for (const auto& [name, other] : line.as_object()) names.push_back(name);
  throw InputError(str("expected a text as the field '", field, "' (", key,
                       "); fields here: ", join(names, ", ")));
}

}  // namespace

ImageSet::Item ImageSet::item(int64_t i) const {
  const std::string& file = entries_.at(static_cast<size_t>(i)).file;
  if (lines_ == nullptr) return {"", path_, file, file.substr(0, file.find('/'))};
  const Example line = lines_->get(i);
  Item item{line.where, fs::path(line.where.substr(0, line.where.rfind(':'))).parent_path()};
  if (item.folder.empty()) item.folder = ".";
  item.locate([&] {
    item.image = text_of_field(line.fields, fields_.image, "data.images.field");
    item.label = text_of_field(line.fields, fields_.label, "data.images.label");
  });
  return item;
}

void ImageSet::read_folder() {
  for (const std::string& name : list_directory(path_)) {
    if (name.starts_with('.') || !fs::is_directory(fs::path(path_) / name)) continue;
    for (const std::string& file : text_files((fs::path(path_) / name).string()))
      entries_.push_back({fs::path(file).lexically_relative(path_).string()});
  }
  if (entries_.empty())
    throw InputError(str(path_, ": has no class folders; hint: put images into folders that are ",
                         "named after their labels, or name a JSONL file"));
}

ImageSet::ImageSet(const std::string& path, ImageFields fields, std::vector<std::string> known)
    : path_(path), fields_(std::move(fields)), labels_(std::move(known)) {
  if (fs::is_directory(path_)) {
    read_folder();
  } else {  // without templates, records are read as they are
    lines_ =
        load_jsonl({.path = {path_}, .prompt = "", .answer = "", .held_out_fraction = 0}).train;
    entries_.resize(static_cast<size_t>(lines_->size()));
  }
  std::vector<std::string> names(entries_.size()), marks(entries_.size());
  parallel_try(size(), 16, [&](int64_t i) {
    const Item item = this->item(i);
    const int64_t bytes =
        item.is_uri() ? 0 : item.locate([&] { return InputFile(item.file()).size(); });
    const auto at = static_cast<size_t>(i);
    names[at] = item.label;
    entries_[at].split = split_hash(item.image);
    marks[at] = hex(checksum(str(item.image, '\0', item.label, '\0', bytes)));
  });
  fingerprint_ = hex(checksum(join(marks, "")));
  const std::set<std::string> found(names.begin(), names.end());
  if (labels_.empty()) {
    labels_.assign(found.begin(), found.end());
    if (labels_.size() < 2)
      throw InputError(str(path_, ": all ", size(), " images have the label '", labels_[0],
                           "'; hint: add images of another class"));
  }
  std::map<std::string, int64_t> index;
  for (const std::string& label : labels_) index.emplace(label, std::ssize(index));
  for (int64_t i = 0; i < size(); ++i) {
    const auto label = index.find(names[static_cast<size_t>(i)]);
    if (label == index.end())
      throw InputError(str(where(i), ": the label '", names[static_cast<size_t>(i)],
                           "' is not known; hint: labels are ", join(labels_, ", ")));
    entries_[static_cast<size_t>(i)].label = label->second;
  }
}

std::string ImageSet::where(int64_t i) const {
  const Item item = this->item(i);
  return item.where.empty() ? (item.folder / item.image).string() : item.where;
}

Image ImageSet::load(int64_t i, int64_t channels) const {
  const Item item = this->item(i);
  return item.locate([&] {
    return item.is_uri() ? decode_image(uri_bytes(item.image), channels, fields_.image)
                         : read_image(item.file(), channels);
  });
}

ImageSet::Faults ImageSet::check_all(int64_t channels) const {
  std::vector<std::string> messages(entries_.size());
  parallel_try(size(), 1, [&](int64_t i) {
    try {
      load(i, channels);
    } catch (const InputError& e) {
      messages[static_cast<size_t>(i)] = e.what();
    }
  });
  Faults faults;
  for (const std::string& message : messages)
    if (!message.empty() && faults.count++ == 0) faults.first = message;
  return faults;
}

}  // namespace cohort
