// The engine: files, records, commits.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/crc32.h"
#include "base/error.h"
#include "bindings/bindings.h"
#include "format/pickle_check.h"
#include "format/torch_record.h"
#include "io/commit.h"
#include "io/transfer.h"
#include "read/archive_file.h"
#include "read/read_plan.h"
#include "read/reader.h"
#include "write/location_table.h"
#include "write/writer.h"

namespace vescale_ckpt::bindings {
namespace {

io::EngineOptions make_options(unsigned threads, uint64_t slot_bytes, uint64_t arena_bytes, const std::string& access,
                               uint64_t bytes_per_second, int niceness, uint64_t read_gap) {
  io::EngineOptions options{threads, slot_bytes, arena_bytes};
  options.read_cached = access != "direct only";
  options.bytes_per_second = bytes_per_second;
  options.niceness = niceness;
  if (read_gap != 0) options.read_gap = read_gap;
  if (access == "buffered") options.widest = io::Access::buffered;
  return options;
}

}  // namespace

py::dict stats_dict(const io::TransferStats& stats) {
  py::dict result;
  result["in_place_bytes"] = stats.in_place.load();
  result["slot_bytes"] = stats.slots.load();
  for (const io::Access access : {io::Access::direct, io::Access::buffered}) {
    result[(std::string(io::access_name(access)) + "_bytes").c_str()] =
        stats.by_access[static_cast<size_t>(access)].load();
  }
  return result;
}

py::dict read_dict(const read::ReadReport& report) {
  py::dict result = stats_dict(report.stats);
  result["unread"] = report.unread;
  result["needed_bytes"] = report.needed_bytes;
  result["unverified_bytes"] = report.unverified_bytes;
  return result;
}

py::tuple check_tuple(const read::ReadReport& report) {
  py::list damaged;
  for (const read::DamagedItem& found : report.damaged) {
    damaged.append(py::make_tuple(found.item, found.offset, text(found.reason), found.code));
  }
  return py::make_tuple(damaged, report.unread, report.unverified_bytes);
}

namespace {

using Rows = std::vector<size_t>;  // of a rank's plan

void write_tensors(write::FileWriter& writer, const py::buffer& buffer, write::LocationTable& locations,
                   const Rows& rows, uint64_t first_file) {
  const Table table(buffer);
  const py::gil_scoped_release release;
  locations.add(writer, writer.write(write::parse_write_table(table.values())), rows, first_file);
}

py::bytes sample_hashes(const py::buffer& table, const py::buffer& devices, uint32_t elements) {
  return bytes_of(write::sample_hashes(Table(table).values(), Table(devices).values(), elements));
}

py::bytes body_bytes(const py::buffer& buffer) {
  return bytes_of(write::body_bytes(Table(buffer).values()));
}

void write_objects(write::FileWriter& writer, const std::vector<py::bytes>& objects, write::LocationTable& locations,
                   const Rows& rows, uint64_t first_file) {
  std::vector<write::RecordSource> sources(objects.size());
  for (size_t i = 0; i < objects.size(); ++i) {
    const auto bytes = view(objects[i]);
    sources[i].data = bytes.data();
    sources[i].bytes = bytes.size();
  }
  const py::gil_scoped_release release;
  locations.add(writer, writer.write(sources), rows, first_file);
}

py::dict read_from_files(const std::vector<std::string>& paths, const py::buffer& buffer, bool verify,
                         const io::EngineOptions& options, const py::buffer& device_buffer,
                         const Producers& producers) {
  const Table table(buffer), devices(device_buffer);
  return read_to_devices(devices, producers, [&](read::DeviceSink* sink) {
    return read::read_tensors(paths, read::parse_read_table(table.values(), devices.values()), verify, options, sink);
  });
}

py::tuple check_table(const std::vector<std::string>& paths, const py::buffer& buffer,
                      const io::EngineOptions& options) {
  const Table table(buffer);
  return check_tuple(
      *without_gil([&] { return read::check_tensors(paths, read::parse_check_table(table.values()), options); }));
}

py::tuple check_archive_at(const std::string& path, uint64_t offset, uint64_t length, int64_t crc) {
  const auto found = without_gil(
      [&] { return read::check_archive_in(*io::File::open(path, io::Access::buffered), offset, length, crc); });
  return py::make_tuple(text(found.wrong), found.offset, found.unverified_bytes, text(found.harmless));
}

// Record offset and CRC-32 of the body by row, or None if the file ends in no sound table; where that begins.
py::tuple checksum_table(const std::string& path) {
  uint64_t offset = 0;
  const auto table =
      without_gil([&] { return read::load_checksum_table(*io::File::open(path, io::Access::buffered), offset); });
  if (!table) return py::make_tuple(py::none(), offset);
  py::list rows;
  for (const format::ChecksumTable::Row& row : table->rows()) rows.append(py::make_tuple(row.record_offset, row.crc));
  return py::make_tuple(std::move(rows), offset);
}

std::vector<std::tuple<std::string, std::string, uint32_t>> dtype_table() {
  std::vector<std::tuple<std::string, std::string, uint32_t>> table;
  for (const format::DType& dtype : format::dtypes()) table.emplace_back(dtype.name, dtype.storage, dtype.item_bytes);
  return table;
}

Call named_call(const std::string& name) {
  const auto call = system::call_named(name);
  if (!call) throw py::value_error("unknown system call \"" + name + "\"");
  return *call;
}

using Writer = std::unique_ptr<write::FileWriter, DeleteWithoutGil>;

}  // namespace

void bind_engine(py::module_& module) {
  py::class_<io::EngineOptions>(module, "Options")
      .def(py::init(&make_options), py::kw_only(), py::arg("threads"), py::arg("slot_bytes"), py::arg("arena_bytes"),
           py::arg("access"), py::arg("bytes_per_second") = 0, py::arg("niceness") = 0, py::arg("read_gap") = 0);

  py::class_<write::LocationTable>(module, "LocationTable")
      .def(py::init<>())
      .def(
          "in_used_files",
          [](const write::LocationTable& locations) {
            const auto [rows, files] = locations.in_used_files();
            return py::make_tuple(bytes_of(rows), files);
          },
          "rows: file, offset, length, CRC-32 (-1: none), with the files that hold any numbered anew; their numbers");
  py::class_<write::FileWriter, Writer>(module, "FileWriter")
      .def(py::init([](const std::string& path, uint64_t expected_bytes, const io::EngineOptions& options,
                       bool checksums, uint32_t most_files) {
             return Writer(new write::FileWriter(path, expected_bytes, options, checksums, most_files));
           }),
           py::arg("path"), py::arg("expected_bytes"), py::arg("options"), py::arg("checksums") = true,
           py::arg("most_files") = 1, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("wanted_files", &write::FileWriter::wanted_files)
      .def("add_file", &write::FileWriter::add_file, py::arg("path"), py::call_guard<py::gil_scoped_release>())
      .def("write_tensors", &write_tensors, py::arg("table"), py::arg("locations"), py::arg("rows"),
           py::arg("first_file") = 0)
      .def("write_objects", &write_objects, py::arg("objects"), py::arg("locations"), py::arg("rows"),
           py::arg("first_file") = 0)
      .def(
          "write_bytes",
          [](write::FileWriter& writer, const py::buffer& buffer, uint64_t offset) {
            const Table table(buffer);
            return without_gil([&] { return writer.write_dense(write::parse_dense_table(table.values()), offset); });
          },
          py::arg("table"), py::arg("offset"),
          "rows: address, bytes. Writes them one behind another from `offset` on, where the call before ended; returns "
          "the checksums of their blocks; ends with finish_bytes")
      .def(
          "finish_bytes",
          [](write::FileWriter& writer, const py::bytes& head, bool sync) {
            const std::span<const std::byte> bytes = view(head);
            const py::gil_scoped_release release;
            return writer.finish_dense(bytes, sync);
          },
          py::arg("head"), py::arg("sync"), "`head`: what the file begins with, over what was written there")
      .def("finish", &write::FileWriter::finish, py::arg("sync"), py::call_guard<py::gil_scoped_release>())
      .def("progress", &write::FileWriter::progress, "bytes given to the file so far; from any thread")
      .def("cancel", &write::FileWriter::cancel, "from any thread")
      .def("stats", [](const write::FileWriter& writer) { return stats_dict(writer.stats()); });

  module.def("sample_hashes", &sample_hashes, py::arg("table"), py::arg("devices"), py::arg("elements"),
             "a hash of a few elements of each tensor of a table to write");
  module.def("body_bytes", &body_bytes, "bytes of each tensor of a table to write");
  module.def(
      "expected_bytes", [](const py::buffer& bodies) { return write::FileWriter::space_for(Table(bodies).values()); },
      "upper bound of the length of a file that holds records of such sizes");
  module.def("read_tensors", &read_from_files, py::arg("paths"), py::arg("table"), py::arg("verify"),
             py::arg("options"), py::arg("devices") = py::bytes(), py::arg("producers") = Producers());
  module.def("check_tensors", &check_table, py::arg("paths"), py::arg("table"), py::arg("options"),
             "(row, offset, what is wrong) of damaged rows; rows that are no plain tensors; unverified bytes");
  module.def("check_archive_at", &check_archive_at, py::arg("path"), py::arg("offset"), py::arg("length"),
             py::arg("crc"),
             "what is wrong with an archive in a file, empty if nothing; where; unverified bytes; harmless damage");
  module.def("checksum_table", &checksum_table, py::arg("path"),
             "(record offset, checksum) of the table that a data file ends in, None without a sound one; its offset");
  module.def("dtypes", &dtype_table, "(name, storage class or empty, bytes of an element) by dtype code");

  module.def("object_record",
             [](const py::bytes& pickle) { return py::bytes(format::object_record(std::string_view(pickle))); });
  module.def("check_archive", [](const py::bytes& archive, bool checksums) {
    return text(format::check_archive(view(archive), checksums));
  });
  module.def(
      "check_pickle",
      [](const py::bytes& pickle, bool storages) {
        size_t end = 0;
        std::string wrong = format::check_pickle(view(pickle), storages, &end);
        return std::pair(std::move(wrong), end);
      },
      py::arg("pickle"), py::arg("storages") = false,
      "what is wrong with a pickle, empty if nothing, and where it ends");
  module.def("archive_has_checksums", [](const py::bytes& archive) { return format::has_checksums(view(archive)); });
  module.def("archive_pickle", [](const py::bytes& archive) -> py::object {
    const auto body = format::find_pickle(view(archive));
    if (!body) return py::none();
    return py::bytes(reinterpret_cast<const char*>(body->data()), body->size());
  });

  module.def(
      "commit_file",
      [](const std::string& directory, const std::string& name, const py::bytes& bytes, bool replace) {
        const auto content = view(bytes);
        const py::gil_scoped_release release;
        io::commit_file(directory, name, content, replace);
      },
      py::arg("directory"), py::arg("name"), py::arg("content"), py::arg("replace") = true);
  py::class_<io::PendingFile>(module, "PendingFile")
      .def(py::init<const std::string&, const std::string&>(), py::arg("directory"), py::arg("name"),
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("size", &io::PendingFile::size)
      .def("check", &io::PendingFile::check, py::call_guard<py::gil_scoped_release>())
      .def("commit", &io::PendingFile::commit, py::arg("replace") = true, py::call_guard<py::gil_scoped_release>())
      .def("discard", &io::PendingFile::discard, py::call_guard<py::gil_scoped_release>());
  module.def("process_space", &io::process_space);
  module.def("set_exit_status", &system::set_exit_status);
  module.def(
      "move_into_place",
      [](const std::string& temporary, const std::string& directory, const std::string& path) {
        io::move_into_place(temporary, directory, path);
      },
      py::arg("temporary"), py::arg("directory"), py::arg("path"), py::call_guard<py::gil_scoped_release>());
  module.def("rename_file", &io::rename_file, py::call_guard<py::gil_scoped_release>());
  module.def("rename_if_free", &io::rename_if_free, py::call_guard<py::gil_scoped_release>());
  module.def("link_file", &io::link_file, py::call_guard<py::gil_scoped_release>());
  module.def("remove_file", &io::remove_file, py::call_guard<py::gil_scoped_release>());
  module.def("exchange_names", &io::exchange_names, py::call_guard<py::gil_scoped_release>());
  module.def("sync_directory", &io::sync_directory, py::call_guard<py::gil_scoped_release>());
  module.def(
      "free_bytes",
      [](const std::string& path) {
        std::optional<uint64_t> bytes;
        if (const int result = system::free_bytes(path.c_str(), bytes); result < 0) {
          throw Error::system("ask for the free space of", path, 0, -result);
        }
        return bytes;
      },
      py::call_guard<py::gil_scoped_release>());

  module.def(
      "crc32",
      [](const py::bytes& bytes, size_t most) {
        const auto all = view(bytes);
        const auto first = all.first(std::min(most, all.size()));
        const py::gil_scoped_release release;
        return crc32(0, first.data(), first.size());
      },
      py::arg("data"), py::arg("most") = SIZE_MAX, "of the first bytes, `most` of them");

  // For tests: let system calls fail.
  module.def("bytes_read", &io::bytes_read);
  module.def(
      "inject_fault",
      [](const std::string& call, int error, uint64_t skip, uint64_t times) {
        system::inject_fault(named_call(call), error, skip, times);
      },
      py::arg("call"), py::arg("error"), py::arg("skip") = 0, py::arg("times") = 1);
  module.def("clear_faults", &system::clear_faults);
  module.def("calls_seen", [](const std::string& call) { return system::calls_seen(named_call(call)); });
}

}  // namespace vescale_ckpt::bindings
