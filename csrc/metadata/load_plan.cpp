#include "metadata/load_plan.h"

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/overlap.h"
#include "format/torch_record.h"

namespace vescale_ckpt::metadata {
namespace {

constexpr size_t kObjectWords = 5, kReadWords = 7;  // kReadWords leaves out the four lists of ndim numbers

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "shape (";
  for (size_t dim = 0; dim < shape.size(); ++dim) text += (dim > 0 ? ", " : "") + std::to_string(shape[dim]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::string dtype_text(std::string_view name) {
  return std::string("dtype torch.").append(name);
}

// Returns the number of elements of a target's box, and checks the box.
uint64_t target_elements(const state::Item& item, size_t index) {
  const auto refuse = [&] {
    throw Error::invalid(std::string(item.name) + ": its box leaves the tensor", static_cast<int64_t>(index));
  };
  uint64_t elements = 1;
  bool empty = false;
  for (size_t dim = 0; dim < item.shape.size(); ++dim) {
    const int64_t offset = item.offset[dim], size = item.size[dim], limit = item.shape[dim];
    if (limit < 0 || static_cast<uint64_t>(limit) >= kFarthest) refuse();
    if (offset < 0 || offset > limit || size < 0 || size > limit - offset) refuse();
    empty = empty || size == 0;
    if (!empty && __builtin_mul_overflow(elements, static_cast<uint64_t>(size), &elements)) refuse();
  }
  return empty ? 0 : elements;
}

class Planner {
 public:
  Planner(const Index& index, const state::Inventory& targets, bool allow_cast)
      : index_(index), targets_(targets), allow_cast_(allow_cast) {}

  LoadPlan run() {
    for (size_t i = 0; i < targets_.size(); ++i) add(i, targets_[i]);
    order_files();
    plan_.objects = ordered(objects_, object_rows_);
    plan_.reads = ordered(reads_, read_rows_);
    return std::move(plan_);
  }

 private:
  struct Row {
    uint32_t file;
    uint64_t offset;  // offset of the record
    uint64_t at;      // start of the row in the words
    uint64_t words;
  };

  void add(size_t number, const state::Item& item);
  void add_tensor(size_t number, const state::Item& item, const Index::Key& key);
  std::optional<LoadPlan::Mismatch> mismatch(const state::Item& item, const Index::Key& key) const;
  void order_files();
  std::vector<int64_t> ordered(std::vector<int64_t>& words, std::vector<Row>& rows) const;

  const Index& index_;
  const state::Inventory& targets_;
  const bool allow_cast_;
  LoadPlan plan_;
  std::vector<int64_t> reads_, objects_;  // the plan's rows with file numbers of the index
  std::vector<Row> read_rows_, object_rows_;
  std::vector<uint32_t> files_;  // file numbers in the index of the files that are read, ascending
};

void Planner::add(size_t number, const state::Item& item) {
  const auto item_number = static_cast<int64_t>(number);
  const auto key = index_.find(item.name);
  if (!key) {
    plan_.missing.push_back(item_number);
    return;
  }
  if (auto found = mismatch(item, *key)) {
    found->item = item_number;
    plan_.mismatched.push_back(std::move(*found));
  } else if (item.kind == state::ItemKind::object) {
    const RecordLocation location = index_.location(*key, 0);
    object_rows_.push_back({location.file, location.offset, objects_.size(), kObjectWords});
    objects_.insert(objects_.end(), {item_number, location.file, static_cast<int64_t>(location.offset),
                                     static_cast<int64_t>(location.length), location.crc});
  } else {
    add_tensor(number, item, *key);
  }
}

std::optional<LoadPlan::Mismatch> Planner::mismatch(const state::Item& item, const Index::Key& key) const {
  const bool wants_object = item.kind == state::ItemKind::object, has_object = key.kind == state::ItemKind::object;
  if (wants_object != has_object) {
    return LoadPlan::Mismatch{0, wants_object ? "an object" : "a tensor", has_object ? "an object" : "a tensor"};
  }
  if (wants_object) return std::nullopt;
  if (!std::ranges::equal(item.shape, key.shape)) {
    return LoadPlan::Mismatch{0, shape_text(item.shape), shape_text(key.shape)};
  }
  if (!key.dtype_code || (*key.dtype_code != item.dtype && !allow_cast_)) {
    return LoadPlan::Mismatch{0, dtype_text(format::dtypes()[item.dtype].name), dtype_text(key.dtype)};
  }
  return std::nullopt;
}

void Planner::add_tensor(size_t number, const state::Item& item, const Index::Key& key) {
  uint64_t missing = target_elements(item, number);
  if (missing == 0) return;
  const size_t ndim = item.shape.size();
  bool twice = false;
  index_.overlaps(key, item.offset, item.size, [&](uint64_t chunk, const int64_t* box) {
    if (twice) return;  // so there are no more rows than the target has elements
    const RecordLocation location = index_.location(key, chunk);
    const uint64_t at = reads_.size(), words = kReadWords + 4 * ndim;
    reads_.resize(at + words);
    int64_t* row = reads_.data() + at;
    row = std::ranges::copy(std::initializer_list<int64_t>{static_cast<int64_t>(number), location.file,
                                                           static_cast<int64_t>(location.offset),
                                                           static_cast<int64_t>(location.length), location.crc,
                                                           *key.dtype_code, static_cast<int64_t>(ndim)},
                            row)
              .out;
    uint64_t elements = 1;
    for (size_t dim = 0; dim < ndim; ++dim) {
      const Overlap common = overlap(item.offset[dim], item.size[dim], box[dim], box[ndim + dim]);
      row[dim] = box[ndim + dim];
      row[ndim + dim] = common.begin - box[dim];
      row[2 * ndim + dim] = common.size();
      row[3 * ndim + dim] = common.begin - item.offset[dim];
      elements *= static_cast<uint64_t>(common.size());
    }
    read_rows_.push_back({location.file, location.offset, at, words});
    twice = twice || elements > missing;
    missing -= elements;
  });
  if (missing != 0 || twice) plan_.uncovered.push_back(static_cast<int64_t>(number));
}

void Planner::order_files() {
  for (const auto* rows : {&read_rows_, &object_rows_}) {
    for (const Row& row : *rows) files_.push_back(row.file);
  }
  std::ranges::sort(files_);
  files_.erase(std::unique(files_.begin(), files_.end()), files_.end());
  for (const uint32_t file : files_) plan_.files.emplace_back(index_.file(file));
}

std::vector<int64_t> Planner::ordered(std::vector<int64_t>& words, std::vector<Row>& rows) const {
  std::ranges::stable_sort(rows, {}, [](const Row& row) { return std::pair(row.file, row.offset); });
  std::vector<int64_t> result;
  result.reserve(words.size());
  int64_t number = 0;  // number of the row's file among the files that are read
  for (const Row& row : rows) {
    while (files_[static_cast<size_t>(number)] != row.file) ++number;
    const auto begin = words.begin() + static_cast<ptrdiff_t>(row.at);
    result.insert(result.end(), begin, begin + static_cast<ptrdiff_t>(row.words));
    result[result.size() - row.words + 1] = number;
  }
  return result;
}

}  // namespace

LoadPlan plan_load(const Index& index, const state::Inventory& targets, bool allow_cast) {
  return Planner(index, targets, allow_cast).run();
}

WholeItems whole_items(const Index& index, std::span<const uint64_t> selected) {
  index.check_counts();
  WholeItems items;
  state::InventoryBuilder inventory;
  int64_t tensors = 0;
  for (size_t row = 0; row < selected.size(); ++row) {
    const auto refuse = [row](const char* why) { throw Error::invalid(why, static_cast<int64_t>(row)); };
    if (selected[row] >= index.size()) refuse("the index has no such key");
    const Index::Key& key = items.keys.emplace_back(index.key(selected[row]));
    if (key.kind == state::ItemKind::object) {
      state::Item object;
      object.name = key.name;
      inventory.add(object);
      items.sources.insert(items.sources.end(), {-1, 0});
      continue;
    }
    if (!key.dtype_code) refuse("a tensor of an unknown dtype");
    uint64_t bytes = format::dtypes()[*key.dtype_code].item_bytes, stored = 0;
    for (const int64_t size : key.shape) {
      if (size < 0 || __builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes)) refuse("an impossible shape");
    }
    for (uint64_t chunk = 0; chunk < key.chunks && stored < bytes; ++chunk) stored += index.location(key, chunk).length;
    if (stored < bytes) refuse("a tensor that is larger than its records");
    inventory.add(state::whole_tensor(key.name, *key.dtype_code, 0, bytes, key.shape));
    items.sources.insert(items.sources.end(), {tensors++, static_cast<int64_t>(key.shape.size())});
    items.sources.resize(items.sources.size() + key.shape.size());
  }
  items.inventory = inventory.pack();
  return items;
}

}  // namespace vescale_ckpt::metadata
