// Event files, which TensorBoard reads: the numbers of metrics.jsonl again, for those who look at
// their runs there. The format: records as TFRecord frames them, each an `Event` in protocol buffer
// encoding (tensorflow/core/util/event.proto, tensorflow/core/lib/io/record_writer).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "trainers/append_file.h"

namespace cohort {

class Json;

// A new file per start of a stage, DIR/events.out.tfevents.TIME.PID, made by the first write. It
// tells TensorBoard to forget what earlier files of DIR have from `first_step` on. Nothing is
// flushed to disk and nothing throws: a record that cannot be written is left out, with a warning
// for the first one.
class EventFile {
 public:
  EventFile(const std::string& dir, int64_t first_step);
  // Each number of a line of metrics.jsonl as a scalar of the line's "step".
  void write(const Json& line);

 private:
  const std::string path_;
  std::string head_;  // records that come first and are not in the file
  AppendFile file_;
  bool warned_ = false;
};

// CRC-32C (Castagnoli).
uint32_t crc32c(std::string_view bytes);

}  // namespace cohort
