#include "device/notes.h"

#include <algorithm>
#include <mutex>

namespace vescale_ckpt::device {
namespace {

struct Notes {
  std::mutex mutex;
  std::vector<std::string> texts;
};

// Leaked on purpose: threads may copy while static destructors run.
Notes& all() {
  static Notes& notes = *new Notes;
  return notes;
}

}  // namespace

void note(const std::string& text) {
  Notes& notes = all();
  const std::lock_guard lock(notes.mutex);
  if (std::ranges::find(notes.texts, text) == notes.texts.end()) notes.texts.push_back(text);
}

std::vector<std::string> notes() {
  Notes& notes = all();
  const std::lock_guard lock(notes.mutex);
  return notes.texts;
}

}  // namespace vescale_ckpt::device
