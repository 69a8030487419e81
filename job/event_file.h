// TensorBoard event files with the numbers of metrics.jsonl. Format: TFRecord frames, each with an
// `Event` in protocol buffer encoding (tensorflow/core/util/event.proto,
// tensorflow/core/lib/io/record_writer).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "sys/files.h"

namespace cohort {

class Json;

// A new file per start of a stage, DIR/events.out.tfevents.TIME.PID, created by the first write. It
// makes TensorBoard discard the records of earlier files of DIR from `first_step` on. Nothing is
// flushed to disk and nothing throws: a record that cannot be written is skipped, with a warning
// for the first one.
class EventFile {
 public:
  EventFile(const std::string& dir, int64_t first_step);
  // Writes each number of a line of metrics.jsonl as a scalar of the line's "step".
  void write(const Json& line);

 private:
  const std::string path_;
  std::string head_;  // first records, until they are in the file
  AppendFile file_;
  bool warned_ = false;
};

// CRC-32C (Castagnoli).
uint32_t crc32c(std::string_view bytes);

}  // namespace cohort
