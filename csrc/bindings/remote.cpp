// Remote files: Python reads and writes them for the engine.
//
// The engine's threads call Python, so they take the GIL; whoever called the engine has released it.
#include <cerrno>
#include <memory>
#include <string>
#include <utility>

#include "base/error.h"
#include "bindings/bindings.h"
#include "io/remote.h"

namespace vescale_ckpt::bindings {
namespace {

using Part = io::PartWindow::Part;

// Of what Python raised; the GIL is held. Its `errno` and `is_damage` say what it was, if it has them.
Error error_of(const char* operation, const std::string& path, uint64_t offset, const py::error_already_set& raised) {
  const py::object& value = raised.value();
  const std::string text = std::string(operation) + " " + path + ": " + std::string(py::str(value));
  if (py::getattr(value, "is_damage", py::bool_(false)).cast<bool>()) return Error::corrupt(text, path, offset);
  const py::object number = py::getattr(value, "errno", py::none());
  const int code = number.is_none() ? EIO : number.cast<int>();
  return Error(Error::Kind::io, text, path, offset, code);
}

class PythonObject : public io::RemoteObject {
 public:
  PythonObject(std::string path, py::object object)
      : path_(std::move(path)), object_(std::move(object)), size_(object_.attr("size").cast<uint64_t>()) {}
  ~PythonObject() override {
    const py::gil_scoped_acquire acquire;
    object_.release().dec_ref();
  }
  PythonObject(const PythonObject&) = delete;
  PythonObject& operator=(const PythonObject&) = delete;

  uint64_t size() const override { return size_; }

  std::shared_ptr<const std::byte> fetch(uint64_t offset, uint64_t bytes) override {
    const py::gil_scoped_acquire acquire;
    try {
      const py::buffer found = object_.attr("read")(offset, bytes);
      auto info = std::make_unique<py::buffer_info>(found.request());  // keeps the bytes
      const auto came = static_cast<uint64_t>(info->size * info->itemsize);
      if (came != bytes) {
        throw Error::corrupt("read " + path_ + " at offset " + std::to_string(offset) + ": " + std::to_string(bytes) +
                                 " bytes were asked for, " + std::to_string(came) + " came",
                             path_, offset);
      }
      const auto* begin = static_cast<const std::byte*>(info->ptr);
      return {begin, [held = info.release()](const std::byte*) {
                const py::gil_scoped_acquire acquire;
                delete held;
              }};
    } catch (const py::error_already_set& raised) {
      throw error_of("read", path_, offset, raised);
    }
  }

 private:
  const std::string path_;
  py::object object_;
  const uint64_t size_;
};

// `open(path)` returns an object with `size` and `read(offset, bytes)`; `upload(window)` returns at once;
// `most_part_bytes(path)` returns a number.
void set_remote_store(const py::object& open, const py::object& upload, const py::object& most_part_bytes) {
  // Never destroyed: the interpreter may be gone when the process ends.
  const py::handle opens = py::object(open).release(), uploads = py::object(upload).release();
  const py::handle most = py::object(most_part_bytes).release();
  io::RemoteStore store;
  store.open = [opens](const std::string& path) -> std::unique_ptr<io::RemoteObject> {
    const py::gil_scoped_acquire acquire;
    try {
      return std::make_unique<PythonObject>(path, opens(text(path)));
    } catch (const py::error_already_set& raised) {
      throw error_of("open", path, 0, raised);
    }
  };
  store.upload = [uploads](std::shared_ptr<io::PartWindow> window) {
    const std::string path = window->path();
    const py::gil_scoped_acquire acquire;
    try {
      uploads(std::move(window));
    } catch (const py::error_already_set& raised) {
      throw error_of("write", path, 0, raised);
    }
  };
  store.most_part_bytes = [most](const std::string& path) {
    const py::gil_scoped_acquire acquire;
    try {
      return most(text(path)).cast<uint64_t>();
    } catch (const py::error_already_set& raised) {
      throw error_of("write", path, 0, raised);
    }
  };
  io::set_remote_store(std::move(store));
}

}  // namespace

void bind_remote(py::module_& module) {
  py::class_<Part, std::shared_ptr<Part>>(module, "Part", py::buffer_protocol())
      .def_buffer([](const Part& part) {
        return py::buffer_info(reinterpret_cast<unsigned char*>(part.bytes().data()),
                               static_cast<py::ssize_t>(part.bytes().size()));
      })
      .def("__len__", [](const Part& part) { return part.bytes().size(); });
  py::class_<io::PartWindow, std::shared_ptr<io::PartWindow>>(module, "PartWindow")
      .def_property_readonly("path", [](const io::PartWindow& window) { return text(window.path()); })
      .def_property_readonly("part_bytes", &io::PartWindow::part_bytes)
      .def("next", &io::PartWindow::next, py::call_guard<py::gil_scoped_release>(),
           "waits for the next part; None after the last")
      .def("uploaded", &io::PartWindow::uploaded, py::call_guard<py::gil_scoped_release>())
      .def(
          "fail",
          [](io::PartWindow& window, const std::string& what, int code) {
            const py::gil_scoped_release release;
            window.fail(Error(Error::Kind::io, what, window.path(), 0, code));
          },
          py::arg("what"), py::arg("errno"));
  module.def("set_remote_store", &set_remote_store, py::arg("open"), py::arg("upload"), py::arg("most_part_bytes"),
             "how objects of paths with a scheme are read and written");
}

}  // namespace vescale_ckpt::bindings
