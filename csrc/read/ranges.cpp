#include "read/ranges.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "io/file.h"
#include "io/transfer.h"

namespace vescale_ckpt::read {

void read_ranges(std::span<const std::string> paths, std::span<const ByteRange> ranges,
                 std::span<std::byte* const> targets, const io::EngineOptions& options) {
  std::vector<uint32_t> order(ranges.size());
  std::iota(order.begin(), order.end(), 0);
  const auto key = [&](uint32_t row) { return std::tuple(ranges[row].file, ranges[row].offset); };
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return key(a) < key(b); });

  // Objects are small and lie together, so neighbours are read in one blocking read.
  std::unique_ptr<io::File> file;
  uint32_t opened = 0;
  std::vector<std::byte> buffer;
  for (size_t first = 0; first < order.size();) {
    const ByteRange& head = ranges[order[first]];
    try {
      if (!file || opened != head.file) file = io::File::open(paths[head.file], io::Access::buffered);
      opened = head.file;
      uint64_t end = head.offset;
      size_t last = first;
      for (; last < order.size(); ++last) {
        const ByteRange& range = ranges[order[last]];
        if (range.file != head.file || range.offset > end + options.read_gap) break;
        if (last != first && range.offset + range.length - head.offset > options.slot_bytes) break;
        if (range.offset > file->size() || range.length > file->size() - range.offset) {
          throw Error::corrupt("file " + file->path() + " is truncated: it has " + std::to_string(file->size()) +
                                   " bytes, the object at offset " + std::to_string(range.offset) + " needs " +
                                   std::to_string(range.length),
                               file->path(), range.offset, order[last]);
        }
        end = std::max(end, range.offset + range.length);
      }
      if (last == first + 1) {
        io::read_exactly(*file, head.offset, {targets[order[first]], head.length});
      } else {
        buffer.resize(end - head.offset);
        io::read_exactly(*file, head.offset, buffer);
        for (size_t i = first; i < last; ++i) {
          const ByteRange& range = ranges[order[i]];
          if (range.length != 0) {
            std::memcpy(targets[order[i]], buffer.data() + (range.offset - head.offset), range.length);
          }
        }
      }
      first = last;
    } catch (const Error& error) {
      if (error.item != Error::kNoItem) throw;
      throw Error(error.kind, error.what(), error.path, error.offset, error.code, order[first]);
    }
  }
}

}  // namespace vescale_ckpt::read
