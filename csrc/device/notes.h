// What the devices of this process refused, in words, for its log. Copies are right without it, but slower.
#pragma once

#include <string>
#include <vector>

namespace vescale_ckpt::device {

// Notes a text, unless it was noted before. Thread-safe.
void note(const std::string& text);

// All texts that were noted so far, in order. Thread-safe.
std::vector<std::string> notes();

}  // namespace vescale_ckpt::device
