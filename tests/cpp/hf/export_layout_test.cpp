#include "hf/export_layout.h"

#include <gtest/gtest.h>

#include "plan/ranks.h"

namespace vescale_ckpt::hf {
namespace {

TEST(ExportLayout, HeadsTakeChecksumsOfAllRanksInAnyOrder) {
  plan::Ranks ranks(2);
  ranks.shard(0, "w", {4, 6}, {0, 0}, {4, 2});
  ranks.shard(1, "w", {4, 6}, {0, 2}, {4, 4});
  const ExportLayout layout(ranks.plan().catalog(), UINT64_MAX, {}, {});
  const auto begin = static_cast<uint32_t>(layout.record_locations(0)[1]);
  const auto words = [&](uint32_t bytes, uint32_t crc) {
    return std::vector<uint32_t>{0, begin, 0, bytes, 0, 0, 1, crc};
  };
  const std::vector<uint32_t> a = words(32, 0x12345678), b = words(64, 0x01020304), none, two = {1, 2};
  const std::vector<std::span<const uint32_t>> blocks = {a, b};
  const std::vector<std::string> heads = layout.heads(blocks);
  ASSERT_EQ(heads.size(), 1u);
  const SafetensorsHeader header = SafetensorsHeader::parse(heads[0], layout.file_bytes(0), "file", true);
  ASSERT_EQ(header.tensors().size(), 1u);
  EXPECT_EQ(header.blocks(header.tensors()[0])[0], a.back() ^ b.back());
  for (const auto& wrong :
       std::vector<std::vector<std::span<const uint32_t>>>{{a}, {a, none}, {a, b, two}, {a, b, b}}) {
    EXPECT_THROW(layout.heads(wrong), Error);
  }
}

}  // namespace
}  // namespace vescale_ckpt::hf
