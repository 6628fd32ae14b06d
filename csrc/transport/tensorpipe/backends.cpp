// Note [Choice of backends]
// Measured between two processes of one host (echo, µs per round trip; "payload": without a channel):
//             shm                              uv
//   bytes     payload  basic    cma            payload  basic    cma      mpt_uv
//   64 Ki     21       35       65             94       125      167      330
//   1 Mi      124      146      259            497      384      383      1,160
//   64 Mi     15 ms    14 ms    20 ms          47 ms    47 ms    18 ms    62 ms
// A pipe uses 14 descriptors over shm (21 with a channel) and 3 over uv (4 with a channel); mpt_uv uses 28 per
// process. So with shm, no channel justifies its descriptors. With uv, cma is faster between processes of one host, and
// otherwise no channel is. mpt_uv is used only if the user lists it (for several network cards). shm remains faster
// than uv even with four times as many processes as cores, although its thread never sleeps.

#include "transport/tensorpipe/backends.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <pthread.h>
#include <signal.h>

#include "base/doctor.h"
#include "base/error.h"
#include "base/log.h"
#include "transport/host_address.h"
#include "transport/tensorpipe/transport.h"

namespace torchrpc {

namespace {

constexpr size_t kMptLanes = 4;

template <typename TContext>
struct BackendKind {
  const char* name;
  const char* when_unusable;
  std::function<std::shared_ptr<TContext>(const std::string& address)> make;
};

using TransportBackendKind = BackendKind<tensorpipe::transport::Context>;
using ChannelBackendKind = BackendKind<tensorpipe::channel::Context>;

std::shared_ptr<tensorpipe::channel::Context> makeMptUv(const std::string& address) {
  std::vector<std::shared_ptr<tensorpipe::transport::Context>> contexts;
  std::vector<std::shared_ptr<tensorpipe::transport::Listener>> listeners;
  for (size_t lane = 0; lane < kMptLanes; ++lane) {
    contexts.push_back(tensorpipe::transport::uv::create());
    listeners.push_back(contexts.back()->listen(bracketed(address)));
  }
  return tensorpipe::channel::mpt::create(std::move(contexts), std::move(listeners));
}

/// Returns TensorPipe's transports in order of preference.
const std::vector<TransportBackendKind>& transportBackendKinds() {
  static const std::vector<TransportBackendKind> kinds = {
      {"shm", "shared memory cannot be set up here", [](auto&) { return tensorpipe::transport::shm::create(); }},
      {"ibv", "no InfiniBand device that works", [](auto&) { return tensorpipe::transport::ibv::create(); }},
      {"uv", "no event loop could be made", [](auto&) { return tensorpipe::transport::uv::create(); }},
  };
  return kinds;
}

const std::vector<ChannelBackendKind>& channelBackendKinds() {
  // TensorPipe's own test of cma makes the system call, so it detects that seccomp or Yama forbids the call.
  static const std::vector<ChannelBackendKind> kinds = {
      {"cma", "process_vm_readv is not permitted here (seccomp, Yama or the container's policy)",
       [](auto&) { return tensorpipe::channel::cma::create(); }},
      {"mpt_uv", "no event loop could be made", makeMptUv},
      {"basic", "", [](auto&) { return tensorpipe::channel::basic::create(); }},
      {"xth", "this LibTorch was built without it", [](auto&) { return nullptr; }},
  };
  return kinds;
}

/// Blocks SIGPIPE for the threads that start during its lifetime: a thread inherits the signal mask of its creator.
/// TensorPipe's threads write to sockets without MSG_NOSIGNAL. If the peer has closed its end, SIGPIPE would kill the
/// process, unless the process ignores it, as Python does.
class SigpipeBlocked {
 public:
  SigpipeBlocked() {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &set, &before_);
  }
  ~SigpipeBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SigpipeBlocked(const SigpipeBlocked&) = delete;
  SigpipeBlocked& operator=(const SigpipeBlocked&) = delete;

 private:
  sigset_t before_;
};

/// Makes the context and starts its threads. If that fails, returns null and sets `reason`.
template <typename TContext>
std::shared_ptr<TContext> tryMake(const BackendKind<TContext>& kind, const std::string& address, std::string& reason) {
  const SigpipeBlocked blocked;
  try {
    auto context = kind.make(address);
    if (context && context->isViable()) return context;
    reason = kind.when_unusable;
  } catch (const std::exception& error) {
    reason = error.what();
  }
  return nullptr;
}

template <typename TContext>
std::string joinNames(const std::vector<BackendKind<TContext>>& kinds) {
  std::string text;
  for (const auto& kind : kinds) text += (text.empty() ? "" : ", ") + std::string(kind.name);
  return text;
}

std::string joinNames(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "'" : ", '") + name + "'";
  return text.empty() ? "an empty list" : text;
}

/// Makes the usable backends of a list. Logs a warning about the other names.
template <typename TContext>
std::vector<Backend<TContext>> makeListed(
    const char* type, const std::vector<BackendKind<TContext>>& kinds, const std::vector<std::string>& names,
    const std::string& address) {
  std::vector<Backend<TContext>> made;
  std::string reasons;
  for (const auto& name : names) {
    if (std::any_of(made.begin(), made.end(), [&](auto& backend) { return backend.name == name; })) continue;
    auto kind = std::find_if(kinds.begin(), kinds.end(), [&](auto& kind) { return kind.name == name; });
    std::string reason = "there is none of that name";
    if (auto context = kind == kinds.end() ? nullptr : tryMake(*kind, address, reason)) {
      made.push_back({name, std::move(context)});
      continue;
    }
    reasons += (reasons.empty() ? "" : "; ") + name + ": " + reason;
  }
  if (made.empty()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        std::string("no usable ") + type + " in the option " + type + "s: it gives " + joinNames(names) +
            (reasons.empty() ? "" : " (" + reasons + ")") + ", there are " + joinNames(kinds) + ". " + kAskDoctor);
  }
  if (!reasons.empty())
    log(LogLevel::kWarning, std::string("ignores ") + type + "s that cannot be used here: " + reasons);
  return made;
}

template <typename TContext>
std::vector<BackendProbe> probe(const std::vector<BackendKind<TContext>>& kinds) {
  std::vector<BackendProbe> probes;
  for (const auto& kind : kinds) {
    BackendProbe result{kind.name, false, {}};
    if (auto context = tryMake(kind, "127.0.0.1", result.reason)) {
      result.usable = true;
      context->close();
      context->join();
    }
    probes.push_back(std::move(result));
  }
  return probes;
}

}  // namespace

std::vector<TransportBackend> makeTransports(const std::optional<std::vector<std::string>>& names) {
  if (names) return makeListed("transport", transportBackendKinds(), *names, "");
  std::vector<TransportBackend> made;
  std::string ignored;
  for (const auto& kind : transportBackendKinds()) {
    if (auto context = tryMake(kind, "", ignored)) made.push_back({kind.name, std::move(context)});
  }
  if (made.empty()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        std::string("none of TensorPipe's transports works on this machine") + ". " + kAskDoctor);
  }
  return made;
}

std::vector<ChannelBackend> makeChannels(
    const std::optional<std::vector<std::string>>& names, const std::vector<TransportBackend>& transports,
    const std::string& address) {
  std::vector<ChannelBackend> made;
  if (names) {
    if (!names->empty()) made = makeListed("channel", channelBackendKinds(), *names, address);
  } else if (std::none_of(transports.begin(), transports.end(), [](auto& t) { return t.name == "shm"; })) {
    std::string ignored;
    if (auto cma = tryMake(channelBackendKinds().front(), address, ignored)) made.push_back({"cma", std::move(cma)});
  }
  const bool has_basic = std::any_of(made.begin(), made.end(), [](auto& channel) { return channel.name == "basic"; });
  if (!made.empty() && !has_basic) made.push_back({"basic", tensorpipe::channel::basic::create()});
  return made;
}

std::vector<BackendProbe> probeTensorPipeTransports() { return probe(transportBackendKinds()); }

std::vector<BackendProbe> probeTensorPipeChannels() { return probe(channelBackendKinds()); }

}  // namespace torchrpc
