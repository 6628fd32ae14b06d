#pragma once

// Forwards to the new name until all tests include that.

#include "transport/transports_under_test.h"
