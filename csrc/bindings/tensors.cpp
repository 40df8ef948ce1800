// Torch's tensors, without torch's headers, and the tables that say where a state is.
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/tensor_reader.h"
#include "device/cuda.h"
#include "fingerprint/fingerprint.h"
#include "plan/replicas.h"
#include "state/inventory.h"
#include "state/replica_hash.h"
#include "state/tables.h"

namespace vescale_ckpt::bindings {
namespace {

// --- Items

py::bytes pack_inventory(const py::list& names, const std::vector<py::bytes>& rows, int64_t node) {
  if (names.size() != rows.size()) throw Error::invalid("expected as many rows of items as names");
  state::InventoryBuilder builder;
  for (size_t i = 0; i < rows.size(); ++i) builder.add(utf8(names[i]), view(rows[i]));
  const std::vector<std::byte> bytes = builder.pack(node);
  state::Inventory{bytes};  // throws for what no reader would take
  return bytes_of(bytes);
}

// For each of the first tensors the inventory's row of it as a whole; empty for a dtype that no checkpoint can hold.
std::vector<py::bytes> rows_of_tensors(const py::bytes& table, const py::bytes& requires_grad) {
  const Table words(table);
  std::vector<py::bytes> rows;
  for (const auto& row : state::rows_of_tensors(state::TensorTable(words.values()), view(requires_grad))) {
    rows.push_back(bytes_of(row));
  }
  return rows;
}

// (inventory, table of sources) of a state of whole tensors, in the order of the names, and of objects, whose positions
// are given. None if a tensor is of a dtype that no checkpoint can hold.
py::object inventory_of_tensors(const py::list& names, const py::bytes& table, const py::bytes& requires_grad,
                                const std::vector<size_t>& objects, int64_t node) {
  std::vector<std::string> texts;
  texts.reserve(names.size());
  for (const py::handle name : names) texts.push_back(utf8(name));
  const Table words(table);
  const auto described =
      state::describe_state(texts, state::TensorTable(words.values()), view(requires_grad), objects, node);
  if (!described) return py::none();
  return py::make_tuple(bytes_of(described->inventory), bytes_of(described->sources));
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

py::tuple copy_table(const HeldState& state, const py::buffer& rows) {
  const state::CopyTable table = state::make_copy_table(state.tables(), Table(rows).values());
  return py::make_tuple(bytes_of(table.rows), bytes_of(table.devices));
}

py::tuple fill_tuple(const state::FillTable& table) {
  return py::make_tuple(bytes_of(table.copies.rows), bytes_of(table.copies.devices), table.rest);
}

using SampleArgument = std::tuple<uint32_t, uint32_t, uint64_t>;

state::Sample sample_of(const SampleArgument& sample) {
  const auto& [of_small, of_large, large_bytes] = sample;
  return {of_small, of_large, large_bytes};
}

std::span<const uint64_t> factors_of(const py::bytes& factors) {  // aligned as all that Python allocates
  const std::span<const std::byte> bytes = view(factors);
  return {reinterpret_cast<const uint64_t*>(bytes.data()), bytes.size() / sizeof(uint64_t)};
}

py::tuple offered_hashes(const HeldState& state, const SampleArgument& sample, const py::bytes& factors) {
  const auto found = state::offered_hashes(state.tables(), sample_of(sample), factors_of(factors));
  return py::make_tuple(bytes_of(found.hashes), found.rest);
}

py::tuple replica_sum(const HeldState& state, const SampleArgument& sample, const py::bytes& factors,
                      const py::bytes& holders) {
  const auto found = plan::replica_sum(state.tables(), view(holders), sample_of(sample), factors_of(factors));
  std::vector<std::pair<uint32_t, uint64_t>> rest;
  for (const plan::Summand& summand : found.rest) rest.emplace_back(summand.item, summand.factor);
  return py::make_tuple(found.sum, rest);
}

py::tuple fingerprints(const HeldState& state, unsigned threads, const Producers& producers) {
  const fingerprint::ItemValues found = without_gil([&] {
    std::string reason;
    return fingerprint::of_items(state.tables(), threads, producers.empty() ? nullptr : device::cuda_runtime(reason),
                                 {producers.begin(), producers.end()});
  });
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
  module.def("pack_inventory", &pack_inventory, py::arg("names"), py::arg("rows"), py::arg("node") = 0);
  py::class_<HeldState>(module, "State")
      .def(py::init<const py::bytes&, const py::buffer&, const py::buffer&, const py::bytes&>(), py::arg("inventory"),
           py::arg("sources"), py::arg("tensors"), py::arg("ready"))
      .def(
          "ready_rows",
          [](const HeldState& state, const py::buffer& rows) {
            return bytes_of(state::ready_rows(state.tables(), Table(rows).values()));
          },
          py::arg("local_plan"))
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
      .def("offered_hashes", &offered_hashes, py::arg("sample"), py::arg("factors"),
           "a hash of each item, 0 for none; and the items that are to be hashed in Python")
      .def("replica_sum", &replica_sum, py::arg("sample"), py::arg("factors"), py::arg("holders"),
           "the sum of this rank's summands; item and factor of those that are to be added in Python")
      .def("fingerprints", &fingerprints, py::arg("threads"), py::arg("producers") = Producers(),
           "16 bytes of each item, 0 for objects; and the items that neither the engine nor a kernel reads, which have "
           "0, too");
  module.def("fingerprint_of", &fingerprint_of, py::arg("data"), py::arg("item_bytes"), py::arg("shape"),
             py::arg("offset"), py::arg("size"), py::arg("threads"), "16 bytes of a contiguous chunk");
}

}  // namespace vescale_ckpt::bindings
