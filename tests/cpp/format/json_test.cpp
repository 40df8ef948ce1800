#include "format/json.h"

#include <gtest/gtest.h>

namespace vescale_ckpt::format {
namespace {

using namespace std::string_literals;

std::string string_of(std::string_view json) {
  JsonReader reader(json);
  std::string text = reader.string();
  reader.end(' ');
  return text;
}

// Where it is wrong; npos if it is not.
template <typename Read>
size_t wrong_at(std::string_view json, const Read& read) {
  JsonReader reader(json);
  try {
    read(reader);
    reader.end(' ');
  } catch (const JsonError& error) {
    EXPECT_NE(std::string(error.what()), "");
    return error.at;
  }
  return json.npos;
}

size_t wrong_value(std::string_view json) {
  return wrong_at(json, [](JsonReader& reader) { reader.skip(); });
}

TEST(Json, ReadsStrings) {
  EXPECT_EQ(string_of(R"("")"), "");
  EXPECT_EQ(string_of(R"("a\"\\\/\b\f\n\r\t")"), "a\"\\/\b\f\n\r\t");
  EXPECT_EQ(string_of(R"("\u0000\u0041\u00e9\u20AC\ud83d\ude00")"), "\0Aé€😀"s);
  EXPECT_EQ(string_of("\"é€😀\x7f\"  "), "é€😀\x7f");
}

TEST(Json, RefusesStringsThatAreNone) {
  const auto wrong = [](std::string_view json) { return wrong_at(json, [](JsonReader& reader) { reader.string(); }); };
  EXPECT_EQ(wrong("a"), 0u);
  EXPECT_EQ(wrong("\"a"), 0u);
  EXPECT_EQ(wrong("\"a\\"), 3u);
  EXPECT_EQ(wrong("\"\\x\""), 2u);
  EXPECT_EQ(wrong("\"\n\""), 1u);
  EXPECT_EQ(wrong("\"\0\""s), 1u);
  EXPECT_EQ(wrong(R"("\u12g4")"), 5u);
  EXPECT_EQ(wrong(R"("\u12)"), 5u);
  for (const char* half : {R"("\ud800")", R"("\udc00")", R"("\ud800\u0041")", R"("\ud800A")"}) {
    EXPECT_EQ(wrong(half), 3u) << half;
  }
}

TEST(Json, ReadsWholeNumbersOf64Bits) {
  const auto read = [](std::string_view json) { return JsonReader(json).whole_number(); };
  EXPECT_EQ(read("0"), 0u);
  EXPECT_EQ(read(" 42,"), 42u);
  EXPECT_EQ(read("18446744073709551615"), UINT64_MAX);
  for (const char* wrong : {"18446744073709551616", "99999999999999999999", "-1", "-0", "1.0", "1e2", "01", "", "x",
                            "1.", "1e", "-", "\"1\""}) {
    EXPECT_EQ(wrong_at(wrong, [](JsonReader& reader) { reader.whole_number(); }), 0u) << wrong;
  }
}

TEST(Json, SkipsAnyValueAndNothingElse) {
  for (const char* value : {"{}", "[]", "1", "-1.5e+10", "true", "false", "null", "\"a\"", "[1,[2,{\"a\":[]}],\"b\"]",
                            R"( { "a" : { "b" : [ ] } , "c" : null } )"}) {
    EXPECT_EQ(wrong_value(value), std::string_view::npos) << value;
  }
  for (const char* value : {"", "{", "[", "[1", "[1,", "[1,]", "[,1]", "[1 2]", "{1:2}", "{\"a\"}", "{\"a\":}",
                            "{\"a\":1,}", "tru", "nul", "+1", "[1}", "{\"a\":1]", "1 1", "]"}) {
    EXPECT_NE(wrong_value(value), std::string_view::npos) << value;
  }
}

TEST(Json, BoundsDepthAndUsesNoStackForIt) {
  const auto nested = [](size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_EQ(wrong_value(nested(JsonReader::kMostDepth)), std::string_view::npos);
  EXPECT_EQ(wrong_value(nested(JsonReader::kMostDepth + 1)), JsonReader::kMostDepth + 1);
  EXPECT_NE(wrong_value(nested(10'000'000)), std::string_view::npos);
  const std::string flat = "[[1],[2],{\"a\":[3]}]";  // what is closed does not count
  std::string many = "[";
  for (int i = 0; i < 1000; ++i) many += flat + ",";
  EXPECT_EQ(wrong_value(many + "0]"), std::string_view::npos);
}

TEST(Json, EndsInPaddingOnly) {
  EXPECT_EQ(wrong_value("{}    "), std::string_view::npos);
  EXPECT_EQ(wrong_value("{} \n"), 3u);
  EXPECT_EQ(wrong_value("{}\0"s), 2u);
  EXPECT_EQ(wrong_value("{}{}"), 2u);
}

TEST(Json, WritesWhatItReads) {
  std::string every;
  for (int c = 0; c < 0x80; ++c) every += static_cast<char>(c);
  every += "é€😀";
  std::string json;
  append_json_string(json, every);
  EXPECT_EQ(string_of(json), every);
}

TEST(Utf8, IsCheckedStrictly) {
  for (const char* good : {"", "a", "é", "€", "😀", "\xed\x9f\xbf", "\xee\x80\x80", "\xf4\x8f\xbf\xbf"}) {
    EXPECT_EQ(invalid_utf8(good), std::string_view::npos) << good;
  }
  for (const char* bad : {"\x80", "\xff", "\xc3", "\xe2\x82", "\xf0\x9f\x98", "\xc0\x80", "\xc1\xbf", "\xe0\x80\x80",
                          "\xe0\x9f\xbf", "\xf0\x80\x80\x80", "\xf0\x8f\xbf\xbf", "\xed\xa0\x80", "\xed\xbf\xbf",
                          "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xc3\x28"}) {
    EXPECT_EQ(invalid_utf8("ab" + std::string(bad)), 2u);
    EXPECT_EQ(invalid_utf8("ab" + std::string(bad) + "c"), 2u);
  }
}

}  // namespace
}  // namespace vescale_ckpt::format
