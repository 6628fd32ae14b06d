#pragma once

// The parts of torchrpc._C; one file each.

#include <torch/csrc/utils/pybind.h>

namespace torchrpc::bindings {

void bindErrors(pybind11::module_& module);
void bindFutures(pybind11::module_& module);
void bindAgent(pybind11::module_& module);
void bindRRef(pybind11::module_& module);
void bindCalls(pybind11::module_& module);
void bindScriptOps(pybind11::module_& module);
void bindFaulty(pybind11::module_& module);
void bindAutograd(pybind11::module_& module);
void bindProfiling(pybind11::module_& module);
void bindOptim(pybind11::module_& module);

}  // namespace torchrpc::bindings
