// Sets of safetensors files that all ranks write.
#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "error.h"
#include "io/commit.h"
#include "io/shared_writer.h"
#include "plan/catalog.h"
#include "plan/export_layout.h"
#include "plan/shared_memory.h"

namespace vescale_ckpt::bindings {
namespace {

using Texts = std::vector<std::pair<std::string, std::string>>;

py::bytes packed(std::span<const int64_t> words) {
  return {reinterpret_cast<const char*>(words.data()), words.size_bytes()};
}

std::unique_ptr<plan::ExportLayout> make_layout(const plan::Catalog& catalog, uint64_t most_file_bytes,
                                                const Texts& metadata, const Texts& aliases) {
  const py::gil_scoped_release release;
  std::vector<plan::ExportLayout::Alias> names;
  for (const auto& [name, stored] : aliases) names.push_back({name, stored});
  return std::make_unique<plan::ExportLayout>(catalog, most_file_bytes, metadata, names);
}

std::vector<py::bytes> heads(const plan::ExportLayout& layout, const std::vector<py::bytes>& blocks) {
  std::vector<std::vector<uint32_t>> words;
  std::vector<std::span<const uint32_t>> views;
  for (const py::bytes& bytes : blocks) {
    const auto raw = view(bytes);
    words.emplace_back(raw.size() / sizeof(uint32_t));
    std::ranges::copy(raw.first(words.back().size() * sizeof(uint32_t)),
                      std::as_writable_bytes(std::span(words.back())).begin());
  }
  for (const auto& table : words) views.emplace_back(table);
  std::vector<std::string> made;
  {
    const py::gil_scoped_release release;
    made = layout.heads(views);
  }
  return {made.begin(), made.end()};
}

}  // namespace

void bind_export(py::module_& module) {
  py::class_<plan::ExportLayout>(module, "ExportLayout")
      .def(py::init(&make_layout), py::arg("catalog"), py::arg("most_file_bytes"), py::arg("metadata"),
           py::arg("aliases"))
      .def_property_readonly("file_bytes",
                             [](const plan::ExportLayout& layout) {
                               std::vector<uint64_t> bytes;
                               for (size_t file = 0; file < layout.files(); ++file) {
                                 bytes.push_back(layout.file_bytes(file));
                               }
                               return bytes;
                             })
      .def("places", [](const plan::ExportLayout& layout, uint32_t rank) { return packed(layout.places(rank)); })
      .def("heads", &heads)
      .def("index", [](const plan::ExportLayout& layout, const std::vector<std::string>& names) {
        return py::bytes(layout.index(names));
      });

  py::class_<io::SharedWriter>(module, "SharedWriter")
      .def(py::init([](std::vector<std::string> paths, const py::buffer& targets, const io::EngineOptions& options) {
             const Table table(targets);
             return std::make_unique<io::SharedWriter>(std::move(paths), table.values(), options);
           }),
           py::arg("paths"), py::arg("targets"), py::arg("options"))
      .def("write",
           [](io::SharedWriter& writer, const py::buffer& table, const py::buffer& rows) {
             const Table words(table), numbers(rows);
             const py::gil_scoped_release release;
             writer.write(words.values(), numbers.values());
           })
      .def("finish",
           [](io::SharedWriter& writer, bool sync) {
             std::span<const uint32_t> blocks;
             {
               const py::gil_scoped_release release;
               blocks = writer.finish(sync);
             }
             return py::bytes(reinterpret_cast<const char*>(blocks.data()), blocks.size_bytes());
           })
      .def("progress", &io::SharedWriter::progress, "bytes given to the files so far; from any thread")
      .def("cancel", &io::SharedWriter::cancel, "from any thread")
      .def("stats", [](const io::SharedWriter& writer) { return stats_dict(writer.stats()); });

  module.def(
      "export_targets",
      [](const py::bytes& inventory, const py::buffer& part, const py::buffer& places) {
        return packed(
            plan::make_export_targets(plan::Inventory(view(inventory)), Table(part).values(), Table(places).values()));
      },
      py::arg("inventory"), py::arg("part"), py::arg("places"));
  module.def(
      "items_that_share_memory",
      [](const py::bytes& inventory, const py::buffer& sources, const py::buffer& tensors, const py::bytes& ready) {
        const plan::Inventory items(view(inventory));
        const Table source_table(sources), tensor_table(tensors);
        return plan::items_that_share_memory(
            plan::StateTables(items, source_table.values(), tensor_table.values(), view(ready)));
      },
      py::arg("inventory"), py::arg("sources"), py::arg("tensors"), py::arg("ready"));
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
