// A checkpoint's metadata, its index, and load plans made from it.
#include <algorithm>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "io/commit.h"
#include "metadata/catalog.h"
#include "metadata/index.h"
#include "metadata/index_image.h"
#include "metadata/key_paths.h"
#include "metadata/load_plan.h"
#include "metadata/metadata_pickle.h"
#include "metadata/record_locations.h"

namespace vescale_ckpt::bindings {
namespace {

std::byte* data(const py::bytes& bytes) {
  return reinterpret_cast<std::byte*>(PyBytes_AS_STRING(bytes.ptr()));
}

// Pages that nobody touched were never there: giving them back costs nothing.
py::bytes cut(py::bytes bytes, uint64_t size) {
  PyObject* raw = bytes.release().ptr();
  if (_PyBytes_Resize(&raw, static_cast<Py_ssize_t>(size)) != 0) throw py::error_already_set();
  return py::reinterpret_steal<py::bytes>(raw);
}

py::bytes pack_paths(const std::vector<py::str>& names, const std::vector<py::tuple>& paths) {
  if (names.size() != paths.size()) throw py::value_error("expected as many paths as names");
  metadata::KeyPathsBuilder builder;
  for (size_t i = 0; i < names.size(); ++i) {
    builder.name(utf8(names[i]), static_cast<uint32_t>(paths[i].size()));
    for (const py::handle element : paths[i]) {
      if (py::isinstance<py::str>(element)) {
        builder.text(utf8(element));
      } else {
        builder.number(element.cast<int64_t>());
      }
    }
  }
  return py::bytes(builder.pack());
}

std::pair<py::bytes, py::bytes> checkpoint_files(const metadata::Catalog& catalog,
                                                 const std::vector<py::bytes>& record_locations,
                                                 const std::vector<std::vector<std::string>>& files,
                                                 const std::vector<py::bytes>& paths, const py::str& checkpoint_id,
                                                 const py::str& save_id, const std::optional<py::str>& structure,
                                                 io::PendingFile* target) {
  const std::vector<Table> held(record_locations.begin(), record_locations.end());
  std::vector<std::span<const int64_t>> tables;
  for (const Table& table : held) tables.push_back(table.values());
  std::vector<std::span<const std::byte>> blocks;
  for (const py::bytes& block : paths) blocks.push_back(view(block));
  const std::string checkpoint = utf8(checkpoint_id), save = utf8(save_id);
  const std::string structure_text = structure ? utf8(*structure) : std::string();

  const auto of_ranks = without_gil([&] {
    metadata::RecordLocations locations(std::move(tables), files);
    locations.drop_unnamed(catalog);
    return std::make_pair(std::move(locations), metadata::KeyPaths(blocks));
  });
  metadata::MetadataContent content{catalog, of_ranks.first, of_ranks.second, checkpoint, save, {}};
  if (structure) content.structure = structure_text;
  py::bytes metadata(  // filled in later
      nullptr, target != nullptr ? metadata::MetadataTrailer::kBytes : metadata::most_metadata_bytes(content));
  const auto [pickle, image] = without_gil([&, out = data(metadata)] {
    auto of_index = std::async(std::launch::async, [&] { return metadata::IndexImage(catalog, of_ranks.first, save); });
    const auto written = metadata::write_metadata(content, std::max(1u, std::thread::hardware_concurrency()),
                                                  [&](uint64_t offset, std::span<const std::byte> bytes) {
                                                    target != nullptr ? target->write(offset, bytes)
                                                                      : void(std::ranges::copy(bytes, out + offset));
                                                  });
    if (target != nullptr) std::ranges::copy(written.trailer, out);
    return std::make_pair(written, of_index.get());
  });
  if (target == nullptr) metadata = cut(std::move(metadata), pickle.bytes);
  py::bytes index(nullptr, image.bytes());
  without_gil([&, &pickle = pickle, &image = image, out = data(index)] {
    image.write(out, pickle.pickle_bytes, pickle.pickle_crc);
  });
  return {std::move(metadata), std::move(index)};
}

std::unique_ptr<metadata::Index> from_rows(const py::bytes& inventory, const py::bytes& record_locations,
                                           const std::vector<std::string>& files, const std::string& save_id) {
  const auto rows = view(inventory);
  const Table table(record_locations);
  const py::gil_scoped_release release;
  return std::make_unique<metadata::Index>(
      metadata::index_of_rows(state::Inventory(rows), table.values(), files, save_id));
}

std::vector<py::str> keys(const metadata::Index& index) {
  std::vector<py::str> names;
  names.reserve(index.size());
  for (uint64_t i = 0; i < index.size(); ++i) names.push_back(named(index.key(i).name));
  return names;
}

std::vector<py::str> all_files(const metadata::Index& index) {
  std::vector<py::str> names;
  for (uint32_t i = 0; i < index.files(); ++i) names.push_back(named(index.file(i)));
  return names;
}

// (offsets, sizes, file, offset, length, CRC-32) of each chunk; an object has one.
py::list chunks(const metadata::Index& index, const metadata::Index::Key& key) {
  const size_t ndim = key.shape.size();
  py::list found;
  for (uint64_t chunk = 0; chunk < key.chunks; ++chunk) {
    const auto box = ndim == 0 ? std::span<const int64_t>{} : index.box(key, chunk);
    const metadata::RecordLocation at = index.location(key, chunk);
    found.append(
        py::make_tuple(numbers(box.first(ndim)), numbers(box.last(ndim)), at.file, at.offset, at.length, at.crc));
  }
  return found;
}

py::tuple row(const metadata::Index& index, uint64_t number) {
  if (number >= index.size()) throw py::index_error("the index has no such key");
  const metadata::Index::Key key = index.key(number);
  return py::make_tuple(named(key.name), named(key.dtype), numbers(key.shape), chunks(index, key));
}

// (names, dtype codes, 255: an object, shapes, inventory, sources)
py::tuple whole_items(const metadata::Index& index, const std::vector<uint64_t>& selected) {
  const metadata::WholeItems items = metadata::whole_items(index, selected);
  std::string codes;
  py::list names(items.keys.size()), shapes(items.keys.size());
  for (size_t row = 0; row < items.keys.size(); ++row) {
    const metadata::Index::Key& key = items.keys[row];
    names[row] = named(key.name);
    shapes[row] = numbers(key.shape);
    codes.push_back(static_cast<char>(key.dtype_code.value_or(UINT8_MAX)));
  }
  return py::make_tuple(names, py::bytes(codes), shapes, bytes_of(items.inventory), bytes_of(items.sources));
}

metadata::LoadPlan plan(const metadata::Index& index, const py::bytes& targets, bool allow_cast) {
  const auto rows = view(targets);
  const py::gil_scoped_release release;
  return metadata::plan_load(index, state::Inventory(rows), allow_cast);
}

std::vector<std::tuple<int64_t, std::string, py::str>> mismatched(const metadata::LoadPlan& plan) {
  std::vector<std::tuple<int64_t, std::string, py::str>> result;
  for (const metadata::LoadPlan::Mismatch& found : plan.mismatched) {
    result.emplace_back(found.item, found.expected, text(found.stored));
  }
  return result;
}

std::vector<py::str> files(const metadata::LoadPlan& plan) {
  std::vector<py::str> names;
  for (const std::string& file : plan.files) names.push_back(named(file));
  return names;
}

}  // namespace

void bind_index(py::module_& module) {
  module.def("pack_paths", &pack_paths, py::arg("names"), py::arg("paths"), "planner_data of one rank, packed");
  module.def(
      "checkpoint_files", &checkpoint_files, py::arg("catalog"), py::arg("record_locations"), py::arg("files"),
      py::arg("paths"), py::arg("checkpoint_id"), py::arg("save_id"), py::arg("structure") = std::nullopt,
      py::arg("target") = py::none(),
      "the contents of .metadata and of the index that lies beside it; with `target`, which is written to, only the "
      "last bytes of .metadata");

  py::class_<metadata::LoadPlan>(module, "LoadPlan")
      .def_property_readonly("reads", [](const metadata::LoadPlan& plan) { return bytes_of(plan.reads); })
      .def_property_readonly("objects", [](const metadata::LoadPlan& plan) { return bytes_of(plan.objects); })
      .def_property_readonly("files", &files)
      .def_readonly("missing", &metadata::LoadPlan::missing)
      .def_property_readonly("mismatched", &mismatched)
      .def_readonly("uncovered", &metadata::LoadPlan::uncovered);

  py::class_<metadata::Index>(module, "Index")
      .def_static(
          "from_bytes",
          [](const py::bytes& image, const std::string& path) {
            const auto raw = view(image);
            const py::gil_scoped_release release;
            return std::make_unique<metadata::Index>(std::vector<std::byte>(raw.begin(), raw.end()), path);
          },
          py::arg("image"), py::arg("path") = "", "of bytes that nobody has looked at; `path` is for messages")
      .def_static("from_rows", &from_rows, py::arg("inventory"), py::arg("record_locations"), py::arg("files"),
                  py::arg("save_id") = "")
      .def_property_readonly("save_id", [](const metadata::Index& index) { return named(index.save_id()); })
      .def(
          "matches",
          [](const metadata::Index& index, const py::bytes& trailer, uint64_t metadata_length) {
            return index.matches(view(trailer), metadata_length);
          },
          py::arg("trailer"), py::arg("metadata_length"))
      .def("__len__", &metadata::Index::size)
      .def("keys", &keys)
      .def("row", &row, py::arg("number"), "(name, dtype or empty for an object, shape, chunks) of a key")
      .def("whole_items", &whole_items, py::arg("selected"),
           "(names, dtype codes, 255: an object, shapes, inventory, sources) of the keys with these numbers, to load "
           "each as a whole; raises for a tensor that is larger than its records")
      .def("check_counts", &metadata::Index::check_counts, py::call_guard<py::gil_scoped_release>(),
           "raises if it lists more chunks than its metadata has room for; call it before `row`")
      .def_property_readonly("files", &all_files)
      .def("file_ends", &metadata::Index::file_ends, py::call_guard<py::gil_scoped_release>(),
           "of each file, where the last record that lies in it ends")
      .def("plan_load", &plan, py::arg("targets"), py::arg("allow_cast") = false);
}

}  // namespace vescale_ckpt::bindings
