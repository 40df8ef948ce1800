// Packed lists of items, for those who look into them.
#include <array>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "state/inventory.h"

namespace vescale_ckpt::bindings {
namespace {

py::list items(const py::object& packed) {
  const state::Inventory inventory(inventory_view(packed));
  py::list result(inventory.size());
  for (size_t i = 0; i < inventory.size(); ++i) {
    const state::Item item = inventory[i];
    result[i] = py::make_tuple(named(item.name), static_cast<int>(item.kind), static_cast<int>(item.dtype),
                               (item.flags & state::kRequiresGrad) != 0, item.bytes, numbers(item.shape),
                               numbers(item.offset), numbers(item.size));
  }
  return result;
}

py::list objects(const py::object& packed) {
  const state::Inventory inventory(inventory_view(packed));
  py::list result;
  for (size_t i = 0; i < inventory.size(); ++i) {
    if (const state::Item item = inventory[i]; item.kind == state::ItemKind::object) result.append(named(item.name));
  }
  return result;
}

py::bytes kinds(const py::bytes& bytes) {
  const state::Inventory inventory(view(bytes));
  std::string result(inventory.size(), '\0');
  for (size_t i = 0; i < inventory.size(); ++i) result[i] = static_cast<char>(inventory[i].kind);
  return py::bytes(result);
}

// What ranks have in common travels once: see state::InventoryParts. The header has the node.
py::tuple parts(const py::bytes& bytes) {
  const state::Inventory inventory(view(bytes));
  const auto part = [](std::span<const std::byte> content) {
    return py::bytes(reinterpret_cast<const char*>(content.data()), content.size());
  };
  const state::InventoryParts& parts = inventory.parts();
  return py::make_tuple(part(parts.header), part(parts.rows), part(parts.numbers), part(parts.names));
}

}  // namespace

std::string utf8(const py::handle& text) {
  Py_ssize_t size = 0;
  if (const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &size); data != nullptr) {
    return {data, static_cast<size_t>(size)};
  }
  if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) throw py::error_already_set();
  PyErr_Clear();  // lone surrogates, which Python's pickle keeps too
  PyObject* encoded = PyUnicode_AsEncodedString(text.ptr(), "utf-8", "surrogatepass");
  if (encoded == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::bytes>(encoded);
}

py::str named(std::string_view bytes) {
  PyObject* text = PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "surrogatepass");
  if (text != nullptr) return py::reinterpret_steal<py::str>(text);
  PyErr_Clear();
  throw Error::corrupt("a name is no text", {}, 0);
}

state::InventoryParts inventory_view(const py::handle& inventory) {
  if (py::isinstance<py::bytes>(inventory)) return {view(py::reinterpret_borrow<py::bytes>(inventory))};
  const auto parts = inventory.cast<std::array<py::bytes, 4>>();  // which the caller keeps alive
  return {view(parts[0]), view(parts[1]), view(parts[2]), view(parts[3])};
}

void bind_inventory(py::module_& module) {
  module.def("inventory_items", &items, "[(name, kind, dtype code, requires_grad, bytes, shape, offset, size)]");
  module.def("inventory_kinds", &kinds, "one byte an item: csrc/state/inventory.h, ItemKind");
  module.def("inventory_objects", &objects, "the names of its objects");
  module.def("inventory_parts", &parts, "header, rows, numbers and names, which stand for the inventory");
}

}  // namespace vescale_ckpt::bindings
