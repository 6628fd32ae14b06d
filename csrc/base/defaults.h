#pragma once

// Default values: the core uses those of the public header.

#include "torchrpc/defaults.h"  // IWYU pragma: export
