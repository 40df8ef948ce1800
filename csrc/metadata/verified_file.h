// A file whose pieces are read, and checked against their CRC-32, when they are needed.
//
// It is used like a mapping, but it is read: access to a mapping kills the process (SIGBUS) if the disk cannot give the
// page or the file was truncated. Only pieces that were read take memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace vescale_ckpt::metadata {

class VerifiedFile {
 public:
  static constexpr uint64_t kPiece = 4096;

  // Reads the first piece without a check. Throws Error: io (with the errno), corrupt if it is too short or no regular
  // file.
  explicit VerifiedFile(std::string path);
  // Takes the content of a file from memory; `path` is for messages. `load_checksums` checks all of it. Throws Error
  // (corrupt) if it is too short.
  VerifiedFile(std::vector<std::byte> content, std::string path);
  ~VerifiedFile();
  VerifiedFile(const VerifiedFile&) = delete;
  VerifiedFile& operator=(const VerifiedFile&) = delete;

  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }

  // Reads the pieces' checksums at `table`: a u32 for each piece from the second one up to `table`. `crc` is the
  // checksum of these checksums. `table` is a multiple of kPiece, and the checksums end the file. Throws Error
  // (corrupt). Call it before `get` of anything but the first piece.
  void load_checksums(uint64_t table, uint32_t crc);

  // Returns bytes offset .. offset + bytes, checked, and valid as long as this object. The caller has made sure that
  // they lie before the checksums, or in the first piece. Throws Error (io, corrupt). Thread-safe.
  const std::byte* get(uint64_t offset, uint64_t bytes) const {
    for (uint64_t piece = offset / kPiece; piece * kPiece < offset + bytes; ++piece) {
      if (!ready_.empty() && !ready_[piece].load(std::memory_order_acquire)) read_piece(piece);
    }
    return data_ + offset;
  }

 private:
  [[noreturn]] void corrupt(const char* reason, uint64_t offset) const;
  void read(uint64_t offset, uint64_t bytes) const;
  void check_piece(uint64_t piece) const;
  void read_piece(uint64_t piece) const;

  std::string path_;
  int fd_ = -1;
  uint64_t size_ = 0;
  std::vector<std::byte> content_;  // empty for a file
  std::byte* data_ = nullptr;
  std::vector<uint32_t> checksums_;
  mutable std::mutex reading_;                    // guards writes to data_ and ready_
  mutable std::vector<std::atomic<bool>> ready_;  // whether each piece was read; empty if the content was in memory
};

}  // namespace vescale_ckpt::metadata
