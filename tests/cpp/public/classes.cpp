// The public classes whose layout programs depend on: tools/check_abi.py reads it from the debug information. Their
// members are classes of torch and of the standard library, which are not compared.

#include <torchrpc/autograd.h>
#include <torchrpc/function.h>
#include <torchrpc/node.h>
#include <torchrpc/optim.h>
#include <torchrpc/struct.h>

namespace torchrpc {

/// Exported, so that all that it names is part of the interface.
__attribute__((visibility("default"))) void publicClasses(
    Node&, NodeRef&, NodeOptions&, TlsOptions&, MessageLimits&, CallerQuota&, AllowedFunctions&, MemberHandler&,
    Callable&, Destination&, Call&, Future<int>&, RRef<int>&, Error&, WorkerInfo&, RetryPolicy&, Timeout&, Duration&,
    AutogradContext&, OutgoingCall&, IncomingCall&, Interceptor&, Metadata&, NodeMetrics&, CallMetrics&, HealthOptions&,
    DeviceOptions&, FunctionOptions&, FunctionKind, CallMetrics::Side, DistributedOptimizer&,
    DistributedOptimizer::Settings&, ParamGroup&, detail::Outcome&, detail::Promise&, detail::Numbers&, ErrorCode,
    MemberChange, BackwardMode, Callable::Kind) {}

}  // namespace torchrpc
