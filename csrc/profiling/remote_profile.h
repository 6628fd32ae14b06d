#pragma once

// torch's legacy profiler over several workers: a callee records events while it serves a request, for the profile of
// the caller and for a profile of all requests that this process serves.
// Threads: the thread that serves a request makes and detaches its Recording; the rest is for any thread.

#include <torch/csrc/autograd/profiler_legacy.h>

#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/sync/fork_safe_mutex.h"

namespace torchrpc {

using torch::autograd::profiler::LegacyEvent;
using torch::autograd::profiler::thread_event_lists;
using torch::profiler::impl::ProfilerConfig;

/// Records the events of one thread from the constructor to detachThread(), and of other threads to which that thread
/// passes its profile meanwhile.
class Recording {
 public:
  explicit Recording(const ProfilerConfig& config);
  /// Ends the recording of the thread. Called on that thread.
  void detachThread();
  /// Removes and returns the events recorded so far.
  thread_event_lists take() const;

 private:
  const at::RecordFunctionTLS callbacks_;  ///< of the thread before the recording
  std::shared_ptr<c10::ThreadLocalDebugInfo> profile_;
};

/// Encodes and decodes the parts of a profile. It has CPU times only.
std::string encodeConfig(const ProfilerConfig& config);
ProfilerConfig decodeConfig(std::string_view bytes);
std::string encodeEvents(const thread_event_lists& events);
/// Adds the events in `bytes` to the legacy profile `to`. The name of the call and a mark are prefixed to each name.
/// Throws Error(kProtocol).
void addRemoteEvents(
    const std::shared_ptr<c10::ThreadLocalDebugInfo>& to, const std::string& call, std::string_view bytes);

// --- profiles of all requests that the process serves ---

/// A profile of all requests that the process serves. Profiles nest: the requests in an inner profile belong to the
/// outer ones, too.
class ServerProfile {
 public:
  /// Begins a profile, inside the one that is being recorded.
  static void enable(const ProfilerConfig& config);
  /// Ends the innermost profile and returns its events, one list for each request. Throws Error(kInvalidArgument) if
  /// there is none.
  static std::vector<thread_event_lists> disable();
  /// The innermost profile; null if there is none.
  static std::shared_ptr<ServerProfile> current();

  ServerProfile(ProfilerConfig config, std::shared_ptr<ServerProfile> outer);
  const ProfilerConfig& config() const { return config_; }
  void add(const thread_event_lists& events);

 private:
  /// The state of the process.
  struct State {
    std::atomic<bool> any{false};
    ForkSafeMutex mutex;
    std::shared_ptr<ServerProfile> innermost TORCHRPC_GUARDED_BY(mutex);
  };
  static State& state_;

  const ProfilerConfig config_;
  const std::shared_ptr<ServerProfile> outer_;
  std::vector<thread_event_lists> requests_ TORCHRPC_GUARDED_BY(state_.mutex);
};

}  // namespace torchrpc
