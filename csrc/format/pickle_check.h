// Checks a pickle, before anything is built from it, for what a restricted unpickler cannot refuse: much memory for few
// bytes, nesting deeper than a stack, and changes to classes themselves.
//
// It follows the opcodes without building anything: linear in the input, no allocation beyond a few bytes an opcode.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace vescale_ckpt::format {

// Returns what is wrong with the pickle; an empty string if nothing is (an unpickler may still refuse what it imports,
// or find it malformed). With `storages` it may refer to what lies outside of it, as torch's pickles do to storages.
// `end`, if given, is set to where the pickle ends: unpicklers do not look at what follows.
std::string check_pickle(std::span<const std::byte> pickle, bool storages = false, size_t* end = nullptr);

}  // namespace vescale_ckpt::format
