// Keeps texts about what the devices of this process refused, for its log. Copies are then correct, but slower.
#pragma once

#include <string>
#include <vector>

namespace vescale_ckpt::device {

// Notes a text once. Thread-safe.
void note(const std::string& text);

// Returns all texts in order. Thread-safe.
std::vector<std::string> notes();

}  // namespace vescale_ckpt::device
