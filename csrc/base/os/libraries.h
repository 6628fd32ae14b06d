#pragma once

// Loads shared libraries of the system at run time.

#include <dlfcn.h>
#include <string>

namespace torchrpc::os {

/// Returns the file name of a library, such as "libcrypto.so.3".
inline std::string libraryFile(const std::string& name, int version) {
#ifdef __APPLE__
  return "lib" + name + "." + std::to_string(version) + ".dylib";
#else
  return "lib" + name + ".so." + std::to_string(version);
#endif
}

/// A library that this machine may lack. It is never unloaded.
class SharedLibrary {
 public:
  enum class Load {
    kIfNeeded,
    kNever,  ///< finds the library only if the process has already loaded it
  };

  SharedLibrary(const std::string& name, int version, Load load = Load::kIfNeeded)
      : handle_(::dlopen(
            libraryFile(name, version).c_str(), RTLD_NOW | RTLD_LOCAL | (load == Load::kNever ? RTLD_NOLOAD : 0))) {}

  /// Sets `function` to the function of that name, or to null if there is none.
  template <typename Function>
  void find(const char* name, Function*& function) {
    function = handle_ ? reinterpret_cast<Function*>(::dlsym(handle_, name)) : nullptr;
    is_complete_ = is_complete_ && function != nullptr;
  }
  /// Whether the library was found.
  bool isFound() const { return handle_ != nullptr; }
  /// Whether the library was found, and every function that was passed to find().
  bool isComplete() const { return handle_ && is_complete_; }

 private:
  void* const handle_;
  bool is_complete_ = true;
};

}  // namespace torchrpc::os
