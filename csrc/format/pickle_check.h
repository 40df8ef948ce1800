// Looks at a pickle before anything is built from it, for what a restricted unpickler cannot refuse: memory taken for
// nothing, nesting deeper than a stack, and changes to classes themselves.
//
// It follows the opcodes without building anything: linear in the input, no allocation beyond a few bytes an opcode.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace vescale_ckpt::format {

// Where the pickle ends is put into `end`, if given: unpicklers do not look at what follows.
// An empty string if the pickle is harmless in this sense (it may still be refused by what it imports, or be
// malformed in ways that the unpickler reports); else what is wrong with it.
// With `storages` it may also refer to what lies outside of it, as torch's do to their storages.
std::string check_pickle(std::span<const std::byte> pickle, bool storages = false, size_t* end = nullptr);

}  // namespace vescale_ckpt::format
