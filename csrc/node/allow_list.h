#pragma once

// What callers may have run on a node that does not let them run everything: names, or beginnings of names.
// Threads: any; constant after construction.
//
// A name is "package.module.function" or "package.module.Class" for Python, "aten::add" for a torch operator,
// "__torch__.module.function" for a script function, "cpp_function(name)" for a native one. "package.*" and "aten::*"
// stand for all that begin so.

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"

namespace torchrpc {

class AllowList {
 public:
  explicit AllowList(const std::vector<std::string>& entries);

  /// The entry that allows `name`; empty if none does. An entry that is the name comes before one that is a beginning.
  std::string entryFor(const std::string& name) const;
  /// Throws Error(kNoSuchFunction), naming it and the remedy, unless `list` is null or allows it.
  static void check(const std::shared_ptr<const AllowList>& list, const std::string& name);

 private:
  std::set<std::string> names_;
  std::vector<std::string> beginnings_;
};

using AllowListPtr = std::shared_ptr<const AllowList>;  ///< null: everything may be run

}  // namespace torchrpc
