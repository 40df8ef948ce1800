#include "write/ordered_writer.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "base/error.h"
#include "base/memory.h"
#include "base/workers.h"
#include "io/transfer.h"

namespace vescale_ckpt::write {

OrderedWriter::OrderedWriter(std::vector<Target> targets, std::span<const int64_t> own, size_t files,
                             const io::EngineOptions& options)
    : options_(usable_for_writing(options)),
      targets_(std::move(targets)),
      files_(files),
      own_(own, files),
      control_(targets_.empty() ? std::string() : targets_.front().path, options.bytes_per_second) {}

OrderedWriter::~OrderedWriter() {
  if (file_) file_->discard();
}

void OrderedWriter::cancel() {
  control_.cancel();
  const std::lock_guard lock(mutex_);
  if (file_) file_->cancel();
}

std::vector<uint32_t> OrderedWriter::begun() const {
  std::vector<uint32_t> numbers;
  for (size_t i = 0; i < targets_.size() && i < next_ + (cursor_ != 0); ++i) numbers.push_back(targets_[i].number);
  return numbers;
}

void OrderedWriter::write(std::span<const int64_t> table) {
  PlacedBoxes boxes(table, files_);
  if (boxes.boxes().empty()) return;
  write_until(boxes.boxes(), false);
  const std::vector<uint32_t> added = boxes.take_checksums();
  checksums_.insert(checksums_.end(), added.begin(), added.end());
}

std::vector<uint32_t> OrderedWriter::finish() {
  write_until({}, true);
  const std::vector<uint32_t> added = own_.take_checksums();
  checksums_.insert(checksums_.end(), added.begin(), added.end());
  return std::move(checksums_);
}

// Writes all that precedes the end of the last of `boxes`: earlier files, local boxes, and `boxes` themselves. With
// `to_the_end`, writes everything.
void OrderedWriter::write_until(std::span<const PlacedBox> boxes, bool to_the_end) {
  for (; next_ < targets_.size(); ++next_, cursor_ = 0) {
    const Target& target = targets_[next_];
    const bool is_last = !to_the_end && boxes.back().file == target.number;
    std::vector<PlacedBox> of_file;
    for (const PlacedBox& box : boxes) {
      if (box.file == target.number) of_file.push_back(box);
    }
    const std::span<const PlacedBox> own = own_.boxes();
    for (; next_own_ < own.size() && own[next_own_].file == target.number; ++next_own_) {
      if (is_last && own[next_own_].begin() > boxes.back().begin()) break;
      of_file.push_back(own[next_own_]);
    }
    std::ranges::sort(of_file, {}, &PlacedBox::begin);
    if (cursor_ == 0) begin_file();
    write_in_order(of_file);
    if (is_last && cursor_ != target.length) return;
    complete_file();
    if (is_last) {
      ++next_;
      cursor_ = 0;
      return;
    }
  }
  if (!boxes.empty()) throw Error::invalid("a box of a file that this rank does not write");
}

void OrderedWriter::begin_file() {
  control_.check();
  const Target& target = targets_[next_];
  std::unique_ptr<io::File> file = io::File::create(target.path, options_.widest);
  try {
    file->begin(target.length, options_.slot_bytes);
    if (file->window() == nullptr) throw Error::invalid(target.path + " is not in an object store");
  } catch (...) {
    file->discard();
    throw;
  }
  {
    const std::lock_guard lock(mutex_);
    file_ = std::move(file);
  }
  const auto head = std::as_bytes(std::span(target.head));
  io::write_exactly(*file_, 0, head);
  cursor_ = head.size();
}

void OrderedWriter::write_in_order(std::span<const PlacedBox> boxes) {
  struct Step {
    const PlacedBox* box;
    uint64_t begin, end;
  };
  std::vector<Step> steps;
  io::PartWindow& window = *file_->window();
  const uint64_t part = window.part_bytes();
  for (const PlacedBox& box : boxes) {
    if (box.begin() != cursor_ || box.source.box->bytes() != box.end() - box.begin()) {
      throw Error::invalid("the layout of " + file_->path() + " has a hole at " + std::to_string(cursor_));
    }
    for (; cursor_ < box.end(); cursor_ = steps.back().end) {
      const uint64_t part_end = (cursor_ / part + 1) * part;
      steps.push_back({&box, cursor_, std::min({box.end(), part_end, align_down(cursor_, kBoxStep) + kBoxStep})});
    }
  }
  if (steps.empty()) return;
  std::atomic<size_t> taken{0};
  // Steps are taken in ascending order, so the holder of the lowest never waits (io/remote.h).
  run_workers(
      static_cast<unsigned>(std::min<size_t>(options_.threads, steps.size())),
      [&](const std::atomic<bool>& stop) {
        for (size_t number = taken++; number < steps.size() && !stop; number = taken++) {
          const Step& step = steps[number];
          const uint64_t bytes = step.end - step.begin;
          control_.admit(bytes, stop);
          window.wait_for_room(step.end, [&] { return stop.load(); });
          std::byte* to = window.place(step.begin, bytes);
          if (to == nullptr) throw Error::invalid("a step that lies in two parts");
          add_part(*step.box, step.begin, step.end, to);
          window.write(step.begin, {to, bytes});
          stats_.slots += bytes;
          stats_.by_access[static_cast<size_t>(io::Access::buffered)] += bytes;
        }
      },
      options_.niceness);
}

void OrderedWriter::complete_file() {
  const Target& target = targets_[next_];
  if (cursor_ != target.length) {
    throw Error::invalid("the layout of " + target.path + " has a hole at " + std::to_string(cursor_));
  }
  control_.check();
  file_->complete(target.length, true);
  file_->close();
  control_.check();
  file_bytes_ += target.length;
  const std::lock_guard lock(mutex_);
  file_.reset();
}

}  // namespace vescale_ckpt::write
