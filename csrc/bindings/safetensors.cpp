// Safetensors files.
#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/dlpack.h"
#include "bindings/tensor_reader.h"
#include "format/torch_record.h"
#include "hf/dequantize.h"
#include "hf/safetensors_file.h"
#include "hf/safetensors_layout.h"
#include "hf/safetensors_load.h"
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

dlpack::DataType data_type(std::string_view torch_name) {
  if (torch_name == "int8") return {dlpack::kInt, 8, 1};
  if (torch_name == "uint8") return {dlpack::kUInt, 8, 1};
  const auto known = std::ranges::find(kDTypeNames, torch_name, &DTypeName::name);
  if (known == kDTypeNames.end()) throw Error::invalid("DLPack has no " + std::string(torch_name));
  return known->type;
}

// A contiguous tensor for whoever takes it over: its memory is held until that one lets it go.
struct LentTensor {
  dlpack::ManagedTensor managed{};
  std::shared_ptr<std::byte> data;
  std::vector<int64_t> shape, strides;

  explicit LentTensor(const hf::SafetensorsLoad::Tensor& loaded)
      : data(loaded.data), shape(loaded.shape), strides(format::contiguous_strides(shape)) {
    managed.tensor = {data.get(),   dlpack::kCpu,   0, static_cast<int32_t>(shape.size()), data_type(loaded.dtype),
                      shape.data(), strides.data(), 0};
    managed.context = this;
    managed.deleter = [](dlpack::ManagedTensor* given) { delete static_cast<LentTensor*>(given->context); };
  }
};

py::object capsule_of(const hf::SafetensorsLoad::Tensor& loaded) {
  auto lent = std::make_unique<LentTensor>(loaded);
  PyObject* capsule = PyCapsule_New(&lent->managed, dlpack::kTensorCapsule, [](PyObject* left) {
    if (!PyCapsule_IsValid(left, dlpack::kTensorCapsule)) return;  // it was taken over
    auto* managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(left, dlpack::kTensorCapsule));
    managed->deleter(managed);
  });
  if (capsule == nullptr) throw py::error_already_set();
  static_cast<void>(lent.release());
  return py::reinterpret_steal<py::object>(capsule);
}

// Calls `empty(shape, dtype's name)`, which makes a tensor without values.
py::object made(const py::function& empty, const hf::SafetensorsLoad::Tensor& tensor) {
  return empty(tensor.shape, text(std::string(tensor.dtype)));
}

// A load, and what one to an accelerator writes into and copies with.
class Load {
 public:
  // `empty` makes memory. `device`: a CUDA device, whose current stream for this thread is `stream`; -1: host memory.
  Load(std::shared_ptr<const hf::SafetensorsFile> file, const std::vector<size_t>& numbers, bool verify,
       const io::EngineOptions& options, py::function empty, int device, device::StreamHandle stream)
      : empty_(std::move(empty)) {
    for (const size_t number : numbers) tensor_at(*file, number);
    if (device < 0) {
      const py::gil_scoped_release release;
      load_.emplace(std::move(file), numbers, verify, options);
      return;
    }
    const auto take = [this](const hf::SafetensorsLoad::Tensor* alone, uint64_t bytes) {
      blocks_.append(alone != nullptr ? made(empty_, *alone) : empty_(std::vector{bytes}, "uint8"));
      return reinterpret_cast<std::byte*>(blocks_[blocks_.size() - 1].attr("data_ptr")().cast<uintptr_t>());
    };
    const auto sink = [&]() -> read::DeviceSink* {
      const py::gil_scoped_release release;
      const int64_t devices = device;
      const stage::Producer producer{device, stream};
      to_device_ = stage::device_load({&devices, 1}, {&producer, 1});
      return to_device_.get();
    };
    const hf::SafetensorsLoad::OnDevice target{device, take, sink};
    load_.emplace(std::move(file), numbers, verify, options, &target);
  }

  // Returns when nothing is read and no block is written any more: not before may their memory be used for other
  // things.
  ~Load() {
    const py::gil_scoped_release release;
    load_.reset();
    to_device_.reset();
  }
  Load(const Load&) = delete;
  Load& operator=(const Load&) = delete;

  py::list tensors(const py::function& from_dlpack, const py::function& part) const {
    py::list tensors(load_->tensors().size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      const hf::SafetensorsLoad::Tensor& loaded = load_->tensors()[i];
      if (loaded.data == nullptr) {
        tensors[i] = made(empty_, loaded);
      } else if (blocks_.empty()) {  // in host memory
        tensors[i] = from_dlpack(capsule_of(loaded));
      } else if (loaded.alone) {
        tensors[i] = blocks_[loaded.block];
      } else {
        const uint64_t end = loaded.offset + loaded.bytes;
        tensors[i] = part(blocks_[loaded.block], loaded.offset, end, loaded.shape, text(std::string(loaded.dtype)));
      }
    }
    return tensors;
  }

  py::dict finish() {
    return read_dict(*without_gil([&] {
      auto report = load_->finish();
      if (to_device_) to_device_->finish();
      return report;
    }));
  }

 private:
  py::function empty_;
  py::list blocks_;
  std::unique_ptr<stage::DeviceLoad> to_device_;
  std::optional<hf::SafetensorsLoad> load_;
};

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

  py::class_<Load>(module, "SafetensorsLoad")
      .def(py::init<std::shared_ptr<hf::SafetensorsFile>, const std::vector<size_t>&, bool, const io::EngineOptions&,
                    py::function, int, device::StreamHandle>(),
           py::arg("file"), py::arg("numbers"), py::arg("verify"), py::arg("options"), py::arg("empty"),
           py::arg("device") = -1, py::arg("stream") = device::StreamHandle(),
           "into host memory, or into blocks made by empty(shape, dtype's name) on a CUDA device")
      .def("tensors", &Load::tensors, py::arg("from_dlpack"), py::arg("part"),
           "in host memory made by from_dlpack(capsule); on a device blocks, or parts of blocks, made by part(block, "
           "begin and end in bytes, shape, dtype's name); without bytes, by `empty`")
      .def("finish", &Load::finish);

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
