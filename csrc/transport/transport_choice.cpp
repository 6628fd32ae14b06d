#include "transport/transport_choice.h"

#include <cstdlib>

#include "transport/native_transport.h"
#ifndef TORCHRPC_WITHOUT_TENSORPIPE
#include "transport/tensorpipe_transport.h"
#endif

namespace torchrpc {

namespace {

/// "native" or "tensorpipe".
std::string choose(const TransportOptions& options) {
  const bool listed = options.transports || options.channels;
  const bool lists_native = options.transports == std::vector<std::string>{"native"};
  auto kind = options.kind;
  std::string said_by = "the option transport";
  if (kind.empty() && !listed) {
    const char* variable = std::getenv("TORCHRPC_TRANSPORT");
    if (variable && *variable) kind = variable, said_by = "TORCHRPC_TRANSPORT";
  }
  if (!kind.empty() && kind != "auto" && kind != "native" && kind != "tensorpipe") {
    throw Error(
        ErrorCode::kInvalidArgument, said_by + " is '" + kind + "': it can be 'auto', 'native' or 'tensorpipe'");
  }
  if (listed && !lists_native && kind == "native") {
    throw Error(
        ErrorCode::kInvalidArgument,
        "_transports and _channels list TensorPipe's, but the option transport is 'native': leave out one of the two");
  }
  if (listed && !lists_native) return "tensorpipe";
  return kind == "tensorpipe" ? kind : "native";
}

}  // namespace

std::unique_ptr<Transport> makeTransport(TransportOptions options) {
  if (choose(options) == "native") {
    return makeNativeTransport(
        {.host = std::move(options.host),
         .rendezvous_host = std::move(options.rendezvous_host),
         .node_name = std::move(options.node_name),
         .limits = options.limits});
  }
#ifndef TORCHRPC_WITHOUT_TENSORPIPE
  return makeTensorPipeTransport(
      {.transports = std::move(options.transports),
       .channels = std::move(options.channels),
       .host = std::move(options.host),
       .rendezvous_host = std::move(options.rendezvous_host),
       .node_name = std::move(options.node_name),
       .limits = options.limits});
#else
  throw Error(
      ErrorCode::kInvalidArgument,
      "this torchrpc was built without TensorPipe: use the native transport, by TORCHRPC_TRANSPORT=native and no "
      "_transports or _channels");
#endif
}

bool hasTensorPipe() {
#ifndef TORCHRPC_WITHOUT_TENSORPIPE
  return true;
#else
  return false;
#endif
}

}  // namespace torchrpc
