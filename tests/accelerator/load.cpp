#include "load.h"

#include <c10/core/DeviceType.h>

#include <cstdlib>

#include "runtime.h"

namespace simulated {

void load() {
  c10::register_privateuse1_backend("sim");
  std::atexit(&stop);  // no thread may use torch while the process destroys it
}

}  // namespace simulated
