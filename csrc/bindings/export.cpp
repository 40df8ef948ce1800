// Sets of safetensors files that all ranks write.
#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "hf/export_layout.h"
#include "hf/node_ranges.h"
#include "io/commit.h"
#include "metadata/catalog.h"
#include "state/shared_memory.h"
#include "write/shared_writer.h"

namespace vescale_ckpt::bindings {
namespace {

using Texts = std::vector<std::pair<std::string, std::string>>;

template <typename Word>
py::bytes packed(std::span<const Word> words) {
  return {reinterpret_cast<const char*>(words.data()), words.size_bytes()};
}

py::bytes packed(const std::vector<int64_t>& words) {
  return packed(std::span<const int64_t>(words));
}

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
  std::vector<std::string> made;
  {
    const py::gil_scoped_release release;
    made = layout.heads(views);
  }
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
           [](const hf::ExportLayout& layout, uint32_t rank) { return packed(layout.record_locations(rank)); })
      .def(
          "join",
          [](hf::ExportLayout& layout, const std::vector<uint32_t>& nodes, uint64_t window_bytes,
             uint64_t least_bytes) {
            const py::gil_scoped_release release;
            layout.join(nodes, window_bytes, least_bytes);
          },
          py::arg("nodes"), py::arg("window_bytes"), py::arg("least_bytes"))
      .def(
          "stream",
          [](hf::ExportLayout& layout, const std::vector<uint32_t>& nodes, uint64_t window_bytes) {
            const py::gil_scoped_release release;
            layout.stream(nodes, window_bytes);
          },
          py::arg("nodes"), py::arg("window_bytes"))
      .def("messages", [](const hf::ExportLayout& layout, uint32_t rank) { return packed(layout.messages(rank)); })
      .def_property_readonly("rounds", &hf::ExportLayout::rounds)
      .def("joined_ranges",
           [](const hf::ExportLayout& layout, uint32_t rank) { return packed(layout.joined_ranges(rank)); })
      .def("joined_targets",
           [](const hf::ExportLayout& layout, uint32_t rank) { return packed(layout.joined_targets(rank)); })
      .def("heads", &heads)
      .def("index", [](const hf::ExportLayout& layout, const std::vector<std::string>& names) {
        return py::bytes(layout.index(names));
      });

  py::class_<write::SharedWriter>(module, "SharedWriter")
      .def(py::init([](std::vector<std::string> paths, const py::buffer& targets, const io::EngineOptions& options) {
             const Table table(targets);
             return std::make_unique<write::SharedWriter>(std::move(paths), table.values(), options);
           }),
           py::arg("paths"), py::arg("targets"), py::arg("options"))
      .def("write",
           [](write::SharedWriter& writer, const py::buffer& table, const py::buffer& rows) {
             const Table words(table), numbers(rows);
             const py::gil_scoped_release release;
             writer.write(words.values(), numbers.values());
           })
      .def(
          "join",
          [](write::SharedWriter& writer, const py::buffer& ranges, uint32_t number, uint64_t window_bytes,
             size_t first_target) {
            const Table table(ranges);
            const py::gil_scoped_release release;
            writer.join(table.values(), number, window_bytes, first_target);
          },
          py::arg("ranges"), py::arg("writer"), py::arg("window_bytes"), py::arg("first_target"))
      .def(
          "fill",
          [](const write::SharedWriter& writer, uint64_t round, const std::vector<uintptr_t>& windows) {
            const py::gil_scoped_release release;
            std::vector<std::byte*> addresses;
            for (const uintptr_t window : windows) addresses.push_back(reinterpret_cast<std::byte*>(window));
            writer.fill(round, addresses);
          },
          py::arg("round"), py::arg("windows"), "addresses of all writers' windows")
      .def(
          "send",
          [](write::SharedWriter& writer, uint64_t round, uintptr_t window) {
            const py::gil_scoped_release release;
            writer.send(round, reinterpret_cast<const std::byte*>(window));
          },
          py::arg("round"), py::arg("window"), "the address of this writer's window")
      .def("sum",
           [](write::SharedWriter& writer) {
             std::vector<uint32_t> blocks;
             {
               const py::gil_scoped_release release;
               blocks = writer.sum();
             }
             return packed(std::span<const uint32_t>(blocks));
           })
      .def(
          "sum_window",
          [](write::SharedWriter& writer, uint64_t round, uintptr_t window) {
            const py::gil_scoped_release release;
            writer.sum_window(round, reinterpret_cast<const std::byte*>(window));
          },
          py::arg("round"), py::arg("window"), "the address of this writer's window")
      .def("finish",
           [](write::SharedWriter& writer, bool sync) {
             std::span<const uint32_t> blocks;
             {
               const py::gil_scoped_release release;
               blocks = writer.finish(sync);
             }
             return packed(blocks);
           })
      .def("progress", &write::SharedWriter::progress, "bytes given to the files so far; from any thread")
      .def("cancel", &write::SharedWriter::cancel, "from any thread")
      .def("stats", [](const write::SharedWriter& writer) { return stats_dict(writer.stats()); });

  module.def(
      "stream_ranges",
      [](const py::buffer& file_bytes, uint32_t ranks, uint64_t window_bytes) {
        const Table table(file_bytes);
        const std::vector<uint64_t> bytes(table.values().begin(), table.values().end());
        return packed(hf::range_rows(hf::choose_stream_ranges(bytes, ranks, window_bytes)));
      },
      py::arg("file_bytes"), py::arg("ranks"), py::arg("window_bytes"), "as ExportLayout.stream chooses them");
  module.def(
      "export_targets",
      [](const py::bytes& inventory, const py::buffer& local_plan, const py::buffer& record_locations) {
        return packed(hf::make_export_targets(state::Inventory(view(inventory)), Table(local_plan).values(),
                                              Table(record_locations).values()));
      },
      py::arg("inventory"), py::arg("local_plan"), py::arg("record_locations"));
  module.def(
      "items_that_share_memory",
      [](const py::bytes& inventory, const py::buffer& sources, const py::buffer& tensors, const py::bytes& ready) {
        const state::Inventory items(view(inventory));
        const Table source_table(sources), tensor_table(tensors);
        return state::items_that_share_memory(
            state::StateTables(items, source_table.values(), tensor_table.values(), view(ready)));
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
