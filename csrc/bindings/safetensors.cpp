// Safetensors files.
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/device_load.h"
#include "format/torch_record.h"
#include "hf/safetensors_file.h"
#include "hf/safetensors_layout.h"
#include "hf/safetensors_reads.h"
#include "state/tables.h"

namespace vescale_ckpt::bindings {
namespace {

hf::SafetensorsLayout make_file_layout(const std::vector<std::string>& names, const py::buffer& table,
                                       const hf::SafetensorsHeader::Metadata& metadata) {
  const Table words(table);
  const state::TensorTable rows(words.values());
  if (names.size() != rows.size()) throw Error::invalid("as many names as tensors are wanted");
  std::vector<hf::SafetensorsLayout::Tensor> tensors(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const state::LocalTensor row = rows[i];
    const auto dtype = row.dtype < 0
                           ? std::nullopt
                           : hf::safetensors_dtype_named(format::dtypes()[static_cast<size_t>(row.dtype)].name);
    if (!dtype) throw Error::invalid("safetensors has no such dtype", static_cast<int64_t>(i));
    tensors[i] = {names[i], *dtype, {row.shape.begin(), row.shape.end()}};
  }
  return {std::move(tensors), metadata};
}

py::dict write(write::FileWriter& writer, const hf::SafetensorsLayout& layout, const py::buffer& table, bool sync) {
  const Table words(table);
  const state::TensorTable rows(words.values());
  if (rows.size() != layout.order().size()) throw Error::invalid("other tensors than those that were laid out");
  std::vector<const std::byte*> data;
  for (size_t i = 0; i < rows.size(); ++i) {
    data.push_back(reinterpret_cast<const std::byte*>(static_cast<uintptr_t>(rows[i].address)));
  }
  {
    const py::gil_scoped_release release;
    hf::write_safetensors(writer, layout, data, sync);
  }
  return stats_dict(writer.stats());
}

py::object metadata_of(const hf::SafetensorsFile& file) {
  if (!file.header.metadata()) return py::none();
  py::dict result;
  for (const auto& [key, value] : *file.header.metadata()) result[py::str(key)] = py::str(value);
  return result;
}

// (name, dtype, torch's name for it or empty, shape as it stands in the header), in the order of their bytes.
py::list tensors_of(const hf::SafetensorsFile& file) {
  py::list result;
  for (const hf::SafetensorsHeader::Tensor& tensor : file.header.tensors()) {
    py::tuple shape(tensor.dims);
    for (size_t i = 0; i < tensor.dims; ++i) shape[i] = py::int_(file.header.shape(tensor)[i]);
    const hf::SafetensorsDType& dtype = file.header.dtype(tensor);
    result.append(py::make_tuple(py::str(tensor.name), py::str(dtype.name.data(), dtype.name.size()),
                                 py::str(dtype.torch.data(), dtype.torch.size()), shape));
  }
  return result;
}

const hf::SafetensorsHeader::Tensor& tensor_at(const hf::SafetensorsFile& file, size_t index) {
  if (index >= file.header.tensors().size()) throw py::index_error("no such tensor");
  return file.header.tensors()[index];
}

py::dict read(const hf::SafetensorsFile& file, const py::buffer& table, bool verify, const io::EngineOptions& options) {
  const Table words(table);
  std::unique_ptr<read::ReadReport> report;
  {
    const py::gil_scoped_release release;
    report = hf::read_safetensors(file, words.values(), verify, options);
  }
  return read_dict(*report);
}

using Paths = std::vector<std::string>;

}  // namespace

void bind_safetensors(py::module_& module) {
  py::class_<hf::SafetensorsLayout>(module, "SafetensorsLayout")
      .def(py::init(&make_file_layout), py::arg("names"), py::arg("table"), py::arg("metadata"))
      .def_property_readonly("file_bytes", &hf::SafetensorsLayout::file_bytes)
      .def_property_readonly("data_begin", &hf::SafetensorsLayout::data_begin)
      .def(
          "order",
          [](const hf::SafetensorsLayout& layout) { return std::vector(layout.order().begin(), layout.order().end()); },
          "numbers of the tensors as they lie in the file")
      .def(
          "head",
          [](const hf::SafetensorsLayout& layout, const std::vector<uint32_t>& blocks) {
            return py::bytes(layout.head(blocks));
          },
          py::arg("blocks"), "the first data_begin bytes of a file whose tensors have such checksums of blocks");

  py::class_<hf::SafetensorsFile, std::shared_ptr<hf::SafetensorsFile>>(module, "SafetensorsFile")
      .def_static(
          "open",
          [](const std::string& path, const io::EngineOptions& options, bool verify) {
            return std::const_pointer_cast<hf::SafetensorsFile>(hf::SafetensorsFile::open(path, options, verify));
          },
          py::arg("path"), py::arg("options"), py::arg("verify"), py::call_guard<py::gil_scoped_release>())
      .def("metadata", &metadata_of)
      .def("tensors", &tensors_of)
      .def("torch_shape",
           [](const hf::SafetensorsFile& file, size_t index) {
             return py::tuple(py::cast(file.header.torch_shape(tensor_at(file, index))));
           })
      .def(
          "range",
          [](const hf::SafetensorsFile& file, size_t index) {
            const hf::SafetensorsHeader::Tensor& tensor = tensor_at(file, index);
            return std::pair(tensor.begin, tensor.end - tensor.begin);
          },
          "offset in the file, and bytes")
      .def_readonly("head_crc", &hf::SafetensorsFile::head_crc);

  py::class_<hf::SafetensorsReads>(module, "SafetensorsReads")
      .def(py::init<bool, const io::EngineOptions&>(), py::arg("verify"), py::arg("options"))
      .def(
          "read_tensors",
          [](hf::SafetensorsReads& reads, const Paths& paths, const py::buffer& table, const py::buffer& device_buffer,
             const Producers& producers) {
            const Table words(table), devices(device_buffer);
            std::unique_ptr<read::ReadReport> report;
            {
              const py::gil_scoped_release release;
              const auto to_devices = device_load(devices.values(), producers);
              report = reads.read(paths, words.values(), devices.values(), to_devices.get());
              if (to_devices) to_devices->finish();
            }
            return read_dict(*report);
          },
          py::arg("paths"), py::arg("table"), py::arg("devices") = py::bytes(), py::arg("producers") = Producers())
      .def(
          "check_tensors",
          [](hf::SafetensorsReads& reads, const Paths& paths, const py::buffer& table) {
            const Table words(table);
            std::unique_ptr<read::ReadReport> report;
            {
              const py::gil_scoped_release release;
              report = reads.check(paths, words.values());
            }
            return check_tuple(*report);
          },
          py::arg("paths"), py::arg("table"));

  module.attr("SAFETENSORS_CHECKSUMS") = py::str(hf::kSafetensorsChecksums.data(), hf::kSafetensorsChecksums.size());
  module.def(
      "safetensors_dtypes",
      [] {
        std::vector<std::string> names;
        for (const hf::SafetensorsDType& dtype : hf::safetensors_dtypes()) {
          if (!dtype.torch.empty()) names.emplace_back(dtype.torch);
        }
        return names;
      },
      "torch's names of all dtypes that a safetensors file can hold");

  module.def("write_safetensors", &write, py::arg("writer"), py::arg("layout"), py::arg("table"), py::arg("sync"));
  module.def("read_safetensors", &read, py::arg("file"), py::arg("table"), py::arg("verify"), py::arg("options"));
}

}  // namespace vescale_ckpt::bindings
