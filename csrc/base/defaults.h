#pragma once

// Defaults are the same inside and outside: the public header has them.

#include "torchrpc/defaults.h"  // IWYU pragma: export
