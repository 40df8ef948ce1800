// Sets of safetensors files that several ranks write.
#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "hf/export_layout.h"
#include "io/commit.h"
#include "metadata/catalog.h"
#include "write/placed_boxes.h"

namespace vescale_ckpt::bindings {
namespace {

using Texts = std::vector<std::pair<std::string, std::string>>;

std::unique_ptr<hf::ExportLayout> make_export_layout(const metadata::Catalog& catalog, uint64_t most_file_bytes,
                                                     const Texts& metadata, const Texts& aliases,
                                                     const std::vector<std::pair<std::string, uint64_t>>& files) {
  const py::gil_scoped_release release;
  std::vector<hf::ExportLayout::Alias> names;
  for (const auto& [name, stored] : aliases) names.push_back({name, stored});
  std::vector<hf::ExportLayout::FileNumber> numbers;
  for (const auto& [name, number] : files) numbers.push_back({name, number});
  return std::make_unique<hf::ExportLayout>(catalog, most_file_bytes, metadata, names, numbers);
}

std::vector<py::bytes> heads(const hf::ExportLayout& layout, const std::vector<py::bytes>& blocks) {
  std::vector<std::vector<uint32_t>> words;
  std::vector<std::span<const uint32_t>> views;
  for (const py::bytes& bytes : blocks) {
    const auto raw = view(bytes);
    words.emplace_back(raw.size() / sizeof(uint32_t));
    std::ranges::copy(raw.first(words.back().size() * sizeof(uint32_t)),
                      std::as_writable_bytes(std::span(words.back())).begin());
  }
  for (const auto& table : words) views.emplace_back(table);
  const auto made = without_gil([&] { return layout.heads(views); });
  return {made.begin(), made.end()};
}

}  // namespace

void bind_export(py::module_& module) {
  py::class_<hf::ExportLayout>(module, "ExportLayout")
      .def(py::init(&make_export_layout), py::arg("catalog"), py::arg("most_file_bytes"), py::arg("metadata"),
           py::arg("aliases"), py::arg("file_numbers") = std::vector<std::pair<std::string, uint64_t>>{})
      .def_property_readonly("file_bytes",
                             [](const hf::ExportLayout& layout) {
                               std::vector<uint64_t> bytes;
                               for (size_t file = 0; file < layout.files(); ++file) {
                                 bytes.push_back(layout.file_bytes(file));
                               }
                               return bytes;
                             })
      .def("record_locations",
           [](const hf::ExportLayout& layout, uint32_t rank) { return bytes_of(layout.record_locations(rank)); })
      .def(
          "bring_short_runs",
          [](hf::ExportLayout& layout, const std::vector<uint32_t>& nodes, uint64_t least_bytes) {
            const py::gil_scoped_release release;
            layout.bring_short_runs(nodes, least_bytes);
          },
          py::arg("nodes"), py::arg("least_bytes"))
      .def("held",
           [](const hf::ExportLayout& layout, const metadata::Catalog& catalog) {
             std::vector<py::bytes> result;
             for (const auto& of_rank : layout.held(catalog)) result.push_back(bytes_of(of_rank));
             return result;
           })
      .def("straight_bytes", &hf::ExportLayout::straight_bytes)
      .def("heads", &heads)
      .def("index", [](const hf::ExportLayout& layout, const std::vector<std::string>& names) {
        return py::bytes(layout.index(names));
      });

  py::class_<write::BoxWriter>(module, "BoxWriter")
      .def(py::init<std::vector<std::string>, const io::EngineOptions&>(), py::arg("paths"), py::arg("options"))
      .def("write",
           [](write::BoxWriter& writer, const py::buffer& boxes) {
             const Table table(boxes);
             const py::gil_scoped_release release;
             writer.write(table.values());
           })
      .def("finish", [](write::BoxWriter& writer,
                        bool sync) { return bytes_of(without_gil([&] { return writer.finish(sync); })); })
      .def("progress", &write::BoxWriter::progress, "bytes given to the files so far; from any thread")
      .def("cancel", &write::BoxWriter::cancel, "from any thread")
      .def("stats", [](const write::BoxWriter& writer) { return stats_dict(writer.stats()); });

  module.def(
      "export_boxes",
      [](const py::bytes& inventory, const py::buffer& local_plan, const py::buffer& record_locations,
         bool with_brought) {
        return bytes_of(hf::make_export_boxes(state::Inventory(view(inventory)), Table(local_plan).values(),
                                              Table(record_locations).values(), with_brought));
      },
      py::arg("inventory"), py::arg("local_plan"), py::arg("record_locations"), py::arg("with_brought"));
  module.def("reserve_file", &io::reserve_file, py::arg("path"), py::arg("bytes"),
             py::call_guard<py::gil_scoped_release>());
  module.def(
      "write_head",
      [](const std::string& path, const py::bytes& head, bool sync) {
        const auto bytes = view(head);
        const py::gil_scoped_release release;
        io::write_head(path, bytes, sync);
      },
      py::arg("path"), py::arg("head"), py::arg("sync"));
}

}  // namespace vescale_ckpt::bindings
