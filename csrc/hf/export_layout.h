// Where all ranks' boxes of tensors lie in a set of safetensors files, decided by the coordinator from a plan's catalog
// before a byte is written, and what it takes to finish the files.
//
// Tensors in the order of the catalog are put into files of at most `most_file_bytes`; a tensor that is larger has a
// file of its own. A caller may give each tensor a number instead: tensors of one number share a file. Within a file
// they lie as SafetensorsLayout orders them. Immutable, hence thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "hf/node_ranges.h"
#include "hf/safetensors_layout.h"
#include "metadata/catalog.h"
#include "state/inventory.h"

namespace vescale_ckpt::hf {

class ExportLayout {
 public:
  struct Alias {
    std::string name, stored;  // of a tensor that is not stored, and of the one that it shares memory with
  };

  struct FileNumber {
    std::string name;  // of a tensor
    uint64_t number = 0;
  };

  // `metadata`: of every file's header; an alias is added to that of the file that has the tensor. Aliases of tensors
  // that are stored are left out. `numbers`: empty for files of at most `most_file_bytes`; files are in the order of
  // their numbers, and those without tensors are left out. Throws Error(invalid) for keys that are no tensors or have
  // no number, and for what SafetensorsLayout refuses, naming keys.
  ExportLayout(const metadata::Catalog& catalog, uint64_t most_file_bytes, const SafetensorsHeader::Metadata& metadata,
               std::span<const Alias> aliases, std::span<const FileNumber> numbers = {});

  // Lets ranks of a node put ranges together (hf/node_ranges.h). `nodes`: a number below the number of ranks for each
  // rank, equal for ranks that see each other's memory. Call it before any other method, at most once; or stream().
  void join(std::span<const uint32_t> nodes, uint64_t window_bytes, uint64_t least_bytes);
  // The same for files of an object store, which takes each file in order from one rank: all of each file is a range of
  // its writer, from its first byte on, its head included. Files are dealt out to the ranks evenly. `nodes`: as
  // for join(). Bytes for a writer of another node travel in messages;
  // throws Error(invalid) if these are too many.
  void stream(std::span<const uint32_t> nodes, uint64_t window_bytes);
  // The messages that the rank sends and receives, in order: rows of round, sender, writer.
  std::vector<int64_t> messages(uint32_t rank) const;
  // The number of rounds, of the node that has most of them; 0 if no ranges are put together.
  uint64_t rounds() const { return rounds_; }
  // The ranges of the rank's node: rows of file, begin, end, writer, round, offset in the window.
  std::vector<int64_t> joined_ranges(uint32_t rank) const;
  // What the rank is the writer of, as rows of SharedWriter's targets: bytes of tensors, seen as one dimension.
  std::vector<int64_t> joined_targets(uint32_t rank) const;

  size_t files() const { return files_.size(); }  // at least one
  uint64_t file_bytes(size_t file) const { return files_[file].layout.file_bytes(); }
  uint64_t tensor_bytes() const { return tensor_bytes_; }

  // For each row of the rank's local plan: file, offset of its tensor in the file.
  std::vector<int64_t> record_locations(uint32_t rank) const;

  // Length and header of each file, which complete it. `blocks[rank]`: what SharedWriter::finish returned.
  // Throws Error(invalid) if they are not of this layout.
  std::vector<std::string> heads(std::span<const std::span<const uint32_t>> blocks) const;

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
  };
  struct Row {  // of a rank's local plan
    uint64_t tensor = 0;
    uint64_t begin = 0, end = 0;  // in the file: from the box's first byte to its last
  };
  std::vector<size_t> in_file_order() const;
  std::vector<HeldSpan> held_spans(std::span<const size_t> order, std::span<const uint32_t> nodes) const;
  void deal_out(std::span<const size_t> order);

  std::vector<File> files_;
  std::vector<Tensor> tensors_;
  std::vector<std::vector<Row>> rows_;                       // of each rank
  std::vector<std::vector<Row>> joined_;                     // of each rank: what it is the writer of
  std::vector<uint32_t> nodes_;                              // of each rank; empty if nothing is joined
  std::vector<std::vector<NodeRange>> ranges_;               // of each node
  std::vector<std::set<std::array<uint32_t, 3>>> messages_;  // of each rank; see messages()
  uint64_t rounds_ = 0;
  uint64_t tensor_bytes_ = 0;
};

// SharedWriter's targets for the tensors of a local plan of this inventory, at these record locations. Throws
// Error(invalid).
std::vector<int64_t> make_export_targets(const state::Inventory& inventory, std::span<const int64_t> local_plan,
                                         std::span<const int64_t> record_locations);

}  // namespace vescale_ckpt::hf
