#pragma once

// Texts that travel with a call, beside its arguments.

#include <map>
#include <string>

namespace torchrpc {

/// Texts by name, which travel with one call: an identity, the number of a request, a tenant. NodeRef::withMetadata()
/// and interceptors send them, Call::metadata() and interceptors read them; they do not go on to the calls that the
/// function makes. At most 128, of 16 KiB in all; a name has 1 to 256 bytes. Without TLS or a secret they are no
/// more trustworthy than the peer. The names "traceparent" and "tracestate" are those of W3C's trace context, in the
/// form that it prescribes: Python workers that trace with OpenTelemetry send and read them, too.
using Metadata = std::map<std::string, std::string>;

}  // namespace torchrpc
