// The module `_C` and its one exception.
#include <exception>
#include <string>

#include "base/error.h"
#include "bindings/bindings.h"

namespace vescale_ckpt::bindings {
namespace {

void set_error(const py::handle& type, const Error& error) {
  constexpr const char* kKinds[] = {"io", "full", "corrupt", "invalid", "cancelled", "device"};
  const py::object exception = type(text(error.what()));
  exception.attr("kind") = kKinds[static_cast<size_t>(error.kind)];
  exception.attr("path") = text(error.path);
  exception.attr("offset") = error.offset;
  exception.attr("errno") = error.code;
  exception.attr("item") = error.item == Error::kNoItem ? py::object(py::none()) : py::int_(error.item);
  PyErr_SetObject(type.ptr(), exception.ptr());
}

}  // namespace
}  // namespace vescale_ckpt::bindings

PYBIND11_MODULE(_C, module) {
  using namespace vescale_ckpt;
  using namespace vescale_ckpt::bindings;
  module.doc() = "The engine of vescale_ckpt. Private: use the package.";

  static py::exception<Error> engine_error(module, "EngineError", PyExc_RuntimeError);
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      set_error(engine_error, error);
    }
  });

  bind_bytes(module);
  bind_engine(module);
  bind_export(module);
  bind_index(module);
  bind_inventory(module);
  bind_plan(module);
  bind_remote(module);
  bind_routes(module);
  bind_safetensors(module);
  bind_stage(module);
  bind_state_form(module);
  bind_tensors(module);
  bind_tensor_facts(module);
}
