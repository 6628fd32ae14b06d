#include "shared.h"

namespace {
int twice(int number) { return 2 * number; }
TORCHRPC_FUNCTION(twice);
}  // namespace
