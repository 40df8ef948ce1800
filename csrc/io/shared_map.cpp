#include "io/shared_map.h"

#include <cerrno>

#include "base/error.h"
#include "base/system.h"

namespace vescale_ckpt::io {

SharedMap::SharedMap(int descriptor, uint64_t bytes) {
  const int64_t address = system::map_shared(descriptor, bytes);
  if (address < 0) throw Error::system("map shared memory", "", 0, static_cast<int>(-address));
  bytes_ = {reinterpret_cast<std::byte*>(static_cast<uintptr_t>(address)), bytes};
}

SharedMap::~SharedMap() {
  system::release_addresses(bytes_.data(), bytes_.size());
}

}  // namespace vescale_ckpt::io
