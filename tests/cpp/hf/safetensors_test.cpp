#include "hf/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/crc32.h"
#include "base/error.h"
#include "format/checksum_table.h"
#include "hf/safetensors_layout.h"

namespace vescale_ckpt::hf {
namespace {

using namespace std::string_literals;

std::string head_of(std::string_view json) {
  const uint64_t length = json.size();
  std::string head(reinterpret_cast<const char*>(&length), sizeof length);
  return head.append(json);
}

// One tensor's entry.
std::string entry(std::string_view name, std::string_view dtype, std::string_view shape, std::string_view offsets) {
  return "\"" + std::string(name) + "\":{\"dtype\":\"" + std::string(dtype) + "\",\"shape\":" + std::string(shape) +
         ",\"data_offsets\":" + std::string(offsets) + "}";
}

SafetensorsHeader parse_file(std::string_view head, uint64_t data_bytes, bool checksums = true) {
  const uint64_t file_bytes = head.size() + data_bytes;
  const uint64_t bytes = SafetensorsHeader::head_bytes(head.substr(0, 8), file_bytes, "file");
  if (bytes > head.size()) throw Error::corrupt("the test gave too little", "file", 0);
  return SafetensorsHeader::parse(head.substr(0, bytes), file_bytes, "file", checksums);
}

std::optional<Error> refusal(std::string_view head, uint64_t data_bytes, bool checksums = true) {
  try {
    parse_file(head, data_bytes, checksums);
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

const std::string kOk = entry("a", "U8", "[2]", "[0,2]");

uint32_t dtype_named(std::string_view name) {
  const auto found = std::ranges::find(safetensors_dtypes(), name, &SafetensorsDType::name);
  return static_cast<uint32_t>(found - safetensors_dtypes().begin());
}

TEST(SafetensorsHeader, IgnoresFieldsThatItDoesNotKnow) {
  const std::string json = "{\"a\":{\"new\":[1,{\"x\":null}],\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}";
  EXPECT_EQ(parse_file(head_of(json), 2).tensors().size(), 1u);
}

struct Hostile {
  const char* why;
  std::string json;
  uint64_t data_bytes;
  Error::Kind kind;
  const char* says;
};

TEST(SafetensorsHeader, NamesWhatIsWrong) {
  constexpr auto corrupt = Error::Kind::corrupt, invalid = Error::Kind::invalid;
  const std::string twenty = "18446744073709551615";
  const std::vector<Hostile> headers = {
      {"no JSON", "", 0, corrupt, "does not start with '{'"},
      {"a list", "[]", 0, corrupt, "does not start with '{'"},
      {"a space first", " {}", 0, corrupt, "does not start with '{'"},
      {"no end", "{", 0, corrupt, "expected a string"},
      {"trailing junk", "{}x", 0, corrupt, "padding"},
      {"metadata null twice", "{\"__metadata__\":null,\"__metadata__\":null}", 0, corrupt, "a second"},
      {"metadata nearly null", "{\"__metadata__\":nul}", 0, corrupt, "expected a value"},
      {"metadata twice", "{\"__metadata__\":{},\"__metadata__\":{}}", 0, corrupt, "a second \"__metadata__\""},
      {"checksums twice", "{\"__metadata__\":{\"vescale_ckpt.crc32\":\"\",\"vescale_ckpt.crc32\":\"\"}}", 0, corrupt,
       "a second \"vescale_ckpt.crc32\""},
      {"no object", "{\"a\":1}", 0, corrupt, "expected '{'"},
      {"fields in a list", "{\"a\":[\"U8\",[2],[0,2]]}", 2, corrupt, "expected '{'"},
      {"no dtype", "{\"a\":{\"shape\":[2],\"data_offsets\":[0,2]}}", 2, corrupt, "no \"dtype\""},
      {"no shape", "{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,2]}}", 2, corrupt, "no \"shape\""},
      {"no offsets", "{\"a\":{\"dtype\":\"U8\",\"shape\":[2]}}", 2, corrupt, "no \"data_offsets\""},
      {"two dtypes", "{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\"}}", 2, corrupt, "\"dtype\" twice"},
      {"two shapes", "{\"a\":{\"shape\":[2],\"shape\":[2]}}", 2, corrupt, "\"shape\" twice"},
      {"two pairs of offsets", "{\"a\":{\"data_offsets\":[0,2],\"data_offsets\":[0,2]}}", 2, corrupt, "twice"},
      {"an unknown dtype", "{" + entry("a", "U4", "[2]", "[0,2]") + "}", 2, corrupt, "unknown dtype \"U4\""},
      {"a dtype that is a number", "{\"a\":{\"dtype\":8}}", 2, corrupt, "expected a string"},
      {"a shape that is a number", "{" + entry("a", "U8", "2", "[0,2]") + "}", 2, corrupt, "expected '['"},
      {"a negative size", "{" + entry("a", "U8", "[-2]", "[0,2]") + "}", 2, corrupt, "whole number"},
      {"nested shapes", "{" + entry("a", "U8", "[[2]]", "[0,2]") + "}", 2, corrupt, "expected a number"},
      {"one offset", "{" + entry("a", "U8", "[2]", "[0]") + "}", 2, corrupt, "fewer than two"},
      {"three offsets", "{" + entry("a", "U8", "[2]", "[0,2,2]") + "}", 2, corrupt, "more than two"},
      {"a name twice", "{" + kOk + "," + entry("a", "U8", "[2]", "[2,4]") + "}", 4, invalid, "tensor \"a\" twice"},
      {"an escaped name twice", "{" + kOk + "," + entry("\\u0061", "U8", "[2]", "[2,4]") + "}", 4, invalid, "twice"},
      {"an end before the begin", "{" + entry("a", "U8", "[2]", "[2,0]") + "}", 2, invalid, "before they begin"},
      {"offsets that overflow", "{" + entry("a", "U8", "[0]", "[" + twenty + "," + twenty + "]") + "}", 0, invalid,
       "offsets overflow"},
      {"a size that is not the shape's", "{" + entry("a", "U16", "[2]", "[0,2]") + "}", 2, invalid, "is 4 bytes"},
      {"a shape that overflows", "{" + entry("a", "U8", "[" + twenty + ",2]", "[0,2]") + "}", 2, invalid, "overflows"},
      {"bits that overflow", "{" + entry("a", "U8", "[2305843009213693952]", "[0,0]") + "}", 0, invalid, "overflows"},
      {"a product that wraps to fit", "{" + entry("a", "U8", "[4294967296,4294967296,2]", "[0,2]") + "}", 2, invalid,
       "overflows"},
      {"an end inside a byte", "{" + entry("a", "F4", "[3]", "[0,2]") + "}", 2, invalid, "inside a byte"},
      {"an overlap", "{" + kOk + "," + entry("b", "U8", "[2]", "[1,3]") + "}", 3, invalid, "inside of others"},
      {"the same bytes twice", "{" + kOk + "," + entry("b", "U8", "[2]", "[0,2]") + "}", 2, invalid,
       "inside of others"},
      {"an empty one inside", "{" + kOk + "," + entry("b", "U8", "[0]", "[1,1]") + "}", 2, invalid, "inside of others"},
      {"a hole", "{" + kOk + "," + entry("b", "U8", "[1]", "[3,4]") + "}", 4, invalid, "belong to nobody"},
      {"a hole at the start", "{" + entry("a", "U8", "[1]", "[1,2]") + "}", 2, invalid, "belong to nobody"},
      {"too few bytes", "{" + kOk + "}", 1, corrupt, "truncated"},
      {"no bytes", "{" + kOk + "}", 0, corrupt, "truncated"},
      {"too many bytes", "{" + kOk + "}", 3, corrupt, "belong to nobody"},
  };
  for (const Hostile& hostile : headers) {
    for (const bool checksums : {true, false}) {
      const auto error = refusal(head_of(hostile.json), hostile.data_bytes, checksums);
      ASSERT_TRUE(error) << hostile.why;
      EXPECT_EQ(error->kind, hostile.kind) << hostile.why << ": " << error->what();
      EXPECT_EQ(error->path, "file") << hostile.why;
      EXPECT_NE(std::string(error->what()).find(hostile.says), std::string::npos)
          << hostile.why << ": " << error->what();
      EXPECT_LT(std::string(error->what()).size(), 500u) << hostile.why;
    }
  }
}

TEST(SafetensorsHeader, SaysWhereInTheFile) {
  const auto error = refusal(head_of("{\"__metadata__\":{\"a\":1}}"), 0);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->offset, 8u + 21u);
}

TEST(SafetensorsHeader, HasALengthThatCanBe) {
  const auto of_length = [](uint64_t length, uint64_t file_bytes) {
    const std::string first(reinterpret_cast<const char*>(&length), sizeof length);
    try {
      return std::to_string(SafetensorsHeader::head_bytes(first, file_bytes, "file"));
    } catch (const Error& error) {
      return std::string(error.what());
    }
  };
  EXPECT_EQ(of_length(2, 10), "10");
  EXPECT_EQ(of_length(kMostSafetensorsHeader, 1ull << 40), std::to_string(kMostSafetensorsHeader + 8));
  EXPECT_NE(of_length(kMostSafetensorsHeader + 1, 1ull << 40).find("at most"), std::string::npos);
  EXPECT_NE(of_length(UINT64_MAX, 1ull << 40).find("at most"), std::string::npos);
  EXPECT_NE(of_length(3, 10).find("truncated"), std::string::npos);
  EXPECT_THROW(SafetensorsHeader::head_bytes("\2\0\0"s, 3, "file"), Error);
}

// --- What we write

// As the writer would: blocks of the tensors' bytes, which are `data`.
std::vector<uint32_t> blocks_of(const SafetensorsLayout& layout, std::string_view data) {
  std::vector<uint32_t> blocks;
  uint64_t at = layout.data_begin();
  for (const uint64_t bytes : layout.bytes()) {
    for (const uint64_t end = at + bytes; at < end;) {
      const uint64_t next = std::min(end, align_down(at, format::kChecksumBlock) + format::kChecksumBlock);
      blocks.push_back(crc32(0, data.data() + (at - layout.data_begin()), next - at));
      at = next;
    }
  }
  return blocks;
}

TEST(SafetensorsLayout, MakesRoomForItsChecksumsAtEverySize) {
  for (uint64_t names = 0; names < 9000; names += 23) {  // every length of a header, around and across blocks
    const SafetensorsLayout layout({{std::string(names, 'n'), dtype_named("U8"), {3 * format::kChecksumBlock + names}}},
                                   {});
    const std::string head = layout.head(blocks_of(layout, std::string(3 * format::kChecksumBlock + names, 'x')));
    EXPECT_EQ(head.size() % kBlock, kSafetensorsDataAt);
    EXPECT_TRUE(head.ends_with("        "));
    ASSERT_TRUE(parse_file(head, 3 * format::kChecksumBlock + names).has_checksums()) << names;
    EXPECT_LT(head.size(), 8 + 400 + names + kBlock);
  }
}

TEST(SafetensorsLayout, RefusesWhatNoReaderWouldTake) {
  const auto refused = [](std::vector<SafetensorsLayout::Tensor> tensors) {
    try {
      SafetensorsLayout(std::move(tensors), {});
    } catch (const Error& error) {
      EXPECT_EQ(error.kind, Error::Kind::invalid);
      return true;
    }
    return false;
  };
  const uint32_t u8 = dtype_named("U8"), f4 = dtype_named("F4");
  EXPECT_FALSE(refused({}));
  EXPECT_TRUE(refused({{"__metadata__", u8, {1}}}));
  EXPECT_TRUE(refused({{"a", u8, {1}}, {"a", u8, {1}}}));
  EXPECT_TRUE(refused({{"a", f4, {}}}));
  EXPECT_TRUE(refused({{"a", f4, {1ull << 63}}}));
  EXPECT_TRUE(refused({{"a", u8, {1ull << 40, 1ull << 40}}}));
  EXPECT_TRUE(refused({{std::string(kMostSafetensorsHeader, 'n'), u8, {1}}}));
}

TEST(SafetensorsChecksums, FindAnyFlippedBitOfTheHead) {
  const SafetensorsLayout layout({{"name", dtype_named("F32"), {2, 2}}}, {{"key", "value"}});
  std::string head = layout.head(blocks_of(layout, std::string(16, 'x')));
  for (size_t bit = 0; bit < 8 * head.size(); ++bit) {
    const auto flip = [&] { head[bit / 8] = static_cast<char>(head[bit / 8] ^ 1 << bit % 8); };
    flip();
    const auto error = refusal(head, 16);
    ASSERT_TRUE(error) << "bit " << bit;
    flip();
  }
  EXPECT_FALSE(refusal(head, 16));
}

TEST(SafetensorsChecksums, AreTextAndBack) {
  SafetensorsChecksums checksums{0xDEADBEEF, {}};
  for (uint32_t blocks = 0; blocks < 50; ++blocks) {
    const std::string text = checksum_text(checksums);
    EXPECT_EQ(text.size(), checksum_text_bytes(blocks));
    const auto back = parse_checksum_text(text);
    ASSERT_TRUE(back);
    EXPECT_EQ(back->head, checksums.head);
    EXPECT_EQ(back->blocks, checksums.blocks);
    EXPECT_FALSE(parse_checksum_text(text + "A"));
    EXPECT_FALSE(parse_checksum_text(text.substr(1)));
    EXPECT_FALSE(parse_checksum_text("G" + text.substr(1)));
    EXPECT_EQ(parse_checksum_text(text.substr(0, text.size() - 1) + "=").has_value(), false);
    checksums.blocks.push_back(blocks * 0x9E3779B9u);
  }
  EXPECT_FALSE(parse_checksum_text(""));
}

// --- Headers changed at random: refused by name or understood, and never more than that. A few thousand in each run;
// `make fuzz` goes on for as many seconds as VESCALE_CKPT_FUZZ_SECONDS says, under AddressSanitizer.

using Random = std::mt19937_64;

struct Seed {
  std::string head;
  uint64_t data_bytes;
};

std::vector<Seed> seeds() {
  std::vector<Seed> seeds;
  const auto add = [&](const std::string& json, uint64_t bytes) { seeds.push_back({head_of(json), bytes}); };
  add("{}", 0);
  add("{\"__metadata__\":{\"format\":\"pt\"}," + entry("a", "F32", "[2,3]", "[0,24]") + "," +
          entry("b\\ud83d\\ude00", "BF16", "[]", "[24,26]") + "," + entry("c", "I64", "[0]", "[26,26]") + "}   ",
      26);
  add("{" + entry("é", "F4", "[2,4]", "[0,4]") + "," + entry("x", "F6_E3M2", "[4]", "[4,7]") + "}", 7);
  add("{\"a\":{\"x\":[1,-2.5e3,{\"y\":null}],\"dtype\":\"U8\",\"shape\":[1,1,1,1],\"data_offsets\":[0,1]}}", 1);
  const SafetensorsLayout layout({{"w", 17, {100, 1000}}, {"v", 4, {9}}}, {{"k", "v"}});
  const uint64_t bytes = layout.file_bytes() - layout.data_begin();
  seeds.push_back({layout.head(blocks_of(layout, std::string(bytes, 'x'))), bytes});
  return seeds;
}

// What headers are made of, and numbers at which arithmetic ends.
const std::string kSigns[] = {"{",       "}",    "[",    "]",          ",",  ":",       "\"",   "\\", "\\u",
                              "\\ud800", "null", "true", "-",          "0",  "1",       "e",    ".",  " ",
                              "\n",      "\0"s,  "\xff", "4294967296", "F4", "F6_E2M3", "BOOL", "C64"};
const std::string kPhrases[] = {"\xed\xa0\x80",
                                "\"__metadata__\":{}",
                                "\"vescale_ckpt.crc32\":\"AAAAAA\"",
                                "\"dtype\":\"F32\"",
                                "\"shape\":[]",
                                "\"data_offsets\":[0,0]",
                                "9223372036854775808",
                                "18446744073709551615",
                                "18446744073709551616",
                                "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[["};

void mutate(Seed& seed, const std::vector<Seed>& all, Random& random) {
  std::string& head = seed.head;
  const auto below = [&](uint64_t bound) { return bound == 0 ? 0 : random() % bound; };
  switch (random() % 8) {
    case 0:
      if (!head.empty()) head[below(head.size())] ^= static_cast<char>(1 << random() % 8);
      break;
    case 1:
      if (!head.empty()) head[below(head.size())] = static_cast<char>(random());
      break;
    case 2:
      head.insert(below(head.size() + 1),
                  random() % 4 == 0 ? kPhrases[below(std::size(kPhrases))] : kSigns[below(std::size(kSigns))]);
      break;
    case 3:
      head.erase(below(head.size()), below(16));
      break;
    case 4: {  // a piece of another, or of itself
      const std::string& from = all[below(all.size())].head;
      const size_t at = below(from.size());
      head.insert(below(head.size() + 1), from.substr(at, below(200)));
      break;
    }
    case 5:
      head.resize(below(head.size() + 1));
      break;
    case 6:
      seed.data_bytes = random() % 4 == 0 ? random() : below(2 * seed.data_bytes + 2);
      break;
    default: {  // a number
      const size_t at = head.find_first_of("0123456789", below(head.size()));
      if (at != head.npos) head.replace(at, 1 + below(3), std::to_string(random() >> random() % 64));
    }
  }
  if (random() % 8 != 0 && head.size() >= 8) {  // mostly of the right length, or nothing behind that is ever looked at
    const uint64_t length = head.size() - 8;
    std::memcpy(head.data(), &length, sizeof length);
  }
}

// All that callers count on.
void check_understood(const SafetensorsHeader& header, uint64_t file_bytes) {
  uint64_t at = header.data_begin(), blocks = 0;
  std::set<std::string> names;
  for (const SafetensorsHeader::Tensor& tensor : header.tensors()) {
    ASSERT_EQ(tensor.begin, at);
    ASSERT_GE(tensor.end, at);
    at = tensor.end;
    ASSERT_TRUE(names.insert(tensor.name).second);
    blocks += header.blocks(tensor).size();
    uint64_t bits = header.dtype(tensor).bits;
    for (const uint64_t size : header.shape(tensor)) ASSERT_FALSE(__builtin_mul_overflow(bits, size, &bits));
    ASSERT_EQ(bits % 8, 0u);
    ASSERT_EQ(bits / 8, tensor.end - tensor.begin);
    try {
      uint64_t elements = 1;
      for (const int64_t size : header.torch_shape(tensor)) elements *= static_cast<uint64_t>(size);
      const uint64_t item_bits = std::max(header.dtype(tensor).bits, 8u);
      ASSERT_EQ(elements * item_bits, (tensor.end - tensor.begin) * 8);
    } catch (const Error& error) {
      ASSERT_EQ(error.kind, Error::Kind::invalid);
    }
  }
  ASSERT_EQ(at, file_bytes);
  if (header.has_checksums()) {
    for (const SafetensorsHeader::Tensor& tensor : header.tensors()) {
      format::joined_crc(tensor.begin, tensor.end, header.blocks(tensor));
    }
  }
}

TEST(SafetensorsFuzz, HeadersAreRefusedByNameOrUnderstood) {
  const char* setting = std::getenv("VESCALE_CKPT_FUZZ_SECONDS");
  const auto until =
      std::chrono::steady_clock::now() + std::chrono::seconds(setting != nullptr ? std::atoi(setting) : 0);
  const std::vector<Seed> corpus = seeds();
  const uint64_t first = setting != nullptr ? std::random_device()() : 0;
  uint64_t runs = 0, understood = 0;
  for (; runs < 20'000 || std::chrono::steady_clock::now() < until; ++runs) {
    Random random(first + runs);
    Seed seed = corpus[random() % corpus.size()];
    for (uint64_t changes = random() % 4; changes-- > 0;) mutate(seed, corpus, random);
    const std::vector<char> exact(seed.head.begin(), seed.head.end());  // whose end AddressSanitizer guards
    const std::string_view head(exact.data(), exact.size());
    try {
      const SafetensorsHeader header = parse_file(head, seed.data_bytes, random() % 2 == 0);
      ++understood;
      check_understood(header, head.size() + seed.data_bytes);
      if (HasFatalFailure()) break;
    } catch (const Error& error) {
      ASSERT_TRUE(error.kind == Error::Kind::corrupt || error.kind == Error::Kind::invalid) << error.what();
      ASSERT_LT(std::string(error.what()).size(), 1000u);
    }
  }
  EXPECT_FALSE(HasFatalFailure()) << "run " << first + runs;
  EXPECT_GT(understood, runs / 10);  // else it only knocks at the door
  EXPECT_LT(understood, runs - runs / 10);
  RecordProperty("runs", std::to_string(runs));
}

}  // namespace
}  // namespace vescale_ckpt::hf
