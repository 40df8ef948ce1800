#include "format/pickle_check.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace vescale_ckpt::format {
namespace {

constexpr uint32_t kDeepest = 500;  // nesting limit: the hash of a deeper tuple can overflow the stack of a thread

// The relevant traits of a value that the unpickler would make. Values have identity, because a list may be memoized
// while it is empty, and filled later.
struct Value {
  uint32_t depth = 0;
  uint32_t size = 1;      // elements or characters that a copy of it takes
  uint32_t inside = 0;    // sum of the sizes of its elements, at all depths
  bool imported = false;  // whether it is a class or function
};

using Node = uint32_t;       // index into the values
constexpr Node kScalar = 0;  // all numbers, None, True, False

uint32_t saturating_add(uint32_t a, uint64_t b) {
  return static_cast<uint32_t>(std::min<uint64_t>(uint64_t{a} + b, UINT32_MAX));
}

class Checker {
 public:
  Checker(std::span<const std::byte> pickle, bool storages)
      : rest_(pickle), limit_(pickle.size()), storages_(storages) {}

  std::string run() {
    while (error_.empty() && !stopped_) {
      if (rest_.empty()) return "it ends without a STOP";
      const auto opcode = static_cast<unsigned char>(rest_.front());
      rest_ = rest_.subspan(1);
      step(opcode);
    }
    return error_;
  }

  size_t consumed() const { return limit_ - rest_.size(); }

 private:
  void fail(const char* why) {
    if (error_.empty()) error_ = why;
  }

  bool skip(uint64_t bytes) {
    if (bytes > rest_.size()) {
      fail("it ends inside a value");
      return false;
    }
    rest_ = rest_.subspan(bytes);
    return true;
  }

  // Reads a little-endian length or index of so many bytes.
  uint64_t number(size_t bytes) {
    uint64_t value = 0;
    if (bytes > rest_.size()) {
      fail("it ends inside a number");
      return 0;
    }
    std::memcpy(&value, rest_.data(), bytes);
    rest_ = rest_.subspan(bytes);
    return value;
  }

  void skip_line() {
    const auto end = std::find(rest_.begin(), rest_.end(), std::byte{'\n'});
    if (end == rest_.end()) {
      fail("it ends inside a line");
    } else {
      rest_ = rest_.subspan(static_cast<size_t>(end - rest_.begin()) + 1);
    }
  }

  void push_scalar() { stack_.push_back(kScalar); }

  void push_new(Value value) {
    stack_.push_back(static_cast<Node>(values_.size()));
    values_.push_back(value);
  }

  void push_text(uint64_t length) {
    if (skip(length)) push_new({0, saturating_add(1, length), 0, false});
  }

  Node pop() {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) {
      fail("it takes from an empty stack");
      return kScalar;
    }
    const Node node = stack_.back();
    stack_.pop_back();
    return node;
  }

  // Hashing and copying visit all of a value, and a pickle can name the same large value again and again.
  void charge(const Value& value) {
    work_ += uint64_t{value.size} + value.inside;
    if (work_ > 8 * limit_ + (1 << 16)) fail("it copies or hashes its values again and again");
  }

  // Moves the values above the last mark to `container`, and drops the mark. Every `hashed`-th value is a key.
  void take_to_mark(Value& container, size_t hashed = 0) {
    if (marks_.empty()) {
      fail("it misses a mark");
      return;
    }
    for (size_t i = marks_.back(); i < stack_.size(); ++i) {
      if (hashed != 0 && (i - marks_.back()) % hashed == 0) charge(values_[stack_[i]]);
      put_into(container, stack_[i]);
    }
    stack_.resize(marks_.back());
    marks_.pop_back();
  }

  void put_into(Value& container, Node node) {
    const Value& value = values_[node];
    if (value.depth >= kDeepest) fail("it is nested too deeply");
    container.depth = std::max(container.depth, value.depth + 1);
    container.size = saturating_add(container.size, 1);
    container.inside = saturating_add(container.inside, uint64_t{value.size} + value.inside);
  }

  // Returns the container under the operands that an operation has taken.
  Value& top() {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back()) || stack_.back() == kScalar) {
      fail("it fills what is no container");
      return nowhere_;
    }
    return values_[stack_.back()];
  }

  void grow_to_mark(size_t hashed) {
    Value grown;
    take_to_mark(grown, hashed);
    Value& container = top();
    if (grown.size > 1) {
      container.depth = std::max(container.depth, grown.depth);
      container.size = saturating_add(container.size, grown.size);
      container.inside = saturating_add(container.inside, grown.inside);
    }
  }

  // A call copies its arguments.
  void call() {
    const Value arguments = values_[pop()];
    pop();
    charge(arguments);
    Value result = arguments;
    if (++result.depth > kDeepest) fail("it is nested too deeply");
    result.size = saturating_add(arguments.size, arguments.inside);
    result.inside = 0;
    push_new(result);
  }

  void memoize(uint64_t index) {
    // The unpickler allocates memos up to the largest index. A sound pickle numbers its memos from 0.
    if (stack_.empty()) {
      fail("it remembers a value that is not there");
      return;
    }
    ++memoized_;
    if (index > 2 * memoized_ + 16) {
      fail("it numbers its memos absurdly high");
      return;
    }
    if (index >= memo_.size()) memo_.resize(index + 1, kScalar);
    memo_[index] = stack_.back();
  }

  void recall(uint64_t index) { stack_.push_back(index < memo_.size() ? memo_[index] : kScalar); }

  void step(unsigned char opcode);

  std::span<const std::byte> rest_;
  const uint64_t limit_;
  const bool storages_;
  std::vector<Value> values_{Value{}};  // the first is kScalar
  std::vector<Node> stack_;
  std::vector<size_t> marks_;
  std::vector<Node> memo_;
  Value nowhere_;
  uint64_t memoized_ = 0;
  uint64_t work_ = 0;
  bool stopped_ = false;
  std::string error_;
};

void Checker::step(unsigned char opcode) {
  switch (opcode) {
    case 0x80:  // PROTO
      skip(1);
      return;
    case 0x95:  // FRAME
      skip(8);
      return;
    case '.':
      stopped_ = true;
      return;
    case '(':
      marks_.push_back(stack_.size());
      return;
    case '0':  // POP
      if (!marks_.empty() && marks_.back() == stack_.size()) {
        marks_.pop_back();
      } else {
        pop();
      }
      return;
    case '1': {  // POP_MARK
      Value dropped;
      take_to_mark(dropped);
      return;
    }
    case '2': {  // DUP
      const Node node = pop();
      stack_.push_back(node);
      stack_.push_back(node);
      return;
    }
    case 'N':
    case 0x88:
    case 0x89:
      push_scalar();
      return;
    case 'K':
      if (skip(1)) push_scalar();
      return;
    case 'M':
      if (skip(2)) push_scalar();
      return;
    case 'J':
      if (skip(4)) push_scalar();
      return;
    case 'G':
      if (skip(8)) push_scalar();
      return;
    case 0x8a:  // LONG1
    case 'U':   // SHORT_BINSTRING
    case 'C':   // SHORT_BINBYTES
    case 0x8c:  // SHORT_BINUNICODE
      push_text(number(1));
      return;
    case 0x8b:  // LONG4
    case 'T':   // BINSTRING
    case 'X':   // BINUNICODE
    case 'B':   // BINBYTES
      push_text(number(4));
      return;
    case 0x8d:  // BINUNICODE8
    case 0x8e:  // BINBYTES8
    case 0x96:  // BYTEARRAY8
      push_text(number(8));
      return;
    case '}':
    case ']':
    case ')':
    case 0x8f:
      push_new({1, 1, 0, false});
      return;
    case 0x85:
    case 0x86:
    case 0x87: {  // TUPLE1 to TUPLE3
      Value tuple;
      for (unsigned i = 0; i < opcode - 0x84u; ++i) put_into(tuple, pop());
      push_new(tuple);
      return;
    }
    case 't':
    case 0x91: {  // FROZENSET
      Value container;
      take_to_mark(container, opcode == 0x91 ? 1 : 0);
      push_new(container);
      return;
    }
    case 'a': {  // APPEND
      const Node value = pop();
      put_into(top(), value);
      return;
    }
    case 's': {  // SETITEM
      const Node value = pop();
      const Node key = pop();
      charge(values_[key]);
      put_into(top(), key);
      put_into(top(), value);
      return;
    }
    case 'e':
    case 'u':
    case 0x90:  // APPENDS, SETITEMS, ADDITEMS
      grow_to_mark(opcode == 'u' ? 2 : opcode == 0x90 ? 1 : 0);
      return;
    case 'c':  // GLOBAL
      skip_line();
      skip_line();
      push_new({0, 1, 0, true});
      return;
    case 0x93:  // STACK_GLOBAL
      pop();
      pop();
      push_new({0, 1, 0, true});
      return;
    case 'R':   // REDUCE
    case 0x81:  // NEWOBJ
      call();
      return;
    case 'b': {  // BUILD: sets attributes
      const Node state = pop();
      Value& object = top();
      if (object.imported) fail("it changes a class instead of making one of its objects");
      put_into(object, state);
      return;
    }
    case 'q':
      memoize(number(1));
      return;
    case 'r':
      memoize(number(4));
      return;
    case 0x94:  // MEMOIZE
      memoize(memo_.size());
      return;
    case 'h':
      recall(number(1));
      return;
    case 'j':
      recall(number(4));
      return;
    case 'Q':  // BINPERSID
      if (!storages_) fail("it refers to what is outside of it");
      pop();
      push_scalar();
      return;
    default:  // nothing has protocol 0's text, extension codes, INST, OBJ and out-of-band buffers
      fail("it uses an operation that data never needs");
      return;
  }
}

}  // namespace

std::string check_pickle(std::span<const std::byte> pickle, bool storages, size_t* end) {
  Checker checker(pickle, storages);
  std::string wrong = checker.run();
  if (end != nullptr) *end = checker.consumed();
  return wrong;
}

}  // namespace vescale_ckpt::format
