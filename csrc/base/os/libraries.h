#pragma once

// The system's shared libraries, looked for at run time.

#include <dlfcn.h>
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

/// A library that this machine may have. It is never unloaded.
class SharedLibrary {
 public:
  enum class Load {
    kIfNeeded,
    kNever,  ///< only a library that the process has already loaded is found
  };

  SharedLibrary(const std::string& name, int version, Load load = Load::kIfNeeded)
      : handle_(::dlopen(
            libraryFile(name, version).c_str(), RTLD_NOW | RTLD_LOCAL | (load == Load::kNever ? RTLD_NOLOAD : 0))) {}

  /// Sets `function` to the one of that name; null if there is none.
  template <typename Function>
  void find(const char* name, Function*& function) {
    function = handle_ ? reinterpret_cast<Function*>(::dlsym(handle_, name)) : nullptr;
    is_complete_ = is_complete_ && function != nullptr;
  }
  /// Whether the library is there.
  bool isFound() const { return handle_ != nullptr; }
  /// Whether the library is there, and every function that was looked for.
  bool isComplete() const { return handle_ && is_complete_; }

 private:
  void* const handle_;
  bool is_complete_ = true;
};

}  // namespace torchrpc::os
