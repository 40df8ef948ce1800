#include "stage/stream_copy.h"

#include <gtest/gtest.h>

#include "tensors.h"

namespace vescale_ckpt::stage {
namespace {

TEST(StreamCopy, CopiesAnyLengthBetweenAnyAddresses) {
  for (const uint64_t bytes : {0, 1, 63, 64, 511, 512, 513, 640, 4095, 4096, 4097, 4160, 8191, 70000}) {
    for (const uint64_t from : {0, 1, 24, 64}) {
      for (const uint64_t to : {0, 1, 16, 63}) {
        Memory source(bytes, from);
        fill_random(source.bytes(), bytes + from);
        const Memory target(bytes + 1, to);  // and one byte behind that must stay
        stream_copy(target.data(), source.data(), bytes);
        finish_stream_copies();
        ASSERT_EQ(target.text().substr(0, bytes), source.text()) << bytes << " from " << from << " to " << to;
        ASSERT_EQ(target.data()[bytes], std::byte{0xA5});
      }
    }
  }
  stream_copy(nullptr, nullptr, 0);
}

}  // namespace
}  // namespace vescale_ckpt::stage
