#include "plan/hash.h"

#include <gtest/gtest.h>

#include <set>
#include <string_view>
#include <vector>

namespace vescale_ckpt::plan {
namespace {

Hash128 hash_of(std::string_view text) {
  return hash128(std::as_bytes(std::span(text)));
}

TEST(Hash128, IsMurmurHash3) {
  EXPECT_EQ(hash_of(""), (Hash128{0, 0}));
  EXPECT_EQ(hash_of("hello"), (Hash128{0xCBD8A7B341BD9B02, 0x5B1E906A48AE1D19}));
  EXPECT_EQ(hash_of("The quick brown fox jumps over the lazy dog"), (Hash128{0xE34BBC7BBC071B6C, 0x7A433CA9C49A9347}));
}

TEST(Hash128, TellsLengthsAndSingleBitsApart) {
  std::set<Hash128> seen;
  size_t hashes = 0;
  for (size_t length = 0; length < 50; ++length) {
    std::vector<std::byte> bytes(length);
    seen.insert(hash128(bytes));
    ++hashes;
    for (size_t bit = 0; bit < 8 * length; ++bit, ++hashes) {
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
      seen.insert(hash128(bytes));
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    }
  }
  EXPECT_EQ(seen.size(), hashes);
}

}  // namespace
}  // namespace vescale_ckpt::plan
