// What is written is what is read, on every way that bytes may take.
#include <algorithm>
#include <cstring>
#include <random>
#include <set>

#include "data_files.h"
#include "format/archive.h"

namespace vescale_ckpt::read {
namespace {

constexpr uint64_t kChecked = format::kChecksumBlock;
constexpr uint64_t kLarge = 2 << 20;  // from here on a tensor travels from its own memory
constexpr uint64_t kOddPlace = 24;    // where no direct transfer can start

class RoundTrip : public AccessTest {
 protected:
  io::EngineOptions options() const { return small_options(GetParam()); }
  bool direct() const { return access() == io::Access::direct; }
};

INSTANTIATE_TEST_SUITE_P(Each, RoundTrip, ::testing::Values(io::Access::direct, io::Access::buffered),
                         access_test_name);

// Tensors of many sizes around the borders of blocks, cells, slots and of what is large.
const std::vector<Tensor>& assorted() {
  static const std::vector<Tensor> tensors = [] {
    std::vector<Tensor> tensors;
    const auto add = [&](uint64_t place, std::initializer_list<uint64_t> sizes) {
      for (const uint64_t bytes : sizes) tensors.push_back(Tensor::of_bytes(bytes, place, 1 + tensors.size()));
    };
    add(kTorchPlace, {0, 1, 64, kBlock - 65, kBlock, kChecked - 704, kChecked + 1, kLarge - 1, kLarge});
    add(kTorchPlace, {kLarge + kBlock - kTorchPlace, 7, kLarge + kChecked - kTorchPlace - 1});  // that end on a border
    add(kTorchPlace, {kSlotBytes, 2 * kSlotBytes + 5001, kLarge + 1, 100});
    add(kOddPlace, {kLarge - 1, kLarge, 9, kSlotBytes + kBlock + 1, 0, 0, kChecked});
    return tensors;
  }();
  return tensors;
}

void expect_read_back(const std::string& path, const std::vector<Tensor>& tensors,
                      const std::vector<write::PlacedRecord>& records, uint64_t place,
                      const io::EngineOptions& options) {
  std::vector<Memory> targets;
  std::vector<ReadItem> items;
  uint64_t bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    targets.emplace_back(tensors[i].memory.size(), place);
    items.push_back(tensors[i].item(0, records[i], targets.back().data()));
    bytes += tensors[i].memory.size();
  }
  const auto report = read_items(path, items, options);
  EXPECT_TRUE(report->unread.empty());
  EXPECT_EQ(report->needed_bytes, bytes);
  EXPECT_EQ(report->unverified_bytes, 0u);
  for (size_t i = 0; i < tensors.size(); ++i) {
    ASSERT_TRUE(targets[i].text() == tensors[i].memory.text()) << "tensor " << i << " of " << targets[i].size();
  }
}

// The table at the end of the file, from the file's own bytes.
void expect_true_table(const WrittenFile& file, const std::vector<write::RecordSource>& sources) {
  const std::string content = read_file(file.path);
  const std::span bytes(reinterpret_cast<const std::byte*>(content.data()), content.size());
  const auto footer =
      format::ChecksumTable::parse_footer(bytes.last(format::ChecksumTable::kFooterBytes), bytes.size());
  ASSERT_TRUE(footer);
  const auto table = format::ChecksumTable::parse(bytes.subspan(footer->table_offset, footer->table_bytes), *footer);
  ASSERT_TRUE(table);
  for (size_t i = 0; i < sources.size(); ++i) {
    const format::ChecksumTable::Row* row = table->find(file.records[i].offset);
    ASSERT_NE(row, nullptr);
    EXPECT_EQ(row->body_offset, file.records[i].offset + sources[i].framing->prologue().size());
    EXPECT_EQ(row->body_bytes, sources[i].bytes);
    EXPECT_EQ(row->crc, file.records[i].crc);
    uint64_t at = row->body_offset;
    for (const uint32_t block : table->blocks(*row)) {
      const uint64_t next = std::min(align_down(at, kChecked) + kChecked, row->body_offset + row->body_bytes);
      ASSERT_EQ(block, crc32(0, content.data() + at, next - at)) << "block at " << at << " of record " << i;
      at = next;
    }
    EXPECT_EQ(at, row->body_offset + row->body_bytes);
  }
}

TEST_P(RoundTrip, RoundTripsTensorsOfEverySize) {
  const std::vector<Tensor>& tensors = assorted();
  const WrittenFile file = write_data_file(path("file"), sources_of(tensors), options());
  ASSERT_EQ(file.records.size(), tensors.size());
  drop_cache(file.path);
  expect_read_back(file.path, tensors, file.records, kTorchPlace, options());
  drop_cache(file.path);
  expect_read_back(file.path, tensors, file.records, kOddPlace, options());
  expect_slots_back(options());

  expect_true_table(file, sources_of(tensors));

  // Each record is what torch.save would have written.
  const std::string content = read_file(file.path);
  expect_read_back(file.path, tensors, file.records, kTorchPlace, options());  // from the page cache now
  uint64_t end = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& [offset, length, crc, number] = file.records[i];
    EXPECT_EQ(number, 0u);
    const write::RecordSource source = tensors[i].source();
    ASSERT_GE(offset, end) << "records overlap";
    ASSERT_EQ(length, source.framing->total_bytes());
    EXPECT_EQ(crc, crc32(0, source.data, source.bytes));
    const std::string_view record = std::string_view(content).substr(offset, length);
    EXPECT_EQ(format::check_archive({reinterpret_cast<const std::byte*>(record.data()), record.size()}), "") << i;
    const uint64_t body = offset + source.framing->prologue().size();
    EXPECT_EQ(body % (source.bytes >= kLarge ? kBlock : 64), source.bytes >= kLarge ? kTorchPlace : 0) << i;
    end = offset + length;
  }

  // Offsets depend on the tensors, not on the way that bytes take.
  static const std::vector<write::PlacedRecord> first = file.records;
  for (size_t i = 0; i < tensors.size(); ++i) EXPECT_EQ(file.records[i].offset, first[i].offset);
}

// Large tensors whose first and last bytes lie in cells of their own, or share them with whole blocks.
TEST_P(RoundTrip, ChecksumsBlocksAcrossCellBorders) {
  const uint64_t framing = Tensor::of_bytes(kLarge).source().framing->total_bytes() - kLarge;
  std::set<std::pair<uint64_t, uint64_t>> met;  // bytes of the first and the last cell
  for (const uint64_t first : {kBlock - kTorchPlace, 3 * kBlock - kTorchPlace}) {
    for (const uint64_t last : {uint64_t{1}, kBlock - 1, kBlock, kBlock + 1, kChecked}) {
      // So long that the large one's body starts `first` bytes before the end of a cell.
      const Tensor filler = Tensor::of_bytes(kChecked - align_up(first, kBlock) - framing - 704, kTorchPlace, 1);
      const Tensor large = Tensor::of_bytes(first + kLarge + last, met.size() % 2 == 0 ? kTorchPlace : kOddPlace, 2);
      const std::vector<write::RecordSource> sources = {filler.source(), large.source()};
      const std::string name = std::to_string(first) + "_" + std::to_string(last);
      const WrittenFile file = write_data_file(path(name), sources, options());
      expect_true_table(file, sources);
      const uint64_t body = file.records[1].offset + 704;
      met.emplace(kChecked - body % kChecked, last);
    }
  }
  EXPECT_EQ(met.size(), 10u) << "the layout has changed: choose other sizes";
  EXPECT_TRUE(met.contains({kBlock - kTorchPlace, 1}));
}

// Boxes of chunks, into contiguous and into transposed memory, checked by blocks, by whole records, or not at all.
TEST_P(RoundTrip, ReadsBoxes) {
  std::vector<Tensor> tensors;
  tensors.emplace_back("float32", Sizes{5, 200, 600});  // 2.4 MB
  tensors.emplace_back("int16", Sizes{7, 11});
  tensors.emplace_back("float64", Sizes{400000});      // 3 MB
  tensors.emplace_back("uint8", Sizes{3, 900, 1000});  // 2.7 MB
  tensors.emplace_back("complex128", Sizes{4, 1, 6, 5});
  std::mt19937 random(1);
  const auto below = [&](int64_t limit) { return static_cast<int64_t>(random() % static_cast<uint64_t>(limit)); };
  for (const bool checksums : {true, false}) {
    const WrittenFile file =
        write_data_file(path(checksums ? "with" : "without"), sources_of(tensors), options(), checksums);
    for (const bool verify : {true, false}) {
      std::vector<ReadItem> items;
      std::vector<Memory> targets, expected;
      const auto ask = [&](size_t which, const Sizes& offsets, const Sizes& sizes, bool transposed) {
        const Tensor& tensor = tensors[which];
        const uint32_t item_bytes = format::dtypes()[tensor.dtype].item_bytes;
        const Sizes strides = transposed ? column_major(sizes) : row_major(sizes);
        // The expected bytes, in the order of the target's memory.
        Memory box = tensor.box(offsets, sizes);
        Memory& want = expected.emplace_back(box.size());
        io::Box(item_bytes, sizes, Sizes(sizes.size(), 0), sizes, strides)
            .scatter(box.data(), 0, box.size(), want.data());
        targets.emplace_back(box.size(), random() % 2 == 0 ? kTorchPlace : kOddPlace);
        items.push_back(tensor.box_item(0, file.records[which], offsets, sizes, targets.back().data(), strides));
      };
      for (size_t which = 0; which < tensors.size(); ++which) {
        for (const bool transposed : {false, true, false}) {
          Sizes offsets, sizes;
          for (const int64_t limit : tensors[which].sizes) {
            sizes.push_back(1 + below(limit));
            offsets.push_back(below(limit - sizes.back() + 1));
          }
          ask(which, offsets, sizes, transposed);
        }
      }
      ask(0, {0, 10, 0}, {5, 0, 600}, false);    // nothing
      ask(0, {2, 0, 0}, {1, 200, 600}, false);   // dense
      ask(2, {100}, {350000}, false);            // dense, and large enough to go in place
      ask(3, {1, 0, 0}, {2, 900, 1000}, false);  // the same of another
      ask(4, {0, 0, 0, 0}, {4, 1, 6, 5}, true);  // whole
      drop_cache(file.path);
      const auto report = read_items(file.path, items, options(), verify);
      EXPECT_TRUE(report->unread.empty());
      for (size_t i = 0; i < items.size(); ++i) {
        ASSERT_TRUE(targets[i].text() == expected[i].text())
            << "item " << i << (checksums ? " with" : " without") << " table" << (verify ? ", verified" : "");
      }

      // Each alone, so that nobody else makes it come by a slot.
      for (size_t i = 0; i < items.size(); ++i) {
        std::memset(targets[i].data(), 0, targets[i].size());
        read_items(file.path, {items[i]}, options(), verify);
        ASSERT_TRUE(targets[i].text() == expected[i].text())
            << "item " << i << " alone" << (checksums ? " with" : " without") << " table"
            << (verify ? ", verified" : "");
      }
    }
  }
}

class DefaultSlots : public AccessTest {};

INSTANTIATE_TEST_SUITE_P(Each, DefaultSlots, ::testing::Values(io::Access::direct), access_test_name);

// Small records up to the last byte of a slot, then a large one, whose beginning goes with them.
TEST_P(DefaultSlots, TakeSmallRecordsToTheLastByte) {
  io::EngineOptions options;
  options.widest = access();
  options.slot_bytes = 4 << 20;
  options.threads = 2;
  const uint64_t framing = Tensor::of_bytes(kLarge - 1).source().framing->total_bytes() - kLarge + 1;
  const uint64_t room = options.slot_bytes - 4 * kBlock;  // docs/format.md
  for (const uint64_t total : {room - kBlock, room - 64, room, room + 64, options.slot_bytes - 64}) {
    std::vector<Tensor> tensors;
    tensors.push_back(Tensor::of_bytes(kLarge - 64 - framing, kTorchPlace, 1));
    tensors.push_back(Tensor::of_bytes(total - 64 * ((kLarge - 64 + 63) / 64) - framing, kTorchPlace, 2));
    tensors.push_back(Tensor::of_bytes(kLarge, kTorchPlace, 3));
    const WrittenFile file = write_data_file(path(std::to_string(total)), sources_of(tensors), options);
    drop_cache(file.path);
    expect_read_back(file.path, tensors, file.records, kTorchPlace, options);
  }
}

}  // namespace
}  // namespace vescale_ckpt::read
