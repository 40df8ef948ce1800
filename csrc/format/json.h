// Reads JSON of untrusted headers strictly: in one pass, without a tree, nested at most kMostDepth deep.
//
// The caller asks for what it expects, and gets an error if something else comes. Text must be valid UTF-8 (see
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
  // Arrays and objects may be nested so deep. Skipped ones count, too.
  static constexpr unsigned kMostDepth = 128;

  explicit JsonReader(std::string_view text) : text_(text) {}

  size_t at() const { return at_; }

  // All of these skip white space before a value, and throw JsonError if another value comes.
  void open(char bracket);  // '{' or '['
  // Whether another element follows in the innermost array or object, which `bracket` closes. Reads the comma or the
  // bracket.
  bool more(char bracket);
  std::string string();
  std::string key();  // a string and its colon
  uint64_t whole_number();
  void skip();  // any value
  bool null();  // whether null comes, which is read then
  // Checks that only `padding` is left.
  void end(char padding);

  [[noreturn]] void fail(const std::string& what) const;
  [[noreturn]] void fail(const std::string& what, size_t at) const;

 private:
  char peek();  // the next byte that is not white space; 0 at the end
  void take(char expected);
  void word(std::string_view expected);
  void number();
  bool digits();
  uint32_t hex4();
  void escape(std::string& out);

  std::string_view text_;
  size_t at_ = 0;
  unsigned depth_ = 0;
  bool first_ = false;  // nothing was read yet in the innermost array or object
};

// Appends `text` as a JSON string, quoted and escaped.
void append_json_string(std::string& out, std::string_view text);

// Returns the start of the first sequence that is not UTF-8 (overlong forms and surrogates are not); npos if there is
// none.
size_t invalid_utf8(std::string_view text);

}  // namespace vescale_ckpt::format
