#include "io/remote.h"

#include <algorithm>
#include <cctype>
#include <utility>

#include "base/error.h"

namespace vescale_ckpt::io {
namespace {

constexpr uint64_t kLeastPart = 5 << 20;
constexpr uint64_t kMostParts = 8'000;  // 10,000 are allowed, but the size is an estimate

RemoteStore& registered() {
  static RemoteStore& store = *new RemoteStore;  // never destroyed: it may hold what must not outlive its runtime
  return store;
}

}  // namespace

void set_remote_store(RemoteStore store) {
  registered() = std::move(store);
}

bool is_remote(std::string_view path) {
  const size_t end = path.find("://");
  return end != std::string_view::npos && end != 0 && std::all_of(path.begin(), path.begin() + end, [](char letter) {
           return std::isalnum(static_cast<unsigned char>(letter)) != 0 || letter == '+' || letter == '.' ||
                  letter == '-';
         });
}

const RemoteStore& remote_store() {
  if (!registered().open) throw Error::invalid("no store is registered for paths with a scheme");
  return registered();
}

uint64_t part_bytes_for(uint64_t expected_bytes, uint64_t unit, uint64_t most) {
  const uint64_t least = std::max(kLeastPart, expected_bytes / kMostParts);
  const uint64_t wanted = std::clamp(expected_bytes, least, std::max(least, most));
  return (wanted + unit - 1) / unit * unit;
}

}  // namespace vescale_ckpt::io
