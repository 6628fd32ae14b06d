#pragma once

// Error texts for calls with wrong arguments. pybind11 lists all signatures and the values of all arguments over many
// lines; a user gets one sentence instead. Threads: any, with the GIL.

#include <torch/csrc/utils/pybind.h>

namespace torchrpc::bindings {

/// Replaces the public functions of the extension, and the public methods, constructors and settable attributes of its
/// classes, by ones that do the same and whose TypeError for wrong arguments is one sentence. Call it after all have
/// been defined.
void shortenTypeErrors(pybind11::module_& module);

}  // namespace torchrpc::bindings
