#pragma once

// Errors are the same inside and outside: the public header has them.

#include "torchrpc/error.h"  // IWYU pragma: export
