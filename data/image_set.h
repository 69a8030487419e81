// Labelled images that stay in their files until they are used.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/example.h"
#include "data/image.h"

namespace cohort {

// Examples whose prompt is the path of the image, or "FILE:LINE", and whose answer is the label.
class ImageSet final : public ExampleSet, public std::enable_shared_from_this<ImageSet> {
 public:
  // `path`: a folder of class folders, whose names are the labels; or JSONL, whose records have an
  // image, a path relative to the file or a data URI with base64, and a label, a text or a
  // number as it is spelled, under the names `field` and `label`. Hidden files are ignored.
  // `known`: labels of a model or of a training set; empty: those that occur, sorted. Throws
  // InputError naming the file and line: no image or label; a path that leads out of the folder,
  // also by a link; no regular file; a label that is not known; and if there is no image, a class
  // without images, or only one class.
  explicit ImageSet(const std::string& path, const std::string& field = "image",
                    const std::string& label = "label", std::vector<std::string> known = {});
  int64_t size() const override { return std::ssize(entries_); }
  // The set must belong to a std::shared_ptr.
  Example get(int64_t i) const override;
  // The hash of the image's relative path, or of its data URI.
  ExampleId id(int64_t i) const override { return entries_.at(static_cast<size_t>(i)).id; }
  const std::vector<std::string>& labels() const { return labels_; }
  // Index in labels().
  int64_t label(int64_t i) const { return entries_.at(static_cast<size_t>(i)).label; }
  // Checksum of all names, sizes of files and labels in order, as 16 hex digits.
  const std::string& fingerprint() const { return fingerprint_; }
  // Path of a file, or "FILE:LINE".
  const std::string& where(int64_t i) const { return entries_.at(static_cast<size_t>(i)).where; }
  // Reads and decodes an image. Throws InputError naming the file and line.
  Image load(int64_t i, int64_t channels) const;
  // Loads all of them, with all threads. Returns the messages of those that are not valid.
  std::vector<std::string> check_all(int64_t channels) const;

 private:
  struct Entry {
    std::string where, file, name;  // name: of the label; no file: line i has a data URI
    ExampleId id;
    int64_t label;
  };
  void read_folder(const std::string& path);
  void read_lines(const std::string& path, const std::string& label);

  std::vector<std::string> labels_;
  std::vector<Entry> entries_;
  std::unique_ptr<ExampleSet> lines_;  // null for folders
  std::string field_, fingerprint_;
};

}  // namespace cohort
