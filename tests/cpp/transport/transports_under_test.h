#pragma once

// The transports on which the tests of the contract run.

#include "testing/faulty_transport.h"
#include "testing/loopback_transport.h"
#include "testing/manual_timer.h"
#include "transport/certificates.h"
#include "transport/native/auth/tls_credentials.h"
#include "transport/native/transport.h"
#ifndef TORCHRPC_WITHOUT_TENSORPIPE
#include "transport/tensorpipe/transport.h"
#endif
#ifndef TORCHRPC_WITHOUT_UCX
#include "transport/ucx/transport.h"
#endif

namespace torchrpc::test {

struct Loopback {
  std::shared_ptr<LoopbackNetwork> network = makeLoopbackNetwork();
  std::unique_ptr<Transport> make(Limits limits) { return makeLoopbackTransport(network, limits); }
};

#ifndef TORCHRPC_WITHOUT_TENSORPIPE
inline std::unique_ptr<Transport> makeTensorPipe(
    std::vector<std::string> transports, std::optional<std::vector<std::string>> channels, Limits limits = {}) {
  TensorPipeOptions options;
  options.transports = std::move(transports);
  options.channels = std::move(channels);
  options.host = "127.0.0.1";
  options.node_name = "tester";
  options.limits = limits;
  return makeTensorPipeTransport(options);
}

struct TensorPipeUv {
  std::unique_ptr<Transport> make(Limits limits) { return makeTensorPipe({"uv"}, {}, limits); }
};

struct TensorPipeShm {
  std::unique_ptr<Transport> make(Limits limits) { return makeTensorPipe({"shm", "uv"}, {}, limits); }
};

#define TORCHRPC_TENSORPIPE_KINDS , TensorPipeUv, TensorPipeShm
#else
#define TORCHRPC_TENSORPIPE_KINDS
#endif

#ifndef TORCHRPC_WITHOUT_UCX
inline std::unique_ptr<Transport> makeUcx(Limits limits = {}) {
  return ucx::makeUcxTransport({.host = "127.0.0.1", .rendezvous_host = "", .ports = {}, .limits = limits});
}

struct Ucx {
  static std::string lacks() { return ucx::whatUcxLacks(); }
  std::unique_ptr<Transport> make(Limits limits) { return makeUcx(limits); }
};

#define TORCHRPC_UCX_KINDS , Ucx
#else
#define TORCHRPC_UCX_KINDS
#endif

inline std::unique_ptr<Transport> makeNative(native::Options options, Limits limits) {
  options.host = "127.0.0.1";
  if (options.node_name.empty()) options.node_name = "bob";
  options.limits = limits;
  return native::makeTransport(std::move(options));
}

struct NativeTcp {
  std::unique_ptr<Transport> make(Limits limits) { return makeNative({.unix_sockets = false}, limits); }
};

/// Of a group with a secret, over TCP, encrypted.
inline native::Options encrypted(bool aes = true) {
  return {.secret = "a secret of twenty-six bytes", .encrypt = true, .aes = aes, .unix_sockets = false};
}

struct NativeEncrypted {
  std::unique_ptr<Transport> make(Limits limits) { return makeNative(encrypted(), limits); }
};

struct NativeChaCha {
  std::unique_ptr<Transport> make(Limits limits) { return makeNative(encrypted(/*aes=*/false), limits); }
};

/// Without a secret; workers have certificates. Over TCP, encrypted; over Unix sockets, for the handshake alone.
inline native::Options withTls(bool unix_sockets) {
  // The files stay as they are.
  static const auto credentials =
      std::make_shared<const native::TlsCredentials>(certificateOf("bob"), std::chrono::hours(1));
  return {.tls = credentials, .unix_sockets = unix_sockets};
}

struct NativeTls {
  std::unique_ptr<Transport> make(Limits limits) { return makeNative(withTls(/*unix_sockets=*/false), limits); }
};

struct NativeTlsShm {
  std::unique_ptr<Transport> make(Limits limits) { return makeNative(withTls(/*unix_sockets=*/true), limits); }
};

struct NativeUnix {
  std::unique_ptr<Transport> make(Limits limits) { return makeNative({.shared_memory = false}, limits); }
};

struct NativeShm {
  std::unique_ptr<Transport> make(Limits limits) { return makeNative({}, limits); }
};

struct NativeRings {
  std::unique_ptr<Transport> make(Limits limits) { return makeNative({.slabs = false}, limits); }
};

struct Faultless {
  std::unique_ptr<ManualTimer> timer = std::make_unique<ManualTimer>();
  Loopback inner;
  std::unique_ptr<Transport> make(Limits limits) {
    return makeFaultyTransport(inner.make(limits), [](auto&, auto&) { return Fault{}; }, *timer);
  }
};

/// Whether this machine has what the transport needs. If not, says so.
template <typename TKind>
bool canRun() {
  if constexpr (requires { TKind::lacks(); }) {
    if (!TKind::lacks().empty()) {
      WARN("skipped: " << TKind::lacks());
      return false;
    }
  }
  return true;
}

/// A test that runs on each of them.
#define CONTRACT(name) CONTRACT_NAMED(name, INTERNAL_CATCH_UNIQUE_NAME(contract_test_))
#define CONTRACT_NAMED(name, function)                                                                             \
  template <typename TestType>                                                                                     \
  void function();                                                                                                 \
  TEMPLATE_TEST_CASE(                                                                                              \
      name, "[contract]", Loopback, NativeTcp, NativeEncrypted, NativeChaCha, NativeTls, NativeTlsShm, NativeUnix, \
      NativeShm, NativeRings, Faultless TORCHRPC_TENSORPIPE_KINDS TORCHRPC_UCX_KINDS) {                            \
    if (canRun<TestType>()) function<TestType>();                                                                  \
  }                                                                                                                \
  template <typename TestType>                                                                                     \
  void function()

}  // namespace torchrpc::test
