// The form of a nested state: which containers and values it has, under which names. A state of the same form as the
// one before has the same keys, so that only its values are read anew.
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"

namespace vescale_ckpt::bindings {
namespace {

// What `flatten` (vescale_ckpt/_state/flatten.py) treats alike. It asks for exact types: no code of a value runs.
class Kinds {
 public:
  Kinds(const py::iterable& tensors, const py::iterable& scalars) : tensors_(held(tensors)), scalars_(held(scalars)) {}

  bool is_tensor(PyObject* value) const { return in(tensors_, value); }
  bool is_scalar(PyObject* value) const { return in(scalars_, value); }

 private:
  static std::vector<py::object> held(const py::iterable& types) {
    std::vector<py::object> result;
    for (const py::handle type : types) result.push_back(py::reinterpret_borrow<py::object>(type));
    return result;
  }

  static bool in(const std::vector<py::object>& types, PyObject* value) {
    for (const py::object& type : types) {
      if (type.ptr() == reinterpret_cast<PyObject*>(Py_TYPE(value))) return true;
    }
    return false;
  }

  std::vector<py::object> tensors_, scalars_;
};

bool is_mapping(PyObject* value) {
  return PyDict_CheckExact(value) || PyODict_CheckExact(value);
}

bool is_name(PyObject* name) {
  return PyUnicode_CheckExact(name) || PyLong_CheckExact(name);
}

// Calls `visit(name, element)` for the elements of a mapping, in their order, until it returns false. Returns whether
// it never did. Other names than `is_name` end it, too: they may run code.
template <typename Visit>
bool each(PyObject* mapping, const Visit& visit) {
  if (PyDict_CheckExact(mapping)) {
    PyObject *name = nullptr, *element = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(mapping, &at, &name, &element) != 0;) {
      if (!is_name(name) || !visit(name, element)) return false;
    }
    return true;
  }
  const auto names = py::reinterpret_steal<py::object>(PyObject_GetIter(mapping));  // an OrderedDict has its own order
  if (!names) throw py::error_already_set();
  while (const auto name = py::reinterpret_steal<py::object>(PyIter_Next(names.ptr()))) {
    PyObject* element = is_name(name.ptr()) ? PyDict_GetItemWithError(mapping, name.ptr()) : nullptr;
    if (element == nullptr || !visit(name.ptr(), element)) return false;
  }
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return true;
}

// A mapping or a list that `flatten` walks into, and what it holds, in its order.
struct Container {
  struct Element {
    py::object name;                       // in a mapping: text or a whole number
    PyTypeObject* type = nullptr;          // a value's; borrowed from `Form::types`
    std::unique_ptr<Container> container;  // null: a value
  };
  bool is_list = false;
  std::vector<Element> elements;
};

bool same_name(PyObject* name, PyObject* known) {
  if (name == known) return true;
  if (Py_TYPE(name) != Py_TYPE(known)) return false;
  if (PyUnicode_CheckExact(name)) return PyUnicode_Compare(name, known) == 0;
  const int same = PyObject_RichCompareBool(name, known, Py_EQ);  // whole numbers
  if (same < 0) throw py::error_already_set();
  return same == 1;
}

class StateForm {
 public:
  // None if the state has anything else than mappings (`dict`, `OrderedDict`) with names of text or whole numbers,
  // lists and values of the given types.
  static std::unique_ptr<StateForm> of(const py::dict& state, const py::iterable& tensors,
                                       const py::iterable& scalars) {
    std::unique_ptr<StateForm> form(new StateForm(Kinds(tensors, scalars)));
    return form->record(state.ptr(), form->root_) ? std::move(form) : nullptr;
  }

  // The values of a state of this form, in the order of `flatten`; None if the state is of another form.
  py::object values(const py::dict& state) {
    py::list values(count_);
    size_t filled = 0;
    if (!fill(state.ptr(), root_, values.ptr(), filled) || filled != count_) return py::none();
    return values;
  }

 private:
  explicit StateForm(Kinds kinds) : kinds_(std::move(kinds)) {}

  bool record(PyObject* value, Container& container) {
    if (container.is_list) {
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
        if (!record_element(py::object(), PyList_GET_ITEM(value, i), container)) return false;
      }
      return true;
    }
    return each(value, [&](PyObject* name, PyObject* element) {
      return record_element(py::reinterpret_borrow<py::object>(name), element, container);
    });
  }

  bool record_element(py::object name, PyObject* value, Container& container) {
    Container::Element element;
    element.name = std::move(name);
    if (is_mapping(value) || is_walked(value)) {
      element.container = std::make_unique<Container>();
      element.container->is_list = PyList_CheckExact(value);
      if (!record(value, *element.container)) return false;
    } else {
      if (!is_value(value)) return false;
      element.type = Py_TYPE(value);
      types_.push_back(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(element.type)));
      ++count_;
    }
    container.elements.push_back(std::move(element));
    return true;
  }

  bool fill(PyObject* value, const Container& container, PyObject* values, size_t& filled) const {
    if (container.is_list) {
      if (!is_walked(value) || static_cast<size_t>(PyList_GET_SIZE(value)) != container.elements.size()) return false;
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
        if (!fill_element(PyList_GET_ITEM(value, i), container.elements[static_cast<size_t>(i)], values, filled)) {
          return false;
        }
      }
      return true;
    }
    if (!is_mapping(value) || static_cast<size_t>(PyDict_Size(value)) != container.elements.size()) return false;
    size_t number = 0;
    return each(value, [&](PyObject* name, PyObject* element) {
      const Container::Element& known = container.elements[number++];
      return same_name(name, known.name.ptr()) && fill_element(element, known, values, filled);
    });
  }

  bool fill_element(PyObject* value, const Container::Element& known, PyObject* values, size_t& filled) const {
    if (known.container != nullptr) return fill(value, *known.container, values, filled);
    // A list that stays whole may have got other elements.
    if (Py_TYPE(value) != known.type || (PyList_CheckExact(value) && !is_value(value))) return false;
    Py_INCREF(value);
    PyList_SET_ITEM(values, static_cast<Py_ssize_t>(filled++), value);
    return true;
  }

  // Whether it surely is a list that `flatten` walks into: one with a tensor or a dictionary in it.
  bool is_walked(PyObject* value) const {
    if (!PyList_CheckExact(value)) return false;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
      PyObject* element = PyList_GET_ITEM(value, i);
      if (is_mapping(element) || kinds_.is_tensor(element)) return true;
    }
    return false;
  }

  // Whether it surely is a value for `flatten`.
  bool is_value(PyObject* value) const {
    if (!PyList_CheckExact(value)) return kinds_.is_tensor(value) || kinds_.is_scalar(value);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
      if (!kinds_.is_scalar(PyList_GET_ITEM(value, i))) return false;
    }
    return true;
  }

  Kinds kinds_;
  Container root_;
  std::vector<py::object> types_;
  size_t count_ = 0;
};

// A name that Python compares by address.
py::object interned(const py::handle& name) {
  PyObject* text = py::reinterpret_borrow<py::object>(name).release().ptr();
  PyUnicode_InternInPlace(&text);
  return py::reinterpret_steal<py::object>(text);
}

py::object attribute_of(PyObject* value, const py::object& name) {
  auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(value, name.ptr()));
  if (!found) throw py::error_already_set();
  return found;
}

// Whether `values` have these attributes, of attributes: for each value a tuple in `known`. Equal objects count as the
// same.
bool have_attributes(const py::list& values, const py::list& paths, const py::list& known) {
  if (values.size() != known.size()) return false;
  std::vector<std::vector<py::object>> names;
  for (const py::handle path : paths) {
    std::vector<py::object>& of_path = names.emplace_back();
    for (const py::handle name : py::cast<py::tuple>(path)) of_path.push_back(interned(name));
  }
  // The steps that two paths have in common are taken once: they come in a row.
  for (size_t i = 0; i < values.size(); ++i) {
    const py::handle expected = PyList_GET_ITEM(known.ptr(), static_cast<Py_ssize_t>(i));
    if (!PyTuple_Check(expected.ptr()) || static_cast<size_t>(PyTuple_GET_SIZE(expected.ptr())) != names.size()) {
      return false;
    }
    py::object first;
    for (size_t path = 0; path < names.size(); ++path) {
      const bool again = path > 0 && names[path].front().is(names[path - 1].front());
      PyObject* value = PyList_GET_ITEM(values.ptr(), static_cast<Py_ssize_t>(i));
      if (!again) first = attribute_of(value, names[path].front());
      py::object found = first;
      for (size_t step = 1; step < names[path].size(); ++step) found = attribute_of(found.ptr(), names[path][step]);
      PyObject* wanted = PyTuple_GET_ITEM(expected.ptr(), static_cast<Py_ssize_t>(path));
      const int same = PyObject_RichCompareBool(found.ptr(), wanted, Py_EQ);
      if (same < 0) throw py::error_already_set();
      if (same == 0) return false;
    }
  }
  return true;
}

// A new reference, or null if there is no such attribute.
PyObject* attribute(PyObject* value, PyObject* name) {
  PyObject* found = nullptr;
#if PY_VERSION_HEX >= 0x030D0000
  const int result = PyObject_GetOptionalAttr(value, name, &found);
#else
  const int result = _PyObject_LookupAttr(value, name, &found);
#endif
  if (result < 0) throw py::error_already_set();
  return found;
}

// The positions of values that have an attribute of one of these names. Methods of the functions `known` do not count.
// Looks as Python's `hasattr` does, but makes no error for the many values that have none.
std::vector<size_t> with_attributes(const py::list& values, const std::vector<py::str>& names, const py::tuple& known) {
  std::vector<py::object> looked_for;
  for (const py::str& name : names) looked_for.push_back(interned(name));
  const auto counts = [&](const py::object& found) {
    if (!PyMethod_Check(found.ptr())) return true;
    for (const py::handle function : known) {
      if (function.ptr() == PyMethod_GET_FUNCTION(found.ptr())) return false;
    }
    return true;
  };
  std::vector<size_t> positions;
  for (size_t i = 0; i < values.size(); ++i) {
    PyObject* value = PyList_GET_ITEM(values.ptr(), static_cast<Py_ssize_t>(i));
    for (const py::object& name : looked_for) {
      const auto found = py::reinterpret_steal<py::object>(attribute(value, name.ptr()));
      if (!found || !counts(found)) continue;
      positions.push_back(i);
      break;
    }
  }
  return positions;
}

}  // namespace

void bind_state_form(py::module_& module) {
  py::class_<StateForm>(module, "StateForm")
      .def_static("of", &StateForm::of, py::arg("state"), py::arg("tensors"), py::arg("scalars"))
      .def("values", &StateForm::values, py::arg("state"));
  module.def("with_attributes", &with_attributes, py::arg("values"), py::arg("names"), py::arg("known"));
  module.def("have_attributes", &have_attributes, py::arg("values"), py::arg("paths"), py::arg("known"));
}

}  // namespace vescale_ckpt::bindings
