// Headers changed at random: refused by name or understood, and never more than that. A few thousand in each run;
// `make fuzz` goes on for as many seconds as VESCALE_CKPT_FUZZ_SECONDS says, under AddressSanitizer.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <random>

#include "format/checksum_table.h"
#include "hf/safetensors_headers.h"
#include "hf/safetensors_layout.h"

namespace vescale_ckpt::hf {
namespace {

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
  uint64_t blocks = 0, at = layout.data_begin();
  for (const uint64_t bytes : layout.bytes()) {
    blocks += format::cells(at, at + bytes);
    at += bytes;
  }
  seeds.push_back({layout.head(std::vector<uint32_t>(blocks, 7)), layout.file_bytes() - layout.data_begin()});
  return seeds;
}

// What headers are made of, and numbers at which arithmetic ends.
const std::vector<std::string> kWords = {"{",
                                         "}",
                                         "[",
                                         "]",
                                         ",",
                                         ":",
                                         "\"",
                                         "\\",
                                         "\\u",
                                         "\\ud800",
                                         "null",
                                         "true",
                                         "-",
                                         "0",
                                         "1",
                                         "e",
                                         ".",
                                         " ",
                                         "\n",
                                         std::string("\0", 1),
                                         "\xff",
                                         "\xed\xa0\x80",
                                         "\"__metadata__\":{}",
                                         "\"vescale_ckpt.crc32\":\"AAAAAA\"",
                                         "\"dtype\":\"F32\"",
                                         "\"shape\":[]",
                                         "\"data_offsets\":[0,0]",
                                         "9223372036854775808",
                                         "18446744073709551615",
                                         "18446744073709551616",
                                         "4294967296",
                                         "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
                                         "F4",
                                         "F6_E2M3",
                                         "BOOL",
                                         "C64"};

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
      head.insert(below(head.size() + 1), kWords[below(kWords.size())]);
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
void check(const SafetensorsHeader& header, uint64_t file_bytes) {
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
      check(header, head.size() + seed.data_bytes);
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
