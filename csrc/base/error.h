// The engine's one error idiom: what was done, to which file, where, and the errno.
//
// Thrown anywhere in the engine, carried out of worker threads by Workers, translated once in bindings/module.cpp.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace vescale_ckpt {

class Error : public std::runtime_error {
 public:
  enum class Kind {
    io,         // the operating system refused: `code` is the errno
    full,       // no space, quota or file-size limit: `code` is the errno
    corrupt,    // bytes on disk are not what was written
    invalid,    // the caller's table makes no sense (lying metadata, unknown dtype, ...)
    cancelled,  // the caller asked to stop
    device,     // the accelerator's runtime refused: `code` is its own, what it said is in the text
  };

  static constexpr int64_t kNoItem = -1;

  Error(Kind kind, const std::string& what, std::string path = {}, uint64_t offset = 0, int code = 0,
        int64_t item = kNoItem)
      : std::runtime_error(what), kind(kind), path(std::move(path)), offset(offset), code(code), item(item) {}

  // The error of a failed system call; ENOSPC, EDQUOT and EFBIG become Kind::full.
  static Error system(const char* operation, const std::string& path, uint64_t offset, int code) {
    const bool full = code == ENOSPC || code == EDQUOT || code == EFBIG;
    return Error(
        full ? Kind::full : Kind::io,
        std::string(operation) + " " + path + " at offset " + std::to_string(offset) + ": " + std::strerror(code), path,
        offset, code);
  }

  static Error corrupt(const std::string& reason, const std::string& path, uint64_t offset, int64_t item = kNoItem) {
    return Error(Kind::corrupt, reason, path, offset, 0, item);
  }

  // `said` is the runtime's own text for `code`.
  static Error device(const std::string& operation, const std::string& said, int code) {
    const std::string number = code == 0 ? "" : " (" + std::to_string(code) + ")";
    return Error(Kind::device, operation + ": " + said + number, {}, 0, code);
  }

  static Error invalid(const std::string& reason, int64_t item = kNoItem) {
    return Error(Kind::invalid, reason, {}, 0, 0, item);
  }

  // The same, of a row of the caller's table.
  Error of_item(int64_t row) const { return Error(kind, what(), path, offset, code, row); }

  Kind kind;
  std::string path;
  uint64_t offset;  // bytes from the start of the file
  int code;         // errno, 0 if none
  int64_t item;     // row of the caller's table, kNoItem if none
};

}  // namespace vescale_ckpt
