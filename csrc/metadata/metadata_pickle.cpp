#include "metadata/metadata_pickle.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/crc32.h"
#include "base/error.h"
#include "base/numbered_strings.h"
#include "base/workers.h"
#include "format/torch_record.h"
#include "metadata/pickle_out.h"

namespace vescale_ckpt::metadata {
namespace {

constexpr uint64_t kBatch = 1000;                // elements in one APPENDS or SETITEMS, as in CPython
constexpr size_t kMostShapes = size_t{1} << 22;  // so many are remembered; later ones are written in full

constexpr uint32_t kNoMemo = UINT32_MAX;
constexpr uint64_t kBlockChunks = uint64_t{1} << 15;  // a block of the pickle has so many chunks, or one key

#define DCP "torch.distributed.checkpoint."
enum Global : size_t {
  kMetadata,
  kIndex,
  kChunk,
  kTensor,
  kObject,
  kProperties,
  kMeta,
  kMemoryFormat,
  kInfo,
  kSize,
  kLayout
};
constexpr std::array<std::string_view, 11> kGlobals = {
    DCP "metadata\nMetadata\n",
    DCP "metadata\nMetadataIndex\n",
    DCP "metadata\nChunkStorageMetadata\n",
    DCP "metadata\nTensorStorageMetadata\n",
    DCP "metadata\nBytesStorageMetadata\n",
    DCP "metadata\nTensorProperties\n",
    DCP "metadata\nStorageMeta\n",
    DCP "metadata\n_MEM_FORMAT_ENCODING\n",
    DCP "filesystem\n_StorageInfo\n",
    "torch\nSize\n",
    "torch.serialization\n_get_layout\n",
};
#undef DCP

std::string_view bytes_of(std::span<const int64_t> dims) {
  return {reinterpret_cast<const char*>(dims.data()), dims.size_bytes()};
}

// The values that are written once, at the beginning, and recalled everywhere else. So each block of the pickle can be
// made without the blocks before it.
class SharedValues {
 public:
  explicit SharedValues(const MetadataContent& content);

  // Returns an upper bound of the bytes that `write` writes.
  static uint64_t most_bytes(const MetadataContent& content);
  void write(PickleOut& pickle);  // and takes them from the stack again

  uint32_t global(Global name) const { return globals_[name]; }
  uint32_t properties(const Catalog::Key& key) const { return properties_[of_dtype(key)]; }
  uint32_t name(size_t key) const { return names_ + static_cast<uint32_t>(key); }
  uint32_t file(uint32_t number) const { return files_ + number; }
  uint32_t word(std::string_view value) const { return words_ + *known_words_.find(value); }
  uint32_t crc() const { return words_; }  // the first word
  // Returns the memo of the shape at a position of the catalog's dims; kNoMemo if there were too many.
  uint32_t shape(uint64_t at, uint32_t ndim) const {
    if (ndim == 0) return no_dims_;
    return shape_at_[at] == kNoMemo ? kNoMemo : shapes_ + shape_at_[at];
  }

 private:
  static size_t of_dtype(const Catalog::Key& key) {
    return 2 * size_t{key.dtype} + ((key.flags & state::kRequiresGrad) != 0);
  }
  void note_shape(uint64_t at, uint32_t ndim);

  const MetadataContent& content_;
  std::array<uint32_t, kGlobals.size()> globals_{};
  std::vector<uint32_t> properties_ = std::vector<uint32_t>(2 * format::dtypes().size(), kNoMemo);
  std::vector<size_t> used_properties_;
  NumberedStrings known_words_, known_shapes_;
  std::vector<uint32_t> shape_at_;  // number of the shape that begins at each position of the dims
  uint32_t names_ = 0, files_ = 0, words_ = 0, shapes_ = 0, no_dims_ = 0;  // first memos
};

constexpr std::string_view kCrc = "crc";

SharedValues::SharedValues(const MetadataContent& content)
    : content_(content), shape_at_(content.catalog.dims.size(), kNoMemo) {
  const Catalog& catalog = content.catalog;
  if (catalog.keys.size() >= UINT32_MAX / 4) throw Error::invalid("too many keys");
  known_words_.add(kCrc);
  for (const KeyPaths::Path& path : content.paths.paths()) {
    KeyPaths::visit(path, [&](std::string_view part) { known_words_.add(part); }, [](int64_t) {});
  }
  for (const Catalog::Key& key : catalog.keys) {
    if (key.kind == state::ItemKind::object) continue;
    if (uint32_t& used = properties_[of_dtype(key)]; used == kNoMemo) {
      used = 0;
      used_properties_.push_back(of_dtype(key));
    }
    if (key.ndim == 0) continue;
    note_shape(key.shape, key.ndim);
    for (uint64_t chunk = key.first_chunk; chunk < key.first_chunk + key.chunks; ++chunk) {
      const uint64_t box = catalog.chunks[chunk].box;
      note_shape(box, key.ndim);
      note_shape(box + key.ndim, key.ndim);
    }
  }
}

void SharedValues::note_shape(uint64_t at, uint32_t ndim) {
  if (shape_at_[at] != kNoMemo) return;  // keys of equal chunks share their boxes
  const std::string_view bytes = bytes_of({content_.catalog.dims.data() + at, ndim});
  if (known_shapes_.size() < kMostShapes) {
    shape_at_[at] = known_shapes_.add(bytes).first;
  } else if (const auto known = known_shapes_.find(bytes)) {
    shape_at_[at] = *known;
  }
}

// Each word of the dims belongs to one shape at most.
uint64_t SharedValues::most_bytes(const MetadataContent& content) {
  constexpr uint64_t kFixed = 4096, kProperties = 512, kValue = 24 + PickleOut::kFrameHeader;
  uint64_t bytes = kFixed + kProperties * 2 * format::dtypes().size() +
                   (kValue + PickleOut::kMostNumber) * content.catalog.dims.size();
  for (const KeyPaths::Path& path : content.paths.paths()) bytes += kValue * path.elements + path.packed.size();
  for (const Catalog::Key& key : content.catalog.keys) bytes += kValue + key.name_bytes;
  for (const std::string& file : content.locations.files()) bytes += kValue + file.size();
  return bytes;
}

void write_shape(PickleOut& pickle, uint32_t size_class, std::span<const int64_t> dims) {
  pickle.recall(size_class);
  if (dims.empty()) {
    pickle.op(')');
  } else {
    if (dims.size() > 3) pickle.op('(');
    for (const int64_t dim : dims) pickle.number(dim);
    pickle.op(dims.size() > 3 ? 't' : static_cast<char>(0x84 + dims.size()));
  }
  pickle.op('\x85', 'R');
}

void SharedValues::write(PickleOut& pickle) {
  const auto keep = [&] {
    const uint32_t memo = pickle.memoize();
    pickle.op('0');
    pickle.border();
    return memo;
  };
  for (size_t i = 0; i < kGlobals.size(); ++i) {
    pickle.global(kGlobals[i]);
    globals_[i] = keep();
  }
  words_ = pickle.memos();
  for (size_t i = 0; i < known_words_.size(); ++i) {
    pickle.text(known_words_[i]);
    keep();
  }
  if (!used_properties_.empty()) {
    pickle.recall(global(kLayout));
    pickle.text("torch.strided");
    pickle.op('\x85', 'R');
    const uint32_t strided = keep();
    pickle.recall(global(kMemoryFormat));
    pickle.number(0);
    pickle.op('\x85', 'R');
    const uint32_t contiguous = keep();
    for (const size_t used : used_properties_) {
      pickle.recall(global(kProperties));
      pickle.op(')', '\x81', '(');
      pickle.global(std::string("torch\n").append(format::dtypes()[used / 2].name) + "\n");
      pickle.recall(strided);
      pickle.op(used % 2 != 0 ? '\x88' : '\x89');  // requires_grad
      pickle.recall(contiguous);
      pickle.op('\x89', 't', 'b');  // pin_memory
      properties_[used] = keep();
    }
  }
  write_shape(pickle, global(kSize), {});
  no_dims_ = keep();
  shapes_ = pickle.memos();
  std::vector<int64_t> dims;
  for (size_t i = 0; i < known_shapes_.size(); ++i) {
    const std::string_view bytes = known_shapes_[i];
    dims.resize(bytes.size() / sizeof(int64_t));
    std::memcpy(dims.data(), bytes.data(), bytes.size());
    write_shape(pickle, global(kSize), dims);
    keep();
  }
  files_ = pickle.memos();
  for (const std::string& file : content_.locations.files()) {
    pickle.text(file);
    keep();
  }
  names_ = pickle.memos();
  for (const Catalog::Key& key : content_.catalog.keys) {
    pickle.text(content_.catalog.name(key));
    keep();
  }
}

// Writes one block.
class BlockWriter {
 public:
  BlockWriter(const MetadataContent& content, const SharedValues& shared, std::byte* out)
      : content_(content), catalog_(content.catalog), shared_(shared), pickle_(out) {}

  // The values of keys begin .. end.
  void state_dict_metadata(size_t begin, size_t end);
  void storage_data(size_t begin, size_t end, std::span<const RecordLocation> locations);
  void planner_data();
  void last();

  PickleOut& pickle() { return pickle_; }

 private:
  // The check of pickles (format/pickle_check.h) limits the work that a pickle causes in proportion to its length: it
  // would refuse a long name that is recalled for each of many chunks. So each block counts its work by the rules of
  // the check, and where another use of a value of so many elements would be too much the value is written again.
  bool can_recall(uint64_t size) const { return work_ + 2 * size + kMargin <= 8 * pickle_.written(); }

  void global(Global name) { pickle_.recall(shared_.global(name)); }
  void text(uint32_t memo, std::string_view value) {
    if (can_recall(value.size())) {
      pickle_.recall(memo);
    } else {
      pickle_.text(value);
    }
  }
  void name(size_t key) { text(shared_.name(key), catalog_.name(catalog_.keys[key])); }
  void reduce_tuple(char tuple, uint64_t work) {
    pickle_.op(tuple, 'R');
    work_ += work;
  }
  // Returns what the check counts for its numbers.
  uint64_t shape(uint64_t at, uint32_t ndim) {
    const std::span<const int64_t> dims(catalog_.dims.data() + at, ndim);
    uint64_t cost = ndim;
    for (const int64_t dim : dims) cost += dim > INT32_MAX ? kLongNumber : 0;
    const uint32_t memo = shared_.shape(at, ndim);
    if (memo != kNoMemo && can_recall(cost)) {
      pickle_.recall(memo);
    } else {
      write_shape(pickle_, shared_.global(kSize), dims);
      work_ += 3 + 2 * cost;
    }
    return cost;
  }
  void tensor(const Catalog::Key& key);
  void index(size_t key, uint64_t offset, std::optional<uint64_t> hint);
  void info(const RecordLocation& location);

  static constexpr uint64_t kMargin = 1024;   // more than what one element of a container costs beside its texts
  static constexpr uint64_t kLongNumber = 8;  // what a number above 32 bits costs more than others

  const MetadataContent& content_;
  const Catalog& catalog_;
  const SharedValues& shared_;
  PickleOut pickle_;
  uint64_t work_ = 0;
};

void BlockWriter::tensor(const Catalog::Key& key) {
  global(kTensor);
  pickle_.recall(shared_.properties(key));
  const uint64_t size = shape(key.shape, key.ndim);
  pickle_.op(']');
  for (uint64_t i = 0; i < key.chunks; ++i) {
    if (i % kBatch == 0) pickle_.op('(');
    const Catalog::Chunk& chunk = catalog_.chunks[key.first_chunk + i];
    global(kChunk);
    const uint64_t offsets = shape(chunk.box, key.ndim), sizes = shape(chunk.box + key.ndim, key.ndim);
    reduce_tuple('\x86', 20 + 4 * (offsets + sizes));  // also its part of what the list costs
    if ((i + 1) % kBatch == 0 || i + 1 == key.chunks) pickle_.op('e');
    pickle_.border();
  }
  reduce_tuple('\x87', 128 + 2 * size);
}

void BlockWriter::state_dict_metadata(size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i) {
    const Catalog::Key& key = catalog_.keys[i];
    if ((i - begin) % kBatch == 0) pickle_.op('(');
    name(i);
    work_ += key.name_bytes + 1;
    if (key.kind == state::ItemKind::object) {
      global(kObject);
      pickle_.op(')', '\x81');
      work_ += 1;
    } else {
      tensor(key);
    }
    if ((i + 1 - begin) % kBatch == 0 || i + 1 == end) pickle_.op('u');
    pickle_.border();
  }
}

void BlockWriter::planner_data() {
  if (!content_.paths.any()) {
    pickle_.op('N');
    return;
  }
  const auto path_of = [&](const KeyPaths::Path& path) {
    pickle_.op('(');
    KeyPaths::visit(
        path, [&](std::string_view part) { text(shared_.word(part), part); },
        [&](int64_t part) { pickle_.number(part); });
    pickle_.op('t');
    work_ += path.name.size() + 1;
  };
  const auto& paths = content_.paths.paths();
  std::vector<bool> written(paths.size());
  pickle_.op('}', '(');
  for (size_t key = 0; key < catalog_.keys.size(); ++key) {
    const auto at = content_.paths.find(catalog_.name(catalog_.keys[key]));
    if (!at) continue;
    name(key);
    path_of(paths[*at]);
    written[*at] = true;
    pickle_.border();
  }
  for (size_t at = 0; at < paths.size(); ++at) {
    if (written[at]) continue;
    pickle_.text(paths[at].name);  // no rank holds anything of this key
    path_of(paths[at]);
    pickle_.border();
  }
  pickle_.op('u');
}

void BlockWriter::index(size_t key, uint64_t offset, std::optional<uint64_t> hint) {
  const uint32_t ndim = catalog_.keys[key].ndim;
  uint64_t numbers = 0;
  global(kIndex);
  name(key);
  if (hint) {
    numbers = shape(offset, ndim);
    pickle_.number(static_cast<int64_t>(*hint));
    pickle_.op('\x87');
  } else {
    pickle_.op('\x85');
  }
  pickle_.op('R');
  work_ += 2 * (10 + uint64_t{catalog_.keys[key].name_bytes} + 2 * numbers);
}

void BlockWriter::info(const RecordLocation& location) {
  const std::string& file = content_.locations.files()[location.file];
  global(kInfo);
  text(shared_.file(location.file), file);
  pickle_.number(static_cast<int64_t>(location.offset));
  pickle_.number(static_cast<int64_t>(location.length));
  reduce_tuple('\x87', 8 + 2 * kLongNumber + file.size());
  if (location.crc < 0) return;
  pickle_.op('}');
  pickle_.recall(shared_.crc());
  pickle_.number(location.crc);
  pickle_.op('s', 'b');
  work_ += 4;
}

void BlockWriter::storage_data(size_t begin, size_t end, std::span<const RecordLocation> locations) {
  uint64_t entries = 0;
  pickle_.op('(');
  for (size_t at = begin; at < end; ++at) {
    const Catalog::Key& key = catalog_.keys[at];
    for (uint64_t i = 0; i < key.chunks; ++i) {
      if (key.kind == state::ItemKind::object) {
        index(at, 0, std::nullopt);
      } else {
        index(at, catalog_.chunks[key.first_chunk + i].box, i);
      }
      info(locations[entries]);
      if (++entries % kBatch == 0) pickle_.op('u', '(');
      pickle_.border();
    }
  }
  pickle_.op('u');
}

void BlockWriter::last() {
  pickle_.text("storage_meta");
  global(kMeta);
  pickle_.op(')', '\x81', '}', '(');
  pickle_.text("checkpoint_id");
  pickle_.text(content_.checkpoint_id);
  pickle_.text("save_id");
  pickle_.text(content_.save_id);
  pickle_.text("load_id");
  pickle_.op('N');
  pickle_.text("modules");
  pickle_.op(']', 'u', 'b');
  pickle_.text("version");
  pickle_.text("1.0.0");
  if (content_.structure) {
    pickle_.text("vescale_ckpt_structure");
    pickle_.text(*content_.structure);
  }
  pickle_.op('u', 'b', '.');
}

// The bounds count every value in full, every number at its longest, and every global as a recall.
struct Bounds {
  static constexpr uint64_t kFixed = 4096, kKey = 512, kChunk = 160, kPath = 32, kDim = PickleOut::kMostNumber;

  explicit Bounds(const MetadataContent& of) : content(of) {
    for (const std::string& file : content.locations.files())
      longest_file = std::max<uint64_t>(longest_file, file.size());
  }

  uint64_t keys(size_t begin, size_t end) const {
    uint64_t bytes = kFixed;
    for (size_t i = begin; i < end; ++i) {
      const Catalog::Key& key = content.catalog.keys[i];
      bytes += kKey + 2 * uint64_t{key.name_bytes} + kDim * key.ndim;
      bytes += key.chunks * (kChunk + key.name_bytes + longest_file + 3 * kDim * key.ndim);
    }
    return bytes;
  }

  uint64_t paths() const {
    uint64_t bytes = kFixed;
    for (const Catalog::Key& key : content.catalog.keys) bytes += kPath + key.name_bytes;
    for (const KeyPaths::Path& path : content.paths.paths()) bytes += kPath + path.name.size() + 2 * path.packed.size();
    return bytes;
  }

  uint64_t last() const {
    return kFixed + content.checkpoint_id.size() + content.save_id.size() +
           (content.structure ? content.structure->size() : 0);
  }

  const MetadataContent& content;
  uint64_t longest_file = 0;
};

// Ranges of keys with about kBlockChunks chunks each.
std::vector<size_t> cut_into_blocks(const Catalog& catalog) {
  std::vector<size_t> ends = {0};
  uint64_t chunks = 0;
  for (size_t key = 0; key < catalog.keys.size(); ++key) {
    chunks += 1 + catalog.keys[key].chunks;
    if (chunks < kBlockChunks && key + 1 < catalog.keys.size()) continue;
    ends.push_back(key + 1);
    chunks = 0;
  }
  return ends;
}

// Puts blocks, which threads make in any order, one behind another.
class InOrder {
 public:
  InOrder(size_t blocks, const MetadataSink& sink) : crcs_(blocks), sizes_(blocks), sink_(sink) {}

  void put(size_t block, std::span<const std::byte> bytes) {
    crcs_[block] = crc32(0, bytes.data(), bytes.size());
    sizes_[block] = bytes.size();
    uint64_t at = 0;
    {
      std::unique_lock lock(mutex_);
      turned_.wait(lock, [&] { return next_ == block || failed_; });
      if (failed_) return;
      at = written_;
      written_ += bytes.size();
      ++next_;
    }
    turned_.notify_all();
    sink_(at, bytes);
  }

  // Nobody waits for a block that will never come.
  void fail() {
    {
      const std::lock_guard lock(mutex_);
      failed_ = true;
    }
    turned_.notify_all();
  }

  uint64_t written() const { return written_; }
  uint32_t crc() const {
    uint32_t crc = 0;
    for (size_t block = 0; block < crcs_.size(); ++block) crc = crc32_combine(crc, crcs_[block], sizes_[block]);
    return crc;
  }

 private:
  std::vector<uint32_t> crcs_;
  std::vector<uint64_t> sizes_;
  const MetadataSink& sink_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable turned_;
  size_t next_ = 0;
  uint64_t written_ = 0;
  bool failed_ = false;
};

// Makes the blocks of the pickle: the shared values, state_dict_metadata, planner_data, storage_data, the rest.
class Blocks {
 public:
  Blocks(const MetadataContent& content, SharedValues& shared)
      : content_(content), shared_(shared), ends_(cut_into_blocks(content.catalog)), bounds_(content) {}

  size_t count() const { return 2 * ranges() + 3; }

  // What a thread reuses. Throws std::bad_alloc.
  struct Room {
    std::unique_ptr<std::byte[]> memory;
    uint64_t bytes = 0;
    std::vector<RecordLocation> locations;

    std::byte* at_least(uint64_t wanted) {
      if (bytes < wanted) {
        memory.reset();  // pages that nobody touched take no memory
        memory = std::make_unique_for_overwrite<std::byte[]>(bytes = wanted);
      }
      return memory.get();
    }
  };

  // The first block goes before all others: it numbers the memos.
  std::span<const std::byte> first(Room& room) const {
    std::byte* out = room.at_least(SharedValues::most_bytes(content_));
    PickleOut pickle = PickleOut::first(out);
    shared_.write(pickle);
    pickle.recall(shared_.global(kMetadata));
    pickle.op(')', '\x81', '}', '(');
    pickle.text("state_dict_metadata");
    pickle.op('}');
    return {out, pickle.finish()};
  }

  std::span<const std::byte> make(size_t block, Room& room) const {
    const size_t states = 1 + ranges();
    if (block < states) return of_keys(block - 1, false, room);
    if (block == states) {
      BlockWriter writer(content_, shared_, room.at_least(bounds_.paths()));
      writer.pickle().text("planner_data");
      writer.planner_data();
      writer.pickle().text("storage_data");
      writer.pickle().op('}');
      return {room.memory.get(), writer.pickle().finish()};
    }
    if (block + 1 < count()) return of_keys(block - states - 1, true, room);
    BlockWriter writer(content_, shared_, room.at_least(bounds_.last()));
    writer.last();
    return {room.memory.get(), writer.pickle().finish()};
  }

 private:
  size_t ranges() const { return ends_.size() - 1; }

  std::span<const std::byte> of_keys(size_t range, bool locations, Room& room) const {
    const size_t begin = ends_[range], end = ends_[range + 1];
    BlockWriter writer(content_, shared_, room.at_least(bounds_.keys(begin, end)));
    if (locations) {
      const std::span<const Catalog::Chunk> chunks = content_.catalog.chunks_of(begin, end);
      room.locations.resize(chunks.size());
      content_.locations.gather(chunks, room.locations.data());
      writer.storage_data(begin, end, room.locations);
    } else {
      writer.state_dict_metadata(begin, end);
    }
    return {room.memory.get(), writer.pickle().finish()};
  }

  const MetadataContent& content_;
  SharedValues& shared_;
  std::vector<size_t> ends_;
  Bounds bounds_;
};

}  // namespace

uint64_t most_metadata_bytes(const MetadataContent& content) {
  const Bounds bounds(content);
  return SharedValues::most_bytes(content) + bounds.keys(0, content.catalog.keys.size()) +
         cut_into_blocks(content.catalog).size() * 2 * Bounds::kFixed + bounds.paths() + bounds.last() +
         MetadataTrailer::kBytes;
}

WrittenMetadata write_metadata(const MetadataContent& content, unsigned threads, const MetadataSink& sink) {
  SharedValues shared(content);
  const Blocks blocks(content, shared);
  InOrder output(blocks.count(), sink);
  {
    Blocks::Room room;
    output.put(0, blocks.first(room));
  }
  parallel_for(threads, blocks.count() - 1, 1, [&] {
    return [&, room = Blocks::Room()](size_t i) mutable {
      try {
        output.put(i + 1, blocks.make(i + 1, room));
      } catch (...) {
        output.fail();
        throw;
      }
    };
  });
  WrittenMetadata written{output.written() + MetadataTrailer::kBytes, output.written(), output.crc(), {}};
  auto& trailer = written.trailer;
  const auto length = static_cast<uint32_t>(written.pickle_bytes);
  std::memcpy(trailer.data(), MetadataTrailer::kMagic.data(), MetadataTrailer::kMagic.size());
  std::memcpy(trailer.data() + 8, &length, sizeof length);
  std::memcpy(trailer.data() + 12, &written.pickle_crc, sizeof written.pickle_crc);
  sink(written.pickle_bytes, trailer);
  return written;
}

}  // namespace vescale_ckpt::metadata
