#include "device/pipeline.h"

#include <utility>

#include "base/error.h"

namespace vescale_ckpt::device {

Pipeline::Pipeline(Accelerator& accelerator, const CopyLimits& limits)
    : accelerator_(accelerator),
      limits_(limits),
      copies_(accelerator.make_stream(Priority::normal)),
      packs_(accelerator.make_stream(Priority::highest)),  // a kernel of training must not hold up the copies
      produced_(accelerator.make_event()) {
  if (limits.group_bytes == 0 || limits.group_copies == 0 || limits.slab_bytes % 16 != 0 ||
      limits.slab_bytes * turns_.size() > kMaxSlabBytes) {
    throw Error::invalid("groups of no bytes, or slabs of an odd size or too large to copy with");
  }
  for (Turn& turn : turns_) {
    turn.staged = accelerator.make_event();
    turn.done = accelerator.make_event();
  }
}

void Pipeline::prepare() {
  if (limits_.slab_bytes != 0) make_slabs();
}

bool Pipeline::make_slabs() {
  for (Turn& turn : turns_) {
    if (!turn.slab) turn.slab = accelerator_.make_slab(limits_.slab_bytes);
    if (!turn.slab) return false;
  }
  return true;
}

void Pipeline::start(std::vector<DeviceRow> rows, std::span<const StreamHandle> producers, const HostLayout& layout,
                     const std::atomic<bool>* cancelled) {
  if (thread_.joinable()) throw Error::invalid("copies were started before the last ones were waited for");
  plan_.emplace(std::move(rows), layout, limits_);
  usable_piece_.reset();
  if (plan_->packs() && !make_slabs()) plan_->forgo_slab();
  for (const StreamHandle producer : producers) {
    produced_->record(producer);
    copies_->after(*produced_);
    packs_->after(*produced_);
  }
  cancelled_ = cancelled;
  error_ = nullptr;
  ended_ = false;
  try {
    thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
  } catch (...) {
    ended_ = true;
    throw;
  }
}

bool Pipeline::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  if (!ended_signal_.wait_for(lock, timeout, [&] { return ended_; })) return false;
  if (thread_.joinable()) {
    thread_.join();  // it has done its work and only has to end
    plan_.reset();
  }
  if (error_) std::rethrow_exception(error_);
  return true;
}

void Pipeline::run(const std::stop_token& stop) {
  std::exception_ptr error;
  try {
    CopyGroup group;
    size_t turn = 0;
    const auto next_turn = [&]() -> Turn& { return turns_[turn++ % turns_.size()]; };
    while (!stop.stop_requested() && plan_->next(group)) {
      throw_if_cancelled();
      Turn& free = next_turn();
      finish(free);
      if (!wait_for_memory(group, stop)) break;
      queue(group, free);
    }
    for (size_t i = 0; i < turns_.size(); ++i) finish(next_turn());
  } catch (...) {
    error = std::current_exception();
    drain();
  }
  const std::lock_guard lock(mutex_);
  ended_ = true;
  error_ = error;
  ended_signal_.notify_all();
}

void Pipeline::throw_if_cancelled() const {
  if (cancelled_ != nullptr && *cancelled_) throw Error(Error::Kind::cancelled, "the copies were cancelled");
}

// Returns false if the transfer must stop.
bool Pipeline::wait_for_memory(const CopyGroup& group, const std::stop_token& stop) {
  if (!plan_->layout().wait_until_usable) return true;
  for (const FlatCopy& copy : group.flat) {
    if (!wait_for_piece(copy.host, stop)) return false;
  }
  for (const PitchedCopy& copy : group.pitched) {
    if (!wait_for_piece(copy.host, stop)) return false;
  }
  return true;
}

bool Pipeline::wait_for_piece(const std::byte* host, const std::stop_token& stop) {
  constexpr std::chrono::milliseconds kStep{10};  // a cancelled or stopped transfer ends within this time
  const HostLayout& layout = plan_->layout();
  const uint64_t piece = (reinterpret_cast<uintptr_t>(host) - layout.base) / layout.piece_bytes;
  if (piece == usable_piece_) return true;
  while (!layout.wait_until_usable(host, kStep)) {
    if (stop.stop_requested()) return false;
    throw_if_cancelled();
  }
  usable_piece_ = piece;
  return true;
}

void Pipeline::queue(CopyGroup& group, Turn& turn) {
  if (group.packed()) {
    for (FlatCopy& copy : group.flat) copy.device += turn.slab->address();
    packs_->pack(*turn.slab, group.table);
    packs_->record(*turn.staged);
    copies_->after(*turn.staged);
  }
  if (!group.flat.empty()) copies_->copy(group.flat);
  for (const PitchedCopy& copy : group.pitched) copies_->copy(copy);
  copies_->record(*turn.done);
  turn.in_flight = true;
}

// After this, the turn's slab and events can be used again.
void Pipeline::finish(Turn& turn) {
  if (!turn.in_flight) return;
  turn.in_flight = false;
  turn.done->wait();
}

void Pipeline::drain() noexcept {
  for (CopyStream* stream : {packs_.get(), copies_.get()}) {
    try {
      stream->drain();
    } catch (...) {  // the first error is reported, and the stream is empty in any case
    }
  }
  for (Turn& turn : turns_) turn.in_flight = false;
}

}  // namespace vescale_ckpt::device
