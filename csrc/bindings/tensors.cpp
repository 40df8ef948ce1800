// Torch's tensors, without torch's headers, and the tables that say where a state is.
#include <array>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/numbered_strings.h"
#include "bindings/bindings.h"
#include "bindings/tensor_reader.h"
#include "fingerprint/fingerprint.h"
#include "format/torch_record.h"
#include "plan/replicas.h"
#include "state/inventory.h"
#include "state/replica_hash.h"
#include "state/tables.h"

namespace vescale_ckpt::bindings {
namespace {

// --- Tensors

py::bytes tensor_table(const py::list& tensors, const py::tuple& plain_types, const py::dict& dtype_codes,
                       const py::function& row_in_python) {
  TensorReader reader(plain_types, dtype_codes, row_in_python);
  reader.reserve(tensors.size());
  for (const py::handle tensor : tensors) reader.add(tensor);
  return bytes_of(reader.words());
}

// --- Items

py::bytes pack_inventory(const py::list& names, const std::vector<py::bytes>& rows, int64_t node) {
  if (names.size() != rows.size()) throw Error::invalid("expected as many rows of items as names");
  state::InventoryBuilder builder;
  for (size_t i = 0; i < rows.size(); ++i) builder.add(utf8(names[i]), view(rows[i]));
  const std::vector<std::byte> bytes = builder.pack(node);
  state::Inventory{bytes};  // throws for what no reader would take
  return bytes_of(bytes);
}

// The item of a whole tensor. `origin`: as many zeros as it has dimensions, and more.
state::Item item_of(const state::LocalTensor& tensor, bool requires_grad, std::span<const int64_t> origin) {
  state::Item item;
  item.kind = state::ItemKind::tensor;
  item.dtype = static_cast<uint8_t>(tensor.dtype);
  item.flags = requires_grad ? state::kRequiresGrad : uint16_t{0};
  item.bytes = format::tensor_bytes(format::dtypes()[static_cast<size_t>(tensor.dtype)], tensor.shape);
  item.shape = item.size = tensor.shape;
  item.offset = origin.first(tensor.shape.size());
  return item;
}

constexpr std::array<int64_t, state::kMostDims> kOrigin{};

void add_source(int64_t tensor, size_t dims, std::vector<int64_t>& sources) {
  sources.push_back(tensor);
  sources.push_back(static_cast<int64_t>(dims));
  sources.resize(sources.size() + dims);
}

// (for each of the first tensors the inventory's row of it as a whole, for each the row of a table of sources). Equal
// rows are one object; None for a tensor of a dtype that no checkpoint can hold.
py::tuple rows_of_tensors(const py::bytes& table, const py::bytes& requires_grad) {
  const Table words(table);
  const state::TensorTable tensors(words.values());
  const std::span<const std::byte> flags = view(requires_grad);
  if (flags.size() > tensors.size()) throw Error::invalid("more flags than tensors");
  NumberedStrings known;
  std::vector<py::bytes> distinct;
  py::list rows(flags.size()), sources(flags.size());
  std::vector<int64_t> row, source;
  for (size_t i = 0; i < flags.size(); ++i) {
    const state::LocalTensor tensor = tensors[i];
    source.clear();
    add_source(static_cast<int64_t>(i), tensor.shape.size(), source);
    sources[i] = bytes_of(source);
    if (tensor.dtype < 0) {
      rows[i] = py::none();
      continue;
    }
    state::pack_row(item_of(tensor, flags[i] != std::byte{0}, kOrigin), row);
    const auto [number, is_new] = known.add({reinterpret_cast<const char*>(row.data()), row.size() * sizeof row[0]});
    if (is_new) distinct.push_back(bytes_of(row));
    rows[i] = distinct[number];
  }
  return py::make_tuple(rows, sources);
}

// (inventory, table of sources) of a state of whole tensors, in the order of the names, and of objects, whose positions
// are given. None if a tensor is of a dtype that no checkpoint can hold.
py::object inventory_of_tensors(const py::list& names, const py::bytes& table, const py::bytes& requires_grad,
                                const std::vector<size_t>& objects, int64_t node) {
  const Table words(table);
  const state::TensorTable tensors(words.values());
  const std::span<const std::byte> flags = view(requires_grad);
  if (flags.size() != tensors.size() || names.size() != tensors.size() + objects.size()) {
    throw Error::invalid("expected as many names as tensors and objects");
  }
  state::InventoryBuilder builder;
  std::vector<int64_t> sources;
  sources.reserve(4 * names.size());
  size_t object = 0;
  for (size_t position = 0; position < names.size(); ++position) {
    state::Item item;
    const std::string name = utf8(names[position]);
    if (object < objects.size() && objects[object] == position) {
      ++object;
      add_source(-1, 0, sources);
    } else {
      const size_t number = position - object;
      if (number >= tensors.size()) throw Error::invalid("objects are not in the order of the names");
      const state::LocalTensor tensor = tensors[number];
      if (tensor.dtype < 0) return py::none();
      item = item_of(tensor, flags[number] != std::byte{0}, kOrigin);
      add_source(static_cast<int64_t>(number), tensor.shape.size(), sources);
    }
    item.name = name;
    builder.add(item);
  }
  return py::make_tuple(bytes_of(builder.pack(node)), bytes_of(sources));
}

// --- A state in tables

class HeldState {
 public:
  HeldState(const py::bytes& inventory, const py::buffer& sources, const py::buffer& tensors, const py::bytes& ready)
      : inventory_(inventory),
        ready_(ready),
        sources_(sources),
        tensors_(tensors),
        items_(view(inventory_)),
        tables_(items_, sources_.values(), tensors_.values(), view(ready_)) {}
  HeldState(const HeldState&) = delete;
  HeldState& operator=(const HeldState&) = delete;

  const state::StateTables& tables() const { return tables_; }

 private:
  const py::bytes inventory_, ready_;
  const Table sources_, tensors_;
  const state::Inventory items_;
  const state::StateTables tables_;
};

template <auto make>
py::bytes made_table(const HeldState& state, const py::buffer& rows) {
  return bytes_of(make(state.tables(), Table(rows).values()));
}

py::tuple copy_table(const HeldState& state, const py::buffer& rows) {
  const state::CopyTable table = state::make_copy_table(state.tables(), Table(rows).values());
  return py::make_tuple(bytes_of(table.rows), bytes_of(table.devices));
}

py::tuple fill_tuple(const state::FillTable& table) {
  return py::make_tuple(bytes_of(table.copies.rows), bytes_of(table.copies.devices), table.rest);
}

using SampleArgument = std::tuple<uint32_t, uint32_t, uint64_t>;

std::vector<uint64_t> hashes_of(const HeldState& state, std::span<const uint32_t> items, const SampleArgument& sample,
                                const py::bytes& factors) {
  const Table words(factors);
  const std::vector<uint64_t> of_elements(words.values().begin(), words.values().end());
  const auto& [of_small, of_large, large_bytes] = sample;
  return state::replica_hashes(state.tables(), items, {of_small, of_large, large_bytes}, of_elements);
}

py::tuple offered_hashes(const HeldState& state, const SampleArgument& sample, const py::bytes& factors,
                         const py::bytes& offered) {
  const state::Inventory& all = state.tables().inventory;
  const std::span<const std::byte> flags = view(offered);
  if (!flags.empty() && flags.size() != all.size()) throw Error::invalid("expected a flag for each item");
  std::vector<uint32_t> items;
  for (uint32_t i = 0; i < all.size(); ++i) {
    const state::Item item = all[i];
    if (item.kind == state::ItemKind::object || item.bytes == 0) continue;
    if (flags.empty() || flags[i] != std::byte{0} || item.bytes >= std::get<2>(sample)) items.push_back(i);
  }
  const std::vector<uint64_t> found = hashes_of(state, items, sample, factors);
  std::vector<uint64_t> hashes(all.size());
  std::vector<uint32_t> rest;
  for (size_t i = 0; i < items.size(); ++i) {
    hashes[items[i]] = found[i];
    if (found[i] == state::kNotHashed) rest.push_back(items[i]);
  }
  return py::make_tuple(bytes_of(hashes), rest);
}

py::tuple replica_sum(const HeldState& state, const SampleArgument& sample, const py::bytes& factors,
                      const py::bytes& holders) {
  const std::vector<plan::Summand> summands = plan::replica_summands(state.tables().inventory, view(holders));
  std::vector<uint32_t> items;
  for (const plan::Summand& summand : summands) items.push_back(summand.item);
  const std::vector<uint64_t> found = hashes_of(state, items, sample, factors);
  uint64_t sum = 0;
  std::vector<std::pair<uint32_t, uint64_t>> rest;
  for (size_t i = 0; i < items.size(); ++i) {
    sum += summands[i].factor * found[i];
    if (found[i] == state::kNotHashed) rest.emplace_back(items[i], summands[i].factor);
  }
  return py::make_tuple(sum, rest);
}

py::tuple fingerprints(const HeldState& state, unsigned threads) {
  const fingerprint::ItemValues found = without_gil([&] { return fingerprint::of_items(state.tables(), threads); });
  return py::make_tuple(bytes_of(found.values), found.rest);
}

py::bytes fingerprint_of(const py::buffer& data, uint32_t item_bytes, const std::vector<int64_t>& shape,
                         const std::vector<int64_t>& offset, const std::vector<int64_t>& size, unsigned threads) {
  const py::buffer_info bytes = data.request();
  std::vector<int64_t> strides(size.size());
  int64_t stride = 1;
  for (size_t dim = size.size(); dim-- > 0; stride *= size[dim]) strides[dim] = stride;
  if (shape.size() != size.size() || offset.size() != size.size() || bytes.itemsize != 1 || bytes.ndim != 1 ||
      bytes.size != stride * int64_t{item_bytes} || (bytes.size != 0 && bytes.strides[0] != 1)) {
    throw Error::invalid("expected the contiguous bytes of a chunk");
  }
  const fingerprint::Chunk chunk{io::Box(item_bytes, shape, offset, size, strides),
                                 static_cast<const std::byte*>(bytes.ptr)};
  return bytes_of(without_gil([&] { return fingerprint::of_chunks(std::span(&chunk, 1), threads); }));
}

}  // namespace

void bind_tensors(py::module_& module) {
  module.def("tensor_table", &tensor_table, py::arg("tensors"), py::arg("plain_types"), py::arg("dtype_codes"),
             py::arg("row_in_python"));
  module.def(
      "same_shapes",
      [](const py::bytes& left, const py::bytes& right) {
        const Table a(left), b(right);
        return state::same_shapes(state::TensorTable(a.values()), state::TensorTable(b.values()));
      },
      "whether two tables of tensors agree in all dtypes and shapes");
  module.def(
      "not_contiguous",
      [](const py::bytes& table) {
        const Table words(table);
        return state::not_contiguous(state::TensorTable(words.values()));
      },
      "the numbers of tensors that are not contiguous, or have no plain memory");
  module.def("inventory_of_tensors", &inventory_of_tensors, py::arg("names"), py::arg("table"),
             py::arg("requires_grad"), py::arg("objects"), py::arg("node"));
  module.def("rows_of_tensors", &rows_of_tensors, py::arg("table"), py::arg("requires_grad"));
  module.def(
      "are_dense_and_apart",
      [](const py::bytes& table) { return state::are_dense_and_apart(state::TensorTable(Table(table).values())); },
      py::arg("table"), "whether each tensor is contiguous, in memory of its own");
  module.def("pack_inventory", &pack_inventory, py::arg("names"), py::arg("rows"), py::arg("node") = 0);
  py::class_<HeldState>(module, "State")
      .def(py::init<const py::bytes&, const py::buffer&, const py::buffer&, const py::bytes&>(), py::arg("inventory"),
           py::arg("sources"), py::arg("tensors"), py::arg("ready"))
      .def("write_table", &made_table<&state::make_write_table>, py::arg("local_plan"))
      .def("ready_rows", &made_table<&state::ready_rows>, py::arg("local_plan"))
      .def("copy_table", &copy_table, py::arg("local_plan"),
           "a write table of rows wherever they are, and their devices")
      .def(
          "read_table",
          [](const HeldState& state, const py::buffer& reads) {
            return fill_tuple(state::make_read_table(state.tables(), Table(reads).values()));
          },
          py::arg("reads"), "a read table, the device of each row, and the numbers of rows that are not in it")
      .def(
          "place_table",
          [](const HeldState& state, const py::buffer& placements, const py::buffer& memories) {
            return fill_tuple(
                state::make_place_table(state.tables(), Table(placements).values(), Table(memories).values()));
          },
          py::arg("placements"), py::arg("memories"), "the same of copies out of memories")
      .def("items_that_share_memory",
           [](const HeldState& state) { return state::items_that_share_memory(state.tables()); })
      .def("offered_hashes", &offered_hashes, py::arg("sample"), py::arg("factors"), py::arg("offered"),
           "a hash of each item, 0 for none; and the items that are to be hashed in Python")
      .def("replica_sum", &replica_sum, py::arg("sample"), py::arg("factors"), py::arg("holders"),
           "the sum of this rank's summands; item and factor of those that are to be added in Python")
      .def("fingerprints", &fingerprints, py::arg("threads"),
           "16 bytes of each item, 0 for objects; and the items that the engine may not read, which have 0, too");
  module.def("fingerprint_of", &fingerprint_of, py::arg("data"), py::arg("item_bytes"), py::arg("shape"),
             py::arg("offset"), py::arg("size"), py::arg("threads"), "16 bytes of a contiguous chunk");
}

}  // namespace vescale_ckpt::bindings
