// Planning.
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "metadata/catalog.h"
#include "plan/global_plan.h"

namespace vescale_ckpt::bindings {
namespace {

plan::Placement placement_named(const std::string& name) {
  if (name == "balanced") return plan::Placement::balanced;
  if (name == "lowest_rank") return plan::Placement::lowest_rank;
  if (name == "local") return plan::Placement::local;
  throw py::value_error("unknown placement \"" + name + "\"");
}

std::unique_ptr<plan::GlobalPlan> make_plan(const std::vector<py::object>& inventories, const std::string& placement,
                                            uint64_t least_piece_bytes, const std::vector<py::bytes>& hashes) {
  const plan::PlanOptions options{placement_named(placement), least_piece_bytes};
  std::vector<state::InventoryParts> views;
  views.reserve(inventories.size());
  for (const py::object& inventory : inventories) views.push_back(inventory_view(inventory));
  std::vector<std::span<const uint64_t>> words;
  for (const py::bytes& of_rank : hashes) {  // aligned as all that Python allocates
    const std::span<const std::byte> bytes = view(of_rank);
    words.emplace_back(reinterpret_cast<const uint64_t*>(bytes.data()), bytes.size() / sizeof(uint64_t));
  }
  const py::gil_scoped_release release;
  return std::make_unique<plan::GlobalPlan>(views, options, words);
}

// Written where Python keeps it: all ranks' local plans are the largest of what planning makes.
py::bytes local_plan(const plan::GlobalPlan& plan, uint32_t rank) {
  const uint64_t words = plan.local_plan_words(rank);
  py::bytes result(nullptr, words * sizeof(int64_t));
  plan.local_plan(rank, {reinterpret_cast<int64_t*>(PyBytes_AS_STRING(result.ptr())), words});
  return result;
}

// (key, two ranks) of keys whose replicas differ.
py::list differences(const plan::GlobalPlan& plan) {
  py::list found;
  for (const plan::Difference& difference : plan.differences()) {
    found.append(py::make_tuple(text(std::string(plan.key(difference.key))), difference.one, difference.other));
  }
  return found;
}

}  // namespace

void bind_plan(py::module_& module) {
  py::class_<metadata::Catalog>(module, "Catalog");

  py::class_<plan::GlobalPlan>(module, "GlobalPlan")
      .def(py::init(&make_plan), py::arg("inventories"), py::arg("placement"),
           py::arg("least_piece_bytes") = plan::PlanOptions().least_piece_bytes,
           py::arg("hashes") = std::vector<py::bytes>())
      .def("local_plan", &local_plan)
      .def("holders", [](const plan::GlobalPlan& plan, uint32_t rank) { return bytes_of(plan.holders(rank)); })
      .def_property_readonly("differences", &differences)
      .def("catalog", &plan::GlobalPlan::catalog, py::call_guard<py::gil_scoped_release>());
}

}  // namespace vescale_ckpt::bindings
