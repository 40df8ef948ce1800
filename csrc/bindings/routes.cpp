// Loads in which ranks read for each other, and exports in which they write: routes, and the tables of one round.
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "io/box.h"
#include "io/shared_counter.h"
#include "share/route_tables.h"
#include "share/routes.h"

namespace vescale_ckpt::bindings {
namespace {

std::span<const std::byte> memory_at(uintptr_t address, uint64_t bytes) {
  return {reinterpret_cast<const std::byte*>(address), bytes};
}

// Plans routes without the GIL, from the table of each rank, and packs those of each rank.
template <typename Plan>
std::vector<py::bytes> packed_routes(const std::vector<py::buffer>& rows, const std::vector<uint32_t>& groups,
                                     const std::vector<uint32_t>& nodes, const Plan& plan) {
  std::vector<Table> tables;
  tables.reserve(rows.size());
  for (const py::buffer& of_rank : rows) tables.emplace_back(of_rank);
  std::vector<std::vector<int64_t>> packed(rows.size());
  {
    const py::gil_scoped_release release;
    std::vector<share::RankReads> ranks;
    for (size_t i = 0; i < rows.size(); ++i) ranks.push_back({tables[i].values(), {}, groups[i], nodes[i]});
    const std::vector<share::RankRoutes> routes = plan(ranks);
    for (size_t i = 0; i < routes.size(); ++i) packed[i] = share::pack_routes(routes[i]);
  }
  std::vector<py::bytes> result;
  for (const auto& words : packed) result.push_back(bytes_of(words));
  return result;
}

std::vector<py::bytes> plan(const std::vector<py::buffer>& reads, const std::vector<py::list>& files,
                            const std::vector<uint32_t>& groups, const std::vector<uint32_t>& nodes,
                            const share::RouteOptions& options, std::vector<uint64_t>& bytes,
                            std::vector<share::Renumbered>& renumbered) {
  std::map<PyObject*, std::vector<std::string>> names;  // ranks that name the same files have the same list
  for (const py::list& of_rank : files) {
    if (!names.contains(of_rank.ptr())) names[of_rank.ptr()] = of_rank.cast<std::vector<std::string>>();
  }
  return packed_routes(reads, groups, nodes, [&](std::vector<share::RankReads>& ranks) {
    for (size_t i = 0; i < ranks.size(); ++i) ranks[i].files = names.at(files[i].ptr());
    return share::plan_routes(ranks, options, bytes, renumbered);
  });
}

std::vector<py::bytes> plan_writes(const std::vector<py::buffer>& held, const std::vector<uint32_t>& nodes,
                                   std::vector<uint64_t> bytes, uint64_t piece_bytes, uint64_t budget_bytes) {
  share::RouteOptions options;
  options.piece_bytes = piece_bytes;
  options.budget_bytes = budget_bytes;
  return packed_routes(held, nodes, nodes, [&](const std::vector<share::RankReads>& ranks) {
    return share::plan_writes(ranks, options, bytes);
  });
}

void copy_boxes(const py::buffer& buffer, unsigned threads, const py::buffer& device_buffer,
                const Producers& producers) {
  const Table table(buffer), devices(device_buffer);
  const py::gil_scoped_release release;
  stage::copy_boxes(io::parse_copy_table(table.values()), devices.values(), stage_producers(producers), threads);
}

}  // namespace

void bind_routes(py::module_& module) {
  py::class_<io::SharedCounter>(module, "SharedCounter")
      .def(py::init([](const py::buffer& memory, uint64_t offset) {
             const py::buffer_info info = memory.request(true);
             return io::SharedCounter({static_cast<std::byte*>(info.ptr), static_cast<size_t>(info.size)}, offset);
           }),
           py::arg("memory"), py::arg("offset"), py::keep_alive<1, 2>())
      .def("set", &io::SharedCounter::set, py::arg("value"))
      .def("wait", &io::SharedCounter::wait, py::arg("least"), py::arg("seconds"),
           py::call_guard<py::gil_scoped_release>());
  const share::RouteOptions standard;
  module.def(
      "plan_routes",
      [](const std::vector<py::buffer>& reads, const std::vector<py::list>& files, const std::vector<uint32_t>& groups,
         const std::vector<uint32_t>& nodes, bool verify, uint64_t piece_bytes, uint64_t whole_bytes,
         uint64_t budget_bytes, const std::vector<uint64_t>& bytes_before, uint32_t most_nodes, bool sees_neighbours) {
        std::vector<uint64_t> bytes = bytes_before;
        bytes.resize(reads.size());
        std::vector<share::Renumbered> renumbered;
        const share::RouteOptions options{piece_bytes, budget_bytes, verify, whole_bytes, most_nodes, sees_neighbours};
        auto routes = plan(reads, files, groups, nodes, options, bytes, renumbered);
        std::vector<std::pair<std::vector<uint32_t>, std::vector<uint32_t>>> alike;
        for (share::Renumbered& some : renumbered) alike.emplace_back(std::move(some.ranks), std::move(some.like));
        return std::make_tuple(std::move(routes), std::move(bytes), std::move(alike));
      },
      py::arg("reads"), py::arg("files"), py::arg("groups"), py::arg("nodes"), py::arg("verify") = standard.verify,
      py::arg("piece_bytes") = standard.piece_bytes, py::arg("whole_bytes") = standard.whole_bytes,
      py::arg("budget_bytes") = standard.budget_bytes, py::arg("bytes_before") = std::vector<uint64_t>(),
      py::arg("most_nodes") = standard.most_nodes, py::arg("sees_neighbours") = standard.sees_neighbours,
      "each rank's routes, packed; the bytes that each rank reads by them and by plans before; ranks whose routes are "
      "those of others, and these others");
  module.def(
      "bytes_read_alone",
      [](const py::buffer& reads, const std::vector<std::string>& files, bool verify) {
        const Table table(reads);
        const py::gil_scoped_release release;
        return share::bytes_read_alone({table.values(), files}, verify);
      },
      py::arg("reads"), py::arg("files"), py::arg("verify"));
  module.def(
      "split_reads",
      [](const py::buffer& reads, const std::vector<std::string>& files, uint32_t parts, uint64_t range_bytes) {
        const Table table(reads);
        std::vector<py::bytes> result;
        for (const auto& part : share::split_reads(table.values(), files, parts, range_bytes)) {
          result.push_back(bytes_of(part));
        }
        return result;
      },
      py::arg("reads"), py::arg("files"), py::arg("parts"), py::arg("range_bytes"));
  module.def(
      "staging_table",
      [](const py::buffer& staged, uintptr_t address, uint64_t bytes) {
        return bytes_of(share::make_staging_table(Table(staged).values(), memory_at(address, bytes)));
      },
      py::arg("staged"), py::arg("address"), py::arg("bytes"));
  module.def(
      "pack_table",
      [](const py::buffer& packs, uintptr_t address, uint64_t bytes) {
        return bytes_of(share::make_pack_table(Table(packs).values(), memory_at(address, bytes)));
      },
      py::arg("packs"), py::arg("address"), py::arg("bytes"));
  module.def("plan_writes", &plan_writes, py::arg("held"), py::arg("nodes"), py::arg("bytes"), py::arg("piece_bytes"),
             py::arg("budget_bytes"), "each rank's routes, packed");
  py::class_<share::HeldRows>(module, "HeldRows")
      .def(py::init([](const py::buffer& table, const py::buffer& rows) {
             const Table words(table), numbers(rows);
             return std::make_unique<share::HeldRows>(std::vector(words.values().begin(), words.values().end()),
                                                      numbers.values());
           }),
           py::arg("table"), py::arg("rows"))
      .def("box_table",
           [](const share::HeldRows& held, const py::buffer& own) {
             return bytes_of(share::make_box_table(Table(own).values(), held));
           })
      .def(
          "gather_table",
          [](const share::HeldRows& held, const py::buffer& places, const py::buffer& memories) {
            return bytes_of(share::make_gather_table(Table(places).values(), held, Table(memories).values()));
          },
          py::arg("places"), py::arg("memories"));
  module.def(
      "gather_boxes",
      [](const py::buffer& buffer, unsigned threads) {
        const Table table(buffer);
        const py::gil_scoped_release release;
        io::copy_boxes(io::parse_copy_table(table.values()), threads, io::CopyWay::gather);
      },
      py::arg("table"), py::arg("threads"), "copies in the other direction: into the pieces");
  module.def("copy_boxes", &copy_boxes, py::arg("table"), py::arg("threads"), py::arg("devices") = py::bytes(),
             py::arg("producers") = Producers());
}

}  // namespace vescale_ckpt::bindings
