#include "bindings/py_gil.h"

namespace torchrpc::bindings {

namespace {

struct ThreadState {
  PyThreadState* saved = nullptr;

  ~ThreadState() {
    if (!saved || !Py_IsInitialized() || _Py_IsFinalizing()) return;
    PyEval_RestoreThread(saved);
    PyGILState_Release(PyGILState_UNLOCKED);
  }
};

}  // namespace

void keepPythonState() {
  thread_local ThreadState state;
  if (state.saved || PyGILState_GetThisThreadState()) return;
  PyGILState_Ensure();
  state.saved = PyEval_SaveThread();
}

}  // namespace torchrpc::bindings
