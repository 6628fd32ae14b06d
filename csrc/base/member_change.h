#pragma once

// Changes of the members of a group: the core uses the public header.

#include "torchrpc/member_change.h"  // IWYU pragma: export
