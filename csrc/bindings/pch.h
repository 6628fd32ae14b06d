// Precompiled for the bindings: torch's Python headers take 25 s to read.
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
