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

TEST(ExportLayout, NamesOfTensorsThatAreNotStoredStandWithThoseThatAre) {
  const SafetensorsHeader::Metadata texts_of_all = {{"format", "pt"}};
  plan::Ranks ranks(1);
  ranks.tensor(0, "embed", {2});
  ranks.tensor(0, "other", {2});
  const std::vector<ExportLayout::Alias> aliases = {{"head", "embed"}, {"other", "embed"}, {"format", "other"}};
  const ExportLayout layout(ranks.plan().catalog(), 8, texts_of_all, aliases);
  std::vector<uint32_t> blocks;
  for (size_t row = 0; row < 2; ++row) {  // a box of 8 bytes in each file
    const auto place = layout.record_locations(0);
    const uint32_t file = static_cast<uint32_t>(place[2 * row]), begin = static_cast<uint32_t>(place[2 * row + 1]);
    blocks.insert(blocks.end(), {file, begin, 0, 8, 0, 0, 1, static_cast<uint32_t>(row)});
  }
  const std::vector<std::span<const uint32_t>> of_ranks = {blocks};
  const std::vector<std::string> heads = layout.heads(of_ranks);
  const auto texts = [&](size_t file) {
    return *SafetensorsHeader::parse(heads[file], layout.file_bytes(file), "file", true).metadata();
  };
  EXPECT_EQ(texts(0), (SafetensorsHeader::Metadata{{"format", "pt"}, {"head", "embed"}}));
  EXPECT_EQ(texts(1), texts_of_all);
}

}  // namespace
}  // namespace vescale_ckpt::hf
