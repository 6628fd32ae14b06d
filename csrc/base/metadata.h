#pragma once

// Texts that travel with a call, as programs see them.

#include "torchrpc/metadata.h"  // IWYU pragma: export
