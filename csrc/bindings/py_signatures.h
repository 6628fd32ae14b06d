#pragma once

// Makes signatures and error texts of pybind11's functions readable for users. inspect.signature() finds no signature
// in these functions. For a call with wrong arguments, pybind11 lists all signatures and the values of all arguments
// over many lines; the wrappers made here raise an error of one sentence instead. Threads: any, with the GIL.

#include <torch/csrc/utils/pybind.h>

namespace torchrpc::bindings {

/// Replaces the public functions of the extension, and the public methods, constructors and settable attributes of its
/// classes, by wrappers that do the same. The TypeError of a wrapper for wrong arguments is one sentence, and
/// inspect.signature() can read its signature. Call it after everything has been defined.
void makeReadable(pybind11::module_& module);

}  // namespace torchrpc::bindings
