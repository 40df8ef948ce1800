// Writes a pickle of protocol 4 opcode by opcode into the caller's memory. Does not check that there is room.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "base/error.h"

namespace vescale_ckpt::metadata {

// Callers provide the room: a number takes up to kMostNumber bytes, a text kTextFrame more than its own, a recall
// kMostRecall, a border between frames kFrameHeader, any other opcode one.
class PickleOut {
 public:
  static constexpr uint64_t kMostNumber = 10, kTextFrame = 5, kMostRecall = 5, kFrameHeader = 9;

  // Begins in a new frame. What several of them write, one behind another, is one pickle.
  explicit PickleOut(std::byte* out) : begin_(out), at_(out) { open_frame(); }

  // Begins a pickle.
  static PickleOut first(std::byte* out) {
    out[0] = std::byte{0x80};
    out[1] = std::byte{4};
    PickleOut pickle(out + 2);
    pickle.begin_ = out;
    return pickle;
  }

  template <typename... Opcodes>
  void op(Opcodes... opcodes) {
    ((*at_++ = static_cast<std::byte>(opcodes)), ...);
  }

  void number(int64_t value) {
    if (value >= 0 && value <= 0xFF) {
      op('K');
      append(&value, 1);
    } else if (value >= 0 && value <= 0xFFFF) {
      op('M');
      append(&value, 2);
    } else if (value >= INT32_MIN && value <= INT32_MAX) {
      op('J');
      append(&value, 4);
    } else {
      size_t bytes = 5;
      while (bytes < 8 && value >> (8 * bytes - 1) != 0 && value >> (8 * bytes - 1) != -1) ++bytes;
      op('\x8a', bytes);
      append(&value, bytes);
    }
  }

  void text(std::string_view value) {
    const uint64_t bytes = value.size();
    op(bytes <= 0xFF ? '\x8c' : 'X');
    append(&bytes, bytes <= 0xFF ? 1 : 4);
    append(value.data(), value.size());
  }

  // `name` is "module\nname\n".
  void global(std::string_view name) {
    op('c');
    append(name.data(), name.size());
  }

  // Returns the number that recalls the value written last.
  uint32_t memoize() {
    if (memos_ == UINT32_MAX) throw Error::invalid("the checkpoint's metadata is too large");
    op('\x94');
    return memos_++;
  }

  uint32_t memos() const { return memos_; }  // how many values were memoized

  void recall(uint32_t memo) {
    op(memo <= 0xFF ? 'h' : 'j');
    append(&memo, memo <= 0xFF ? 1 : 4);
  }

  // Call it between two opcodes. It may begin a new frame: unpicklers read a whole frame at once.
  void border() {
    if (at_ - frame_ < kFrame) return;
    close_frame();
    open_frame();
  }

  // Ends the last frame and returns the bytes written.
  uint64_t finish() {
    close_frame();
    return written();
  }

  uint64_t written() const { return static_cast<uint64_t>(at_ - begin_); }

 private:
  static constexpr ptrdiff_t kFrame = 64 << 10;

  void append(const void* data, size_t bytes) {
    std::memcpy(at_, data, bytes);
    at_ += bytes;
  }

  void open_frame() {
    op('\x95');
    at_ += sizeof(uint64_t);
    frame_ = at_;
  }

  void close_frame() {
    const auto bytes = static_cast<uint64_t>(at_ - frame_);
    std::memcpy(frame_ - sizeof bytes, &bytes, sizeof bytes);
  }

  std::byte* begin_;
  std::byte* at_;
  std::byte* frame_ = nullptr;
  uint32_t memos_ = 0;
};

}  // namespace vescale_ckpt::metadata
