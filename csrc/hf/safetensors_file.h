// Opens safetensors files, and reads boxes of tensors out of them by the tables with which those of data files are
// read.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hf/safetensors.h"
#include "io/file.h"
#include "io/transfer.h"
#include "read/reader.h"

namespace vescale_ckpt::hf {

// A file that stays open, so that what is read later is of the same file even if another takes its name.
struct SafetensorsFile {
  // Reads and checks the header. Throws Error: io, corrupt, invalid.
  static std::shared_ptr<SafetensorsFile> open(const std::string& path, const io::EngineOptions& options, bool verify);

  std::shared_ptr<io::File> file;
  SafetensorsHeader header;
  uint32_t head_crc = 0;  // CRC-32 of the bytes before the data: tells this file from another of its name
};

// Whole tensors of safetensors files, each in one file.
struct HeaderRows {
  std::vector<std::string_view> names;  // of the headers
  std::string dtypes;                   // a code for each, one byte
  std::vector<std::byte> inventory;
  std::vector<int64_t> locations;  // metadata/record_locations.h
};

// The tensors `keys` of each file, in their order; nullopt: all tensors. Returns nullopt if that is not all that there
// is: a name is there twice or not at all, metadata maps another name to it, or torch cannot hold a tensor.
std::optional<HeaderRows> header_rows(std::span<const std::shared_ptr<SafetensorsFile>> files,
                                      const std::optional<std::vector<std::vector<std::string>>>& keys);

// Reads from many files. Headers are parsed once and kept; a file is open only while it is read from. Bytes without
// checksums are counted as unverified. Thread-safe.
//
// The rows of its tables are those of read/reader.h, but for the CRC-32, which is that of the file's head. So all
// ranks of a job read what one of them has planned.
class SafetensorsReads {
 public:
  SafetensorsReads(bool verify, const io::EngineOptions& options) : verify_(verify), options_(options) {}
  // `file` is read under its path, whatever has that name by now.
  SafetensorsReads(std::shared_ptr<const SafetensorsFile> file, bool verify, const io::EngineOptions& options);

  // `table`: rows as of parse_read_table. Throws Error: corrupt (with the row as item; also if a file has another head
  // than its rows say), io, invalid.
  // `devices` and `sink`: as for parse_read_table and read_tensors.
  std::unique_ptr<read::ReadReport> read(std::span<const std::string> paths, std::span<const int64_t> table,
                                         std::span<const int64_t> devices = {}, read::DeviceSink* sink = nullptr);
  // `table`: rows as of parse_check_table. Damage is reported in ReadReport::damaged, but damage of a head is thrown.
  std::unique_ptr<read::ReadReport> check(std::span<const std::string> paths, std::span<const int64_t> table);

 private:
  std::shared_ptr<io::File> open(const std::string& path);
  read::OpenFile prepare(std::span<const std::string> paths, std::vector<read::ReadItem>& items);

  const bool verify_;
  const io::EngineOptions options_;
  std::mutex mutex_;                                                     // guards `known_`
  std::map<std::string, std::shared_ptr<const SafetensorsFile>> known_;  // those without a file are closed
};

}  // namespace vescale_ckpt::hf
