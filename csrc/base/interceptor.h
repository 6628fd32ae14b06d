#pragma once

// Interceptors of calls, as programs see them.

#include "torchrpc/interceptor.h"  // IWYU pragma: export
