#pragma once

// How a member of a group changes: the public header.

#include "torchrpc/member_change.h"  // IWYU pragma: export
