// The Python extension torchrpc._C. Its stub is python/torchrpc/_C.pyi; a test compares the two.

#include "bindings/bind.h"
#include "bindings/py_signatures.h"

PYBIND11_MODULE(_C, module) {
  using namespace torchrpc::bindings;
  module.doc() = "The C++ core of torchrpc. Private: use torchrpc.rpc.";
  bindErrors(module);
  bindFutures(module);
  bindOptions(module);
  bindAgent(module);
  bindRRef(module);
  bindCalls(module);
  bindCoroutines(module);
  bindScriptOps(module);
  bindFaulty(module);
  bindAutograd(module);
  bindProfiling(module);
  bindMetrics(module);
  bindTracing(module);
  bindOptim(module);
  bindIdentities(module);
  bindObserve(module);
  bindLog(module);
  makeReadable(module);
}
