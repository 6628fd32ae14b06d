#pragma once

// The names of the system's shared libraries.

#include <string>

namespace torchrpc::os {

/// The file of the library of that name and version: "libcrypto.so.3".
inline std::string libraryFile(const std::string& name, int version) {
#ifdef __APPLE__
  return "lib" + name + "." + std::to_string(version) + ".dylib";
#else
  return "lib" + name + ".so." + std::to_string(version);
#endif
}

}  // namespace torchrpc::os
