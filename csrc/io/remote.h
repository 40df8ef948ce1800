// Files that are not on a file system: paths with a scheme, as s3://bucket/name. Whoever knows such stores registers
// how their objects are read and written; the engine knows neither their protocols nor Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "io/part_window.h"

namespace vescale_ckpt::io {

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
