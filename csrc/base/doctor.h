#pragma once

namespace torchrpc {

/// The last sentence of an error about what this machine's network or kernel gives.
inline constexpr char kAskDoctor[] =
    "`python -m torchrpc doctor` shows the addresses and transports that work on this machine";

}  // namespace torchrpc
