#include "state/tables.h"

#include <gtest/gtest.h>

#include <limits>

#include "error_of.h"
#include "read/reader.h"
#include "tensors.h"
#include "write/writer.h"

namespace vescale_ckpt::state {
namespace {

using Words = std::vector<int64_t>;

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

Words joined(const std::vector<Words>& rows) {
  Words words;
  for (const Words& row : rows) words.insert(words.end(), row.begin(), row.end());
  return words;
}

// A state of three items: a chunk [4, 3] at (2, 1) of a local tensor [8, 5] of int16, an object, a float64 scalar.
struct State {
  Words tensors = {1000, dtype_code("int16"), kHostDevice, 2, 8, 5, 5, 1, 5000, dtype_code("float64"), kHostDevice, 0};
  Words sources = {0, 2, 2, 1, -1, 0, 1, 0};
  std::vector<std::byte> ready{std::byte{1}, std::byte{1}};
  std::vector<std::byte> packed = pack();
  Inventory inventory{packed};

  static std::vector<std::byte> pack() {
    const Words shape = {100, 50}, offset = {40, 10}, size = {4, 3};
    InventoryBuilder builder;
    builder.add({"chunk", ItemKind::shard, static_cast<uint8_t>(dtype_code("int16")), 0, 24, shape, offset, size});
    builder.add({"object", ItemKind::object, 0, 0, 7, {}, {}, {}});
    builder.add({"scalar", ItemKind::tensor, static_cast<uint8_t>(dtype_code("float64")), 0, 8, {}, {}, {}});
    return builder.pack();
  }
  StateTables tables() const { return {inventory, sources, tensors, ready}; }
  Words write(const Words& part) const { return make_copy_table(tables(), part).rows; }
  FillTable read(const Words& reads) const { return make_read_table(tables(), reads); }
};

TEST(TensorTable, RefusesWhatIsMalformed) {
  const std::vector<Words> bad = {{7, 0, 1},           {7, 0, 1, -1},   {7, 0, 1, 1, 5}, {7, 0, 1, 65},
                                  {7, 0, 1, kMost, 5}, {7, 1000, 1, 0}, {7, -2, 1, 0},   {7, 0, 1, 0, 7, 0}};
  for (const Words& words : bad) EXPECT_EQ(row_of_error([&] { TensorTable{words}; }), Error::kNoItem);
}

TEST(ReadyTensors, ReachToTheEndOfTheirStorage) {
  const auto ready = [](int64_t rows, int64_t stride, int64_t offset, int64_t bytes, int lazy = 0) {
    const Words table = {4096, dtype_code("int16"), kHostDevice, 2, rows, 3, stride, 1};
    const Words offsets = {offset}, storage = {bytes};
    const std::vector<std::byte> flags = {static_cast<std::byte>(lazy)};
    return ready_tensors(TensorTable(table), false, flags, offsets, storage)[0] == kOnHost;
  };
  EXPECT_TRUE(ready(4, 3, 0, 24));
  EXPECT_FALSE(ready(4, 3, 0, 23));
  EXPECT_FALSE(ready(4, 3, 1, 24));
  EXPECT_TRUE(ready(4, 3, 1, 26));
  EXPECT_TRUE(ready(4, 0, 0, 6));  // expanded
  EXPECT_TRUE(ready(4, 10, 0, 66));
  EXPECT_FALSE(ready(4, 10, 0, 65));
  EXPECT_TRUE(ready(0, 3, 100, 0));  // nothing in it
  EXPECT_FALSE(ready(4, 3, 0, 24, 1));
  EXPECT_FALSE(ready(0, 3, 0, 0, 1));
  EXPECT_FALSE(ready(4, kMost, 0, kMost));
  EXPECT_FALSE(ready(kMost, 3, kMost, kMost));
}

TEST(ReadyTensors, HaveMemory) {
  const auto ready = [](int64_t address, int64_t rows, int64_t offset) {
    const Words table = {address, dtype_code("int16"), kHostDevice, 1, rows, 1}, offsets = {offset}, storage = {1000};
    return ready_tensors(TensorTable(table), false, std::vector<std::byte>(1), offsets, storage)[0] == kOnHost;
  };
  EXPECT_TRUE(ready(4096, 3, 0));
  EXPECT_TRUE(ready(10, 3, 4));
  EXPECT_FALSE(ready(0, 3, 0));
  EXPECT_FALSE(ready(10, 3, 5));  // a part of one that starts nowhere
  EXPECT_TRUE(ready(0, 0, 0));
}

TEST(ReadyTensors, AreInHostMemory) {
  const Words table = {9, 0, kCudaDevice, 0, 9, 0, kHostDevice, 0, -1, 0, -1, 0};
  const Words one = {0}, four = {4}, two = {0, 0};
  const std::vector<std::byte> flag(1), flags(2);
  const std::vector<uint8_t> wanted = {kNotReady, kOnHost, kNotReady};
  EXPECT_EQ(ready_tensors(TensorTable(table), false, flag, one, four), wanted);
  EXPECT_EQ(row_of_error([&] { ready_tensors(TensorTable(table), false, flags, one, four); }), Error::kNoItem);
  EXPECT_EQ(row_of_error([&] { ready_tensors(TensorTable(table), false, flag, {}, four); }), Error::kNoItem);
  EXPECT_EQ(row_of_error([&] { ready_tensors(TensorTable(table), false, flag, one, two); }), Error::kNoItem);
}

TEST(ReadyTensors, OrOnADeviceThatIsAskedFor) {
  constexpr int64_t kNumber = int64_t{1} << 32, kRocm = 10;
  const auto on = [](int64_t device) { return Words{9, 0, device, 0}; };  // of no dimensions
  const Words table = joined({on(kCudaDevice), on(kHostDevice), on(kCudaDevice + 3 * kNumber), on(kRocm + kNumber),
                              on(kCudaDevice + 253 * kNumber), on(kCudaDevice + 254 * kNumber), on(-1)});
  const std::vector<uint8_t> wanted = {kOnDevice, kOnHost, kOnDevice + 3, kNotReady, UINT8_MAX, kNotReady, kNotReady};
  std::vector<std::byte> lazy(5);
  const Words offsets(5, 0), bytes(5, 4);
  EXPECT_EQ(ready_tensors(TensorTable(table), true, lazy, offsets, bytes), wanted);
  lazy[2] = std::byte{1};
  EXPECT_EQ(ready_tensors(TensorTable(table), true, lazy, offsets, bytes)[2], kNotReady);
  EXPECT_EQ(row_of_error([&] { ready_tensors(TensorTable(table), false, lazy, offsets, bytes); }), Error::kNoItem);
}

TEST(MakeCopyTable, SaysOnWhichDeviceEachRowIs) {
  State state;
  const Words part = {2, -1, 0, 0, 1, -1, 0, 0, 0, 0, 1, 2, 0, -1, 0, 0};
  EXPECT_EQ(make_copy_table(state.tables(), part).devices, (Words{-1, -1, -1}));
  const Words on_host = state.write(part);
  state.tensors[2] = kCudaDevice + (int64_t{5} << 32);
  state.ready[0] = std::byte{kOnDevice + 5};
  EXPECT_EQ(state.write(part), on_host);
  EXPECT_EQ(make_copy_table(state.tables(), part).devices, (Words{-1, 5, 5}));
  EXPECT_EQ(ready_rows(state.tables(), part), (std::vector<uint8_t>{kOnHost, kOnDevice + 5, kOnDevice + 5}));
  for (const uint8_t other : {uint8_t{kOnDevice + 4}, kOnHost, kNotReady}) {
    state.ready[0] = std::byte{other};
    EXPECT_EQ(row_of_error([&] { state.write(part); }), 2);
  }
  EXPECT_EQ(row_of_error([&] { ready_rows(state.tables(), Words{9, -1, 0, 0}); }), 0);
}

TEST(MakeWriteTable, FindsChunks) {
  const State state;
  const int64_t int16 = dtype_code("int16"), float64 = dtype_code("float64");
  const Words table = state.write({0, -1, 0, 0,  //
                                   1, -1, 0, 0,  // an object has no row
                                   0, 0,  1, 2,  // two of its rows
                                   0, 1,  2, 1,  // its last column
                                   0, 0,  4, 0,  // nothing
                                   2, -1, 0, 0});
  const auto box = [&](int64_t elements, int64_t rows, int64_t columns) {
    return Words{int16, 1000 + 2 * elements, 2, rows, columns, 5, 1};
  };
  EXPECT_EQ(
      table,
      joined({box(2 * 5 + 1, 4, 3), box(3 * 5 + 1, 2, 3), box(2 * 5 + 3, 4, 1), box(0, 0, 3), {float64, 5000, 0}}));
  EXPECT_EQ(write::parse_write_table(table).size(), 5u);
}

TEST(MakeWriteTable, FindsChunksInStridedMemory) {
  State state;
  state.tensors[6] = 1;  // transposed: strides 1, 8
  state.tensors[7] = 8;
  EXPECT_EQ(state.write({0, 0, 1, 2}), (Words{dtype_code("int16"), 1000 + 2 * (3 + 8), 2, 2, 3, 1, 8}));
  state.tensors[6] = 0;  // expanded
  EXPECT_EQ(state.write({0, 0, 1, 2}), (Words{dtype_code("int16"), 1000 + 2 * 8, 2, 2, 3, 0, 8}));
}

TEST(MakeWriteTable, NamesTheRowThatMakesNoSense) {
  const State state;
  const auto with = [&](const Words& row) { return row_of_error([&] { state.write(joined({{2, -1, 0, 0}, row})); }); };
  EXPECT_EQ(with({0, 0, 0, 4}), -2);
  EXPECT_EQ(with({3, -1, 0, 0}), 1);  // item
  EXPECT_EQ(with({-1, -1, 0, 0}), 1);
  EXPECT_EQ(with({0, 2, 0, 1}), 1);  // dimension
  EXPECT_EQ(with({0, -2, 0, 1}), 1);
  EXPECT_EQ(with({2, 0, 0, 1}), 1);
  EXPECT_EQ(with({0, 0, 1, 4}), 1);  // leaves the chunk
  EXPECT_EQ(with({0, 0, -1, 2}), 1);
  EXPECT_EQ(with({0, 0, 1, -1}), 1);
  EXPECT_EQ(with({0, 0, kMost, kMost}), 1);
  EXPECT_EQ(with({0, 0, 1}), Error::kNoItem);  // no whole row
}

TEST(MakeWriteTable, RefusesWhatIsNotInItsTensor) {
  const auto after = [](const std::function<void(State&)>& damage) {
    State state;
    damage(state);
    return row_of_error([&] { state.write({2, -1, 0, 0, 0, 0, 1, 2}); });
  };
  EXPECT_EQ(after([](State&) {}), -2);
  EXPECT_EQ(after([](State& state) { state.sources[2] = 5; }), -2);  // rows 6 and 7 of 8: the cut is what counts
  EXPECT_EQ(after([](State& state) { state.sources[2] = 6; }), 1);
  EXPECT_EQ(after([](State& state) { state.sources[3] = 3; }), 1);
  EXPECT_EQ(after([](State& state) { state.sources[2] = -1; }), 1);
  EXPECT_EQ(after([](State& state) { state.sources[2] = kMost; }), 1);
  EXPECT_EQ(after([](State& state) { state.tensors[6] = kMost; }), 1);                  // stride
  EXPECT_EQ(after([](State& state) { state.tensors[1] = dtype_code("float16"); }), 1);  // dtype
  EXPECT_EQ(after([](State& state) { state.tensors[1] = -1; }), 1);
  EXPECT_EQ(after([](State& state) { state.tensors[2] = 2; }), 1);  // device
  EXPECT_EQ(after([](State& state) { state.tensors[2] = -1; }), 1);
  EXPECT_EQ(after([](State& state) { state.ready[0] = std::byte{0}; }), 1);
  EXPECT_EQ(after([](State& state) { state.sources = {1, 2, 2, 1, -1, 0, 1, 0}; }), 1);  // dimensions
}

TEST(StateTables, BelongTogether) {
  const auto after = [](const std::function<void(State&)>& damage) {
    State state;
    damage(state);
    return row_of_error([&] { state.tables(); });
  };
  EXPECT_EQ(after([](State&) {}), -2);
  for (const Words& sources :
       {Words{0, 2, 2, 1, -1, 0}, Words{0, 2, 2, 1, -1, 0, 1, 0, 1, 0}, Words{0, 2, 2, 1, -1, 0, 1},
        Words{0, 2, 2, 1, 1, 0, 1, 0}, Words{-1, 2, 2, 1, -1, 0, 1, 0}, Words{2, 2, 2, 1, -1, 0, 1, 0},
        Words{0, 1, 2, -1, 0, 1, 0}, Words{0, kMost, 2, 1, -1, 0, 1, 0}, Words{-2, 2, 2, 1, -1, 0, 1, 0}}) {
    EXPECT_EQ(after([&](State& state) { state.sources = sources; }), Error::kNoItem);
  }
  EXPECT_EQ(after([](State& state) { state.ready.pop_back(); }), Error::kNoItem);
}

TEST(MakeReadTable, FindsChunks) {
  const State state;
  const int64_t int16 = dtype_code("int16"), float64 = dtype_code("float64");
  const FillTable made = state.read({0, 7, 4096, 5000, 99, int16,   2, 10, 20, 3, 5, 2, 1, 1, 2,  //
                                     2, 0, 64,   500,  -1, float64, 0});
  const Words& table = made.copies.rows;
  EXPECT_EQ(made.copies.devices, (Words{-1, -1}));
  EXPECT_TRUE(made.rest.empty());
  EXPECT_EQ(table, (Words{7, 4096, 5000, 99, int16,   2, 10,  20, 3, 5, 2, 1, 1000 + 2 * (3 * 5 + 3), 5, 1,  //
                          0, 64,   500,  -1, float64, 0, 5000}));
  const std::vector<read::ReadItem> items = read::parse_read_table(table);
  ASSERT_EQ(items.size(), 2u);
  EXPECT_EQ(items[0].box.begin(), (3u * 20 + 5) * 2);
}

TEST(MakeReadTable, LeavesOutWhatTheEngineCannotFillFast) {
  State state;
  const int64_t int16 = dtype_code("int16");
  const Words rows = {
      0, 7, 4096, 5000, 99, int16, 2, 10, 20, 3, 5, 2, 1, 1, 2,  //
      0, 7, 4096, 5000, 99, int16, 2, 10, 20, 3, 5, 1, 3, 1, 0, 2, 0, 64, 500, -1, dtype_code("float64"), 0};
  state.tensors[2] = kCudaDevice + (int64_t{3} << 32);
  state.ready[0] = std::byte{kOnDevice + 3};
  FillTable made = state.read(rows);
  EXPECT_EQ(made.rest, (Words{0}));  // two elements apart; the second row is a run
  EXPECT_EQ(made.copies.devices, (Words{3, -1}));
  state.ready[0] = std::byte{0};
  made = state.read(rows);
  EXPECT_EQ(made.rest, (Words{0, 1}));
  EXPECT_EQ(made.copies.devices, (Words{-1}));
}

TEST(MakeReadTable, NamesTheRowThatMakesNoSense) {
  const State state;
  const int64_t int16 = dtype_code("int16"), float64 = dtype_code("float64");
  const auto with = [&](const Words& row) {
    return row_of_error([&] { state.read(joined({{2, 0, 64, 500, -1, float64, 0}, row})); });
  };
  EXPECT_EQ(with({0, 7, 0, 50, 9, int16, 2, 10, 20, 3, 5, 4, 3, 0, 0}), -2);
  EXPECT_EQ(with({3, 7, 0, 50, 9, int16, 2, 10, 20, 3, 5, 4, 3, 0, 0}), 1);    // item
  EXPECT_EQ(with({1, 7, 0, 50, 9, int16, 0}), 1);                              // an object
  EXPECT_EQ(with({0, 7, 0, 50, 9, float64, 2, 10, 20, 3, 5, 4, 3, 0, 0}), 1);  // dtype
  EXPECT_EQ(with({0, 7, 0, 50, 9, -1, 2, 10, 20, 3, 5, 4, 3, 0, 0}), 1);
  EXPECT_EQ(with({0, 7, 0, 50, 9, int16, 1, 10, 3, 4, 0}), 1);               // dimensions
  EXPECT_EQ(with({0, 7, 0, 50, 9, int16, 2, 10, 20, 3, 5, 4, 3, 1, 0}), 1);  // leaves the chunk
  EXPECT_EQ(with({0, 7, 0, 50, 9, int16, 2, 10, 20, 3, 5, 4, 3, 0, -1}), 1);
  EXPECT_EQ(with({0, 7, 0, 50, 9, int16, 2, 10, 20, 3, 5, 4, -3, 0, 0}), 1);
  EXPECT_EQ(with({0, 7, 0, 50, 9, int16, 2, 10, 20, 3, 5, kMost, 3, kMost, 0}), 1);
  EXPECT_EQ(with({0, 7, 0, 50, 9, int16, 2, 10, 20, 3, 5, 4, 3, 0}), Error::kNoItem);  // no whole row
  EXPECT_EQ(with({0, 7}), Error::kNoItem);
}

TEST(PlaceTable, LeadsFromThePiecesOfARoundToTheTensors) {
  State state;
  const Memory own(100), of_peer(50);
  const Words memories = {-1, address(own), 100, 7, address(of_peer), 50};
  const int64_t int16 = dtype_code("int16"), float64 = dtype_code("float64");
  // Box [2, 1] at (1, 2) of a piece [3, 3], to (1, 0) of the item's chunk; the scalar.
  const Words places = {-1, 10, 0, int16, 2, 3, 3, 1, 2, 2, 1, 1, 0, 7, 40, 2, float64, 0};
  const auto make = [&](const Words& rows) { return make_place_table(state.tables(), rows, memories); };
  const int64_t first = 1000 + 2 * (5 * (2 + 1) + 1);
  EXPECT_EQ(make(places).copies.rows, (Words{int16, address(own) + 10, 2, 3, 3, 1, 2, 2, 1, first, 5, 1,  //
                                             float64, address(of_peer) + 40, 0, 5000}));
  EXPECT_TRUE(make(places).rest.empty());

  Words other = places;
  other[3] = dtype_code("float16");  // as it is stored: what is to be filled is of another dtype
  EXPECT_EQ(make(other).rest, (Words{0}));
  state.ready[1] = std::byte{0};
  EXPECT_EQ(make(places).rest, (Words{1}));
  state.ready[1] = std::byte{1};

  const auto changed = [&](size_t word, int64_t value) {
    Words bad = places;
    bad[word] = value;
    return row_of_error([&] { make(bad); });
  };
  EXPECT_EQ(changed(1, 83), 0);  // leaves the memory
  EXPECT_EQ(changed(14, 43), 1);
  EXPECT_EQ(changed(0, 3), 0);                // in no memory
  EXPECT_EQ(changed(2, 1), 0);                // an object
  EXPECT_EQ(changed(15, 3), 1);               // no such item
  EXPECT_EQ(changed(11, 3), 0);               // leaves the item
  EXPECT_EQ(changed(4, 1), 0);                // dimensions
  EXPECT_EQ(changed(17, 1), Error::kNoItem);  // ends early
}

}  // namespace
}  // namespace vescale_ckpt::state
