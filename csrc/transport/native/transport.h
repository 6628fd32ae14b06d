#pragma once

// The native transport: TCP between hosts; Unix sockets and shared memory between workers of one host. It has one
// thread, one listening socket (two where it uses Unix sockets), and one connection for each pair of workers.

#include <memory>

#include "transport/native/options.h"
#include "transport/transport.h"

namespace torchrpc::native {

/// Throws Error(kInvalidArgument) if `options.host` is not an address of this machine, as chooseHostAddress() does, or
/// if `options.encrypt` is set without a secret.
std::unique_ptr<Transport> makeTransport(Options options);

}  // namespace torchrpc::native
