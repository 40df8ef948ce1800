// Paths of keys: packed, merged over ranks, and refused when malformed.
#include "metadata/key_paths.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/error.h"

namespace vescale_ckpt::metadata {
namespace {

std::span<const std::byte> bytes(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

std::string block(const std::vector<std::pair<std::string, std::vector<std::string>>>& names) {
  KeyPathsBuilder builder;
  for (const auto& [name, path] : names) {
    builder.name(name, static_cast<uint32_t>(path.size() + 1));
    for (const std::string& part : path) builder.text(part);
    builder.number(-7);
  }
  return builder.pack();
}

std::string path_text(const KeyPaths& paths, std::string_view name) {
  std::string result;
  KeyPaths::visit(
      paths.paths().at(paths.find(name).value()), [&](std::string_view part) { result.append(part).append("/"); },
      [&](int64_t part) { result += std::to_string(part) + "/"; });
  return result;
}

TEST(KeyPaths, TheFirstRankWins) {
  const std::string first = block({{"a", {"x", ""}}, {"", {}}}), second = block({{"b", {"y"}}, {"a", {"z"}}});
  const KeyPaths paths({bytes(first), bytes(first), {}, bytes(second)});
  EXPECT_TRUE(paths.any());
  ASSERT_EQ(paths.paths().size(), 3u);
  EXPECT_EQ(path_text(paths, "a"), "x//-7/");
  EXPECT_EQ(path_text(paths, ""), "-7/");
  EXPECT_EQ(path_text(paths, "b"), "y/-7/");
  EXPECT_EQ(paths.paths()[2].name, "b");
  EXPECT_EQ(paths.find("c"), std::nullopt);
}

TEST(KeyPaths, EmptyBlocksSayNothing) {
  EXPECT_FALSE(KeyPaths({}).any());
  EXPECT_FALSE(KeyPaths({{}, {}}).any());
  const std::string nothing = KeyPathsBuilder().pack();
  EXPECT_TRUE(KeyPaths({bytes(nothing)}).any());
}

TEST(KeyPaths, DamagedBlocksAreRefusedOrParsed) {
  const std::string whole = block({{"name", {"part", "other"}}, {"second", {"x"}}});
  for (size_t length = 1; length < whole.size(); ++length) {
    const std::vector<char> cut(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(length));
    EXPECT_THROW(KeyPaths({{reinterpret_cast<const std::byte*>(cut.data()), cut.size()}}), Error) << length;
  }
  EXPECT_THROW(KeyPaths({bytes(whole + "x")}), Error);
  for (size_t at = 0; at < whole.size(); ++at) {
    std::vector<char> flipped(whole.begin(), whole.end());
    flipped[at] = static_cast<char>(~flipped[at]);
    try {
      const KeyPaths paths({{reinterpret_cast<const std::byte*>(flipped.data()), flipped.size()}});
      for (const auto& path : paths.paths()) path_text(paths, path.name);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind, Error::Kind::invalid);
    }
  }
}

}  // namespace
}  // namespace vescale_ckpt::metadata
