#pragma once

namespace torchrpc {

/// The last sentence of errors about the network or the kernel of this machine.
inline constexpr char kAskDoctor[] =
    "`python -m torchrpc doctor` shows the addresses and transports that work on this machine";

}  // namespace torchrpc
