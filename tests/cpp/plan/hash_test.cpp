#include "plan/hash.h"

#include <gtest/gtest.h>

#include <string_view>

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

}  // namespace
}  // namespace vescale_ckpt::plan
