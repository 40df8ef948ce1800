#include "format/json.h"

#include <cstdio>
#include <cstring>

namespace vescale_ckpt::format {
namespace {

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

std::string quoted(char c) {
  return {'\'', c, '\''};
}

void append_utf8(std::string& out, uint32_t code) {
  if (code < 0x80) {
    out += static_cast<char>(code);
    return;
  }
  if (code < 0x800) {
    out += static_cast<char>(0xC0 | (code >> 6));
  } else {
    if (code < 0x10000) {
      out += static_cast<char>(0xE0 | (code >> 12));
    } else {
      out += static_cast<char>(0xF0 | (code >> 18));
      out += static_cast<char>(0x80 | ((code >> 12) & 0x3F));
    }
    out += static_cast<char>(0x80 | ((code >> 6) & 0x3F));
  }
  out += static_cast<char>(0x80 | (code & 0x3F));
}

}  // namespace

void JsonReader::fail(const std::string& what) const {
  fail(what, at_);
}

void JsonReader::fail(const std::string& what, size_t at) const {
  throw JsonError(what, at);
}

char JsonReader::peek() {
  while (at_ < text_.size() && std::strchr(" \t\n\r", text_[at_]) != nullptr && text_[at_] != '\0') ++at_;
  return at_ < text_.size() ? text_[at_] : '\0';
}

void JsonReader::take(char expected) {
  if (peek() != expected || at_ >= text_.size()) {
    fail("expected " + quoted(expected) + (at_ >= text_.size() ? ", got the end" : ""));
  }
  ++at_;
}

void JsonReader::open(char bracket) {
  take(bracket);
  if (++depth_ > kMostDepth) fail("values are nested more than " + std::to_string(kMostDepth) + " deep");
  first_ = true;
}

bool JsonReader::more(char bracket) {
  const char next = peek();
  if (next == bracket) {
    ++at_;
    --depth_;
    first_ = false;
    return false;
  }
  if (first_) {
    first_ = false;
    return true;
  }
  if (next != ',') fail("expected ',' or " + quoted(bracket));
  ++at_;
  if (peek() == bracket) fail("a comma with nothing behind it");
  return true;
}

uint32_t JsonReader::hex4() {
  uint32_t code = 0;
  for (int i = 0; i < 4; ++i, ++at_) {
    const char c = at_ < text_.size() ? text_[at_] : '\0';
    const int digit = is_digit(c)              ? c - '0'
                      : (c >= 'a' && c <= 'f') ? c - 'a' + 10
                      : (c >= 'A' && c <= 'F') ? c - 'A' + 10
                                               : -1;
    if (digit < 0) fail("expected four hexadecimal digits");
    code = code << 4 | static_cast<uint32_t>(digit);
  }
  return code;
}

// Reads an escape after its backslash.
void JsonReader::escape(std::string& out) {
  constexpr std::string_view kNames = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
  const char name = at_ < text_.size() ? text_[at_] : '\0';
  ++at_;
  if (const size_t which = name == '\0' ? std::string_view::npos : kNames.find(name); which != kNames.npos) {
    out += kMeanings[which];
    return;
  }
  if (name != 'u') fail("an unknown escape", at_ - 1);
  const size_t start = at_;
  uint32_t code = hex4();
  if (code >= 0xDC00 && code < 0xE000) fail("half of a surrogate pair", start);
  if (code >= 0xD800 && code < 0xDC00) {
    if (text_.substr(at_, 2) != "\\u") fail("half of a surrogate pair", start);
    at_ += 2;
    const uint32_t low = hex4();
    if (low < 0xDC00 || low >= 0xE000) fail("half of a surrogate pair", start);
    code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
  }
  append_utf8(out, code);
}

std::string JsonReader::string() {
  if (peek() != '"') fail("expected a string");
  const size_t start = at_++;
  std::string out;
  for (;;) {
    size_t end = at_;
    while (end < text_.size() && text_[end] != '"' && text_[end] != '\\' &&
           static_cast<unsigned char>(text_[end]) >= 0x20) {
      ++end;
    }
    out.append(text_, at_, end - at_);
    at_ = end;
    if (at_ >= text_.size()) fail("a string without an end", start);
    const char stop = text_[at_];
    if (stop != '"' && stop != '\\') fail("a control character in a string");
    ++at_;
    if (stop == '"') return out;
    escape(out);
  }
}

std::string JsonReader::key() {
  std::string name = string();
  take(':');
  return name;
}

bool JsonReader::digits() {
  const size_t start = at_;
  while (at_ < text_.size() && is_digit(text_[at_])) ++at_;
  return at_ != start;
}

uint64_t JsonReader::whole_number() {
  peek();
  const size_t start = at_;
  number();
  const std::string_view text = text_.substr(start, at_ - start);
  uint64_t value = 0;
  for (const char c : text) {
    if (!is_digit(c))
      fail("expected a whole number that is not negative, got " + std::string(text.substr(0, 40)), start);
    if (__builtin_mul_overflow(value, uint64_t{10}, &value) ||
        __builtin_add_overflow(value, static_cast<uint64_t>(c - '0'), &value)) {
      fail("a number of more than 64 bits", start);
    }
  }
  return value;
}

void JsonReader::number() {
  const size_t start = at_;
  if (at_ < text_.size() && text_[at_] == '-') ++at_;
  const size_t first = at_;
  if (!digits()) fail("expected a number", start);
  if (text_[first] == '0' && at_ - first > 1) fail("a number with a leading zero", start);
  if (at_ < text_.size() && text_[at_] == '.') {
    ++at_;
    if (!digits()) fail("a number that ends in a point", start);
  }
  if (at_ < text_.size() && (text_[at_] == 'e' || text_[at_] == 'E')) {
    ++at_;
    if (at_ < text_.size() && (text_[at_] == '+' || text_[at_] == '-')) ++at_;
    if (!digits()) fail("a number without an exponent", start);
  }
}

void JsonReader::word(std::string_view expected) {
  if (text_.substr(at_, expected.size()) != expected) fail("expected a value");
  at_ += expected.size();
}

bool JsonReader::null() {
  if (peek() != 'n') return false;
  word("null");
  return true;
}

void JsonReader::skip() {
  std::string closing;  // closing brackets of the open arrays and objects
  do {
    if (!closing.empty()) {
      if (!more(closing.back())) {
        closing.pop_back();
        continue;
      }
      if (closing.back() == '}') key();
    }
    const char next = peek();
    switch (next) {
      case '{':
      case '[':
        open(next);
        closing += next == '{' ? '}' : ']';
        break;
      case '"':
        string();
        break;
      case 't':
        word("true");
        break;
      case 'f':
        word("false");
        break;
      case 'n':
        word("null");
        break;
      default:
        number();
    }
  } while (!closing.empty());
}

void JsonReader::end(char padding) {
  const size_t rest = text_.find_first_not_of(padding, at_);
  if (rest != text_.npos) fail("something else than padding follows", rest);
}

void append_json_string(std::string& out, std::string_view text) {
  constexpr std::string_view kNamed = "\b\t\n\f\r", kNames = "btnfr";
  out += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) >= 0x20) {
      out += c;
    } else if (const size_t which = kNamed.find(c); which != kNamed.npos) {
      out += '\\';
      out += kNames[which];
    } else {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(c));
      out += code;
    }
  }
  out += '"';
}

size_t invalid_utf8(std::string_view text) {
  const auto byte = [&](size_t at) { return at < text.size() ? static_cast<unsigned char>(text[at]) : 0u; };
  for (size_t at = 0; at < text.size();) {
    const unsigned lead = byte(at);
    if (lead < 0x80) {
      ++at;
      continue;
    }
    const size_t more = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : 1;
    if (lead < 0xC2 || lead > 0xF4) return at;
    // The second byte says whether the form is too long, a surrogate, or beyond Unicode.
    const unsigned least = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    const unsigned most = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    if (byte(at + 1) < least || byte(at + 1) > most) return at;
    for (size_t i = 2; i <= more; ++i) {
      if ((byte(at + i) & 0xC0) != 0x80) return at;
    }
    at += more + 1;
  }
  return text.npos;
}

}  // namespace vescale_ckpt::format
