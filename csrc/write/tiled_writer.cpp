// FileWriter's other layout: tensors without a gap, as safetensors wants them.
#include "write/tiles.h"
#include "write/writer.h"

namespace vescale_ckpt::write {

std::vector<uint32_t> FileWriter::write_tiled(std::span<const RecordSource> sources, uint64_t offset) {
  std::vector<TileSource> tiles;
  tiles.reserve(sources.size());
  uint64_t at = offset, count = 0;
  for (const RecordSource& source : sources) {
    tiles.push_back({{file_.get(), at, at + source.bytes, at / format::kChecksumBlock, {}}, source.data, nullptr});
    count += format::cells(at, at + source.bytes);
    at += source.bytes;
  }
  std::vector<uint32_t> blocks(count);
  std::span<uint32_t> rest(blocks);
  for (TileSource& tile : tiles) {
    const auto of_tile = rest.first(format::cells(tile.place.begin, tile.place.end));
    if (checksums_) tile.place.blocks = of_tile;
    rest = rest.subspan(of_tile.size());
  }
  write_tiles(tiles, TileEdges::ours, options_, control_, stats_);
  cursor_ = at;
  return blocks;
}

uint64_t FileWriter::finish_tiled(std::span<const std::byte> head, bool sync) {
  control_.check();
  io::write_exactly(*file_, 0, head);
  return seal(cursor_, sync);
}

}  // namespace vescale_ckpt::write
