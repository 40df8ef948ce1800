#include "metadata/metadata_pickle.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <vector>

#include "base/crc32.h"
#include "base/error.h"
#include "base/numbered_strings.h"
#include "format/torch_record.h"
#include "metadata/pickle_out.h"

namespace vescale_ckpt::metadata {
namespace {

constexpr uint64_t kBatch = 1000;                // elements in one APPENDS or SETITEMS, as in CPython
constexpr size_t kMostShapes = size_t{1} << 22;  // so many are remembered; later ones are written in full

constexpr uint32_t kNoMemo = UINT32_MAX;

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

// Memos of values that differ in their bytes.
struct Memos {
  NumberedStrings values;
  std::vector<uint32_t> memos;

  // Returns kNoMemo for a new value. The reference is valid until the next call.
  uint32_t& operator[](std::string_view value) {
    const auto [number, is_new] = values.add(value);
    if (is_new) memos.push_back(kNoMemo);
    return memos[number];
  }
};

class Writer {
 public:
  Writer(const MetadataContent& content, std::byte* out) : content_(content), catalog_(content.catalog), pickle_(out) {
    if (catalog_.keys.size() >= UINT32_MAX) throw Error::invalid("too many keys");
    names_.resize(catalog_.keys.size(), kNoMemo);
    files_.resize(content.locations.files().size(), kNoMemo);
  }

  uint64_t run();

 private:
  // Writes a value with `write` the first time, and recalls it afterwards.
  template <typename Write>
  void once(uint32_t& memo, const Write& write) {
    if (memo != kNoMemo && !overdrawn()) {
      pickle_.recall(memo);
      return;
    }
    write();
    if (memo == kNoMemo) memo = pickle_.memoize();
  }

  // The check of pickles (format/pickle_check.h) limits the work that a pickle causes in proportion to its length: it
  // would refuse a long name that is recalled for each of many chunks. So the work is counted by the rules of the
  // check. While it is too much, values are written again instead of recalled.
  bool overdrawn() const { return work_ > 8 * pickle_.written(); }

  void global(Global name) {
    uint32_t& memo = globals_[name];
    if (memo != kNoMemo) return pickle_.recall(memo);
    pickle_.global(kGlobals[name]);
    memo = pickle_.memoize();
  }
  void text(uint32_t& memo, std::string_view value) {
    once(memo, [&] { pickle_.text(value); });
  }
  void word(std::string_view value) { text(words_[value], value); }
  void name(size_t key) { text(names_[key], catalog_.name(catalog_.keys[key])); }
  void reduce_tuple(char tuple, uint64_t work) {
    pickle_.op(tuple, 'R');
    work_ += work;
  }
  void shape(std::span<const int64_t> dims);
  void properties(const Catalog::Key& key);
  void tensor(const Catalog::Key& key);
  void index(size_t key, std::span<const int64_t> offset, std::optional<uint64_t> hint);
  void info(const RecordLocation& location);
  void state_dict_metadata();
  void planner_data();
  void storage_data();

  // Writes a container's elements: `element(i)` for each.
  template <typename Element>
  void elements(uint64_t count, char close, const Element& element) {
    for (uint64_t i = 0; i < count; ++i) {
      if (i % kBatch == 0) pickle_.op('(');
      element(i);
      if ((i + 1) % kBatch == 0 || i + 1 == count) pickle_.op(close);
      pickle_.border();
    }
  }

  const MetadataContent& content_;
  const Catalog& catalog_;
  PickleOut pickle_;
  uint64_t work_ = 0;
  std::array<uint32_t, kGlobals.size()> globals_ = [] {
    std::array<uint32_t, kGlobals.size()> none;
    none.fill(kNoMemo);
    return none;
  }();
  std::vector<uint32_t> names_, files_;  // memos
  std::vector<uint32_t> properties_ = std::vector<uint32_t>(2 * format::dtypes().size(), kNoMemo);
  uint32_t strided_ = kNoMemo, contiguous_ = kNoMemo;
  Memos shapes_, words_;
};

void Writer::shape(std::span<const int64_t> dims) {
  const auto write = [&] {
    global(kSize);
    if (dims.empty()) {
      pickle_.op(')');
    } else {
      if (dims.size() > 3) pickle_.op('(');
      for (const int64_t dim : dims) pickle_.number(dim);
      pickle_.op(dims.size() > 3 ? 't' : static_cast<char>(0x84 + dims.size()));
    }
    reduce_tuple('\x85', 3 + 2 * dims.size());
  };
  const std::string_view bytes = bytes_of(dims);
  if (shapes_.values.size() < kMostShapes || shapes_.values.find(bytes)) return once(shapes_[bytes], write);
  write();
}

void Writer::properties(const Catalog::Key& key) {
  const bool requires_grad = key.flags & state::kRequiresGrad;
  once(properties_[2 * size_t{key.dtype} + requires_grad], [&] {
    global(kProperties);
    pickle_.op(')', '\x81', '(');
    pickle_.global(std::string("torch\n").append(format::dtypes()[key.dtype].name) + "\n");
    once(strided_, [&] {
      global(kLayout);
      pickle_.text("torch.strided");
      reduce_tuple('\x85', 32);
    });
    pickle_.op(requires_grad ? '\x88' : '\x89');
    once(contiguous_, [&] {
      global(kMemoryFormat);
      pickle_.number(0);
      reduce_tuple('\x85', 8);
    });
    pickle_.op('\x89', 't', 'b');  // pin_memory
    work_ += 8;
  });
}

void Writer::tensor(const Catalog::Key& key) {
  global(kTensor);
  properties(key);
  shape(catalog_.shape(key));
  pickle_.op(']');
  elements(key.chunks, 'e', [&](uint64_t i) {
    const Catalog::Chunk& chunk = catalog_.chunks[key.first_chunk + i];
    global(kChunk);
    shape(catalog_.offset(key, chunk));
    shape(catalog_.size(key, chunk));
    reduce_tuple('\x86', 9 + 4 * uint64_t{key.ndim});
  });
  reduce_tuple('\x87', 128 + 2 * uint64_t{key.ndim} + key.chunks * (11 + 4 * uint64_t{key.ndim}));
}

void Writer::state_dict_metadata() {
  pickle_.op('}');
  elements(catalog_.keys.size(), 'u', [&](uint64_t i) {
    const Catalog::Key& key = catalog_.keys[i];
    name(i);
    work_ += key.name_bytes + 1;
    if (key.kind == state::ItemKind::object) {
      global(kObject);
      pickle_.op(')', '\x81');
      work_ += 1;
    } else {
      tensor(key);
    }
  });
}

void Writer::planner_data() {
  if (!content_.paths.any()) {
    pickle_.op('N');
    return;
  }
  const auto path_of = [&](const KeyPaths::Path& path) {
    pickle_.op('(');
    KeyPaths::visit(path, [&](std::string_view part) { word(part); }, [&](int64_t part) { pickle_.number(part); });
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

void Writer::index(size_t key, std::span<const int64_t> offset, std::optional<uint64_t> hint) {
  global(kIndex);
  name(key);
  if (hint) {
    shape(offset);
    pickle_.number(static_cast<int64_t>(*hint));
    pickle_.op('\x87');
  } else {
    pickle_.op('\x85');
  }
  pickle_.op('R');
  work_ += 2 * (10 + uint64_t{catalog_.keys[key].name_bytes} + 2 * offset.size());
}

void Writer::info(const RecordLocation& location) {
  const std::string& file = content_.locations.files()[location.file];
  global(kInfo);
  text(files_[location.file], file);
  pickle_.number(static_cast<int64_t>(location.offset));
  pickle_.number(static_cast<int64_t>(location.length));
  reduce_tuple('\x87', 8 + file.size());
  if (location.crc < 0) return;
  pickle_.op('}');
  word("crc");
  pickle_.number(location.crc);
  pickle_.op('s', 'b');
  work_ += 4;
}

void Writer::storage_data() {
  uint64_t entries = 0;
  pickle_.op('}', '(');
  for (size_t at = 0; at < catalog_.keys.size(); ++at) {
    const Catalog::Key& key = catalog_.keys[at];
    for (uint64_t i = 0; i < key.chunks; ++i) {
      const Catalog::Chunk& chunk = catalog_.chunks[key.first_chunk + i];
      if (key.kind == state::ItemKind::object) {
        index(at, {}, std::nullopt);
      } else {
        index(at, catalog_.offset(key, chunk), i);
      }
      info(content_.locations[chunk]);
      if (++entries % kBatch == 0) pickle_.op('u', '(');
      pickle_.border();
    }
  }
  pickle_.op('u');
}

uint64_t Writer::run() {
  global(kMetadata);
  pickle_.op(')', '\x81', '}', '(');
  pickle_.text("state_dict_metadata");
  state_dict_metadata();
  pickle_.text("planner_data");
  planner_data();
  pickle_.text("storage_data");
  storage_data();
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
  pickle_.op('u', 'b');
  return pickle_.finish();
}

}  // namespace

uint64_t most_metadata_bytes(const MetadataContent& content) {
  // The bound counts every value in full, every number at its longest, and every global as a recall.
  constexpr uint64_t kFixed = 4096, kKey = 512, kChunk = 160, kPath = 32, kDim = PickleOut::kMostNumber;
  uint64_t longest_file = 0;
  for (const std::string& file : content.locations.files())
    longest_file = std::max<uint64_t>(longest_file, file.size());
  uint64_t bytes = kFixed + content.checkpoint_id.size() + content.save_id.size() + MetadataTrailer::kBytes;
  if (content.structure) bytes += content.structure->size();
  for (const Catalog::Key& key : content.catalog.keys) {
    bytes += kKey + 2 * uint64_t{key.name_bytes} + kDim * key.ndim;
    bytes += key.chunks * (kChunk + key.name_bytes + longest_file + 3 * kDim * key.ndim);
  }
  for (const KeyPaths::Path& path : content.paths.paths()) {
    bytes += kPath + path.name.size() + 2 * path.packed.size();
  }
  return bytes;
}

WrittenMetadata write_metadata(const MetadataContent& content, std::byte* out) {
  WrittenMetadata written{};
  written.pickle_bytes = Writer(content, out).run();
  written.pickle_crc = crc32(0, out, written.pickle_bytes);
  std::byte* trailer = out + written.pickle_bytes;
  const auto length = static_cast<uint32_t>(written.pickle_bytes);
  std::memcpy(trailer, MetadataTrailer::kMagic.data(), MetadataTrailer::kMagic.size());
  std::memcpy(trailer + 8, &length, sizeof length);
  std::memcpy(trailer + 12, &written.pickle_crc, sizeof written.pickle_crc);
  written.bytes = written.pickle_bytes + MetadataTrailer::kBytes;
  return written;
}

}  // namespace vescale_ckpt::metadata
