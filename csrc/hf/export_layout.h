// Where all ranks' boxes of tensors lie in a set of safetensors files, decided by the coordinator from a plan's catalog
// before a byte is written, and what it takes to finish the files.
//
// Tensors in the order of the catalog are put into files of at most `most_file_bytes`; a tensor that is larger has a
// file of its own. A caller may give each tensor a number instead: tensors of one number share a file. Within a file
// they lie as SafetensorsLayout orders them. Immutable, hence thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "hf/safetensors_layout.h"
#include "metadata/catalog.h"
#include "state/inventory.h"

namespace vescale_ckpt::hf {

class ExportLayout {
 public:
  struct Alias {
    std::string name, stored;  // a tensor that is not stored, and the one that it shares memory with
  };

  struct FileNumber {
    std::string name;  // a tensor's
    uint64_t number = 0;
  };

  // `metadata`: of every file's header; an alias is added to that of the file that has the tensor. Aliases of tensors
  // that are stored are left out. `numbers`: empty for files of at most `most_file_bytes`; files are in the order of
  // their numbers, and those without tensors are left out. Throws Error(invalid) for keys that are no tensors or have
  // no number, and for what SafetensorsLayout refuses, naming keys.
  ExportLayout(const metadata::Catalog& catalog, uint64_t most_file_bytes, const SafetensorsHeader::Metadata& metadata,
               std::span<const Alias> aliases, std::span<const FileNumber> numbers = {});

  // Chooses the tensors that ranks bring to each other before they are written (share/routes.h): those of which ranks
  // of one node hold short runs, if the node has so many bytes of them. `nodes`: for each rank a number below the
  // number of ranks, equal for ranks that see each other's memory.
  void bring_short_runs(std::span<const uint32_t> nodes, uint64_t least_bytes);
  // What each rank holds of these tensors, as share::plan_writes takes it. The catalog: that of the constructor.
  std::vector<std::vector<int64_t>> held(const metadata::Catalog& catalog) const;
  // The bytes of each rank's other boxes, which it writes straight from its memory.
  std::vector<uint64_t> straight_bytes() const;

  size_t files() const { return files_.size(); }  // at least one
  uint64_t file_bytes(size_t file) const { return files_[file].layout.file_bytes(); }
  uint64_t tensor_bytes() const { return tensor_bytes_; }

  // For each row of the rank's local plan: file (-1 - file if ranks bring it to each other), offset of its tensor in
  // it.
  std::vector<int64_t> record_locations(uint32_t rank) const;

  // Length and header of each file, which complete it. `checksums`: of each rank, as PlacedBoxes::take_checksums
  // (write/placed_boxes.h). Throws Error(invalid) if they are not of this layout.
  std::vector<std::string> heads(std::span<const std::span<const uint32_t>> checksums) const;

  // The index that names the file of each tensor; `names`: of the files.
  std::string index(std::span<const std::string> names) const;

 private:
  struct File {
    SafetensorsLayout layout;
    std::vector<size_t> keys;  // in the order that the layout was made from
  };
  struct Tensor {
    std::string name;
    uint64_t begin = 0, end = 0;  // in the file
    uint64_t first_block = 0;     // among those of the file
    uint32_t file = 0;
    bool scattered = false;  // some box of it has short runs
    bool apart = false;      // some box of it has long runs
    bool brought = false;
  };
  struct Row {  // one of a rank's local plan
    uint64_t tensor = 0;
    uint64_t bytes = 0;
  };

  std::vector<File> files_;
  std::vector<Tensor> tensors_;
  std::vector<std::vector<Row>> rows_;  // one list for each rank
  uint64_t tensor_bytes_ = 0;
};

// What a rank with this local plan of this inventory holds, at these record locations, as share::plan_writes takes it:
// without the boxes that ranks bring to each other, or with them. Throws Error(invalid).
std::vector<int64_t> make_export_boxes(const state::Inventory& inventory, std::span<const int64_t> local_plan,
                                       std::span<const int64_t> record_locations, bool with_brought);

}  // namespace vescale_ckpt::hf
