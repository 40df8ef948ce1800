#include "hf/safetensors_file.h"

#include <algorithm>
#include <span>

#include "base/crc32.h"
#include "io/transfer.h"

namespace vescale_ckpt::hf {

std::shared_ptr<const SafetensorsFile> SafetensorsFile::open(const std::string& path, const io::EngineOptions& options,
                                                             bool verify) {
  auto opened = std::make_shared<SafetensorsFile>();
  opened->file = io::File::open(path, options.widest, options.read_cached);
  const std::string head = read_head(*opened->file);
  opened->header = SafetensorsHeader::parse(head, opened->file->size(), path, verify);
  opened->head_crc = crc32(0, head.data(), head.size());
  return opened;
}

std::string SafetensorsFile::read_head(io::File& file) {
  std::string head(std::min(file.size(), kSafetensorsLengthBytes), '\0');
  io::read_exactly(file, 0, std::as_writable_bytes(std::span(head)));
  const size_t had = head.size();
  head.resize(SafetensorsHeader::head_bytes(head, file.size(), file.path()));
  io::read_exactly(file, had, std::as_writable_bytes(std::span(head)).subspan(had));
  return head;
}

}  // namespace vescale_ckpt::hf
