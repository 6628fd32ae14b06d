// The devices of a program without Python that links `simulated_devices`; Python has sim.py for the same.
#pragma once

namespace simulated {

// Makes the devices known to torch as "sim". Call it first in main().
void load();

}  // namespace simulated
