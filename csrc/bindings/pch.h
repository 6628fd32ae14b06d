// The precompiled header of the bindings.
#include <ATen/core/function_schema.h>
#include <torch/csrc/Stream.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/schema_matching.h>
#include <torch/csrc/jit/python/module_python.h>
#include <torch/csrc/jit/python/python_custom_class.h>
#include <torch/csrc/jit/python/python_tracer.h>
#include <torch/csrc/jit/runtime/operator.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/python_arg_parser.h>

// With USE_DISTRIBUTED, this header includes those of torch's own RPC, and they include all operators, which would
// double what the compiler reads. It does not use them. The headers above are those in which that macro matters.
#pragma push_macro("USE_DISTRIBUTED")
#undef USE_DISTRIBUTED
#include <torch/csrc/jit/python/pybind_utils.h>
#pragma pop_macro("USE_DISTRIBUTED")
