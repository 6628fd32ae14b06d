#pragma once

// Texts that are sent with a call, beside its arguments.

#include <map>
#include <string>

namespace torchrpc {

/// Texts by name that are sent with one call, for example an identity, a request number or a tenant.
/// NodeRef::withMetadata() and interceptors set them; Call::metadata() and interceptors read them. They are not passed
/// on to the calls that the function makes. At most 128 texts, of 16 KiB in all; a name has 1 to 256 bytes. Without TLS
/// or a secret they are no more trustworthy than the peer. The names "traceparent" and "tracestate" hold W3C's trace
/// context in its standard form: Python workers that trace with OpenTelemetry send and read them, too.
using Metadata = std::map<std::string, std::string>;

}  // namespace torchrpc
