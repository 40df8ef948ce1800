// Checks a pickle before anything is built from it. It refuses what a restricted unpickler cannot refuse: much memory
// for few bytes, too deep nesting, and changes of classes. Which classes may be built at all is the unpickler's
// question (vescale_ckpt/_state/trusted_types.py).
//
// It follows the opcodes without building values. It is linear in the input, and allocates a few bytes an opcode.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace vescale_ckpt::format {

// Returns what is wrong with the pickle; empty if nothing is. An unpickler may still refuse its imports, or find it
// malformed. With `storages` the pickle may refer to persistent ids, as torch's pickles do to storages. `end`, if
// given, is set to the end of the pickle: unpicklers do not read further.
std::string check_pickle(std::span<const std::byte> pickle, bool storages = false, size_t* end = nullptr);

}  // namespace vescale_ckpt::format
