#include "shared.h"

namespace {
int twice(int number) { return number + number; }
TORCHRPC_FUNCTION(twice);
int thrice(int number) { return 3 * number; }
TORCHRPC_FUNCTION_AS("", &thrice);
TORCHRPC_FUNCTION_AS("null", static_cast<int (*)(int)>(nullptr));
}  // namespace
