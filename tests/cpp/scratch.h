// A directory of its own for each test, and injected faults that never outlive one.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <string_view>

#include "base/system.h"

namespace vescale_ckpt {

class ScratchTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = std::filesystem::temp_directory_path() / "vescale_ckpt_test.XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr) << name;
    directory_ = name;
  }

  void TearDown() override {
    system::clear_faults();
    if (!directory_.empty()) std::filesystem::remove_all(directory_);
  }

  std::string directory() const { return directory_; }
  std::string path(std::string_view name) const { return directory_ / name; }

  std::set<std::string> files() const {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
      names.insert(entry.path().filename());
    }
    return names;
  }

 private:
  std::filesystem::path directory_;
};

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  std::string content(file ? static_cast<size_t>(file.tellg()) : 0, '\0');
  file.seekg(0);
  file.read(content.data(), std::ssize(content));
  return content;
}

inline void write_file(const std::string& path, std::string_view content) {
  std::filesystem::remove(path);  // ext4 writes a file that is emptied and filled again to the disk at once
  std::ofstream(path, std::ios::binary | std::ios::trunc).write(content.data(), std::ssize(content));
}

// A fault that is gone at the end of its scope.
class ArmedFault {
 public:
  ArmedFault(Call call, int error, uint64_t skip = 0, uint64_t times = 1) {
    system::clear_faults();
    system::inject_fault(call, error, skip, times);
  }
  ~ArmedFault() { system::clear_faults(); }
  ArmedFault(const ArmedFault&) = delete;
  ArmedFault& operator=(const ArmedFault&) = delete;
};

class LargePages {
 public:
  LargePages() { system::pretend_page_bytes(64 << 10); }
  ~LargePages() { system::pretend_page_bytes(0); }
  LargePages(const LargePages&) = delete;
  LargePages& operator=(const LargePages&) = delete;
};

}  // namespace vescale_ckpt
