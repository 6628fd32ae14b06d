#include "shared.h"

namespace {
int twice(int number) { return number + number; }
TORCHRPC_FUNCTION(twice);
}  // namespace
