#pragma once

// The names of the functions that callers may run on a node, as names or prefixes of names.
// Threads: any; constant after construction.
//
// A name is "package.module.function" or "package.module.Class" for Python, "aten::add" for a torch operator,
// "__torch__.module.function" for a script function, "cpp_function(name)" for a C++ function. The prefixes "package.*"
// and "aten::*" stand for all names that begin with "package." and "aten::".

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"

namespace torchrpc {

class AllowList {
 public:
  explicit AllowList(const std::vector<std::string>& entries);

  /// The entry that allows `name`, an exact one before a prefix; empty if no entry allows it.
  std::string entryFor(const std::string& name) const;
  /// Throws Error(kNotAllowed), with the name and a remedy, unless `list` is null or allows `name`.
  static void check(const std::shared_ptr<const AllowList>& list, const std::string& name);

 private:
  std::set<std::string> names_;
  std::vector<std::string> prefixes_;
};

using AllowListPtr = std::shared_ptr<const AllowList>;  ///< null: everything is allowed

}  // namespace torchrpc
