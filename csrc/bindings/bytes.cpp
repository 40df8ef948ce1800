// Ranges of bytes of files, read and checksummed.
#include <string>
#include <vector>

#include "base/crc32.h"
#include "base/memory.h"
#include "bindings/bindings.h"
#include "format/checksum_table.h"
#include "io/table_cursor.h"
#include "read/reader.h"

namespace vescale_ckpt::bindings {
namespace {

// Rows: file, offset, length, address.
py::dict read_bytes(const std::vector<std::string>& paths, const py::buffer& buffer, const io::EngineOptions& options) {
  const Table table(buffer);
  std::vector<read::ReadItem> items;
  for (io::TableCursor cursor(table.values()); !cursor.at_end(); cursor.next_row()) {
    const auto file = static_cast<uint32_t>(cursor.size());
    const uint64_t offset = cursor.size(), length = cursor.size();
    items.push_back(read::range_item(file, offset, length, cursor.address()));
  }
  const auto report = without_gil([&] { return read::read_tensors(paths, items, false, options); });
  return stats_dict(report->stats);
}

// Rows: file, offset, length.
std::vector<py::bytes> read_objects(const std::vector<std::string>& paths, const py::buffer& buffer,
                                    const io::EngineOptions& options) {
  const Table table(buffer);
  std::vector<py::bytes> objects;
  std::vector<read::ReadItem> items;
  for (io::TableCursor cursor(table.values()); !cursor.at_end(); cursor.next_row()) {
    const auto file = static_cast<uint32_t>(cursor.size());
    const uint64_t offset = cursor.size(), length = cursor.size();
    auto* raw = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(length));
    if (raw == nullptr) throw py::error_already_set();
    objects.push_back(py::reinterpret_steal<py::bytes>(raw));
    items.push_back(read::range_item(file, offset, length, reinterpret_cast<std::byte*>(PyBytes_AS_STRING(raw))));
  }
  without_gil([&] { return read::read_tensors(paths, items, false, options); });
  return objects;
}

}  // namespace

void bind_bytes(py::module_& module) {
  module.attr("CHECKSUM_BLOCK") = py::int_(format::kChecksumBlock);
  module.def(
      "crc32_of_memory",
      [](uintptr_t address, uint64_t bytes) { return crc32(0, reinterpret_cast<void*>(address), bytes); },
      py::arg("address"), py::arg("bytes"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "advise_huge_pages",
      [](uintptr_t address, uint64_t bytes) { advise_huge_pages(reinterpret_cast<std::byte*>(address), bytes); },
      py::arg("address"), py::arg("bytes"));
  module.def("crc32_combine", &crc32_combine, py::arg("first"), py::arg("second"), py::arg("second_bytes"));
  module.def("read_bytes", &read_bytes, py::arg("paths"), py::arg("table"), py::arg("options"),
             "ranges of files, as they are");
  module.def("read_objects", &read_objects, py::arg("paths"), py::arg("table"), py::arg("options"));
}

}  // namespace vescale_ckpt::bindings
