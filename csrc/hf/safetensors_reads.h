// Reads boxes of tensors out of the safetensors files of a checkpoint, by the tables with which those of data files are
// read.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "hf/safetensors_file.h"
#include "read/reader.h"

namespace vescale_ckpt::hf {

// Headers are parsed once and kept; a file is open only while it is read from. So that all ranks of a job read what one
// of them has planned, each row says which head its file must have. Thread-safe.
class SafetensorsReads {
 public:
  SafetensorsReads(bool verify, const io::EngineOptions& options) : verify_(verify), options_(options) {}

  // `table`: rows as of parse_read_table, but for the CRC-32, which is that of the file's head. Throws Error: corrupt
  // (with the row as item; also if a file has another head than its rows say), io, invalid.
  std::unique_ptr<read::ReadReport> read(std::span<const std::string> paths, std::span<const int64_t> table);
  // `table`: rows as of parse_check_table, with the same CRC-32. What is wrong is told in
  // ReadReport::damaged, but for what is wrong with a head: that is thrown.
  std::unique_ptr<read::ReadReport> check(std::span<const std::string> paths, std::span<const int64_t> table);

 private:
  struct Known {
    SafetensorsHeader header;
    uint32_t head_crc;
    std::vector<std::optional<uint32_t>> crcs;  // of whole tensors, once they were asked for
  };

  std::shared_ptr<io::File> open(const std::string& path);
  void complete(read::ReadItem& item, const std::string& path);
  read::OpenFile prepare(std::span<const std::string> paths, std::vector<read::ReadItem>& items);

  const bool verify_;
  const io::EngineOptions options_;
  std::mutex mutex_;  // guards `known_`, whose elements stay where they are
  std::map<std::string, Known> known_;
};

}  // namespace vescale_ckpt::hf
