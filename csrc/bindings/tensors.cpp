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
#include "format/torch_record.h"
#include "plan/replicas.h"
#include "state/inventory.h"
#include "state/replica_hash.h"
#include "state/shared_memory.h"
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

std::string utf8(const py::handle& name) {
  Py_ssize_t size = 0;
  if (const char* data = PyUnicode_AsUTF8AndSize(name.ptr(), &size); data != nullptr) {
    return {data, static_cast<size_t>(size)};
  }
  if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) throw py::error_already_set();
  PyErr_Clear();  // lone surrogates, which Python's pickle keeps too
  PyObject* encoded = PyUnicode_AsEncodedString(name.ptr(), "utf-8", "surrogatepass");
  if (encoded == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::bytes>(encoded);
}

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
// and sizes are given. None if a tensor is of a dtype that no checkpoint can hold.
py::object inventory_of_tensors(const py::list& names, const py::bytes& table, const py::bytes& requires_grad,
                                const std::vector<size_t>& objects, const std::vector<uint64_t>& object_bytes,
                                int64_t node) {
  const Table words(table);
  const state::TensorTable tensors(words.values());
  const std::span<const std::byte> flags = view(requires_grad);
  if (objects.size() != object_bytes.size() || flags.size() != tensors.size() ||
      names.size() != tensors.size() + objects.size()) {
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
      item.bytes = object_bytes[object++];
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

// --- Where the items are

py::tuple copy_table(const py::bytes& inventory, const py::buffer& rows, const py::bytes& sources,
                     const py::bytes& tensors, const py::bytes& ready) {
  const Table row_words(rows), source_words(sources), tensor_words(tensors);
  const state::Inventory items(view(inventory));
  const state::CopyTable table =
      state::make_copy_table({items, source_words.values(), tensor_words.values(), view(ready)}, row_words.values());
  return py::make_tuple(bytes_of(table.rows), bytes_of(table.devices));
}

py::tuple read_table(const py::bytes& inventory, const py::buffer& rows, const py::bytes& sources,
                     const py::bytes& tensors, const py::bytes& ready) {
  const Table row_words(rows), source_words(sources), tensor_words(tensors);
  const state::Inventory items(view(inventory));
  const state::FillTable table =
      state::make_read_table({items, source_words.values(), tensor_words.values(), view(ready)}, row_words.values());
  return py::make_tuple(bytes_of(table.copies.rows), bytes_of(table.copies.devices), table.rest);
}

// --- Replicas

using SampleArgument = std::tuple<uint32_t, uint32_t, uint64_t>;

// What a rank tells of some of its items.
struct HashedItems {
  HashedItems(const state::StateTables& state, std::span<const uint32_t> items, const SampleArgument& sample,
              const py::bytes& factors) {
    const Table words(factors);
    const std::vector<uint64_t> of_elements(words.values().begin(), words.values().end());
    const auto& [of_small, of_large, large_bytes] = sample;
    hashes = state::replica_hashes(state, items, {of_small, of_large, large_bytes}, of_elements);
  }
  std::vector<uint64_t> hashes;
};

py::tuple offered_hashes(const py::bytes& inventory, const py::bytes& sources, const py::bytes& tensors,
                         const py::bytes& ready, const SampleArgument& sample, const py::bytes& factors,
                         const py::bytes& offered) {
  const Table source_words(sources), tensor_words(tensors);
  const state::Inventory all(view(inventory));
  const std::span<const std::byte> flags = view(offered);
  if (!flags.empty() && flags.size() != all.size()) throw Error::invalid("expected a flag for each item");
  std::vector<uint32_t> items;
  for (uint32_t i = 0; i < all.size(); ++i) {
    const state::Item item = all[i];
    if (item.kind == state::ItemKind::object || item.bytes == 0) continue;
    if (flags.empty() || flags[i] != std::byte{0} || item.bytes >= std::get<2>(sample)) items.push_back(i);
  }
  const HashedItems found({all, source_words.values(), tensor_words.values(), view(ready)}, items, sample, factors);
  std::vector<uint64_t> hashes(all.size());
  std::vector<uint32_t> rest;
  for (size_t i = 0; i < items.size(); ++i) {
    hashes[items[i]] = found.hashes[i];
    if (found.hashes[i] == state::kNotHashed) rest.push_back(items[i]);
  }
  return py::make_tuple(bytes_of(hashes), rest);
}

py::tuple replica_sum(const py::bytes& inventory, const py::bytes& sources, const py::bytes& tensors,
                      const py::bytes& ready, const SampleArgument& sample, const py::bytes& factors,
                      const py::bytes& holders) {
  const Table source_words(sources), tensor_words(tensors);
  const state::Inventory all(view(inventory));
  const std::vector<plan::Summand> summands = plan::replica_summands(all, view(holders));
  std::vector<uint32_t> items;
  for (const plan::Summand& summand : summands) items.push_back(summand.item);
  const HashedItems found({all, source_words.values(), tensor_words.values(), view(ready)}, items, sample, factors);
  uint64_t sum = 0;
  std::vector<std::pair<uint32_t, uint64_t>> rest;
  for (size_t i = 0; i < items.size(); ++i) {
    sum += summands[i].factor * found.hashes[i];
    if (found.hashes[i] == state::kNotHashed) rest.emplace_back(items[i], summands[i].factor);
  }
  return py::make_tuple(sum, rest);
}

template <auto make>
py::bytes engine_table(const py::bytes& inventory, const py::buffer& rows, const py::bytes& sources,
                       const py::bytes& tensors, const py::bytes& ready) {
  const Table row_words(rows), source_words(sources), tensor_words(tensors);
  const state::Inventory items(view(inventory));
  return bytes_of(make({items, source_words.values(), tensor_words.values(), view(ready)}, row_words.values()));
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
             py::arg("requires_grad"), py::arg("objects"), py::arg("object_bytes"), py::arg("node"));
  module.def("rows_of_tensors", &rows_of_tensors, py::arg("table"), py::arg("requires_grad"));
  module.def(
      "are_dense_and_apart",
      [](const py::bytes& table) { return state::are_dense_and_apart(state::TensorTable(Table(table).values())); },
      py::arg("table"), "whether each tensor is contiguous, in memory of its own");
  module.def("offered_hashes", &offered_hashes, py::arg("inventory"), py::arg("sources"), py::arg("tensors"),
             py::arg("ready"), py::arg("sample"), py::arg("factors"), py::arg("offered"),
             "a hash of each item, 0 for none; and the items that are to be hashed in Python");
  module.def("replica_sum", &replica_sum, py::arg("inventory"), py::arg("sources"), py::arg("tensors"),
             py::arg("ready"), py::arg("sample"), py::arg("factors"), py::arg("holders"),
             "the sum of this rank's summands; item and factor of those that are to be added in Python");
  module.def("pack_inventory", &pack_inventory, py::arg("names"), py::arg("rows"), py::arg("node") = 0);
  module.def("write_table", &engine_table<&state::make_write_table>, py::arg("inventory"), py::arg("local_plan"),
             py::arg("sources"), py::arg("tensors"), py::arg("ready"));
  module.def("copy_table", &copy_table, py::arg("inventory"), py::arg("local_plan"), py::arg("sources"),
             py::arg("tensors"), py::arg("ready"), "a write table of rows wherever they are, and their devices");
  module.def("ready_rows", &engine_table<&state::ready_rows>, py::arg("inventory"), py::arg("local_plan"),
             py::arg("sources"), py::arg("tensors"), py::arg("ready"));
  module.def("read_table", &read_table, py::arg("inventory"), py::arg("reads"), py::arg("sources"), py::arg("tensors"),
             py::arg("ready"), "a read table, the device of each row, and the numbers of rows that are not in it");
}

}  // namespace vescale_ckpt::bindings
