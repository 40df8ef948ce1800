// The one seam to accelerators: streams of copies, events, page-locked host memory. A test can fail any call here, and
// a new kind of accelerator is one new implementation.
//
// What is queued on a stream runs later, in order; calls return before. Functions throw Error(device) with the
// operation and what the runtime said. A failure on the device itself is thrown by the next wait. Thread-safe, except
// that a stream and the slabs and events used with it belong to one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "device/pack_table.h"

namespace vescale_ckpt::device {

using DeviceAddress = uint64_t;  // an integer, because nothing on the host may follow it
using StreamHandle = uint64_t;   // a stream of the framework, as the framework names it; 0 is its default one

struct FlatCopy {
  DeviceAddress device;
  std::byte* host;
  uint64_t bytes;
};

// `height` runs of `width` bytes, one every `device_pitch` and every `host_pitch` bytes.
struct PitchedCopy {
  DeviceAddress device;
  std::byte* host;
  uint64_t device_pitch, host_pitch, width, height;
};

// A point in the work of a stream. May be recorded again once nobody waits for the last time.
class Event {
 public:
  virtual ~Event() = default;
  virtual void record(StreamHandle producer) = 0;  // what the framework has queued there until now
  virtual void wait() = 0;                         // returns when the device has passed it
};

// Device memory that small ranges are packed into on their way to the host, with a table of what lies where. One use at
// a time: from CopyStream::pack until an event behind it has passed.
class Slab {
 public:
  virtual ~Slab() = default;
  virtual DeviceAddress address() const = 0;
};

class CopyStream {
 public:
  virtual ~CopyStream() = default;
  virtual void after(const Event& event) = 0;  // what is queued from now on runs after what `event` recorded last
  virtual void record(Event& event) = 0;
  // From the device to the host.
  virtual void copy(std::span<const FlatCopy> copies) = 0;  // in any order among themselves
  virtual void copy(const PitchedCopy& copy) = 0;
  virtual void copy_to_device(std::span<const FlatCopy> copies) = 0;  // in any order among themselves
  // From the places in the table into the slab. Copies the table.
  virtual void pack(Slab& slab, const PackTable& table) = 0;
  virtual void drain() = 0;  // returns when nothing is queued, also where it throws
};

enum class Priority { normal, highest };  // of a stream's kernels among those that wait for the device

class Accelerator {
 public:
  virtual ~Accelerator() = default;
  virtual std::string pci_address() const = 0;  // "0000:3b:00.0"
  virtual bool has_kernel() = 0;                // to pack small ranges with
  virtual std::unique_ptr<CopyStream> make_stream(Priority priority) = 0;
  virtual std::unique_ptr<Event> make_event() = 0;
  // nullptr where there is no kernel to pack with, or no device memory to spare.
  virtual std::unique_ptr<Slab> make_slab(uint64_t bytes) = 0;
  // Copies are fast and really asynchronous only from and to locked memory. Locks it for all accelerators of the
  // runtime; slow: a second for a few GiB. No copy may cross from one locked range into another, or into memory that is
  // not locked.
  virtual void page_lock(std::span<std::byte> memory) = 0;
  virtual void page_unlock(std::byte* memory) = 0;  // the start of a locked range
};

class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;
  virtual int device_count() = 0;
  virtual Accelerator& accelerator(int device) = 0;  // lives as long as the runtime
};

}  // namespace vescale_ckpt::device
