// Safetensors files.
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/tensor_reader.h"
#include "format/torch_record.h"
#include "hf/dequantize.h"
#include "hf/safetensors_file.h"
#include "hf/safetensors_layout.h"
#include "state/tables.h"

namespace vescale_ckpt::bindings {
namespace {

hf::SafetensorsLayout make_file_layout(const std::vector<std::string>& names, const py::buffer& table,
                                       const hf::SafetensorsHeader::Metadata& metadata) {
  const Table words(table);
  const state::TensorTable rows(words.values());
  if (names.size() != rows.size())
    throw Error::invalid("expected names of " + std::to_string(rows.size()) + " tensors, got " +
                         std::to_string(names.size()));
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

// (names, dtype codes, inventory, record locations), or None: the caller then goes through the headers name by name.
py::object header_rows(const std::vector<std::shared_ptr<hf::SafetensorsFile>>& files,
                       const std::optional<std::vector<std::vector<std::string>>>& keys) {
  const auto rows = hf::header_rows(files, keys);
  if (!rows) return py::none();
  return py::make_tuple(rows->names, py::bytes(rows->dtypes), bytes_of(rows->inventory), bytes_of(rows->locations));
}

template <typename Pointer>
Pointer* at_address(uint64_t address) {
  return reinterpret_cast<Pointer*>(static_cast<uintptr_t>(address));
}

hf::ValueType value_type(const std::string& dtype) {
  if (dtype == "float32") return hf::ValueType::float32;
  if (dtype == "bfloat16") return hf::ValueType::bfloat16;
  throw Error::invalid("no values of " + dtype + " are made of quantised numbers");
}

void dequantize_float8(const std::array<uint64_t, 7>& box, uint64_t numbers, uint64_t scales, const std::string& dtype,
                       uint64_t values, unsigned threads) {
  const auto [matrices, rows, columns, first_row, first_column, block_rows, block_columns] = box;
  hf::dequantize_float8({matrices, rows, columns, first_row, first_column, block_rows, block_columns},
                        at_address<const uint8_t>(numbers), at_address<const float>(scales), value_type(dtype),
                        at_address<std::byte>(values), threads);
}

void dequantize_mxfp4(uint64_t groups, uint64_t numbers, uint64_t exponents, const std::string& dtype, uint64_t values,
                      unsigned threads) {
  hf::dequantize_mxfp4(groups, at_address<const uint8_t>(numbers), at_address<const uint8_t>(exponents),
                       value_type(dtype), at_address<std::byte>(values), threads);
}

}  // namespace

void bind_safetensors(py::module_& module) {
  module.def("dequantize_float8", &dequantize_float8, py::arg("box"), py::arg("numbers"), py::arg("scales"),
             py::arg("dtype"), py::arg("values"), py::arg("threads"), py::call_guard<py::gil_scoped_release>(),
             "float8_e4m3fn times scales of blocks. box: the fields of hf::ScaledBox");
  module.def("dequantize_mxfp4", &dequantize_mxfp4, py::arg("groups"), py::arg("numbers"), py::arg("exponents"),
             py::arg("dtype"), py::arg("values"), py::arg("threads"), py::call_guard<py::gil_scoped_release>());
  py::class_<hf::SafetensorsLayout>(module, "SafetensorsLayout")
      .def(py::init(&make_file_layout), py::arg("names"), py::arg("table"), py::arg("metadata"))
      .def_property_readonly("file_bytes", &hf::SafetensorsLayout::file_bytes)
      .def_property_readonly("data_begin", &hf::SafetensorsLayout::data_begin)
      .def(
          "order",
          [](const hf::SafetensorsLayout& layout) { return std::vector(layout.order().begin(), layout.order().end()); },
          "numbers of the tensors as they lie in the file")
      .def(
          "sizes",
          [](const hf::SafetensorsLayout& layout) { return std::vector(layout.bytes().begin(), layout.bytes().end()); },
          "their bytes, in that order")
      .def(
          "head",
          [](const hf::SafetensorsLayout& layout, const std::vector<uint32_t>& blocks) {
            return py::bytes(layout.head(blocks));
          },
          py::arg("blocks"), "the first data_begin bytes of a file whose tensors have such checksums of blocks");

  py::class_<hf::SafetensorsFile, std::shared_ptr<hf::SafetensorsFile>>(module, "SafetensorsFile")
      .def_static("open", &hf::SafetensorsFile::open, py::arg("path"), py::arg("options"), py::arg("verify"),
                  py::call_guard<py::gil_scoped_release>())
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
      .def_property_readonly("count", [](const hf::SafetensorsFile& file) { return file.header.tensors().size(); })
      .def_readonly("head_crc", &hf::SafetensorsFile::head_crc);

  module.def("header_rows", &header_rows, py::arg("files"), py::arg("keys") = std::nullopt);

  py::class_<hf::SafetensorsReads>(module, "SafetensorsReads")
      .def(py::init<bool, const io::EngineOptions&>(), py::arg("verify"), py::arg("options"))
      .def(py::init<std::shared_ptr<hf::SafetensorsFile>, bool, const io::EngineOptions&>(), py::arg("file"),
           py::arg("verify"), py::arg("options"), "reads this file under its path, whatever has that name by now")
      .def(
          "read_tensors",
          [](hf::SafetensorsReads& reads, const std::vector<std::string>& paths, const py::buffer& table,
             const py::buffer& device_buffer, const Producers& producers) {
            const Table words(table), devices(device_buffer);
            return read_to_devices(devices, producers, [&](read::DeviceSink* sink) {
              return reads.read(paths, words.values(), devices.values(), sink);
            });
          },
          py::arg("paths"), py::arg("table"), py::arg("devices") = py::bytes(), py::arg("producers") = Producers())
      .def(
          "check_tensors",
          [](hf::SafetensorsReads& reads, const std::vector<std::string>& paths, const py::buffer& table) {
            const Table words(table);
            return check_tuple(*without_gil([&] { return reads.check(paths, words.values()); }));
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
}

}  // namespace vescale_ckpt::bindings
