#include "write/block_hashes.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>

#include "base/crc32.h"
#include "base/error.h"
#include "base/workers.h"

namespace vescale_ckpt::write {
namespace {

__extension__ typedef unsigned __int128 Wide;

constexpr size_t kBlockWords = kHashedBlock / sizeof(uint64_t);
constexpr size_t kHashWords = 4;
constexpr uint64_t kPiece = 32 * kHashedBlock;  // what one thread takes at a time

// Of one tensor, the bytes [begin, end).
struct Piece {
  size_t tensor;
  uint64_t begin, end;
  uint32_t crc = 0;
};

void hash_block(const std::byte* block, const uint64_t* key, uint64_t* out) {
  Wide first = 0, second = 0;
  for (size_t i = 0; i < kBlockWords; i += 2) {
    uint64_t word[2];
    std::memcpy(word, block + i * sizeof(uint64_t), sizeof word);
    first += Wide{word[0] + key[i]} * (word[1] + key[i + 1]);
    second += Wide{word[0] + key[kBlockWords + i]} * (word[1] + key[kBlockWords + i + 1]);
  }
  out[0] = static_cast<uint64_t>(first);
  out[1] = static_cast<uint64_t>(first >> 64);
  out[2] = static_cast<uint64_t>(second);
  out[3] = static_cast<uint64_t>(second >> 64);
}

}  // namespace

std::vector<TensorHashes> hash_tensors(std::span<const RecordSource> tensors, std::span<const uint64_t> key,
                                       const io::EngineOptions& options) {
  if (key.size() != kHashKeyWords)
    throw Error::invalid("expected a key of " + std::to_string(kHashKeyWords) + " words, got " +
                         std::to_string(key.size()));
  std::vector<TensorHashes> hashes(tensors.size());
  std::vector<Piece> pieces;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const uint64_t bytes = tensors[i].bytes;
    hashes[i].blocks.resize((bytes + kHashedBlock - 1) / kHashedBlock * kHashWords);
    for (uint64_t begin = 0; begin < bytes; begin += kPiece)
      pieces.push_back({i, begin, std::min(begin + kPiece, bytes)});
  }
  std::atomic<size_t> next{0};
  const auto threads = static_cast<unsigned>(std::clamp<size_t>(pieces.size(), 1, std::max(1U, options.threads)));
  run_workers(
      threads,
      [&](const std::atomic<bool>& stop) {
        std::vector<std::byte> gathered, last(kHashedBlock);
        for (size_t at = next++; at < pieces.size() && !stop; at = next++) {
          Piece& piece = pieces[at];
          const RecordSource& tensor = tensors[piece.tensor];
          const std::byte* bytes = tensor.data + piece.begin;
          const uint64_t count = piece.end - piece.begin;
          if (tensor.strided) {
            gathered.resize(kPiece);
            tensor.strided->gather(gathered.data(), piece.begin, piece.end, tensor.data);
            bytes = gathered.data();
          }
          uint64_t* out = hashes[piece.tensor].blocks.data() + piece.begin / kHashedBlock * kHashWords;
          for (uint64_t begin = 0; begin < count; begin += kHashedBlock, out += kHashWords) {
            const uint64_t size = std::min(kHashedBlock, count - begin);
            const std::byte* block = bytes + begin;
            if (size < kHashedBlock) {
              std::fill(std::copy_n(block, size, last.begin()), last.end(), std::byte{0});
              block = last.data();
            }
            hash_block(block, key.data(), out);
            piece.crc = crc32(piece.crc, bytes + begin, size);
          }
        }
      },
      options.niceness);
  for (const Piece& piece : pieces) {
    uint32_t& crc = hashes[piece.tensor].crc;
    crc = crc32_combine(crc, piece.crc, piece.end - piece.begin);
  }
  return hashes;
}

}  // namespace vescale_ckpt::write
