// UCX has two side effects on the process that loads it, unless the environment disables them. It installs handlers of
// SIGSEGV and other signals, in place of Python's faulthandler or the program's own: loadUcx() removes them. And it
// prints its log lines to the program's standard output: logLine() redirects them to our log.

#include "transport/ucx/libucp.h"

#include <cstdarg>
#include <cstdio>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/os/libraries.h"

namespace torchrpc::ucx {

namespace {

constexpr int kUcxAbi = 0;
constexpr size_t kMaxLogBytes = 1024;

// The values of log levels and the results of a log handler, from <ucs/debug/log_def.h>, which is not a public header.
enum UcsLogLevel : int { kFatal, kError, kWarning };
enum LogResult : int { kStop, kContinue };
using LogHandler =
    LogResult (*)(const char* file, unsigned line, const char* function, int level, const void*, const char*, va_list);

LogResult logLine(
    const char* /*file*/, unsigned /*line*/, const char* /*function*/, int level, const void* /*component*/,
    const char* format, va_list arguments) {
  if (level == kFatal) return kContinue;  // UCX prints the line and then ends the process
  char text[kMaxLogBytes];
  std::vsnprintf(text, sizeof(text), format, arguments);
  // onClosed reports failures of a peer; these lines have the details.
  log(level <= kWarning ? LogLevel::kInfo : LogLevel::kDebug, std::string("UCX: ") + text);
  return kStop;
}

struct LoadedUcx {
  std::optional<Libucp> library;
  std::string lacks;  ///< empty if there is a library
};

LoadedUcx loadUcx() {
  os::SharedLibrary ucp("ucp", kUcxAbi), ucs("ucs", kUcxAbi);
  Libucp library{};
#define FIND(FILE, NAME) FILE.find(#NAME, library.NAME)
  FIND(ucp, ucp_am_data_release);
  FIND(ucp, ucp_am_recv_data_nbx);
  FIND(ucp, ucp_am_send_nbx);
  FIND(ucp, ucp_cleanup);
  FIND(ucp, ucp_config_modify);
  FIND(ucp, ucp_config_read);
  FIND(ucp, ucp_config_release);
  FIND(ucp, ucp_conn_request_query);
  FIND(ucp, ucp_ep_close_nbx);
  FIND(ucp, ucp_ep_create);
  FIND(ucp, ucp_get_version);
  FIND(ucp, ucp_get_version_string);
  FIND(ucp, ucp_init_version);
  FIND(ucp, ucp_listener_create);
  FIND(ucp, ucp_listener_destroy);
  FIND(ucp, ucp_listener_query);
  FIND(ucp, ucp_request_free);
  FIND(ucp, ucp_worker_arm);
  FIND(ucp, ucp_worker_create);
  FIND(ucp, ucp_worker_destroy);
  FIND(ucp, ucp_worker_get_efd);
  FIND(ucp, ucp_worker_progress);
  FIND(ucp, ucp_worker_set_am_recv_handler);
  FIND(ucp, ucp_worker_signal);
  FIND(ucs, ucs_async_add_timer);
  FIND(ucs, ucs_async_remove_handler);
  FIND(ucs, ucs_status_string);
#undef FIND
  void (*push_log_handler)(LogHandler) = nullptr;
  ucs.find("ucs_log_push_handler", push_log_handler);
  void (*disable_signals)() = nullptr;
  ucs.find("ucs_debug_disable_signals", disable_signals);

  const auto needs = "the transport 'ucx' needs UCX " + std::to_string(kUcxMajor) + "." + std::to_string(kUcxMinor) +
      " or a later 1.x: ";
  const std::string remedy =
      ". Install it with `pip install torchrpc[ucx]` (the package libucx-cu12; with CUDA 13, libucx-cu13) or as a "
      "package of the system (Debian 13: libucx0), or choose another transport";
  std::string missing;
  for (const auto& [name, is_found] : {std::pair("ucp", ucp.isFound()), std::pair("ucs", ucs.isFound())}) {
    if (!is_found) missing += (missing.empty() ? "" : " and no ") + os::libraryFile(name, kUcxAbi);
  }
  if (!missing.empty()) return {std::nullopt, needs + "this machine has no " + missing + remedy};
  unsigned major = 0, minor = 0, release = 0;
  if (library.ucp_get_version != nullptr) library.ucp_get_version(&major, &minor, &release);
  const bool is_old = major != kUcxMajor || minor < kUcxMinor;
  if (is_old || !ucp.isComplete() || !ucs.isComplete()) {
    return {
        std::nullopt,
        needs + "this machine has " + std::to_string(major) + "." + std::to_string(minor) +
            (is_old ? "" : ", without functions that are used") + remedy};
  }
  disable_signals();
  push_log_handler(&logLine);
  return {library, {}};
}

const LoadedUcx& loadedUcx() {
  static const auto loaded = loadUcx();
  return loaded;
}

}  // namespace

const std::string& Libucp::lacks() { return loadedUcx().lacks; }

const Libucp& Libucp::get() {
  const auto& loaded = loadedUcx();
  if (!loaded.library) throwInvalidArgument(loaded.lacks);
  return *loaded.library;
}

}  // namespace torchrpc::ucx
