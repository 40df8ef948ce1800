// The one interface to accelerators: streams of copies, events, page-locked host memory. A test can fail any call here,
// and a new kind of accelerator is one new implementation.
//
// Work on a stream is queued and runs later, in order; calls return before. Functions throw Error(device) with the
// operation and the runtime's text. The next wait throws a failure on the device itself. Thread-safe, except that a
// stream and its slabs and events belong to one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "device/pack_table.h"
#include "device/word_table.h"

namespace vescale_ckpt::device {

using DeviceAddress = uint64_t;  // an integer, because the host may not dereference it
using StreamHandle = uint64_t;   // the framework's handle of its stream; 0: its default stream

struct FlatCopy {
  DeviceAddress device;
  std::byte* host;
  uint64_t bytes;
};

// A copy of `height` runs of `width` bytes. The pitches are the distances between two runs.
struct PitchedCopy {
  DeviceAddress device;
  std::byte* host;
  uint64_t device_pitch, host_pitch, width, height;
};

// A point in the work of a stream. It may be recorded again when nobody waits for it.
class Event {
 public:
  virtual ~Event() = default;
  virtual void record(StreamHandle producer) = 0;  // marks the end of the framework's queued work
  virtual void wait() = 0;                         // returns when the device has passed the point
};

// Device memory for what a kernel makes, with memory for the kernel's table: small ranges are packed into it before the
// copy to the host, or sums of words are added up in it. It has one use at a time: from CopyStream::pack until an event
// behind it has passed.
class Slab {
 public:
  virtual ~Slab() = default;
  virtual DeviceAddress address() const = 0;
  virtual DeviceAddress table() const = 0;  // device address of the table
};

class CopyStream {
 public:
  virtual ~CopyStream() = default;
  virtual void after(const Event& event) = 0;  // later work on this stream runs after the point of `event`
  virtual void record(Event& event) = 0;
  // Copies from the device to the host.
  virtual void copy(std::span<const FlatCopy> copies) = 0;  // they may run in any order
  virtual void copy(const PitchedCopy& copy) = 0;
  virtual void copy_to_device(std::span<const FlatCopy> copies) = 0;  // they may run in any order
  // Copies the ranges in the table into the slab. Keeps its own copy of the table.
  virtual void pack(Slab& slab, const PackTable& table) = 0;
  // Returns the sum of each row of the table. The slab has room for as many WordSum. Its table has `powers` first.
  virtual std::vector<WordSum> sum_words(Slab& slab, const WordTable& table, const WordPowers& powers) = 0;
  virtual void drain() = 0;  // nothing is queued when it returns or throws
};

enum class Priority { normal, highest };  // priority of a stream's kernels among all that wait for the device

class Accelerator {
 public:
  virtual ~Accelerator() = default;
  virtual std::string pci_address() const = 0;  // "0000:3b:00.0"
  virtual std::unique_ptr<CopyStream> make_stream(Priority priority) = 0;
  virtual std::unique_ptr<Event> make_event() = 0;
  // Returns nullptr if there are no kernels, or no free device memory.
  virtual std::unique_ptr<Slab> make_slab(uint64_t bytes) = 0;
  // Locks memory for all accelerators of the runtime. Copies are fast and asynchronous only from and to locked memory.
  // This is slow: a few GiB take a second. No copy may cross from one locked range into another, or into memory that is
  // not locked.
  virtual void page_lock(std::span<std::byte> memory) = 0;
  virtual void page_unlock(std::byte* memory) = 0;  // `memory` is the start of a locked range
};

class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;
  virtual Accelerator& accelerator(int device) = 0;  // it lives as long as the runtime
};

}  // namespace vescale_ckpt::device
