#pragma once

// The options with which a node starts.

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "torchrpc/defaults.h"
#include "torchrpc/interceptor.h"
#include "torchrpc/member_change.h"
#include "torchrpc/timeout.h"
#include "torchrpc/worker_info.h"

namespace torchrpc {
inline namespace v1 {

class FunctionRegistry;

/// Called with a member of the group and how it has changed.
using MemberHandler = std::function<void(const WorkerInfo&, MemberChange)>;

/// The functions that some workers may run on a node.
struct AllowedFunctions {
  std::string workers{};  ///< a pattern of names: `*` for any text, `?` for any character, `[...]` for one of several
  std::optional<std::vector<std::string>> functions{};  ///< their names or prefixes; empty optional: all
};

/// The largest messages that a worker sends and receives. Set the same limits on all workers of a group: a sender
/// refuses a message above its own limits, but a receiver closes the connection when a message exceeds its limits.
struct MessageLimits {
  uint64_t message_bytes = uint64_t{1} << 40;  ///< all parts together
  uint64_t head_bytes = uint64_t{1} << 32;     ///< everything but large tensors
  uint64_t tensor_bytes = uint64_t{1} << 40;   ///< one tensor
  uint32_t tensors = 1u << 20;                 ///< their number
};

/// Limits what each caller whose name matches a pattern may use of a worker at a time. Requests beyond a limit are
/// answered with kQuotaExceeded. Empty: no limit.
struct CallerQuota {
  std::string callers{};                  ///< a pattern of names, as in AllowedFunctions
  std::optional<uint64_t> calls{};        ///< requests that have arrived and are not answered
  std::optional<uint64_t> bytes{};        ///< of these requests
  std::optional<uint64_t> rrefs{};        ///< RRefs that the caller has made here
  std::optional<uint64_t> connections{};  ///< connections that the caller has opened
};

/// The PEM files with which a worker proves its name over TLS 1.3. The worker reads them again when they change. An
/// empty option has the value of its environment variable: TORCHRPC_TLS_CERTIFICATE, TORCHRPC_TLS_KEY, TORCHRPC_TLS_CA,
/// TORCHRPC_TLS_NAMES. Needs OpenSSL 3 at run time.
struct TlsOptions {
  std::string certificate{};  ///< path: the worker's certificate, then the intermediate certificates
  std::string key{};          ///< path: its private key, without a passphrase
  std::string ca{};           ///< path: the certificates of the authorities, and their revocation lists, if any
  /// The forms in which a certificate may name a worker, separated by spaces. Each is a DNS name or a URI of the
  /// subject alternative name; {name} stands for the worker's name, {base} for the name without the number at its end.
  /// Default: "{name}".
  std::string names{};
};

/// Health checks over HTTP, for Kubernetes, load balancers and others. GET /healthz returns 200 while the worker serves
/// calls, and 503 with a reason while its group forms, while it shuts down, and when `check` returns a reason. Anybody
/// who reaches the port may ask.
struct HealthOptions {
  /// The address to listen on: a port ("8080") on all addresses of this host, or "127.0.0.1:8080" with a numeric host.
  /// Port 0: any free port, see NodeRef::healthAddress(). Empty: no health checks.
  std::string address{};
  /// Your own check. Returns the reason why this worker should receive no calls, or an empty text if it should. Called
  /// for each request of the health check, one at a time, on a thread of its own. An exception counts as a reason, too.
  /// May be empty.
  std::function<std::string()> check{};
};

/// The device maps for tensors of accelerators (CUDA and others), and the devices that this worker uses. If neither
/// this worker nor a worker that calls it has maps, only CPU tensors can be sent. A device without an index is the
/// first device of its type. docs/devices.md describes when a tensor may be used.
struct DeviceOptions {
  /// Pairs of a device of this worker and a device of the callee: `{{{c10::kCUDA, 0}, {c10::kCUDA, 1}}}`. One to one;
  /// one of the two may be the CPU. Results of calls use the reversed map.
  using Map = std::vector<std::pair<c10::Device, c10::Device>>;
  std::map<std::string, Map> maps{};  ///< by callee, which may be this worker
  /// Whether tensors go to the receiver's device of the same name, in calls between any two workers of the group
  /// without a map for the callee.
  bool identity = false;
  /// The accelerators that this worker uses. Each function that it serves has its own streams on them. Empty: those
  /// that the maps of all workers name; if any worker sets `identity`, all accelerators.
  std::vector<c10::Device> used{};
  /// Whether workers on this machine use the memory of this worker's tensors without a copy, if they can access it.
  /// Neither side may change such a tensor while the other uses it, and this worker must not end while others use its
  /// tensors.
  bool share = false;
};

/// The options of a node. The environment variables are those of torchrun.
struct NodeOptions {
  /// Unique in the group: letters, digits, `_`, `:`, `-`, `.`. Empty: "worker" and the rank.
  std::string name{};
  int32_t rank = kNoWorker;  ///< from 0; kNoWorker: the value of RANK, or the launcher's value
  /// Number of workers, Python workers included; 0: the value of WORLD_SIZE, or the launcher's value.
  int32_t world_size = 0;
  /// The URL at which the group meets: "tcp://host:port" (rank 0 listens there), "env://" (the address is in
  /// MASTER_ADDR and MASTER_PORT, or comes from the launcher), or "file:///path" of a new file on a file system that
  /// all workers share. The same as init_method in Python.
  std::string rendezvous = kDefaultRendezvous;
  size_t threads = kDefaultThreads;            ///< number of functions that can run at once
  Timeout timeout = kDefaultTimeout;           ///< of calls without a time-out of their own; kNoLimit: none
  Timeout init_timeout = kDefaultInitTimeout;  ///< for the group to form; kNoLimit: none
  std::string transport{};                     ///< "native", "tcp", "tensorpipe", "ucx" or "auto"; as in Python
  /// The secret by which workers authenticate each other when they connect: at least 16 bytes, the same on all workers.
  /// Empty: the secret in TORCHRPC_SECRET_FILE or TORCHRPC_SECRET; else, if the group meets at a loopback address, a
  /// secret from a key that only processes of this user can read; else a random secret, distributed by the rendezvous.
  std::string secret{};
  /// The file with the identity of this worker: its certificate, and the group's secret. `torchrpc keygen` makes it.
  /// Empty: the value of TORCHRPC_IDENTITY_FILE, else no identity. Without identities, workers do not verify each
  /// other's names.
  std::string identity{};
  TlsOptions tls{};  ///< another way to prove names, and to encrypt TCP; if one worker uses TLS, all must
  /// Whether connections over TCP are encrypted: "on"; "off"; or "auto", which means "on" if a secret was given. The
  /// same on all workers. Empty: the value of TORCHRPC_ENCRYPTION, else "auto".
  std::string encryption{};
  /// The functions of this node, besides those that are registered for all nodes of the process: see
  /// torchrpc/function.h. Null: none.
  std::shared_ptr<FunctionRegistry> functions{};
  /// The functions that other workers may run here; empty optional: all. The entries are names of operators
  /// ("aten::add") and registered functions ("cpp_function(name)"), or prefixes of such names ("aten::*",
  /// "cpp_function(search.*)").
  std::optional<std::vector<std::string>> allowed_functions{};
  /// The functions that the workers whose names match a pattern, such as "client-*", may run here. The first pattern
  /// that matches a caller decides. If no pattern matches it, allowed_functions decides; if that is not set, the caller
  /// may run nothing. Needs workers that prove their names: identities or TLS.
  std::vector<AllowedFunctions> allowed_functions_of{};
  /// The port to listen on ("29600"), or a range of which the first free port is used ("29600-29700"). Empty: the value
  /// of TORCHRPC_PORT, else any free port.
  std::string port{};
  /// The limit on the bytes of calls that wait for a thread here, and on the bytes of results that wait for one caller.
  /// Beyond it, callers are held up. Empty: the value of TORCHRPC_MAX_QUEUED_BYTES, else kDefaultMaxQueuedBytes.
  std::optional<size_t> max_queued_bytes{};
  /// The time after the answer to a call with a key during which the call does not run again: see NodeRef::withKey().
  /// Empty: the value of TORCHRPC_IDEMPOTENCY_WINDOW, in seconds, else ten minutes.
  std::optional<Duration> idempotency_window{};
  /// A worker with outstanding requests (a reply, a value, its end at the end of the group) that stays silent this long
  /// counts as lost; a function may run for longer. kNoLimit or 0: only a broken connection means a lost worker. Empty:
  /// the value of TORCHRPC_LIVENESS_TIMEOUT, in seconds, else 30 s.
  std::optional<Duration> liveness_timeout{};
  /// Whether calls send their deadlines to the callees. Then the calls that a function makes end no later than the call
  /// that it serves: see Call::timeLeft(). A call that is made in a function whose caller has sent a deadline sends its
  /// own, whatever the value of this option.
  bool propagate_deadlines = false;
  /// Whether a call of this node that times out is cancelled on its callee, as by Future::cancel().
  bool cancel_on_timeout = true;
  /// Whether calls are counted by function and peer, for tools and Prometheus: see docs/metrics.md. Empty: the value of
  /// TORCHRPC_METRICS, else false.
  std::optional<bool> metrics{};
  /// Calls, made or served by this worker, that take longer than this are logged, and logged again when they have
  /// ended; kNoLimit or 0: none. Empty: the value of TORCHRPC_SLOW_CALL_S, in seconds, else none.
  std::optional<Duration> slow_call{};
  MessageLimits limits{};             ///< of messages, in both directions
  std::vector<CallerQuota> quotas{};  ///< the first that matches a caller's name applies; none: no limit
  /// A file to which a line of JSON is appended for each call that this worker serves or refuses; made if it does not
  /// exist, readable by its owner only. Empty: none.
  std::string audit_log{};
  /// The number of calls that may be served at a time, for all callers together. Further calls are answered with
  /// kQuotaExceeded. Empty: no limit. `quotas` limits each caller.
  std::optional<uint64_t> max_calls{};
  /// The handler of NodeRef::onMemberChange(), from the start on; may be empty.
  MemberHandler on_member_change{};
  /// The interceptors of the calls of this node. The first interceptor is the first to see the begin of a call and the
  /// last to see its end.
  std::vector<std::shared_ptr<Interceptor>> interceptors{};
  HealthOptions health{};   ///< health checks over HTTP
  DeviceOptions devices{};  ///< for tensors of accelerators; must be consistent on all workers
  /// Ends the wait for the group: when a stop is requested while the constructor of the node waits, it throws
  /// Error(kCancelled). A request after that counts as NodeRef::requestStop().
  std::stop_token stop{};
};

}  // namespace v1
}  // namespace torchrpc
