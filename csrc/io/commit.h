// Making a small file appear whole or not at all.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace vescale_ckpt {

// Writes `bytes` under a temporary name in `directory`, syncs, renames to `name`, syncs the directory. A reader sees
// the old file or the new one. On any error before the rename the temporary file is removed and the old one stays.
void commit_file(const std::string& directory, const std::string& name, std::span<const std::byte> bytes);

// The same for a file that is complete and synced: `temporary` becomes `path`, both in `directory`.
void move_into_place(const std::string& temporary, const std::string& directory, const std::string& path);

// Throws Error if the directory cannot be synced.
void sync_directory(const std::string& directory);

}  // namespace vescale_ckpt
