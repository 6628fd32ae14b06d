#pragma once

#include "transport/transports_under_test.h"
