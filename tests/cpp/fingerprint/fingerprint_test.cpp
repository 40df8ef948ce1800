#include "fingerprint/fingerprint.h"

#include <algorithm>
#include <numeric>

#include "fingerprint/random_bytes.h"
#include "fingerprint/words.h"
#include "scratch.h"

namespace vescale_ckpt::fingerprint {
namespace {

using field::kPrime;
using field::power;
using field::product;
using field::reduced;
using field::sum;

// The definition, word by word.
Value by_definition(std::span<const std::byte> bytes) {
  const Value point = of_bytes(reinterpret_cast<const std::byte*>("\1"), 1, kWordBytes);  // x^1
  Value total = 0, power = 1;
  for (size_t begin = 0; begin < bytes.size(); begin += kWordBytes, power = product(power, point)) {
    Value word = 0;
    for (size_t i = begin; i < std::min(bytes.size(), begin + kWordBytes); ++i) {
      word |= Value{std::to_integer<uint64_t>(bytes[i])} << (8 * (i - begin));
    }
    total = sum(total, product(word, power));
  }
  return total;
}

TEST(Field, ObeysItsLaws) {
  std::mt19937_64 random(1);
  const auto any = [&] { return reduced((Value{random()} << 64) | random()); };
  EXPECT_EQ(reduced(kPrime), Value{0});
  EXPECT_EQ(reduced(~Value{0}), Value{1});
  EXPECT_EQ(product(kPrime - 1, kPrime - 1), Value{1});
  EXPECT_EQ(product(Value{1} << 126, 2), Value{1});  // 2^127 is 1
  for (int i = 0; i < 1000; ++i) {
    const Value a = any(), b = any(), c = any();
    EXPECT_EQ(product(a, sum(b, c)), sum(product(a, b), product(a, c)));
    EXPECT_EQ(product(a, product(b, c)), product(product(a, b), c));
    EXPECT_EQ(sum(a, kPrime - a), Value{0});
  }
  // Fermat's little theorem: a^(p - 1) is 1. The exponent does not fit, so a^p is computed by 127 squarings over a.
  const Value a = any();
  Value squared = a;
  for (int i = 0; i < 127; ++i) squared = product(squared, squared);
  EXPECT_EQ(squared, product(a, a));  // a^(2^127) is a * a^(p)
  EXPECT_EQ(product(power(a, kPrime - 2), a), Value{1});
}

TEST(Fingerprint, IsThePolynomialAtThePoint) {
  for (const size_t bytes : {0u, 1u, 5u, 6u, 7u, 48u, 53u, 1535u, 1536u, 1537u, 10'000u, 99'999u}) {
    const std::vector<std::byte> data = random_bytes(bytes, bytes);
    EXPECT_EQ(of_bytes(data.data(), bytes, 0), by_definition(data)) << bytes;
  }
  const std::vector<std::byte> ones(70'000, std::byte{0xff});  // the largest sums
  EXPECT_EQ(of_bytes(ones.data(), ones.size(), 0), by_definition(ones));
}

#if defined(__x86_64__)
TEST(Fingerprint, ImplementationsAgree) {
  if (!detail::have_ifma()) GTEST_SKIP() << "this processor has no IFMA";
  for (const bool largest : {false, true}) {
    for (uint64_t bytes = 1; bytes <= kBlockWords * kWordBytes; bytes += bytes < 600 || bytes > 6000 ? 1 : 13) {
      std::vector<std::byte> data = random_bytes(bytes, bytes);
      if (largest) std::ranges::fill(data, std::byte{0xff});
      ASSERT_EQ(detail::block_ifma(data.data(), bytes), detail::block_portable(data.data(), bytes)) << bytes;
    }
  }
}
#endif

TEST(Fingerprint, IsTheSumOfItsPartsWhereverTheyAreCut) {
  const std::vector<std::byte> data = random_bytes(5000, 3);
  const Value whole = of_bytes(data.data(), data.size(), 0);
  std::mt19937_64 random(4);
  for (int round = 0; round < 200; ++round) {
    Value total = 0;
    for (size_t begin = 0, end = 0; begin < data.size(); begin = end) {
      end = std::min<size_t>(data.size(), begin + 1 + random() % (round < 100 ? 8 : 3000));
      total = sum(total, of_bytes(data.data() + begin, end - begin, static_cast<int64_t>(begin)));
    }
    EXPECT_EQ(total, whole);
  }
}

TEST(Fingerprint, OfChunksDoesNotDependOnHowTheTensorIsCutAndStored) {
  const std::vector<int64_t> shape{37, 11, 64};
  constexpr int64_t kElements = 37 * 11 * 64;
  for (const uint32_t item : {1u, 2u, 4u, 8u, 16u}) {
    const std::vector<std::byte> data = random_bytes(kElements * item, item);
    const Value whole = of_bytes(data.data(), data.size(), 0);
    const std::vector<int64_t> strides{11 * 64, 64, 1};
    for (size_t dim = 0; dim < 3; ++dim) {
      for (const int64_t cut : {int64_t{1}, shape[dim] / 2, shape[dim] - 1}) {
        std::vector<int64_t> first = shape, second = shape, offset(3);
        first[dim] = cut;
        second[dim] -= cut;
        offset[dim] = cut;
        const std::vector<Chunk> chunks{
            {io::Box(item, shape, std::vector<int64_t>(3), first, strides), data.data()},
            {io::Box(item, shape, offset, second, strides), data.data() + cut * strides[dim] * item}};
        const std::vector<Value> values = of_chunks(chunks, 2);
        EXPECT_EQ(sum(values[0], values[1]), whole) << item << " bytes, dim " << dim << " at " << cut;
      }
    }
    // The same tensor with its dimensions in another order in memory.
    std::vector<std::byte> turned(data.size());
    const std::vector<int64_t> turned_strides{1, 37 * 64, 37};
    const io::Box box(item, shape, std::vector<int64_t>(3), shape, turned_strides);
    box.scatter(data.data(), 0, data.size(), turned.data());
    EXPECT_EQ(of_chunks(std::vector<Chunk>{{box, turned.data()}}, 1)[0], whole);
  }
}

TEST(Fingerprint, OfLargeChunksIsComputedByAllThreads) {
  const std::vector<std::byte> data = random_bytes(20 << 20, 5);
  const std::vector<int64_t> size{20 << 20}, zero{0}, one{1};
  const std::vector<Chunk> chunks{{io::Box(1, size, zero, size, one), data.data()},
                                  {io::Box(1, zero, zero, zero, one), nullptr}};
  const std::vector<Value> values = of_chunks(chunks, 4);
  Value whole = 0;
  for (size_t at = 0; at < data.size(); at += 1 << 20) {
    whole = sum(whole, of_bytes(data.data() + at, 1 << 20, static_cast<int64_t>(at)));
  }
  EXPECT_EQ(values[0], whole);
  EXPECT_EQ(values[1], Value{0});
}

TEST(Fingerprint, ChangesWithEachBitAndEachPosition) {
  std::vector<std::byte> data(600, std::byte{0x55});
  std::set<std::pair<uint64_t, uint64_t>> seen;
  const auto see = [&] {
    const Value value = of_bytes(data.data(), data.size(), 0);
    return seen.emplace(static_cast<uint64_t>(value), static_cast<uint64_t>(value >> 64)).second;
  };
  EXPECT_TRUE(see());
  for (std::byte& byte : data) {
    for (int bit = 0; bit < 8; ++bit) {
      byte ^= std::byte(1 << bit);
      EXPECT_TRUE(see());
      byte ^= std::byte(1 << bit);
    }
  }
}

}  // namespace
}  // namespace vescale_ckpt::fingerprint
