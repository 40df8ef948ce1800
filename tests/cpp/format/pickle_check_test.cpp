#include "format/pickle_check.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <string_view>

#include "format/archive.h"
#include "format/golden.h"

namespace vescale_ckpt::format {
namespace {

using namespace std::string_literals;

std::string check(std::string_view pickle) {
  const std::vector<char> exact(pickle.begin(), pickle.end());
  return check_pickle(view({exact.data(), exact.size()}));
}

std::string number(uint32_t value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}
std::string put(uint32_t memo) {
  return "r" + number(memo);
}
std::string get(uint32_t memo) {
  return "j" + number(memo);
}

const std::string kClass = "ctorch\nSize\n";
const std::string kState = "}X\1\0\0\0aK\1s"s;  // {"a": 1}

TEST(PickleCheck, PassesWhatTorchSaves) {
  const std::string archive = golden("object");
  const auto pickle = find_pickle(view(archive));
  ASSERT_TRUE(pickle);
  EXPECT_EQ(check_pickle(*pickle), "");
  EXPECT_EQ(check("\x80\x02" + kClass + "(K\1K\2tR."), "");             // torch.Size((1, 2))
  EXPECT_EQ(check("\x80\x02" + kClass + ")\x81" + kState + "b."), "");  // an object and its attributes
}

// Tensors refer to their storages, which lie beside the pickle.
TEST(PickleCheck, PassesStoragesWhereTheyMayBe) {
  const std::string archive = golden("float32_2x3");
  const auto pickle = body_of(view(archive), "/data.pkl");
  EXPECT_NE(check_pickle(pickle), "");
  EXPECT_EQ(check_pickle(pickle, true), "");
}

TEST(PickleCheck, TellsWhereThePickleEnds) {
  size_t end = 0;
  EXPECT_EQ(check_pickle(view("N.behind"), false, &end), "");
  EXPECT_EQ(end, 2u);
}

TEST(PickleCheck, FindsWhatAnUnpicklerWouldRunInto) {
  EXPECT_NE(check(""), "");
  EXPECT_NE(check("K"), "");
  EXPECT_NE(check("K\1"), "");
  EXPECT_NE(check("X\xff\xff\xff\xff"), "");  // a text of 4 GiB
  EXPECT_NE(check("B\xff\xff\xff\x7f"), "");
  EXPECT_NE(check("\x8e" + std::string(8, '\xff')), "");
  EXPECT_NE(check("Nr\xff\xff\xff\x7f."), "");  // room for 2,147,483,647 memos
  EXPECT_NE(check("0."), "");
  EXPECT_NE(check("t."), "");
  EXPECT_NE(check("Q."), "");  // a persistent id: no tensors in here
}

// A list is remembered while it is empty, and filled afterwards.
TEST(PickleCheck, FindsDeepNestingThroughMemos) {
  std::string pickle = "\x80\x02]" + put(0) + "0";
  for (uint32_t list = 1; list < 5000; ++list) pickle += "]" + put(list) + get(list - 1) + "a0";
  EXPECT_NE(check(pickle + get(4999) + "."), "");
}

// Tuples of the same tuple twice, 60 times, as the key of a dict: 2^60 steps to hash it.
TEST(PickleCheck, FindsTuplesThatTakeForeverToHash) {
  std::string pickle = "\x80\x02)" + put(0);
  for (uint32_t tuple = 0; tuple < 60; ++tuple) pickle += "0" + get(tuple) + get(tuple) + "\x86" + put(tuple + 1);
  EXPECT_NE(check(pickle + "0}" + get(60) + "Ns."), "");
}

TEST(PickleCheck, SurvivesAnything) {
  const std::string archive = golden("object");
  const auto pickle = *find_pickle(view(archive));
  const std::string good(reinterpret_cast<const char*>(pickle.data()), pickle.size());
  for (size_t length = 0; length < good.size(); ++length) EXPECT_NE(check(good.substr(0, length)), "") << length;
  std::mt19937 random(1);
  constexpr std::string_view kOpcodes =
      "(.0123NKMJGTUXBCILFSV}])taesubcRpqrghj\x80\x81\x85\x86\x87\x88\x8a\x8c\x93\x94\x95";
  for (int round = 0; round < 20000; ++round) {
    std::string bad = random() % 2 == 0 ? good : std::string(random() % 60, '\0');
    for (char& value : bad) {
      if (bad.size() < 60 || random() % 30 == 0) value = kOpcodes[random() % kOpcodes.size()];
      if (random() % 40 == 0) value = static_cast<char>(random());
    }
    check(bad);
  }
}

}  // namespace
}  // namespace vescale_ckpt::format
