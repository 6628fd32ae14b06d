#pragma once

// Texts that are sent with a call: the core uses the public header.

#include "torchrpc/metadata.h"  // IWYU pragma: export
