#include "plan/hash.h"

#include <bit>
#include <cstring>

namespace vescale_ckpt::plan {
namespace {

constexpr uint64_t kFirst = 0x87C37B91114253D5, kSecond = 0x4CF5AD432745937F;

uint64_t word(const std::byte* at, size_t bytes) {
  uint64_t value = 0;
  std::memcpy(&value, at, bytes);
  return value;
}

uint64_t mixed_first(uint64_t value) {
  return std::rotl(value * kFirst, 31) * kSecond;
}

uint64_t mixed_second(uint64_t value) {
  return std::rotl(value * kSecond, 33) * kFirst;
}

uint64_t avalanche(uint64_t value) {
  value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD;
  value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53;
  return value ^ value >> 33;
}

}  // namespace

Hash128 hash128(std::span<const std::byte> bytes) {
  uint64_t first = 0, second = 0;
  const std::byte* at = bytes.data();
  for (size_t block = 0; block < bytes.size() / 16; ++block, at += 16) {
    first = (std::rotl(first ^ mixed_first(word(at, 8)), 27) + second) * 5 + 0x52DCE729;
    second = (std::rotl(second ^ mixed_second(word(at + 8, 8)), 31) + first) * 5 + 0x38495AB5;
  }
  const size_t rest = bytes.size() % 16;
  if (rest > 8) second ^= mixed_second(word(at + 8, rest - 8));
  if (rest > 0) first ^= mixed_first(word(at, rest < 8 ? rest : 8));
  first ^= bytes.size();
  second ^= bytes.size();
  first += second;
  second += first;
  first = avalanche(first);
  second = avalanche(second);
  first += second;
  second += first;
  return {first, second};
}

}  // namespace vescale_ckpt::plan
