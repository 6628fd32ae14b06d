// The precompiled header of the bindings. The compiler needs 25 s for torch's Python headers.
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
