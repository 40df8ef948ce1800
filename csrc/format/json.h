// Reads JSON of untrusted headers, strictly: in one pass, without a tree, nested no deeper than kMostDepth.
//
// The caller asks for what it expects, and gets an error that says what is there instead. Text must be valid UTF-8 (see
// invalid_utf8).
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace vescale_ckpt::format {

struct JsonError : std::runtime_error {
  JsonError(const std::string& what, size_t at) : std::runtime_error(what), at(at) {}
  size_t at;  // bytes from the start of the text
};

class JsonReader {
 public:
  // Arrays and objects in each other, those that are skipped included.
  static constexpr unsigned kMostDepth = 128;

  explicit JsonReader(std::string_view text) : text_(text) {}

  size_t at() const { return at_; }

  // All of these skip white space before them and throw JsonError for anything but what they ask for.
  void open(char bracket);  // '{' or '['
  // Whether an element follows in what was opened last, which `bracket` closes; takes the comma, or the bracket.
  bool more(char bracket);
  std::string string();
  std::string key();  // a string and its colon
  uint64_t whole_number();
  void skip();  // any value
  // That nothing but `padding` is left.
  void end(char padding);

  [[noreturn]] void fail(const std::string& what) const;
  [[noreturn]] void fail(const std::string& what, size_t at) const;

 private:
  char peek();  // the next byte that is not white space; 0 at the end
  void take(char wanted);
  void word(std::string_view wanted);
  void number();
  bool digits();
  uint32_t hex4();
  void escape(std::string& out);

  std::string_view text_;
  size_t at_ = 0;
  unsigned depth_ = 0;
  bool first_ = false;  // nothing was read yet in what was opened last
};

// `text` as JSON: quoted, and escaped where it must be.
void append_json_string(std::string& out, std::string_view text);

// Where the first sequence that is not UTF-8 starts (too long a form and surrogates are none); npos if there is none.
size_t invalid_utf8(std::string_view text);

}  // namespace vescale_ckpt::format
