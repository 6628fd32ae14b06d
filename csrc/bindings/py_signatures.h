#pragma once

// Signatures and error texts as users read them. inspect.signature() finds none in pybind11's functions. For a call
// with wrong arguments, pybind11 lists all signatures and the values of all arguments over many lines; a user gets one
// sentence instead. Threads: any, with the GIL.

#include <torch/csrc/utils/pybind.h>

namespace torchrpc::bindings {

/// Replaces the public functions of the extension, and the public methods, constructors and settable attributes of its
/// classes, by ones that do the same, whose TypeError for wrong arguments is one sentence, and whose signature
/// inspect.signature() can read. Call it after all have been defined.
void makeReadable(pybind11::module_& module);

}  // namespace torchrpc::bindings
