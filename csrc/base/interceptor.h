#pragma once

// Interceptors of calls: the core uses the public header.

#include "torchrpc/interceptor.h"  // IWYU pragma: export
