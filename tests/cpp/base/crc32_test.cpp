#include "base/crc32.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace vescale_ckpt {
namespace {

// The definition: a bit at a time.
uint32_t reference(uint32_t crc, const unsigned char* data, size_t size) {
  crc = ~crc;
  for (; size != 0; ++data, --size) {
    crc ^= *data;
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) ? (crc >> 1) ^ 0xEDB88320u : crc >> 1;
  }
  return ~crc;
}

std::vector<unsigned char> random_bytes(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<unsigned char> bytes(size);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

struct Implementation {
  const char* name;
  uint32_t (*function)(uint32_t, const unsigned char*, size_t, unsigned char*);
  bool (*available)();
};

std::vector<Implementation> implementations() {
  const auto always = [] { return true; };
  return {
      {"table", detail::crc32_table, always},
#if defined(__x86_64__) || defined(__aarch64__)
      {"folding", detail::crc32_folding, detail::have_folding},
#endif
#if defined(__x86_64__)
      {"avx512", detail::crc32_avx512, detail::have_avx512},
#endif
      {"chosen",
       [](uint32_t crc, const unsigned char* data, size_t size, unsigned char* to) {
         return to == nullptr ? crc32(crc, data, size) : copy_crc32(to, data, size, crc);
       },
       always},
  };
}

class Crc32 : public ::testing::TestWithParam<Implementation> {
 protected:
  void SetUp() override {
    if (!GetParam().available()) GTEST_SKIP() << "this processor has no " << GetParam().name;
  }
  static uint32_t run(uint32_t crc, std::string_view text) {
    return GetParam().function(crc, reinterpret_cast<const unsigned char*>(text.data()), text.size(), nullptr);
  }
};

TEST_P(Crc32, KnownAnswers) {
  EXPECT_EQ(run(0, ""), 0u);
  EXPECT_EQ(run(0, "a"), 0xE8B7BE43u);
  EXPECT_EQ(run(0, "123456789"), 0xCBF43926u);
  EXPECT_EQ(run(0, "The quick brown fox jumps over the lazy dog"), 0x414FA339u);
  EXPECT_EQ(run(0, std::string(32, '\0')), 0x190A55ADu);
  EXPECT_EQ(run(0, std::string(32, '\xff')), 0xFF6CAB0Bu);
}

// Every length around the widths of the vectors, from every place in one, out of memory that ends there.
TEST_P(Crc32, EveryLengthAndAlignment) {
  const std::vector<unsigned char> bytes = random_bytes(2200, 1);
  for (size_t size = 0; size <= 1100; size += size < 600 ? 1 : 17) {
    const size_t start = size * 7 % 67;
    const std::vector<unsigned char> exact(bytes.begin() + static_cast<long>(start),
                                           bytes.begin() + static_cast<long>(start + size));
    const uint32_t crc = static_cast<uint32_t>(size * 2654435761u);
    ASSERT_EQ(GetParam().function(crc, bytes.data() + start, size, nullptr), reference(crc, exact.data(), size))
        << size;
    ASSERT_EQ(GetParam().function(crc, exact.data(), size, nullptr), reference(crc, exact.data(), size)) << size;
  }
}

// Every length around the widths of the vectors, between memory that ends there at both ends.
TEST_P(Crc32, CopiesWhatItChecksums) {
  const std::vector<unsigned char> bytes = random_bytes(100100, 7);
  const uint32_t begun = 0x12345678;
  for (size_t size = 0; size <= 100000; size += size < 600 ? 1 : 49700) {
    const size_t start = size * 7 % 67, shift = size * 5 % 61;
    const std::vector<unsigned char> exact(bytes.begin() + static_cast<long>(start),
                                           bytes.begin() + static_cast<long>(start + size));
    std::vector<unsigned char> copy(shift + size);
    ASSERT_EQ(GetParam().function(begun, exact.data(), size, copy.data() + shift), reference(begun, exact.data(), size))
        << size;
    ASSERT_TRUE(std::equal(exact.begin(), exact.end(), copy.begin() + static_cast<long>(shift))) << size;
  }
}

INSTANTIATE_TEST_SUITE_P(Each, Crc32, ::testing::ValuesIn(implementations()),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

TEST(Crc32Combine, JoinsTwoParts) {
  const std::vector<unsigned char> bytes = random_bytes(3000, 5);
  for (size_t cut = 0; cut <= bytes.size(); cut += 13) {
    const uint32_t a = crc32(0, bytes.data(), cut), b = crc32(0, bytes.data() + cut, bytes.size() - cut);
    ASSERT_EQ(crc32_combine(a, b, bytes.size() - cut), crc32(0, bytes.data(), bytes.size())) << cut;
  }
}

// Lengths that no test could checksum: (a b) c = a (b c).
TEST(Crc32Combine, IsAssociativeAtAnyLength) {
  std::mt19937_64 random(6);
  for (int round = 0; round < 500; ++round) {
    const auto a = static_cast<uint32_t>(random()), b = static_cast<uint32_t>(random());
    const auto c = static_cast<uint32_t>(random());
    const uint64_t size_b = random() >> (1 + random() % 63), size_c = random() >> (1 + random() % 63);
    ASSERT_EQ(crc32_combine(crc32_combine(a, b, size_b), c, size_c),
              crc32_combine(a, crc32_combine(b, c, size_c), size_b + size_c))
        << size_b << " " << size_c;
  }
}

}  // namespace
}  // namespace vescale_ckpt
