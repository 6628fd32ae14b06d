#pragma once

// The names of C++ types for humans to read.
// Threads: any.

#include <string>
#include <typeinfo>

namespace torchrpc {

/// The name of the type as a program writes it, with all template arguments.
std::string demangledName(const std::type_info& type);

}  // namespace torchrpc
