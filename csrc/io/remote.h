// Files that are not on a file system: paths with a scheme, as s3://bucket/name. Whoever knows such stores registers
// how their objects are read and written; the engine knows neither their protocols nor Python.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace vescale_ckpt::io {

// A file on its way to a store that takes it whole, in parts of equal size that come in order, each once: an object
// store. Writers put bytes at their places in any order, as far as the window reaches; one uploader takes complete
// parts.
//
// Memory: at most kAhead parts that the uploader has not taken, and those that it holds.
//
// Writers do not wait for each other for ever if (1) they begin bytes in rising order, or wait for room before they
// take anything that the others need, and (2) whoever writes the lowest bytes that are missing goes on. All parts
// before that one are complete, and the uploader takes all of them but the last, which it gets as soon as somebody asks
// for room behind it. So room reaches at least kAhead - 1 parts behind the last one taken, and the lowest bytes lie
// there.
class PartWindow : public std::enable_shared_from_this<PartWindow> {
 public:
  static constexpr uint64_t kAhead = 4;  // parts that writers may be ahead of the uploader; of large ones two

  // A complete part; its memory is used again when it is destroyed.
  class Part {
   public:
    Part(std::shared_ptr<PartWindow> window, std::unique_ptr<std::byte[]> memory, uint64_t bytes)
        : window_(std::move(window)), memory_(std::move(memory)), bytes_(bytes) {}
    ~Part();
    Part(const Part&) = delete;
    Part& operator=(const Part&) = delete;
    std::span<std::byte> bytes() const { return {memory_.get(), bytes_}; }

   private:
    const std::shared_ptr<PartWindow> window_;
    std::unique_ptr<std::byte[]> memory_;
    const uint64_t bytes_;
  };

  // `path` is for messages.
  PartWindow(std::string path, uint64_t part_bytes)
      : path_(std::move(path)), part_bytes_(part_bytes), ahead_(part_bytes > kLarge ? 2 : kAhead) {}

  const std::string& path() const { return path_; }
  uint64_t part_bytes() const { return part_bytes_; }

  // --- For writers. All of these throw the uploader's Error after fail(), and Error(cancelled) after cancel().

  // Waits until bytes before `end` may be written. `closed` is asked now and then: true ends the waiting, with
  // Error(cancelled).
  void wait_for_room(uint64_t end, const std::function<bool()>& closed);
  // Where bytes belong that lie in one part, and for which there is room; null if they lie in several.
  std::byte* place(uint64_t offset, uint64_t bytes);
  // Each byte is written once. Copies them, unless they are at their place already. Waits for room.
  void write(uint64_t offset, std::span<const std::byte> bytes);
  // All is written that lies before `length`, where the file ends; what was written behind it is cut off. Waits until
  // the uploader has it all.
  void finish(uint64_t length);

  // --- From any thread.

  // The uploader gets an error in place of the next part. May be called again, and after the end.
  void cancel();
  // Waits until the uploader has ended, in whatever way.
  void wait_for_end();

  // --- For the uploader.

  // Waits for the next part; null after the last. Throws Error(cancelled) after cancel().
  std::shared_ptr<Part> next();
  // The end: the store has the file, or it does not.
  void uploaded();
  void fail(const Error& error);

 private:
  static constexpr uint64_t kLarge = 16 << 20;
  struct Filling {
    std::unique_ptr<std::byte[]> memory;
    uint64_t written = 0;
  };
  void check() const;  // called with mutex_ held, as the next one
  Filling& filling(uint64_t part);

  const std::string path_;
  const uint64_t part_bytes_;
  const uint64_t ahead_;
  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::map<uint64_t, Filling> parts_;  // {number: part that is not taken yet}
  std::vector<std::unique_ptr<std::byte[]>> free_;
  uint64_t taken_ = 0;          // parts
  uint64_t goes_on_until_ = 0;  // bytes that the file will have at least, or will have been padded to
  std::optional<uint64_t> length_;
  bool cancelled_ = false, ended_ = false;
  std::optional<Error> error_;
};

// One object as it was when it was opened. Thread-safe.
class RemoteObject {
 public:
  virtual ~RemoteObject() = default;
  virtual uint64_t size() const = 0;
  // A range that lies inside of the object, in memory of whoever fetched it. Throws Error: io, or corrupt if it is not
  // the same object any more.
  virtual std::shared_ptr<const std::byte> fetch(uint64_t offset, uint64_t bytes) = 0;
};

struct RemoteStore {
  std::function<std::unique_ptr<RemoteObject>(const std::string& path)> open;  // throws Error
  // Begins to send what the window gives, on a thread of its own, which ends with uploaded() or fail().
  std::function<void(std::shared_ptr<PartWindow> window)> upload;
  std::function<uint64_t(const std::string& path)> most_part_bytes;  // larger parts cost less; none: as small as can be
};

// For all paths with a scheme, in place of what was registered before. Not while files are open.
void set_remote_store(RemoteStore store);
bool is_remote(std::string_view path);
// Throws Error(invalid) if there is none.
const RemoteStore& remote_store();

// How large the parts of a file of so many bytes (an estimate from above) are: a multiple of `unit`, at least as much
// as stores want (5 MiB), and so large that they allow as many as there will be (10,000). They grow with the file up to
// `most` bytes.
uint64_t part_bytes_for(uint64_t expected_bytes, uint64_t unit, uint64_t most = 0);

}  // namespace vescale_ckpt::io
