// A file that is read piece by piece as it is needed, each piece checked against its CRC-32 when it is.
//
// It is used like a mapping, but is read: access to a mapping kills the process (SIGBUS) where the disk cannot give the
// page or the file was cut short. Only pieces that were read take memory.
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

  // Reads the first piece, which nothing checks. Throws Error: io (with the errno), corrupt for what is too short or
  // no regular file.
  explicit VerifiedFile(std::string path);
  // The content of one, read or received elsewhere; `path` is for messages. It is not checked yet: `load_checksums`
  // checks all of it. Throws Error (corrupt) for what is too short.
  VerifiedFile(std::vector<std::byte> content, std::string path);
  ~VerifiedFile();
  VerifiedFile(const VerifiedFile&) = delete;
  VerifiedFile& operator=(const VerifiedFile&) = delete;

  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }

  // Where the pieces' checksums are: a u32 for each piece from the second on up to `table`, with the checksum of them
  // all. `table` is a multiple of kPiece, and nothing follows. Throws Error (corrupt). Comes before `get` of anything
  // but the first piece.
  void load_checksums(uint64_t table, uint32_t crc);

  // Bytes offset .. offset + bytes, checked and valid as long as the file. The caller has made sure that they lie
  // before the checksums, or in the first piece. Throws Error (io, corrupt). Thread-safe.
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
  std::vector<std::byte> content_;  // if it was in memory
  std::byte* data_ = nullptr;
  std::vector<uint32_t> checksums_;
  mutable std::mutex reading_;                    // whoever holds it may write to data_ and set ready_
  mutable std::vector<std::atomic<bool>> ready_;  // by piece; empty if it was in memory
};

}  // namespace vescale_ckpt::metadata
